"""Sets the number of CPU threads that torch uses during a training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Sets torch to one CPU thread inside the `with` block, and restores the old number afterwards. Also a
    decorator."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
