"""Episode after episode of random traffic, each compared with the oracle, until enough tokens were compared."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from cacheprobe.api import run
from cacheprobe.observe.trace import Trace
from cacheprobe.proof.oracle import Answer, answer_of, ask
from cacheprobe.proof.subjects import Subject
from cacheprobe.proof.tally import Tally
from cacheprobe.proof.traffic import Corrupted, Episode, draw_episode, draw_request
from cacheprobe.records import Request

NEW_SHARE = 0.13
"""Share of an episode's requests that are new to the pool: about one distinct token in eight compared."""
REAL_SHARE = 0.06
"""Share of compared tokens that the real model is to have."""
REAL_NEW_SHARE = 0.45
CAPTURE_SHARE = 0.15
"""Share of episodes that also capture states and readings, and compare them."""
SAVE_EVERY_SECONDS = 5.0


def soak(
    subjects: Sequence[Subject],
    tally: Tally,
    num_tokens: int,
    save: Path,
    seed: int,
    report: Callable[[Tally], None],
) -> None:
    """Run episodes until `num_tokens` tokens were compared in all; the tally goes on from where it stands."""
    real = [subject for subject in subjects if subject.is_real]
    tiny = [subject for subject in subjects if not subject.is_real]
    saved = began = time.monotonic()
    before = tally.seconds
    while tally.num_compared < num_tokens:
        done = sum(tally.compared[subject.key] for subject in real)
        pick_real = bool(real) and (not tiny or done < REAL_SHARE * tally.num_compared)
        subject = (real if pick_real else tiny)[tally.episodes % len(real if pick_real else tiny)]
        one_episode(subject, tally, [seed, tally.episodes])
        tally.seconds = before + time.monotonic() - began
        report(tally)
        if time.monotonic() - saved > SAVE_EVERY_SECONDS:
            tally.save(save)
            saved = time.monotonic()
    tally.save(save)


def one_episode(subject: Subject, tally: Tally, seed: Sequence[int]) -> None:
    """Draw, run, compare."""
    rng = np.random.default_rng(list(seed))
    numbers = []
    for _ in range(int(rng.integers(2, 7 if subject.is_real else 17))):
        size = tally.pools[subject.key]
        is_new = size == 0 or rng.random() < (REAL_NEW_SHARE if subject.is_real else NEW_SHARE)
        numbers.append(size if is_new else int(rng.integers(size)))
        tally.pools[subject.key] += is_new
    episode = draw_episode(subject, int(rng.integers(2**31)), numbers)
    is_captured = bool(rng.random() < CAPTURE_SHARE)
    layers = captured_layers(subject)
    trace = run(
        subject.model,
        episode.requests,
        **subject.settings,
        **episode.settings,
        drafter=episode.drafter,
        capture="STCZ" if is_captured else None,
        layers=layers,
        progress=False,
    )
    _check_schedule(subject, tally, trace)
    for request_id, number in enumerate(episode.pool_numbers):
        if number is not None:
            _compare(subject, tally, trace, request_id, number, layers, is_captured)
    tally.episodes += 1
    _count(tally, trace, episode)


def captured_layers(subject: Subject) -> tuple[int, ...]:
    """All of a tiny model's layers, three of the real one's: the first, the middle, the last."""
    n = subject.model.n_layers
    return (0, n // 2, n - 1) if subject.is_real else tuple(range(n))


def _check_schedule(subject: Subject, tally: Tally, trace: Trace) -> None:
    """The oracle's kept answers hold for one schedule; a resumed proof on another machine starts over."""
    known = tally.fingerprints.setdefault(subject.key, trace.fingerprint)
    if known != trace.fingerprint:
        differing = sorted(k for k in known if known[k] != trace.fingerprint.get(k))
        raise ValueError(
            f"the proof in this directory was begun under another schedule ({', '.join(differing)}); give another "
            "directory, or delete this one"
        )


def _compare(
    subject: Subject, tally: Tally, trace: Trace, request_id: int, number: int, layers: object, is_captured: bool
) -> None:
    request = draw_request(subject, number)
    key = f"{subject.key} {number}"
    if key not in tally.answers:
        tally.answers[key] = ask(subject, request, layers)
        tally.distinct[subject.key] += len(tally.answers[key].tokens)
        third_party(subject, tally, request, tally.answers[key])
    want, got = tally.answers[key], answer_of(trace, request_id)
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


def third_party(subject: Subject, tally: Tally, request: Request, answer: Answer) -> None:
    """In float32 a greedy answer is also Hugging Face's own, from a copy of the model that we never touched."""
    sampling = request.sampling
    assert sampling is not None
    if subject.plain_family is None or subject.dtype != "float32" or not sampling.is_greedy or not sampling.is_plain:
        return
    from cacheprobe.models.tiny import tiny_model

    family, width = subject.plain_family
    plain = tiny_model(family, torch.float32, window=width)
    ids = torch.tensor([list(request.prompt)])
    stops = list(sampling.stop_token_ids or ()) or None
    with torch.inference_mode():
        out = plain.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=sampling.max_new_tokens,
            eos_token_id=stops, pad_token_id=0,
        )  # fmt: skip
    theirs = tuple(out[0, ids.shape[1] :].tolist())
    tally.counts["third_party_tokens"] += len(theirs)
    if theirs != answer.tokens:
        tally.differences.append(f"{subject.key}: Hugging Face says {theirs}, the oracle {answer.tokens}")


def _count(tally: Tally, trace: Trace, episode: Episode) -> None:
    inner = episode.drafter.inner if isinstance(episode.drafter, Corrupted) else episode.drafter
    altered = episode.drafter.altered if isinstance(episode.drafter, Corrupted) else set()
    events = trace.event_table
    rejected = events[events.num_rolled_back.fillna(0) > 0]
    for row in rejected.itertuples():
        is_injected = (row.request_id, row.draft_start + row.num_accepted) in altered
        is_fast_path = inner is None or inner.name == "fast_path"
        kind = "injected" if is_injected else "natural" if is_fast_path else "other_drafters"
        tally.counts[f"rollbacks_{kind}"] += 1
    tally.counts["preemptions"] += len(trace.meta["preemptions"])
    tally.counts["captured_episodes"] += bool(trace.store.sites)
    tally.counts["tokens_of_neighbours"] += sum(
        len(trace.tokens[i]) for i, number in enumerate(episode.pool_numbers) if number is None
    )
    name = "none" if inner is None else inner.name
    tally.counts[f"episodes_drafter_{name}"] += 1
