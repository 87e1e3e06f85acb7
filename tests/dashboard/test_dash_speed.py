"""The work of a page: how often the server reads the files of a run, and how many answers and bytes a click takes."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from cacheprobe.trace.manifest import CheckedFiles
from cacheprobe.trace.stored import StoredRun
from cacheprobe.views.dashboard import facts
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.tabs import lens, replay
from cacheprobe_benchmarks.shared.large_run import save_large_run
from tests.dash_page import answered, opened, requests_of, served

VIEWS = ("insight", "timeline", "decode", "cache", "card", "grid", "window", "text", "overview")
"""All that the replay shows."""
CLICK_QUESTIONS, CLICK_BYTES = 2, 700_000
"""At most, for a click, however long the run is: questions to the server, and bytes of its answers."""


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


def takes_little_work(browser: Browser, run: Path, clicks: list[tuple[int, int]]) -> None:
    """Holds the clicks on (request, step) to the limits, in a page where nothing of the opening is left to do."""
    sizes = [
        sum(len(json.dumps(view(), default=str)) for view in views.values()) for views in views_of_clicks(run, clicks)
    ]
    assert max(sizes) <= CLICK_BYTES, sizes
    with served(RunList.of([run])) as address, opened(browser, f"{address}?tab=replay") as page:
        for name in VIEWS:
            answered(page, name, run=0)
        page.wait_for_timeout(1000)
        with requests_of(page) as questions:
            for request, step in clicks:
                cell = f'#timeline-view g.pick[data-request="{request}"][data-step="{step}"]'
                page.locator(cell).dispatch_event("click")
                for name in ("cache", "decode", "window"):
                    answered(page, name, request=request, step=step)
                for name in ("insight", "card", "grid"):
                    answered(page, name, request=request)
        assert len(clicks) <= len(questions) <= CLICK_QUESTIONS * len(clicks)


def test_a_click_in_a_short_run_takes_little_work(browser: Browser, short_run: Path) -> None:
    takes_little_work(browser, short_run, [(1, 4), (2, 8)])


@pytest.mark.slow
@pytest.mark.parametrize(("requests", "tokens"), [(1, 2_000), (64, 512)])
def test_a_click_in_a_long_run_takes_little_work(browser: Browser, tmp_path: Path, requests: int, tokens: int) -> None:
    run = save_large_run(tmp_path / "run", requests=requests, tokens=tokens, layers=30)
    some = [(1, 4), (2, 8), (5, 6), (7, 12), (3, 4), (6, 20), (4, 24), (0, 30), (2, 40), (5, 44), (1, 16), (3, 28)]
    takes_little_work(browser, run, [(request % requests, step) for request, step in some])
