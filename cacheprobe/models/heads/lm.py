"""Defines HeadLM, which runs a draft head on a KVCache of its own, with all sites of a model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from cacheprobe.core.hook_names import PATTERN
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.base import CachedLM, HeadWriter, ModelError, StateSink
from cacheprobe.models.heads.module import HeadModule
from cacheprobe.models.hf.lm import Head
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.models.plain.sites import PlainSites


class DraftHeadLM(PlainSites):
    """Describes a draft head as a CachedLM, whose passes a run records. Subclasses say how its passes run."""

    target_sites: tuple[tuple[str, int], ...]
    """(site, layer) of the target's states that it reads."""
    lacks: tuple[str, ...] = ()
    """Sites of attention heads that it does not have, or not in the form of a trace."""

    def head_writer(self, layer: int) -> HeadWriter:
        """Raises: ModelError, unless the head has attention."""
        raise ModelError(f"{self.name} has no attention; choose another site than z")


class HeadLM(PlainLM, DraftHeadLM):  # pyright: ignore[reportIncompatibleVariableOverride]  # one class of `tapes`
    """Runs a draft head as a CachedLM: its layers, counted from 0, have the sites of a model's layers, and its logits
    are over the target model's vocabulary.

    The row of cache slot i is given the target's state of position i and the token of position i + 1. Its text position
    is that of this token, i + 1, so that its prediction is for the next position.
    Twin: the head's own forward over the whole text without a cache, close(1e-5) in float32.
    """

    def __init__(
        self,
        live: HeadModule,
        target: CachedLM,
        name: str,
        target_sites: Sequence[tuple[str, int]],
        token_ids: Tensor | None = None,
        note: str = "",
    ) -> None:
        """live: the head's module.  target: the model whose states it reads, and whose tokenizer it has.

        target_sites: (site, layer) of these states, in the order in which `entering` takes them.
        token_ids: [v] of the head, the target's id of each of its own ids; None if both have the same vocabulary.
        Raises: ModelError if the head's parts are not found.
        """
        super().__init__(live, target.tokenizer, name, note)
        self.target_sites = tuple(target_sites)
        self.token_ids = None if token_ids is None else token_ids.to(self.device)
        self.prepend_bos = target.prepend_bos
        self.stop_token_ids, self.stop_source = target.stop_token_ids, target.stop_source
        self.tapes = None  # its passes are short, and alternate with those of the model
        self.d_vocab = target.d_vocab
        self.head = Head(self.head.norm, self.head.unembed, self._over_target)

    def run(
        self, token_ids: Tensor, given: Tensor, cache: KVCache, cache_rows: Sequence[int], starts: Sequence[int]
    ) -> Tensor:
        """Runs rows of the head and returns its residual stream [b, t, m] after the last block.

        token_ids: [b, t].  given: [b, t, m], from `entering` or `fed_back`.  cache_rows, starts: as for
        CachedLM.forward; a start is the cache slot of the first row, one less than its text position.
        """
        self.model.given = given
        try:
            return self.forward(token_ids, cache, cache_rows, starts, num_layers=self.n_layers)
        finally:
            self.model.given = None

    @torch.inference_mode()
    def entering(self, states: Tensor) -> Tensor:
        """Returns what rows are given, [..., m], from the target's states [..., l, m] at `target_sites`."""
        return self.model.entering(states.to(self.device, self.dtype))

    @torch.inference_mode()
    def fed_back(self, residual: Tensor) -> Tensor:
        """Returns what the next rows of a chain are given, [..., m], from the head's own residual stream."""
        return self.model.fed_back(residual)

    @property
    def unembedding(self) -> Tensor:
        """Unembedding matrix [v, m] over the target's vocabulary: zeros for tokens that the head never drafts."""
        weight = super().unembedding
        if self.token_ids is None:
            return weight
        return weight.new_zeros(self.d_vocab, weight.shape[1]).index_copy_(0, self.token_ids, weight)

    @contextmanager
    def capturing(self, sites: Sequence[tuple[str, int]], sink: StateSink) -> Iterator[None]:
        """Returns a context manager as PlainLM's. At "pattern", slot s of the tensor is text position s: no row stands
        at position 0, whose weight is 0."""

        def by_position(site: str, layer: int, value: Tensor) -> None:
            """Calls the sink."""
            sink(site, layer, pad(value, (1, 0)) if site == PATTERN else value)

        with super().capturing(sites, by_position):
            yield

    def _forward(
        self, token_ids: Tensor, cache: StagedCache, num_layers: int | None, logit_slots: Sequence[int] | None
    ) -> Tensor:
        if self.model.given is None:
            raise ModelError(
                f"{self.name} is a draft head, which reads a model's states; call run(...), or draft with it"
            )
        out = super()._forward(token_ids, cache, num_layers, logit_slots)
        return out if num_layers is not None else self._over_target(out)

    def _over_target(self, logits: Tensor) -> Tensor:
        """Returns the head's logits [..., v] over the target's vocabulary; -infinity for tokens that it lacks."""
        if self.token_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.d_vocab), -torch.inf)
        return whole.index_copy(-1, self.token_ids, logits)
