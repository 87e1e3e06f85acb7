"""Counts the passes and rows of a run: runs the engine's main loop, and computes no pass.

Scheduler, prefill, verdicts and the cache's rows are the engine's own. Only the passes are replaced, by `PassCounter`;
their logits choose made-up tokens, so that drafts are accepted in full, not at all, or as in a trial of the drafter.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cacheprobe.core.records import ForwardRecord, Observer, SamplingParams
from cacheprobe.engine.checker import RecomputeChecker
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.estimates.assumed import AssumedDrafter, DraftOutcomes, RollingLogits
from cacheprobe.engine.estimates.tally import PassShape, PassSums, RunTally
from cacheprobe.engine.loop import generation_loop
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.passes import Pass
from cacheprobe.engine.plan import RunPlan
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.trace.recording.observers import Tee

_PLAIN = SamplingParams(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, stop=(), stop_token_ids=(), n=1, seed=0
)
"""Sampling settings of the counted requests: greedy, and no token ends a request early."""


class PassCounter(ModelRunner):
    """Counts the passes that the engine asks for, reports their rows, and returns made-up logits."""

    def __init__(self, *parts: Any, tally: RunTally, logits: "DraftOutcomes | RollingLogits") -> None:
        super().__init__(*parts)
        self._tally, self._logits = tally, logits

    def run(self, a_pass: Pass) -> Tensor:
        """Counts a pass, and returns made-up logits."""
        phase, entries, width, slots = a_pass.phase, a_pass.entries, a_pass.width, a_pass.logit_slots
        num_logits = width if slots is None else len(slots)
        shape = PassShape(
            phase, len(entries), width, a_pass.batch, a_pass.num_layers, num_logits, a_pass.is_without_pads
        )
        self.shape, self.seconds = (shape.size, width), 0.0
        sums = self._tally.passes.setdefault(shape, PassSums())
        sums.count += 1
        sums.rows += sum(len(entry.token_ids) for entry in entries)
        starts = [entry.start for entry in entries]
        sums.start += max(starts) if a_pass.batch is None else sum(starts) / len(starts)
        self._tally.steps[phase] += 1
        if not a_pass.is_rebuild:
            rows = a_pass.row_slots()
            self.observer.before_forward(self.step, phase, rows, self.shape)
            self.observer.after_forward(ForwardRecord(self.step, phase, rows, None, a_pass.num_layers))
        return self._logits.of(phase, entries, num_logits, slots)


def count(
    plan: RunPlan, drafter: Drafter | None, states: Sequence[SequenceState], outcomes: Sequence[tuple[int, int]]
) -> RunTally:
    """Returns the RunTally of a run whose drafts have these outcomes: (length, number of accepted tokens) of each.

    states: from `plan.states`; they are not changed.
    """
    tally = RunTally(plan)
    tally.seconds = _loop(plan, drafter, plain_states(states), DraftOutcomes(outcomes), tally, ())
    return tally


def replay_passes(
    plan: RunPlan, drafter: Drafter | None, states: Sequence[SequenceState], observer: Observer
) -> RunTally:
    """Runs the loop with tokens of the whole vocabulary, reports to an observer, and returns the RunTally. Every draft
    token is accepted."""
    tally = RunTally(plan)
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
        counted = replace(
            request, prompt_token_ids=ids, cached=cached, keep_kv=False, sampling=sampling, forced_token_ids=()
        )
        one = SequenceState(counted, state.is_verified, sampling, state.decode, state.is_invariant)
        one.is_edited = state.is_edited
        made.append(one)
    return made


def _loop(
    plan: RunPlan,
    drafter: Drafter | None,
    states: Sequence[SequenceState],
    logits: DraftOutcomes | RollingLogits,
    tally: RunTally,
    observers: Collection[Observer],
) -> float:
    """Runs the engine's loop over counted passes, and returns its seconds."""
    assumed = None if drafter is None else AssumedDrafter(drafter, plan.model, logits, tally)
    began = time.perf_counter()
    in_flight = min(len(states), plan.config.max_batch)
    cache = KVCache(in_flight + 1, plan.config.capacity, (), torch.float32)  # without layers: lengths and ledger alone
    checker = RecomputeChecker(plan.model)
    checker.narrow_widths, checker.batches_prompts = plan.checker.narrow_widths, plan.checker.batches_prompts
    runner = PassCounter(plan.model, cache, Tee(tally, *observers), checker, tally=tally, logits=logits)
    steps = generation_loop(lambda: runner, states, plan.config, assumed)
    for _ in steps:
        pass
    return time.perf_counter() - began
