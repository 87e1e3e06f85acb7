"""What the tests of the dashboard share: one browser, and runs that no test changes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from cacheprobe_benchmarks.shared.large_run import save_large_run
from tests.chromium import chromium
from tests.dash_page import save_runs


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """A real browser."""
    with chromium() as one:
        yield one


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `save_runs`."""
    return save_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="package")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 requests with 72 rejected drafts."""
    return save_large_run(tmp_path_factory.mktemp("large") / "a-long", requests=12, tokens=72, layers=3)
