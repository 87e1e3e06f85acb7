"""The timeline of a run with many requests: every one is reached, by pages, by the map, and by keys."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

import cacheprobe as cp
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe_benchmarks.shared.large_run import save_large_run
from tests.chromium import keep_picture
from tests.dash_page import EARLY, answered, at, heard, opened, requests_of, served, until
from tests.tiny import PROMPTS, SMALL, loaded

PAGE = 25
MOST_BYTES = 700_000
"""Of the answer that draws a page of the timeline."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a-many: 30 requests with different losses.  b-large: 200 requests."""
    folder = tmp_path_factory.mktemp("many")
    settings = {**SMALL, "max_new_tokens": 8, **EARLY}
    prompts = [[1 + i, *PROMPTS[i % len(PROMPTS)]] for i in range(30)]
    cp.run(loaded(), prompts, **settings).save(folder / "a-many")
    save_large_run(folder / "b-large", requests=200, tokens=12, layers=2)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(RunList.of([folder])) as url:
        yield url


def named(page: Page) -> list[int]:
    """The requests of the timeline's lines, from the top."""
    names = page.locator("#timeline-view .pick:not([data-step]) text").all_text_contents()
    return [int(name.removeprefix("request ")) for name in names]


def shows(page: Page, first: int, end: int) -> None:
    """Wait until the timeline has these places."""
    until(
        page,
        f"""JSON.stringify(JSON.parse(document.getElementById('timeline-view')?.dataset.answer || '{{}}').requests)
        === '[{first},{end}]'""",
    )


