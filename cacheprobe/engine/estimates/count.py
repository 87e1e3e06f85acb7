"""Counts the passes, rows and lens readings of a run: steps its scheduler with assumed acceptances, without a pass."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from cacheprobe.engine.checker import RecomputeChecker
from cacheprobe.engine.drafters.base import drafted_layers
from cacheprobe.engine.drafts.lengths import DraftLengths, split
from cacheprobe.engine.execution import PreparedRun
from cacheprobe.engine.passes import Entry
from cacheprobe.engine.prefill import passes_again, prefills, prompt_passes
from cacheprobe.engine.scheduler import Scheduler
from cacheprobe.engine.sizes import state_bytes, state_dtype
from cacheprobe.engine.step import newest_entries, verify_entry
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import Status
from cacheprobe.trace.recording.lens_reader import LENS_TILE


class RunCount:
    """Counts passes, rows and lens readings of a run: the run's Scheduler admits and orders its requests, and every
    pass commits as many tokens as are assumed. Exact without drafts."""

    def __init__(self, run: PreparedRun, accepted: float) -> None:
        """accepted: part of the draft tokens that the verifier accepts if it accepted those before them."""
        self.plan, self._config, self._accepted = run.plan, run.plan.config, accepted
        self.passes: Counter[tuple[str, int]] = Counter()
        """By phase and token slots, pads and dummies included: number of passes; "draft": calls without a pass."""
        self.rows = self.readings = self.num_drafted = 0
        self._kept_rows = self._pattern_weights = self._num_steps = 0
        drafter, model = run.plan.drafter, run.plan.model
        self._drafter, self._draft_layers = drafter, 0 if drafter is None else drafted_layers(drafter, model)
        self._lengths = None if drafter is None else DraftLengths(self._config, drafter, run.draft_costs)
        self._checker = RecomputeChecker(model)
        self._checker.batches_prompts = run.checker.batches_prompts
        self._widths = (*run.checker.narrow_widths, self._config.window)
        self._open: dict[SequenceState, float] = {}
        """Parts of draft tokens that were accepted and not committed yet."""
        states = [_without_stops(state) for state in run.states]
        self._cache = KVCache(min(len(states), self._config.max_batch), 1, (), torch.float32)
        """Hands out cache rows; it holds no keys and values."""
        self._count(Scheduler(states, self._cache, self._config))

    def passes_of(self, phase: str) -> int:
        """Returns the number of passes of a phase."""
        return sum(count for (one, _), count in self.passes.items() if one == phase)

    @property
    def num_tiles(self) -> int:
        """Number of tiles of states that the lens reads."""
        return math.ceil(self.readings / LENS_TILE)

    @property
    def state_bytes(self) -> float:
        """Bytes of the kept states and head activations."""
        plan, (heads, _) = self.plan, self.plan.model.head_shape
        patterns = self._pattern_weights * heads * len(plan.layers) * state_dtype(plan.model, plan.capture).itemsize
        return self._kept_rows * state_bytes(plan.model, plan.capture, plan.layers) + patterns

    def _count(self, scheduler: Scheduler) -> None:
        """Counts all rounds, in the order of `engine.loop.generation_loop`."""
        while not scheduler.is_done:
            for state in scheduler.to_preempt():
                self._cache.release(state.cache_row)
                state.drop_draft()
                state.preempt()
            for prefill, group in prefills(self, scheduler.admit(self._num_steps), scheduler.running):
                prefill(group)
            fill_ins = scheduler.fill_ins()
            drafting = [state for state in scheduler.drafting() if state not in fill_ins]
            for is_drafted, group in split(drafting, self._lengths, self._config.window):
                (self._draft if is_drafted else self._decode)(group)
            for group in scheduler.ready_groups(fill_ins):
                self._verify(self._checker.leaving_room(group, self._config))
            scheduler.retire()

    def _pass(self, phase: str, slots: int) -> None:
        """Counts a step."""
        self.passes[phase, slots] += 1
        self._num_steps += 1

    def _add(self, entry: Entry, phase: str, layers: int = -1) -> None:
        """Counts the rows of a request in a pass. layers: number of those that run; -1 for all."""
        plan, capture, length = self.plan, self.plan.capture, entry.state.request.num_prompt_tokens
        num_layers = len(plan.layers) if layers < 0 else sum(layer < layers for layer in plan.layers)
        status = "superseded" if phase == "decode" and entry.state.is_verified else "committed"
        self.rows += len(entry.token_ids)
        for position in range(entry.start, entry.end):
            is_draft = position >= entry.end - entry.num_drafts
            if capture.keeps_row(phase, position) and (is_draft or capture.keeps_status(status)):
                self._kept_rows += 1
                self._pattern_weights += position + 1 if "pattern" in capture.heads else 0
                self.readings += num_layers * capture.reads_row(position, length)

    def _commit(self, state: SequenceState, count: int) -> None:
        """Commits this many tokens of a request, and ends it after its last one."""
        state.commit((0,) * count)
        if not state.num_left:
            state.end("length")

    # -- prefill, as of engine.prefill.Prefill

    def read(self, states: Sequence[SequenceState]) -> None:
        """Counts the passes that read the prompts of these requests."""
        for state in states:
            state.num_prefilled = state.request.num_cached
        for entries, width, batch in prompt_passes(states, self._config, self._checker, self._cache):
            self._pass("prefill", width * (batch or len(entries)))
            for entry in entries:
                self._add(entry, "prefill")
                entry.state.num_prefilled = entry.end
                if entry.end == entry.state.request.num_prompt_tokens:
                    self._has_read(entry.state)

    def share(self, source: SequenceState, states: Sequence[SequenceState]) -> None:
        """Counts the step in which a request copies the prompt of `source`; the rows refer to stored states."""
        (state,) = states
        self._num_steps += 1
        stored = self._kept_rows, self._pattern_weights
        self._add(Entry(state, state.request.prompt_token_ids, 0, True), "prefill")
        self._kept_rows, self._pattern_weights = stored
        self._has_read(state)

    def _has_read(self, state: SequenceState) -> None:
        """Lets other requests copy a prompt, and commits the first token."""
        state.num_prefilled, state.prompt_logits = state.request.num_prompt_tokens, torch.zeros(0)
        self._commit(state, 1)

    def rebuild(self, states: Sequence[SequenceState]) -> None:
        """Counts the passes that compute a preempted request again; their rows are not recorded."""
        (state,) = states
        for phase, _, _, width, batch in passes_again(state, self._config):
            self._pass(phase, width * (batch or 1))
        state.num_prefilled = state.request.num_prompt_tokens
        state.become(Status.RUNNING)

    # -- decode and verify

    def _decode(self, states: Sequence[SequenceState]) -> None:
        """Counts a decode pass of requests without a drafter."""
        is_wide = any(state.is_invariant for state in states)
        self._pass("decode", len(states) * (self._widths[0] if is_wide else 1))
        for entry in newest_entries(states):
            self._add(entry, "decode")
            if entry.state.is_verified:
                self._extend(entry.state, 1)
            else:
                self._commit(entry.state, 1)
        if self._lengths is not None:
            self._lengths.note_decoded(states)

    def _draft(self, states: Sequence[SequenceState]) -> None:
        """Counts a call of the drafter."""
        assert self._lengths is not None
        length = 1 if self._draft_layers else getattr(self._drafter, "length", None) or self._config.window
        made = [0 if state.draft and not self._draft_layers else length for state in states]
        rooms = [state.draft_limit(self._config.window) - len(state.draft) for state in states]
        made = [min(count, room) for count, room in zip(made, rooms, strict=True)]
        self._lengths.note_drafts(len(states), max(made))
        kept = self._lengths.keep(states, [(0,) * count for count in made])
        if not kept:
            return
        self._pass("decode" if self._draft_layers else "draft", len(states))
        for entry, token_ids in zip(newest_entries(states), kept, strict=True):
            if self._draft_layers:
                self._add(entry, "decode", self._draft_layers)
            self._extend(entry.state, len(token_ids))

    def _extend(self, state: SequenceState, num_made: int) -> None:
        """Adds this many tokens to a request's draft, as far as there is room; closes it if there are none."""
        num_made = min(num_made, state.draft_limit(self._config.window) - len(state.draft))
        state.draft += [0] * num_made
        state.draft_is_closed = num_made == 0
        self.num_drafted += num_made

    def _verify(self, states: Sequence[SequenceState]) -> None:
        """Counts a verify pass, and commits the accepted tokens and one more of each request."""
        entries = [verify_entry(state) for state in states]
        longest = max(len(entry.token_ids) for entry in entries)
        width = next(width for width in self._widths if width >= longest)
        self._pass("verify", width * (len(entries) if self._config.is_invariant else self._config.group))
        judged = []
        for entry in entries:
            self._add(entry, "verify")
            state, num_drafted = entry.state, len(entry.state.draft)
            accepted = self._open.get(state, 0.0) + sum(self._accepted ** (t + 1) for t in range(num_drafted))
            num_accepted = min(num_drafted, math.floor(accepted + 1e-9))
            self._open[state] = accepted - num_accepted
            judged.append((state, num_drafted, num_accepted))
        if self._lengths is not None:
            self._lengths.note_verdicts(width, judged)
        for state, _, num_accepted in judged:
            self._commit(state, 1 + num_accepted)


def _without_stops(state: SequenceState) -> SequenceState:
    """Returns a new state of the request, which no token ends."""
    sampling = replace(state.sampling, stop=(), stop_token_ids=())
    request = replace(state.request, keep_kv=False)
    counted = SequenceState(request, state.is_verified, sampling, str, state.is_invariant, state.reads_freely)
    counted.is_edited = state.is_edited
    return counted
