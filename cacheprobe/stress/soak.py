"""Runs episodes (one run of random requests each) until enough tokens were compared with the slow reference
(`cp.reference`)."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch

from cacheprobe.api import run
from cacheprobe.core.records import Request
from cacheprobe.stress.mixed import mixed_episode
from cacheprobe.stress.oracle import ReferenceResult, output_of, reference_answer
from cacheprobe.stress.refusals import run_in_accepted_shape
from cacheprobe.stress.subjects import Subject
from cacheprobe.stress.tally import Tally
from cacheprobe.stress.traffic import Corrupted, Episode, draw_episode, draw_request
from cacheprobe.trace.trace import Trace

SHARES = {"tiny": 0.875, "near_ties": 0.1, "real": 0.025}
"""Share of the compared tokens, by kind of subject. A token of the real model takes about forty times a tiny model's
time."""
NEW_SHARES = {"tiny": 0.12, "near_ties": 0.2, "real": 0.9}
"""Share of an episode's requests that are new to the pool, by kind of subject. The reference computes each new request,
which takes most of the time."""
MOST_REQUESTS = {"tiny": 24, "near_ties": 24, "real": 6}
"""Largest number of compared requests in an episode, by kind of subject; up to three neighbours are added."""
CAPTURE_SHARE = 0.15
"""Share of episodes that also capture and compare states and readings."""
MIXED_SHARE = 0.4
"""Share of episodes that mix heads, preemptions, interventions, streams and cancellations; see `stress.mixed`."""
STATES_EVERY = 4
"""The reference keeps states and readings of every fourth request of a pool."""
SAVE_EVERY_SECONDS = 5.0


class _Generates(Protocol):
    """Declares the `generate` of a Hugging Face model, whose own annotations a type checker cannot bind."""

    def generate(self, inputs: torch.Tensor, **settings: object) -> torch.Tensor: ...


def soak(
    subjects: Sequence[Subject],
    tally: Tally,
    num_tokens: int,
    save: Path,
    seed: int,
    report: Callable[[Tally], None],
) -> None:
    """Runs episodes until `num_tokens` tokens were compared in all, those already in `tally` included. Saves the tally
    to the file `save` every few seconds, and at the end."""
    kinds: dict[str, list[Subject]] = {}
    for subject in subjects:
        kinds.setdefault(subject.kind, []).append(subject)
    saved = began = time.monotonic()
    before = tally.seconds
    while tally.num_compared < num_tokens:
        done = {kind: sum(map(tally.compared_of, listed)) / SHARES[kind] for kind, listed in kinds.items()}
        kind = min(kinds, key=lambda kind: done[kind])  # the kind with the smallest part of its share done
        listed = kinds[kind]
        subject = min(listed, key=lambda s: tally.episodes_of[s.key])
        drawn = [seed, tally.episodes]
        is_mixed = np.random.default_rng([*drawn, 1]).random() < MIXED_SHARE
        (mixed_episode if is_mixed else one_episode)(subject, tally, drawn)
        tally.seconds = before + time.monotonic() - began
        report(tally)
        if time.monotonic() - saved > SAVE_EVERY_SECONDS:
            tally.save(save)
            saved = time.monotonic()
    tally.save(save)


def one_episode(subject: Subject, tally: Tally, seed: Sequence[int]) -> None:
    """Runs one episode of random requests, compares their output with the slow reference (`cp.reference`), and adds
    differences and counts to `tally`. Requests that only fill the batch are not compared.

    If a run refuses the subject's shape because the shape is not batch-invariant, the same requests run in another
    shape.
    """
    rng = np.random.default_rng(list(seed))
    is_captured = bool(rng.random() < CAPTURE_SHARE)
    numbers, size = [], tally.pools[subject.key]
    for _ in range(int(rng.integers(2, MOST_REQUESTS[subject.kind] + 1))):
        is_new = size == 0 or rng.random() < NEW_SHARES[subject.kind]
        number = size if is_new else int(rng.integers(size))
        numbers.append(number - number % STATES_EVERY if is_captured and not is_new else number)
        size += is_new
    tally.pools[subject.key] = size
    episode_seed = int(rng.integers(2**31))
    layers = subject.captured_layers

    def compute(shape: Subject) -> tuple[Episode, Trace]:
        """Draws and runs the episode in this shape; returns the episode and its trace."""
        episode = draw_episode(shape, episode_seed, numbers)
        trace = run(
            shape.model,
            episode.requests,
            **shape.settings,
            **episode.settings,
            drafter=episode.drafter,
            capture="STCZ" if is_captured else None,
            layers=layers,
            progress=False,
        )
        return episode, trace

    subject, (episode, trace) = run_in_accepted_shape(subject, tally.refused, compute)
    _check_schedule(subject, tally, trace)
    for request_id, number in enumerate(episode.pool_numbers):
        if number is not None:
            _compare(subject, tally, trace, request_id, number, layers, is_captured)
    tally.episodes += 1
    tally.episodes_of[subject.traffic_key] += 1
    _count(subject, tally, trace, episode)


def _check_schedule(subject: Subject, tally: Tally, trace: Trace) -> None:
    """Stores the schedule fingerprint of a subject's first trace in `tally`. Raises: ValueError if a later trace of the
    subject has another one."""
    known = tally.fingerprints.setdefault(subject.key, trace.fingerprint)
    if known != trace.fingerprint:
        differing = sorted(k for k in known.keys() | trace.fingerprint if known.get(k) != trace.fingerprint.get(k))
        raise ValueError(
            f"the test in this directory was begun under another schedule ({', '.join(differing)}); give another "
            "directory, or delete this one"
        )


def _compare(
    subject: Subject, tally: Tally, trace: Trace, request_id: int, number: int, layers: Sequence[int], is_captured: bool
) -> None:
    request = draw_request(subject, number)
    key = f"{subject.key} {number}"
    if key not in tally.answers:
        tally.answers[key] = reference_answer(subject, request, "STCZ" if number % STATES_EVERY == 0 else None, layers)
        tally.distinct[subject.key] += len(tally.answers[key].tokens)
        third_party(subject, tally, request, tally.answers[key])
    want, got = tally.answers[key], output_of(trace, request_id)
    is_captured = is_captured and bool(want.states)
    is_deterministic = trace.requests[request_id].is_deterministic
    where = f"{subject.key}, request {number} of the pool, episode {tally.episodes}"
    if str(request_id) in trace.meta["errors"]:
        tally.differences.append(f"{where}: ended with {trace.meta['errors'][str(request_id)]}")
    elif got.tokens != want.tokens:
        tally.differences.append(f"{where}: tokens {got.tokens} against {want.tokens}")
    elif is_deterministic and got.logprobs != want.logprobs:
        tally.differences.append(f"{where}: log-probabilities differ")
    elif is_deterministic and is_captured and (got.states, got.readings) != (want.states, want.readings):
        tally.differences.append(f"{where}: states or readings differ")
    tally.compared[subject.key] += len(want.tokens)
    tally.counts["requests_deterministic" if is_deterministic else "requests_drafted_only"] += 1
    if is_deterministic and is_captured:
        tally.counts["requests_with_states_compared"] += 1


def third_party(subject: Subject, tally: Tally, request: Request, answer: ReferenceResult) -> None:
    """Compares a request's expected output with Hugging Face's own `generate` on an untouched copy of the model, and
    adds a difference to `tally`. Only greedy requests with unchanged logits (`SamplingParams.is_plain`) and float32
    models are compared.

    Subjects with near ties are left out: the last bits of the logits decide between two tokens, and these bits differ
    with Hugging Face's shapes.
    """
    sampling = request.sampling
    assert sampling is not None
    if subject.dtype != "float32" or subject.disagrees or not sampling.is_greedy or not sampling.is_plain:
        return
    assert subject.plain is not None
    ids = torch.tensor([list(request.prompt)])
    stops = list(cast("tuple[int, ...]", sampling.stop_token_ids or ())) or None
    with torch.inference_mode():
        out = cast(_Generates, subject.plain).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=sampling.max_new_tokens,
            eos_token_id=stops, pad_token_id=0,
        )  # fmt: skip
    theirs = tuple(out[0, ids.shape[1] :].tolist())
    tally.counts["third_party_tokens"] += len(theirs)
    if theirs != answer.tokens:
        tally.differences.append(f"{subject.key}: Hugging Face says {theirs}, the oracle {answer.tokens}")


def _count(subject: Subject, tally: Tally, trace: Trace, episode: Episode) -> None:
    events = trace.event_table
    rejected = events[events.num_rolled_back.fillna(0) > 0]
    for row in rejected.itertuples():
        position = int(row.draft_start + row.num_accepted)
        kind = kind_of_rollback(episode, trace.requests[row.request_id], position)
        tally.counts[f"rollbacks_{kind}"] += 1
        if kind == "natural":
            tally.natural[subject.key] += 1
    tally.counts["preemptions"] += len(trace.meta["preemptions"])
    tally.counts["captured_episodes"] += bool(trace.store.sites)
    tally.counts["tokens_of_neighbours"] += sum(
        len(trace.tokens[i]) for i, number in enumerate(episode.pool_numbers) if number is None
    )
    tally.counts[f"episodes_drafter_{episode.drafter_name}"] += 1


def kind_of_rollback(episode: Episode, request: Request, position: int) -> str:
    """Returns why the draft token at `position` was rejected, as text: injected, natural or other.

    injected: the stress test replaced the drafter's token.  natural: the token of the fast path itself, in a request
    with acceptance by equality, so the verifier chose another token.  other: the token of another drafter, or one that
    rejection sampling rejected at random.
    """
    if isinstance(episode.drafter, Corrupted) and (request.request_id, position) in episode.drafter.altered:
        return "injected"
    by_equality = episode.settings["acceptance"] == "equality" or request.is_deterministic
    return "natural" if by_equality and episode.drafter_name in ("none", "fast_path") else "other"
