"""The list of rejected drafts in a real browser, and the page's keys: by keyboard and mouse."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page

import cacheprobe as cp
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe_benchmarks.shared.large_run import PROMPT
from tests.dash_page import answered, at, heard, opened, requests_of, served, until
from tests.tiny import PROMPTS, SMALL, loaded

LINE = "#rejected-view tr[data-intent]"
AT = "JSON.parse(document.getElementById('page').dataset.at)"
IS_IN_GRID = "!!document.activeElement.closest('#grid-view svg')"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """b-none: a run without a rejected draft. c-unread: a run without lens readings."""
    folder = tmp_path_factory.mktemp("runs")
    cp.run(loaded(), PROMPTS[:2], **{**SMALL, "max_new_tokens": 4}, capture="SZ").save(folder / "b-none")
    early = dict(drafter=cp.drafters.EarlyExit(layer=1), capture="S")
    cp.run(loaded(), PROMPTS, **SMALL, **early).save(folder / "c-unread")
    return folder


@pytest.fixture(scope="module")
def lines(large: Path) -> list[tuple[int, int, int]]:
    """(request, step, position of the row that predicts the drafted token) of each rejected draft of a-long."""
    table = cp.load_trace(large).rejected()
    return list(zip(table.request_id.tolist(), table.step.tolist(), (table.position - 1).tolist(), strict=True))


@pytest.fixture(scope="module")
def address(large: Path, folder: Path) -> Iterator[str]:
    with served(RunList.of([large, folder])) as url:
        yield url


def place(page: Page) -> tuple[int, int, int]:
    return at(page)["request"], at(page)["step"], at(page)["position"]


def is_at(page: Page, line: tuple[int, int, int]) -> None:
    until(
        page,
        f"(({{request, step, position}}) => '' + [request, step, position])({AT}) === '{','.join(map(str, line))}'",
    )


def shows(page: Page, line: tuple[int, int, int]) -> None:
    """The views that follow the selection have answered for this rejected draft."""
    request, step, position = line
    answered(page, "card", request=request, position=position)
    for name in ("decode", "cache"):
        answered(page, name, request=request, step=step)
    answered(page, "grid", request=request)
    until(page, "document.querySelector('#grid-view .cursor').style.display !== 'none'")
    assert place(page) == line and at(page)["tab"] == "replay"
    for name, value in zip(("request", "step", "position"), line, strict=True):
        assert f"{name}={value}" in page.url


def test_a_click_and_enter_open_the_place(browser: Browser, address: str, lines: list) -> None:
    with opened(browser, f"{address}?run=0&tab=rejected") as page:
        assert "72 drafts were rejected, in 12 requests" in answered(page, "rejected", page=0)
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.evaluate(
                "(one => one.scrollWidth <= one.clientWidth)(document.querySelector('#rejected-view .scroll'))"
            )
        page.locator(LINE).nth(9).click()
        shows(page, lines[9])
        page.click("#tab-rejected")
        until(page, f"document.querySelectorAll('{LINE}.chosen').length === 1")
        page.keyboard.press("ArrowDown")  # to the chosen line
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        shows(page, lines[10])
        page.click("#tab-rejected")
        page.locator(LINE).nth(10).focus()
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        shows(page, lines[0])
        link = page.url
    with opened(browser, link) as page:
        shows(page, lines[0])


def test_the_list_is_sorted_and_paged_by_mouse(browser: Browser, address: str, lines: list) -> None:
    with opened(browser, f"{address}?run=0&tab=rejected&request=0&step=3") as page:
        assert page.locator(LINE).count() in (0, 50)
        answered(page, "rejected", page=0)
        page.get_by_title("next page").click()
        answered(page, "rejected", page=1)
        assert page.locator(LINE).count() == 22 and page.get_by_title("next page").is_disabled()
        page.get_by_role("button", name="request", exact=True).click()
        answered(page, "rejected", sort="request", page=0)
        page.get_by_role("button", name="request ▲").click()
        answered(page, "rejected", sort="-request", page=0)
        assert page.locator(LINE).first.get_attribute("data-request") == "11"
        assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "descending" and "sort=-request" in page.url
        page.keyboard.press("n")  # in the order of the list, from a place that is no line of it
        is_at(page, next(line for line in lines if line[0] == 11))
        page.get_by_role("button", name="only the chosen request").click()
        answered(page, "rejected", request=11)
        assert page.locator(LINE).count() == 6
        link = page.url
    with opened(browser, link) as page:
        answered(page, "rejected", request=11, sort="-request")
        assert page.locator(LINE).count() == 6


def test_a_search_by_key(browser: Browser, address: str, large: Path) -> None:
    token = cp.load_trace(large).rejected().drafted_token.iloc[60].lstrip("␣ ")
    with opened(browser, f"{address}?run=0&request=3") as page:
        answered(page, "card", request=3)
        page.keyboard.press("/")
        until(page, "document.activeElement.id === 'rejected-search'")
        assert at(page)["tab"] == "rejected" and page.input_value("#rejected-search") == ""
        page.keyboard.type(f" {token}np/?")
        for _ in range(4):
            page.keyboard.press("Backspace")
        answered(page, "rejected", find=f" {token}")
        assert page.input_value("#rejected-search") == f" {token}" and at(page)["request"] == 3  # n and p were typed
        assert not page.locator("#keys").is_visible()
        assert 0 < page.locator(LINE).count() < 20
        assert all(token in text for text in page.locator(LINE).all_inner_texts())
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        until(page, f"{AT}.tab === 'replay'")
        link = page.url
    with opened(browser, link) as page:
        answered(page, "card")
        page.keyboard.press("/")
        until(page, "document.activeElement.id === 'rejected-search'")
        assert page.input_value("#rejected-search") == f" {token}"
        page.fill("#rejected-search", "<img src=x>")
        assert "“<img src=x>”" in answered(page, "rejected", find="<img src=x>")
        assert page.locator("#page img").count() == 0


def test_filters_by_layer_and_margin_are_in_the_address(browser: Browser, address: str, large: Path) -> None:
    table = cp.load_trace(large).rejected()
    low = int((table.flip_layer <= 1).sum())
    assert 0 < low < len(table) and table.drafter_layer.isna().all() and (table.margin_nats == 0).all()
    with opened(browser, f"{address}?run=0&tab=rejected") as page:
        answered(page, "rejected", page=0)
        page.get_by_label("committed first from layer, most").focus()
        page.keyboard.type("1")
        answered(page, "rejected", flips=":1")
        until(page, f"/ of {low}$/.test(document.querySelector('.pages span').innerText)")
        page.get_by_label("margin, nats, least").fill("0.5")
        assert "passes the filters" in answered(page, "rejected", margin="0.5:")
        page.get_by_label("margin, nats, least").fill("")
        page.get_by_label("margin, nats, most").fill("0.25")
        answered(page, "rejected", margin=":0.25", flips=":1")
        page.get_by_label("drafter’s layer").select_option("none")
        answered(page, "rejected", drafter="none")
        until(page, f"/ of {low}$/.test(document.querySelector('.pages span').innerText)")
        link = page.url
    with opened(browser, link) as page:
        answered(page, "rejected", drafter="none", margin=":0.25", flips=":1")
        values = ["drafter", "flips 0", "flips 1", "margin 0", "margin 1"]
        assert [page.input_value(f"[data-filter='{name}']") for name in values] == ["none", "", "1", "", "0.25"]
        page.get_by_role("button", name="show all").click()
        until(page, "/ of 72$/.test(document.querySelector('.pages span').innerText)")
        assert page.input_value("[data-filter='margin 1']") == "" and "flips=" not in page.url
    with opened(browser, f"{address}?run=0&tab=rejected&margin=much") as page:
        until(page, "/margin is not LEAST:MOST/.test(document.getElementById('notice').innerText)")


def test_n_and_p_lead_on_from_any_tab(browser: Browser, address: str, lines: list) -> None:
    request, step, position = lines[20]
    with opened(browser, f"{address}?run=0&request={request}&step={step}&position={position}") as page:
        shows(page, lines[20])
        page.keyboard.press("n")
        shows(page, lines[21])
        page.evaluate(
            """() => { for (let i = 0; i < 6; i++) {
                document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "n", bubbles: true}));
            } }"""
        )
        shows(page, lines[27])  # in another request
        page.click("#tab-compare")
        until(page, f"{AT}.tab === 'compare'")
        page.keyboard.press("p")
        shows(page, lines[26])
        page.keyboard.press("n")
        is_at(page, lines[27])
        page.click("#tab-rejected")
        page.locator(f"{LINE}.chosen").wait_for()
        page.locator(f"{LINE}.chosen").focus()
        for number in range(28, 52):  # on to the next page of the list
            page.keyboard.press("n")
            is_at(page, lines[number])
        answered(page, "rejected", page=1)
        assert at(page)["tab"] == "rejected"
        chosen = page.locator(f"{LINE}.chosen")
        chosen.wait_for()
        assert (chosen.get_attribute("data-request"), chosen.get_attribute("data-step")) == tuple(
            map(str, lines[51][:2])
        )
    request, step, position = lines[-1]
    with opened(browser, f"{address}?run=0&request={request}&step={step}&position={position}") as page:
        shows(page, lines[-1])
        page.keyboard.press("n")
        until(page, "/no rejected draft after this place/.test(document.getElementById('notice').innerText)")
        page.keyboard.press("p")
        shows(page, lines[-2])
        assert not page.is_visible("#notice")


def test_the_keys_are_listed(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0&tab=replay", width=390) as page:
        answered(page, "card")
        before = at(page)
        page.keyboard.press("?")
        dialog = page.get_by_role("dialog")
        for said in ("next, previous rejected draft", "search", "Home, End", "lens grid", "open the token"):
            assert said in dialog.inner_text()
        assert "first layer from which" in dialog.inner_text() and page.evaluate("keys.scrollTop") == 0
        box = dialog.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
        page.keyboard.press("n")  # not while it covers the page
        page.wait_for_timeout(100)
        assert at(page) == before
        page.keyboard.press("?")
        assert not dialog.is_visible()
        page.click("#keys-open")
        page.keyboard.press("Escape")
        assert not dialog.is_visible()
        page.click("#keys-open")
        dialog.get_by_role("button", name="Close").click()
        assert not dialog.is_visible()


def committed_in(page: Page, position: int) -> int:
    """The step in which the token was committed that the row at a position predicts."""
    token = page.locator(f"#text-view [data-position='{position}'][data-step]:not([data-intent])")
    return int(token.first.get_attribute("data-step") or -1)


def column(page: Page, position: int) -> Locator:
    return page.locator(f"#grid-view .column[data-position='{position}']").first


def test_arrows_move_in_the_lens_grid(browser: Browser, address: str) -> None:
    first, last = PROMPT - 1, PROMPT + 72 - 2
    with opened(browser, f"{address}?run=0&request=2&step=12&position=20&rows=committed") as page:
        answered(page, "grid", request=2)
        page.keyboard.press("ArrowRight")  # outside of the grid: a step
        until(page, f"{AT}.step === 13")
        page.keyboard.press("Home")
        until(page, f"{AT}.position === {first}")
        assert at(page)["step"] == committed_in(page, first)
        page.keyboard.press("g")
        until(page, IS_IN_GRID)
        page.keyboard.press("ArrowRight")
        answered(page, "card", position=first + 1)
        assert at(page)["step"] == int(column(page, first + 1).get_attribute("data-born") or -1)
        assert at(page)["layer"] == 2
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")  # there is no lower layer
        assert at(page)["layer"] == 0
        page.keyboard.press("ArrowUp")
        assert at(page)["layer"] == 1
        page.keyboard.press("ArrowLeft")
        answered(page, "card", position=first)
        page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(100)
        assert at(page)["position"] == first
        drawn = page.locator("#grid-view .column").count()
        for _ in range(drawn):  # on to the next page of the grid
            page.keyboard.press("ArrowRight")
        answered(page, "card", position=first + drawn)
        until(page, f"document.querySelector('#grid-view [data-first]').dataset.first === '{first + drawn}'")
        assert page.evaluate(IS_IN_GRID)
        page.keyboard.press("End")
        answered(page, "card", position=last)
        assert at(page)["step"] == committed_in(page, last)
        page.locator("#grid-view .column .pick[data-layer='2']").first.click()
        page.keyboard.press("ArrowRight")
        second = page.locator("#grid-view .column").nth(1).get_attribute("data-position")
        answered(page, "card", position=int(second or -1))
        page.get_by_role("slider").press("Home")  # is the slider's own
        until(page, f"{AT}.step === 0")


def test_runs_that_lack_something_say_so(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=1&tab=rejected") as page:
        until(
            page, "document.getElementById('notice').innerText.startsWith('No draft of b-none was rejected: no draft')"
        )
        assert at(page)["tab"] == "replay" and not page.locator("#tab-rejected").is_visible()
        page.keyboard.press("n")
        until(page, "/No draft of this run was rejected/.test(document.getElementById('notice').innerText)")
        page.keyboard.press("/")
        assert at(page)["tab"] == "replay"
    with opened(browser, f"{address}?run=2&tab=rejected") as page:
        assert "its margin, are not known" in answered(page, "rejected", run=2)
        page.locator(LINE).first.click()
        answered(page, "decode", run=2)
        answered(page, "cache", run=2)


def test_a_held_key_asks_for_the_newest_place_alone(browser: Browser, address: str, lines: list) -> None:
    """Thirty presses in a row are not thirty questions, and none is lost."""
    with opened(browser, f"{address}?run=0&tab=rejected&request=0&step=0") as page:
        answered(page, "rejected", page=0)
        with requests_of(page) as sent:
            page.evaluate(
                """() => { for (let i = 0; i < 30; i++) {
                    document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "n", bubbles: true}));
                } }"""
            )
            is_at(page, lines[29])
            heard(page, lambda: any("walk" in views for views in sent))
        # one that is not answered within 150 ms is abandoned and asked again, so a busy machine asks a few more
        assert sum("walk" in views for views in sent) <= 10
