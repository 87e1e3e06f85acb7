"""Counts the passes, rows and lens readings of a run by the scheduler's rules, without running one."""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from cacheprobe.engine.checker import LEAVE_ROOM_EVERY
from cacheprobe.engine.drafters.base import Drafter, drafted_layers
from cacheprobe.engine.loop import FIRST_DRAFT_LENGTH
from cacheprobe.engine.plan import RunPlan
from cacheprobe.engine.prefill import FREE_PREFILL_WIDTH, pick_prompts
from cacheprobe.engine.sizes import (
    state_bytes,
    state_dtype,
)
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.trace.recording.lens_reader import LENS_TILE


@dataclass(eq=False, slots=True)
class _Counted:
    """Follows one request of a run whose passes are counted."""

    state: SequenceState
    left: int
    """Tokens that it has still to commit."""
    cap: int | None
    """Draft tokens that draft_length allows; None for as many as the window takes."""
    draft: int = 0
    is_closed: bool = False
    accepted: float = 0.0
    """Part of a draft token that is accepted and was not counted yet."""

    @property
    def last(self) -> int:
        """Position of the newest committed token."""
        return self.state.request.num_prompt_tokens + self.state.num_left - self.left - 1

    def limit(self, window: int) -> int:
        """Returns the largest number of draft tokens, as `SequenceState.draft_limit`."""
        return min(window - 1, self.left - 1, window if self.cap is None else self.cap)

    def is_ready(self, window: int) -> bool:
        """Returns whether the request waits for the verifier, as `SequenceState.is_ready`."""
        return self.state.is_verified and (self.is_closed or self.draft >= self.limit(window))


