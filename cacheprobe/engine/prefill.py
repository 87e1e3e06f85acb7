"""Reads prompts into the cache: in fixed chunks for verified or invariant requests, in free shapes for other ones.

A request may copy a prompt that another one has read. A preempted request is rebuilt: computed again.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from cacheprobe.core.config import EngineConfig
from cacheprobe.engine.checker import RecomputeChecker
from cacheprobe.engine.committer import Committer
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.passes import EngineError, Entry, Pass
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import Status
from cacheprobe.kvcache.surgery import put_snapshot

FREE_PREFILL_WIDTH = 128
"""Maximum tokens of a prompt in one prefill pass of requests without fixed chunks; the others use prefill_chunk."""
_MOST_SLOTS, _PASS_COST = 1024, 64
"""Most token slots, with pads, of a prefill pass of several prompts (more are not faster), and how many slots more take
as long as another pass."""
_MOST_SCORES = 2**22
"""Most token slots times cache slots of such a pass: its mask holds that many numbers."""


class Prefill:
    """Writes prompts into cache rows and commits each request's first token; rebuilds preempted requests."""

    def __init__(self, runner: ModelRunner, committer: Committer) -> None:
        self.runner, self.committer, self.config = runner, committer, committer.config
        self.checker = runner.checker

    def read(self, states: Sequence[SequenceState]) -> None:
        """Reads the prompts of these requests, and commits the first token of each. `reads_in_chunks` must be equal for
        all of them.

        If it is True, passes have prefill_group x prefill_chunk tokens, so that a request's passes depend on its prompt
        alone. The last chunk is shorter if it is not padded. Where a prompt has the same bits beside others as by
        itself, passes have any number of prompts, of about the same length. Passes of other requests have all their
        prompts.
        """
        for state in states:
            self._begin(state)
        is_fixed = states[0].reads_in_chunks
        is_without_pads = is_fixed and not self.config.pad_prefill
        for entries, width, batch in prompt_passes(states, self.config, self.checker, self.runner.cache):
            last = [len(e.token_ids) - 1 if e.end == e.state.request.num_prompt_tokens else None for e in entries]
            slots = self._logit_slots(last, width, is_fixed)
            a_pass = Pass(self.runner.cache, self.runner.next_step(), "prefill", entries, width, batch)
            a_pass.logit_slots, a_pass.is_without_pads = slots, is_without_pads
            out = self.runner.run(a_pass)
            ends = [
                (entry.state, b, slot if slots is None else slots.index(slot))
                for entry, b, slot in zip(entries, a_pass.batch_index, last, strict=True)
                if slot is not None
            ]
            # every choice before any commit: an error here leaves all requests as they were
            chosen = self._choose(a_pass, out, ends)
            if is_without_pads and len(entries) > 1:
                self.checker.note_batch([entry.state for entry in entries])
            committed = []
            for entry in entries:
                self.committer.mark_slots(entry.state, entry.start, entry.end, "prefill")
                entry.state.num_prefilled = entry.end
                if (token_id := chosen.get(entry.state.request_id)) is not None:
                    committed.append((entry.state.request_id, self.committer.commit_plain(entry.state, token_id)))
            self.committer.report("prefill", [e.state for e in entries], committed=tuple(committed))

    def _choose(self, a_pass: Pass, out: Tensor, ends: Sequence[tuple[SequenceState, int, int]]) -> dict[int, int]:
        """Returns the first token of each request whose prompt ends in a pass, by request id, and keeps its logits.
        ends: (request, batch index, index of its last prompt token among the logits `out`). Raises: EngineError if
        memory runs out."""
        if not ends:
            return {}
        states, places = [state for state, *_ in ends], [b * out.shape[1] + slot for _, b, slot in ends]
        with self.runner.out_of_memory_named(a_pass, "read"):
            best = None if a_pass.best is None else a_pass.best[torch.tensor(places)]
            rows = torch.stack([out[b, slot] for _, b, slot in ends])
            rows, choices = self.committer.read_rows(states, rows, best)
            for state, row, choice in zip(states, rows, choices, strict=True):
                state.prompt_logits, state.prompt_choice = row.clone(), choice
        return {state.request_id: self._first_token(state) for state in states}

    def _first_token(self, state: SequenceState) -> int:
        """Returns the token that a request chooses after its prompt."""
        assert state.prompt_logits is not None
        position = state.request.num_prompt_tokens
        return self.committer.choose(state, state.prompt_logits, (), position, state.prompt_choice)

    def _begin(self, state: SequenceState) -> None:
        """Stores the prompt's length in the cache, and copies the request's KVSnapshot, if any, into its cache row."""
        request = state.request
        self.runner.cache.prompt_lengths[state.cache_row] = request.num_prompt_tokens
        if request.cached is None or state.num_prefilled:
            return
        put_snapshot(request.cached, self.runner.cache, state.cache_row)
        for position, provenance in enumerate(request.cached.provenance):
            self.committer.mark_slots(state, position, position + 1, provenance)
        state.num_prefilled = request.num_cached

    def _logit_slots(self, last: Sequence[int | None], width: int, is_fixed: bool) -> list[int] | None:
        """Returns the token slots whose logits a prefill pass computes; None for all. last: for each prompt, the slot
        of its last token, or None if the pass does not reach it."""
        needed = sorted({slot for slot in last if slot is not None})
        return None if needed and is_fixed and self.config.prefill_group > 1 else needed or [width - 1]

    def share(self, source: SequenceState, states: Sequence[SequenceState]) -> None:
        """Gives a request the prompt's keys and values of request `source`, without a pass of the model, and commits
        the receiving request's own first token.

        states: that one request. It has the prompt and the prefill passes of `source`.
        """
        (state,) = states
        assert source.prompt_logits is not None
        self.runner.skip()
        self._begin(state)
        length = state.request.num_prompt_tokens
        state.prompt_logits, state.prompt_choice = source.prompt_logits, source.prompt_choice
        if source.request_id in self.checker.batched:
            self.checker.batched[state.request_id] = state
        token_id = self._first_token(state)
        self.runner.cache.copy_row(source.cache_row, state.cache_row, length)
        if self.runner.targets is not None:
            self.runner.targets.copy(source.cache_row, state.cache_row, length)
        self.committer.observer.on_shared_prompt(state.request_id, self.runner.step, source.request_id)
        self.committer.observer.on_ledger(state.request_id, self.runner.step, 0, length, "prefill")
        state.num_prefilled = length
        committed = ((state.request_id, self.committer.commit_plain(state, token_id)),)
        self.committer.report("prefill", [state], committed=committed)

    # -- after a preemption

    def rebuild(self, states: Sequence[SequenceState]) -> None:
        """Computes the keys and values of a preempted request again. states: that request alone.

        The observer receives the steps, the choices and the ledger changes, but no rows and no thoughts. A verified or
        invariant request runs in pass shapes of the same bits as the first time: its prompt in chunks, its committed
        tokens in windows.
        Raises: EngineError if such a request now chooses another token (not compared for acceptance="rejection", unless
        the request is deterministic).
        """
        (state,) = states
        if state.request_id in self.checker.prompt_faults:
            raise EngineError(self.checker.prompt_faults[state.request_id])
        self._begin(state)
        num_prompt = state.request.num_prompt_tokens
        for phase, start, end, width, batch in passes_again(state, self.config):
            if phase != "prefill" and start == num_prompt:
                self._mark(state, num_prompt, "prefill")
            is_exact = self.config.acceptance == "equality" and self.config.draft_length != "adaptive"
            is_exact = is_exact or state.request.is_deterministic
            is_checked = phase != "prefill" and is_exact
            entry = Entry(state, tuple(state.token_ids[start:end]), start, True)
            slots = [end - start - 1] if phase == "prefill" else None
            step = self.runner.next_step()
            out = self.runner.run(
                Pass(self.runner.cache, step, phase, [entry], width, batch, logit_slots=slots, is_rebuild=True)
            )
            for t, logits in enumerate(out[0, : end - start] if is_checked else ()):
                self._require_same_choice(state, logits, start + t + 1)
            self.committer.forget_choices()
            self.committer.report(phase, [state])
        self._mark(state, num_prompt, "prefill")
        is_by_verifier = state.is_verified and state.reads_in_chunks
        self._mark(state, state.last_committed_position, "verified" if is_by_verifier else "decoded")
        state.num_prefilled = num_prompt
        state.become(Status.RUNNING)

    def _mark(self, state: SequenceState, end: int, provenance: str) -> None:
        """Marks the slots from the first unused one to `end` - 1 of a request's cache row with this provenance."""
        start = int(self.runner.cache.lengths[state.cache_row])
        if end > start:
            self.committer.mark_slots(state, start, end, provenance)

    def _require_same_choice(self, state: SequenceState, logits: Tensor, position: int) -> None:
        """Raises: EngineError if a request whose cache slots are being rebuilt now chooses another token for `position`
        than the committed one."""
        again = self.committer.choose(state, logits, (), position)
        if again != state.token_ids[position]:
            raise EngineError(
                f"request {state.request_id} step {self.runner.step}: rebuilding its cache slots, the verifier chose "
                f"token {again} at position {position} where it had committed {state.token_ids[position]}; this model "
                "or machine is not deterministic at a fixed shape"
            )


