"""Scenarios of vLLM's batch-invariance suite and of SGLang's determinism test over `cp.run`: a needle among random
requests; and batches that grow, of one prompt, of mixed lengths, and of prompts that begin alike."""

import random
from collections import defaultdict
from typing import Any

import pytest

import cacheprobe as cp
from cacheprobe.models.base import CachedLM
from tests.field.subjects import near_tied, random_prompt, smollm2

pytestmark = pytest.mark.determinism

Answer = tuple[tuple[int, ...], tuple[float, ...], str]
LENGTHS = (6, 11, 17, 40, 71)
"""Tokens of prompts: below, at about and above the chunks in which prompts are read."""


def answers(model: CachedLM, prompts: list[list[int]], temperature: float, **settings: Any) -> list[Answer]:
    """Tokens, log-probabilities and digests of all captured states, with one seed for all requests: equal prompts must
    get equal answers. Window, group and prefill are left to the run's own choice."""
    sampling = cp.SamplingParams(temperature=temperature, seed=20240919, max_new_tokens=10, stop_token_ids=())
    trace = cp.run(model, prompts, sampling=sampling, capacity=128, capture="STCZ", progress=False, **settings)
    return [(tuple(trace.committed(i)), tuple(trace.logprobs(i)), trace.digest(i)) for i in range(len(prompts))]


@pytest.mark.parametrize(
    ("name", "drafter", "temperature"),
    [
        ("float32", None, 0.6),
        ("bfloat16", cp.drafters.NGram(min_ngram=1), 0.6),
        pytest.param("smollm2", None, 0.0, marks=pytest.mark.slow),
    ],
)
def test_needle_gets_the_same_answer_alone_and_among_random_requests(
    name: str, drafter: Any, temperature: float
) -> None:
    """The needle is deterministic; some of the requests around it are, and the others are decoded unverified."""
    draw, model = random.Random(12345), smollm2() if name == "smollm2" else near_tied(name)
    needle = random_prompt(draw, model, 5, 9)
    (alone,) = answers(model, [needle], temperature, deterministic=True, drafter=drafter)
    for _ in range(2):
        size = draw.randint(4, 8)
        place = draw.randrange(size)
        prompts = [needle if i == place else random_prompt(draw, model, 2, 60) for i in range(size)]
        verified = sorted({place, *(i for i in range(size) if draw.random() < 0.5)})
        assert answers(model, prompts, temperature, deterministic=verified, drafter=drafter)[place] == alone


@pytest.mark.parametrize(("mode", "temperature"), [("single", 0.0), ("mixed", 0.8), ("prefixes", 0.0)])
def test_a_prompt_has_one_answer_in_batches_of_growing_size(mode: str, temperature: float) -> None:
    draw, model = random.Random(2), near_tied("bfloat16")
    long = random_prompt(draw, model, LENGTHS[-1], LENGTHS[-1])
    kinds = {
        "single": [long[:7]],
        "mixed": [random_prompt(draw, model, n, n) for n in LENGTHS],
        "prefixes": [long[:n] for n in LENGTHS],
    }[mode]
    given: dict[tuple[int, ...], set[Answer]] = defaultdict(set)
    for size in range(1, 7):
        batch = [draw.choice(kinds) for _ in range(size)]
        for prompt, said in zip(batch, answers(model, batch, temperature, deterministic=True), strict=True):
            given[tuple(prompt)].add(said)
    assert {len(said) for said in given.values()} == {1}
