"""A page of a run that another process records: it follows without flicker, and says how far the run is."""

import os
import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

import cacheprobe as cp
from cacheprobe.trace.manifest import JOURNAL
from cacheprobe.views.dashboard.run_list import Follower, RunList
from tests.chromium import keep_picture
from tests.dash_page import answered, at, opened, served, until
from tests.dashboard.growing_run import MOST, SETTINGS, begun, go_on, part_each_round, recording
from tests.tiny import PROMPTS, loaded

SAYS = "document.getElementById('growth').innerText"
NUMBER = "document.querySelectorAll('#timeline-view .pick[data-step]').length"
MARK = """() => {
    const marked = "#timeline-view .pick[data-step], #text-view .prose, #card-view table";
    document.querySelectorAll(marked).forEach((one) => { one.mark = true; });
    getSelection().selectAllChildren(document.querySelector("#text-view h2"));
    getSelection().collapseToStart();
    getSelection().modify("extend", "forward", "word");
    document.querySelector("#card-view .ladder").scrollTop = 1;
}"""
MARKS = """() => [
    [...document.querySelectorAll("#timeline-view .pick[data-step]")].filter((cell) => cell.mark).length,
    !!document.querySelector("#text-view .prose").mark, !!document.querySelector("#card-view table").mark,
    String(getSelection()).trim(), scrollY,
    document.getElementById("tip").hidden, document.getElementById("tip").textContent, location.href,
]"""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that stopped after some parts."""
    directory = tmp_path_factory.mktemp("runs") / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        part_each_round(patch)
        stream = begun(directory)
        go_on(stream, directory, 6)
        stream.close()
    return directory


def fits(page: Page, name: str) -> None:
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 900})
        keep_picture(page, f"{name}-{width}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_page_follows_a_run_that_another_process_records(browser: Browser, tmp_path: Path) -> None:
    with recording(tmp_path / "long") as run:
        assert run.go_on(6) >= 6
        with served(RunList.of([tmp_path])) as url, opened(browser, f"{url}?run=0&request=1&step=5&rows=all") as page:
            for name in ("timeline", "text", "card", "grid"):
                answered(page, name, run=0)
            until(page, f"/{MOST} tokens/.test({SAYS})")
            says = page.inner_text("#growth-says")
            assert re.fullmatch(
                rf"Recorded now by process {run.process.pid} on .+: \d+ of {MOST} tokens, "
                r"[\d.,]+ tokens a second, [\d.]+ (s|min) left\.",
                says,
            )
            assert "long (growing)" in page.inner_text(".menu-run")
            page.evaluate("scrollTo(0, 240)")
            page.locator("#grid-view .column .pick").first.hover()
            page.evaluate(MARK)
            before, chosen, num_cells = page.evaluate(MARKS), at(page), page.evaluate(NUMBER)
            assert before[:3] == [num_cells, True, True] and before[3] == "Request" and before[4] > 0 and not before[5]
            run.go_on(6)
            until(page, f"{NUMBER} > {num_cells} && {SAYS} !== {says!r}")
            version = page.evaluate("JSON.parse(document.getElementById('timeline-view').dataset.answer).version")
            for name in ("text", "card", "grid", "insight"):
                answered(page, name, version=version)
            assert page.evaluate(MARKS) == before and at(page) == chosen
            page.get_by_role("button", name="Follow the newest step").click()
            until(page, "JSON.parse(document.getElementById('page').dataset.at).step > 5")
            followed = at(page)["step"]
            run.go_on(3)
            until(page, f"JSON.parse(document.getElementById('page').dataset.at).step > {followed}")
            assert "follow=newest" in page.url
            fits(page, "growing")
            run.go_on()
            until(page, f"/has finished, with {MOST} tokens/.test({SAYS})")
            until(page, "!/growing/.test(document.querySelector('.menu-run').innerText)")
            text = answered(page, "text", version=next((tmp_path / "long").glob("rows-*")).stem.split("-")[1])
            assert "generated 16 tokens" in text and page.locator(".refused:visible").count() == 0
            assert not page.is_visible("#notice")


def test_an_interrupted_run_says_how_it_goes_on(browser: Browser, interrupted: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(interrupted, tmp_path / "stopped"))
    with served(RunList.of([directory])) as url, opened(browser, f"{url}?tab=replay") as page:
        until(page, f"/Interrupted: .* of {MOST} tokens, and no process records it/.test({SAYS})")
        assert f'cp.resume("{directory}", model, ...)' in page.inner_text("#growth")  # begun in Python with a drafter
        until(page, "/stopped \\(interrupted\\)/.test(document.querySelector('.menu-run').innerText)")
        fits(page, "interrupted")
        whole = (directory / JOURNAL).read_bytes()
        others = whole.splitlines(keepends=True)[1:]
        (directory / JOURNAL).write_bytes(whole + b"damaged\n" + others[-1])
        until(page, f"/line {len(others) + 2} was changed after it was written/.test({SAYS})")
        (directory / JOURNAL).write_bytes(whole)
        until(page, f"/Interrupted/.test({SAYS})")
        directory.rename(tmp_path / "elsewhere")
        until(page, f"/holds no run any more.*what was read before/.test({SAYS})")
        (tmp_path / "elsewhere").rename(directory)
        until(page, f"/Interrupted/.test({SAYS})")
        cp.resume(directory, loaded(), drafter=SETTINGS["drafter"], progress=False)
        until(page, f"/has finished, with {MOST} tokens/.test({SAYS})")
        answered(page, "timeline", run=0)
        assert page.locator(".refused:visible").count() == 0


def test_a_csv_of_an_unfinished_run_says_how_far_it_is(browser: Browser, interrupted: Path) -> None:
    """It holds what is recorded when it is saved, which the page may not show yet."""
    with served(RunList.of([interrupted])) as url, opened(browser, f"{url}?run=0&tab=replay") as page:
        answered(page, "timeline", run=0)
        button = page.locator("[data-export=csv][data-view=timeline]")
        with page.expect_download() as saved:
            button.press("Enter")
        last = Follower(interrupted).tables.steps.stop - 1
        assert saved.value.suggested_filename.endswith(f"timeline-recorded-up-to-step-{last}.csv")
        until(
            page, f"document.querySelector('[data-export=csv][data-view=timeline]').title.endsWith('up to step {last}')"
        )
        assert f"\n{last}," in saved.value.path().read_text() or f",{last}," in saved.value.path().read_text()


def test_nothing_is_read_where_nothing_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look reads the files of new parts alone, and each once; without a new part it opens the journal alone."""
    part_each_round(monkeypatch)
    directory = tmp_path / "run"
    stream = begun(directory)
    go_on(stream, directory, 3)
    follower = Follower(directory)
    from cacheprobe.trace.manifest import CheckedFiles

    read: list[str] = []
    table, built = CheckedFiles.table, follower.tables
    monkeypatch.setattr(CheckedFiles, "table", lambda self, name, *of: (read.append(name), table(self, name, *of))[1])
    follower.look(at_once=True)
    assert read == [] and follower.tables is built
    for _ in range(3):
        go_on(stream, directory, 2)
        follower.look(at_once=True)
    assert len(read) == len(set(read)) and {name.split("-")[0] for name in read} == {"rows", "events", "ledger"}
    assert follower.says()["state"] == "growing" and f"process {os.getpid()} on" in follower.says()["says"]
    stream.close()
    assert not follower.tables.run.rows.empty
    follower.look(at_once=True)
    assert follower.says()["state"] == "interrupted"
    cp.run(
        loaded(),
        PROMPTS[:1],
        **{**SETTINGS, "deterministic": False, "max_new_tokens": 2},
        out=directory,
        overwrite=True,
    )
    follower.look(at_once=True)
    assert follower.says()["says"].startswith(f"Another run is in {directory} in place of the one that was shown.")
    assert len(follower.tables.run.requests) == 1


def test_a_slow_look_is_followed_by_a_long_pause(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follower, clock, looks = Follower(interrupted), [0.0], []

    def look(self: Follower) -> None:
        looks.append(clock[0])
        clock[0] += 3.0  # seconds that it takes

    monkeypatch.setattr(Follower, "_look", look)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    while clock[0] < 200:
        follower.look()
        clock[0] += 1.0
    assert len(looks) == 4 and 3.0 * len(looks) / clock[0] < 0.07
