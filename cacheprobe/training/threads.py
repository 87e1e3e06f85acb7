"""Sets the number of CPU threads that torch uses during a training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Sets torch to one CPU thread inside the `with` block, and restores the old number afterwards. Also a decorator.

    CPU seconds then measure the computation, and small products do not gain from more threads. The number is restored
    because bits depend on it: runs before and after a training must stay comparable.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
