"""Keeps the verified model's states of every committed position, for drafters that read them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from cacheprobe.core.devices import upload
from cacheprobe.engine.passes import Pass
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM


class TargetStates:
    """Keeps states at chosen sites and layers, by cache row and position, as keys and values are kept.

    Every pass that feeds a position writes its states, so that those of a rejected token are replaced by those of the
    committed one.
    """

    def __init__(self, model: CachedLM, cache: KVCache, sites: Sequence[tuple[str, int]]) -> None:
        """sites: (site, layer) of the states to keep."""
        self._model, self._cache, self.sites = model, cache, tuple(sites)
        shape = len(self.sites), cache.rows, cache.capacity, model.d_model
        self._kept = torch.zeros(shape, dtype=model.dtype, device=model.device)

    @contextmanager
    def reading(self, a_pass: Pass) -> Iterator[None]:
        """Keeps the states of a pass, which runs inside the `with`."""
        fed = [
            (b * a_pass.width + t, entry.state.cache_row * self._cache.capacity + entry.start + t)
            for b, entry in zip(a_pass.batch_index, a_pass.entries, strict=True)
            for t in range(len(entry.token_ids))
        ]
        chosen, places = upload(self._kept.device, torch.tensor(fed).T.contiguous().unbind())

        def keep(site: str, layer: int, value: Tensor) -> None:
            """Copies the states [b, t, m] of real tokens."""
            kept = self._kept[self.sites.index((site, layer))].flatten(0, 1)
            kept[places] = value.detach().flatten(0, 1).to(kept.device)[chosen]

        with self._model.capturing(self.sites, keep):
            yield

    def of(self, state: SequenceState, start: int, end: int) -> Float[Tensor, "p l m"]:
        """Returns a request's states at positions start..end-1, at each of `sites`. These positions must be fed."""
        return self._kept[:, state.cache_row, start:end].transpose(0, 1)

    def copy(self, source_row: int, row: int, length: int) -> None:
        """Copies the first `length` positions of a cache row to another one."""
        self._kept[:, row, :length] = self._kept[:, source_row, :length]
