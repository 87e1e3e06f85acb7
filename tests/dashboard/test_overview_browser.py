"""The overview in a real browser: home of a run of several requests, its table by mouse and keyboard, and its speed."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

import cacheprobe as cp
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe_benchmarks.shared.large_run import save_large_run
from tests.chromium import keep_picture
from tests.dash_page import answered, asked, at, opened, requests_of, served, until
from tests.tiny import PROMPTS, SMALL, loaded

LINE = "#tokens-view tr[data-intent]"
AT = "JSON.parse(document.getElementById('page').dataset.at)"
STATUS = "document.querySelector('#tokens-view [role=status]').innerText"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a-many: five requests.  b-one: one request without drafts and readings.  c-bare: five of them."""
    folder = tmp_path_factory.mktemp("overview")
    early = dict(drafter=cp.drafters.EarlyExit(layer=1), capture="Z")
    cp.run(loaded(), PROMPTS, **SMALL, **early).save(folder / "a-many")
    cp.run(loaded(), PROMPTS[:1], **SMALL, capture=None).save(folder / "b-one")
    cp.run(loaded(), PROMPTS, **SMALL, capture=None).save(folder / "c-bare")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(RunList.of([folder])) as url:
        yield url


def shows(page: Page, line: dict[str, str]) -> None:
    """The microscope is open at the place of a line."""
    request, step, position = (int(line[name]) for name in ("request", "step", "position"))
    answered(page, "card", request=request, position=position)
    answered(page, "cache", request=request, step=step)
    now = at(page)
    assert (now["tab"], now["request"], now["step"], now["position"]) == ("replay", request, step, position)


def test_it_is_home_of_a_run_of_several_requests(browser: Browser, address: str) -> None:
    for query, tab in (("", "overview"), ("?run=0&theme=dark", "overview"), ("?run=0&tab=rejected", "rejected"),
                       ("?run=0&request=2", "replay"), ("?run=0&step=5", "replay"), ("?run=1", "replay"),
                       ("?run=1&tab=overview", "overview"), ("?run=2", "overview")):  # fmt: skip
        with opened(browser, address + query) as page:
            until(page, f"{AT}.tab === '{tab}'")
            assert page.get_attribute(f"#tab-{tab}", "aria-selected") == "true"
            if tab == "overview":
                assert "All tokens" in answered(page, "tokens") and not page.is_visible("#transport")
    with opened(browser, address) as page:
        text = answered(page, "summary", run=0)
        for said in ("draft accepted: the committed token", "Median prediction depth", "The first draft token is",
                     "of their draft tokens accepted", "Most surprising tokens"):  # fmt: skip
            assert said in text
        assert page.locator("#summary-view svg[role=img]").count() == 4


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_it_fits(browser: Browser, address: str, width: int, theme: str) -> None:
    with opened(browser, f"{address}?run=0&tokens=entropy%3D1%3A", width=width, color_scheme=theme) as page:
        answered(page, "tokens", run=0)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(
            "(one => one.scrollWidth <= one.clientWidth)(document.querySelector('#tokens-view .scroll'))"
        )
        keep_picture(page, f"overview-{width}-{theme}")


