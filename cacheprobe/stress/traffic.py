"""Draws random traffic: requests, neighbours (requests that are not compared), arrival steps, drafters, and the size of
the cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.core.values import JsonDict
from cacheprobe.engine.drafters.base import DraftContext, Drafter
from cacheprobe.engine.drafters.early_exit import EarlyExit
from cacheprobe.engine.drafters.fast_path import FastPath
from cacheprobe.engine.drafters.model import DraftModel
from cacheprobe.engine.drafters.ngram import NGram
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.stress.subjects import Subject


@dataclass
class Corrupted:
    """Drafts like another drafter, with some draft tokens replaced at random, which causes rollbacks."""

    inner: Drafter
    rate: float
    rng: np.random.Generator
    altered: set[tuple[int, int]] = field(default_factory=set)
    """(request, absolute position) of every replaced draft token."""
    name: ClassVar[str] = "corrupted"

    def check(self, model: CachedLM) -> None:
        """Checks that the inner drafter supports the model. Raises: what the inner drafter's `check` raises, if not."""
        self.inner.check(model)

    def release(self, state: SequenceState) -> None:
        """Frees what the inner drafter stores for a request, by a call of its `release`."""
        self.inner.release(state)

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns the inner drafter's tokens for each request, a list of lists. In drafts of verified requests, each
        token is replaced with probability `rate`."""
        proposals = self.inner.extend(context, states)
        for state, tokens in zip(states, proposals, strict=True):
            for k in range(len(tokens)):
                position = state.last_committed_position + len(state.draft) + k + 1
                self.altered.discard((state.request_id, position))
                if state.is_verified and self.rng.random() < self.rate:
                    tokens[k] = (
                        tokens[k] + 1 + int(self.rng.integers(context.model.d_vocab - 1))
                    ) % context.model.d_vocab
                    self.altered.add((state.request_id, position))
        return proposals


_STOP_TEXTS = ("not flip", "What's", " A: ", "\n\nA")
"""Stop texts from the coin task, each more than one token: a draft may end in the middle of a stop text."""


def draw_request(subject: Subject, number: int) -> Request:
    """Returns request `number` of a subject's pool of random requests: the same in every episode, so that the slow
    reference computes it once."""
    rng = np.random.default_rng([number, *subject.traffic_key.encode()])
    vocab = subject.model.d_vocab
    length = int(rng.integers(1, 34))
    prompt = rng.integers(0, vocab, length).tolist()
    if subject.is_real:  # text, since random tokens say little about a real model
        prompt = _text_ids(subject, number)[: 4 + length]
    stop = (int(rng.integers(vocab)),) if rng.random() < 0.2 else ()
    stop_texts = (str(rng.choice(_STOP_TEXTS)),) if subject.is_real and rng.random() < 0.3 else ()
    sampling = SamplingParams(
        temperature=float(rng.choice([0.0, 0.0, 0.7, 1.5])),
        top_k=int(rng.choice([0, 0, 5])),
        top_p=float(rng.choice([1.0, 1.0, 0.8])),
        min_p=float(rng.choice([0.0, 0.0, 0.1])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.0, 1.3])),
        seed=int(rng.integers(2**40)),
        max_new_tokens=int(rng.integers(16, 65)) if subject.is_real else int(rng.integers(4, 48)),
        stop_token_ids=stop,
        stop=stop_texts,
    )
    return Request(prompt, sampling, is_deterministic=True)


def _text_ids(subject: Subject, number: int) -> list[int]:
    from cacheprobe.tasks.coin_flip import CoinFlip

    example = CoinFlip(people=3, shots=1).examples(n=2, seed=number)[number % 2]
    return list(subject.model.encode(example.prompt))


@dataclass(frozen=True)
class Episode:
    """Holds the traffic of one run: the compared requests, neighbours (requests that are not compared), and settings
    that must not change the output."""

    requests: tuple[Request, ...]
    pool_numbers: tuple[int | None, ...]
    """Number of each request in the subject's pool; None for a neighbour, whose output is not compared."""
    drafter: Drafter | None
    settings: JsonDict

    @property
    def drafter_name(self) -> str:
        """Name of the episode's drafter, without the replacement of tokens; "none" if no drafter was given."""
        inner = self.drafter.inner if isinstance(self.drafter, Corrupted) else self.drafter
        return "none" if inner is None else inner.name


def draw_episode(subject: Subject, seed: int, numbers: Sequence[int]) -> Episode:
    """Returns an Episode with the requests `numbers` of the subject's pool. Neighbours (requests that are not
    compared), order and settings are drawn from `seed`."""
    rng = np.random.default_rng(seed)
    listed: list[tuple[Request, int | None]] = [(draw_request(subject, n), n) for n in numbers]
    for _ in range(int(rng.integers(0, 2 if subject.is_real else 4))):
        neighbour = replace(draw_request(subject, int(rng.integers(2**31))), is_deterministic=False)
        listed.append((neighbour, None))
    listed = [listed[i] for i in rng.permutation(len(listed))]
    arriving = rng.random() < 0.5
    requests = tuple(
        replace(request, arrival_step=int(rng.integers(0, 60)) if arriving else 0) for request, _ in listed
    )
    drafter = draw_drafter(subject, rng)
    acceptance = "rejection" if rng.random() < 0.1 else "equality"
    if drafter is not None and acceptance == "equality":  # guarantee D3: no drafter changes a token
        requests = tuple(replace(r, is_deterministic=r.is_deterministic and rng.random() < 0.75) for r in requests)
    alone = 0.5 if subject.disagrees else 0.05
    needed = max(slots_needed(request, subject.window) for request in requests)
    settings: JsonDict = {
        "max_batch": 1 if rng.random() < alone else int(rng.integers(2, len(requests) + 2)),
        "draft_length": [None, None, "adaptive", 2][int(rng.integers(4))],
        "max_kv_tokens": int(needed * rng.uniform(1, 5)) if rng.random() < 0.3 else None,
        "acceptance": acceptance,
    }
    return Episode(requests, tuple(number for _, number in listed), drafter, settings)


def slots_needed(request: Request, window: int) -> int:
    """Returns a number of cache slots with which the request can run alone: prompt, new tokens and one window."""
    assert request.sampling is not None and request.sampling.max_new_tokens is not None
    return len(request.prompt) + request.sampling.max_new_tokens + window


def draw_drafter(subject: Subject, rng: np.random.Generator) -> Drafter | None:
    """Returns a random drafter, sometimes with replaced draft tokens; None for a run without the argument `drafter`."""
    early, draft_model = EarlyExit(layer=subject.model.n_layers - 2), subject.draft_model
    drafters = [None, FastPath(), early, NGram(), NGram() if draft_model is None else DraftModel(draft_model)]
    inner: Drafter | None = drafters[int(rng.choice(5, p=[0.3, 0.45, 0.1, 0.1, 0.05]))]
    if rng.random() < (0.2 if subject.disagrees else 0.5):  # replaced draft tokens hide natural disagreements
        return Corrupted(inner or FastPath(), float(rng.choice([0.05, 0.2, 0.6])), rng)
    return inner
