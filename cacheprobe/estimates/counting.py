"""Counts the passes and rows of a run: runs the engine's main loop, and computes no pass.

Scheduler, prefill, drafts, verdicts and the cache's rows are the engine's own. Only the passes are replaced, by
`PassCounter`; their logits choose one fixed token, so that a draft is accepted in full or rejected in full.
"""

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from cacheprobe.capture.observers import Tee
from cacheprobe.core.records import ForwardRecord, Observer, SamplingParams, StepRecord
from cacheprobe.drafters.base import DraftContext, Drafter, drafted_layers
from cacheprobe.drafters.model import DraftModel
from cacheprobe.engine.loop import rounds
from cacheprobe.engine.model_runner import Entry, ModelRunner, PassOutcome, row_slots
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.plan import RunPlan

ACCEPTED, REJECTED = 0, 1
"""Token ids of the counted run: the verifier always chooses the first, a drafter whose drafts fail the second."""
_PLAIN = SamplingParams(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, stop=(), stop_token_ids=(), n=1, seed=0
)
"""Sampling settings of the counted requests: greedy, and no token ends a request early."""


@dataclass(frozen=True)
class PassShape:
    """Holds what decides how long a pass takes, apart from positions."""

    phase: str
    num_entries: int
    width: int
    batch: int | None
    """Fixed number of batch indices; None for one for each entry."""
    num_layers: int | None
    num_logits: int
    """Token slots whose logits are computed."""

    @property
    def size(self) -> int:
        """Number of batch indices of the pass."""
        return self.num_entries if self.batch is None else self.batch


@dataclass
class PassSums:
    """Holds sums over the passes of one shape."""

    count: int = 0
    rows: int = 0
    """Real tokens, without pads and dummies."""
    start: float = 0.0
    """Sum of the first positions: of the mean over the entries in a pass of fixed size, else of the largest."""


@dataclass
class Tally(Observer):
    """Counts what a run records: rows, kept states, readings, lines of tables."""

    plan: RunPlan
    passes: dict[PassShape, PassSums] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    """Passes by phase."""
    rows: int = 0
    kept_rows: int = 0
    """Rows whose states are kept."""
    pattern_weights: int = 0
    """Weights of kept attention patterns, for one head of one layer."""
    readings: int = 0
    choices: int = 0
    """Tokens that were chosen from logits, those of drafts and verdicts included."""
    event_lines: int = 0
    ledger_lines: int = 0
    draft_tokens: int = 0
    draft_calls: Counter[int] = field(default_factory=Counter)
    """Draft tokens of a request that one call of the drafter makes one after another, by number of requests."""
    seconds: float = 0.0
    """Time that the loop itself took."""
    _prompt_rows: Counter[int] = field(default_factory=Counter)
    _prompt_readings: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._lengths = {r.request_id: r.num_prompt_tokens for r in self.plan.requests}

    def after_forward(self, record: ForwardRecord) -> None:
        """Counts the rows of a pass, and what the recorder keeps of them."""
        capture = self.plan.capture
        ran = self.plan.model.n_layers if record.num_layers is None else record.num_layers
        num_layers = sum(layer < ran for layer in self.plan.layers)
        self.rows += len(record.rows)
        for row in record.rows:
            length = self._lengths[row.request_id]
            is_kept = capture.keeps_row(record.phase, row.position)
            readings = num_layers if is_kept and capture.reads_row(row.position, length) else 0
            self.kept_rows += is_kept
            self.pattern_weights += (row.position + 1) if is_kept and "pattern" in capture.heads else 0
            self.readings += readings
            if row.position < length and record.phase == "prefill":
                self._prompt_rows[row.request_id] += 1
                self._prompt_readings[row.request_id] += readings

    def on_shared_prompt(self, request_id: int, step: int, source_id: int) -> None:
        """Counts the copied rows of a prompt, which are read again."""
        for counts in (self._prompt_rows, self._prompt_readings):
            counts[request_id] = counts[source_id]
        self.rows += self._prompt_rows[source_id]
        self.readings += self._prompt_readings[source_id]

    def on_choice(self, request_id: int, step: int, position: int, token_id: int, logits: Tensor) -> None:
        """Counts a chosen token."""
        self.choices += 1

    def on_ledger(self, request_id: int, step: int, start: int, end: int, provenance: str) -> None:
        """Counts a line of the ledger."""
        self.ledger_lines += 1

    def on_step(self, record: StepRecord) -> None:
        """Counts the lines of the events table, and draft tokens."""
        self.event_lines += len(record.request_ids)
        self.draft_tokens += sum(len(token_ids) for _, token_ids in record.proposed)


