"""How the page behaves: Back and Forward, what it says while it computes, one lens, bad links, and what is seen without
colours or on a small screen."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route

import cacheprobe as cp
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.report.request_text import request_text
from tests.chromium import keep_picture
from tests.dash_page import EARLY, answered, at, choose, opened, served, until
from tests.dashboard.page.contrast import faint_texts
from tests.tiny import PROMPTS, SMALL, loaded

ROOT = Path(__file__).parents[3]
AT = "JSON.parse(document.getElementById('page').dataset.at)"
COUNT = """() => {
    const push = history.pushState.bind(history);
    window.pushes = 0;
    history.pushState = (...entry) => { window.pushes++; push(...entry); };
}"""
"""Counts the entries that the page adds to the history, whose length ends at 50."""
NOTICE = "document.getElementById('notice').innerText"


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with served(RunList.of([runs])) as url:
        yield url


def test_back_and_forward_lead_from_choice_to_choice(browser: Browser, address: str) -> None:
    """Steps and typing change the newest entry; light or dark is no place to come back to."""
    with opened(browser, f"{address}?run=0&request=1&step=8") as page:
        answered(page, "card", request=1)
        page.evaluate(COUNT)
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        until(page, f"{AT}.step === 11")
        assert page.evaluate("pushes") == 0
        page.locator("#timeline-view g.pick[data-request='3'][data-step='4']").click()
        answered(page, "card", request=3)
        page.click("#tab-rejected")
        answered(page, "rejected", run=0)
        page.keyboard.press("/")
        page.keyboard.type("7")
        answered(page, "rejected", find="7")
        page.click("#theme")
        theme = at(page)["theme"]
        assert page.evaluate("pushes") == 2
        page.go_back()
        until(page, f"{AT}.tab === 'replay'")
        assert page.is_visible("#panel-replay") and at(page)["request"] == 3 and at(page)["step"] == 4
        page.go_back()
        answered(page, "card", request=1)
        assert at(page)["step"] == 11 and at(page)["theme"] == theme and "request=1" in page.url
        until(page, "document.querySelector('[role=slider]').getAttribute('aria-valuenow') === '11'")
        until(page, "document.getElementById('request').innerText.includes('request 1')")  # the menu follows
        page.go_forward()
        answered(page, "card", request=3)
        page.go_forward()
        until(page, f"{AT}.tab === 'rejected'")
        assert page.input_value("#rejected-search") == "7"


def test_next_drafts_and_runs_are_choices(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0&request=0&step=0") as page:
        answered(page, "card", request=0)
        first = {name: at(page)[name] for name in ("request", "step", "position")}
        page.keyboard.press("n")
        until(page, f"{AT}.walk === 0")  # it is found
        assert {name: at(page)[name] for name in first} != first
        choose(page, "run", "b-other")
        answered(page, "card", run=1)
        page.go_back()
        answered(page, "card", run=0)
        page.go_back()
        until(page, f"{AT}.position === {first['position']} && {AT}.step === {first['step']}")
        answered(page, "text", request=first["request"])


def test_a_slow_answer_is_said_to_be_computed(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0&request=1&step=8") as page:
        answered(page, "window", request=1)
        until(page, "document.querySelectorAll('.asking').length === 0")
        held: list[Route] = []
        page.route("**/ask", lambda route: held.append(route))
        page.keyboard.press("ArrowRight")
        assert not page.is_visible("#busy")  # what comes at once is not announced
        until(page, "!document.getElementById('busy').hidden")
        assert re.match(r"computing: .*cache", page.inner_text("#busy"))
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        box = page.locator("#busy").bounding_box()
        assert box is not None and 0 < box["y"] < 900
        page.unroute_all()  # lets go on what is held
        answered(page, "cache", step=9)
        until(page, "document.getElementById('busy').hidden")


def test_a_slow_export_is_said_too(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0&request=1") as page:
        answered(page, "timeline", run=0)
        until(page, "document.querySelectorAll('.asking').length === 0")
        held: list[Route] = []
        page.route("**/ask", lambda route: held.append(route))
        button = page.locator("[data-export=code][data-view=timeline]")
        button.click()
        until(page, "document.querySelector('[data-export=code][data-view=timeline]').getAttribute('aria-busy')")
        assert "computing" in button.evaluate("(one) => getComputedStyle(one, '::after').content")
        page.unroute_all()  # lets go on what is held
        page.wait_for_selector("#exports[open]")
        assert button.get_attribute("aria-busy") is None


def test_one_lens_for_the_sentence_the_card_and_the_grid(browser: Browser, address: str, runs: Path) -> None:
    """The reading of C by hand: the states that the run kept, through the model's norm and unembedding."""
    with opened(browser, f"{address}?run=2&request=0") as page:
        answered(page, "insight", run=2, lens="recorded")
        assert page.locator("#text-lens").is_hidden()
        choose(page, "site", "C (MLP output)")
        position = at(page)["position"]
        said = answered(page, "insight", run=2, lens="logit", site="C")
        card = answered(page, "card", run=2, lens="logit", site="C", position=position)
        answered(page, "grid", run=2, lens="logit", site="C")
        assert "Through the logit lens of C (MLP output)" in said
        model = cp.load_model("coinflip-thinking")
        trace = cp.load_trace(runs / "c-thinking", model)
        rows = trace.rows(0, "committed")
        readings = cp.analysis.read_states(trace, cp.lenses.LogitLens(), "C", rows=rows[rows.position == position])
        last = readings.sort_values("layer").iloc[-1]
        assert f"“{last.token}”" in card.splitlines()[0]
        first = f"“{last.token}” is first from layer" if last.agrees else f"“{last.token}” first"
        assert first in said or f"alone had “{last.token}” first" in said
        assert "as recorded, of S (residual stream)" in page.inner_text("#text-lens")  # the text's numbers stay
        choose(page, "lens", "logit, as recorded")
        assert "lens of" not in answered(page, "insight", lens="recorded")
        assert page.locator("#text-lens").is_hidden()
        page.goto(f"{address}?run=0&tab=rejected")
        assert "The lens is the recorded one, logit" in answered(page, "rejected", run=0)


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("run=0&tab=replay&step=99999", "There is no step 99999 in this run, it has 0 to "),
        (
            "run=0&tab=replay&request=1&position=9999",
            "Request 1 predicts no token from position 9999, it does from 2 to ",
        ),
        ("run=0&tab=replay&lens=tuned:7", "There is no lens tuned:7, there are recorded, logit, patchscope"),
        ("run=0&tab=replay&zoom=900-999", "There are no steps 900-999 in this run"),
        ("run=0&tab=replay&top=77", "There is no place 77 in the timeline, it has 0 to 4"),
        ("run=0&tab=replay&token=<b>4", "The link names token, which this page does not know"),
        ("run=0&tab=replay&request=77", "There is no request 77 in this run"),
        ("run=77", "There is no run 77"),
    ],
)
def test_a_bad_link_is_said(browser: Browser, address: str, query: str, says: str) -> None:
    with opened(browser, address + "?" + query) as page:
        until(page, f"{NOTICE}.includes({says!r})")
        if query != "run=77":
            answered(page, "card", run=0)  # and something is shown
            assert page.locator("#card-view .refused").count() == 0
            assert query.split("&")[-1] not in page.url


