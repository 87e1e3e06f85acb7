"""How quickly the dashboard opens and answers: Chromium, 32 requests with 112,320 readings, and one of 2,000 tokens.

The runs have the real format and are made without a model, 30 layers each. The server is a process of its own, as for
a user. Needs Chromium and the `test` extra.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from cacheprobe.views.images import browser_path
from cacheprobe_benchmarks.shared.large_run import save_large_run
from cacheprobe_benchmarks.shared.machine import machine, measuring

SHAPES = {"batch": (32, 107), "long": (1, 2_000)}
"""Requests, and generated tokens of each."""
SMALL = {"shapes": {"batch": (3, 12)}, "layers": 4}
PATIENCE_MS = 60_000

CHANGE = """(act) => new Promise((yes, no) => {
    const page = document.getElementById("page"), before = page.dataset.at, start = performance.now();
    const act_on = (target) => target.dispatchEvent(new MouseEvent("click", {bubbles: true}));
    const is_other = ({dataset}) => Object.entries(dataset).some(
        ([key, value]) => key in JSON.parse(before) && String(JSON.parse(before)[key]) !== value);
    if (act.key) document.body.dispatchEvent(new KeyboardEvent("keydown", {key: act.key, bubbles: true}));
    else act_on([...document.querySelectorAll(act.click)].filter(is_other).at(act.nth));
    const follows = (view, at) => Object.entries(JSON.parse(view.dataset.answer)).every(
        ([key, value]) => !(key in at) || JSON.stringify(at[key]) === JSON.stringify(value));
    const look = () => {
        const at = JSON.parse(page.dataset.at), views = [...document.querySelectorAll("[data-answer]")];
        const seen = views.filter((view) => view.offsetParent !== null);
        const is_asking = page.dataset.at === before || at.walk || document.querySelector(".card.asking");
        if (!is_asking && seen.every((view) => follows(view, at))) yes(performance.now() - start);
        else if (performance.now() - start > 60000) no(new Error("no answer to " + JSON.stringify(act)));
        else setTimeout(look, 2);
    };
    look();
})"""
"""Milliseconds, by the page's own clock, until every visible view is the one that was asked for."""
OPENED = """([names, patience]) => new Promise((yes, no) => {
    const there = (name) => document.getElementById(name + "-view")?.dataset.answer;
    const look = () => {
        if (names.every(there)) requestAnimationFrame(() => yes(performance.now()));
        else if (performance.now() > patience) no(new Error("not drawn: " + names.filter((name) => !there(name))));
        else setTimeout(look, 2);
    };
    look();
})"""
FIRST = ("text", "insight", "grid")
"""What is above the fold: the text, the sentence and the lens grid."""


def run(rounds: int, *, shapes: dict[str, tuple[int, int]] = SHAPES, layers: int = 30) -> dict[str, Any]:
    """By shape, milliseconds. paint: from the address until text, sentence and lens grid are there, by a new page.
    Then until all visible views follow: token, a click on a token of the text; step, a click on a cell of the timeline;
    rejection, the key `n`; request, a click on the next request. worst: the slowest of all these in any round."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, measuring(len(shapes) * rounds) as bar, chromium() as browser:
        for name, (requests, tokens) in shapes.items():
            directory = save_large_run(Path(folder) / name, requests=requests, tokens=tokens, layers=layers)
            with served(directory) as address:
                _opened(browser, address)[0].close()  # the server's first answers import its libraries
                taken: list[dict[str, float]] = []
                for number in range(rounds):
                    taken.append(_one_round(browser, address, number, requests))
                    bar.advance()
            for what in taken[0]:
                figures[f"{name}_{what}_ms"] = round(median(one[what] for one in taken))
            figures[f"{name}_worst_ms"] = round(max(one[what] for one in taken for what in one if what != "paint"))
    return {"benchmark": "page", "rounds": rounds, "layers": layers, "shapes": shapes, **figures,
            "lower_is_better": list(figures), **machine()}  # fmt: skip


def _one_round(browser: Browser, address: str, number: int, requests: int) -> dict[str, float]:
    page, paint = _opened(browser, address)
    page.wait_for_timeout(1_000)  # what the opening still fetches is not a click's
    taken = {"paint": paint}
    acts = {
        "token": {"click": f'#text-view span.pick[data-position="{20 + number}"]', "nth": 0},
        "step": {"click": '#timeline-view g.pick[data-request="0"]', "nth": -1 - number},
        "rejection": {"key": "n"},
    }
    if requests > 1:
        acts["request"] = {"click": f'#timeline-view g.pick[data-request="{1 + number % (requests - 1)}"]', "nth": 0}
    for name, act in acts.items():
        taken[name] = page.evaluate(CHANGE, act)
    page.close()
    return taken


def _opened(browser: Browser, address: str) -> tuple[Page, float]:
    """A page of the address, and milliseconds until its first views were painted."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"{address}?tab=replay", wait_until="commit")
    return page, page.evaluate(OPENED, [list(FIRST), PATIENCE_MS])


@contextmanager
def chromium() -> Iterator[Browser]:
    """Raises: RuntimeError where no browser is installed."""
    path = browser_path()
    if path is None:
        raise RuntimeError("the benchmark needs Chromium: make browser installs it on Debian")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The address of `cacheprobe dash` of the run."""
    command = [sys.executable, "-u", "-m", "cacheprobe", "dash", str(directory), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        finally:
            server.terminate()
