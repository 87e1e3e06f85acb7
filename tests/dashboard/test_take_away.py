"""What is taken of a view: its code runs and makes the table of its CSV; link, SVG and PNG in a browser; tabs without
content; tables of results."""

import csv
import io
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import plotly.io
import pytest
from playwright.sync_api import Browser, Page

import cacheprobe as cp
from cacheprobe.analysis.flips import Flips
from cacheprobe.views.dashboard.app import export
from cacheprobe.views.dashboard.questions import CannotShow
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.shell import index
from cacheprobe.views.dashboard.tabs import VIEWS
from cacheprobe.views.dashboard.tabs.replay import CacheSlots
from cacheprobe.views.dashboard.view import csv_text
from tests.chromium import keep_picture
from tests.dash_page import answered, at, choose, opened, served, until
from tests.sweeps.shown_runs import save_shown

ONE = {"run": 0, "request": 0, "step": 8, "position": 6, "row": None, "site": "S", "lens": "recorded"}
PAGE = {"requests": [0, 8], "steps": [4, 30], "places": [0, 12], "place": 1, "width": 900}
GRID = {**ONE, **PAGE, "colour": "rank", "rows": "all"}
FEATURE = 15
"""Active in run 1."""
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("timeline", {**ONE, **PAGE}),
    ("timeline", {"run": 0, "requests": [1, 2], "steps": [0, 3], "width": 0}),
    ("decode", {**ONE, **PAGE}),
    ("cache", ONE),
    ("cache", {**ONE, "request": 1, "step": 5}),
    ("window", ONE),
    ("window", {**ONE, "request": 1}),
    ("text", {**ONE, "measure": "verdict", "place": 0}),
    ("text", {**ONE, "run": 2, "measure": "depth", "place": 0}),
    ("text", {**ONE, "run": 1, "measure": "feature", "feature": FEATURE, "place": 0}),
    ("grid", GRID),
    ("grid", {**GRID, "rows": "committed"}),
    ("grid", {**GRID, "lens": "logit", "site": "T"}),
    ("card", ONE),
    ("card", {**ONE, "lens": "logit", "site": "C"}),
    ("gave", ONE),
    ("summary", {"run": 0}),
    ("tokens", {"run": 0, "verdict": "rejected", "sort": "-times"}),
    ("tokens", {"run": 1, "requests": "0, 2-9", "entropy": "1:", "each": "1"}),
    ("notes", {"run": 0}),
    ("rejected", {"run": 0}),
    ("rejected", {"run": 0, "request": 0, "sort": "-margin"}),
    ("rejected", {"run": 0, "sort": "drafted"}),
    ("thoughts", {**ONE, "run": 2}),
    ("compare", {**ONE, "against": 1}),
    ("compare", {"run": 0, "request": 3, "against": 2}),
    ("result", {"result": 0}),
    ("result", {"result": 1, "table": 1, "filter": "S", "order": "-accuracy"}),
    ("result", {"result": 2, "order": "nld"}),
    ("result", {"result": 3, "table": 1, "filter": "EARLY", "order": "drafter"}),
    ("result", {"result": 3, "table": 2}),
    ("result", {"result": 4, "order": "seconds"}),
    ("result", {"result": 5, "order": "drafter", "facet": "seed.drafter"}),
]
"""View, and a question that it answers."""


@pytest.fixture(scope="module")
def run_list(tmp_path_factory: pytest.TempPathFactory) -> RunList:
    run_list = save_shown(tmp_path_factory.mktemp("shown"))
    cp.load_trace(run_list.entries[0].path).notes.add(0, "=look", position=2)
    return run_list


@pytest.fixture(scope="module")
def address(run_list: RunList) -> Iterator[str]:
    with served(run_list) as url:
        yield url


@pytest.fixture(autouse=True)
def quiet_figures() -> Iterator[None]:
    """A figure that code shows is drawn as JSON, and opens no browser."""
    before, plotly.io.renderers.default = plotly.io.renderers.default, "json"
    yield
    plotly.io.renderers.default = before


def taken(run_list: RunList, view: str, question: dict[str, Any], way: str) -> str:
    return export(run_list, {"view": view, "way": way, "question": question})[way]


