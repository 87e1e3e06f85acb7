"""The page speaks of the row that was chosen, whatever its status: sentence, card, tips and titles."""

import re

import pytest

import cacheprobe as cp
from cacheprobe.views.dashboard.reader import RECORDED
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.tabs import lens
from tests.tiny import PROMPTS, SMALL, loaded

STATUSES = ("committed", "superseded", "rolled_back", "given_up")


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    settings = dict(max_kv_tokens=110, window=8, prefill_chunk=16, pad_prefill=True)
    return cp.run(loaded(), PROMPTS, **{**SMALL, **settings}, drafter=cp.drafters.EarlyExit(layer=0))


@pytest.fixture(scope="module")
def run_list(trace: cp.Trace, tmp_path_factory: pytest.TempPathFactory) -> RunList:
    return RunList.of([trace.save(tmp_path_factory.mktemp("chosen") / "run")])


def chosen(trace: cp.Trace, status: str) -> tuple[dict, cp.Trace]:
    """A row of this status at a position whose canonical row predicts another token, where there is one."""
    table = cp.analysis.lens_readings(trace, include_rolled_back=True)
    last = table.sort_values("layer").drop_duplicates("row", keep="last")
    own = last[(last.status == "committed")].set_index(["request_id", "position"]).token
    mine = last[last.status == status]
    other = [own.get((r.request_id, r.position)) != r.token for r in mine.itertuples()]
    row = next(mine[other].itertuples()) if status != "committed" else next(mine.itertuples())
    ask = dict(run=0, request=row.request_id, position=row.position, row=row.row, site="S", lens=RECORDED)
    return ask, row


@pytest.mark.parametrize("status", STATUSES)
def test_sentence_and_card_are_of_the_chosen_row(trace: cp.Trace, run_list: RunList, status: str) -> None:
    ask, row = chosen(trace, status)
    where = f"eads position {row.position}, predicts {row.position + 1}"
    sentence, shown = lens.RowCard(run_list, ask).sentence(), lens.RowCard(run_list, ask).draw()
    assert where in sentence and f"<dd>position {row.position + 1}</dd>" in shown
    assert f"{status.replace('_', ' ')}, {row.phase} in step {row.step}" in shown
    fed = trace.rows().set_index("row").token[row.row].replace("<", "&lt;").replace(">", "&gt;")
    top = row.token.replace("<", "&lt;").replace(">", "&gt;")
    if status in ("rolled_back", "given_up"):
        why = "a rejected" if status == "rolled_back" else "a draft that was given up"
        assert f"fed “{fed}”, {why}" in sentence and f"had “{top}” first" in sentence
        assert f"This row was fed {why}" in shown and f"it predicted “{top}”" in shown
        assert "next token" not in shown and 'class="right"' not in shown  # what was committed is no answer to it
        assert "was committed" not in sentence
    else:
        assert "was fed" not in shown and "committed" in sentence
    assert (f"{status.replace('_', ' ')} row, step {row.step}" in sentence.lower()) == (status != "committed")


def test_a_row_that_was_not_chosen_is_the_canonical_one(trace: cp.Trace, run_list: RunList) -> None:
    ask, _ = chosen(trace, "rolled_back")
    ask["row"] = None
    assert "committed, verify in step" in lens.RowCard(run_list, ask).draw()
    assert "Reads position" in lens.RowCard(run_list, ask).sentence()


def test_the_page_and_the_report_have_one_statistic(trace: cp.Trace, run_list: RunList) -> None:
    """The page counted the columns that fitted on it, the report all of them."""
    said = cp.plots.lens_grid(trace.hypotheses(), 0).finding
    ask = dict(run=0, request=0, site="S", lens=RECORDED, colour="logprob", rows="committed")
    first = len(PROMPTS[0]) - 1
    for width, position in ((200, first), (200, first + 12), (1200, first)):
        assert f"<h2>{said}</h2>" in lens.LensGridPage(run_list, {**ask, "width": width, "position": position}).draw()
    part = cp.plots.lens_grid(trace.hypotheses(), 0, positions=range(first, first + 3))
    assert part.finding == said == re.sub("<[^>]*>", "", said)


def test_a_tip_of_a_row_that_was_fed_a_rejected_token_compares_nothing(trace: cp.Trace) -> None:
    table = trace.hypotheses(include_rolled_back=True)
    lost = table[(table.request_id == 0) & (table.status == "rolled_back")]
    picture = str(cp.plots.lens_grid(table, 0, include="all"))
    for row in lost.row.unique():
        column = picture.split(f'data-row="{row}"')[1].split('<g class="column"')[0]
        assert "no committed token can be compared" in column and "committed &lt;" not in column