# -- which passes a prompt needs


@runtime_checkable
class ReadsPrompts(Protocol):
    """Defines the three ways in which admitted requests get their keys and values; each takes the requests."""

    def read(self, states: Sequence[SequenceState]) -> None:
        """Reads the prompts of these requests."""
        ...

    def share(self, source: SequenceState, states: Sequence[SequenceState]) -> None:
        """Copies the prompt of request `source`."""
        ...

    def rebuild(self, states: Sequence[SequenceState]) -> None:
        """Computes a preempted request again."""
        ...


def prefills(
    prefill: ReadsPrompts, states: Sequence[SequenceState], running: Sequence[SequenceState]
) -> Iterator[tuple[Callable[[Sequence[SequenceState]], None], Sequence[SequenceState]]]:
    """Yields (method of `prefill`, requests) for each prefill that the newly admitted requests `states` need.

    The caller calls the method with the requests. Preempted requests are rebuilt. Of requests that may share a prompt,
    the first reads it, and the others copy its keys and values.
    """
    for state in [s for s in states if s.num_generated]:
        yield prefill.rebuild, [state]
    by_prompt: dict[_PromptKey, list[SequenceState]] = {}
    for state in running:
        by_prompt.setdefault(_prompt_key(state), []).append(state)
    leaders, others = [], []
    seen: set[_PromptKey] = set()
    for state in [s for s in states if not s.num_generated]:
        key = _prompt_key(state)
        is_first = key not in seen and _with_same_prompt(state, by_prompt) is None
        (leaders if is_first else others).append(state)
        seen.add(key)
    for is_fixed in (True, False):
        if group := [s for s in leaders if s.reads_in_chunks == is_fixed]:
            yield prefill.read, group
    for state in others:
        source = _with_same_prompt(state, by_prompt)
        yield prefill.read if source is None else partial(prefill.share, source), [state]