@pytest.mark.parametrize(("view", "question"), QUESTIONS, ids=lambda part: part if isinstance(part, str) else "")
def test_the_code_makes_the_table_of_the_csv(run_list: RunList, view: str, question: dict[str, Any]) -> None:
    code, found = (taken(run_list, view, question, way) for way in ("code", "csv"))
    assert "cacheprobe.views.dashboard" not in code and "\nimport _" not in code  # the public functions alone
    scope: dict[str, Any] = {}
    exec(code, scope)
    table = scope["table"]
    assert len(table) and csv_text(table) == found
    lines = list(csv.reader(io.StringIO(found)))
    assert lines[0] == [str(name) for name in table.columns] and len(lines) == len(table) + 1


def test_every_view_is_taken_by_a_question_here() -> None:
    assert {view for view, _ in QUESTIONS} == set(VIEWS) - {"flip"}


def test_code_that_makes_another_table_is_noticed(run_list: RunList, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CacheSlots.table
    monkeypatch.setattr(CacheSlots, "table", lambda self: whole(self).iloc[1:])
    with pytest.raises(AssertionError):
        test_the_code_makes_the_table_of_the_csv(run_list, "cache", ONE)


def test_a_search_of_rejected_drafts_is_in_the_code(run_list: RunList) -> None:
    token = run_list.tables(0).rejected.drafted_token.iloc[0]
    asked = {"run": 0, "find": token, "sort": "-step"}
    test_the_code_makes_the_table_of_the_csv(run_list, "rejected", asked)
    with pytest.raises(AssertionError):  # nothing is found, and the table is empty
        test_the_code_makes_the_table_of_the_csv(run_list, "rejected", {"run": 0, "find": "no such token"})


def test_the_search_for_edits_is_taken_when_it_is_done(run_list: RunList) -> None:
    trace = cp.load_trace(run_list.tables(0).run.directory)
    line = trace.rejected().query("request_id == 0").iloc[0]
    question = {"run": 0, "request": 0, "step": int(line.step)}
    with pytest.raises(CannotShow, match="no result of this search yet"):
        taken(run_list, "flip", question, "csv")
    tables = run_list.tables(0)
    found = Flips(pd.DataFrame({"edit": ["zero"]}), {})
    job = run_list.jobs.start((tables.run.directory, tables.run.run_id, 0, question["step"]), lambda _: found)
    while job.is_running:
        time.sleep(0.01)
    assert "cp.analysis.flip(trace, 0," in taken(run_list, "flip", question, "code")
    assert taken(run_list, "flip", question, "csv") == '"edit"\n"zero"\n'


def test_a_spreadsheet_computes_no_cell_and_lists_are_json() -> None:
    texts = ["=1+1", "+1", "-x", "@a", "\tb", "a=1", "␣=", None]
    table = pd.DataFrame({"token": texts, "ids": [[1, 2]] * 8, "tokens": [["é", '"']] * 8, "nats": [-1.5] * 8})
    lines = list(csv.DictReader(io.StringIO(csv_text(table))))
    assert [line["token"] for line in lines] == ["'=1+1", "'+1", "'-x", "'@a", "'\tb", "a=1", "␣=", ""]
    assert lines[0]["nats"] == "-1.5"  # a number is no formula
    assert json.loads(lines[0]["ids"]) == [1, 2] and json.loads(lines[0]["tokens"]) == ["é", '"']


def test_what_cannot_be_taken_is_said(run_list: RunList) -> None:
    for asked, said in (
        ({"view": "none", "way": "csv", "question": {}}, "view is"),
        ({"view": "cache", "way": "pdf", "question": {}}, "way is csv or code"),
        ({"view": "cache", "way": "csv", "question": []}, "question is an object"),
        ({"view": "thoughts", "way": "csv", "question": ONE}, "request 0 of one wrote no thoughts"),
    ):
        with pytest.raises(CannotShow, match=said):
            export(run_list, asked)


def test_the_page_names_the_sites_in_full(run_list: RunList) -> None:
    for label in ("S (residual stream)", "T (attention output)", "C (MLP output)"):
        assert label in index(run_list, ())


SVG_TAGS = {"svg", "g", "defs", "title", "rect", "path", "circle", "ellipse", "line", "text", "tspan", "image", "use",
            "pattern", "clipPath", "polyline", "polygon", "linearGradient", "stop"}  # fmt: skip
DRAWN = "!document.querySelector('.asking') && document.getElementById('tab-{0}').ariaSelected === 'true'"
BY_TAB = {
    "replay": ("timeline", "decode", "cache", "grid", "card", "window", "text", "notes"),
    "overview": ("summary", "tokens"), "rejected": ("rejected",), "compare": ("compare",),
    "probes": ("result",), "results": ("result",),
}  # fmt: skip


def saved(page: Page, view: str, way: str) -> tuple[str, bytes]:
    """Name and content of the file that a button saves."""
    with page.expect_download() as download:
        page.locator(f"[data-export={way}][data-view={view}]:visible").click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def as_text(found: ElementTree.Element) -> str:
    return " ".join("".join(one.itertext()) for one in found.iter() if one.tag.endswith("}text"))


@pytest.mark.parametrize(("width", "theme"), [(1440, "light"), (390, "dark")])
def test_every_view_is_saved_as_a_picture_that_needs_no_page(
    browser: Browser, address: str, width: int, theme: str
) -> None:
    query = "?run=0&against=1&request=0&step=8&position=6"
    with opened(browser, f"{address}{query}", width=width, color_scheme=theme) as page:
        for tab, views in BY_TAB.items() if width == 1440 else [(tab, BY_TAB[tab]) for tab in ("replay", "results")]:
            if tab != "replay":
                page.click(f"#tab-{tab}")
            until(page, DRAWN.format(tab))
            for view in views:
                answered(page, view)
                if tab in ("compare", "probes", "results"):
                    page.wait_for_selector(f"#{view}-0 .main-svg", state="visible")
                heading = page.locator(f"#{view}-view :is(h2, h3)").first.inner_text()
                name, content = saved(page, view, "svg")
                assert (
                    name.startswith(f"cacheprobe-one-{view}" if view != "result" else "cacheprobe-") and ".svg" in name
                )
                found = ElementTree.fromstring(content)
                assert {one.tag.split("}")[1] for one in found.iter()} <= SVG_TAGS, view
                assert heading.split()[0] in as_text(found) and b"class=" not in content and b"var(--" not in content
                pointed = set(re.findall(r"url\(&quot;#([^&]+)&quot;\)", content.decode()))
                assert pointed <= {one.get("id") for one in found.iter()}, (view, pointed)
                paper = {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 19, 24)"}[theme]
                grounds = [one.get("fill") for one in found if one.tag.endswith("}rect")]
                assert grounds[0] == paper
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
            bars = page.locator(".exports:visible")
            assert bars.count() == len(views)
            assert bars.first.locator("button").all_inner_texts() == ["copy link", "SVG", "PNG", "CSV", "code"]
            assert page.evaluate(VOIDS) == [], tab
            keep_picture(page, f"away-{tab}-{width}-{theme}")
        name, content = saved(page, "result", "png")
        assert name.endswith(".png") and content.startswith(b"\x89PNG") and len(content) > 20_000


VOIDS = """[...document.querySelectorAll('.card')].filter(one => one.checkVisibility()).flatMap(card => {
    const bar = card.querySelector(':scope > .exports').getBoundingClientRect(), bounds = [];
    for (const one of card.querySelectorAll('*')) {
        const box = one.getBoundingClientRect(), is_leaf = !one.children.length || one.localName === 'svg';
        if (is_leaf && one.checkVisibility() && !one.closest('.exports') && box.bottom <= bar.top + 1) {
            bounds.push(box.bottom);
        }
    }
    const empty = bar.top - Math.max(...bounds);
    return empty > 150 ? [card.id + ' is empty for ' + empty + ' pixels'] : [];
})"""
"""Cards with an empty space above their bar."""


def test_link_code_and_csv_are_those_of_what_is_shown(browser: Browser, address: str, run_list: RunList) -> None:
    with opened(browser, f"{address}?run=0&request=0&step=8&position=6&tab=replay") as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        answered(page, "text", run=0)
        until(page, DRAWN.format("replay"))
        page.locator("[data-export=code][data-view=window]").click()
        until(page, "document.getElementById('exports').open")
        question = {**ONE}
        assert page.inner_text("#exports-text").strip() == taken(run_list, "window", question, "code").strip()
        page.click("#exports-copy")
        until(page, "document.getElementById('exports-copy').textContent === 'Copied ✓'")
        assert page.evaluate("navigator.clipboard.readText()") == taken(run_list, "window", question, "code")
        page.keyboard.press("ArrowRight")  # a key in the dialog moves no step
        assert at(page)["step"] == 8
        page.get_by_role("button", name="Close").last.click()
        name, content = saved(page, "cache", "csv")
        assert name == "cacheprobe-one-cache-request-0-step-8.csv"
        trace = cp.load_trace(run_list.tables(0).run.directory)
        assert content.decode() == csv_text(trace.ledger(0, 8))
        page.locator("[data-export=link][data-view=window]").click()
        until(page, "document.querySelector('[data-export=link][data-view=window]').textContent === 'copied ✓'")
        link = page.evaluate("navigator.clipboard.readText()")
    place = "document.getElementById('window-card')"
    with opened(browser, link) as page:
        until(page, f"scrollY > 300 && Math.abs({place}.getBoundingClientRect().top) < 500")
        assert {name: at(page)[name] for name in ("run", "request", "step", "position")} == {
            "run": 0, "request": 0, "step": 8, "position": 6,
        }  # fmt: skip


def test_what_the_server_refuses_is_said(browser: Browser, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise CannotShow("this table is <b>not</b> there")

    monkeypatch.setattr(CacheSlots, "table", refuse)
    with opened(browser, f"{address}?run=0&request=0&step=8") as page:
        answered(page, "cache", step=8)
        page.locator("[data-export=csv][data-view=cache]").click()
        until(page, "document.getElementById('exports').open")
        assert page.inner_text("#exports-text") == "this table is <b>not</b> there"


def test_a_tab_without_content_is_hidden_and_a_link_to_it_says_why(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=2&tab=rejected") as page:
        until(page, "document.getElementById('notice').innerText.includes('No draft of x-thinking was rejected')")
        assert at(page)["tab"] == "replay"
        tabs = page.locator(".tab:visible")
        assert "Thoughts" in tabs.all_inner_texts() and "Rejected drafts" not in tabs.all_inner_texts()
        page.click("#tab-thoughts")
        answered(page, "thoughts", run=2)
        assert not page.locator("#notice").is_visible()
        choose(page, "run", "one")
        until(page, "document.getElementById('notice').innerText.includes('One wrote no thoughts')")
        assert at(page)["tab"] == "replay"
        assert "Rejected drafts" in tabs.all_inner_texts() and "Thoughts" not in tabs.all_inner_texts()


def test_a_table_of_results_is_sorted_and_filtered_with_its_figure(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0&tab=results") as page:
        assert "share by layer: from 0 to 1" in answered(page, "result", result=3)
        cells = "[...document.querySelectorAll('#result-more .sorts tbody tr')].map(line => line.innerText)"
        assert len(page.evaluate(cells)) == 90
        page.locator("#result-more th button", has_text="chance").click()
        answered(page, "result", order="chance")
        page.locator("#result-more th button", has_text="chance").click()
        assert "chance by layer" in answered(page, "result", order="-chance")
        until(page, f"({cells})[0].includes('0.6667')")
        assert page.locator("#result-more th[aria-sort=descending]").inner_text() == "chance ▼"
        page.locator("#result-filter").press_sequentially("later")
        answered(page, "result", order="-chance", filter="later")
        until(page, f"({cells}).length === 30 && ({cells}).every(line => line.startsWith('later tokens'))")
        assert "30 of 90 lines" in page.inner_text("#result-more .finder")
        assert page.evaluate("document.activeElement.id") == "result-filter"
        assert "order=-chance" in page.url and "filter=later" in page.url
        _, content = saved(page, "result", "csv")
        table = pd.read_csv(io.BytesIO(content))
        assert len(table) == 30 and table.chance.is_monotonic_decreasing
        page.locator("#result-more [data-intent=table]", has_text="values").click()
        answered(page, "result", table=2)
        assert "behaviour · num_examples" in page.inner_text("#result-more")
        assert at(page).get("filter") is None and page.input_value("#result-filter") == ""