def test_a_click_and_enter_open_the_microscope(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0") as page:
        answered(page, "tokens", run=0)
        line = page.locator(LINE).nth(7)
        place = {name: line.get_attribute(f"data-{name}") or "" for name in ("request", "step", "position")}
        line.click()
        shows(page, place)
        page.click("#tab-overview")
        page.locator("#summary-view .surprising button").nth(2).press("Enter")
        until(page, f"{AT}.tab === 'replay'")
        page.click("#tab-overview")
        page.keyboard.press("/")
        until(page, "document.activeElement.id === 'tokens-search'")
        page.keyboard.press("Enter")  # to the first line
        page.keyboard.press("ArrowDown")
        page.keyboard.press("End")
        page.keyboard.press("ArrowUp")
        assert page.evaluate(f"[...document.querySelectorAll('{LINE}')].indexOf(document.activeElement)") == 48
        place = page.evaluate("({...document.activeElement.dataset})")
        page.keyboard.press("Enter")
        shows(page, place)


def test_it_is_searched_filtered_and_sorted(browser: Browser, address: str, folder: Path) -> None:
    table = cp.analysis.token_table(cp.load_trace(folder / "a-many"), grouped=False)
    with opened(browser, f"{address}?run=0") as page:
        answered(page, "tokens", run=0)
        page.keyboard.press("/")
        page.keyboard.type("<1")
        answered(page, "tokens", find="<1")
        page.get_by_role("button", name="regular expression").click()
        page.fill("#tokens-search", "(")
        assert "missing )" in answered(page, "tokens", find="(", way="pattern")
        assert page.input_value("#tokens-search") == "(" and page.locator(LINE).count() == 0
        page.fill("#tokens-search", "^<1[0-5]>$")
        answered(page, "tokens", find="^<1[0-5]>$")
        page.locator("[data-tokens=verdict]").select_option("rejected")
        answered(page, "tokens", verdict="rejected")
        page.get_by_role("button", name="each rejection").click()
        answered(page, "tokens", each="1")
        wanted = {f"<{i}>" for i in range(10, 16)}
        own = table[
            (table.verdict == "rejected") & (table.drafted_token.isin(wanted) | table.committed_token.isin(wanted))
        ]
        until(page, f"/^{len(own)} of /.test({STATUS})")
        page.get_by_role("button", name="show all").click()
        until(page, f"{AT}.tokens === null && /^[0-9]+ lines, 1 to 50 shown$/.test({STATUS})")
        assert page.input_value("#tokens-search") == ""
        page.get_by_label("only where").select_option("drafter")
        count = len(cp.analysis.group_rejections(table[table.first_at_drafter_layer.fillna(False)]))
        until(page, f"/^{count} of /.test({STATUS})")
        page.get_by_label("requests").fill("1-2")
        page.locator("summary", has_text="ranges").click()
        page.get_by_label("entropy, nats, least").fill("3")
        answered(page, "tokens", requests="1-2", entropy="3:")
        page.get_by_role("button", name="log-probability, nats").click()
        answered(page, "tokens", sort="logprob")
        page.get_by_role("button", name="log-probability, nats ▲").click()
        answered(page, "tokens", sort="-logprob", asked="drafter")
        lines = [line.inner_text() for line in page.locator(LINE).all()]
        link = page.url
    with opened(browser, link) as page:
        answered(page, "tokens", sort="-logprob", asked="drafter", requests="1-2", entropy="3:")
        assert lines and [line.inner_text() for line in page.locator(LINE).all()] == lines
        assert page.input_value("[data-tokens='entropy 0']") == "3" and page.is_visible("[data-tokens='entropy 0']")
        assert page.input_value("[data-tokens=requests]") == "1-2"
    with opened(browser, f"{address}?run=0&tokens=entropy%3Dhigh%26run%3D1") as page:
        assert "entropy is LEAST:MOST" in answered(page, "tokens", run=0)


def test_a_bar_lists_the_tokens_of_its_request(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0") as page:
        answered(page, "summary", run=0)
        page.locator("#summary-view .pressed[data-value='3']").click()
        answered(page, "tokens", requests="3")
        assert {line.get_attribute("data-request") for line in page.locator(LINE).all()} == {"3"}
        page.locator("#summary-view button", has_text="request").first.press("Enter")
        until(page, f"/^requests=[0-9]+$/.test({AT}.tokens)")
        page.get_by_title("next page").click() if page.get_by_title("next page").is_visible() else None
        assert at(page)["tab"] == "overview"


def test_what_a_run_lacks_is_said(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=2") as page:
        assert answered(page, "summary", run=2).count("This run has no lens readings") == 2
        assert "recorded no lens readings (Z)" in answered(page, "tokens", run=2) and page.locator(LINE).count() == 50


@pytest.mark.slow
def test_two_hundred_requests_are_painted_and_filtered_quickly(browser: Browser, tmp_path: Path) -> None:
    """Limits are twice those wanted, 1.5 s and 0.3 s: other programs share the machine."""
    run = save_large_run(tmp_path / "run", requests=200, tokens=500, layers=3)
    run_list = RunList.of([run])
    with served(run_list) as address:
        asked(address, {"tokens": {"run": 0}, "summary": {"run": 0}, "facts": {"run": 0}})
        with opened(browser, address) as page:
            painted = page.evaluate("performance.now()")
            answered(page, "summary", run=0)
            answered(page, "tokens", run=0)
            assert page.evaluate("performance.now()") < 3000, painted
            assert (
                " lines, 1 to 50 shown" in page.inner_text("#tokens-view")
                and len(run_list.tables(0).tokens.lines) > 1e5
            )
        for question in ({"find": "t9"}, {"find": "9$", "way": "pattern"}, {"verdict": "rejected", "sort": "-times"},
                         {"asked": "late", "entropy": "4:"}, {"requests": "3-70", "sort": "committed"}):  # fmt: skip
            began = time.monotonic()
            [answer] = asked(address, {"tokens": {"run": 0, **question}})
            assert time.monotonic() - began < 0.6 and "of 1" in answer["html"], json.dumps(question)


def test_typing_asks_for_the_table_alone(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0") as page:
        answered(page, "tokens", run=0)
        page.wait_for_timeout(600)
        with requests_of(page) as sent:
            page.fill("#tokens-search", "<7")
            answered(page, "tokens", find="<7")
        assert [set(views) for views in sent] == [{"tokens"}]
