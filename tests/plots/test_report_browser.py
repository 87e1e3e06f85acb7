"""The report in a real browser: at two widths, in both colour schemes."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

import cacheprobe as cp
from tests.chromium import PATIENCE, keep_picture
from tests.plots.test_picture_contract import hostile_thoughts, thinking
from tests.plots.test_views import hostile
from tests.tiny import PROMPTS, SMALL, loaded


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1))
    return cp.plots.write_report(hostile(trace), tmp_path_factory.mktemp("report") / "report.html")


@contextmanager
def read(browser: Browser, report: Path, width: int, scheme: str = "light", **settings: bool) -> Iterator[Page]:
    """The report, drawn and with its details open. Fails if it complains, asks for another file, runs what a model
    wrote, or is wider than the screen."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, **settings)
    page.set_default_timeout(PATIENCE)
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else complaints.append(r.url))
    page.goto(report.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(box => { box.open = true })")
    yield page
    assert complaints == [] and page.evaluate("window.hacked") is None and page.locator("main img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_opens_alone_and_fits(browser: Browser, report: Path, width: int, scheme: str) -> None:
    with read(browser, report, width, scheme) as page:
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
        ink = page.evaluate("getComputedStyle(document.querySelector('.glance svg text')).fill")
        assert (int(re.findall(r"\d+", ink)[0]) > 128) == (scheme == "dark")
        columns = "getComputedStyle(document.querySelector('.panels')).gridTemplateColumns.split(' ').length"
        assert page.evaluate(columns) == (4 if width == 1280 else 1)
        assert page.locator(".glance figure svg").count() >= 4
        keep_picture(page, f"report-{width}-{scheme}")


def test_a_report_with_thoughts_runs_nothing_and_fits(browser: Browser, tmp_path: Path) -> None:
    path = cp.plots.write_report(hostile_thoughts(thinking()), tmp_path / "report.html", 0)
    with read(browser, path, 390, "dark") as page:
        assert "<script>" in page.inner_text("#request-0-thoughts") and "hacked" in page.inner_text("details table")


def test_nothing_is_shown_twice(report: Path) -> None:
    html = report.read_text()
    pictures = [picture for picture in re.findall(r"<svg.*?</svg>", html, re.DOTALL) if len(picture) > 2000]
    headings = re.findall(r"<h[23][^>]*>(.*?)</h[23]>", html, re.DOTALL)
    assert len(pictures) > 4 and len(set(pictures)) == len(pictures)
    assert len(headings) > 6 and len(set(headings)) == len(headings)


def test_every_cell_of_a_grid_can_be_scrolled_to_and_tells_where_it_comes_from(browser: Browser, report: Path) -> None:
    with read(browser, report, 390, has_touch=True) as page:
        last = page.locator("[id$=lens-grid-all]").first.locator(".column").last
        last.scroll_into_view_if_needed()
        box = last.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
        shade = page.locator("[id$=lens-grid-all] .pick rect").first.evaluate("cell => getComputedStyle(cell).fill")
        assert shade not in ("rgb(0, 0, 0)", "none")  # as without the rules of the shades
        assert page.locator("[id$=lens-grid-all] .legend .shades").first.bounding_box()["width"] == 210
        cell = page.locator("[id$=lens-grid-all] .pick").nth(4)
        cell.scroll_into_view_if_needed()
        told = f"{cell.locator('xpath=..').get_attribute('data-says')}\n{cell.get_attribute('data-says')}"
        assert told is not None and all(word in told for word in ("request", "layer", "entropy"))
        assert not page.is_visible("#tip")
        cell.tap()
        assert page.text_content("#tip") == told
        box = page.locator("#tip").bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
        page.locator("h1").dispatch_event("pointerup")
        assert not page.is_visible("#tip")
