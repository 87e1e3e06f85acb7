"""The page speaks of the row that was chosen, whatever its status: sentence, card, tips and titles; and, in a browser,
of the row that was clicked."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from playwright.sync_api import Browser, Page

import cacheprobe as cp
from cacheprobe.views.dashboard.reader import RECORDED
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.tabs import lens
from tests.dash_page import answered, opened, served
from tests.models.heads.tiny_head import TinyHeadDrafter
from tests.tiny import PROMPTS, SMALL, loaded

OUTCOMES = {"accepted": "accepted", "rejected": "rolled back", "unverified": "abandoned"}
"""What the page says of the draft of a superseded row, by its verdict.

Such a row was fed a committed token, so a draft that was never judged was abandoned."""
STATUSES = ("committed", "superseded", "rolled_back", "abandoned")


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    """A run in which requests lose their cache rows while drafts are open: it has rows of all four kinds."""
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
    if status in ("rolled_back", "abandoned"):
        why = "a rejected" if status == "rolled_back" else "a draft that was abandoned"
        assert f"fed “{fed}”, {why}" in sentence and f"had “{top}” first" in sentence
        assert f"This row was fed {why}" in shown and f"it predicted “{top}”" in shown
        assert "next token" not in shown and 'class="right"' not in shown  # what was committed is no answer to it
        assert "was committed" not in sentence
    else:
        assert "was fed" not in shown and "committed" in sentence
    assert (f"{status.replace('_', ' ')} row, step {row.step}" in sentence.lower()) == (status != "committed")


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


def last_readings(trace: cp.Trace) -> pd.DataFrame:
    """Of each row the reading of its last layer, beside the first choice of the committed row at its position."""
    readings = cp.analysis.lens_readings(trace, include_rolled_back=True)
    table, keys = readings.sort_values("layer").drop_duplicates("row", keep="last"), ["request_id", "position"]
    canonical = table[table.status == "committed"][[*keys, "token", "row"]]
    return table.merge(canonical, on=keys, how="left", suffixes=("", "_canonical"))


@pytest.mark.parametrize("verdict", [*OUTCOMES])
def test_a_superseded_row_is_spoken_of_with_its_own_draft(trace: cp.Trace, run_list: RunList, verdict: str) -> None:
    """A draft that was abandoned, too: the page told of the one that was drafted there later."""
    table = last_readings(trace)
    row = next(table[(table.status == "superseded") & (table.verdict == verdict)].itertuples())
    ask = dict(run=0, request=row.request_id, position=row.position, row=row.row, site="S", lens=RECORDED)
    html = (lens.RowCard(run_list, ask).sentence(), lens.RowCard(run_list, ask).draw().replace("</div>", "\n"))
    said, card = (unescape(re.sub("<[^>]*>", "", text)) for text in html)
    where = f"Superseded row, step {row.step}, reads position {row.position}, predicts {row.position + 1}: "
    draft = f"“{row.drafted_token}”, drafted in step {row.step} from layer 0, was {OUTCOMES[verdict]} in step"
    assert said.startswith(f"{where}{draft}")
    assert f"superseded, decode in step {row.step}" in card and f"position {row.position + 1}" in card
    [line] = [line for line in card.splitlines() if "drafted in step" in line]
    assert f"{row.drafted_token} drafted in step {row.step}" in line and OUTCOMES[verdict] in line


def clicked(page: Page, row: Any) -> tuple[str, str]:
    """The sentence and the card after a click on the lowest layer of a row's column."""
    answered(page, "grid", request=row.request_id)
    page.locator(f"#grid-view .column[data-row='{row.row}'] .pick[data-layer='0']").click()
    asked = dict(request=row.request_id, position=row.position, row=row.row)
    return answered(page, "insight", **asked), answered(page, "card", **asked)


def test_a_clicked_committed_row_is_spoken_of_after_another_was(
    browser: Browser, run_list: RunList, trace: cp.Trace
) -> None:
    table = last_readings(trace)
    other = next(table[(table.status == "abandoned") & table.row_canonical.notna()].itertuples())
    row = next(table[table.row == other.row_canonical].itertuples())
    place = f"?run=0&request={row.request_id}&position={row.position}&rows=all"
    with served(run_list) as address, opened(browser, address + place) as page:
        assert "abandoned row" in clicked(page, other)[0].lower()
        said, card = clicked(page, row)
    start = f"Reads position {row.position}, predicts {row.position + 1}: “{row.drafted_token}”, drafted in"
    assert said.startswith(start) and f"“{row.committed_token}” was committed" in card
    assert f"{OUTCOMES[row.verdict]} in step {row.step}" in said and f"“{row.committed_token}”" in said
    assert f"committed, verify in step {row.step}" in card


def test_the_card_shows_what_the_draft_head_read_beside_the_layers(tmp_path: Path) -> None:
    drafted = cp.run(loaded(), PROMPTS, **{**SMALL, "draft_length": 3}, drafter=TinyHeadDrafter())
    pages = RunList.of([drafted.save(tmp_path / "run")])
    line = drafted.rejected().iloc[0]
    place = dict(
        run=0, request=int(line.request_id), position=int(line.position) - 1, row=None, site="S", lens=RECORDED
    )
    shown = unescape(lens.RowCard(pages, place).draw())
    read = drafted.hypotheses(include_head=True)
    read = read[(read.phase == "draft") & (read.request_id == line.request_id) & (read.position == line.position - 1)]
    own = read[(read.step == line.drafted_step) & (read.layer == read.layer.max())].iloc[0]
    assert "What the draft head read here" in shown
    assert f"<th title='step {own.step}, token {own.chain_step} of its draft, head layer 2, rejected'>" in shown
    framed = re.findall(r'<td class="right"[^>]*title="step (\d+), token[^"]*">([^<>]*<\d+>)</td><', shown)
    assert (str(own.step), line.drafted_token) in framed
    assert shown.count(f"{own.step}·{own.chain_step} ✗</th>") == 3  # the head's layers
    assert shown.index("What the draft head read here") < shown.index("Most likely tokens by layer")