class PassCounter(ModelRunner):
    """Counts the passes that the engine asks for, reports their rows, and returns made-up logits."""

    def __init__(self, *parts: Any, tally: Tally, logits: "FixedLogits | RollingLogits") -> None:
        super().__init__(*parts)
        self._tally, self._logits = tally, logits

    def run(
        self,
        phase: str,
        entries: Sequence[Entry],
        width: int,
        *,
        batch: int | None = None,
        num_layers: int | None = None,
        logit_slots: Sequence[int] | None = None,
        is_hidden: bool = False,
    ) -> PassOutcome:
        """Counts a pass; takes the arguments of `ModelRunner.run`, and returns a PassOutcome of made-up logits."""
        self.step += 1
        num_logits = width if logit_slots is None else len(logit_slots)
        shape = PassShape(phase, len(entries), width, batch, num_layers, num_logits)
        self.shape, self.seconds = (shape.size, width), 0.0
        sums = self._tally.passes.setdefault(shape, PassSums())
        sums.count += 1
        sums.rows += sum(len(entry.token_ids) for entry in entries)
        starts = [entry.start for entry in entries]
        sums.start += max(starts) if batch is None else sum(starts) / len(starts)
        self._tally.steps[phase] += 1
        batch_index = tuple(range(len(entries)))
        if not is_hidden:
            slots = tuple(row_slots(entries, batch_index))
            self.observer.before_forward(self.step, phase, slots, self.shape)
            self.observer.after_forward(ForwardRecord(self.step, phase, slots, None, num_layers))
        return PassOutcome(self._logits.of(phase, entries, num_logits, logit_slots), batch_index)


class FixedLogits:
    """Makes the logits of two tokens, of which a pass always chooses the same one."""

    d_vocab = 2

    def __init__(self, is_accepted: bool) -> None:
        self._drafted = ACCEPTED if is_accepted else REJECTED
        chosen = torch.eye(2)
        self._rows = {"prefill": chosen[ACCEPTED], "verify": chosen[ACCEPTED], "decode": chosen[self._drafted]}

    def drafted(self, request_id: int, position: int) -> int:
        """Returns the draft token that follows a position."""
        return self._drafted

    def of(self, phase: str, entries: Sequence[Entry], num_logits: int, slots: Sequence[int] | None) -> Tensor:
        """Returns logits [b, n, 2] of one entry each, without memory of their own."""
        return self._rows[phase].expand(len(entries), num_logits, 2)


class RollingLogits:
    """Makes logits of the model's vocabulary, which choose another token at each position."""

    def __init__(self, d_vocab: int, seed: int = 0) -> None:
        self.d_vocab = d_vocab
        self._distinct = min(d_vocab, 256)
        self._order = torch.randperm(d_vocab, generator=torch.Generator().manual_seed(seed))

    def of(self, phase: str, entries: Sequence[Entry], num_logits: int, slots: Sequence[int] | None) -> Tensor:
        """Returns logits [b, n, v] whose largest is that of a token drawn by position and request."""
        out = torch.zeros(len(entries), num_logits, self.d_vocab)
        for b, entry in enumerate(entries):
            for n, slot in enumerate(range(num_logits) if slots is None else slots):
                out[b, n, self.drafted(entry.state.request_id, entry.start + slot)] = 9.0
        return out

    def drafted(self, request_id: int, position: int) -> int:
        """Returns the token that follows a position, in drafts and in the verifier's choice alike."""
        return int(self._order[(position + 7 * request_id) % self._distinct])


