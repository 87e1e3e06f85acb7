"""The pretend GPU as a fixture."""

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from tests.device.counts import Gpu
from tests.device.pretend import pretending
from tests.device.runs import kernels_by_references


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """Two pretend GPUs for the time of a test, and what they count."""
    if torch.backends.cuda.is_built():
        said = "this torch has CUDA, and a pretend GPU would hide it; install a CPU build of torch"
        pytest.fail(said) if os.environ.get("CI") else pytest.skip(said)
    with pretending(num_devices=2) as seen:
        yield seen


@pytest.fixture(params=["torch", "kernels"])
def way(gpu: Gpu, request: pytest.FixtureRequest) -> Iterator[str]:
    """What computes a model: torch, or our kernels by their references."""
    with kernels_by_references(gpu) if request.param == "kernels" else nullcontext():
        yield request.param
