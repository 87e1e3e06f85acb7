"""The work of a page: how often the server reads the files of a run, and how many answers and bytes a click takes.

The slow test counts on a long run, and prints the seconds too, which it does not judge.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

import cacheprobe as cp
from cacheprobe.trace.manifest import CheckedFiles
from cacheprobe.trace.stored import StoredRun
from cacheprobe.views.dashboard import facts
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.tabs import lens, replay
from cacheprobe_benchmarks.shared.large_run import save_large_run
from tests.dash_page import answered, served

VIEWS = ("insight", "timeline", "decode", "cache", "card", "grid", "window", "text", "overview")
"""All that the replay shows."""
CLICK_QUESTIONS, CLICK_BYTES = 2, 700_000
"""At most, for a click, however long the run is: questions to the server, and bytes of its answers."""

CLICK = """([request, step]) => new Promise((yes) => {
    const said = (name) => JSON.parse(document.getElementById(name + "-view").dataset.answer);
    const of_request = (name) => said(name).request === request;
    const of_step = (name) => of_request(name) && said(name).step === step;
    const cell = `#timeline-view g.pick[data-request="${request}"][data-step="${step}"]`;
    let first = null;
    const start = performance.now();
    document.querySelector(cell).dispatchEvent(new MouseEvent("click", {bubbles: true}));
    const look = () => {
        const now = performance.now() - start;
        if (first === null && of_step("cache") && of_request("card") && of_request("insight")) first = now;
        if (first !== null && of_step("decode") && of_step("window") && of_request("grid")) yes([first, now]);
        else if (now < 60000) setTimeout(look, 4);
    };
    look();
})"""
"""Milliseconds, by the page's own clock."""


def by_clock(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def in_browser(
    browser: Browser, run: Path, clicks: list[tuple[int, int]]
) -> tuple[list[float], list[float], list[float], int]:
    """Seconds of opening three pages, until the replay is there with its lens grid; and of each click on (request,
    step), until the cache and the card are the clicked one's, and until every view that follows it is. Last, the number
    of questions to the server after all clicks."""
    opened: list[float] = []
    answers: list[float] = []
    wholes: list[float] = []
    questions: list[str] = []
    with served(RunList.of([run])) as address:
        for number in range(3):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(60_000)

            def open_it(page: Page = page) -> None:
                page.goto(address, wait_until="commit")
                for name in VIEWS:
                    answered(page, name, run=0)

            opened.append(by_clock(open_it))
            if number < 2:
                page.close()
        page.wait_for_timeout(2000)  # nothing of the opening is left to do

        page.on("request", lambda one: questions.append(one.url) if one.url.endswith("/ask") else None)
        for request, step in clicks:
            first, whole = page.evaluate(CLICK, [request, step])
            answers.append(first / 1000)
            wholes.append(whole / 1000)
        page.close()
    return opened, answers, wholes, len(questions)


def views_of_clicks(run: Path, clicks: list[tuple[int, int]]) -> Iterator[dict[str, Callable[[], object]]]:
    """Yields for each click on (request, step) what computes every view's answer, by the name of the view."""
    run_list = RunList.of([run])
    for request, step in clicks:
        about = dict(run=0, request=request, step=step, site="S", lens="recorded", position=18)
        pages = dict(requests=[0, 8], steps=[0, 60], places=[0, 12], place=2, width=1190)
        shown = dict(colour="logprob", rows="all", theme="light", row=None)
        ask = {**about, **pages, **shown}
        yield {
            "facts": partial(facts.run_facts, run_list, ask),
            "story": partial(facts.request_story, run_list, ask),
            "timeline": replay.Timeline(run_list, ask).draw,
            "decode": replay.TokenGrid(run_list, ask).draw,
            "cache": replay.CacheSlots(run_list, ask).draw,
            "window": replay.VerifyWindow(run_list, ask).draw,
            "insight": lens.RowCard(run_list, ask).sentence,
            "card": lens.RowCard(run_list, ask).draw,
            "grid": lens.LensGridPage(run_list, ask).draw,
        }


def on_the_server(run: Path, clicks: list[tuple[int, int]]) -> tuple[float, dict[str, float], list[int]]:
    """Processor seconds of all first answers together; of each view's answer to a click, the median; and the bytes of
    all answers to each click."""
    start, opening = time.process_time(), 0.0
    taken: dict[str, list[float]] = {}
    sizes: list[int] = []
    for views in views_of_clicks(run, clicks):
        sizes.append(0)
        for name, view in views.items():
            before = time.process_time()
            answer = view()
            taken.setdefault(name, []).append(time.process_time() - before)
            sizes[-1] += len(json.dumps(answer, default=str))
        opening = opening or time.process_time() - start
    return opening, {name: median(many[1:]) for name, many in taken.items()}, sizes


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def measured(what: str, browser: Browser, run: Path, clicks: list[tuple[int, int]]) -> None:
    """Prints the seconds of opening and of clicks, and holds the work of clicks to the limits."""
    opening, views, sizes = on_the_server(run, clicks)
    each = ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in views.items())
    print(f"\n{what}, processor time of the server: opening {opening:.2f} s; answers to a click, ms: {each}")
    opened, answers, wholes, questions = in_browser(browser, run, clicks)
    told = [
        f"{', '.join(f'{seconds:.2f}' for seconds in many)} (median {median(many):.2f}, worst {max(many):.2f})"
        for many in (opened, answers, wholes)
    ]
    print(f"in the browser, s: opening {told[0]}; clicks {told[1]}, all views {told[2]}")
    print(f"{questions} questions after {len(clicks)} clicks; bytes of the answers: {sizes}")
    assert len(clicks) <= questions <= CLICK_QUESTIONS * len(clicks) and max(sizes) <= CLICK_BYTES


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_large_run(tmp_path_factory.mktemp("short") / "run", requests=3, tokens=12, layers=4)


