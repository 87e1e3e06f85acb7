"""Defines PassCapture: the rows that a recorder keeps of the running pass, and the tensors that it copies into."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEAD_SITES
from cacheprobe.core.records import RowSlot
from cacheprobe.trace.recording.kept_states import PassStates

Pack = Callable[[Tensor, Tensor, Tensor], None]
"""Function (states [b, t, m], rows [n], out [n, m]) that writes chosen rows to `out`: `ops.references.pack_rows`."""

_CHECKED_ROWS = 64
"""Maximum number of rows of a pass, evenly spaced, in which the self-check compares S with input + T + C."""


@dataclass
class PassCapture:
    """Holds the tensors that the hooks of one pass copy states into, from the recorder's `before_forward` to its
    `after_forward`.

    A pass without a PassCapture, such as one of a drafter that calls the model itself, records no state.
    """

    kept: list[bool]
    """For each row, whether to keep its states."""
    lens_rows: list[bool]
    """For each row, whether the lens reads it."""
    keep_index: Tensor
    """[n]: batch_index x width + slot of the kept rows."""
    lens_index: Tensor
    """As keep_index, for the rows that the lens reads."""
    checked_index: Tensor
    """As keep_index, for the rows of the self-check."""
    check_step: int
    """Distance between two rows of the self-check, in rows of the pass."""
    layer_index: dict[int, int]
    """Layer -> its index in the tensors, for the kept layers."""
    kept_states: PassStates | None = None
    """States of the kept rows; None without such a row."""
    states: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that the hooks copy to, [layers, n, m] by site: those of `kept_states`, or some on the model's device."""
    pack: Pack | None = None
    """Copies chosen rows in a kernel; None for torch's indexing. The bits are the same."""
    lens_block: Tensor | None = None
    """[layers, n, m] of S, for the rows that the lens reads."""
    feature_place: tuple[str, int] | None = None
    """(site, layer) whose states a dictionary encodes; None if features are not recorded."""
    feature_states: Tensor | None = None
    """[n, m], for the kept rows: the states at `feature_place`; None before its hook was called."""
    watched: dict[tuple[str, int], Tensor] | None = None
    """States of the rows of the self-check, by (site, layer); None in a pass without a self-check."""

    @classmethod
    def of(
        cls,
        rows: Sequence[RowSlot],
        width: int,
        kept: list[bool],
        lens_rows: list[bool],
        layer_index: dict[int, int],
        device: torch.device,
    ) -> "PassCapture":
        """Returns a PassCapture whose tensors for states the caller must allocate. Chooses at most 64 evenly spaced
        rows for the self-check (S = input + T + C).

        kept, lens_rows: for each row, whether its states are kept, and whether the lens reads it.
        width: token slots of the pass for each batch index.
        """
        flat = torch.tensor([row.batch_index * width + row.slot for row in rows])
        step = -(-len(rows) // _CHECKED_ROWS)
        chosen = (flat[torch.tensor(kept)], flat[torch.tensor(lens_rows)], flat[::step])
        keep, lens, checked = (index.to(device) for index in chosen)
        return cls(kept, lens_rows, keep, lens, checked, step, layer_index)

    def open_states(self, kept_states: PassStates, device: torch.device) -> None:
        """Sets the tensors that receive states. If a kernel of another device writes them, they lie on that device
        until `finish` copies them at once."""
        self.kept_states, self.states = kept_states, kept_states.states
        if self.pack is not None and device.type != "cpu":
            self.states = {s: torch.full_like(kept, torch.nan, device=device) for s, kept in self.states.items()}

    def finish(self) -> PassStates | None:
        """Returns the states of the kept rows, copied to the CPU's memory if they are elsewhere; None without such a
        row."""
        if self.kept_states is not None and self.states is not self.kept_states.states:
            for site, kept in self.kept_states.states.items():
                kept.copy_(self.states[site])
        return self.kept_states

    def take(self, site: str, layer: int, value: Tensor, device: torch.device) -> None:
        """Copies from a hook's tensor the rows to keep, to read through the lens (site S), and to self-check.

        value: [b, t, m], or heads as in PassStates.keep_heads.
        """
        if site in HEAD_SITES:
            if self.kept_states is not None:
                self.kept_states.keep_heads(site, layer, value)
            return
        flat = value.reshape(-1, value.shape[-1]).to(device)  # layers may lie on several devices
        if self.watched is not None:
            self.watched[site, layer] = flat[self.checked_index]
        if (site, layer) == self.feature_place:
            self.feature_states = flat[self.keep_index]
        index = self.layer_index.get(layer)
        if index is None or site == "pre":
            return
        if site in self.states:
            _take(flat, self.keep_index, self.states[site][index], self.pack)
        if site == "S" and self.lens_block is not None:
            _take(flat, self.lens_index, self.lens_block[index], self.pack)


def _take(flat: Tensor, index: Tensor, out: Tensor, pack: Pack | None) -> None:
    """Copies the rows flat[index] to the tensor `out`."""
    if pack is not None and out.device == flat.device:
        pack(flat[None], index, out)
    elif flat.dtype == out.dtype and flat.device == out.device:
        torch.index_select(flat.detach(), 0, index, out=out)
    else:
        out.copy_(flat[index])
