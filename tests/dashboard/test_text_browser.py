"""The text of a request in a real browser: the first view of a run, and linked with the others."""

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from playwright.sync_api import Browser, Page

import cacheprobe as cp
from cacheprobe.views.dashboard.run_list import RunList
from tests.chromium import keep_picture
from tests.dash_page import answered, at, opened, served, until
from tests.dictionaries.planted import random_dictionary
from tests.tiny import PROMPTS, SMALL, loaded

TOKEN = "#text-view span.pick"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """d-features: a run with features of a dictionary."""
    folder = tmp_path_factory.mktemp("runs")
    early = cp.drafters.EarlyExit(layer=1)
    kept = cp.CaptureConfig("Z", dictionary=random_dictionary(), top_features=48)
    cp.run(loaded(), PROMPTS[:2], **SMALL, drafter=early, capture=kept).save(folder / "d-features")
    return folder


@pytest.fixture(scope="module")
def address(large: Path, runs: Path, folder: Path) -> Iterator[str]:
    with served(RunList.of([large, runs / "c-thinking", folder])) as url:
        yield url


def token(page: Page, position: int) -> str:
    return f'#text-view span[data-position="{position}"]'


@pytest.mark.parametrize(("width", "theme"), [(1440, "dark"), (390, "light")])
def test_it_is_the_first_view_and_the_lens_grid_is_above_the_fold(
    browser: Browser, address: str, width: int, theme: str
) -> None:
    with opened(browser, f"{address}?tab=replay&theme={theme}", width=width) as page:
        answered(page, "grid")
        until(page, f"document.querySelectorAll('{TOKEN}').length === 72")
        tops = {name: page.locator(name).bounding_box() for name in ("#text-card", "#lens-card", "#insight-view")}
        assert tops["#text-card"] is not None and tops["#text-card"]["y"] < 560
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if width == 1440:
            grid = page.locator("#grid-view svg.readings").bounding_box()
            sentence = tops["#insight-view"]
            assert grid is not None and grid["y"] + 100 < 900 and sentence is not None and sentence["y"] < 200
        keep_picture(page, f"text-{width}-{theme}")


def test_a_click_chooses_a_token_and_shift_a_range(browser: Browser, address: str) -> None:
    with opened(browser, address + "?request=3") as page:
        answered(page, "grid", request=3)
        positions = page.eval_on_selector_all(TOKEN, "all => all.map((one) => Number(one.dataset.position))")
        first, last = positions[10], positions[14]
        page.hover(token(page, first))
        assert "generated token 11" in page.inner_text("#tip") and "prediction depth: layer" in page.inner_text("#tip")
        page.click(token(page, first))
        answered(page, "card", request=3, position=first)
        assert at(page)["position"] == first and page.locator(".here").count() == 1
        assert at(page)["step"] == int(page.locator(token(page, first)).get_attribute("data-step") or -1)
        page.click(token(page, last), modifiers=["Shift"])
        answered(page, "range", position=first, until=last)
        assert page.locator("#text-view .ranged").count() == 5 and f"until={last}" in page.url
        assert "Tokens 11 to 15" in page.inner_text("#range-view") and "5 tokens" in page.inner_text("#range-view")
        page.keyboard.press("Home")
        until(page, "document.getElementById('range-view').hidden")
        assert page.locator("#text-view .ranged").count() == 0
    with opened(browser, f"{address}?request=3&position={first}&until={last}") as page:
        answered(page, "range", position=first, until=last)
        page.goto(f"{address}?request=3&position=20&until=999999999")  # an end that does not exist is harmless
        answered(page, "range", until=999999999)
        answered(page, "grid", request=3)
        assert page.inner_text("#range-view").startswith("Tokens ") and page.locator("#text-view .ranged").count() > 0


def test_the_saved_picture_has_the_text_in_its_place(browser: Browser, address: str) -> None:
    """Also that of a text of which the page shows a part."""
    with opened(browser, address + "?request=0", width=390) as page:
        answered(page, "grid", request=0)
        until(page, f"document.querySelectorAll('{TOKEN}').length === 72")
        box = "document.querySelector('#text-view .prose')"
        page.add_style_tag(content=".dash .prose { max-height: 140px }")
        page.evaluate(f"{box}.scrollTop = 90")
        assert page.evaluate(f"{box}.scrollHeight > {box}.clientHeight + 90")
        with page.expect_download() as download:
            page.locator("[data-export=svg][data-view=text]").click()
        texts = [one for one in ElementTree.parse(download.value.path()).iter() if one.tag.endswith("}text")]
        words = ["".join(one.itertext()) for one in texts]
        heading, legend = (next(i for i, word in enumerate(words) if start in word) for start in ("Request 0", "abc"))
        ends = [float(texts[i].attrib["y"]) for i in (heading, legend)]
        inside = [float(one.attrib["y"]) for one in texts[heading + 1 : legend] if one.attrib["font-size"] == "14.5px"]
        assert len(inside) >= 72 and ends[0] < min(inside) and max(inside) < ends[1]


