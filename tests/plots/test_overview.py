"""The overview of a run without a browser: which tokens the table holds, in which order, and what it says."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.views.dashboard.questions import answered
from cacheprobe.views.dashboard.run_list import Follower, RunList
from cacheprobe.views.dashboard.tabs.overview import LINES_A_PAGE, RunSummary, TokenList
from cacheprobe.views.overview import selection
from cacheprobe.views.overview.figures import acceptance_by_request, overview_picture
from cacheprobe.views.overview.selection import COLUMNS, RANGES, TokenSelection, selected_tokens
from cacheprobe.views.overview.table import token_list
from tests.dashboard.growing_run import begun, go_on, part_each_round
from tests.models.heads.tiny_head import TinyHeadDrafter
from tests.plots.test_views import hostile
from tests.tiny import PROMPTS, SMALL, loaded

SETTINGS = {**SMALL, "drafter": cp.drafters.EarlyExit(layer=1), "capture": "Z"}
PLACE = r"data-request='(\d+)' data-step='(\d+)' data-position='(\d+)'"


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    sampling = cp.SamplingParams(temperature=1.3, max_new_tokens=20)
    settings = {name: value for name, value in SETTINGS.items() if name != "max_new_tokens"}
    return cp.run(loaded(), PROMPTS, **settings, sampling=sampling)


@pytest.fixture(scope="module")
def stored(trace: cp.Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trace.save(tmp_path_factory.mktemp("overview") / "run")


@pytest.fixture(scope="module")
def table(trace: cp.Trace) -> pd.DataFrame:
    return cp.analysis.token_table(trace, grouped=False)


def listed(run_list: RunList, **question: str) -> list[tuple[int, int, int]]:
    """The lines of all pages, as the page's script gets their places."""
    lines: list[tuple[int, int, int]] = []
    for page in range(20):
        html = TokenList(run_list, {"run": 0, **question, "page": str(page)}).draw()
        found = re.findall(f"<tr data-intent='draft' tabindex='-1' {PLACE}", html)
        lines += [(int(request), int(step), int(position)) for request, step, position in found]
        if len(found) < LINES_A_PAGE or re.search("title='next page'[^>]* disabled>", html):
            return lines
    raise AssertionError("more pages than a test can have")


def places(table: pd.DataFrame) -> list[tuple[int, int, int]]:
    return list(zip(table.request_id.tolist(), table.step.tolist(), (table.position - 1).tolist(), strict=True))


FILTERS: list[tuple[dict[str, str], Callable[[pd.DataFrame], "pd.Series[bool]"]]] = [
    ({}, lambda t: t.request_id >= 0),
    ({"verdict": "rejected"}, lambda t: t.verdict == "rejected"),
    ({"requests": "1, 3-4"}, lambda t: t.request_id.isin([1, 3, 4])),
    ({"requests": "77"}, lambda t: t.request_id == 77),
    ({"asked": "drafter"}, lambda t: t.first_at_drafter_layer.fillna(False)),
    ({"asked": "otherwise"}, lambda t: (t.first_at_drafter_layer == False).fillna(False)),  # noqa: E712
    ({"asked": "undecided"}, lambda t: t.first_at_layer.isna() & t.prediction_depth.notna()),
    ({"asked": "late"}, lambda t: t.first_at_layer == 2),
    ({"depth": "2:"}, lambda t: t.prediction_depth >= 2),
    ({"first": ":0"}, lambda t: t.first_at_layer <= 0),
    ({"disagreement": "0.1:0.2"}, lambda t: t.disagreement.between(0.1, 0.2)),
    ({"entropy": "3.4:"}, lambda t: t.entropy_nats >= 3.4),
    ({"margin": ":0"}, lambda t: t.margin_nats <= 0),
    ({"logprob": ":-3", "verdict": "recovered"}, lambda t: (t.logprob_nats <= -3) & (t.verdict == "recovered")),
    (
        {"find": "<1?5>", "way": "pattern"},
        lambda t: t.committed_token.isin(["<5>", "<15>"]) | t.drafted_token.isin(["<5>", "<15>"]),
    ),
]
"""Part of a question, and the lines of the ungrouped table that it lets through."""


@pytest.mark.parametrize(("question", "fits"), FILTERS, ids=lambda part: str(part) if isinstance(part, dict) else "")
def test_the_table_holds_what_is_asked_for(
    table: pd.DataFrame, stored: Path, question: dict[str, str], fits: Callable[[pd.DataFrame], pd.Series]
) -> None:
    run_list, expected = RunList.of([stored]), table[fits(table).fillna(False).to_numpy(dtype=bool)]
    assert listed(run_list, **question, each="1") == places(expected)
    grouped = cp.analysis.group_rejections(expected)
    assert listed(run_list, **question) == places(grouped)
    html = TokenList(run_list, {"run": 0, **question}).draw()
    total = len(cp.analysis.group_rejections(table))
    assert f">{len(grouped):,} of {total:,} lines" in html or (
        not question and f">{total:,} lines, 1 to 50 shown" in html
    )
    assert f"1 to {LINES_A_PAGE} shown" in html or len(grouped) <= LINES_A_PAGE
    assert (len(expected) == 0) == ("No token is found" in html)
    if "requests" not in question or question["requests"] != "77":
        assert 0 < len(expected) <= len(table)


