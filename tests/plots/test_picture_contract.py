"""What every public picture keeps, that is drawn without plotly: tables in, HTML out that shows itself in a notebook,
says its finding, tells the pointer whence its parts are, and runs nothing that a model wrote."""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from IPython.core.formatters import DisplayFormatter

import cacheprobe as cp
from cacheprobe import views as plots
from tests.plots.test_views import HOSTILE, hostile
from tests.tiny import PROMPTS, SMALL, loaded, perturbed

ROOT = Path(__file__).parents[2]
PICTURES: dict[str, Callable[..., plots.Markup]] = {
    name: getattr(plots, name)
    for name in plots.__all__
    if inspect.isfunction(getattr(plots, name)) and getattr(plots, name).__annotations__.get("return") is plots.Markup
}
Given = tuple[tuple[Any, ...], dict[str, Any]]


@cache
def trace() -> cp.Trace:
    """Two requests that are verified, and one that never is."""
    return cp.run(loaded(), PROMPTS[:3], **SMALL, deterministic=[0, 1])


@cache
def drafted(is_moved: bool = False) -> cp.Trace:
    """Of an early-exit drafter that is often wrong; is_moved: of a model whose weights were moved a little."""
    model = perturbed(loaded(), 0.02) if is_moved else loaded()
    return cp.run(model, PROMPTS[:3], **SMALL, drafter=cp.drafters.EarlyExit(layer=1))


@cache
def thinking() -> cp.Trace:
    examples = cp.tasks.CoinFlip(people=3).examples(2, seed=3)
    model = cp.load_model("coinflip-thinking")
    return cp.run(model, examples, deterministic=True, window=4, capacity=128, max_new_tokens=4, progress=False)


def of_window(held: cp.Trace, lost: bool) -> Given:
    events = held.events()
    pick = cp.analysis.rolled_back if lost else cp.analysis.accepted_whole
    found = [window for r in held.tokens if (window := pick(cp.analysis.find_windows(events, r))) is not None]
    ledgers = [held.ledger(found[0].request_id, step) for step in found[0].ledger_steps]
    return (found[0], events, ledgers, held.token_texts), {}


def of_decoding(held: cp.Trace, count: int) -> Given:
    """Of the request that is never verified, its last events cut off."""
    events = held.events()
    own = events[events.request_id == 2]
    last = int(own.step.iloc[-1 - count])
    ledgers = [held.ledger(2, int(own[own.phase == "prefill"].step.max())), held.ledger(2, last)]
    return (2, events[events.step <= last], ledgers, held.token_texts), {}


def of_thoughts(held: cp.Trace, request: int) -> Given:
    tables = (held.thoughts(), held.row_table, held.events(), held.ledger(request), request)
    return tables, dict(thinking=held.meta["thinking"])


def of_chunk(held: cp.Trace, position: int) -> Given:
    tables = (held.thoughts(), held.row_table, held.events(), 0, position)
    return tables, dict(thinking=held.meta["thinking"])


def of_two(ours: cp.Trace, theirs: cp.Trace) -> Given:
    rows, events = zip(*((held.row_table, held.events()) for held in (ours, theirs)), strict=True)
    return (rows, events), dict(fingerprints=(ours.fingerprint, theirs.fingerprint), names=("a<b>", "other"))


SAMPLES: dict[str, Callable[[cp.Trace, cp.Trace], tuple[Given, Given]]] = {
    # of a run with drafts and one with thoughts: two pictures whose findings differ
    "cache_picture": lambda run, _: (
        ((run.ledger(0, 9),), dict(request_id=0, step=9, pending=40)),
        ((run.ledger(0, 4),), dict(request_id=0, step=4)),
    ),
    "comparison": lambda run, _: (of_two(run, drafted(True)), of_two(run, run)),
    "decode_grid": lambda run, _: tuple(((run.events(), step, {}), {}) for step in (9, 12)),
    "decoded_diagram": lambda run, _: (
        of_decoding(trace() if run is drafted() else hostile(trace()), 0), of_decoding(trace(), 2),
    ),
    "lens_grid": lambda run, _: (
        ((run.hypotheses(), 0), dict(include="all")), ((run.hypotheses().assign(agrees=False), 0), {}),
    ),
    "request_text": lambda run, _: tuple(
        ((run.row_table, run.events(), request, run.hypotheses()), {}) for request in (0, 1)
    ),
    "run_overview": lambda run, thoughtful: (((run,), {}), ((thoughtful,), {})),
    "thought_card": lambda _, thoughtful: (of_chunk(thoughtful, 2), of_chunk(thoughtful, 30)),
    "thoughts_picture": lambda _, thoughtful: (of_thoughts(thoughtful, 0), of_thoughts(thoughtful, 1)),
    "timeline": lambda run, _: (
        ((run.events(),), dict(step=9)), ((run.events().assign(num_rolled_back=0),), dict(requests=[1])),
    ),
    "token_card": lambda run, _: tuple(
        ((run.hypotheses(), run.row_table, run.events(), 0, len(PROMPTS[0]) + i), {}) for i in (0, 1)
    ),
    "window_diagram": lambda run, _: (of_window(run, True), of_window(run, False)),
}  # fmt: skip

