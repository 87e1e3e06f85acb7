"""The dashboard in a real browser, over runs of tiny models: replay, clicks, menus, links, keys, both themes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route

import cacheprobe as cp
from cacheprobe.views.dashboard.run_list import RunList
from tests.dash_page import answered, at, choose, heard, opened, requests_of, served, until, watched
from tests.tiny import PROMPTS, loaded

ROOT = Path(__file__).parents[2]
STEP = "JSON.parse(document.getElementById('page').dataset.at).step"


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with served(RunList.of([runs])) as url:
        yield url


def test_the_theme_is_changed(browser: Browser, address: str) -> None:
    paper = "getComputedStyle(document.getElementById('page')).backgroundColor"
    with opened(browser, f"{address}?tab=replay", color_scheme="dark") as page:
        answered(page, "text", run=0)
        assert "e-broken" in page.inner_text(".broken") and "not saved to its end" in page.inner_text(".broken")
        assert page.evaluate(paper) != "rgb(255, 255, 255)"
        page.click("#theme")
        until(page, "document.documentElement.dataset.theme === 'light'")
        assert page.evaluate(paper) == "rgb(255, 255, 255)"


def test_replays_by_key_button_and_play(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0&request=1&step=8") as page:
        answered(page, "cache", step=8)
        frame = page.locator("#timeline-view .cursor")
        before = float(frame.get_attribute("x") or 0)
        page.keyboard.press("ArrowRight")
        until(page, f"{STEP} === 9")
        assert at(page)["step"] == 9 and "step=9" in page.url
        assert "step 9" in answered(page, "decode", step=9)
        assert float(frame.get_attribute("x") or 0) > before
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        answered(page, "cache", step=7)
        page.get_by_title("one step on (right arrow)").click()
        answered(page, "cache", step=8)
        page.click("#play")
        until(page, f"{STEP} >= 11")
        page.click("#play")
        assert page.inner_text("#play") == "▶"
        assert f"step {at(page)['step']}" in page.inner_text("#now")


def test_every_key_of_a_burst_counts(browser: Browser, address: str) -> None:
    """Two quick presses lost one where the state went through Dash: it drops what is set again before it ran."""
    with opened(browser, f"{address}?run=0&request=1&step=12") as page:
        answered(page, "cache", step=12)
        step = page.evaluate(
            """() => {
                for (let i = 0; i < 5; i++) {
                    document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft", bubbles: true}));
                }
                return JSON.parse(document.getElementById("page").dataset.at).step;
            }"""
        )
        assert step == 7
        for name in ("cache", "decode", "window"):
            answered(page, name, step=7)
        slider = page.get_by_role("slider")
        until(page, "document.querySelector('[role=slider]').getAttribute('aria-valuenow') === '7'")
        page.wait_for_timeout(300)  # what the slider says of being moved is no choice
        assert at(page)["step"] == 7
        slider.press("ArrowRight")
        until(page, f"{STEP} === 8")
        page.locator("#now").click()
        page.keyboard.press("ArrowRight")
        until(page, "document.querySelector('[role=slider]').getAttribute('aria-valuenow') === '9'")
        assert "step=9" in page.url
        for _ in range(3):  # slower: the answer that is drawn is that of the last step, whichever came last
            page.keyboard.press("ArrowRight")
            page.wait_for_timeout(40)
        for name in ("cache", "decode", "window"):
            answered(page, name, step=12)
        until(page, "document.querySelectorAll('.asking').length === 0")
        assert json.loads(page.get_attribute("#cache-view", "data-answer") or "{}")["step"] == at(page)["step"] == 12


def test_a_click_leads_to_the_card(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0&request=0&rows=committed") as page:
        answered(page, "decode", request=0)
        page.locator("#decode-view g.pick[data-request='1'][data-place='1']").click()
        position = len(PROMPTS[1])
        assert f"at position {position}" in answered(page, "card", request=1, position=position)
        # what is said of the token stays in sight wherever the page is scrolled to
        said = answered(page, "insight", request=1, position=position)
        assert f"Reads position {position}, predicts {position + 1}: " in said
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        box = page.locator("#insight-view").bounding_box()
        assert box is not None and 0 <= box["y"] < 200
        answered(page, "grid", request=1)
        first = len(PROMPTS[1]) - 1
        cell = page.locator(f"#grid-view .column[data-position='{first}'] .pick[data-layer='0']").first
        cell.hover()
        assert f"predicts {first + 1}\nlayer 0: first choice" in page.inner_text("#tip")
        cell.click()
        until(page, f"JSON.parse(document.getElementById('page').dataset.at).position === {first}")
        assert at(page)["layer"] == 0
        answered(page, "card", position=first)
        frame, box = (one.bounding_box() for one in (page.locator("#grid-view .cursor"), cell.locator("rect")))
        assert frame is not None and box is not None
        assert abs(frame["x"] - box["x"]) < 4 and abs(frame["y"] - box["y"]) < 4
        page.locator("#card-view tr[data-layer='1']").click()
        assert at(page)["layer"] == 1
        assert page.locator("#card-view tr.chosen").get_attribute("data-layer") == "1"


def test_a_click_on_a_neighbour_asks_once(browser: Browser, address: str) -> None:
    """Where its steps are had to be asked before anything of it could be: a second way to the server and back."""
    with opened(browser, f"{address}?run=0&request=2&step=10") as page:
        with requests_of(page) as asked:
            ahead = {"story", "insight", "window"}
            heard(page, lambda: [set(views) for views in asked].count(ahead) >= len(PROMPTS) - 1)
        with requests_of(page) as asked:
            page.click('#timeline-view g.pick[data-request="3"][data-step="10"]')
            answered(page, "card", request=3)
        assert "card" in asked[0] and not any("story" in views for views in asked)


@pytest.mark.parametrize("width", [1440, 390])
def test_views_are_asked_for_before_dash_has_drawn_the_page(browser: Browser, address: str, width: int) -> None:
    """In the width that their cards will have, so none is asked for twice. What may be clicked next waits for the page:
    on a busy machine the layout comes long after the steps, and the page's console had an error in it."""
    with watched(browser, address, width=width) as page, requests_of(page) as asked:
        layouts: list[Route] = []
        page.route("**/_dash-layout", lambda route: layouts.append(route))
        page.goto(f"{address}?tab=replay")
        heard(page, lambda: bool(layouts) and any("grid" in views for views in asked))
        page.evaluate("new Promise((yes) => setTimeout(yes, 600))")  # what is asked ahead is asked after 400
        before = [set(views) for views in asked if views]
        assert before[0] == {"facts", "story"} and len(before) == 2
        layouts[0].continue_()
        answered(page, "card", run=0)
        answered(page, "window", run=0)
        heard(page, lambda: {"story", "insight", "window"} in [set(views) for views in asked])
        assert not any("grid" in views for views in [views for views in asked if views][2:])


