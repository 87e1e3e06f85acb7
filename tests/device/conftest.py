"""The pretend GPU as a fixture."""

from collections.abc import Iterator

import pytest
import torch

from tests.device.counts import Gpu
from tests.device.pretend import pretending


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """Two pretend GPUs for the time of a test, and what they count."""
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has CUDA; a pretend GPU would hide it")
    with pretending(num_devices=2) as seen:
        yield seen
