"""How quickly the overview of a run opens and its table of all tokens is searched: 200 requests of 500 tokens each.

The run is one of a tiny model with an early exit, with lens readings. Needs Chromium and the `test` extra.
"""

import json
import random
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import Browser

import cacheprobe as cp
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.shared.tiny import tiny_model
from cacheprobe_benchmarks.speed.page import OPENED, PATIENCE_MS, chromium, served

SMALL = {"requests": 4, "tokens": 24}
VIEWS = ("summary", "tokens")
SEARCHES: dict[str, dict[str, str]] = {
    "text": {"find": "<35><5"},
    "pattern": {"find": "^<3.>$", "way": "pattern"},
    "question": {"asked": "drafter"},
    "range": {"entropy": "2:", "verdict": "rejected"},
    "sort": {"sort": "-times"},
}


def run(rounds: int, *, requests: int = 200, tokens: int = 500) -> dict[str, Any]:
    """Milliseconds. first: from the address until figures and table are there, by the first page after the server
    began; paint: by a later page. Then until the server has answered a search, by its name; each round another one."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, measuring(rounds) as bar, chromium() as browser:
        directory = _save(Path(folder) / "run", requests, tokens)
        with served(directory) as address:
            figures["first_ms"] = round(_painted(browser, address))
            taken: list[dict[str, float]] = []
            for number in range(rounds):
                paint = {"paint": _painted(browser, address)}
                taken.append(paint | {name: _answered(address, ask, number) for name, ask in SEARCHES.items()})
                bar.advance()
    figures |= {f"{name}_ms": round(median(one[name] for one in taken)) for name in taken[0]}
    return {"benchmark": "overview", "rounds": rounds, "requests": requests, "tokens": tokens, **figures,
            "lower_is_better": list(figures), **machine()}  # fmt: skip


def _save(directory: Path, requests: int, tokens: int) -> Path:
    choose = random.Random(0)
    prompts = [[choose.randrange(3, 90) for _ in range(choose.randrange(4, 20))] for _ in range(requests)]
    trace = cp.run(
        cp.load_model(tiny_model()), prompts, window=4, draft_length=3, drafter=cp.drafters.EarlyExit(layer=1),
        group=min(requests, 100), capacity=tokens + 40, max_new_tokens=tokens, capture="Z", progress=False,
    )  # fmt: skip
    return trace.save(directory)


def _painted(browser: Browser, address: str) -> float:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"{address}?tab=overview", wait_until="commit")
    taken = page.evaluate(OPENED, [list(VIEWS), PATIENCE_MS])
    page.close()
    return taken


def _answered(address: str, question: dict[str, str], number: int) -> float:
    """The server keeps answers, so no round asks for the requests of another one."""
    asked = {"tokens": {"run": 0, "requests": f"0-{10**6 + number}", **question}}
    post = urllib.request.Request(f"{address}ask", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(post) as answer:
        found = json.loads(answer.read())
    assert "error" not in found and "lines" in found["html"], found
    return 1000 * (time.perf_counter() - began)