def test_the_timeline_zooms_by_mouse_and_keys(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0&request=0&step=10", width=1440) as page:
        answered(page, "timeline", run=0)
        svg = page.locator("#timeline-view svg[data-first]")
        first, last, pitch, left = (
            float(svg.get_attribute(f"data-{n}") or 0) for n in ("first", "last", "pitch", "left")
        )
        assert first == 0 and last > 14 and not page.is_visible("#timeline-whole")
        for name in ("text", "grid", "card", "cache", "decode", "window"):  # nothing moves any more
            answered(page, name, run=0)
        page.evaluate("document.querySelector('#timeline-view svg').scrollIntoView({block: 'center'})")
        box = svg.bounding_box()
        assert box is not None

        def over(step: int) -> tuple[float, float]:
            """The place of a step on the page."""
            return box["x"] + left + (step - first + 0.5) * pitch, box["y"] + 60

        page.mouse.move(*over(3))
        page.mouse.down()
        page.mouse.move(*over(7), steps=4)
        assert page.is_visible("#zoom-mark")
        page.mouse.up()
        answered(page, "timeline", zoomed=True)
        assert "zoom=3-7" in page.url and at(page)["step"] == 10 and not page.is_visible("#zoom-mark")
        assert float(svg.get_attribute("data-pitch") or 0) > pitch and svg.get_attribute("data-first") == "3"
        frame = page.locator("#overview-view .shown")
        assert (frame.get_attribute("x"), frame.get_attribute("width")) == ("3", "5")
        link = page.url
        page.keyboard.press("-")
        until(page, "/zoom=1-10/.test(location.search)")
        page.keyboard.press("+")  # around the chosen step, which is shown now
        until(page, "/zoom=8-12/.test(location.search)")
        for _ in range(3):
            page.keyboard.press("ArrowLeft")
        until(page, "/zoom=5-9/.test(location.search)")  # goes with the step
        page.keyboard.press("0")
        until(page, "!/zoom=/.test(location.search)")
        until(page, "document.querySelector('#timeline-view svg').dataset.first === '0'")
        page.get_by_title("zoom in").click()
        until(page, "/zoom=/.test(location.search)")
        page.locator("#timeline-view svg[data-first]").dblclick(position={"x": 4, "y": 4})
        until(page, "!/zoom=/.test(location.search)")
        strip = page.locator("#overview-view svg").bounding_box()
        assert strip is not None
        page.mouse.move(strip["x"] + 0.01 * strip["width"], strip["y"] + 5)
        page.mouse.down()
        page.mouse.move(strip["x"] + 0.5 * strip["width"], strip["y"] + 5, steps=3)
        page.mouse.up()
        until(page, "/zoom=0-/.test(location.search)")
        assert 0 < int(at(page)["zoom"].split("-")[1]) < last  # the words beside the strip change its width
        page.get_by_role("button", name="Leave zoom").click()
        until(page, "!/zoom=/.test(location.search)")
    with opened(browser, link) as page:
        answered(page, "timeline", zoomed=True)
        assert page.locator("#timeline-view svg[data-first]").get_attribute("data-last") == "7"
    with opened(browser, f"{address}?run=0&zoom=7-x") as page:
        until(page, "/zoom is not FIRST-LAST/.test(document.getElementById('notice').innerText)")


def test_a_click_that_moves_the_chosen_cell_draws_no_grid(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0&request=1") as page:
        answered(page, "grid", request=1)
        until(page, "document.querySelectorAll('.asking').length === 0")  # no view waits any more
        page.evaluate("document.querySelector('#grid-view svg').id = 'drawn-before'")
        cells = page.locator("#grid-view .column .pick[data-layer='1']")
        with requests_of(page) as sent:
            cells.nth(2).click()
            row = int(page.locator("#grid-view .column").nth(2).get_attribute("data-row") or -1)
            answered(page, "card", row=row)
            page.locator("#grid-view .column").nth(2).locator(".pick[data-layer='0']").click()
            assert at(page)["layer"] == 0
            page.wait_for_timeout(100)
        clicked = [asked for asked in sent if "story" not in asked]  # which a page asks ahead if it has nothing to do
        of_the_step = {"decode", "insight", "cache", "window"}  # of the one that computed the row
        assert [set(asked) - of_the_step for asked in clicked] == [{"card"}]
        assert page.locator("#drawn-before").count() == 1
        # an answer that cannot be drawn is said; the last of its request, too, after which nothing is on its way
        page.evaluate("void (window.cacheprobe.draw.answer = (view) => { throw new Error(`no ${view}`); })")
        cells.nth(3).click()
        until(page, "document.getElementById('notice').innerText.includes('cannot be shown (no ')")


def test_lens_and_site_are_read_now_where_the_model_is_here(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=2&request=0") as page:
        answered(page, "grid", run=2, site="S", lens="recorded")
        choose(page, "site", "C (MLP output)")
        assert "MLP output" in answered(page, "grid", run=2, site="C", lens="logit")
        choose(page, "colour", "entropy")
        answered(page, "grid", colour="entropy")
        choose(page, "rows", "committed path")
        answered(page, "grid", rows="committed")
        page.get_by_text("What gave this logit?").click()
        assert "logit of" in answered(page, "gave", request=0)
        page.wait_for_selector("#card-card #gave-0 .main-svg")
        first = page.inner_html("#gave-view")
        column = page.locator("#grid-view .column").first
        column.locator(".pick[data-layer='0']").click()
        answered(page, "gave", position=int(column.get_attribute("data-position") or -1))
        assert page.inner_html("#gave-view") != first, "once open, it is of the token that is clicked"
        page.goto(f"{address}?run=0&tab=replay")  # of a model that was given live: nothing on the disk is its name
        answered(page, "card", run=0)
        assert "is not on this machine" in page.inner_text("#lens-why")
        page.get_by_text("What gave this logit?").click()
        assert "is not on this machine" in answered(page, "gave", run=0)


def test_compares_two_runs(browser: Browser, address: str, runs: Path) -> None:
    ours, theirs = (cp.load_trace(runs / name) for name in ("a-one", "b-other"))
    with opened(browser, f"{address}?run=0&against=1&tab=compare&request=0") as page:
        said = answered(page, "compare", run=0, against=1)
        apart = sum(ours.committed(i) != theirs.committed(i) for i in range(len(PROMPTS)))
        assert f"{apart} committed other tokens" in said and "Settings that differ" in said
        assert "weights_sha256" in page.inner_text("#compare-more")
        page.wait_for_selector("#compare-place .js-plotly-plot")
        request = next(i for i in range(len(PROMPTS)) if ours.committed(i) != theirs.committed(i))
        page.locator(f"#compare-view button[data-request='{request}']").click()
        answered(page, "compare", request=request)
        pairs = zip(ours.committed(request), theirs.committed(request), strict=True)
        place = next(i for i, (a, b) in enumerate(pairs) if a != b)
        marked = page.locator("#compare-view .tok.first")
        assert marked.count() == 2 and marked.first.get_attribute("data-place") == str(place)
        choose(page, "run", "b-other")  # no run is compared with itself
        answered(page, "compare", run=1, against=0)
        page.click("#against")
        assert "b-other" not in page.get_by_role("option").all_inner_texts()
    with opened(browser, f"{address}?run=1&against=1&tab=compare") as page:
        answered(page, "compare", run=1, against=0)
        assert "Run 1 cannot be compared with run 1." in page.inner_text("#notice")


def test_stored_results_have_tabs_by_kind(browser: Browser, tmp_path: Path) -> None:
    clean, corrupt = [5, 17, 3, 44, 9], [5, 17, 80, 44, 61]
    cp.patching.activation(loaded(), clean, corrupt, answer=(7, 11), progress=False).save(tmp_path / "a-grid.json")
    for name in ("coin-rows", "prediction-depths", "coin-state-probe"):
        shutil.copy(ROOT / "analyses" / "results" / f"{name}.json", tmp_path)
    (tmp_path / "broken.json").write_text("[1, 2")
    with served(RunList.of([tmp_path])) as address, opened(browser, f"{address}?tab=patching") as page:
        assert "Largest normalised logit difference" in answered(page, "result", result=0)
        page.wait_for_selector("#result-0 .heatmaplayer", state="attached")
        assert page.locator("#result-list button:visible").all_inner_texts() == ["a-grid"]
        page.click("#tab-surgery")
        assert "whose swap brings over most" in answered(page, "result", result=2)
        for i in range(2):  # by span and by row
            page.wait_for_selector(f"#result-{i} .barlayer", state="attached")
        page.click("#tab-probes")
        assert answered(page, "result", result=3).startswith("coinflip-thinking: At 4 of 4 places")
        page.wait_for_selector("#result-1 .scatterlayer", state="attached")
        assert "smollm2-135m + coin-flip: " in page.inner_text("#result-place h3")  # every model that was asked
        page.click("#tab-results")
        assert "not readable as JSON" in answered(page, "result", result=1)
        names = page.locator("#result-list button:visible")
        assert names.all_inner_texts() == ["broken", "prediction-depths"]
        names.nth(1).click()
        answered(page, "result", result=4)
        assert "tab=results&result=4" in page.url.replace("&site=S&lens=recorded&colour=logprob&rows=all", "")
        page.locator("#result-more [data-intent=table]", has_text="values").click()
        answered(page, "result", result=4, table=2)
        assert "behaviour · num_examples" in page.inner_text("#result-more")
        page.goto(f"{address}?tab=results&result=0")  # a result of another tab
        answered(page, "result", result=0)
        assert at(page)["tab"] == "patching"
    with served(RunList.of([tmp_path / "a-grid.json"])) as address, opened(browser, f"{address}?tab=surgery") as page:
        answered(page, "result", result=0)
        assert at(page)["tab"] == "patching"  # the first tab that has something to show
        assert "No result of cache surgery was named; name a folder of them" in page.inner_text("#notice")
        assert page.locator(".tab:visible").all_inner_texts() == ["Patching"]


def test_a_link_leads_back(browser: Browser, address: str) -> None:
    query = "?run=0&request=3&step=12&position=4&layer=1&tab=replay&site=S&lens=recorded&colour=rank&rows=all"
    with opened(browser, f"{address}{query}&against=1&theme=dark") as page:
        answered(page, "card", request=3, position=4)
        assert page.url == f"{address}{query}&against=1&theme=dark&measure=verdict"
        wanted = dict(run=0, request=3, step=12, position=4, layer=1, colour="rank", theme="dark")
        assert {name: at(page)[name] for name in wanted} == wanted


def test_a_wrong_link_is_said(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0&request=99&site=../../etc&layer=x") as page:
        answered(page, "card", run=0)
        for said in ("no request 99", "site is none of S, T, C", "layer is not a number"):
            until(page, f"document.getElementById('notice').innerText.includes({said!r})")
    with opened(browser, f"{address}?run=4") as page:
        until(page, "document.getElementById('notice').innerText.includes('cannot be opened')")