THEMES = ("light", "dark")


@pytest.fixture(scope="module")
def everything(runs: Path, large: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Runs, and a stored result of each kind but a sweep."""
    folder = tmp_path_factory.mktemp("results")
    clean, corrupt = [5, 17, 3, 44, 9], [5, 17, 80, 44, 61]
    cp.patching.activation(loaded(), clean, corrupt, answer=(7, 11), progress=False).save(folder / "a-grid.json")
    kept = [ROOT / "analyses" / "results" / f"{n}.json" for n in ("coin-rows", "prediction-depths", "coin-state-probe")]
    paths = [runs / name for name in ("a-one", "b-other", "c-thinking")]
    with served(RunList.of([*paths, large, folder / "a-grid.json", *kept])) as url:
        yield url


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [1280, 390])
def test_every_text_has_enough_contrast(browser: Browser, everything: str, theme: str, width: int) -> None:
    tabs = {
        "run=0&tab=replay": "window", "run=0&colour=entropy&measure=entropy&zoom=0-15": "window",
        "run=2&tab=replay": "window",
        "run=0&tab=overview": "summary", "run=3&tab=overview": "tokens",
        "run=2&tab=thoughts": "thoughts", "run=3&tab=rejected": "rejected",
        "run=0&tab=compare&against=1&request=0": "compare",
        **{f"tab={tab}": "result" for tab in ("patching", "surgery", "probes", "results")},
    }  # fmt: skip
    with opened(browser, f"{everything}?theme={theme}", width=width) as page:
        for query, view in tabs.items():
            page.goto(f"{everything}?theme={theme}&unknown=1&{query}")
            page.wait_for_selector("#page[data-at]", state="attached")
            answered(page, view)
            until(page, "document.querySelectorAll('.asking').length === 0 && document.getElementById('busy').hidden")
            assert page.is_visible("#notice")
            page.wait_for_timeout(300)  # figures are drawn
            count, faint = faint_texts(page)
            assert count > 30 and faint == [], (query, faint[:5])
        page.goto(f"{everything}?theme={theme}&run=0&tab=replay")
        for view, button in (("window", "#keys-open"), ("timeline", "[data-export=code][data-view=timeline]")):
            answered(page, view, run=0)
            page.click(button)
            page.wait_for_selector("dialog[open]")
            count, faint = faint_texts(page)
            assert count > 2 and faint == []
            page.locator("dialog[open]").get_by_role("button", name="Close").click()


def test_the_check_of_contrast_can_fail(browser: Browser, everything: str) -> None:
    """In a text of the page, in one of a picture, and in a placeholder."""
    with opened(browser, f"{everything}?run=0&tab=rejected") as page:
        answered(page, "rejected", run=0)
        for rule, name in (
            ("#says { color: #888 !important }", "#says"),
            ("input::placeholder { color: #999 !important }", "input#"),
        ):
            page.evaluate(
                "(css) => { document.body.append(Object.assign(document.createElement('style'), {textContent: css})) }",
                rule,
            )
            assert any(name in one["element"] for one in faint_texts(page)[1]), name
    with opened(browser, f"{everything}?run=0&tab=replay") as page:
        answered(page, "cache", run=0)
        page.evaluate("document.querySelector('#cache-view svg text').style.fill = '#999'")
        assert [one["ink"] for one in faint_texts(page)[1]] == [[153, 153, 153]]


def test_verdicts_differ_by_form_in_text_and_tables(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0&request=0") as page:
        answered(page, "text", run=0)
        style = """(selector) => {
            const style = getComputedStyle(document.querySelector(selector));
            return [style.textDecorationLine, style.borderBottomStyle, style.backgroundColor !== 'rgba(0, 0, 0, 0)'];
        }"""
        forms = {kind: tuple(page.evaluate(style, f"#text-view .legend {kind}")) for kind in
                 ("del", ".accepted", ".own", ".undrafted")}  # fmt: skip
        assert len(set(forms.values())) == 4 and forms["del"][0] == "line-through"
        page.click("#tab-rejected")
        answered(page, "rejected", run=0)
        assert page.evaluate(style, "#rejected-view td.around del")[0] == "line-through"
        assert page.evaluate(style, "#rejected-view td.around ins")[0] == "none"
        page.goto(f"{address}?run=0&request=0")
        answered(page, "card", run=0)
        signs = page.locator("#card-view .facts :is(.kept, .lost)").all_inner_texts()
        assert signs and all(sign[0] in "✓✗" for sign in signs)


def texts_of(page: Page) -> list[str]:
    return page.eval_on_selector_all("#text-view .prose ruby > span", "all => all.map((one) => one.textContent)")


def test_blanks_beside_a_framed_token_are_no_spaces(browser: Browser, tmp_path: Path) -> None:
    """The browser widens a token below a longer rejected draft: a space of its own is a sign there. Accepted newlines
    have a sign too."""
    trace = cp.run(loaded(), PROMPTS[:2], **SMALL, **EARLY)
    names = dict(enumerate(["␣it", "⏎", "␣", "a␣b"]))
    table = trace.token_table
    assert table is not None
    table = table.assign(token=[names[i % 4] for i in table.token_id])
    replace(trace, token_table=table).save(tmp_path / "run")
    with served(RunList.of([tmp_path / "run"])) as url, opened(browser, f"{url}?request=0") as page:
        answered(page, "text", request=0)
        framed = texts_of(page)
        assert framed and all(text == text.strip(" \n") for text in framed) and set(framed) <= {"␣it", "⏎", "␣", "a b"}
        assert (
            page.evaluate("getComputedStyle(document.querySelector('#text-view ruby > span')).borderLeftStyle")
            == "dotted"
        )
        spans = page.locator("#text-view .prose > span[data-position]").all_text_contents()
        assert {" it", "⏎\n"} <= set(spans) and "\n" not in spans
        shown = "".join([*page.locator("#text-view .prose span[data-position]").all_text_contents()])
        assert shown.count("⏎") == sum(i % 4 == 1 for i in trace.committed(0)) > 0
        keep_picture(page, "newlines")


def test_the_report_shows_them_too() -> None:
    trace = cp.run(loaded(), PROMPTS[:2], **SMALL, **EARLY)
    html = request_text(trace.rows(), trace.events(), 0, texts=dict.fromkeys(range(200), "␣x⏎"))
    frames = re.findall(r"<ruby><span[^>]*>([^<]*)</span><rt>", html)
    assert frames and set(frames) == {"␣x⏎"} and " x⏎\n</span>" in html


@pytest.mark.parametrize("tab", ["replay", "rejected", "compare"])
def test_a_phone_gives_a_tenth_of_its_screen_to_what_stays(browser: Browser, address: str, tab: str) -> None:
    with opened(browser, f"{address}?run=0&request=0&tab={tab}", width=390) as page:
        page.set_viewport_size({"width": 390, "height": 844})
        answered(page, {"replay": "window"}.get(tab, tab), run=0)
        page.evaluate("scrollTo(0, 700)")
        stays = page.evaluate(
            """[...document.querySelectorAll('#page *')].filter((one) => one.checkVisibility())
            .filter((one) => ['sticky', 'fixed'].includes(getComputedStyle(one).position) && !one.closest('.card'))
            .map((one) => one.getBoundingClientRect()).filter((box) => box.top < 844 && box.bottom > 0)
            .map((box) => box.height)"""
        )
        assert sum(stays) <= 84.4
        if tab == "replay":
            assert sum(stays) > 40 and page.is_visible("#play")
            slider = page.get_by_role("slider").bounding_box()
            assert slider is not None and 0 <= slider["y"] < 84
            step = at(page)["step"] + 1
            page.get_by_title("one step on (right arrow)").click()
            until(page, f"document.getElementById('now').innerText.startsWith('step {step} of ')")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
