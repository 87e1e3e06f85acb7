"""Refuses to compute in a process that would wait for ever or make tensors on another device."""

import os

import torch

from cacheprobe.core.live import ModelError

_threads: set[str] = set()
"""Holds "used" if this process has computed with several threads; "lost" if it was forked from one that had."""


def _note_fork() -> None:
    """Notes, in a process that was just forked, that it has none of the threads of its parent."""
    if _threads:
        _threads.add("lost")


os.register_at_fork(after_in_child=_note_fork)


def require_usable_process(is_computing: bool = False) -> None:
    """Checks that this process can compute. is_computing: it is about to.

    Raises: ModelError in a forked process that would wait for ever for threads of its parent, and if torch's default
    device is not the CPU.
    """
    if torch.get_num_threads() > 1:
        if "lost" in _threads:
            raise ModelError(
                "this process was forked from one that had computed with several threads, which do not exist here, so "
                "a pass would wait for them for ever; start processes with multiprocessing.get_context('spawn'), or "
                "call torch.set_num_threads(1) in this one first"
            )
        _threads.update({"used"} if is_computing else ())
    if (device := torch.get_default_device()).type != "cpu":
        raise ModelError(
            f"torch's default device is {device}, where this package's own tensors would be made; call "
            "torch.set_default_device('cpu') first: a model stays on its own device, see device= of load_model"
        )
