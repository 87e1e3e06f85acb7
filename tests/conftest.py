"""Set-up of every test run. Nothing of cacheprobe is imported here: shape checks are switched on before its import."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Read by torch, transformers and their friends when a test first imports them.
os.environ.setdefault("OMP_NUM_THREADS", "2")
if int(os.environ["OMP_NUM_THREADS"]) > (os.cpu_count() or 1):
    os.environ.setdefault("MKL_DYNAMIC", "FALSE")  # else torch starts with as many threads as there are cores
for name, value in {
    "MKL_NUM_THREADS": os.environ["OMP_NUM_THREADS"],  # torch starts with MKL's number where the two differ
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    # Triton's library is interpreted or compiled as this says when triton is first imported, which transformers does
    # too; what needs a compiler or a GPU runs in a process of its own.
    "TRITON_INTERPRET": "1",
}.items():
    os.environ.setdefault(name, value)

# A shell's background jobs ignore Ctrl-C, which some tests press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Time limits of single examples fail on a busy machine; in CI the examples are the same each time.
settings.register_profile("cacheprobe", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("cacheprobe")


@pytest.fixture(autouse=True)
def as_many_threads_as_before() -> Iterator[None]:
    """Trainings and analyses take one thread for themselves, and the next test's bits depend on their number."""
    yield
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        if torch.get_num_threads() != (wanted := int(os.environ["OMP_NUM_THREADS"])):
            torch.set_num_threads(wanted)


@pytest.fixture(autouse=True, scope="session")
def checked_requests() -> Iterator[None]:
    """Every run checks the state of its requests after each step."""
    from tests.request_checks import checked_states

    with checked_states():
        yield


@pytest.fixture(autouse=True, scope="session")
def written_at_once() -> Iterator[None]:
    """No test cuts the power, so none waits until the disk has what was written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def nothing_remembered() -> Iterator[None]:
    """Faults are planted in models whose fingerprint stays the same, so no result of a trial is stored."""
    from cacheprobe.engine import shape_trial

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape_trial, "_path", lambda model: Path(os.devnull, "none"))
        yield


@pytest.fixture(autouse=True, scope="session")
def free_drafts() -> Iterator[None]:
    """No test measures what drafts cost: they cost next to nothing, so that every drafter drafts, unless a test plants
    other costs."""
    from tests.planted_drafts import planted

    with planted(draft=0.0, verify=1e-9):
        yield


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """A real browser."""
    from tests.chromium import chromium

    with chromium() as one:
        yield one


@pytest.fixture(scope="session")
def speculators(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has speculators."""
    from tests.exports.environment import interpreter

    return interpreter(tmp_path_factory.mktemp("speculators") / "environment")
