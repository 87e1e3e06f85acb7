"""The report in a real browser, at two widths and in both colour schemes."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser

import cacheprobe as cp
from tests.chromium import PATIENCE, PICTURES
from tests.plots.test_views import hostile
from tests.tiny import PROMPTS, SMALL, loaded


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1))
    return cp.plots.write_report(hostile(trace), tmp_path_factory.mktemp("report") / "report.html")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_opens_alone_and_fits(browser: Browser, report: Path, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(PATIENCE)
    complaints: list[str] = []
    requested: list[str] = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_selector(".js-plotly-plot .main-svg")
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 4")
    assert complaints == []
    assert [url for url in requested if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("window.hacked") is None
    ink = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ink == "rgb(255, 255, 255)") == (scheme == "light")
    light_ink = page.evaluate(
        "parseInt(getComputedStyle(document.querySelector('#drafts .xtitle')).fill.slice(4)) > 128"
    )
    assert light_ink == (scheme == "dark")
    columns = page.evaluate("getComputedStyle(document.querySelector('.panels')).gridTemplateColumns.split(' ').length")
    assert columns == (4 if width == 1280 else 1)
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"report-{width}-{scheme}.png", full_page=True)
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_a_report_with_thoughts_runs_nothing_and_fits(browser: Browser, tmp_path: Path, width: int) -> None:
    from tests.plots.test_picture_contract import hostile_thoughts, thinking

    path = cp.plots.write_report(hostile_thoughts(thinking()), tmp_path / "report.html", request_id=0)
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector("#prediction_depth .main-svg")
    page.evaluate("document.querySelectorAll('details').forEach(box => { box.open = true })")
    assert "<script>" in page.inner_text(".thoughts") and "hacked" in page.inner_text("details table")
    assert page.evaluate("window.hacked") is None and page.locator("main img").count() == 0 and complaints == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"attack-report-{width}.png", full_page=True)
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_every_figure_fills_its_place(browser: Browser, report: Path, width: int) -> None:
    """A figure drawn before its neighbour once kept the width of that moment."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(report.as_uri())
    page.wait_for_selector("#prediction_depth .main-svg")
    page.wait_for_timeout(500)
    measure = (
        "[...document.querySelectorAll('.js-plotly-plot')].map(figure => "
        "[figure.id, figure.clientWidth, Number(figure.querySelector('.main-svg').getAttribute('width'))])"
    )
    measured = page.evaluate(measure)
    assert [name for name, *_ in measured] == ["drafts", "prediction_depth"]
    assert all(place == drawn for _, place, drawn in measured), measured
    page.close()


def test_nothing_is_shown_twice(report: Path) -> None:
    html = report.read_text()
    pictures = [picture for picture in re.findall(r"<svg.*?</svg>", html, re.DOTALL) if len(picture) > 2000]
    headings = re.findall(r"<h[23][^>]*>(.*?)</h[23]>", html, re.DOTALL)
    assert len(pictures) > 4 and len(set(pictures)) == len(pictures)
    assert len(headings) > 6 and len(set(headings)) == len(headings)


@pytest.mark.parametrize("width", [1280, 390])
def test_every_cell_of_a_grid_can_be_scrolled_to(browser: Browser, report: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(report.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(box => { box.open = true })")
    last = page.locator("#lens-grid-all .column").last
    last.scroll_into_view_if_needed()
    box = last.bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width
    cell = page.locator("#lens-grid-all .pick rect").first.evaluate("cell => getComputedStyle(cell).fill")
    assert cell not in ("rgb(0, 0, 0)", "none")  # as without the rules of the shades
    assert page.locator("#lens-grid-all .legend .shades").bounding_box()["width"] == 210
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


def test_hover_and_tap_tell_where_a_reading_comes_from(browser: Browser, report: Path) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 900}, has_touch=True)
    page.goto(report.as_uri())
    cell = page.locator("#lens-grid-all .pick").nth(4)
    cell.scroll_into_view_if_needed()
    told = cell.locator("title").text_content()
    assert told is not None and all(word in told for word in ("request", "layer", "entropy"))
    page.wait_for_timeout(300)
    assert not page.is_visible("#tip")
    cell.tap()
    assert page.text_content("#tip") == told and page.evaluate("window.hacked") is None
    box = page.locator("#tip").bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
    page.locator("h1").dispatch_event("pointerup")
    assert not page.is_visible("#tip")
    page.close()
