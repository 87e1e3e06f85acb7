"""Guards "the same bits": tries pass shapes before a run, and computes some tokens twice while the run goes on.

No library promises equal bits. In a verify pass of a fixed shape, an unused batch index computes another one's tokens
again. With determinism="invariant", and if prompts share a pass, another pass does so now and then.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.hook_names import PATTERN
from cacheprobe.engine.passes import BatchedPromptFault, Pass, ShapeFault, free_row
from cacheprobe.engine.shape_trial import PARTS, all_sites, order_of
from cacheprobe.engine.shapes import (
    Hooked,
    config_to_try,
    forbid_batched_prompts,
    invariant_widths,
    narrow_widths,
    other_settings,
    require_prefill,
    serving_config,
)
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.staged import DuplicateEntry
from cacheprobe.models.base import CachedLM, StateSink
from cacheprobe.ops.equality import bitwise

AGAIN_EVERY, FIRST_AGAIN = 32, 2
"""One of this many passes of invariant requests, from the second on, computes one of them again; of passes that read
several prompts, from the first on. So short runs are checked, too."""
LEAVE_ROOM_EVERY = 16
"""One of this many full verify passes leaves out its last request, to make room for a duplicate."""


@dataclass(frozen=True)
class Difference:
    """Names the operation and layer at which two computations of a request's tokens first gave different bits."""

    site: str | None
    """One of PARTS; None, as `layer`, for the logits."""
    layer: int | None
    original: int
    """Batch index of the first computation."""
    copy: int | None
    """Batch index of the second one; None for a pass of its own."""

    def __str__(self) -> str:
        what = "the logits (made by the final norm and the unembedding)" if self.site is None else PARTS[self.site]
        where = what if self.layer is None else f"{what} of layer {self.layer}"
        if self.copy is None:
            return f"batch index {self.original} and a pass with other requests or none differ in {where}"
        return f"batch indices {self.original} and {self.copy} differ in {where}"