@dataclass
class AssumedDrafter:
    """Drafts as many tokens as another drafter can, by the same passes; every token is accepted, or every one is
    rejected."""

    drafter: Drafter
    model: CachedLM
    logits: FixedLogits | RollingLogits
    tally: Tally
    name: ClassVar[str] = "assumed"

    def __post_init__(self) -> None:
        self.num_layers = drafted_layers(self.drafter, self.model)

    def check(self, model: CachedLM) -> None:
        """Accepts every model; the drafter itself was checked before."""

    def release(self, state: SequenceState) -> None:
        """Does nothing: this drafter stores no data for a request."""

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns one draft token for each request after a decode pass; if the drafter runs no layer of the model, a
        whole draft for each request without one.
        """
        length, drafting = 1, list(states)
        if self.num_layers:
            whole = self.num_layers == self.model.n_layers
            context.feed_newest(states, None if whole else self.num_layers)
        else:
            length = getattr(self.drafter, "length", None) or max(state.num_left for state in states)
            drafting = [state for state in states if not state.draft and state.num_left > 1]
        if drafting:
            self.tally.draft_calls[len(drafting)] += length
        if self.num_layers or isinstance(self.drafter, DraftModel):  # they choose each token from logits
            for state in drafting:
                self.tally.choices += min(length, max(state.num_left - 1, 1))
        return [
            [self.logits.drafted(state.request_id, state.newest[1] + k) for k in range(length)]
            if state in drafting
            else []
            for state in states
        ]


@dataclass(frozen=True)
class _Blockless:
    """Stands for the model in a counted run: its cache has no layers."""

    d_vocab: int
    name: str

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """Returns a KVCache without layers, which holds lengths and the ledger alone."""
        return KVCache(num_rows, capacity, (), torch.float32)


def count(plan: RunPlan, drafter: Drafter | None, states: Sequence[SequenceState], is_accepted: bool) -> Tally:
    """Returns the Tally of a run in which every draft token is accepted, or every one is rejected.

    states: from `plan.states`; they are not changed.
    """
    tally = Tally(plan)
    tally.seconds = _loop(plan, drafter, plain_states(states), FixedLogits(is_accepted), tally, ())
    return tally


def replay_passes(plan: RunPlan, drafter: Drafter | None, states: Sequence[SequenceState], observer: Observer) -> Tally:
    """Runs the loop with tokens of the whole vocabulary, reports to an observer, and returns the Tally. Every draft
    token is accepted."""
    tally = Tally(plan)
    tally.seconds = _loop(plan, drafter, states, RollingLogits(plan.model.d_vocab), tally, (observer,))
    return tally


def plain_states(
    states: Sequence[SequenceState], num_prompt_tokens: int | None = None, num_new_tokens: int | None = None
) -> list[SequenceState]:
    """Returns new states of the same requests that choose greedily and are never ended by a token.

    num_prompt_tokens, num_new_tokens: at most so many are left of each request.
    """
    made = []
    for state in states:
        request, new = state.request, state.sampling.max_new_tokens or 1
        sampling = replace(_PLAIN, max_new_tokens=new if num_new_tokens is None else min(new, num_new_tokens))
        ids, cached = request.prompt_token_ids, request.cached
        if num_prompt_tokens is not None and len(ids) > num_prompt_tokens:
            ids, cached = ids[:num_prompt_tokens], None
        if cached is not None:
            cached = replace(cached, keys=(), values=(), head_masks=frozenset())
        counted = replace(request, prompt_token_ids=ids, cached=cached, keep_kv=False, sampling=sampling)
        one = SequenceState(counted, state.is_verified, sampling, state.decode)
        one.is_edited = state.is_edited
        made.append(one)
    return made


def _loop(
    plan: RunPlan,
    drafter: Drafter | None,
    states: Sequence[SequenceState],
    logits: FixedLogits | RollingLogits,
    tally: Tally,
    observers: Collection[Observer],
) -> float:
    """Runs the engine's loop over counted passes, and returns its seconds."""
    assumed = None if drafter is None else AssumedDrafter(drafter, plan.model, logits, tally)
    began = time.perf_counter()
    steps = rounds(
        _Blockless(logits.d_vocab, plan.model.name), states, plan.config, Tee(tally, *observers), assumed,
        make_runner=partial(PassCounter, tally=tally, logits=logits),
    )  # fmt: skip
    for _ in steps:
        pass
    return time.perf_counter() - began
