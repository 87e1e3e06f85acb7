"""Z: reads queued states through a lens in tiles of a fixed number of vectors.

A row waits until the token that follows it is committed, since its rank is part of the record; rows whose position
is never committed are read at the end, without a target. A tile always has the same height, so that a row's bits depend
on itself alone (in bfloat16 nearly every row changes bits with the tile's height). Free places of a tile read its own
vectors again, which must give the same bits there.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cacheprobe.lenses.base import Lens
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.equality import bitwise
from cacheprobe.ops.readout import Readout, read_logits

LENS_TILE = 480
"""Vectors of one unembedding product: 16 tokens of 30 layers. Where its weights are widened first, few would pay it."""


class ReadingFault(RuntimeError):
    """A tile read one vector twice and got different bits."""


@dataclass(slots=True)
class Queued:
    """One row's states at every layer that ran."""

    row: int
    position: int
    states: Tensor
    """[layers, m], in the model's dtype."""
    layers: Tensor
    """[layers] the block after which each stood."""
    target: int = -1


class LensReader:
    """Queue of rows to read; finished readings pile up in `columns`."""

    def __init__(self, model: CachedLM, lens: Lens, top_k: int) -> None:
        self.model, self.lens, self.top_k = model, lens, top_k
        compiled = getattr(model, "compiled", None)  # a model of our own kinds has none
        self._read = compiled.readout if compiled else read_logits
        self._open: dict[int, list[Queued]] = {}
        self._ready: list[Queued] = []
        self._num_ready = 0
        self._parts: list[tuple[Tensor, Tensor, Tensor, Readout]] = []

    def queue(self, request_id: int, queued: Queued) -> None:
        self._open.setdefault(request_id, []).append(queued)

    def resolve(self, request_id: int, start: int, token_ids: tuple[int, ...], is_over: bool = False) -> None:
        """Tokens at start.. are committed: rows before them know what followed. At the end the others never will."""
        still_open = []
        for queued in self._open.get(request_id, []):
            offset = queued.position + 1 - start
            if 0 <= offset < len(token_ids):
                queued.target = token_ids[offset]
            elif not is_over:
                still_open.append(queued)
                continue
            self.queue_resolved(queued)
        self._open[request_id] = still_open

    def queue_resolved(self, queued: Queued) -> None:
        """A row whose target is known, or known to be none."""
        self._ready.append(queued)
        self._num_ready += len(queued.layers)
        while self._num_ready >= LENS_TILE:
            self._read_tile()

    def finish(self) -> dict[str, Any]:
        """Read what is left; returns the columns: row, layer, target, and the Readout's, as one tensor each."""
        left = [request_id for request_id, rows in self._open.items() if rows]
        if left:
            raise RuntimeError(f"requests {left} have lens rows but never ended")
        while self._num_ready:
            self._read_tile()
        if not self._parts:
            return {}
        rows, layers, targets, readouts = zip(*self._parts, strict=True)
        columns = {"row": torch.cat(rows), "layer": torch.cat(layers), "target": torch.cat(targets)}
        for name, parts in zip(Readout._fields, zip(*readouts, strict=True), strict=True):
            columns[name] = torch.cat(parts)
        return columns

    def _read_tile(self) -> None:
        """Take up to LENS_TILE vectors off the queue; a row's layers may fall into two tiles."""
        taken: list[Queued] = []
        count = 0
        while self._ready and count < LENS_TILE:
            queued = self._ready.pop(0)
            room = LENS_TILE - count
            if len(queued.layers) > room:
                rest = Queued(queued.row, queued.position, queued.states[room:], queued.layers[room:], queued.target)
                self._ready.insert(0, rest)
                queued = Queued(queued.row, queued.position, queued.states[:room], queued.layers[:room], queued.target)
            taken.append(queued)
            count += len(queued.layers)
        self._num_ready -= count

        states = torch.zeros(LENS_TILE, self.model.d_model, dtype=self.model.dtype, device=self.model.device)
        layers = torch.zeros(LENS_TILE, dtype=torch.long, device=self.model.device)
        states[:count] = torch.cat([q.states for q in taken]).to(states.device)
        layers[:count] = torch.cat([q.layers for q in taken]).to(layers.device)
        targets = torch.full((LENS_TILE,), -1, device=layers.device)
        targets[:count] = torch.cat([torch.full((len(q.layers),), q.target) for q in taken])
        again = torch.arange(min(count, LENS_TILE - count))
        for held in (states, layers, targets):
            held[LENS_TILE - 1 - again] = held[again]
        with torch.inference_mode():
            readout = self._read(self.lens.logits(self.model, states, layers), targets, self.top_k)
        _require_same(readout, again)
        rows = torch.cat([torch.full((len(q.layers),), q.row) for q in taken])
        kept = Readout(*(column[:count].cpu() for column in readout))
        self._parts.append((rows, layers[:count].cpu(), targets[:count].cpu(), kept))


def _require_same(readout: Readout, again: Tensor) -> None:
    """Raises: ReadingFault where a vector has other bits at the tile's end, where it was read again."""
    for name, column in zip(Readout._fields, readout, strict=True):
        ours, copies = column[again], column[LENS_TILE - 1 - again]
        if not bitwise(ours, copies):
            row = next(k for k in range(len(ours)) if not bitwise(ours[k], copies[k]))
            raise ReadingFault(
                f"reading Z, {name} of one vector differs between rows {row} and {LENS_TILE - 1 - row} of a pass of "
                f"{LENS_TILE} rows (made by the final norm, the unembedding and a sum over the vocabulary), so Z would "
                f"depend on the other requests on this machine ({torch.get_num_threads()} threads); "
                "set torch.set_num_threads(1), or capture='STC'"
            )
