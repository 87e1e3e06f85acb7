"""One forward pass of the engine: rows and pads in, logits out, and every real row announced to the observer.

Knows nothing about verdicts. A pass either happens whole or raises before anything was committed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheprobe.cache.kv import KVCache
from cacheprobe.cache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.records import ForwardRecord, Observer, RowSlot

PAD_TOKEN_ID = 0
"""Fed in pads and dummies. What it is cannot matter: nothing attends to them."""


class EngineError(RuntimeError):
    """A run that cannot go on. Names the request and the step; nothing of the failed pass was committed."""


@dataclass(frozen=True)
class Entry:
    """What one request feeds in a pass."""

    state: SequenceState
    token_ids: tuple[int, ...]
    start: int
    """Absolute position of the first token."""
    is_canonical: bool
    num_drafts: int = 0
    """How many of the last tokens are candidates with an open verdict."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class PassRunner:
    """Runs passes over one cache and counts them: the step number is the pass's place in the run."""

    def __init__(self, model: CachedLM, cache: KVCache, scratch_rows: Sequence[int], observer: Observer) -> None:
        self.model, self.cache, self.observer = model, cache, observer
        self.scratch_rows = tuple(scratch_rows)
        self.step = -1
        self.seconds = 0.0
        self.shape = (0, 0)

    def run(
        self,
        phase: str,
        entries: Sequence[Entry],
        width: int,
        *,
        batch: int | None = None,
        num_layers: int | None = None,
        logit_slots: Sequence[int] | None = None,
    ) -> Tensor:
        """Feed the entries in a [batch, width] pass, with pads behind each and dummy rows below them.

        Returns what CachedLM.forward returns. Raises: EngineError when a shape would not be the one asked for.
        """
        self.step += 1
        num_dummies = 0 if batch is None else batch - len(entries)
        longest = max(len(entry.token_ids) for entry in entries)
        if num_dummies < 0 or num_dummies > len(self.scratch_rows) or longest > width:
            raise EngineError(
                f"step {self.step}: {len(entries)} requests of up to {longest} tokens do not fit a {phase} pass of "
                f"{batch} x {width}"
            )
        rows = [entry.state.row for entry in entries] + list(self.scratch_rows[:num_dummies])
        starts = [entry.start for entry in entries] + [0] * num_dummies
        token_ids = torch.full((len(rows), width), PAD_TOKEN_ID, dtype=torch.long)
        for b, entry in enumerate(entries):
            token_ids[b, : len(entry.token_ids)] = torch.tensor(entry.token_ids)
        slots = tuple(_slots(entries))
        self.shape = (len(rows), width)
        began = time.perf_counter()
        self.observer.before_forward(self.step, phase, slots, self.shape)
        out = self.model.forward(token_ids, self.cache, rows, starts, num_layers=num_layers, logit_slots=logit_slots)
        logits = None if num_layers is not None or logit_slots is not None else out
        self.observer.after_forward(ForwardRecord(self.step, phase, slots, logits, num_layers))
        self.seconds = time.perf_counter() - began
        return out


def _slots(entries: Sequence[Entry]) -> list[RowSlot]:
    return [
        RowSlot(
            entry.state.request_id,
            b,
            t,
            entry.start + t,
            token_id,
            entry.is_canonical,
            t >= len(entry.token_ids) - entry.num_drafts,
        )
        for b, entry in enumerate(entries)
        for t, token_id in enumerate(entry.token_ids)
    ]
