"""How many threads a training takes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread inside, and as many as before after it. Also a decorator.

    Seconds of one core are then what was computed, and small products gain nothing from more. Given back since bits
    depend on it: a run after a training is comparable with one before.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