@pytest.mark.parametrize("sort", [f"{sign}{name}" for name in COLUMNS for sign in ("", "-")])
def test_the_table_is_sorted_by_every_column(table: pd.DataFrame, stored: Path, sort: str) -> None:
    run_list, grouped = RunList.of([stored]), cp.analysis.group_rejections(table)
    values = grouped[COLUMNS[sort.removeprefix("-")][1]].tolist()
    keys = [str(v).casefold() if isinstance(v, str) else v for v in values]
    known = sorted(
        (i for i, v in enumerate(values) if pd.notna(v)), key=lambda i: keys[i], reverse=sort.startswith("-")
    )
    order = [*known, *(i for i, v in enumerate(values) if pd.isna(v))]
    assert listed(run_list, sort=sort) == places(grouped.iloc[order])
    assert TokenList(run_list, {"run": 0, "sort": sort}).draw().count("aria-sort=") == 1


WRONG = [
    ({"verdict": "good"}, "verdict is accepted or"), ({"asked": "x"}, "asked is drafter or"),
    ({"requests": "1;2"}, "such as 3, 7, 10-20"), ({"entropy": "3"}, "entropy is LEAST:MOST"),
    ({"margin": "a:b"}, "margin is LEAST:MOST"), ({"sort": "tokens"}, "sorted by verdict"),
    ({"find": "x" * 201}, "at most 200 letters"), ({"find": "(", "way": "pattern"}, "missing \\)"),
    ({"find": "(?=a)", "way": "pattern"}, "no lookaround"),
    ({"find": "((a{999}){999}){9}", "way": "pattern"}, "repetition"),
]  # fmt: skip


@pytest.mark.parametrize("sort", ["margin", "-margin", "entropy", "-disagreement"])
def test_the_extreme_of_equal_rejections_stands_for_them(table: pd.DataFrame, sort: str) -> None:
    column = {"margin": "margin_nats", "entropy": "entropy_nats"}.get(sort.removeprefix("-"), "disagreement")
    equal = table[table.verdict == "rejected"].assign(drafted_token_id=3, committed_token_id=5)
    assert equal[column].nunique() > 3
    (line,) = selected_tokens(equal, TokenSelection(sort=sort), {}).itertuples()
    assert getattr(line, column) == (equal[column].max() if sort.startswith("-") else equal[column].min())
    assert line.times == len(equal)


@pytest.mark.parametrize(("question", "says"), WRONG)
def test_a_wrong_search_is_said_beside_the_boxes(stored: Path, question: dict[str, str], says: str) -> None:
    html = TokenList(RunList.of([stored]), {"run": 0, **question}).draw()
    assert re.search(says, html) and "class='refused'" in html and "tokens-search" in html and "<tr data" not in html


@pytest.mark.parametrize("page", ["-1", "x", "1" * 10, 3])
def test_a_page_that_is_no_number_is_refused(stored: Path, page: object) -> None:
    answer = answered(lambda question: TokenList(RunList.of([stored]), question).draw(), {"run": 0, "page": page})
    assert "page is a whole number" in answer["error"]


