"""Reads queued states through a lens (site Z), in tiles: matrices with a fixed number of state vectors.

A reading includes the rank of the next committed token. So a row waits until that token is committed; a row whose next
position is never committed is read at the end, without a target. A tile always has the same height, so that a row's
bits do not depend on other rows (in bfloat16 nearly every row's bits change with the tile's height). The free end of a
tile repeats its first vectors; the reader checks that both readings of a vector have the same bits.

A draft row and the verified row of the same position often hold the same state. Of two rows of one request with the
same position and target, a state with the same bits at the same layer is read once, and its reading is copied.

A user's own lens may fail on a tile. Then each request's vectors are read again, at the same indices of a tile of
zeros. A request whose vectors fail again has no readings; the readings of the others do not change.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cacheprobe.core.devices import Download, is_out_of_memory, upload
from cacheprobe.lenses.base import Lens
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.equality import bits, bitwise
from cacheprobe.ops.readout import Readout, read_logits
from cacheprobe.trace.tables.build import Queued

LENS_TILE = 480
"""Number of state vectors in a tile, which one unembedding product reads: 16 tokens of 30 layers. A large tile pays
if the weights must first be converted to another dtype."""


class Copies(NamedTuple):
    """Holds the layers at which one row's states have the bits of earlier rows, whose readings the row gets."""

    request_id: int
    row: int
    layers: Tensor
    """[n]"""
    sources: Tensor
    """[n]: by layer, the number of the row that is read."""