EVERY = {  # what each tip says
    "cache_picture": [
        r"slots? \d|cache slots?:", "prefill|verified|provisional|pending|decoded", r"steps? \d|not written yet",
    ],
    "comparison": [r"request \d", r"generated token \d", r"position \d"],
    "decode_grid": [r"request \d", r"token \d", r"step \d", "committed|draft token|rolled back|pending"],
    "decoded_diagram": [r"request|cache slot"],
    "lens_grid": [r"request \d", r"step \d", "prefill|verify|decode", "committed|superseded|rolled back",
                  r"position \d", r"layer \d"],
    "request_text": [r"request \d", r"step \d", r"position \d"],
    "run_overview": [r"layer \d|request \d|draft token \d"],
    "thought_card": [r"request \d", r"step \d", r"positions \d"],
    "thoughts_picture": [r"position|chunk|block"],
    "timeline": [r"request \d", r"step \d", "prefill|decode|verify"],
    "token_card": [r"request \d", r"step \d", "committed|superseded|rolled back", r"position \d", r"layer \d"],
    "window_diagram": [r"request|cache slot"],
}  # fmt: skip
SOME = {  # what one of its tips says, at least
    "cache_picture": [r"request \d", "pending"],
    "decoded_diagram": [r"request \d, position \d+, step \d", "committed as decoded", "prefill, positions"],
    "thoughts_picture": [r"request \d, step \d+, prefill, committed", r"position \d", "verified|prefill"],
    "timeline": [r"positions \d+ to \d"],
    "window_diagram": [
        r"recovered; request \d, position \d+, step \d", r"draft token.*position \d+, step \d", "rolled back",
        r"written in steps? \d",
    ],
}  # fmt: skip


def hostile_thoughts(held: cp.Trace) -> cp.Trace:
    """The same by a model whose every text and thought is an attack."""
    table = held.thoughts().assign(true_state=HOSTILE, said=HOSTILE)
    table["tokens"] = [tuple(HOSTILE for _ in tokens) for tokens in table.tokens]
    return replace(hostile(held), thought_table=table)


def drawn(name: str) -> plots.Markup:
    args, beside = SAMPLES[name](drafted(), thinking())[0]
    return PICTURES[name](*args, **beside)


def tips(picture: str) -> list[str]:
    told = re.findall(r"<title>(.*?)</title>", picture, re.DOTALL) + re.findall(r' title="([^"]*)"', picture)
    return [unescape(tip) for tip in told]


def test_every_public_picture_has_a_sample() -> None:
    assert set(SAMPLES) == set(PICTURES) == set(EVERY)


@pytest.mark.parametrize("name", SAMPLES)
def test_its_title_is_a_finding(name: str) -> None:
    pictures = [PICTURES[name](*args, **beside) for args, beside in SAMPLES[name](drafted(), thinking())]
    titles = [picture.finding for picture in pictures]
    assert all(len(title.split()) >= 4 for title in titles) and titles[0] != titles[1], titles
    for picture, title in zip(pictures, titles, strict=True):
        heading = re.search(r"<h3[^>]*>(.*?)</h3>", picture)
        assert heading is not None and unescape(heading.group(1)).rstrip(".") == title.rstrip(".")


@pytest.mark.parametrize("name", SAMPLES)
def test_the_pointer_is_told_where_a_part_is_from(name: str) -> None:
    told = tips(drawn(name))
    assert len(told) >= 3
    for wanted in EVERY[name]:
        assert [tip for tip in told if not re.search(wanted, tip, re.DOTALL)] == [], wanted
    for wanted in SOME.get(name, []):
        assert any(re.search(wanted, tip, re.DOTALL) for tip in told), (wanted, told)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_notebook_shows_it(name: str) -> None:
    picture = drawn(name)
    shown, _ = DisplayFormatter().format(picture)
    assert shown["text/html"] == picture
    assert picture.finding in shown["text/plain"] and len(shown["text/plain"]) < 400  # which is stored beside it