def test_a_rejected_draft_opens_its_step_and_a_measure_colours_the_text(
    browser: Browser, address: str, large: Path
) -> None:
    rejected = cp.load_trace(large).rejected()
    line = rejected[rejected.request_id == 0].iloc[1]
    with opened(browser, address + "?request=0") as page:
        answered(page, "text", request=0)
        page.click(f'#text-view del[data-step="{line.step}"]')
        answered(page, "card", request=0, position=int(line.position) - 1)
        assert at(page)["step"] == line.step
        page.goto(f"{address}?measure=entropy")
        answered(page, "text", measure="entropy")
        assert page.locator("#text-view .shade[data-position]").count() == 72
        page.locator("#measure").click()
        page.get_by_role("option", name="prediction depth").click()
        answered(page, "text", measure="depth")
        assert "measure=depth" in page.url and "layer 2" in page.inner_text("#text-view .legend")


def test_a_feature_of_the_card_colours_the_text(browser: Browser, address: str, folder: Path) -> None:
    """Each token by the activation in the row that reads it; a link keeps the feature."""
    trace = cp.load_trace(folder / "d-features")
    features = trace.features(top=48)
    of_token = features[(features.request_id == 0) & (features.status == "committed")]
    position = int(trace.rows(0, "committed").position.max()) - 4
    wanted = of_token[of_token.position == position].sort_values("rank")
    with opened(browser, f"{address}?run=2&request=0&position={position}") as page:
        answered(page, "card", run=2, position=position)
        buttons = page.locator("#card-view .features button")
        assert [int(text) for text in buttons.all_inner_texts()] == wanted.feature.tolist()
        assert "residual stream" in page.inner_text("#card-view h4") and "layer 1" in page.inner_text("#card-view h4")
        feature = int(wanted.feature.iloc[0])
        buttons.first.click()
        answered(page, "text", measure="feature", feature=feature)
        assert f"feature={feature}" in page.url
        page.reload()
        answered(page, "text", measure="feature", feature=feature)
        active = of_token[of_token.feature == feature].set_index("position").activation
        shown = {
            int(span.get_attribute("data-position") or 0) + 1: float((span.get_attribute("style") or "").split(":")[1])
            for span in page.locator("#text-view .shade[data-position]").all()
        }
        strongest = max(active.get(place, 0.0) for place in shown)
        counts = of_token.groupby("position").size()
        most = features[features.request_id == 0].groupby("row").size().max()
        known = {place for place in counts.index if place in active.index or counts[place] < most}
        generated = range(len(PROMPTS[0]), len(PROMPTS[0]) + SMALL["max_new_tokens"] - 1)  # no row reads the last token
        assert set(shown) == known & set(generated) and len(shown) > 10
        for place, share in shown.items():
            assert abs(share - active.get(place, 0.0) / strongest) < 0.006  # two digits


def test_thoughts_stand_below_the_text_and_features_that_are_not_there_are_said(browser: Browser, address: str) -> None:
    with opened(browser, address + "?run=1&tab=replay") as page:
        answered(page, "text", run=1)
        below = page.locator("#text-view .thought").last
        box, thought = below.bounding_box(), below.locator("rt").bounding_box()
        assert box is not None and thought is not None and thought["y"] > box["y"]
        for query, says in (("run=0", "this run recorded no features"), ("run=2", "no feature is chosen")):
            page.goto(f"{address}?{query}&measure=feature")
            assert says in answered(page, "text", measure="feature")


def test_pictures_tell_what_is_under_the_pointer_until_a_key_is_pressed(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}?run=0&request=1") as page:
        for view, said in (("cache", "written in step"), ("timeline", r"request \d+"), ("window", r"position")):
            answered(page, view, request=1) if view != "timeline" else answered(page, view)
            cell = page.locator(f"#{view}-view svg [data-says]").first
            assert page.locator(f"#{view}-view svg g > title").count() == 0
            cell.hover()
            assert re.search(said, page.inner_text("#tip"))
            page.keyboard.press("Shift")
            assert not page.locator("#tip").is_visible()
