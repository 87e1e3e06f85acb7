"""Decides which rows of a pass keep their states, and collects these states: of draft tokens until their verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from cacheprobe.core.config import CaptureConfig, TokenRow
from cacheprobe.core.devices import Download
from cacheprobe.core.hook_names import PATTERN, RECURRENT, ROUTER
from cacheprobe.core.records import ObserverError, RowSlot
from cacheprobe.core.values import is_flag
from cacheprobe.ops.state_codec import INT8, SCALE_BYTES, encode, kept_dtype
from cacheprobe.trace.state_store import ragged_starts
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


_EXACT = (PATTERN, ROUTER)
"""Sites whose numbers are not rounded to int8: weights of patterns are mostly near zero, ids of experts stay exact."""


def _dtype(site: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if site == ROUTER else dtype


@dataclass
class PassStates:
    """Holds the states of the rows of one pass that keep states. Hooks copy into it, so no stored state shares memory
    with the model."""

    dtype: torch.dtype
    index: Tensor
    """[n]: for each row, batch index x width + token slot, with width the number of token slots of the pass."""
    positions: Tensor
    """[n] absolute positions of the rows."""
    states: dict[str, Tensor]
    """By site: [layers, n, m], or as from `encode`. NaN for a layer that did not run. On the model's device until
    `settle`."""
    is_int8: bool
    """Whether states are rounded to int8, of heads with one scale for each head."""
    heads: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """Activations of attention heads by (site, layer), of the layers that ran: [n, h, d]; a pattern is flat. And of
    modules, [n, ...]."""
    rows: list[RowRecord] = field(default_factory=list)
    """The n rows; [] before the pass has ended."""
    arriving: Download | None = None
    """States and activations of heads on their way to the host; None before the pass has ended, and after `settle`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the states and activations; before `settle`, of what is on its way."""
        return sum(tensor.nbytes for tensor in (*self.states.values(), *self.heads.values()))

    def size(self, site: str) -> int:
        """Returns the number of rows. At site "pattern", returns the number of their weights per head, p + 1 for a row
        at position p."""
        return len(self.positions) if site != PATTERN else int((self.positions + 1).sum())

    def keep_heads(self, site: str, layer: int, value: Tensor) -> None:
        """Copies the activations of the rows, at one site of heads, or module, and layer.

        value: [b, t, h, d]; of a module, [b, t, ...]; for routing, [b, t, k, 2]; for a pattern, [b, h, t, s] over all
        cache slots, of which only slots 0 to p are kept.
        """
        index = self.index.to(value.device)  # layers may lie on several devices
        if site == PATTERN:
            width = value.shape[2]
            kept = self._seen(value[index // width, :, index % width])
        else:
            kept = value.flatten(0, 1)[index]
        self.heads[site, layer] = kept.to(_dtype(site, self.dtype))

    def _seen(self, weights: Tensor) -> Tensor:
        """Returns the weights of slots 0 to p, in order of row, then head, of a pattern [n, h, s]. On a GPU returns
        those of all slots: to count the seen ones, the host would wait."""
        if weights.device.type != "cpu":
            return weights
        return weights.masked_select((torch.arange(weights.shape[2]) <= self.positions[:, None])[:, None])

    def finish(self, rows: list[RowRecord]) -> None:
        """Sets the rows after the pass, and begins to move their states to the CPU."""
        self.rows, self.positions = rows, torch.tensor([row.position for row in rows])
        self.arriving = Download([*self.states.values(), *self.heads.values()])

    def settle(self) -> None:
        """Waits until the states are on the CPU, and rounds them to int8 if they are to be."""
        if self.arriving is None:
            return
        arrived, self.arriving = iter(self.arriving.tensors()), None
        self.states = {site: next(arrived) for site in self.states}
        for (site, layer), kept in list(zip(self.heads, arrived, strict=True)):
            self.heads[site, layer] = self._seen(kept) if site == PATTERN and kept.dim() == 3 else kept
        if self.is_int8:
            self.states = {site: encode(block) for site, block in self.states.items()}
            self.heads |= {place: encode(kept) for place, kept in self.heads.items() if place[0] not in _EXACT}

    def part(self, chosen: Sequence[int]) -> "PassStates":
        """Returns a copy of the states of the rows at these indices."""
        self.settle()
        index = torch.tensor(chosen, dtype=torch.long)
        part = replace(
            self,
            positions=self.positions[index],
            states={site: block[:, index] for site, block in self.states.items()},
            heads={place: kept[index] for place, kept in self.heads.items() if place[0] != PATTERN},
            rows=[self.rows[i] for i in chosen],
        )
        for place, kept in self.heads.items():
            if place[0] == PATTERN:
                starts, _ = ragged_starts(self.positions, len(kept))
                part.heads[place] = torch.cat([kept[:0], *(kept[starts[i] : starts[i + 1]] for i in chosen)])
        return part


class KeptStates:
    """Collects the captured states of a run pass by pass, in the order of `state_index` of their rows.

    If `config.statuses` is set, states are held apart. `apply_statuses` drops them, or gives their rows a state_index,
    once the rows have a status.
    """

    def __init__(
        self,
        config: CaptureConfig,
        layers: Sequence[int],
        model_dtype: torch.dtype,
        modules: Sequence[tuple[str, int]] = (),
    ) -> None:
        """modules: (name, layer) of each module that is captured."""
        self.config = config
        self.layer_index = {layer: i for i, layer in enumerate(layers)}
        self.modules = dict(modules)
        self.is_int8 = config.dtype == INT8
        self.dtype = kept_dtype(config.dtype, model_dtype)
        """dtype of the tensors that receive the states of a pass."""
        self.num_rows = 0
        """Number of rows with states so far."""
        self.shapes: dict[tuple[str, int], tuple[tuple[int, ...], int]] = {}
        """By (site, layer), from a pass that reached the layer: the shape of a row's activations of heads, and the
        number of heads of a pattern. Used where states are joined."""
        self._newest: PassStates | None = None
        self._passes: list[PassStates] = []
        self._undecided: list[PassStates] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the states that the next call of `take` takes."""
        return sum(one.num_bytes for one in self._passes)

    def open(self, index: Tensor, positions: Tensor, width: int) -> PassStates:
        """Returns a new PassStates for the pass that begins, with the tensors that receive its states, on the device of
        `index`.

        index: batch index x width of the pass + slot of each kept row, ascending.  positions: absolute positions of
        these rows, on the CPU.  width: of the model.
        """
        size = (len(self.layer_index), len(index), width)
        sites = self.config.state_sites
        states = {site: torch.full(size, torch.nan, dtype=self.dtype, device=index.device) for site in sites}
        return PassStates(self.dtype, index, positions, states, self.is_int8)

    def take(self) -> dict[tuple[str, int], Tensor]:
        """Returns the states appended since the last call, and forgets them: a dict (site, layer) -> [n, m]; of heads
        [n, h, d]; a pattern as one flat tensor; {} for a run that captures none.

        Rows of a pass that ended before the layer are NaN; if no pass has reached the layer yet, the tensor of its
        heads is empty. Routing of a layer without experts is NaN, and so is the recurrent state of a layer without one.
        """
        passes, self._passes = self._passes, []
        for one in passes:
            one.settle()
        joined: dict[tuple[str, int], Tensor] = {}
        for site in self.config.state_sites:
            blocks = [one.states.pop(site) for one in passes]
            for layer, i in self.layer_index.items():
                parts = [block[i] for block in blocks]
                joined[site, layer] = torch.cat(parts) if parts else torch.empty(0, 0, dtype=self.dtype)
        for partial_site in (ROUTER, RECURRENT):
            kept = (tensor for one in passes for (site, _), tensor in one.heads.items() if site == partial_site)
            if (example := next(kept, None)) is not None:
                for layer in self.layer_index:
                    self.shapes.setdefault((partial_site, layer), (example.shape[1:], 1))
        for place in (*product(self.config.heads, self.layer_index), *self.modules.items()):
            joined[place] = self._joined_heads(passes, place)
        return joined

    def _joined_heads(self, passes: Sequence[PassStates], place: tuple[str, int]) -> Tensor:
        """Returns the head activations of one (site, layer), joined over the passes, and frees those of the passes."""
        site, _ = place
        by_pass = [(one, one.heads.pop(place, None)) for one in passes]
        ran = next(((one, tensor) for one, tensor in by_pass if tensor is not None), None)
        if ran is not None:
            one, example = ran
            is_pattern = site == PATTERN
            self.shapes[place] = ((), len(example) // one.size(site)) if is_pattern else (example.shape[1:], 1)
        if place not in self.shapes or not by_pass:
            return torch.empty(0, dtype=_dtype(site, self.dtype))
        shape, heads = self.shapes[place]

        def absent(one: PassStates) -> Tensor:
            """Returns NaN in the shape of one pass's head activations, for a pass that did not reach the layer."""
            if self.is_int8 and site not in _EXACT:
                return encode(torch.full((one.size(site), *shape[:-1], shape[-1] - SCALE_BYTES), torch.nan))
            return torch.full((heads * one.size(site), *shape), torch.nan, dtype=_dtype(site, self.dtype))

        return torch.cat([absent(one) if tensor is None else tensor for one, tensor in by_pass])

    def add(self, taken: PassStates) -> None:
        """Waits for the states of the pass before, and takes those of a pass. Holds them until `apply_statuses` if
        `config.statuses` is set."""
        if self._newest is not None:
            self._newest.settle()
        self._newest = taken
        if self.config.statuses is None:
            self._append(taken)
        else:
            self._undecided.append(taken)

    def _append(self, taken: PassStates) -> None:
        """Appends states, and sets the state_index of their rows."""
        for row in taken.rows:
            row.state_index = self.num_rows
            self.num_rows += 1
        self._passes.append(taken)

    def apply_statuses(self) -> None:
        """Of the rows held apart that have a status now, appends the states of those to keep, and drops the others."""
        held, self._undecided = self._undecided, []
        for taken in held:
            decided = [i for i, row in enumerate(taken.rows) if row.role]
            if len(decided) < len(taken.rows):
                rest = taken.part([i for i, row in enumerate(taken.rows) if not row.role]) if decided else taken
                self._undecided.append(rest)
            if kept := [i for i in decided if self.config.keeps_status(taken.rows[i].status)]:
                self._append(taken.part(kept) if len(kept) < len(taken.rows) else taken)
