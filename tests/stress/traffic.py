"""Draws random traffic: requests, arrival steps, drafters, captures, interventions, cancellations, cache sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

import cacheprobe as cp
from cacheprobe.core.hook_names import ATTENTION_SITES
from cacheprobe.engine.drafters.base import DraftContext, Drafter
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from tests.stress.subjects import Subject, draft_model

STOP_TEXTS = ("not flip", "What's", " A: ", "\n\nA")
"""Stop texts from the coin task, each more than one token: a draft may end in the middle of a stop text."""


@dataclass
class Corrupted:
    """Drafts like another drafter, with some draft tokens replaced at random, which causes rollbacks."""

    inner: Drafter
    rate: float
    rng: np.random.Generator
    name: ClassVar[str] = "corrupted"

    def check(self, model: CachedLM) -> None:
        self.inner.check(model)

    def release(self, state: SequenceState) -> None:
        self.inner.release(state)

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns the inner drafter's tokens; of verified requests, each is replaced with probability `rate`."""
        proposals, vocab = self.inner.extend(context, states), context.model.d_vocab
        for state, tokens in zip(states, proposals, strict=True):
            for k in range(len(tokens)):
                if state.is_verified and self.rng.random() < self.rate:
                    tokens[k] = (tokens[k] + 1 + int(self.rng.integers(vocab - 1))) % vocab
        return proposals


@dataclass(frozen=True)
class Episode:
    """Holds the traffic of one run and its settings. cancelled: by request, the number of pieces of the stream after
    which it is cancelled."""

    requests: tuple[cp.Request, ...]
    settings: dict[str, Any]
    is_stream: bool
    cancelled: dict[int, int]

    @property
    def drafter_name(self) -> str:
        """Name of the drafter without the replacement of tokens; "none" without a drafter."""
        drafter = self.settings["drafter"]
        inner = drafter.inner if isinstance(drafter, Corrupted) else drafter
        return "none" if inner is None else inner.name


def draw_request(subject: Subject, number: int) -> cp.Request:
    """Returns a random deterministic request, fixed by the subject's model and the number."""
    rng = np.random.default_rng([number, *subject.name.encode()])
    vocab, length = subject.model.d_vocab, int(rng.integers(1, 34))
    prompt = rng.integers(0, vocab, length).tolist()
    if subject.is_real:  # text, since random tokens say little about a real model
        example = cp.tasks.CoinFlip(people=3, shots=1).examples(n=2, seed=number)[number % 2]
        prompt = list(subject.model.encode(example.prompt))[: 4 + length]
    sampling = cp.SamplingParams(
        temperature=float(rng.choice([0.0, 0.0, 0.7, 1.5])),
        top_k=int(rng.choice([0, 0, 5])),
        top_p=float(rng.choice([1.0, 1.0, 0.8])),
        min_p=float(rng.choice([0.0, 0.0, 0.1])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.0, 1.3])),
        seed=int(rng.integers(2**40)),
        max_new_tokens=int(rng.integers(2, 11 if subject.is_real else 25)),
        stop_token_ids=(int(rng.integers(vocab)),) if rng.random() < 0.2 else (),
        stop=(str(rng.choice(STOP_TEXTS)),) if subject.is_real and rng.random() < 0.3 else (),
    )
    return cp.Request(prompt, sampling, is_deterministic=True)


def draw_episode(subject: Subject, seed: Sequence[int], most_requests: int) -> Episode:
    """Returns the random choices of one episode, fixed by the subject and the seed. Request 0 is deterministic, and
    never cancelled."""
    rng = np.random.default_rng(list(seed))
    number, latest = int(rng.integers(2, most_requests + 1)), int(rng.choice([0, 0, 30]))
    requests = [
        replace(
            draw_request(subject, int(rng.integers(2**31))),
            is_deterministic=i == 0 or bool(rng.random() < 0.75),
            arrival_step=int(rng.integers(0, latest + 1)),
        )
        for i in range(number)
    ]
    lengths = [(request.prompt, request.sampling) for request in requests]
    needed = max(len(p) + s.max_new_tokens + subject.window for p, s in lengths if s is not None)  # to run alone
    heads = tuple(site for site in ATTENTION_SITES if rng.random() < 0.5)
    capture = cp.CaptureConfig(sites=str(rng.choice(["STCZ", "SZ", "S", "TC"])), heads=heads)
    is_alone = rng.random() < (0.5 if subject.disagrees else 0.05)
    is_stream = bool(rng.random() < 0.6)
    settings = {
        "drafter": draw_drafter(subject, rng),
        "capture": capture if rng.random() < 0.75 else None,
        "layers": subject.layers,
        "interventions": _interventions(subject, requests, rng) if rng.random() < 0.6 else [],
        "max_batch": 1 if is_alone else int(rng.integers(2, number + 2)),
        "draft_length": ["adaptive", "adaptive", "adaptive", 2][int(rng.integers(4))],
        "max_kv_tokens": int(needed * rng.uniform(1, 2)) if rng.random() < 0.7 else None,
        "acceptance": "rejection" if rng.random() < 0.1 else "equality",
    }
    cancelled = {i: int(rng.integers(1, 12)) for i in range(1, number) if is_stream and rng.random() < 0.4}
    return Episode(tuple(requests), settings, is_stream, cancelled)


def draw_drafter(subject: Subject, rng: np.random.Generator) -> Drafter | None:
    """Returns a random drafter, sometimes with replaced draft tokens; None for a run without the argument `drafter`."""
    kinds = ("none", "fast_path", "early_exit", "ngram", "draft_model")
    kind = str(rng.choice(kinds, p=[0.25, 0.3, 0.15, 0.15, 0.15]))
    inner: Drafter | None = None
    if kind == "fast_path":
        inner = cp.drafters.FastPath()
    elif kind == "early_exit":
        inner = cp.drafters.EarlyExit(layer=subject.model.n_layers - 2)
    elif kind == "draft_model" and not subject.is_real:
        inner = cp.drafters.DraftModel(draft_model(subject))
    elif kind != "none":
        inner = cp.drafters.NGram()
    if rng.random() < (0.2 if subject.disagrees else 0.5):  # replaced draft tokens hide natural disagreements
        return Corrupted(inner or cp.drafters.FastPath(), float(rng.choice([0.05, 0.2, 0.6])), rng)
    return inner


def _interventions(subject: Subject, requests: Sequence[cp.Request], rng: np.random.Generator) -> list[Any]:
    """Returns at most one intervention for each request: at one prompt position, or at every position."""
    made = []
    for number, request in enumerate(requests):
        site, position = str(rng.choice(["S", "T", "C", "pre"])), int(rng.integers(len(request.prompt)))
        where: dict[str, Any] = dict(request_id=number, site=site, layer=int(rng.integers(subject.model.n_layers)))
        where |= dict(positions=None if rng.random() < 0.5 else position, own_fingerprint=True)
        vector = torch.from_numpy(rng.standard_normal(subject.model.d_model) * 0.1).float()
        is_zero = site in "TC" and rng.random() < 0.5
        if rng.random() < 0.5:
            made.append(cp.interventions.zero(**where) if is_zero else cp.interventions.add(vector, **where))
    return made
