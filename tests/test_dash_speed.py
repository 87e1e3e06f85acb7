"""How long a page of a long run takes to open, and a click to be answered. Prints what it measured.

The limits are of processor time, of the server and the browser together: others may be using this machine, and what
two processes take together on an idle one is not less than what a clock shows.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Page

from cacheprobe.dash_app.shelf import Shelf
from tests.dash_page import answered, chromium, served
from tests.large_run import save_large_run

OPEN_SECONDS, CLICK_SECONDS = 3.0, 0.3


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


class Taken(NamedTuple):
    """Seconds by the clock, and of processor time by this process and its children."""

    wall: float
    processor: float


def processor_seconds() -> float:
    """Of this process, in which the server runs, and of all that it started: the browser."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended meanwhile
        number = int(path.parent.name)
        parents[number], ticks[number] = int(fields[1]), int(fields[11]) + int(fields[12])
    mine, total = {os.getpid()}, 0
    while mine:
        total += sum(ticks.get(number, 0) for number in mine)
        mine = {number for number, parent in parents.items() if parent in mine}
    return total / os.sysconf("SC_CLK_TCK")


def taken(act: Callable[[], None]) -> Taken:
    wall, processor = time.perf_counter(), processor_seconds()
    act()
    return Taken(time.perf_counter() - wall, processor_seconds() - processor)


def timings(browser: Browser, run: Path, clicks: list[tuple[int, int]]) -> tuple[list[Taken], list[Taken]]:
    """Of opening three pages, until the replay is there with its lens grid; and of each click on (request, step)."""
    opened: list[Taken] = []
    with served(Shelf.of([run])) as address:
        for number in range(3):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(60_000)

            def open_it(page: Page = page) -> None:
                page.goto(address, wait_until="commit")
                page.wait_for_selector("#grid .nsewdrag", state="attached")
                for name in ("timeline", "decode", "cache", "window", "card", "grid"):
                    answered(page, name, run=0)

            opened.append(taken(open_it))
            if number < 2:
                page.close()
        page.wait_for_timeout(3000)  # nothing of the opening is left to do

        def click(request: int, step: int) -> None:
            selector = f"#timeline-view g.pick[data-request='{request}'][data-step='{step}']"
            page.locator(selector).first.dispatch_event("click")
            answered(page, "cache", request=request, step=step)
            answered(page, "card", request=request)

        answers = [taken(lambda request=request, step=step: click(request, step)) for request, step in clicks]
        page.close()
    return opened, answers


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def said(what: str, opened: list[Taken], answers: list[Taken]) -> str:
    first, click = (", ".join(f"{t.wall:.2f} ({t.processor:.2f})" for t in many) for many in (opened, answers))
    return f"\n{what}, seconds (of processor time): opening {first}; clicks {click}"


def test_a_short_run_by_the_same_way(browser: Browser, tmp_path: Path) -> None:
    run = save_large_run(tmp_path / "run", requests=3, tokens=12, layers=4)
    opened, answers = timings(browser, run, [(1, 4), (2, 8)])
    print(said("3 requests x 12 tokens x 4 layers", opened, answers))
    assert min(t.processor for t in opened) < OPEN_SECONDS
    assert min(t.processor for t in answers) < CLICK_SECONDS


@pytest.mark.slow
def test_a_long_run_opens_and_answers_quickly(browser: Browser, tmp_path: Path) -> None:
    run = save_large_run(tmp_path / "run", requests=64, tokens=512, layers=30)
    opened, answers = timings(browser, run, [(1, 4), (2, 8), (5, 6), (7, 12), (3, 4), (6, 20), (4, 24)])
    print(said("64 requests x 512 tokens x 30 layers", opened, answers))
    assert median([t.processor for t in opened]) < OPEN_SECONDS
    assert median([t.processor for t in answers]) < CLICK_SECONDS
