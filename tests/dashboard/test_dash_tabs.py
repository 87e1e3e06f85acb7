"""Every tab of the dashboard in a real browser: at two widths and in two themes; the sweep driven by
clicks up to a cell's run; attacks in every text that a tab shows."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from playwright.sync_api import Browser, Page

import cacheprobe as cp
from cacheprobe.views.dashboard.run_list import RunList
from tests.chromium import keep_picture
from tests.dash_page import answered, at, choose, opened, save_thinking, served, until
from tests.plots.test_views import HOSTILE
from tests.sweeps.test_sweeps_dash import SETTINGS
from tests.tiny import loaded

ROOT = Path(__file__).parents[2]
NAME = "<img src=x onerror=window.hacked=2>'\"&lt;"
"""Of a folder or a file: an attack without a slash."""
PLANTED = "document.querySelectorAll('#page :is(img,script,b[onerror],pad)').length"
"""Elements that an attack would leave behind, run or not."""
VIEWS = {
    "overview": ("summary", "tokens"),
    "replay": ("insight", "timeline", "decode", "cache", "window", "card", "text", "grid"),
    "rejected": ("rejected",), "thoughts": ("thoughts",), "compare": ("compare",),
    "patching": ("result",), "surgery": ("result",), "probes": ("result",), "sweep": ("result",),
    "results": ("result",),
}  # fmt: skip
"""By tab: the views that it asks for."""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps") / "grid"
    assert cp.sweep(SETTINGS, out=folder, progress=False).is_complete
    return folder


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, runs: Path, swept: Path) -> Iterator[str]:
    """Of runs of every kind, results of every kind, and a sweep: 0 to 3 open, 4 does not, 5 and more are cells."""
    results = tmp_path_factory.mktemp("results")
    clean, corrupt = [5, 17, 3, 44, 9], [5, 17, 80, 44, 61]
    cp.patching.activation(loaded(), clean, corrupt, answer=(7, 11), progress=False).save(results / "grid.json")
    for name in ("coin-rows", "coin-state-probe", "prediction-depths"):
        shutil.copy(ROOT / "analyses" / "results" / f"{name}.json", results)
    with served(RunList.of([runs, swept, results])) as url:
        yield url


FIGURES = "[...document.querySelectorAll('.js-plotly-plot')].filter(one => one.checkVisibility())"
"""A figure is drawn again when its place has grown."""


def shown(page: Page, tab: str, **asked: object) -> None:
    """A click on a tab, and all that it asks for answered and drawn."""
    page.click(f"#tab-{tab}")
    until(page, f"document.getElementById('tab-{tab}').getAttribute('aria-selected') === 'true'")
    for name in VIEWS[tab]:
        answered(page, name, **asked)
    if VIEWS[tab] == ("result",) and tab != "results":  # which are tables
        page.wait_for_selector("#result-0 .main-svg", state="attached")
    until(page, "document.querySelectorAll('.asking').length === 0")
    until(page, f"{FIGURES}.every(one => Math.abs(one.querySelector('.main-svg').clientWidth - one.clientWidth) < 2)")


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_every_tab_fits(browser: Browser, address: str, width: int, theme: str) -> None:
    with opened(browser, f"{address}?run=0&against=1", width=width, color_scheme=theme) as page:
        for tab in VIEWS:
            if tab == "thoughts":
                choose(page, "run", "c-thinking")
                until(page, "JSON.parse(document.getElementById('page').dataset.at).run === 2")
            elif tab == "compare":
                choose(page, "run", "a-one")
                until(page, "JSON.parse(document.getElementById('page').dataset.at).run === 0")
            shown(page, tab)
            page.evaluate("scrollTo(0, 0)")
            keep_picture(page, f"tab-{tab}-{width}-{theme}")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
            assert page.locator(".refused:visible").count() == 0, tab
            assert page.locator("#insight-view").is_visible() == (tab == "replay")  # whose token it speaks of
            assert page.evaluate(WHOLE), tab
            for fault in (CLIPPED, UNSTYLED):
                found = page.evaluate(fault)
                assert found == [], (tab, found)


WHOLE = "(one => one.scrollHeight <= one.clientHeight + 1)(document.getElementById('insight-view'))"
"""On a narrow page the sentence lost its end, which was the finding."""
CLIPPED = """[...document.querySelectorAll('#page h2, #page h3, #page h4, #page p, #page button, #page dd, #page li')]
    .filter(one => one.checkVisibility() && !one.closest('.scroll,.ladder,.wide,.tabs,.plot,.dash-dropdown,.tokens'))
    .filter(one => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== 'inline')
    .map(one => one.textContent.slice(0, 60))"""
"""Texts that stick out of their place, outside of what scrolls."""
UNSTYLED = """[
    ...[...document.querySelectorAll('#page main svg :is(rect,path,circle,text)')]
        .filter(one => one.checkVisibility() && !one.closest('.plot,defs,.dash-dropdown'))
        .filter(one => one.getBBox().width > 0 && one.getBBox().height > 0)  // a line encloses nothing
        .filter(one => getComputedStyle(one).fill === 'rgb(0, 0, 0)'),
    ...[...document.querySelectorAll('#page main button')]
        .filter(one => one.checkVisibility() && getComputedStyle(one).borderRadius === '0px'),
].map(one => one.outerHTML.slice(0, 90))"""
"""What the browser draws by its own lights: shapes in black, buttons with corners."""


def test_the_sweep_leads_to_a_run_and_back(browser: Browser, swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to a run that the menu does not hold: only the first two hundred cells of a sweep led to theirs."""
    monkeypatch.setattr("cacheprobe.views.dashboard.run_list.MOST_CELLS", 2)
    cells, run_list = cp.load_sweep(swept).cells, RunList.of([swept])
    assert len(run_list.entries) == len(run_list.more) == 2
    with served(run_list) as url, opened(browser, f"{url}?tab=sweep") as page:
        said = answered(page, "result")
        assert "committed token: 1.00 in every panel" in said and "4 cells of the sweep grid" in said
        page.wait_for_selector("#result-0 .scatterlayer .js-line", state="attached")
        assert page.locator("#result-0 .xy, #result-0 [class*='subplot x']").count() >= 4
        assert page.locator("#result-view button.chosen").inner_text() == "drafter × seed"
        page.get_by_role("button", name="seed × drafter", exact=True).click()
        answered(page, "result", facet="seed.drafter")
        until(page, "document.querySelector('#result-view button.chosen').textContent === 'seed × drafter'")
        assert at(page)["facet"] == "seed.drafter" and "facet=seed.drafter" in page.url
        lines = page.locator("#result-more table tbody tr")
        assert lines.count() == len(cells) == 4
        links: list[str] = []
        for run, name in ((3, run_list.more[1].name), (0, run_list.entries[0].name)):
            line = lines.filter(has=page.locator(f"button[data-run='{run}']"))
            digest = next(d for d in cells.digest if d.startswith(line.get_by_role("button").inner_text()))
            cell, texts = cells.set_index("digest").loc[digest], line.locator("td").all_inner_texts()
            assert digest == name
            assert texts[1:3] == ["—" if pd.isna(cell.drafter) else cell.drafter, str(cell.seed)]
            line.get_by_role("button").click()
            for view in VIEWS["replay"]:
                answered(page, view, run=run)
            assert at(page)["tab"] == "replay" and at(page)["run"] == run
            assert digest in page.inner_text(".menu-run")
            assert f"generated {int(cell.tokens)} token" in page.inner_text("#text-view")
            links.append(page.url)
            page.click("#tab-sweep")
            answered(page, "result", facet="seed.drafter")
            assert at(page)["run"] == run  # the cell stays chosen
        page.goto(links[0])
        answered(page, "text", run=3)
        until(page, f"document.querySelector('.menu-run').innerText.includes('{run_list.more[1].name}')")


