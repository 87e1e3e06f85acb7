"""Compares a verify pass with itself while it runs: a free place of the pass computes one request's tokens again.

What no library promises, that a token has the same bits in any batch index and any slot, is tried before a shape is
used (engine.consistency) and watched here for as long as it is used.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheprobe.core.hook_names import PATTERN
from cacheprobe.kvcache.cache import Copy, KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM, StateSink
from cacheprobe.ops.equality import bitwise

_PARTS = {
    "pre": "the residual stream that enters",
    "keys": "the keys (made by a norm and a product)",
    "values": "the values (made by a norm and a product)",
    "T": "the attention output (made by attention and a product)",
    "C": "the MLP output (made by a norm, products and an activation)",
    "S": "the residual stream that leaves",
}
"""What is compared in a layer, in the order in which it is computed."""


@dataclass(frozen=True)
class Difference:
    """Names the first operation at which a request's tokens, computed twice in one pass, got different bits."""

    operation: str
    layer: int | None
    """None for the logits."""
    original: int
    copy: int
    """Batch rows of the pass."""

    def __str__(self) -> str:
        where = self.operation if self.layer is None else f"{self.operation} of layer {self.layer}"
        return f"batch indices {self.original} and {self.copy} differ in {where}"


class Watch:
    """Places the copies of one run and compares them.

    Twin: cacheprobe.engine.consistency, which tries shapes on texts of its own before a run.
    """

    def __init__(self) -> None:
        self._times: dict[int, int] = {}
        """By request: how often it was compared."""
        self._before: dict[int, tuple[int, int, Tensor]] = {}
        """By cache row: request, first position and logits [t, v] of its last verify pass."""
        self._logits_before: Tensor | None = None
        """Of the last tokens [n, v] that the copy of the pass at hand computes again, where they are known."""
        self._copy: Copy | None = None
        self._heard: list[tuple[int, str]] = []

    def listening(self, sink: StateSink) -> StateSink:
        """Returns a sink that compares a state with its copy's and passes it on."""

        def capture(site: str, layer: int, value: Tensor) -> None:
            """Compares a state with its copy's, and passes it on."""
            if self._copy is not None:
                self._compare_state(self._copy, site, layer, value)
            sink(site, layer, value)

        return capture

    def place_copy(
        self,
        cache: KVCache,
        states: Sequence[SequenceState],
        token_ids: Sequence[Sequence[int]],
        batch_index: Sequence[int],
        cache_rows: list[int],
        starts: list[int],
        fed: Tensor,
    ) -> Copy | None:
        """Copies a deterministic request of the pass into the last, free batch index, so that it is computed twice.

        Returns the Copy, or None if no request qualifies. Takes the request that was compared least often.
        token_ids: what each request feeds; committed tokens before it are in its state.  rows, starts, fed [b, t]: of
        the pass; changed in place.
        The copy begins up to a window of committed tokens earlier, so that window slots are compared too. Tokens that
        an earlier pass computed are compared with what that pass stored, beside other neighbours.
        """
        able = [i for i, s in enumerate(states) if s.request.is_deterministic and not s.is_edited]
        if not able or not cache.can_compute_twice:
            return None
        i = min(able, key=lambda i: self._times.get(states[i].request_id, 0))
        state, original, width = states[i], batch_index[i], fed.shape[1]
        times = self._times[state.request_id] = self._times.get(state.request_id, 0) + 1
        start, copy = starts[original], len(cache_rows) - 1
        num_verified = max(start - state.request.num_prompt_tokens, 0) if state.is_verified else 0
        turn = times - (width == 1)  # of a longer window slots first: a short request may be compared only once
        shift = min(turn % (width + 1), start, width if num_verified else width - 1)
        count = min(len(token_ids[i]), width - shift)
        fed[copy, : shift + count] = torch.tensor([*state.token_ids[start - shift : start], *token_ids[i][:count]])
        cache_rows[copy], starts[copy] = cache_rows[original], start - shift
        num_again = min(shift, num_verified)
        self._logits_before = self._known_logits(state, start, num_again)
        return Copy(original, copy, shift, count, num_again)

    def _known_logits(self, state: SequenceState, start: int, num_again: int) -> Tensor | None:
        """Returns logits of up to `num_again` tokens before `start`, from the request's last verify pass."""
        request_id, first, logits = self._before.get(state.cache_row, (-1, 0, torch.zeros(0)))
        is_its_own = request_id == state.request_id and first < start
        return logits[max(start - num_again - first, 0) : start - first] if is_its_own else None

    def remember(
        self, states: Sequence[SequenceState], batch_index: Sequence[int], starts: Sequence[int], logits: Tensor
    ) -> None:
        """Keeps a verify pass's logits until the next one; of longer windows those of the request to compare next."""
        kept = list(zip(states, batch_index, strict=True))
        if logits.shape[1] > 1:
            self._before.clear()
            kept = [min(kept, key=lambda one: self._times.get(one[0].request_id, 0))]
        for state, b in kept:
            self._before[state.cache_row] = state.request_id, starts[b], logits[b]

    @contextmanager
    def comparing(self, copy: Copy | None) -> Iterator[None]:
        """Inside the `with`, captured states are compared with those of their copy."""
        self._copy = copy
        self._heard.clear()
        try:
            yield
        finally:
            self._copy = None

    def difference(
        self, model: CachedLM, cache: KVCache, copy: Copy, logits: Tensor, forward: Callable[[], Tensor]
    ) -> Difference | None:
        """Returns the first difference between the original and its copy in the pass just run, or None.

        If they differ, the pass is repeated with all states captured, to name the operation.
        """
        before = self._logits_before
        made_again = logits[copy.copy, copy.shift - (0 if before is None else len(before)) : copy.shift]
        is_equal = bitwise(*_pair(copy, logits)) and (before is None or bitwise(before, made_again))
        if is_equal and not self._heard and not cache.copy_differs_at:
            return None
        seen = self._first(cache)
        with model.capturing([(s, n) for n in range(model.n_layers) for s in "STC"], self.listening(_hear_nothing)):
            forward()
        place = self._first(cache) or seen
        operation = "the logits (made by the final norm and the unembedding)" if place is None else _PARTS[place[1]]
        return Difference(operation, None if place is None else place[0], copy.original, copy.copy)

    def _first(self, cache: KVCache) -> tuple[int, str] | None:
        order = list(_PARTS)
        return min((*self._heard, *cache.copy_differs_at), key=lambda at: (at[0], order.index(at[1])), default=None)

    def _compare_state(self, copy: Copy, site: str, layer: int, value: Tensor) -> None:
        tokens = value.transpose(1, 2) if site == PATTERN else value
        if not bitwise(*_pair(copy, tokens)):
            self._heard.append((layer, site if site in _PARTS else "T"))


def _pair(copy: Copy, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the original's and the copy's tokens of a value [b, t, ...]."""
    return value[copy.original, : copy.num_tokens], value[copy.copy, copy.shift : copy.shift + copy.num_tokens]


def _hear_nothing(site: str, layer: int, value: Tensor) -> None: ...
