"""A small sweep that several files read."""

from pathlib import Path

import pytest

import cacheprobe as cp
from cacheprobe.sweeps.engine import COMPLETE
from tests.sweeps.test_sweeps import SMALL


@pytest.fixture(scope="session")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SMALL, run one cell after another, and left as it is."""
    out = tmp_path_factory.mktemp("serial") / "sweep"
    report = cp.sweep(SMALL, out=out, progress=False)
    assert report.exit_code == COMPLETE and (report.committed, report.skipped) == (3, 0)
    return out