def test_no_pattern_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own expressions need hours for the first of these, and let nobody else be served meanwhile."""
    lines = pd.DataFrame({"committed_token": ["a" * 200 + "!"] * 500, "drafted_token": ["b"] * 500})
    for pattern in ("(a+)+$", "(a|aa)+$", "(.*)*x", "(a?){60}a{60}$"):
        began = time.process_time()
        assert not selection._is_match(lines, pattern).any()
        assert time.process_time() - began < 2
    assert selection._is_match(lines, "^a+!$").all()


def test_prompts_are_searched_and_named(trace: cp.Trace, stored: Path) -> None:
    run_list, texts = RunList.of([stored]), trace.token_texts
    wanted = "".join(texts[i] for i in PROMPTS[4][2:5])
    html = TokenList(run_list, {"run": 0, "find": wanted}).draw()
    assert "stands in the prompts of 1 request:" in html
    assert (4, len(PROMPTS[4]) - 1) in [(r, p) for r, _, p in listed(run_list, find=wanted)]
    none = TokenList(run_list, {"run": 0, "find": "<b>nothing"}).draw()
    assert "No token is found" in none and "<b>" not in none


def test_lines_without_a_number_are_counted(tmp_path: Path) -> None:
    """The newest draft of a request that ended was rejected, and nothing was committed in its place."""
    settings = {**SETTINGS, "capture": cp.CaptureConfig("Z", positions=range(14))}
    trace = cp.run(loaded(), PROMPTS, **settings)
    trace.save(tmp_path / "run")
    table = cp.analysis.token_table(trace, grouped=False)
    unknown = int(table.entropy_nats.isna().sum())
    html = TokenList(RunList.of([tmp_path / "run"]), {"run": 0, "entropy": "0:"}).draw()
    assert 0 < unknown < len(table) and f"Not in the list: {unknown} lines without a number" in html


def test_the_code_makes_the_same_table(stored: Path) -> None:
    for question in ({"find": "<5", "sort": "-committed"}, {"find": "<5", "way": "pattern", "requests": "0, 2-4"},
                     {"asked": "drafter", "entropy": "3:", "sort": "times", "each": "1"}):  # fmt: skip
        view = TokenList(RunList.of([stored]), {"run": 0, **question})
        scope: dict[str, pd.DataFrame] = {}
        exec("\n".join(view.code()), scope)
        assert len(view.table()) > 1
        pd.testing.assert_frame_equal(scope["table"].reset_index(drop=True), view.table().reset_index(drop=True))


def test_the_figures_count_what_the_events_say(trace: cp.Trace, stored: Path) -> None:
    html, events = RunSummary(RunList.of([stored]), {"run": 0}).draw(), trace.events()
    judged = events[events.num_accepted.notna()]
    drafted, accepted = judged.draft_token_ids.map(len), judged.num_accepted.astype(int)
    for step in (1, 2, 3):
        says = f"draft token {step}: {(accepted >= step).sum()} of {(drafted >= step).sum()} accepted"
        assert says in html
    for request, own in judged.groupby("request_id"):
        count, kept = own.draft_token_ids.map(len).sum(), own.num_accepted.sum()
        assert f"request {request}: {kept} of {count} draft tokens accepted" in html
        assert acceptance_by_request(events).share[request] == pytest.approx(kept / count)
    nats = [(value, r.request_id, place + r.num_prompt_tokens) for r in trace.requests
            for place, value in enumerate(trace.logprobs(r.request_id))]  # fmt: skip
    shown = re.findall(f"{PLACE}.*?request (\\d+), position (\\d+)", html[html.index("Most surprising") :])
    assert [(int(r), int(p)) for *_, r, p in shown] == [(r, p) for _, r, p in sorted(nats)[:8]]
    assert all(int(at) + 1 == int(position) and one == other for one, _, at, other, position in shown)


def test_what_a_run_lacks_is_said(tmp_path: Path) -> None:
    bare = {name: value for name, value in SETTINGS.items() if name not in ("capture", "drafter")}
    cp.run(loaded(), PROMPTS[:1], **bare, capture=None).save(tmp_path / "bare")
    run_list = RunList.of([tmp_path / "bare"])
    summary, tokens = RunSummary(run_list, {"run": 0}).draw(), TokenList(run_list, {"run": 0}).draw()
    assert summary.count("This run has no lens readings") == 2 and "No draft token was verified" in summary
    assert "recorded no lens readings (Z)" in tokens and "entropy, nats, least" not in tokens
    assert len(listed(run_list)) == 20 and "log-probability, nats, least" in tokens


def test_a_drafter_without_a_layer_is_said(tmp_path: Path) -> None:
    trace = cp.run(loaded(), PROMPTS, **{**SETTINGS, "drafter": TinyHeadDrafter(), "draft_length": 3})
    trace.save(tmp_path / "run")
    run_list, table = RunList.of([tmp_path / "run"]), cp.analysis.token_table(trace)
    assert "none has “drafter’s layer”" in TokenList(run_list, {"run": 0}).draw()
    assert listed(run_list, asked="drafter") == listed(run_list, asked="otherwise") == []
    assert table.chain_step.max() == 3 and "drafts end at layer" not in RunSummary(run_list, {"run": 0}).draw()


def test_a_growing_run_has_what_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part_each_round(monkeypatch)
    stream = begun(tmp_path / "run")
    go_on(stream, tmp_path / "run", 1)
    run_list = RunList.of([tmp_path / "run"])
    before = listed(run_list)
    go_on(stream, tmp_path / "run", 3)
    follower = run_list.follower(0)
    assert isinstance(follower, Follower)
    follower.look(at_once=True)
    assert len(listed(run_list)) > len(before)
    assert "rejected drafts" in RunSummary(run_list, {"run": 0}).draw()
    list(stream)


def test_texts_of_a_run_are_escaped(trace: cp.Trace, tmp_path: Path) -> None:
    attacked = hostile(trace)
    attacked.save(tmp_path / "run")
    run_list = RunList.of([tmp_path / "run"])
    pages = [view(run_list, {"run": 0}).draw() for view in (RunSummary, TokenList)]
    pages += [cp.plots.run_overview(attacked), token_list(cp.analysis.token_table(attacked), 20)]
    for html in pages:
        assert "&lt;" in html and "<script" not in html.lower() and "<img" not in html.lower()
    assert overview_picture(run_list.tables(0).tokens, attacked.events()).body.count("<svg") >= 4


def test_a_report_says_how_many_lines_it_shows(table: pd.DataFrame) -> None:
    assert f"3 of {len(table):,} lines" in token_list(table, 3) and token_list(table, 3).count("<tr>") == 4
    assert {*RANGES} < {*COLUMNS} and TokenSelection.of({}) == TokenSelection()
