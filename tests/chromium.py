"""The browser of the page tests: Debian's chromium, which scripts/install_browser.sh installs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
PATIENCE = 60_000
"""Milliseconds, for a busy machine."""
PICTURES = Path(__file__).parents[1] / "build" / "dash"
"""Screenshots to look at, with CACHEPROBE_PICTURES=1; git ignores the folder."""
_QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
          "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]  # fmt: skip


@contextmanager
def chromium(path: Path = CHROMIUM) -> Iterator[Browser]:
    """Where it is not installed the test is skipped, with the remedy; in CI it fails."""
    if not os.access(path, os.X_OK):
        said = f"page tests need {path}, which make test installs where it may; as root: apt-get install chromium"
        pytest.fail(said) if os.environ.get("CI") else pytest.skip(said)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_QUIET)
        yield browser
        browser.close()


def keep_picture(page: Page, name: str) -> None:
    """Writes a screenshot of the whole page, if the environment asks for pictures to look at."""
    if os.environ.get("CACHEPROBE_PICTURES"):
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
