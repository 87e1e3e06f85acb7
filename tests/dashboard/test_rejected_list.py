"""The dashboard's list of rejected drafts, without a browser: lines, order, search, and the way to the next one."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.views.dashboard import facts
from cacheprobe.views.dashboard.questions import CannotShow, PageQuestion
from cacheprobe.views.dashboard.run_list import Follower, RunList
from cacheprobe.views.dashboard.tabs import rejected
from cacheprobe.views.rejected import COLUMNS, LINES_A_PAGE
from tests.dashboard.growing_run import begun, go_on, part_each_round
from tests.tiny import PROMPTS, SMALL, loaded

EARLY = cp.drafters.EarlyExit(layer=1)


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, drafter=EARLY, capture="SZ")


@pytest.fixture(scope="module")
def stored(trace: cp.Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trace.save(tmp_path_factory.mktemp("rejected") / "run")


def steps_shown(html: str) -> list[tuple[int, int, int]]:
    found = re.findall(r"data-request='(\d+)' data-step='(\d+)' data-position='(\d+)'", html)
    return [(int(request), int(step), int(position)) for request, step, position in found]


def listed(run_list: RunList, **question: object) -> list[tuple[int, int, int]]:
    """The lines of all pages."""
    pages = (rejected.RejectedDrafts(run_list, {"run": 0, "page": page, **question}).draw() for page in range(3))
    return list(dict.fromkeys(line for html in pages for line in steps_shown(html)))


def places(table: pd.DataFrame) -> list[tuple[int, int, int]]:
    return list(zip(table.request_id.tolist(), table.step.tolist(), (table.position - 1).tolist(), strict=True))


FILTERS = [
    ({"drafter": "1"}, lambda t: t.drafter_layer == 1),
    ({"drafter": "none"}, lambda t: t.drafter_layer.isna()),
    ({"flips": "2:"}, lambda t: t.flip_layer >= 2),
    ({"flips": ":1"}, lambda t: t.flip_layer <= 1),
    ({"flips": "none"}, lambda t: t.flip_layer.isna()),
    ({"margin": "0.02:"}, lambda t: t.margin_at_least_nats >= 0.02),
    ({"margin": ":0.05"}, lambda t: t.margin_nats <= 0.05),
    ({"flips": "0:9", "margin": "0.01:0.2"}, lambda t: t.flip_layer.notna() & t.margin_nats.between(0.01, 0.2)),
]
"""Part of a question, and the lines of `Trace.rejected` that it lets through."""


@pytest.mark.parametrize(("question", "fits"), FILTERS, ids=lambda part: str(part) if isinstance(part, dict) else "")
def test_the_list_is_filtered_by_layer_and_margin(
    trace: cp.Trace, stored: Path, question: dict[str, str], fits: Callable[[pd.DataFrame], pd.Series]
) -> None:
    table, run_list = trace.rejected(), RunList.of([stored])
    expected = table[fits(table).fillna(False).to_numpy(dtype=bool)]
    assert listed(run_list, **question) == places(expected)
    view = rejected.RejectedDrafts(run_list, {"run": 0, **question})
    scope: dict[str, pd.DataFrame] = {}
    exec("\n".join(view.code()), scope)
    assert places(scope["table"]) == places(expected) == places(view.table())


def test_filters_let_some_lines_through_and_not_others(trace: cp.Trace) -> None:
    table = trace.rejected()
    kept = [int(fits(table).fillna(False).sum()) for _, fits in FILTERS]
    assert kept[0] == len(table) and kept[1] == 0 and any(0 < count < len(table) for count in kept[2:])


@pytest.mark.parametrize("wrong", [{"flips": "3"}, {"margin": "a:b"}, {"margin": "1:2:3"}, {"drafter": "-1"}])
def test_a_wrong_filter_is_refused(stored: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(CannotShow, match="LEAST:MOST|a number or none"):
        rejected.RejectedDrafts(RunList.of([stored]), {"run": 0, **wrong}).draw()


@pytest.mark.parametrize("sort", [f"{sign}{name}" for name in COLUMNS for sign in ("", "-")])
def test_the_list_is_sorted_by_every_column(trace: cp.Trace, stored: Path, sort: str) -> None:
    table = trace.rejected()
    values = table[COLUMNS[sort.removeprefix("-")][1]].tolist()
    keys = [str(v).replace("␣", " ").casefold() if isinstance(v, str) else v for v in values]
    known = sorted((i for i, v in enumerate(values) if pd.notna(v)), key=lambda i: keys[i])
    if sort.startswith("-"):
        known = sorted((i for i, v in enumerate(values) if pd.notna(v)), key=lambda i: keys[i], reverse=True)
    order = [*known, *(i for i, v in enumerate(values) if pd.isna(v))]
    html = rejected.RejectedDrafts(RunList.of([stored]), {"run": 0, "sort": sort}).draw()
    assert listed(RunList.of([stored]), sort=sort) == places(table.iloc[order])
    assert html.count("aria-sort=") == 1 and ("▼" in html) == sort.startswith("-")


def test_a_search_looks_in_the_tokens_and_in_all_text_before(trace: cp.Trace, stored: Path) -> None:
    run_list, table = RunList.of([stored]), trace.rejected()
    ids = {r: [*trace.requests[r].prompt_token_ids, *trace.committed(r)] for r in trace.tokens}
    before = ["".join(trace.token_texts[i] for i in ids[t.request_id][: t.position]) for t in table.itertuples()]
    for line, own in ((table.iloc[0], before[0]), (table.iloc[-1], before[-1])):
        for text in (line.drafted_token, line.committed_token, (own + line.committed_token)[-5:], own[:9]):
            found = listed(run_list, find=text.upper().replace("␣", " "))
            whole = [
                (b + t.drafted_token, b + t.committed_token) for b, t in zip(before, table.itertuples(), strict=True)
            ]
            expected = [any(text.casefold() in one.casefold() for one in both) for both in whole]
            assert found == places(table[expected]) and (line.request_id, line.step, line.position - 1) in found
    places_of = zip(before, table.position.tolist(), strict=True)
    far = [position for text, position in places_of if text.startswith(before[-1][:9]) and position > 3 + 8]
    html = rejected.RejectedDrafts(run_list, {"run": 0, "find": before[-1][:9]}).draw()
    assert far and html.count("stands before") >= len(far)
    request = int(table.request_id.iloc[-1])
    assert listed(run_list, request=request) == places(table[table.request_id == request])
    none = rejected.RejectedDrafts(run_list, {"run": 0, "find": "<b>no such text", "request": request}).draw()
    assert f"No rejected draft of request {request} has “&lt;b&gt;no such text” in it" in none and "<b>" not in none


def test_a_walk_goes_through_the_list_from_any_place(trace: cp.Trace, stored: Path) -> None:
    run_list, lines = RunList.of([stored]), places(trace.rejected())
    for sort in ("", "-margin"):
        order = listed(run_list, sort=sort)
        go = partial(walked, run_list, sort=sort)
        assert [go(order[i], 1) for i in range(len(order) - 1)] == order[1:]
        assert [go(order[i], -1) for i in range(1, len(order))] == order[:-1]
        assert go(order[0], 2) == order[2] and go(order[0], 99) == order[-1] and go(order[-1], -99) == order[0]
        assert go(order[-1], 1) is None and go(order[0], -1) is None
    between = (lines[1][0], lines[1][1] + 1, 0)  # a place where nothing was rejected
    assert walked(run_list, between, 1) == lines[2] and walked(run_list, between, -1) == lines[1]
    assert walked(run_list, (0, 0, 0), 1) == lines[0] and walked(run_list, (0, 0, 0), -1) is None
    last = (lines[-1][0], lines[-1][1] + 1, 0)
    assert walked(run_list, last, 1) is None and walked(run_list, last, -2) == lines[-2]
    own = [line for line in lines if line[0] == lines[-1][0]]
    assert (
        walked(run_list, own[0], -1, among=own[0][0]) is None and walked(run_list, own[0], 1, among=own[0][0]) == own[1]
    )


def walked(run_list: RunList, place: tuple[int, int, int], by: int, **more: object) -> tuple[int, int, int] | None:
    question: PageQuestion = {"run": 0, **dict(zip(("request", "step", "position"), place, strict=True)), "by": by}
    found = rejected.walk(run_list, {**question, **more})
    if "says" in found:
        assert "no rejected draft" in found["says"]
        return None
    story = facts.request_story(run_list, {"run": 0, "request": found["request"]})
    assert found.get("story") == (story if found["request"] != place[0] else None)
    return found["request"], found["step"], found["position"]


def test_a_long_list_has_pages(large: Path) -> None:
    run_list = RunList.of([large])
    lines = places(cp.load_trace(large).rejected())
    assert len(lines) > LINES_A_PAGE
    for page, start in ((0, 0), (1, LINES_A_PAGE), (99, LINES_A_PAGE), (0, 0)):
        html = rejected.RejectedDrafts(run_list, {"run": 0, "page": page}).draw()
        assert steps_shown(html) == lines[start : start + LINES_A_PAGE]
        assert f"{start + 1} to {min(start + LINES_A_PAGE, len(lines))} of {len(lines)}" in html
    assert rejected.walk(run_list, {"run": 0, "request": 0, "step": 0, "position": 15, "by": 99})["page"] == 1


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    plain = cp.run(loaded(), PROMPTS, **SMALL, capture="SZ")
    agreeing = cp.run(loaded(), PROMPTS[:1], **SMALL, deterministic=True)
    assert not agreeing.num_rolled_back and agreeing.num_drafted
    run_list = RunList.of([plain.save(tmp_path / "a<b"), agreeing.save(tmp_path / "agreeing")])
    said = rejected.RejectedDrafts(run_list, {"run": 0}).draw()
    assert "No draft of a&lt;b was rejected</h2>" in said and "No draft token was verified" in said
    assert f"accepted all {agreeing.num_drafted} draft tokens" in rejected.RejectedDrafts(run_list, {"run": 1}).draw()
    for number in (0, 1):
        question = {"run": number, "request": 0, "step": 1, "position": 5, "by": 1}
        assert rejected.walk(run_list, question) == {"says": "no draft of this run was rejected"}


def test_a_question_of_another_kind_is_refused(stored: Path) -> None:
    run_list = RunList.of([stored])
    for wrong in ({"sort": "size"}, {"sort": 3}, {"find": 3}, {"find": "x" * 201}, {"request": 99}, {"page": "1"}):
        with pytest.raises(CannotShow):
            rejected.RejectedDrafts(run_list, {"run": 0, **wrong}).draw()
    for wrong in ({"by": 0}, {"by": "1"}, {"among": 99}, {"request": None}):
        with pytest.raises(CannotShow):
            rejected.walk(run_list, {"run": 0, "request": 0, "step": 1, "position": 5, "by": 1, **wrong})


def test_the_list_of_a_growing_run_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part_each_round(monkeypatch)
    directory = tmp_path / "run"
    stream = begun(directory)
    go_on(stream, directory, 2)
    follower, counts = Follower(directory), []
    run_list = RunList.of([directory])
    if follower.tables.rejected.empty:
        assert "was rejected so far</h2>" in rejected.RejectedDrafts(run_list, {"run": 0}).draw()
    for _ in range(4):
        go_on(stream, directory, 3)
        follower.look(at_once=True)
        expected = cp.load_trace(directory).rejected()
        pd.testing.assert_frame_equal(follower.tables.rejected, expected)
        counts.append(len(expected))
    assert counts[-1] > counts[0]
    stream.close()