class RunCount:
    """Counts passes, rows and lens readings of a run by the rules of `engine.loop`, without running one.

    Exact without drafts, if no request is preempted. accepted: part of the draft tokens that the verifier accepts if it
    accepted those before them.
    """

    def __init__(
        self, plan: RunPlan, drafter: Drafter | None, states: Sequence[SequenceState], accepted: float
    ) -> None:
        self.plan, self.drafter, self._accepted = plan, drafter, accepted
        self.passes: Counter[tuple[str, int]] = Counter()
        """By phase and token slots, pads and dummies included: number of passes; "draft": calls without a pass."""
        self.rows = self.readings = self.num_drafted = 0
        self._kept_rows = self._pattern_weights = self._step = self._num_full = 0
        self._draft_layers = plan.model.n_layers if drafter is None else drafted_layers(drafter, plan.model)
        length, window = plan.config.draft_length, plan.config.window
        cap = min(FIRST_DRAFT_LENGTH, window - 1) if isinstance(length, str) else length
        waiting = deque(sorted(states, key=lambda state: state.request.arrival_step))
        running: list[_Counted] = []
        while waiting or running:
            admitted = []
            while waiting and len(running) < min(len(states), plan.config.max_batch):
                if running and waiting[0].request.arrival_step > self._step:
                    break
                state = waiting.popleft()
                admitted.append(_Counted(state, state.num_left, cap))
                running.append(admitted[-1])
            self._prefill(admitted, [one for one in running if one not in admitted])
            running = [one for one in running if one.left]
            fill_ins = self._decode(running)
            self._verify(running, fill_ins)
            running = [one for one in running if one.left]

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

    def _pass(self, phase: str, slots: int) -> None:
        """Counts a step."""
        self.passes[phase, slots] += 1
        self._step += 1

    def _add(self, one: _Counted, phase: str, start: int, count: int, num_drafted: int = 0, layers: int = -1) -> int:
        """Counts the rows of a request in a pass, the last `num_drafted` of which are fed draft tokens. layers: those
        that run; -1 for all. Returns the number of readings."""
        capture, length = self.plan.capture, one.state.request.num_prompt_tokens
        num_layers = len(self.plan.layers) if layers < 0 else sum(layer < layers for layer in self.plan.layers)
        status = "superseded" if phase == "decode" and one.state.is_verified else "committed"
        self.rows += count
        readings = 0
        for position in range(start, start + count):
            is_draft = position >= start + count - num_drafted
            if capture.keeps_row(phase, position) and (is_draft or capture.keeps_status(status)):
                self._kept_rows += 1
                self._pattern_weights += position + 1 if "pattern" in capture.heads else 0
                readings += num_layers * capture.reads_row(position, length)
        self.readings += readings
        return readings

    def _prefill(self, admitted: Sequence[_Counted], running: Sequence[_Counted]) -> None:
        """Counts the passes that read prompts; a prompt that another request has read is copied."""
        plan, config = self.plan, self.plan.config
        sources = {_prompt_key(one.state) for one in running}
        leaders: list[_Counted] = []
        for one in admitted:
            one.left -= 1
            key, cached = _prompt_key(one.state), one.state.request.num_cached
            if key not in sources:
                leaders.append(one)
                self._add(one, "prefill", cached, one.last - cached)
            else:
                self._step += 1
                kept, weights = self._kept_rows, self._pattern_weights
                self._add(one, "prefill", 0, one.last)
                self._kept_rows, self._pattern_weights = kept, weights  # copied rows refer to stored states
            sources.add(key)
        for is_fixed in (True, False):
            group = [one.state.request for one in leaders if one.state.reads_in_chunks == is_fixed]
            at_once = config.prefill_group if is_fixed and not plan.checker.batches_prompts else max(len(group), 1)
            chunk = config.prefill_chunk if is_fixed else FREE_PREFILL_WIDTH
            for i in range(0, len(group), at_once):
                done = {r.request_id: r.num_cached for r in group[i : i + at_once]}
                lengths = {r.request_id: r.num_prompt_tokens for r in group[i : i + at_once]}
                while unread := {name: start for name, start in done.items() if start < lengths[name]}:
                    sizes = {name: min(chunk, lengths[name] - start) for name, start in unread.items()}
                    taken = list(unread)
                    if is_fixed and plan.checker.batches_prompts:
                        chosen = pick_prompts([(sizes[name], unread[name]) for name in taken], config.capacity)
                        taken = [taken[number] for number in chosen]
                    width = chunk if is_fixed and config.pad_prefill else max(sizes[name] for name in taken)
                    is_grouped = is_fixed and not plan.checker.batches_prompts
                    self._pass("prefill", width * (config.prefill_group if is_grouped else len(taken)))
                    done |= {name: unread[name] + sizes[name] for name in taken}

    def _decode(self, running: Sequence[_Counted]) -> list[_Counted]:
        """Counts a decode pass, or a call of the drafter. Returns the requests that fill the next verify pass."""
        config, drafter = self.plan.config, self.drafter
        drafting = [one for one in running if not one.is_ready(config.window)]
        num_ready = len(running) - len(drafting)
        plain = [one for one in drafting if not one.state.is_verified]
        fill_ins = plain[: -num_ready % config.group] if config.window == 1 else []
        if drafting := [one for one in drafting if one not in fill_ins]:
            self._pass("decode" if self._draft_layers else "draft", len(drafting))
        for one in drafting:
            if not one.state.is_verified:
                self._add(one, "decode", one.last, 1)
                one.left -= 1
                continue
            made = 1
            if self._draft_layers:
                layers = -1 if drafter is None else self._draft_layers
                self._add(one, "decode", one.last + one.draft, 1, int(one.draft > 0), layers)
            else:
                made = 0 if one.draft else min(getattr(drafter, "length", None) or config.window, config.window)
            before, limit = one.draft, one.limit(config.window)
            one.draft, one.is_closed = min(before + made, limit), made == 0
            self.num_drafted += one.draft - before
        return fill_ins

    def _verify(self, running: Sequence[_Counted], fill_ins: Sequence[_Counted]) -> None:
        """Counts the verify passes of a round, and what they commit."""
        config, plan = self.plan.config, self.plan
        ready = [one for one in running if one.is_ready(config.window) or one in fill_ins]
        are_others_coming = any(one.state.is_verified and not one.is_ready(config.window) for one in running)
        for group in (ready[i : i + config.group] for i in range(0, len(ready), config.group)):
            if len(group) < config.group and are_others_coming:
                continue
            if len(group) == config.group > 1 and not config.is_invariant:
                self._num_full += 1
                group = group[:-1] if self._num_full % LEAVE_ROOM_EVERY == 0 else group  # as the checker does
            longest = 1 + max(one.draft for one in group)
            width = next((n for n in plan.checker.narrow_widths if n >= longest), config.window)
            self._pass("verify", width * (len(group) if config.is_invariant else config.group))
            for one in group:
                self._add(one, "verify", one.last, 1 + one.draft, one.draft)
                one.accepted += sum(self._accepted ** (t + 1) for t in range(one.draft))
                num_accepted = min(one.draft, math.floor(one.accepted + 1e-9))
                one.accepted -= num_accepted
                if one.cap is not None and config.draft_length == "adaptive" and one.draft:
                    is_whole = num_accepted == one.draft
                    one.cap = min(one.cap + 2, config.window - 1) if is_whole else max(one.cap - 1, 1)
                one.left -= 1 + num_accepted
                one.draft, one.is_closed = 0, False


def _prompt_key(state: SequenceState) -> tuple[object, ...]:
    """Returns a key that is equal for requests that share a prompt."""
    return state.request.prompt_token_ids, state.reads_in_chunks, state.request_id if state.is_edited else -1
