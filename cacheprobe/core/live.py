"""Names types of objects of transformers and TransformerLens that these libraries leave untyped; to Python each name is
Any. Defines ModelError, pauses Python's garbage collector, and refuses to compute in a process that would wait for
ever, without importing torch before that is asked."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

LiveModule: TypeAlias = Any
"""A module of a loaded model of transformers or TransformerLens. torch types a module's attributes as Tensor | Module,
so a type checker cannot follow `layer.self_attn.q_proj`. Each function that takes one checks the module's family first.
"""

LiveConfig: TypeAlias = Any
"""A transformers config: the fields depend on the architecture."""

LiveTokenizer: TypeAlias = Any
"""A tokenizer of transformers, or None: its encodings and decoded texts are unions that depend on the arguments."""

ModuleValue: TypeAlias = Any
"""An argument or the output of a module's forward, as PyTorch's hooks pass them: a tensor, a tuple that begins with
one, or another object, depending on the module."""


class ModelError(ValueError):
    """Signals that a model cannot be loaded or used as requested; the message says why."""


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
    import torch

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


@contextmanager
def without_collection() -> Iterator[None]:
    """Keeps Python's garbage collector off inside the `with`; also decorates a function. Otherwise the collector looks
    at the million objects of libraries or of a large tokenizer again and again while they are made."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # makes all objects old without a look at them, as two collections would
                gc.freeze()
                gc.unfreeze()
            gc.enable()