def test_thoughts_follow_the_request_and_the_step(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=2&request=0&tab=thoughts&position=3") as page:
        assert "Chunk 0 in numbers" in answered(page, "thoughts", request=0, position=3)
        choose(page, "request", "request 1")
        assert "Chunk" in answered(page, "thoughts", request=1)
        marks = page.locator("#thoughts-view button.verdict b").all_inner_texts()
        assert set(marks) <= {"✓", "✗", "·"} and "✓" in marks
        last = page.locator("#thoughts-view button.verdict").last
        position = int(last.get_attribute("data-position") or -1)
        last.click()
        answered(page, "thoughts", request=1, position=position)
        assert page.locator("#thoughts-view button.chosen").get_attribute("data-position") == str(position)
        assert f"position={position}" in page.url
        page.click("#tab-replay")
        answered(page, "card", request=1, position=position)


def test_the_scrubber_moves_every_view(browser: Browser, address: str) -> None:
    """Drawn by the mouse, as a hand does it: the views follow to the step where it is let go."""
    with opened(browser, f"{address}?run=0&request=1&step=3") as page:
        for name in VIEWS["replay"]:
            answered(page, name, run=0)
        thumb, track = page.get_by_role("slider").bounding_box(), page.locator(".dash-slider-track").bounding_box()
        assert thumb is not None and track is not None
        y = thumb["y"] + thumb["height"] / 2
        page.mouse.move(thumb["x"] + thumb["width"] / 2, y)
        page.mouse.down()
        page.mouse.move(track["x"] + track["width"] * 0.3, y, steps=4)
        page.mouse.move(track["x"] + track["width"] * 0.7, y, steps=6)
        page.mouse.up()
        until(page, "JSON.parse(document.getElementById('page').dataset.at).step > 10")
        step, last = at(page)["step"], int(page.get_attribute("#page", "data-last") or 0)
        assert 0.6 * last < step < 0.8 * last
        for name in ("cache", "decode", "window"):
            answered(page, name, step=step)
        assert f"after step {step}" in page.inner_text("#cache-view") and f"step={step}" in page.url


def test_a_lens_is_chosen_by_menu(browser: Browser, tmp_path: Path) -> None:
    """The logit lens read now says what was recorded; a tuned lens says something else, and is of the stream alone."""
    trace = save_thinking(tmp_path / "run")
    lens = cp.lenses.TunedLens.fresh(trace.model)
    lens.biases.add_(1.0)
    lens.save(tmp_path / "lens")
    with (
        served(RunList.of([tmp_path / "run"], lenses=[tmp_path / "lens"])) as url,
        opened(browser, f"{url}?tab=replay") as page,
    ):
        answered(page, "grid", lens="recorded", site="S")
        cells = page.locator("#grid-view .column .pick")
        recorded = [cell.get_attribute("data-says") for cell in cells.all()]
        choose(page, "lens", "logit, read now")
        assert "through the logit lens" in answered(page, "grid", lens="logit", site="S")
        assert [cell.get_attribute("data-says") for cell in cells.all()] == recorded
        choose(page, "site", "T (attention output)")
        assert "attention output" in answered(page, "grid", lens="logit", site="T")
        choose(page, "lens", "tuned: lens")
        assert "through the tuned" in answered(page, "grid", lens="tuned:0", site="S")
        assert [cell.get_attribute("data-says") for cell in cells.all()] != recorded
        assert "lens=tuned%3A0" in page.url and at(page)["site"] == "S"


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory, runs: Path, swept: Path) -> Iterator[str]:
    """Folders, files, axes, thoughts and results that are all attacks. 0 to 2 are runs, the next are cells."""
    folder = tmp_path_factory.mktemp("attacks")
    for name in ("a", "ab"):
        shutil.copytree(runs / "d-hostile", folder / f"{name}{NAME}")
    thinking = save_thinking(tmp_path_factory.mktemp("thinking") / "run")
    from tests.plots.test_picture_contract import hostile_thoughts

    hostile_thoughts(thinking).save(folder / f"b{NAME}")
    (folder / f"c{NAME}").mkdir()
    (folder / f"c{NAME}" / "rows-x.parquet").write_bytes(b"")
    sweep = folder / f"s{NAME}"
    shutil.copytree(swept, sweep, ignore=shutil.ignore_patterns("index"))
    for manifest in sweep.glob("shards/*/manifest.json"):
        held = json.loads(manifest.read_text())
        axes = held["meta"]["sweep"]["cell"]["axes"]
        axes["drafter"] = HOSTILE + str(axes["drafter"])
        manifest.write_text(json.dumps(held))
    lines = [{HOSTILE: HOSTILE, "n": 1}, {HOSTILE: None, "n": 2}]
    (folder / f"r{NAME}.json").write_text(json.dumps({HOSTILE: HOSTILE, "lines": lines}))
    probe = json.loads((ROOT / "analyses/results/coin-state-probe.json").read_text())
    (folder / f"t{NAME}.json").write_text(json.dumps({HOSTILE: _attacked(probe)}))
    (folder / f"u{NAME}.json").write_text("{" + HOSTILE)
    with served(RunList.of([folder, sweep])) as url:
        yield url