def test_a_click_reads_no_file_twice(short_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading files is what a click would wait for: each table is read once, and the lens readings of each request."""
    tables: list[str] = []
    readings: list[int] = []
    whole, of_request = StoredRun._table, CheckedFiles.lines

    def lines(self: CheckedFiles, name: str, key: str, values: Sequence[int], *of: Any) -> Any:
        readings.extend(values if key == "request_id" else ())
        return of_request(self, name, key, values, *of)

    monkeypatch.setattr(StoredRun, "_table", lambda self, name: (tables.append(name), whole(self, name))[1])
    monkeypatch.setattr(CheckedFiles, "lines", lines)
    for views in views_of_clicks(short_run, [(1, 4), (2, 8), (1, 6), (2, 4), (1, 4)]):
        for view in views.values():
            view()
    assert sorted(tables) == sorted(set(tables)) and {"rows", "events"} <= set(tables)
    assert readings == [1, 2]


def test_a_click_in_a_short_run_takes_little_work(browser: Browser, short_run: Path) -> None:
    measured("3 requests x 12 tokens x 4 layers", browser, short_run, [(1, 4), (2, 8)])


@pytest.mark.slow
@pytest.mark.parametrize(("requests", "tokens"), [(32, 107), (1, 2_000), (64, 512)])
def test_a_click_in_a_long_run_takes_little_work(browser: Browser, tmp_path: Path, requests: int, tokens: int) -> None:
    run = save_large_run(tmp_path / "run", requests=requests, tokens=tokens, layers=30)
    readings = cp.load_trace(run).table("hypotheses").count("*").fetchall()[0][0]
    some = [(1, 4), (2, 8), (5, 6), (7, 12), (3, 4), (6, 20), (4, 24), (0, 30), (2, 40), (5, 44), (1, 16), (3, 28)]
    clicks = [(request % requests, step) for request, step in some]
    measured(f"{requests} requests x {tokens} tokens x 30 layers, {readings:,} readings", browser, run, clicks)
