"""Counts the passes and rows of a run: runs the engine's main loop, and computes no pass.

Scheduler, prefill, verdicts and the cache's rows are the engine's own. Only the passes are replaced, by `PassCounter`;
their logits choose made-up tokens, so that drafts are accepted in full, not at all, or as in a trial of the drafter.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cacheprobe.core.records import ForwardRecord, Observer, SamplingParams
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.estimates.assumed import AssumedDrafter, DraftOutcomes, RollingLogits
from cacheprobe.engine.estimates.tally import PassShape, PassSums, RunTally
from cacheprobe.engine.loop import rounds
from cacheprobe.engine.model_runner import Entry, ModelRunner, PassOutcome, row_slots
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
        is_without_pads: bool = False,
    ) -> PassOutcome:
        """Counts a pass; takes the arguments of `ModelRunner.run`, and returns a PassOutcome of made-up logits."""
        self.step += 1
        num_logits = width if logit_slots is None else len(logit_slots)
        shape = PassShape(phase, len(entries), width, batch, num_layers, num_logits, is_without_pads)
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
    make_runner = partial(PassCounter, tally=tally, logits=logits)
    steps = rounds(
        plan.model,
        states,
        plan.config,
        Tee(tally, *observers),
        assumed,
        make_runner=make_runner,
        cache=cache,
        narrow_widths=plan.narrow_widths,
        batches_prompts=plan.batches_prompts,
    )
    for _ in steps:
        pass
    return time.perf_counter() - began