class RecomputeChecker:
    """Checks that a token has the same bits whatever else is in its pass. `trial` checks it before a run. `plan` and
    `compare` check it in each pass; some passes compute the tokens of one request twice for this.

    Requests with interventions or a KVSnapshot are not computed twice, nor are those of a cache that does not allow it.
    """

    def __init__(self, model: CachedLM) -> None:
        self.model = model
        self.narrow_widths: tuple[int, ...] = ()
        """Widths below the window that a verify pass, or a decode pass of invariant requests, may have; ascending."""
        self.widths: tuple[int, ...] = ()
        """The same and the window: in all of these a token has the same bits."""
        self.batches_prompts = False
        """Whether prompts of verified or invariant requests may share a prefill pass."""
        self.batched: dict[int, SequenceState] = {}
        """By request id: requests of `note_batch`, and those that copied their prompts."""
        self.prompt_faults: dict[int, str] = {}
        """By request id: the fault after which the prompt of a deterministic request is in doubt."""
        self._times = Counter[int]()
        """By request id: how often the request was compared."""
        self._before: dict[int, tuple[int, int, Tensor]] = {}
        """By cache row: (request id, first position, logits [t, v]) of the last verify pass."""
        self._logits_before: Tensor | None = None
        """Logits [n, v] of an earlier pass for the tokens that the duplicate computes again; None if unknown."""
        self._duplicate: DuplicateEntry | None = None
        """The duplicate of the pass that is being computed."""
        self._kept: dict[tuple[str, int], Tensor] = {}
        """By (site, layer): the states [t, m] of the request that is computed again."""
        self._num_invariant = self._num_batched = self._num_full = 0
        """Numbers of passes: of invariant requests, of several prompts, of full groups."""
        self._is_again = False

    # -- before a run

    def trial(
        self,
        config: EngineConfig,
        hooked: Hooked,
        unset_shapes: Collection[str],
        is_any_deterministic: bool,
        require_fit: Callable[[EngineConfig], None],
        num_requests: int,
    ) -> EngineConfig:
        """Tries the shapes of a run's deciding passes on random texts, and notes the narrower widths that they may
        have. Returns the EngineConfig of these passes. Arguments and errors: see `shapes.serving_config`; with
        determinism="invariant", see `shapes.invariant_widths`."""
        tried = config_to_try(config, self.model.attends_by_request)
        if config.is_invariant:
            require_prefill(self.model, tried, hooked)
            self.narrow_widths = invariant_widths(self.model, tried, hooked, num_requests)
            return config

        def fits(other: EngineConfig) -> None:
            """Calls `require_fit` with the run's capacity."""
            require_fit(replace(other, capacity=config.capacity))

        tried = serving_config(self.model, tried, unset_shapes, hooked, is_any_deterministic, fits)
        self.narrow_widths = narrow_widths(self.model, tried, hooked)
        return replace(tried, capacity=config.capacity)

    def leaving_room(self, group: list[SequenceState], config: EngineConfig) -> list[SequenceState]:
        """Returns the requests of a verify pass; every 16th full group of several without its last request."""
        if len(group) < config.group or len(group) == 1 or config.is_invariant:
            return group
        self._num_full += 1
        return group[:-1] if self._num_full % LEAVE_ROOM_EVERY == 0 else group

    def note_batch(self, states: Sequence[SequenceState]) -> None:
        """Notes that these requests' prompts were read in one pass, but must not depend on each other."""
        self.batched = {name: state for name, state in self.batched.items() if not state.is_ended}
        self.batched |= {state.request_id: state for state in states}

    def forbid_batched_prompts(self, fault: str) -> list[SequenceState]:
        """From now on lets each prompt be read in passes of its own, in later runs of the model too. Returns the
        deterministic requests, not ended, whose prompts were read with others. Preempted ones of these are not rebuilt,
        and no request copies such a prompt. fault: text about the difference that was found."""
        forbid_batched_prompts(self.model, fault)
        self.batches_prompts = False
        living = [state for state in self.batched.values() if not state.is_ended]
        self.batched.clear()
        for state in living:
            state.prompt_logits = None
        in_doubt = [state for state in living if state.request.is_deterministic]
        self.prompt_faults |= {state.request_id: fault for state in in_doubt}
        return in_doubt

    # -- before a pass

    def plan(self, a_pass: Pass) -> None:
        """Decides which tokens of a pass are computed twice: sets its `duplicate` or its `recomputed`."""
        size, states = a_pass.shape[0], [entry.state for entry in a_pass.entries]
        if a_pass.phase == "verify" and size > len(states) and a_pass.num_layers is None:
            if (i := self._least_compared(a_pass)) is not None:
                self._add_duplicate(a_pass, i)
        elif a_pass.is_rebuild:
            return
        elif a_pass.phase == "prefill":
            if size > 1 and a_pass.is_without_pads:
                a_pass.recomputed = self._next_prompt(a_pass)
        elif a_pass.batch is not None and any(state.is_invariant for state in states):
            a_pass.recomputed = self._next_invariant(a_pass)

    def _least_compared(self, a_pass: Pass, step: int = 1) -> int | None:
        """Returns the index of the entry whose request was compared least often, of equal ones the first, or if `step`
        is -1 the last; None if none can be."""
        eligible = _comparable(a_pass)[::step]
        return min(eligible, key=lambda i: self._times[a_pass.entries[i].state.request_id], default=None)

    def _add_duplicate(self, a_pass: Pass, i: int) -> None:
        """Lets the last, unused batch index of a verify pass compute the tokens of entry `i` again.

        It begins up to a window of committed tokens earlier, so that other window slots are compared too. The results
        for these tokens are compared with those of the earlier pass.
        """
        entry, original, width = a_pass.entries[i], a_pass.batch_index[i], a_pass.width
        state, start, copy = entry.state, entry.start, a_pass.shape[0] - 1
        self._times[state.request_id] += 1
        num_verified = max(start - state.request.num_prompt_tokens, 0) if state.is_verified else 0
        # shifted first if the window is longer than 1, because a short request may be compared only once
        shift = (self._times[state.request_id] - (width == 1)) % (width + 1)
        shift = min(shift, start, width if num_verified else width - 1)
        count = min(len(entry.token_ids), width - shift)
        text = [*state.token_ids[start - shift : start], *entry.token_ids[:count]]
        a_pass.token_ids[copy, : shift + count] = torch.tensor(text)
        a_pass.cache_rows[copy], a_pass.starts[copy] = state.cache_row, start - shift
        num_again = min(shift, num_verified)
        request_id, first, logits = self._before.get(state.cache_row, (-1, 0, torch.zeros(0)))
        is_its_own = request_id == state.request_id and first < start
        self._logits_before = logits[max(start - num_again - first, 0) : start - first] if is_its_own else None
        a_pass.duplicate = DuplicateEntry(original, copy, shift, count, num_again)

    def _next_prompt(self, a_pass: Pass) -> int | None:
        """Returns the index of the entry to compute again, of a pass that reads several prompts, in one of AGAIN_EVERY
        (32) such passes; else None. Another prompt of the pass is chosen each time: the longest first, and that at the
        first place last."""
        eligible = _comparable(a_pass)
        if not eligible:
            return None
        number, self._num_batched = self._num_batched, self._num_batched + 1
        prompts = [entry.state.request.num_prompt_tokens for entry in a_pass.entries]
        places = sorted(eligible[1:], key=lambda i: -prompts[i]) + eligible[:1]
        return None if number % AGAIN_EVERY else places[number // AGAIN_EVERY % len(places)]

    def _next_invariant(self, a_pass: Pass) -> int | None:
        """Returns the index of the entry to compute again, of a pass that decides tokens of invariant requests, in one
        of AGAIN_EVERY (32) such passes; else None."""
        i = self._least_compared(a_pass, step=-1)  # the first row of a pass is most likely to be right
        if i is None:
            return None
        self._num_invariant += 1
        if self._num_invariant % AGAIN_EVERY != FIRST_AGAIN:
            return None
        self._times[a_pass.entries[i].state.request_id] += 1
        return i

    # -- during and after a pass

    def listening(self, sink: StateSink) -> StateSink:
        """Returns a sink for hooks that compares a pass's duplicate with its original, then calls `sink`; except in a
        pass that computes a request again."""

        def capture(site: str, layer: int, value: Tensor) -> None:
            """Compares the state, if the pass has a duplicate, and calls `sink`."""
            if self._is_again:
                return
            if self._duplicate is not None:
                _compare_state(self._duplicate, site, layer, value)
            sink(site, layer, value)

        return capture

    @contextmanager
    def watching(self, a_pass: Pass) -> Iterator[None]:
        """Inside the `with`, in which the pass is computed, states of a duplicate are compared, and those of a request
        that will be computed again are kept."""
        self._duplicate, i = a_pass.duplicate, a_pass.recomputed
        self._kept.clear()

        def keep(site: str, layer: int, value: Tensor) -> None:
            """Keeps a copy of a state [b, t, m] of the request's tokens."""
            assert i is not None
            self._kept[site, layer] = value[a_pass.batch_index[i], : len(a_pass.entries[i].token_ids)].clone()

        try:
            with nullcontext() if i is None else self.model.capturing(all_sites(self.model), keep):
                yield
        finally:
            self._duplicate = None

    def compare(self, a_pass: Pass, out: Tensor) -> Difference | None:
        """Returns the first Difference between two computations of one request in the pass just run; None if all bits
        are equal, or nothing was computed twice. out: what the forward returned.
        Keeps the logits of a verify pass for a later one. If `out` is not finite, nothing is compared.
        """
        compared = out if a_pass.recomputed is None else _own_logits(a_pass, out)
        if a_pass.is_compared and not bool(torch.isfinite(compared.amax(-1)).all()):
            a_pass.duplicate = a_pass.recomputed = None
        difference = None
        if a_pass.duplicate is not None:
            difference = self._compare_duplicate(a_pass, a_pass.duplicate, out)
        elif a_pass.recomputed is not None:
            difference = self._compute_again(a_pass, a_pass.recomputed, compared)
        if difference is None and a_pass.phase == "verify":
            self._remember(a_pass, out)
        return difference

    def _remember(self, a_pass: Pass, logits: Tensor) -> None:
        """Keeps a verify pass's logits [b, t, v] for the comparison in a later pass. With windows longer than 1, keeps
        only those of the request in this pass that was compared least often."""
        kept = list(zip(a_pass.entries, a_pass.batch_index, strict=True))
        if a_pass.width > 1:
            self._before.clear()
            kept = [min(kept, key=lambda one: self._times[one[0].state.request_id])]
        for entry, b in kept:
            self._before[entry.state.cache_row] = entry.state.request_id, entry.start, logits[b]

    def _compare_duplicate(self, a_pass: Pass, duplicate: DuplicateEntry, logits: Tensor) -> Difference | None:
        """Returns the first Difference between a duplicate and its original, whose states the hooks and the cache have
        compared already. If bits differ, runs the pass again, to find the operation. logits: [b, t, v]."""
        before = self._logits_before
        made_again = logits[duplicate.copy, duplicate.shift - (0 if before is None else len(before)) : duplicate.shift]
        is_equal = bitwise(*duplicate.pair(logits)) and (before is None or bitwise(before, made_again))
        if is_equal and not duplicate.differs_at:
            return None

        self._forward(a_pass, partial(_compare_state, duplicate))
        return _first_difference(duplicate.differs_at, duplicate.original, duplicate.copy)

    def _compute_again(self, a_pass: Pass, i: int, logits: Tensor) -> Difference | None:
        """Computes the tokens of entry `i` of the pass just run a second time, which overwrites their keys and values:
        alone, or if it was alone, behind two dummies; and in one of the `widths`, or without pads if they are a
        prompt's. Returns the first Difference, or None.

        logits: [n, v] of the first computation, see `_own_logits`.
        """
        entry, count = a_pass.entries[i], len(a_pass.entries[i].token_ids)
        fitting = [width for width in self.widths if width >= count] or [a_pass.width]
        if a_pass.phase == "prefill":
            fitting = [count]
        size = 3 if a_pass.shape[0] == 1 and free_row(a_pass.cache) is not None else 1
        second = Pass(
            a_pass.cache,
            a_pass.step,
            a_pass.phase,
            [entry],
            fitting[a_pass.step % len(fitting)],
            batch=size,
            logit_slots=None if a_pass.logit_slots is None else [count - 1],
            is_without_pads=a_pass.phase == "prefill",
            num_before=size - 1,
        )
        differs_at: list[tuple[int, str]] = []

        def compare(site: str, layer: int, value: Tensor) -> None:
            """Compares a state with the kept one."""
            if not bitwise(self._kept[site, layer], value[size - 1, :count]):
                differs_at.append((layer, site))

        before = _cached(a_pass.cache, entry.state.cache_row, slice(entry.start, entry.end))
        again = self._forward(second, compare)[size - 1, : len(logits)]
        after = _cached(a_pass.cache, entry.state.cache_row, slice(entry.start, entry.end))
        differs_at += [at for at, tensor in before.items() if not bitwise(tensor, after[at])]
        if not differs_at and bitwise(logits, again):
            return None
        return _first_difference(differs_at, a_pass.batch_index[i], None)

    def _forward(self, a_pass: Pass, sink: StateSink) -> Tensor:
        """Returns the model's output for a pass, as ModelRunner.run computes it. Calls `sink` with S, T and C of every
        layer, and no other sink."""
        self._is_again = True
        try:
            with self.model.capturing(all_sites(self.model), sink):
                return self.model.forward(
                    a_pass.token_ids,
                    a_pass.cache,
                    a_pass.cache_rows,
                    a_pass.starts,
                    num_layers=a_pass.num_layers,
                    logit_slots=a_pass.logit_slots,
                    attention=a_pass.attention(self.model.attends_by_request),
                )
        finally:
            self._is_again = False

    def fault(self, a_pass: Pass, difference: Difference) -> ShapeFault:
        """Returns the error to raise for a difference: request, step, shape of the pass, where the bits differ, what
        follows, and what to set instead."""
        kind, end, remedy = ShapeFault, "so no deterministic request can go on in it", "determinism='verify'"
        if a_pass.phase == "prefill":
            kind, end = BatchedPromptFault, "so requests whose prompts were read with others before end"
            remedy = f"prefill_group=1, or {other_settings(self.model)}"
        elif difference.copy is not None:
            remedy = f"another group or window, or {other_settings(self.model)}"
        entry = a_pass.entries[a_pass.batch_index.index(difference.original)]
        return kind(
            f"request {entry.state.request_id} step {a_pass.step}: of a {a_pass.phase} pass of {a_pass.shape[0]} x "
            f"{a_pass.width} rows, its tokens were computed twice, and {difference}; this shape does not give the same "
            f"bits everywhere on this machine ({torch.get_num_threads()} threads), {end}; nothing of this step was "
            f"committed; set {remedy}"
        )


def _comparable(a_pass: Pass) -> list[int]:
    """Returns the indices of the entries that may be computed twice: see RecomputeChecker."""
    if not a_pass.cache.can_compute_twice:
        return []
    states = [entry.state for entry in a_pass.entries]
    return [i for i, state in enumerate(states) if state.request.is_deterministic and not state.is_edited]


def _compare_state(duplicate: DuplicateEntry, site: str, layer: int, value: Tensor) -> None:
    """Adds (layer, site) to the duplicate's differences if it has other bits in a captured state; a site of heads
    counts as T."""
    tokens = value.transpose(1, 2) if site == PATTERN else value
    if not bitwise(*duplicate.pair(tokens)):
        duplicate.differs_at.append((layer, site if site in PARTS else "T"))


def _first_difference(differs_at: Sequence[tuple[int, str]], original: int, copy: int | None) -> Difference:
    """Returns the Difference at the first (layer, site) in the order of computation; at the logits if there is none."""
    layer, site = min(differs_at, key=order_of, default=(None, None))
    return Difference(site, layer, original, copy)


def _cached(cache: KVCache, row: int, slots: slice) -> dict[tuple[int, str], Tensor]:
    """Returns copies of a cache row's keys and values in these slots, by (layer, "keys" or "values")."""
    parts = (("keys", cache.keys), ("values", cache.values))
    return {(layer, name): held[row, :, slots].clone() for name, part in parts for layer, held in enumerate(part)}


def _own_logits(a_pass: Pass, out: Tensor) -> Tensor:
    """Returns the logits [n, v] of the tokens that are computed again, from those [b, t, v] of their pass. If the pass
    computed only some slots: of the last token, or [0, v] if that is not among them."""
    assert a_pass.recomputed is not None
    count, logits = len(a_pass.entries[a_pass.recomputed].token_ids), out[a_pass.batch_index[a_pass.recomputed]]
    slots = a_pass.logit_slots
    return logits[:count] if slots is None else logits[[i for i, slot in enumerate(slots) if slot == count - 1]]
