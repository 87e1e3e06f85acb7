"""Counts the passes, rows and lens readings of a run by arithmetic."""

import heapq
import math
from collections import Counter, defaultdict
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch

from cacheprobe.engine.drafters.base import drafted_layers
from cacheprobe.engine.execution import PreparedRun
from cacheprobe.engine.plan import RunPlan
from cacheprobe.engine.prefill import prompt_key, prompt_passes
from cacheprobe.engine.sizes import state_bytes, state_dtype
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.trace.recording.lens_reader import LENS_TILE


@dataclass
class RunCount:
    """Holds what a run computes and records."""

    num_draft: int
    """Tokens of a draft, at most."""
    passes: Counter[str] = field(default_factory=Counter)
    """Number of passes by phase."""
    slots: int = 0
    """Token slots of all passes, with the dummies of verify passes."""
    rows: int = 0
    readings: float = 0.0
    state_bytes: float = 0.0

    @property
    def num_passes(self) -> int:
        """Number of all passes."""
        return sum(self.passes.values())

    @property
    def num_tiles(self) -> int:
        """Number of tiles of states that the lens reads."""
        return math.ceil(self.readings / LENS_TILE)


def count_run(run: PreparedRun, acceptance: float) -> RunCount:
    """Counts a run whose verifier accepts this part of the draft tokens, if it accepted those before them.

    Exact without drafts, preempted and late requests, except that full verify passes are counted as if none left room
    for a recomputed request. Requests in flight count as if they drafted in step, and requests that max_kv_tokens
    limits as if they waited instead of being preempted.
    """
    plan, config, drafter = run.plan, run.plan.config, run.plan.drafter
    layers = plan.model.n_layers if drafter is None else drafted_layers(drafter, plan.model)
    most = (config.window - 1, config.draft_length, None if layers else getattr(drafter, "length", None))
    count = RunCount(min(length for length in most if isinstance(length, int)))
    per_verify = 1 + sum(acceptance ** (t + 1) for t in range(count.num_draft))  # committed tokens

    states = sorted(run.states, key=lambda state: state.request.arrival_step)
    tokens = sum(state.request.num_prompt_tokens + state.num_left for state in states) / len(states)
    in_flight = int(min(len(states), config.max_batch, (config.max_kv_tokens or math.inf) / tokens))
    free_at, held = [0] * max(in_flight, 1), dict[object, int]()
    spans, num_verifies = list[tuple[bool, int, int]](), 0
    readers: dict[tuple[int, bool], list[SequenceState]] = defaultdict(list)
    for state in states:  # begins in the round of the main loop in which a cache row becomes free
        left = state.num_left - 1
        num_verified = math.ceil(left / per_verify) if state.is_verified else 0
        drafted = sum(min(count.num_draft, max(left - per_verify * i - 1, 0)) for i in range(num_verified))
        # a draft that runs layers of the model takes a round for each of its tokens
        rounds = max(num_verified, round(drafted) if layers else 0) if state.is_verified else left
        num_verifies += num_verified
        start = heapq.heappop(free_at)
        end = start + max(rounds, 1)
        heapq.heappush(free_at, end)
        spans.append((state.is_verified, start, start + rounds))
        key = prompt_key(state)
        is_shared = held.get(key, 0) > start
        held[key] = max(held.get(key, 0), end)
        if not is_shared:
            readers[start, state.reads_in_chunks].append(copy(state))
        _add_rows(count, plan, state, (num_verified, round(drafted)), layers, is_shared)
    for group in readers.values():
        _add_prefills(count, run, group)

    verified, others = running = np.zeros((2, max(free_at)), dtype=int)  # requests of each round
    for is_verified, start, end in spans:
        running[1 - is_verified, start:end] += 1
    fill_ins = np.minimum(others, -verified % config.group) * (config.window == 1)
    decoding = others - fill_ins + verified * (layers > 0 < count.num_draft)
    count.passes["decode"] = int((decoding > 0).sum())
    in_round = num_verifies / max(int(verified.sum()), 1)  # verify passes of a request
    count.passes["verify"] = round(np.ceil(verified / config.group).sum() * in_round)
    count.slots += int(decoding.sum()) + count.passes["verify"] * config.group * (count.num_draft + 1)
    return count


def _add_prefills(count: RunCount, run: PreparedRun, states: list[SequenceState]) -> None:
    """Adds the passes that read the prompts of these requests together."""
    for state in states:
        state.num_prefilled = state.request.num_cached
    for entries, width, batch in prompt_passes(states, run.plan.config, run.checker, KVCache(1, 1, (), torch.float32)):
        count.passes["prefill"] += 1
        count.slots += width * (batch or len(entries))
        for entry in entries:
            entry.state.num_prefilled = entry.end


def _add_rows(
    count: RunCount, plan: RunPlan, state: SequenceState, verified: tuple[int, int], layers: int, is_shared: bool
) -> None:
    """Adds the rows of a request, and what is kept and read of them.

    verified: numbers of its verify passes and of its draft tokens.  layers: number of those that a draft runs.
    is_shared: whether its prompt's rows refer to the states of another request.
    """
    capture, num_prompt, (num_verified, num_drafted) = plan.capture, state.request.num_prompt_tokens, verified
    prompt = range(state.request.num_cached, num_prompt)
    generated = range(num_prompt, num_prompt + state.num_left - 1)
    parts = [("prefill", "committed", prompt, len(prompt), 0)]
    if not state.is_verified:
        parts.append(("decode", "committed", generated, len(generated), 0))
    else:
        parts.append(("verify", "committed", generated, num_verified, num_drafted))
        if layers:
            num_begun = min(num_verified, num_drafted)  # drafts, each of which begins at a committed token
            parts.append(("decode", "superseded", generated, num_begun, num_drafted - num_begun))
    for phase, status, positions, num_plain, num_drafts in parts:
        count.rows += num_plain + num_drafts
        kept = [position for position in positions if capture.keeps_row(phase, position)]
        share = (num_plain * capture.keeps_status(status) + num_drafts) / max(len(positions), 1)
        num_layers = sum(layer < layers or status == "committed" for layer in plan.layers)
        count.readings += share * num_layers * sum(capture.reads_row(position, num_prompt) for position in kept)
        if phase != "prefill" or not is_shared:
            weights = sum(position + 1 for position in kept) if "pattern" in capture.heads else 0
            of_weight = plan.model.head_shape[0] * len(plan.layers) * state_dtype(plan.model, capture).itemsize
            of_row = state_bytes(plan.model, capture, plan.layers)
            count.state_bytes += share * (len(kept) * of_row + weights * of_weight)
