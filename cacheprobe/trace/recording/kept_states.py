"""Decides which rows of a pass keep their states, and collects these states: of draft tokens until their verdict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheprobe.core.config import CaptureConfig, TokenRow
from cacheprobe.core.records import ObserverError, RowSlot
from cacheprobe.core.values import is_flag
from cacheprobe.ops.state_codec import INT8, encode, kept_dtype
from cacheprobe.trace.state_store import Blocks, HeadBlock, HeadBlocks
from cacheprobe.trace.tables.build import RowRecord


def is_kept(config: CaptureConfig, row: RowSlot, step: int, phase: str, num_prompt_tokens: int) -> bool:
    """Returns whether to capture the states of a row of the coming pass. A row that is fed a draft token has no status
    yet, so `statuses` does not decide it here. Raises: ObserverError if the predicate `config.keep` fails, or gives no
    flag."""
    known = () if row.is_draft else (status_of(row),)
    if not (config.keeps_row(phase, row.position) and all(map(config.keeps_status, known))):
        return False
    if config.keep is None:
        return True
    token = TokenRow(row.request_id, step, phase, row.position, row.token_id, row.is_draft, num_prompt_tokens)
    where = f"the predicate keep={config.keep_name} of CaptureConfig, called with {token},"
    try:
        wanted = config.keep(token)
    except Exception as error:
        raise ObserverError(f"{where} failed with {type(error).__name__}: {error!s:.200}") from error
    if not is_flag(wanted):
        raise ObserverError(f"{where} must return True or False, got {wanted!r:.60}")
    return bool(wanted)


def status_of(row: RowSlot) -> str:
    """Returns the status of a row that is not fed a draft token."""
    return "committed" if row.is_canonical else "superseded"


@dataclass
class PassStates:
    """Holds the captured states of some rows of a pass."""

    rows: list[RowRecord]
    states: dict[str, Tensor]
    """By site: [layers, n, m] of the n rows, or as from `encode`."""
    heads: HeadBlock | None

    def part(self, chosen: Sequence[int]) -> "PassStates":
        """Returns a copy of the states of the rows at these indices."""
        index = torch.tensor(chosen, dtype=torch.long)
        states = {site: block[:, index] for site, block in self.states.items()}
        return PassStates(
            [self.rows[i] for i in chosen], states, None if self.heads is None else self.heads.part(chosen)
        )


class KeptStates:
    """Collects the captured states of a run, in the order of `state_index` of their rows.

    If `config.statuses` is set, states of rows without a status are held apart. `apply_statuses` drops them, or gives
    their rows a state_index, once the rows have a status.
    """

    def __init__(self, config: CaptureConfig, layers: Sequence[int], model_dtype: torch.dtype) -> None:
        self.config = config
        self.is_int8 = config.dtype == INT8
        self.dtype = kept_dtype(config.dtype, model_dtype)
        """dtype of the tensors that receive the states of a pass."""
        self.blocks = Blocks(config.state_sites, layers, self.dtype)
        self.heads = HeadBlocks(config.heads, layers, self.dtype, is_int8=self.is_int8) if config.heads else None
        self._undecided: list[PassStates] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the states that the next call of `take` takes."""
        return self.blocks.num_bytes + (0 if self.heads is None else self.heads.num_bytes)

    @property
    def num_undecided_bytes(self) -> int:
        """Bytes of the states that are held until their rows have a status, without head activations."""
        return sum(block.nbytes for held in self._undecided for block in held.states.values())

    def take(self) -> tuple[int | None, Callable[[], dict[tuple[str, int], Tensor]]]:
        """Takes the states appended since the last call. Returns (their bytes, None for a run that captures none; a
        function, to be called once, in any thread, that joins them to a dict (site, layer) -> states). See
        `Blocks.take` and `HeadBlocks.joined`."""
        heads = {} if self.heads is None else self.heads.joined()  # with NaN for passes that did not reach a layer
        num_bytes = self.blocks.num_bytes + sum(tensor.nbytes for tensor in heads.values())
        join, is_captured = self.blocks.take(), bool(self.config.state_sites or self.config.heads)
        return num_bytes if is_captured else None, lambda: {**join(), **heads}

    def add(self, rows: list[RowRecord], states: dict[str, Tensor], heads: HeadBlock | None) -> bool:
        """Takes the states of the rows of a pass that keep states. Returns whether it appended some, which
        `drop_last` can discard; states of rows without a status are held apart if `config.statuses` is set."""
        coded = {site: encode(block) for site, block in states.items()} if self.is_int8 else states
        taken = PassStates(rows, coded, heads)
        open_rows = [i for i, row in enumerate(rows) if not row.role] if self.config.statuses is not None else []
        if open_rows:
            self._undecided.append(taken.part(open_rows))
            taken = taken.part([i for i, row in enumerate(rows) if row.role])
        return self._append(taken)

    def _append(self, taken: PassStates) -> bool:
        """Appends states, and sets the state_index of their rows. Returns False without a row."""
        if not taken.rows:
            return False
        for index, row in enumerate(taken.rows, self.blocks.num_rows):
            row.state_index = index
        self.blocks.append(len(taken.rows), taken.states)
        if self.heads is not None:
            assert taken.heads is not None
            self.heads.append(taken.heads)
        return True

    def apply_statuses(self) -> None:
        """Of the rows held apart that have a status now, appends the states of those to keep, and drops the others.
        Call it only while no appended states may be discarded."""
        held, self._undecided = self._undecided, []
        for taken in held:
            decided = [i for i, row in enumerate(taken.rows) if row.role]
            if len(decided) < len(taken.rows):
                rest = taken.part([i for i, row in enumerate(taken.rows) if not row.role]) if decided else taken
                self._undecided.append(rest)
            if kept := [i for i in decided if self.config.keeps_status(taken.rows[i].status)]:
                self._append(taken.part(kept))

    def drop_last(self, num_passes: int, lost: set[int]) -> None:
        """Discards the states appended by the last `num_passes` calls of `add` that returned True, and those held for
        rows whose `id` is in `lost`."""
        for _ in range(num_passes):
            self.blocks.drop_last()
            if self.heads is not None:
                self.heads.drop_last()
        self._undecided = [taken for taken in self._undecided if id(taken.rows[0]) not in lost]
