"""Checks passes while a run goes on: one request's tokens are computed a second time, and must have the same bits.

In a verify pass of a fixed shape, an unused batch index does so. With determinism="invariant", and if prompts share a
pass, a pass of another number of requests does, now and then. No library promises equal bits, so engine/consistency.py
tests shapes before a run, and this file checks them during the run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cacheprobe.core.hook_names import PATTERN
from cacheprobe.kvcache.cache import Copy, KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM, StateSink
from cacheprobe.ops.equality import bitwise

PARTS = {
    "pre": "the residual stream that enters",
    "keys": "the keys (made by a norm and a product)",
    "values": "the values (made by a norm and a product)",
    "T": "the attention output (made by attention and a product)",
    "C": "the MLP output (made by a norm, products and an activation)",
    "S": "the residual stream that leaves",
}
"""What is compared in a layer, by site, in the order of computation; the values are words for messages."""
AGAIN_EVERY, FIRST_AGAIN = 32, 2
"""One of this many passes of invariant requests, from the second pass on, computes one of them again; of passes that
read several prompts, from the first on. They begin so early that short runs are checked, too."""


@dataclass(frozen=True)
class Difference:
    """Names the operation and layer at which two computations of a request's tokens first gave different bits."""

    operation: str
    layer: int | None
    """None for the logits."""
    original: int
    """Batch index of the first computation."""
    copy: int | None
    """Batch index of the second computation; None for one in a pass of its own."""

    def __str__(self) -> str:
        where = self.operation if self.layer is None else f"{self.operation} of layer {self.layer}"
        if self.copy is None:
            return f"batch index {self.original} and a pass with other requests or none differ in {where}"
        return f"batch indices {self.original} and {self.copy} differ in {where}"

    def message(self, request_id: int, step: int, phase: str, shape: tuple[int, int], model: CachedLM) -> str:
        """Returns the text of an error: request, step, shape of the pass, where the bits differ, what follows, and what
        to set instead."""
        end, remedy = "so no deterministic request can go on in it", "determinism='verify'"
        if phase == "prefill":
            end = "so requests whose prompts were read with others before end"
            remedy = f"prefill_group=1, or {other_settings(model)}"
        elif self.copy is not None:
            remedy = f"another group or window, or {other_settings(model)}"
        return (
            f"request {request_id} step {step}: of a {phase} pass of {shape[0]} x {shape[1]} rows, its tokens were "
            f"computed twice, and {self}; this shape does not give the same bits everywhere on this machine "
            f"({torch.get_num_threads()} threads), {end}; nothing of this step was committed; set {remedy}"
        )


def other_settings(model: CachedLM) -> str:
    """Returns text for an error message: settings with which a pass of the model may be batch-invariant."""
    return "torch.set_num_threads(1)" + " or path='bridge'" * hasattr(model, "origin")


class Place(NamedTuple):
    """Holds where one request's tokens stand in the pass that decides them (`original`), in the pass that computes them
    again (`again`), both as batch indices, and in the cache."""

    original: int
    again: int
    cache_row: int
    start: int
    """Absolute position of the first token."""
    num_tokens: int


