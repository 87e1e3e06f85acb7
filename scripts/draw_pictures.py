"""Take the pictures of README and docs from the runs that `make demo` left, in Debian's Chromium.

make demo && make browser && .venv/bin/python scripts/draw_pictures.py [--runs runs] [--to docs]
"""

import argparse
from pathlib import Path
from threading import Thread

from playwright.sync_api import Browser, sync_playwright

import cacheprobe as cp
from cacheprobe.views.dashboard.app import listen
from cacheprobe.views.dashboard.run_list import RunList

ROOT = Path(__file__).parents[1]
CHROMIUM = "/usr/bin/chromium"
WIDTH = 1280
MARGIN = 16
PATIENCE = 120_000
"""Milliseconds, for a busy machine."""


def report_picture(browser: Browser, report: Path, folder: Path) -> None:
    """From the window that was rolled back to the end of the lens grid."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 900})
    page.set_default_timeout(PATIENCE)
    page.goto(report.as_uri())
    last = page.locator("[id$=lens-grid-all]").first.bounding_box()
    first = page.get_by_role("heading", name="Rolled back").first.bounding_box()
    assert first is not None and last is not None
    top, bottom = first["y"] - MARGIN, last["y"] + last["height"]
    clip = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top}
    page.screenshot(path=folder / "report-1280.png", full_page=True, clip=clip)
    page.close()


def thoughts_picture(browser: Browser, run: Path, folder: Path) -> None:
    """The thoughts of the request that changed its mind most often."""
    trace = cp.load_trace(run)
    thoughts = trace.thoughts()
    said = thoughts[(thoughts.status == "committed") & (thoughts.said != "")]
    changes = said.groupby("request_id").said.apply(lambda words: int((words != words.shift()).sum()))
    request = int(changes.idxmax())
    picture = cp.plots.thoughts_picture(thoughts, trace.row_table, trace.events(), trace.ledger(request), request)
    page = browser.new_page(viewport={"width": WIDTH, "height": 900})
    page.set_content(f'<!doctype html><meta name="viewport" content="width=device-width">{picture}')
    page.locator(".cp.alone").screenshot(path=folder / "thoughts-1280.png")
    page.close()


def dash_picture(browser: Browser, runs: list[Path], folder: Path) -> None:
    """The dashboard's replay, from its header to the end of the lens grid and the token's card."""
    server = listen(RunList.of(runs), port=0)
    Thread(target=server.serve_forever, daemon=True).start()
    page = browser.new_page(viewport={"width": WIDTH, "height": 900})
    page.set_default_timeout(PATIENCE)
    page.goto(f"http://127.0.0.1:{server.port}/?tab=replay")
    for place in ("#text-view[data-answer]", ".menu-lens .dash-dropdown-value", "[role=slider]"):
        page.wait_for_selector(place, state="attached")
    page.wait_for_timeout(500)
    last = page.locator("#lens-card").bounding_box()
    assert last is not None
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": last["y"] + last["height"] + MARGIN}
    page.screenshot(path=folder / "dash-1280.png", full_page=True, clip=clip)
    page.close()
    server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the pictures of README and docs.")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="where `make demo` left its runs")
    parser.add_argument("--to", type=Path, default=ROOT / "docs", help="folder of the pictures")
    asked = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        report_picture(browser, (asked.runs / "demo" / "report.html").resolve(), asked.to)
        thoughts_picture(browser, asked.runs / "demo-thinking", asked.to)
        dash_picture(browser, [asked.runs / "demo", asked.runs / "demo-thinking"], asked.to)
        browser.close()


if __name__ == "__main__":
    main()
