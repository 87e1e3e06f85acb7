"""The report in a real browser, at two widths and in both colour schemes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

import cacheprobe as cp
from tests.chromium import PATIENCE, PICTURES, chromium
from tests.plots.test_views import hostile
from tests.tiny import PROMPTS, SMALL, loaded


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


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
def test_every_figure_fills_its_place(browser: Browser, report: Path, tmp_path: Path, width: int) -> None:
    """A figure drawn before its neighbour, or inside a closed box, once kept the width of that moment."""
    # some browsers lay out nothing inside a closed box; chromium does, so it is told not to
    strict = "details:not([open])>:not(summary){display:none}</style>"
    copy = tmp_path / "report.html"
    copy.write_text(report.read_text().replace("</style>", strict, 1))
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(copy.as_uri())
    page.wait_for_selector("#prediction_depth .main-svg")
    page.wait_for_timeout(500)
    measure = (
        "[...document.querySelectorAll('.js-plotly-plot')].filter(figure => figure.checkVisibility()).map(figure => "
        "[figure.id, figure.clientWidth, Number(figure.querySelector('.main-svg').getAttribute('width'))])"
    )
    closed = page.evaluate(measure)
    page.evaluate("document.querySelectorAll('details').forEach(box => { box.open = true })")
    page.wait_for_timeout(500)
    opened = page.evaluate(measure)
    assert [name for name, *_ in closed] == ["lens-grid", "drafts", "prediction_depth"]
    assert [name for name, *_ in opened] == ["lens-grid", "lens-grid-all", "drafts", "prediction_depth"]
    assert all(place == drawn for _, place, drawn in closed + opened), closed + opened
    page.close()


def test_hover_tells_where_a_reading_comes_from(browser: Browser, report: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(report.as_uri())
    page.wait_for_selector("#lens-grid .nsewdrag")
    page.locator("#lens-grid .nsewdrag").scroll_into_view_if_needed()
    page.locator("#lens-grid .nsewdrag").hover()
    page.wait_for_selector("#lens-grid .hovertext")
    text = page.locator("#lens-grid .hovertext").text_content()
    assert "request" in text and "layer" in text and "entropy" in text
    page.close()