class Watch:
    """Adds a copy of one request to verify passes that have room, or computes one again in a pass of its own, and
    compares the bits of both.

    Twin: cacheprobe.engine.consistency, which tries shapes on texts of its own before a run.
    """

    def __init__(self) -> None:
        self._times: dict[int, int] = {}
        """By request id: how often the request was compared."""
        self._before: dict[int, tuple[int, int, Tensor]] = {}
        """By cache row: (request id, first position, logits [t, v]) of the last verify pass."""
        self._logits_before: Tensor | None = None
        """Logits [n, v] of an earlier pass for the tokens that the current copy computes again; None if unknown."""
        self._copy: Copy | None = None
        self._differing: list[tuple[int, str]] = []
        """(layer, site) of each captured state that differs between the original and its copy."""
        self._num_invariant = self._num_batched = 0
        """Numbers of passes that decided tokens of invariant requests, and that read several prompts."""
        self._kept: dict[tuple[str, int], Tensor] = {}
        """By (site, layer): the states [t, m] of the request that is computed again."""
        self._is_again = False

    def listening(self, sink: StateSink) -> StateSink:
        """Returns a sink for hooks, (site, layer, state), that compares original and copy, then calls `sink`. It does
        nothing in a pass that computes a request again."""

        def capture(site: str, layer: int, value: Tensor) -> None:
            """Compares the states of original and copy, if the pass has a copy, and calls `sink`."""
            if self._is_again:
                return
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
        """Copies a deterministic request into the last, unused batch index of a verify pass. Returns a Copy, or None.

        Changes cache_rows, starts and fed [b, t] of the pass in place. Takes the request that was compared least often;
        None if there is no deterministic request without interventions and KVSnapshot, or if the cache allows no copy.
        token_ids: the tokens that each request feeds.
        The copy begins up to a window of committed tokens earlier, so that other window slots are compared too. The
        results for these tokens are compared with those of the earlier pass.
        """
        i = self._least_compared(cache, states)
        if i is None:
            return None
        state, original, width = states[i], batch_index[i], fed.shape[1]
        times = self._times[state.request_id] = self._times.get(state.request_id, 0) + 1
        start, copy = starts[original], len(cache_rows) - 1
        num_verified = max(start - state.request.num_prompt_tokens, 0) if state.is_verified else 0
        # shifted first if the window is longer than 1, because a short request may be compared only once
        shift = min((times - (width == 1)) % (width + 1), start, width if num_verified else width - 1)
        count = min(len(token_ids[i]), width - shift)
        fed[copy, : shift + count] = torch.tensor([*state.token_ids[start - shift : start], *token_ids[i][:count]])
        cache_rows[copy], starts[copy] = cache_rows[original], start - shift
        num_again = min(shift, num_verified)
        self._logits_before = self._known_logits(state, start, num_again)
        return Copy(original, copy, shift, count, num_again)

    def _least_compared(self, cache: KVCache, states: Sequence[SequenceState], step: int = 1) -> int | None:
        """Returns the index in `states` of the deterministic request without interventions and KVSnapshot that was
        compared least often; None without one, or if the cache allows no second computation. Of equal ones, it is the
        first, or the last if `step` is -1."""
        eligible = _comparable(cache, states)[::step]
        return min(eligible, key=lambda i: self._times.get(states[i].request_id, 0), default=None)

    def _known_logits(self, state: SequenceState, start: int, num_again: int) -> Tensor | None:
        """Returns the kept logits [n, v] of up to `num_again` tokens of a request before `start`, or None."""
        request_id, first, logits = self._before.get(state.cache_row, (-1, 0, torch.zeros(0)))
        is_its_own = request_id == state.request_id and first < start
        return logits[max(start - num_again - first, 0) : start - first] if is_its_own else None

    def remember(
        self, states: Sequence[SequenceState], batch_index: Sequence[int], starts: Sequence[int], logits: Tensor
    ) -> None:
        """Keeps a verify pass's logits [b, t, v] for the comparison in a later pass.

        With windows longer than 1, keeps only those of the request in this pass that was compared least often.
        """
        kept = list(zip(states, batch_index, strict=True))
        if logits.shape[1] > 1:
            self._before.clear()
            kept = [min(kept, key=lambda one: self._times.get(one[0].request_id, 0))]
        for state, b in kept:
            self._before[state.cache_row] = state.request_id, starts[b], logits[b]

    @contextmanager
    def comparing(self, copy: Copy | None) -> Iterator[None]:
        """Inside the `with`, the states that the hooks capture are compared between original and copy."""
        self._copy = copy
        self._differing.clear()
        try:
            yield
        finally:
            self._copy = None

    def difference(
        self, model: CachedLM, cache: KVCache, copy: Copy, logits: Tensor, forward: Callable[[], Tensor]
    ) -> Difference | None:
        """Returns the first Difference between original and copy in the pass just run; None if all bits are equal.

        logits: [b, t, v] of the pass.  forward: runs the pass again; called only if bits differ, to find the operation.
        """
        before = self._logits_before
        made_again = logits[copy.copy, copy.shift - (0 if before is None else len(before)) : copy.shift]
        is_equal = bitwise(*_pair(copy, logits)) and (before is None or bitwise(before, made_again))
        if is_equal and not self._differing and not cache.copy_differs_at:
            return None
        first_seen = self._first_difference(cache)
        with model.capturing(_sites(model), self.listening(_ignore)):
            forward()
        at = self._first_difference(cache) or first_seen or (None, None)
        return Difference(*_operation(*at), copy.original, copy.copy)

    def _first_difference(self, cache: KVCache) -> tuple[int, str] | None:
        """Returns the first (layer, site) in the order of computation at which original and copy differ, or None."""
        return min((*self._differing, *cache.copy_differs_at), key=order_of, default=None)

    def _compare_state(self, copy: Copy, site: str, layer: int, value: Tensor) -> None:
        """Adds (layer, site) to the differences if original and copy have other bits in a captured state; a site
        of heads counts as T."""
        tokens = value.transpose(1, 2) if site == PATTERN else value
        if not bitwise(*_pair(copy, tokens)):
            self._differing.append((layer, site if site in PARTS else "T"))

    # -- determinism="invariant", and batched prompts: a pass of its own

    def choose_prompt(self, cache: KVCache, states: Sequence[SequenceState]) -> int | None:
        """Counts a pass that reads several prompts, each of which must have the bits of a pass by itself. Returns the
        index in `states` of the one to compute again, in one of AGAIN_EVERY (32) passes; None in the others, or if none
        can be. Another prompt of the pass is chosen each time: the longest first, and that at the first place last."""
        eligible = _comparable(cache, states)
        if not eligible:
            return None
        number, self._num_batched = self._num_batched, self._num_batched + 1
        places = sorted(eligible[1:], key=lambda i: -states[i].request.num_prompt_tokens) + eligible[:1]
        return None if number % AGAIN_EVERY else places[number // AGAIN_EVERY % len(places)]

    def choose_again(self, cache: KVCache, states: Sequence[SequenceState]) -> int | None:
        """Counts a pass that decides tokens of invariant requests. Returns the index in `states` of the request to
        compute again, in one of AGAIN_EVERY (32) passes; None in the others, or if no request can be."""
        i = self._least_compared(cache, states, step=-1)  # the first row of a pass is the likeliest to be right
        if i is None:
            return None
        self._num_invariant += 1
        if self._num_invariant % AGAIN_EVERY != FIRST_AGAIN:
            return None
        self._times[states[i].request_id] = self._times.get(states[i].request_id, 0) + 1
        return i

    @contextmanager
    def keeping(self, model: CachedLM, batch_index: int, num_tokens: int) -> Iterator[None]:
        """Inside the `with`, keeps S, T and C of the first tokens of one batch index, for `difference_again`."""

        def keep(site: str, layer: int, value: Tensor) -> None:
            """Keeps a copy of a state [b, t, m] at this batch index."""
            self._kept[site, layer] = value[batch_index, :num_tokens].clone()

        self._kept.clear()
        with model.capturing(_sites(model), keep):
            yield

    def difference_again(
        self, model: CachedLM, cache: KVCache, place: Place, logits: Tensor, forward: Callable[[], Tensor]
    ) -> Difference | None:
        """Runs a pass that computes the tokens inside `keeping` again, and overwrites their keys and values. Returns
        the first Difference from the first computation; None if all bits are equal.

        logits: [n, v] of the first computation.  forward: runs the pass, and returns logits whose first n are of the
            same tokens.
        """
        differing: list[tuple[int, str]] = []

        def compare(name: str, layer: int, before: Tensor, after: Tensor) -> None:
            """Adds (layer, name) to `differing` if two results have other bits."""
            if not bitwise(before, after):
                differing.append((layer, name))

        def compare_state(site: str, layer: int, value: Tensor) -> None:
            """Compares a state with the kept one."""
            compare(site, layer, self._kept[site, layer], value[place.again, : place.num_tokens])

        def cached() -> Iterator[tuple[str, int, Tensor]]:
            """Yields ("keys" or "values", layer, a copy of the cache's contents for the tokens)."""
            for name, tensors in (("keys", cache.keys), ("values", cache.values)):
                for layer, tensor in enumerate(tensors):
                    yield name, layer, tensor[place.cache_row, :, place.start : place.start + place.num_tokens].clone()

        before = list(cached())
        self._is_again = True
        try:
            with model.capturing(_sites(model), compare_state):
                again = forward()[place.again, : len(logits)]
        finally:
            self._is_again = False
            self._kept.clear()
        for (name, layer, old), (_, _, new) in zip(before, cached(), strict=True):
            compare(name, layer, old, new)
        if not differing and bitwise(logits, again):
            return None
        return Difference(*_operation(*min(differing, key=order_of, default=(None, None))), place.original, None)


def _comparable(cache: KVCache, states: Sequence[SequenceState]) -> list[int]:
    """Returns the indices of the deterministic requests without interventions and KVSnapshot; [] if the cache allows no
    second computation."""
    if not cache.can_compute_twice:
        return []
    return [i for i, state in enumerate(states) if state.request.is_deterministic and not state.is_edited]


def order_of(at: tuple[int, str]) -> tuple[int, int]:
    """Returns a key that sorts (layer, site) by the order of computation."""
    return at[0], list(PARTS).index(at[1])


def _operation(layer: int | None, site: str | None) -> tuple[str, int | None]:
    """Returns (words for a site, its layer); the words for the logits if both are None."""
    return "the logits (made by the final norm and the unembedding)" if site is None else PARTS[site], layer


def _sites(model: CachedLM) -> list[tuple[str, int]]:
    return [(site, layer) for layer in range(model.n_layers) for site in "STC"]


def _pair(copy: Copy, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (original, copy): the compared tokens of a tensor [b, t, ...], each [num_tokens, ...]."""
    return value[copy.original, : copy.num_tokens], value[copy.copy, copy.shift : copy.shift + copy.num_tokens]


def _ignore(site: str, layer: int, value: Tensor) -> None: ...