class LensReader:
    """Queues the rows of a run, reads them through the lens, and returns the readings as columns at the end.

    Reading equal states once saves the readings of the draft rows whose pass rounded as the verify pass did. If a row's
    bits do not depend on the pass's shape, these are all draft rows of accepted tokens.
    """

    def __init__(self, model: CachedLM, lens: Lens, top_k: int) -> None:
        self.model, self.lens, self.top_k = model, lens, top_k
        operations = getattr(model, "operations", None)  # only some kinds of model have compiled loops
        readout = operations.readout if operations else getattr(model, "logits_readout", None)
        self._read_logits = readout.of_logits if readout else read_logits
        self._read_tokens = getattr(model, "read_tokens", None) if operations else None
        self._to_residual = _residual_of(lens)
        self._open: dict[int, list[Queued]] = {}
        self._uncompared: list[Queued] = []
        """Rows with a target whose states were not compared yet."""
        self._ready: list[Queued] = []
        self._num_ready = 0
        self._parts: list[dict[str, Tensor]] = []
        """Readings of each tile, in the columns that `take` returns."""
        self._copies: list[Copies] = []
        self.num_read = 0
        """Number of state vectors read, without the free end of a tile."""
        self.num_copied = 0
        """Number of readings that `take` copied from another row's state of the same bits."""
        self.errors: dict[int, str] = {}
        """Request id -> why the lens failed, for each request without readings."""

    def queue(self, request_id: int, queued: Queued) -> None:
        """Adds a row to the waiting rows of its request, until the token at its next position is committed."""
        self._open.setdefault(request_id, []).append(queued)

    def resolve(self, request_id: int, start: int, token_ids: tuple[int, ...], is_over: bool = False) -> None:
        """Sets the target of waiting rows whose next token was just committed, and queues these rows for reading.

        token_ids: committed at positions start, start + 1, ...
        is_over: the request has ended, so its other waiting rows are queued without a target.
        """
        still_open, resolved = [], []
        for queued in self._open.get(request_id, []):
            offset = queued.position + 1 - start
            if 0 <= offset < len(token_ids):
                queued.target = token_ids[offset]
            elif not is_over:
                still_open.append(queued)
                continue
            resolved.append(queued)
        self._open[request_id] = still_open
        self.queue_together(resolved)

    def queue_together(self, rows: Sequence[Queued]) -> None:
        """Queues rows whose targets are set, and reads the queue while it fills a tile."""
        self._uncompared += rows
        self._num_ready += sum(len(queued.layers) for queued in rows)
        self._read_tiles()

    def _compare(self) -> None:
        """Makes the queued rows ready to be read. Of two rows of one request with the same position and target, a state
        with the same bits at the same layer is read for the first row only; the second row gets a copy of its reading.

        The layers of two rows are compared index by index, so each row's list of layers must begin with the same ones.
        """
        rows, self._uncompared = self._uncompared, []
        groups: dict[tuple[int, int, int], list[Queued]] = {}
        for queued in rows:
            groups.setdefault((queued.request_id, queued.position, queued.target), []).append(queued)
        pairs = [(a, b) for group in groups.values() for i, b in enumerate(group) for a in group[:i]]
        sources = {queued.row: torch.full_like(queued.layers, queued.row) for pair in pairs for queued in pair}
        for (a, b), is_same in zip(pairs, _same_states(pairs), strict=True):
            of_a, of_b = (sources[queued.row][: len(is_same)] for queued in (a, b))
            of_b[:] = torch.where(is_same & (of_b == b.row), of_a, of_b)  # the earliest row with these bits
        for queued in rows:
            self._num_ready -= len(queued.layers)
            chosen = sources.get(queued.row)
            if chosen is not None and bool((is_copied := chosen != queued.row).any()):
                self._copies.append(Copies(queued.request_id, queued.row, queued.layers[is_copied], chosen[is_copied]))
                (read,) = upload(queued.states.device, [(~is_copied).nonzero()[:, 0]])
                queued = replace(queued, states=queued.states[read], layers=queued.layers[~is_copied])
            self._make_ready(queued)

    def queue_resolved(self, queued: Queued) -> None:
        """Queues a row whose target (next token; -1 for none) is set and whose state is no other row's."""
        self._compare()
        self._make_ready(queued)
        self._read_tiles()

    def _make_ready(self, queued: Queued) -> None:
        """Lets the next tiles have a row, unless the lens has failed on its request."""
        if queued.request_id not in self.errors and len(queued.layers):
            self._ready.append(queued)
            self._num_ready += len(queued.layers)

    def _read_tiles(self) -> None:
        """Reads the queue while it fills a tile of LENS_TILE state vectors."""
        if self._num_ready >= LENS_TILE:
            self._compare()
        while self._num_ready >= LENS_TILE:
            self._read_tile()

    def require_ended(self) -> None:
        """Raises: RuntimeError if a request with waiting rows has not ended."""
        if left := [request_id for request_id, rows in self._open.items() if rows]:
            raise RuntimeError(f"requests {left} have lens rows but never ended")

    @property
    def waiting(self) -> list[Queued]:
        """The rows that wait for the token at their next position."""
        return [queued for rows in self._open.values() for queued in rows]

    @property
    def num_held(self) -> int:
        """Number of readings that the next call of `take` returns, without copies."""
        return self._num_ready + sum(len(part["row"]) for part in self._parts)

    def take(self) -> dict[str, Tensor]:
        """Reads the rows whose targets are set. Returns the readings since the last call, and forgets them: a dict of
        columns (tensors) row, request_id, layer, target, and what was
        read (the fields of Readout); {} without readings.

        Leaves out requests on which the lens has failed so far, because their earlier readings would look complete.
        """
        self._compare()
        while self._num_ready:
            self._read_tile()
        if not self._parts:
            return {}
        columns = {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]}
        self._parts = []
        copies = [one for one in self._copies if one.request_id not in self.errors]
        self._copies = []
        failed = torch.isin(columns["request_id"], torch.tensor([*self.errors], dtype=torch.long))
        if bool(failed.all()):
            return {}
        return self._with_copies({name: column[~failed] for name, column in columns.items()}, copies)

    def _with_copies(self, columns: dict[str, Tensor], copies: Sequence[Copies]) -> dict[str, Tensor]:
        """Returns the columns with a copied reading for each state that was not read because another row has its
        bits."""
        if not copies:
            return columns
        layers, sources = (torch.cat(parts) for parts in ([c.layers for c in copies], [c.sources for c in copies]))
        rows = torch.cat([torch.full_like(one.layers, one.row) for one in copies])
        keys = columns["row"] * self.model.n_layers + columns["layer"]
        order = keys.argsort()
        index = order[torch.searchsorted(keys[order], sources * self.model.n_layers + layers)]
        self.num_copied += len(index)
        copied = {**{name: column[index] for name, column in columns.items()}, "row": rows}
        return {name: torch.cat([column, copied[name]]) for name, column in columns.items()}

    def _read_tile(self) -> None:
        """Reads up to LENS_TILE queued state vectors through the lens, and stores the readings. Without memory for a
        tile, its requests have no readings."""
        taken = self._take()
        try:
            self._read(taken)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            for queued in {queued.request_id: queued for queued in reversed(taken)}.values():
                why = f"found no memory for a tile ({error!s:.100})"
                self._fail(taken, queued.request_id, int(queued.layers[0]), queued.row, why)

    def _read(self, taken: Sequence[Queued]) -> None:
        """Reads the state vectors of `taken` through the lens, in one tile, and stores the readings."""
        counts = torch.tensor([len(q.layers) for q in taken])
        rows, owners, wanted = (
            torch.tensor([getattr(q, name) for q in taken]).repeat_interleave(counts)
            for name in ("row", "request_id", "target")
        )
        count, num_again, device = len(rows), min(len(rows), LENS_TILE - len(rows)), self.model.device
        states = torch.zeros(LENS_TILE, self.model.d_model, dtype=self.model.dtype, device=device)
        states[:count] = torch.cat([q.states for q in taken]).to(device)
        numbers = [torch.zeros(LENS_TILE, dtype=torch.long), torch.full((LENS_TILE,), -1)]  # layers and targets
        numbers[0][:count], numbers[1][:count] = torch.cat([q.layers for q in taken]), wanted
        for tensor in (states, *numbers):  # the tile's end repeats its first vectors, in reverse order
            tensor[LENS_TILE - num_again :] = tensor[:num_again].flip(0)
        of_tile = numbers[0]
        layers, targets = upload(device, numbers)
        labels = {"row": rows, "request_id": owners, "layer": of_tile[:count], "target": wanted}

        def keep(readout: Readout, which: "slice | Tensor") -> None:
            """Stores the readings of the state vectors at the indices `which` of the tile."""
            columns = labels | readout._asdict()
            self._parts.append({name: column[which] for name, column in columns.items()})
            self.num_read += len(self._parts[-1]["row"])

        again = torch.arange(num_again)
        whole = self._read_or_reason(states, layers, targets, range(count))
        if isinstance(whole, Readout) and (why := _difference(whole, again)):
            for request_id in dict.fromkeys(q.request_id for q in taken):
                first = int((owners == request_id).nonzero()[0, 0])
                self._fail(taken, request_id, int(of_tile[first]), int(rows[first]), why)
            return
        if isinstance(whole, Readout):
            keep(whole, slice(count))
            return
        for request_id in dict.fromkeys(q.request_id for q in taken):
            mine = (owners == request_id).nonzero()[:, 0]
            alone = torch.zeros_like(states)
            alone[mine] = states[mine]
            readout = self._read_or_reason(alone, layers, targets, mine.tolist())
            if isinstance(readout, Readout):
                keep(readout, mine)
            else:
                failed, why = readout
                self._fail(taken, request_id, int(of_tile[failed]), int(rows[failed]), why)

    def _take(self) -> list[Queued]:
        """Removes up to LENS_TILE state vectors from the queue, and returns them as a list of Queued."""
        taken: list[Queued] = []
        room = LENS_TILE
        while self._ready and room:
            queued = self._ready.pop(0)
            if len(queued.layers) > room:
                rest = replace(queued, states=queued.states[room:], layers=queued.layers[room:])
                self._ready.insert(0, rest)
                queued = replace(queued, states=queued.states[:room], layers=queued.layers[:room])
            taken.append(queued)
            room -= len(queued.layers)
        self._num_ready -= LENS_TILE - room
        return taken

    def _read_or_reason(
        self, states: Tensor, layers: Tensor, targets: Tensor, indices: Sequence[int]
    ) -> "Readout | tuple[int, str]":
        """Returns the lens's readings of state vectors [n, m] as a Readout; if the lens fails at one of `indices`, (an
        index of `indices`, the reason as text)."""
        shape = (len(states), self.model.d_vocab)
        try:
            with torch.inference_mode():
                readout = None
                if self._to_residual is not None and self._read_tokens is not None:  # stores no logits
                    readout = self._read_tokens(self._to_residual(states, layers), targets, self.top_k)
                if readout is None:
                    logits: object = self.lens.logits(self.model, states, layers)
                    if not isinstance(logits, Tensor) or logits.shape != shape or not logits.is_floating_point():
                        return indices[0], f"must return logits {list(shape)}, got {_described(logits)}"
                    readout = self._read_logits(logits, targets, self.top_k)
                readout = Readout(*Download(readout).tensors())
        except Exception as error:  # a user's own code may raise anything; only its readings are lost
            expected = f"expected were logits {list(shape)} of states {list(states.shape)}"
            return indices[0], f"failed with {type(error).__name__}: {error!s:.200}; {expected}"
        is_number = readout.entropy_nats.isfinite() & readout.top_logprob_nats[:, 0].isfinite()
        if bad := [index for index in indices if not is_number[index]]:
            return bad[0], f"must return logits {list(shape)} with a finite largest one, got NaN or infinity"
        return readout

    def _fail(self, taken: Sequence[Queued], request_id: int, layer: int, row: int, why: str) -> None:
        """Stores in `errors` why a request has no readings, and removes its rows that are ready to be read."""
        step = next(q.step for q in taken if q.row == row)
        self.errors[request_id] = (
            f"request {request_id} step {step} layer {layer}: lens {self.lens.name} {why}; this request has no "
            "readings, its tokens and states stay"
        )
        self._ready = [queued for queued in self._ready if queued.request_id != request_id]
        self._num_ready = sum(len(queued.layers) for queued in (*self._ready, *self._uncompared))


