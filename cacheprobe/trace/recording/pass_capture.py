"""Defines PassCapture: the rows that a recorder keeps of the running pass, and the tensors that it copies into."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cacheprobe.core.devices import upload
from cacheprobe.core.hook_names import HEAD_SITES, is_module
from cacheprobe.core.records import RowSlot
from cacheprobe.trace.recording.kept_states import PassStates

Pack = Callable[[Tensor, Tensor, Tensor], None]
"""Function (states [b, t, m], rows [n], out [n, m]) that writes chosen rows to `out`: `ops.references.pack_rows`."""

_CHECKED_ROWS = 64
"""Maximum number of rows of a pass, evenly spaced, in which the self-check compares S with input + T + C."""


class PassCapture:
    """Holds the tensors that the hooks of one pass copy states into, from the recorder's `before_forward` to its
    `after_forward`.

    A pass without a PassCapture, such as one of a drafter that calls the model itself, records no state.
    """

    def __init__(
        self,
        rows: Sequence[RowSlot],
        width: int,
        kept: list[bool],
        lens_rows: list[bool],
        layer_index: dict[int, int],
        device: torch.device,
    ) -> None:
        """Chooses at most 64 evenly spaced rows for the self-check. The caller sets the tensors for states.

        width: token slots of the pass for each batch index.  kept, lens_rows: for each row, whether its states are
        kept, and whether the lens reads it.  layer_index: by kept layer, its index in the tensors.
        """
        self.kept, self.lens_rows, self.layer_index, self.device = kept, lens_rows, layer_index, device
        flat = torch.tensor([row.batch_index * width + row.slot for row in rows])
        self.check_step = -(-len(rows) // _CHECKED_ROWS)
        """Distance between two rows of the self-check, in rows of the pass."""
        chosen = (flat[torch.tensor(kept)], flat[torch.tensor(lens_rows)], flat[:: self.check_step])
        self.keep_index, self.lens_index, self.checked_index = upload(device, chosen)
        """[n] each: batch_index x width + slot of the rows to keep, to read through the lens, and to self-check."""
        self.states: PassStates | None = None
        """States of the kept rows; None without such a row."""
        self.pack: Pack | None = None
        """Copies chosen rows in a kernel; None for torch's indexing. The bits are the same."""
        self.lens_block: Tensor | None = None
        """[layers, n, m] of S, for the rows that the lens reads."""
        self.feature_place: tuple[str, int] | None = None
        """(site, layer) whose states a dictionary encodes; None if features are not recorded."""
        self.feature_states: Tensor | None = None
        """[n, m], for the kept rows: the states at `feature_place`; None before its hook was called."""
        self.watched: dict[tuple[str, int], Tensor] | None = None
        """States of the rows of the self-check, by (site, layer); None in a pass without a self-check."""

    def take(self, site: str, layer: int, value: Tensor) -> None:
        """Copies from a hook's tensor the rows to keep, to read through the lens (site S), and to self-check.

        value: [b, t, m], or heads and modules as in PassStates.keep_heads.
        """
        if site in HEAD_SITES or is_module(site):
            if self.states is not None:
                self.states.keep_heads(site, layer, value)
            return
        flat = value.reshape(-1, value.shape[-1]).to(self.device)  # layers may lie on several devices
        if self.watched is not None:
            self.watched[site, layer] = flat[self.checked_index]
        if (site, layer) == self.feature_place:
            self.feature_states = flat[self.keep_index]
        index = self.layer_index.get(layer)
        if index is None or site == "pre":
            return
        if self.states is not None and site in self.states.states:
            self._copy(flat, self.keep_index, self.states.states[site][index])
        if site == "S" and self.lens_block is not None:
            self._copy(flat, self.lens_index, self.lens_block[index])

    def _copy(self, flat: Tensor, index: Tensor, out: Tensor) -> None:
        """Copies the rows flat[index] to the tensor `out`."""
        if self.pack is not None:
            self.pack(flat[None], index, out)
        elif flat.dtype == out.dtype:
            torch.index_select(flat.detach(), 0, index, out=out)
        else:
            out.copy_(flat[index])
