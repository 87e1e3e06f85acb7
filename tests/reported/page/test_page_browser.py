"""What a reader sees in a real browser: one lens at a time, the most rolled back first, and a report with styles."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route

import cacheprobe as cp
from cacheprobe.models.known import PLAIN
from cacheprobe.views.dashboard.run_list import RunList
from tests.dash_page import answered, choose, heard, opened, served, until
from tests.tiny import SMALL, loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a-many: 24 requests that lost other numbers of tokens; b-plain: of a shipped model, whose states can be read."""
    folder = tmp_path_factory.mktemp("runs")
    prompts = [[3 + i, 5 + 2 * i, 7 + 3 * i % 50] for i in range(24)]
    sampled = cp.SamplingParams(temperature=1.0, seed=7)
    settings = {**SMALL, "max_new_tokens": 8, "sampling": sampled}
    cp.run(loaded(), prompts, **settings, drafter=cp.drafters.EarlyExit(layer=1)).save(folder / "a-many")
    examples = cp.tasks.CoinFlip(people=3).examples(2, seed=3)
    kept = {**SMALL, "capacity": 128, "max_new_tokens": 4, "capture": "SZ"}
    cp.run(cp.load_model(PLAIN), examples, **kept).save(folder / "b-plain")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(RunList.of([folder / "a-many", folder / "b-plain"])) as url:
        yield url


def test_the_most_rolled_back_come_first_whoever_is_chosen(browser: Browser, address: str, folder: Path) -> None:
    events = cp.load_trace(folder / "a-many").events()
    lost = events.dropna(subset="num_accepted")
    lost = (lost.draft_token_ids.map(len) - lost.num_accepted.astype(int)).groupby(lost.request_id).sum()
    lost = lost.reindex(range(24), fill_value=0)
    order = sorted(lost.index, key=lambda request: (-lost[request], request))
    drawn = "[...document.querySelectorAll('#timeline-view .pick:not([data-step])')].map((one) => one.dataset.request)"
    with opened(browser, address) as page:
        for chosen in (order[-1], order[12], order[0]):
            page.goto(f"{address}?run=0&request={chosen}")
            answered(page, "timeline", order="")
            page.get_by_text("Most rolled back first").click()
            said = answered(page, "timeline", order="losses")
            assert page.evaluate(drawn) == [str(request) for request in order[:25]] and "lost=first" in page.url
            assert "Sorted by the number of tokens rolled back, most first" in said
            answered(page, "decode", request=chosen)  # stays around the chosen request
            assert page.locator(f"#decode-view [data-request='{chosen}']").count() > 0
        page.get_by_text("Most rolled back first").click()
        answered(page, "timeline", order="")


def test_no_view_shows_another_lens_than_the_chosen_one(browser: Browser, address: str) -> None:
    """Reading through a lens takes a while; what was read through the lens before is not shown meanwhile."""
    with opened(browser, f"{address}?run=1&request=0", width=390) as page:
        for view in ("grid", "card"):
            answered(page, view, lens="recorded")
        held: list[Route] = []

        def hold(route: Route) -> None:
            is_reading = '"lens":"logit"' in (route.request.post_data or "")
            held.append(route) if is_reading else route.continue_()

        page.route("**/ask", hold)
        choose(page, "lens", "logit, read now")
        heard(page, lambda: len(held) > 0)
        page.wait_for_timeout(300)
        for view in ("grid", "card"):
            assert page.inner_text(f"#{view}-view").strip() == "", view
            assert page.locator(f"#{view}-view svg:visible, #{view}-view td:visible").count() == 0
        held.pop().continue_()
        for view in ("grid", "card"):
            answered(page, view, lens="logit")
            until(page, f"document.getElementById('{view}-view').innerText.length > 100")


@pytest.mark.parametrize(("width", "theme"), [(1280, "dark"), (390, "light")])
def test_the_text_of_a_report_has_colours(
    browser: Browser, folder: Path, tmp_path: Path, width: int, theme: str
) -> None:
    trace = cp.load_trace(folder / "a-many")
    judged = trace.events().dropna(subset="num_accepted")
    both = judged[(judged.num_accepted > 0) & (judged.draft_token_ids.map(len) > judged.num_accepted)]
    path = cp.plots.write_report(trace, tmp_path / "report.html", int(both.request_id.iloc[0]))
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    style = """(one) => {
        const {color, backgroundColor, boxShadow, textDecorationLine, fontSize} = getComputedStyle(one);
        return {color, backgroundColor, boxShadow, textDecorationLine, size: parseFloat(fontSize)};
    }"""
    styles = {
        name: page.locator(f".prose {name}").first.evaluate(style) for name in (".asked", ".accepted", ".own", "rt del")
    }
    assert len({str(sorted(of.items())) for of in styles.values()}) == 4
    red, green, _ = map(int, re.findall(r"\d+", styles["rt del"]["color"]))
    assert styles[".asked"]["color"] != styles[".accepted"]["color"] and red > 1.5 * green
    assert (
        styles[".accepted"]["backgroundColor"] != "rgba(0, 0, 0, 0)"
        and "line-through" in styles["rt del"]["textDecorationLine"]
    )
    assert styles["rt del"]["size"] < styles[".own"]["size"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    above, below = (page.locator(f".prose ruby {name}").first.bounding_box() for name in ("del", "span"))
    assert above is not None and below is not None and above["y"] < below["y"]
    assert asked == [path.as_uri()]  # it needs no other file
    page.close()