def test_pages_reach_every_request_and_choose_none(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=1&request=3") as page:
        answered(page, "map", run=1)
        seen: list[int] = []
        for first in range(0, 200, PAGE):
            shows(page, first, first + PAGE)
            seen += named(page)
            assert page.inner_text("#timeline-page") == f"page {first // PAGE + 1} of 8"
            if first + PAGE < 200:
                page.get_by_title("requests below").click()
        assert seen == list(range(200)) and at(page)["request"] == 3
        assert page.get_by_title("requests below").is_disabled() and "top=175" in page.url
        page.get_by_title("first requests").click()
        shows(page, 0, PAGE)
        page.get_by_title("last requests").click()
        shows(page, 175, 200)
        page.reload()  # the link has the page
        shows(page, 175, 200)
        page.keyboard.press("n")  # a request that is chosen elsewhere comes with its page
        until(page, "JSON.parse(document.getElementById('page').dataset.at).top === null")
        shows(page, 0, PAGE)
        keep_picture(page, "timeline-200")


def test_a_page_is_one_small_answer(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=1&request=3") as page:
        for name in ("timeline", "map", "window", "grid", "text", "overview"):
            answered(page, name, run=1)
        heard(page, lambda: page.locator(".asking").count() == 0)
        with requests_of(page) as asked:
            page.get_by_title("requests below").click()
            shows(page, PAGE, 2 * PAGE)
        assert [set(views) for views in asked if "story" not in views] == [{"timeline"}]  # stories are asked ahead
        assert len(page.inner_html("#timeline-view")) < MOST_BYTES


def test_keys_lead_from_request_to_request(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=1&request=24") as page:
        answered(page, "timeline", run=1)
        page.keyboard.press("t")
        assert page.evaluate("document.activeElement.matches('#timeline-view svg')")
        for key, request in (
            ("ArrowDown", 25), ("ArrowDown", 26), ("ArrowUp", 25), ("PageDown", 50), ("End", 199), ("ArrowDown", 199),
            ("PageUp", 174), ("Home", 0), ("PageUp", 0),
        ):  # fmt: skip
            page.keyboard.press(key)
            assert at(page)["request"] == request, key
            answered(page, "card", request=request)
            shows(page, PAGE * (request // PAGE), PAGE * (request // PAGE) + PAGE)
            assert page.text_content("#timeline-view .named text") == f"request {request}"
        step = at(page)["step"]
        page.keyboard.press("ArrowLeft")
        assert at(page)["step"] == step - 1
        page.keyboard.press("?")
        assert "in the timeline: the request above or below" in page.inner_text("#keys")


def test_it_is_sorted_from_the_top(browser: Browser, address: str, folder: Path) -> None:
    events = cp.load_trace(folder / "a-many").events()
    lost = events.groupby("request_id").num_rolled_back.sum().sort_values(ascending=False, kind="stable")
    order = sorted(lost.index, key=lambda request: (-lost[request], request))
    assert lost.nunique() > 2 and order != sorted(order)
    with opened(browser, f"{address}?run=0&request={order[-1]}") as page:
        answered(page, "timeline", run=0)
        page.click("#timeline-lost")
        answered(page, "timeline", order="losses")
        assert named(page) == order[:PAGE] and at(page)["request"] == order[-1]
        page.get_by_title("requests below").click()
        shows(page, PAGE, 30)
        assert named(page) == order[PAGE:]
        page.keyboard.press("t")
        page.keyboard.press("Home")
        assert at(page)["request"] == order[0]  # in the order that is shown
        answered(page, "map", order="losses")
        box = page.locator("#map-view svg").bounding_box()
        assert box is not None
        page.locator("#map-view svg").click(position={"x": 2, "y": box["height"] * 2.5 / 30})
        assert at(page)["request"] == order[2] and at(page)["step"] == 0


def test_the_map_has_every_pass_and_leads_there(browser: Browser, address: str, folder: Path) -> None:
    events = cp.load_trace(folder / "b-large").events()
    with opened(browser, f"{address}?run=1&request=3") as page:
        answered(page, "map", run=1)
        svg = page.locator("#map-view svg")
        passes = {
            (int(line), step)
            for start, line, count in re.findall(
                r"M(\d+) (\d+)\.5h(\d+)", svg.locator(".lost").get_attribute("d") or ""
            )
            for step in range(int(start), int(start) + int(count))
        }
        lost = events[events.num_rolled_back > 0]
        assert passes == set(zip(lost.request_id.tolist(), lost.step.tolist(), strict=True)) and len(passes) >= 200
        frame = [svg.locator(".shown").get_attribute(name) for name in ("x", "y", "width", "height")]
        last = int(events.step.max())
        assert frame == ["0", "0", str(last + 1), "25"]
        for name in ("card", "grid", "cache", "window", "text"):  # nothing moves any more
            answered(page, name, run=1)
        box = svg.bounding_box()
        assert box is not None
        svg.click(position={"x": box["width"] * 5.5 / (last + 1), "y": box["height"] * 160.5 / 200})
        request = at(page)["request"]
        assert 159 <= request <= 161 and at(page)["step"] == 5  # a line is one pixel high
        answered(page, "card", request=request)
        shows(page, 150, 175)
        until(page, "document.querySelector('#map-view .shown').getAttribute('y') === '150'")


def test_accepted_and_rolled_back_differ_without_colour(browser: Browser, address: str, folder: Path) -> None:
    """By their side of the strip's middle, by their form in narrow cells, and by their height in the map."""
    events = cp.load_trace(folder / "b-large").events()
    judged = events[events.num_accepted.notna()]
    drafted = judged.groupby("step").draft_token_ids.agg(lambda drafts: sum(map(len, drafts)))
    kept = judged.groupby("step").num_accepted.sum()
    with opened(browser, f"{address}?run=1&request=3&zoom=0-15", width=390) as page:
        answered(page, "overview", run=1)
        answered(page, "timeline", zoomed=True)
        step = int(drafted[kept < drafted].index[0])
        up, down = (page.locator(f"#overview-view .fill-{colour}[x='{step}']") for colour in ("green", "red"))
        share = 8 * kept[step] / drafted[step]
        assert float(up.get_attribute("y") or 0) == pytest.approx(8 - share, abs=0.01)
        assert float(up.get_attribute("height") or 0) == pytest.approx(share, abs=0.01)
        assert down.get_attribute("y") == "8"
        assert float(down.get_attribute("height") or 0) == pytest.approx(8 - share, abs=0.01)
        strokes = page.evaluate(
            """['pass', 'accepted', 'lost'].map((name) =>
                getComputedStyle(document.querySelector(`#map-view .${name}`)).strokeWidth)"""
        )
        assert strokes[0] != strokes[1]  # other passes are thin
        page.goto(f"{address}?run=0&tab=replay&zoom=0-239")
        answered(page, "timeline", run=0, zoomed=True)
        pitch = float(page.locator("#timeline-view svg[data-first]").get_attribute("data-pitch") or 0)
        assert pitch < 10 and page.locator("#timeline-view .thin").count() > 0
        assert page.locator("#timeline-view svg[data-first] rect.red").count() == 0