@pytest.mark.parametrize("name", SAMPLES)
def test_it_stands_alone(name: str) -> None:
    """Styles and textures are inside, nothing is fetched, and every element is closed."""
    picture = drawn(name)
    used, defined = (set(re.findall(what, picture)) for what in (r"url\(#([\w-]+)\)", r'<pattern id="([\w-]+)"'))
    assert picture.startswith('<div class="cp alone"><style>') and used <= defined
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\(['\"]?(http|//)|\son\w+=", picture)
    assert not re.search(r"<(button|input|select)\b", picture), "nobody hears a button of a picture that stands alone"
    open_now: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            open_now.append(tag)

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            assert open_now.pop() == tag

    Checker().feed(picture)
    assert open_now == []


@pytest.mark.parametrize("name", SAMPLES)
def test_it_only_reads(name: str) -> None:
    args, beside = SAMPLES[name](drafted(), thinking())[0]
    tables = [arg for arg in args if isinstance(arg, pd.DataFrame)]
    before = [table.copy(deep=True) for table in tables]
    assert PICTURES[name](*args, **beside) == PICTURES[name](*args, **beside)
    for table, copy in zip(tables, before, strict=True):
        pd.testing.assert_frame_equal(table, copy)


@pytest.mark.parametrize("name", SAMPLES)
def test_nothing_that_a_model_wrote_is_markup(name: str) -> None:
    args, beside = SAMPLES[name](hostile(drafted()), hostile_thoughts(thinking()))[0]
    picture = PICTURES[name](*args, **beside)
    assert not re.search("</?script|<img", picture) and not re.search(r"<[^>]*\son(error|load)=", picture)
    if name not in ("cache_picture", "timeline", "decode_grid"):  # which show no texts, or were given none
        assert "hacked" in picture


REFUSED: list[tuple[str, Callable[[], Given], str]] = [
    ("cache_picture", lambda: ((trace().ledger(0, 0).iloc[:0],), {}), "the ledger is empty"),
    ("comparison", lambda: (((trace().row_table.iloc[:0],) * 2, (trace().events().iloc[:0],) * 2), {}), "empty"),
    ("comparison", lambda: (((trace().row_table,) * 2, (trace().events(),) * 2, 9), {}), "no request 9"),
    ("decode_grid", lambda: ((trace().events().iloc[:0], 0, {}), {}), "empty"),
    ("decode_grid", lambda: ((trace().events(), 999, {}), {}), "no step 999; the table has 0 to"),
    ("decode_grid", lambda: ((trace().events(), 3, {}), dict(chosen=(7, 0))), "no request 7; the table has 0, 1, 2"),
    ("decoded_diagram", lambda: ((9, trace().events(), [], {}), {}), "no decoding of request 9"),
    ("decoded_diagram", lambda: ((0, trace().events(), [], {}), {}), "request 0 is verified; draw one of its windows"),
    ("lens_grid", lambda: ((drafted().hypotheses(), 9), {}), "the table has requests"),
    ("lens_grid", lambda: ((drafted().hypotheses().iloc[:0], 0), {}), r"the table has requests \[\]"),
    ("lens_grid", lambda: ((drafted().hypotheses(), 0), dict(positions=range(90, 95))), "no committed hypotheses"),
    ("request_text", lambda: ((trace().row_table, trace().events(), 9), {}), "there is no request 9; the tables have"),
    ("thought_card", lambda: (of_chunk(thinking(), 2)[0][:3] + (9, 2), {}), "wrote no thoughts"),
    ("thoughts_picture", lambda: (of_thoughts(thinking(), 0)[0][:4] + (9,), {}), "wrote no thoughts"),
    ("timeline", lambda: ((trace().events().iloc[:0],), {}), "empty"),
    ("timeline", lambda: ((trace().events(),), dict(requests=[5])), "no request 5"),
    ("timeline", lambda: ((trace().events(),), dict(steps=range(3, 9999))), "no picture of steps range"),
    ("token_card", lambda: ((drafted().hypotheses(), drafted().row_table, drafted().events(), 0, 0), {}), "no reading"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "message"), REFUSED)
def test_what_is_not_there_is_refused(name: str, given: Callable[[], Given], message: str) -> None:
    args, beside = given()
    with pytest.raises(ValueError, match=message):
        PICTURES[name](*args, **beside)


def test_a_request_that_no_verifier_speaks_of_is_grey() -> None:
    """Prefill of every request was blue; diagrams of the loop have other requests in grey from the start."""
    told = plots.timeline(trace().events())
    boxes = re.findall(r'data-request="(\d)" data-step="\d+"><g><rect [^>]*class="box (\w+)"', told)
    assert {colour for request, colour in boxes if request == "2"} == {"grey"}
    assert {colour for request, colour in boxes if request != "2"} == {"blue", "yellow", "green", "red"} - (
        set() if trace().num_rolled_back else {"red"}
    )


def test_the_page_of_figures_names_them_all_and_its_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "dash.md").read_text(encoding="utf-8")
    assert [name for name in PICTURES if f"`{name}" not in page] == []
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    setting, calls = example.strip().split("\n\n")
    scope: dict[str, Any] = {"cp": cp, "trace": drafted()}
    exec(setting, scope)
    shown = [eval(call, scope) for call in calls.splitlines()]
    assert len(shown) >= 6 and all(isinstance(one, plots.Markup) for one in shown)