def _attacked(held: object) -> object:
    """Every text of a result with an attack behind it; but sites, which are a fixed few."""
    if isinstance(held, dict):
        return {key: value if key == "site" else _attacked(value) for key, value in held.items()}
    if isinstance(held, list):
        return [_attacked(one) for one in held]
    return held + HOSTILE if isinstance(held, str) else held


def test_no_attack_is_run_in_any_tab(browser: Browser, attacked: str) -> None:
    with opened(browser, f"{attacked}?run=0", width=390) as page:
        for tab, run in (("overview", 0), ("replay", 0), ("rejected", 0), ("thoughts", 2), ("compare", 0)):
            page.goto(f"{attacked}?run={run}&tab={tab}")
            for name in VIEWS[tab]:
                answered(page, name, run=run)
            assert "hacked" in page.inner_text(f"#panel-{tab}")
            assert page.evaluate(PLANTED) == 0
            page.click("#run")  # names of folders stand in the menu
            assert page.get_by_role("listbox").get_by_role("option").first.inner_text() == f"a{NAME}"
            page.keyboard.press("Escape")
        for tab in ("results", "probes"):
            page.goto(f"{attacked}?tab={tab}")
            answered(page, "result")
            names = page.locator("#result-list button:visible")
            assert names.count()
            for i in range(names.count()):
                names.nth(i).click()
                answered(page, "result", result=int(names.nth(i).get_attribute("data-result") or -1))
                until(page, "document.querySelectorAll('.asking').length === 0")
                assert page.evaluate(PLANTED) == 0
        shown(page, "sweep")
        assert "hacked" in page.inner_text("#result-view") and "hacked" in page.inner_text("#result-more")
        assert "drafter=</script>…" in (page.text_content("#result-place") or "")
        page.locator("#result-place .nsewdrag").first.hover()
        assert NAME in page.inner_text(".broken") and page.evaluate("window.hacked") is None
        assert page.evaluate(PLANTED) == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
