"""Holds notebooks at the tiny preset to their limit, in processor time: what a clock shows depends on the machine's
other work, two cores with nothing else to do need no more of it than this."""

import os
import resource
from collections.abc import Generator

import pytest

LIMIT_SECONDS = 30
LEAST_SECONDS = 1
"""Its imports alone take longer: less would mean that the notebook's process was not counted."""


def seconds_of_children() -> float:
    """Processor time of processes that were started here and have ended, as a notebook's has after its last cell."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    before = seconds_of_children()
    outcome = yield
    seconds = seconds_of_children() - before
    print(f"\n{item.name}: {seconds:.1f} s of processor")
    if os.environ.get("CACHEPROBE_PRESET") == "tiny" and not LEAST_SECONDS < seconds < LIMIT_SECONDS:
        pytest.fail(
            f"{item.name} took {seconds:.1f} s of processor at the tiny preset; at most {LIMIT_SECONDS} are meant"
        )
    return outcome
