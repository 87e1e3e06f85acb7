"""Keeps the chunk states that the compression block C computes from thoughts, so that each distinct thought is computed
once."""

import torch
from torch import Tensor

from cacheprobe.models.thinking.model import ThinkingModel


class ChunkStates:
    """Computes the chunk state of each distinct thought alone, so that its bits depend on the thought only, and keeps
    the state until `forget_old` or `forget_other_weights` clears it."""

    def __init__(self, model: ThinkingModel) -> None:
        self.model = model
        self._kept: dict[tuple[int, ...], Tensor] = {}
        self._valid_for: object = None
        self._weights_sha256 = ""
        self._points = [point for name, point in model.hook_dict.items() if name.startswith("compression")]

    def of(self, thought_ids: tuple[int, ...]) -> Tensor:
        """Returns the chunk state [c, m] of one thought, given by its token ids; computed only if not kept yet."""
        if thought_ids not in self._kept:
            config = self.model.config
            width = max(len(thought_ids), config.max_thought)
            ids = torch.tensor([[*thought_ids, *[config.pad_id] * (width - len(thought_ids))]])
            with torch.inference_mode():
                self._kept[thought_ids] = self.model.compress(ids.to(self.model.embed.weight.device))[0]
        return self._kept[thought_ids]

    def forget_old(self) -> None:
        """Clears the kept chunk states if the address or version counter of a weight changed since the last call, or if
        the compression block has or had hooks. Call `forget_old` before each forward."""
        versions = tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in self.model.parameters())
        is_hooked = any(point.fwd_hooks for point in self._points)
        if is_hooked or self._valid_for != (versions, is_hooked):
            self._kept.clear()
        self._valid_for = (versions, is_hooked)

    def forget_other_weights(self, weights_sha256: str) -> None:
        """Clears the kept chunk states if `weights_sha256` differs from the last call's: an edit through `weight.data`
        changes no version counter, so `forget_old` misses it."""
        if weights_sha256 != self._weights_sha256:
            self._kept.clear()
        self._weights_sha256 = weights_sha256
