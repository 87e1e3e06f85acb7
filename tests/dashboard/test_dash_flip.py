"""What would have changed the verdict: the button of a rejected draft, its search, and what it refuses."""

import json
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from re import findall
from threading import Event
from typing import Any

import pytest
from playwright.sync_api import Browser

import cacheprobe as cp
from cacheprobe.views.dashboard.flip_jobs import FlipJob
from cacheprobe.views.dashboard.questions import CannotShow, answered
from cacheprobe.views.dashboard.reader import RunReader
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.run_tables import RunTables
from cacheprobe.views.dashboard.tabs import flip, lens
from tests.dash_page import answered as shown
from tests.dash_page import opened, served, until
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

MOST_SECONDS = 300


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    settings = dict(drafter=cp.drafters.EarlyExit(layer=1), deterministic=True, capture="STCZ")
    return cp.run(loaded(), PROMPTS[:2], **SMALL, **settings)


@pytest.fixture(scope="module")
def folder(trace: cp.Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flip")
    hf_model().save_pretrained(folder / "model")
    trace.save(folder / "run")
    return folder


@pytest.fixture
def run_list(folder: Path) -> RunList:
    """Without searches of another test."""
    return RunList.of([folder / "run"], str(folder / "model"))


def question(trace: cp.Trace, do: str) -> dict[str, Any]:
    line = trace.rejected().iloc[0]
    return {"run": 0, "request": int(line.request_id), "step": int(line.step), "do": do, "theme": "dark"}


def followed(run_list: RunList, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every answer until the last one."""
    end = time.monotonic() + MOST_SECONDS
    answer = answered(lambda q: flip.FlipSearch(run_list, q).draw(), asked)
    while answer.get("goes_on"):
        yield answer
        assert time.monotonic() < end
        time.sleep(0.05)
        answer = answered(lambda q: flip.FlipSearch(run_list, q).draw(), {**asked, "do": "look"})
    yield answer


def test_every_rejected_draft_has_a_button_and_no_other_token(trace: cp.Trace, run_list: RunList) -> None:
    """A token after a rejected one was rolled back too, and nothing judged it."""
    found = set()
    tables = run_list.tables(0)
    for request in range(2):
        first, end = (
            tables.prompt_length(request) - 1,
            tables.prompt_length(request) + len(trace.committed(request)) - 2,
        )
        for position in range(first, end + 1):
            about = dict(run=0, request=request, position=position, row=None, site="S", lens="recorded")
            for place in findall('data-flip="(.*?)"', lens.RowCard(run_list, about).draw()):
                at = json.loads(unescape(place))
                assert at["run"] == 0
                found.add((at["request"], at["step"], position + 1))
    rejected = trace.rejected()
    assert found == set(zip(rejected.request_id, rejected.step, rejected.position, strict=True)) and found
    assert trace.num_rolled_back >= len(found)


def test_a_model_whose_states_are_not_edited_has_no_button(tmp_path: Path) -> None:
    examples = cp.tasks.CoinFlip(people=5).examples(n=2, seed=0)
    settings = dict(drafter=cp.drafters.EarlyExit(layer=0), capacity=128, max_new_tokens=12, window=4, progress=False)
    free = cp.SamplingParams(stop_token_ids=(), temperature=1.0)
    run = cp.run(cp.load_model("coinflip-plain"), examples, sampling=free, deterministic=True, **settings)
    run_list, line = RunList.of([run.save(tmp_path / "run")]), run.rejected().iloc[0]
    about = dict(run=0, request=int(line.request_id), position=int(line.position) - 1, row=None, site="S")
    html = lens.RowCard(run_list, {**about, "lens": "recorded"}).draw()
    assert "data-flip" not in html and "rolled back" in html
    with pytest.raises(ValueError, match="got one of coinflip-plain, which is built here"):
        cp.analysis.flip(run, int(line.request_id), int(line.step), progress=False)


def test_a_search_tells_how_far_it_is_and_gives_the_figure(trace: cp.Trace, run_list: RunList) -> None:
    jobs, asked = run_list.jobs, question(trace, "start")
    *before, result = followed(run_list, asked)
    assert "error" not in result, result
    assert before and before[0]["html"].count("data-flip-do='cancel'") == 1
    wanted = cp.analysis.flip(trace, asked["request"], asked["step"], progress=False)
    [shape] = findall(r'"z": {[^}]*"shape": "(\d+), \d+"', json.dumps(result["graphs"]))
    assert shape == "3"  # layers
    run = run_list.tables(0).run
    job = jobs.look((run.directory, run.run_id, asked["request"], asked["step"]))
    assert job is not None and job.found is not None
    assert job.found.table.change_nats.to_numpy() == pytest.approx(wanted.table.change_nats.to_numpy(), abs=1e-5)
    assert job.found.table.flips.tolist() == wanted.table.flips.tolist()
    assert job.done == job.total == len(wanted.table)
    assert "edits make the verifier choose" in result["html"] and "cacheprobe flip " in unescape(result["more"])
    assert flip.FlipSearch(run_list, asked).draw()["more"] == result["more"]  # kept: no second search
    assert jobs.look(next(iter(jobs._jobs))) is job


def test_a_search_can_be_cancelled_and_another_one_ends_it(
    trace: cp.Trace, run_list: RunList, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, ended = Event(), []

    def search(_reader: RunReader, _tables: RunTables, _request: int, step: int, progress: Any) -> None:
        progress(0, 2)
        goes_on.wait(60)
        try:
            progress(1, 2)
        finally:
            ended.append(step)
        raise ValueError("<b>no such state")

    monkeypatch.setattr(RunReader, "flip", search)
    jobs, asked = run_list.jobs, question(trace, "start")
    assert flip.FlipSearch(run_list, asked).draw()["goes_on"]
    cancelled = {"html": "<p class='note'>Cancelled.</p>", "goes_on": False}
    assert flip.FlipSearch(run_list, {**asked, "do": "cancel"}).draw() == cancelled
    assert flip.FlipSearch(run_list, asked).draw()["goes_on"]  # begins again
    [second] = jobs._jobs.values()
    other = flip.FlipSearch(run_list, {**asked, "step": 0})
    assert other.draw()["goes_on"] and second.is_cancelled
    goes_on.set()
    *_, said = followed(run_list, {**asked, "step": 0, "do": "look"})
    assert said["error"] == "<b>no such state" and "<b>" not in said["html"]
    end = time.monotonic() + 60
    while len(ended) < 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert sorted(ended) == sorted([asked["step"], asked["step"], 0])
    assert second.found is None and not second.error


def test_what_cannot_run_is_said(trace: cp.Trace, run_list: RunList) -> None:
    asked, elsewhere = question(trace, "start"), RunList(run_list.entries, model=None)
    with pytest.raises(CannotShow, match="the model LlamaForCausalLM is not on this machine; give .* --model"):
        flip.FlipSearch(elsewhere, asked).draw()
    with pytest.raises(CannotShow, match=f"step {asked['step']}: nothing runs for it; press"):
        flip.FlipSearch(run_list, {**asked, "do": "look"}).draw()
    with pytest.raises(CannotShow, match="do is start or open or look or cancel"):
        flip.FlipSearch(run_list, {**asked, "do": "dance"}).draw()
    *_, said = followed(run_list, {**asked, "step": 0})
    assert "step 0: expected a step that rejected a draft" in said["error"]


def test_a_run_that_grows_keeps_the_job_of_a_verdict(trace: cp.Trace, run_list: RunList, tmp_path: Path) -> None:
    """Each part of a run that is recorded has a version of its own; a verdict stays what it is."""
    run = run_list.tables(0).run
    jobs, asked = run_list.jobs, question(trace, "look")
    key = run.directory, run.run_id, asked["request"], asked["step"]
    jobs._jobs[key] = FlipJob(lambda progress: Event().wait(5))
    with pytest.MonkeyPatch.context() as growing:
        growing.setattr(run, "version", "of the next part")
        assert "loading the model" in flip.FlipSearch(run_list, asked).draw()["html"]


def test_the_button_shows_progress_cancels_and_draws(
    browser: Browser, trace: cp.Trace, run_list: RunList, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A click elsewhere takes the figure away: it is of the card's token. The search waits to be let go, and gives a
    result that was computed here."""
    line = trace.rejected().iloc[0]
    found = cp.analysis.flip(trace, int(line.request_id), int(line.step), progress=False)
    goes_on = Event()
    monkeypatch.setattr(RunReader, "flip", lambda *_: found if goes_on.wait(300) else None)
    place = f"?run=0&request={line.request_id}&step={line.step}&position={line.position - 1}"
    with served(run_list) as address, opened(browser, address + place) as page:
        shown(page, "card", position=int(line.position) - 1)
        button = page.locator("#card-view").get_by_text(flip.BUTTON)
        button.click()
        page.locator("#flip-view [data-flip-do=cancel]").click()
        until(page, "document.getElementById('flip-view').innerText.includes('Cancelled')")
        goes_on.set()
        button.click()
        page.wait_for_selector("#flip-box #flip-0 .main-svg")
        assert "edits make the verifier choose" in page.inner_text("#flip-view")
        page.locator("[data-export=code][data-view=flip]").click()
        until(page, "document.getElementById('exports').open")
        assert f"cp.analysis.flip(trace, {line.request_id}, {line.step})" in page.inner_text("#exports-text")
        page.locator("#exports .plain", has_text="Close").click()
        link = page.url
        assert f"flip={line.step}" in link and page.locator("[data-export=link][data-view=flip]").is_visible()
        page.locator("#grid-view .column .pick[data-layer='1']").first.click()
        until(page, "document.getElementById('flip-box').hidden")
        assert "flip=" not in page.url
        page.goto(link)  # the same result, without a second search
        page.wait_for_selector("#flip-box #flip-0 .main-svg")
        assert "edits make the verifier choose" in page.inner_text("#flip-view")
        query = link[link.index("?") :]
    goes_on.clear()
    fresh = RunList(run_list.entries, model=run_list.model)  # a dashboard that has not searched
    with served(fresh) as address, opened(browser, address + query) as page:
        button = page.get_by_role("button", name="Search the edits")
        button.wait_for()
        button.press("Enter")
        page.locator("#flip-view [data-flip-do=cancel]").click()
        until(page, "document.getElementById('flip-view').innerText.includes('Cancelled')")