_PromptKey = tuple[tuple[int, ...], bool, int]


def _prompt_key(state: SequenceState) -> _PromptKey:
    """Returns a key that is equal for two requests if one can copy the keys and values of the other's prompt: same
    prompt and same prefill schedule. Requests with interventions, or that continue a KVSnapshot, share no prompt."""
    return state.request.prompt_token_ids, state.reads_in_chunks, state.request_id if state.is_edited else -1


def _with_same_prompt(
    state: SequenceState, by_prompt: Mapping[_PromptKey, Sequence[SequenceState]]
) -> SequenceState | None:
    """Returns the first running request, by `_prompt_key`, whose cache row holds the prompt of `state`; None without
    one."""
    sharing = by_prompt.get(_prompt_key(state), ())
    return next(
        (o for o in sharing if o.prompt_logits is not None and o.status is not Status.FAILED and o is not state), None
    )


def prompt_passes(
    states: Sequence[SequenceState], config: EngineConfig, checker: RecomputeChecker, cache: KVCache
) -> Iterator[tuple[list[Entry], int, int | None]]:
    """Yields (entries, width, batch) of each prefill pass, until the prompts are read. The caller must set
    num_prefilled of each request after the pass.

    With `checker.batches_prompts`, a request with hidden slots is read alone, since it may need another forward.
    """
    is_fixed = states[0].reads_in_chunks
    is_batched = is_fixed and checker.batches_prompts
    size = config.prefill_group if is_fixed and not is_batched else len(states)
    chunk = config.prefill_chunk if is_fixed else FREE_PREFILL_WIDTH
    for group in (states[i : i + size] for i in range(0, len(states), size)):
        while unread := [s for s in group if s.num_prefilled < s.request.num_prompt_tokens]:
            entries = [
                Entry(s, s.request.prompt_token_ids[s.num_prefilled : s.num_prefilled + chunk], s.num_prefilled, True)
                for s in unread
            ]
            if is_batched:
                apart = [i for i, entry in enumerate(entries) if cache.hides_slots([entry.state.cache_row])]
                chunks = [(len(entry.token_ids), entry.start) for entry in entries]
                entries = [entries[i] for i in pick_prompts(chunks, config.capacity, apart)]
            longest = max(len(entry.token_ids) for entry in entries)
            batch = len(entries) if is_batched else config.prefill_group if is_fixed else None
            yield entries, chunk if is_fixed and config.pad_prefill else longest, batch