def _same_states(pairs: Sequence[tuple[Queued, Queued]]) -> tuple[Tensor, ...]:
    """Returns a tensor [n] of flags for each pair of rows: whether their states have the same bits and layer, for the n
    layers of the row with fewer layers. Compares all pairs at once; without memory for that, returns
    False for every pair."""
    if not pairs:
        return ()
    counts = [min(len(a.layers), len(b.layers)) for a, b in pairs]
    try:
        return _compared(pairs, counts)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return torch.zeros(sum(counts), dtype=torch.bool).split(counts)


def _compared(pairs: Sequence[tuple[Queued, Queued]], counts: list[int]) -> tuple[Tensor, ...]:
    """Returns the flags of `_same_states`. counts: by pair, the number of layers."""
    states, layers = (
        [torch.cat([getattr(pair[i], name)[:n] for pair, n in zip(pairs, counts, strict=True)]) for i in (0, 1)]
        for name in ("states", "layers")
    )
    has_same_bits = (bits(states[0]) == bits(states[1])).all(-1).cpu()
    return (has_same_bits & (layers[0] == layers[1]).cpu()).split(counts)


def _residual_of(lens: Lens) -> "Callable[[Tensor, Tensor], Tensor] | None":
    """Returns the lens's `to_residual`, which maps states and layers to residual streams whose `read_out` are its
    logits; None without one, and for a user's lens: only cacheprobe's promise this."""
    has_own_logits = hasattr(lens, "__dict__") and "logits" in vars(lens)
    is_ours = type(lens).__module__.startswith("cacheprobe.lenses.") and not has_own_logits
    return getattr(lens, "to_residual", None) if is_ours else None


def _described(value: object) -> str:
    """Returns text that describes a lens's wrong output: a tensor's shape and dtype, or the value's repr."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"{value!r:.60}"


def _difference(readout: Readout, again: Tensor) -> str | None:
    """Returns an error text if the two readings of a vector that a tile holds twice have different bits; else None.
    again: indices of the vectors that are repeated."""
    for name, column in zip(Readout._fields, readout, strict=True):
        if bitwise(column[again], column[LENS_TILE - 1 - again]):
            continue
        row = next(k for k in range(len(again)) if not bitwise(column[k], column[LENS_TILE - 1 - k]))
        return (
            f"gave other bits of {name} for one vector in rows {row} and {LENS_TILE - 1 - row} of a pass of "
            f"{LENS_TILE} rows (made by the final norm, the unembedding and a sum over the vocabulary), so Z would "
            f"depend on the other requests on this machine ({torch.get_num_threads()} threads); set "
            "torch.set_num_threads(1), or capture='STC'"
        )
    return None