def passes_again(state: SequenceState, config: EngineConfig) -> Iterator[tuple[str, int, int, int, int | None]]:
    """Yields (phase, start, end, width, batch) of each pass that rebuilds a preempted request; it feeds positions
    start..end-1."""
    num_prompt, last = state.request.num_prompt_tokens, state.last_committed_position
    if not state.reads_in_chunks:
        for start in range(state.request.num_cached, last, FREE_PREFILL_WIDTH):
            end = min(start + FREE_PREFILL_WIDTH, last)
            yield "prefill", start, end, end - start, None
        return
    for start in range(state.request.num_cached, num_prompt, config.prefill_chunk):
        end = min(start + config.prefill_chunk, num_prompt)
        width = config.prefill_chunk if config.pad_prefill else end - start
        yield "prefill", start, end, width, config.prefill_group
    phase = "decode" if state.is_invariant and not state.is_verified else "verify"
    batch = 1 if config.is_invariant else config.group
    for start in range(num_prompt, last, config.window):
        yield phase, start, min(start + config.window, last), config.window, batch


def pick_prompts(chunks: Sequence[tuple[int, int]], capacity: int, apart: Collection[int] = ()) -> list[int]:
    """Returns the numbers of the prompts of the next pass, ascending: the longest and shorter ones, unless these would
    have more pads in it than a pass of their own costs.

    chunks: (tokens, first position) of each prompt's next chunk.  apart: numbers of prompts to read alone.
    """
    longest, *others = sorted(range(len(chunks)), key=lambda i: -chunks[i][0])
    width, start = chunks[longest]
    taken = [longest]
    for number, i in enumerate(others if longest not in apart else ()):
        num_slots, num_pads = (len(taken) + 1) * width, (len(others) - number) * (width - chunks[i][0])
        if num_pads > _PASS_COST or num_slots > _MOST_SLOTS:
            break
        span = max(start, chunks[i][1]) + width
        if span <= capacity and num_slots * span <= _MOST_SCORES and i not in apart:
            taken.append(i)
            start = max(start, chunks[i][1])
    return sorted(taken)
