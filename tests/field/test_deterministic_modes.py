"""The modes of SGLang's determinism test over `cp.run` and `cp.stream`: single, mixed and prefix.

In each, batches grow from one request to many, and every prompt must have one answer over all batches.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from itertools import product

import pytest

import cacheprobe as cp
from cacheprobe.models.base import CachedLM
from tests.field.subjects import SETTINGS, near_tied, random_prompt, sampling, smollm2

pytestmark = pytest.mark.determinism

NUM_TRIALS, NEW_TOKENS = 6, 10
LENGTHS = (1, 17, 40, 71)
"""Tokens of the prefixes: below, at about and above the chunks in which prompts are read."""

TokenIds = tuple[int, ...]
Generate = Callable[[CachedLM, list[list[int]], cp.SamplingParams], list[TokenIds]]


def generate_by_run(model: CachedLM, prompts: list[list[int]], chosen: cp.SamplingParams) -> list[TokenIds]:
    trace = cp.run(model, prompts, sampling=chosen, deterministic=True, capture=None, **SETTINGS)
    return [tuple(trace.committed(i)) for i in range(len(prompts))]


def generate_by_stream(model: CachedLM, prompts: list[list[int]], chosen: cp.SamplingParams) -> list[TokenIds]:
    """Puts the streamed pieces together; the trace at the end must agree with them."""
    settings = {name: value for name, value in SETTINGS.items() if name != "progress"}
    stream = cp.stream(model, prompts, sampling=chosen, deterministic=True, **settings)
    said: dict[int, TokenIds] = defaultdict(tuple)
    for piece in stream:
        said[piece.request_id] += piece.token_ids
    trace = stream.trace()
    assert [list(said[i]) for i in range(len(prompts))] == [trace.committed(i) for i in range(len(prompts))]
    return [said[i] for i in range(len(prompts))]


CALLS = {"run": generate_by_run, "stream": generate_by_stream}
QUICK = [("run", 0.0), ("stream", 0.8)]
"""What `make test` asks; the other two are slow."""
CASES = [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in product(CALLS, (0.0, 0.8))]


@pytest.mark.parametrize(("call", "temperature"), CASES)
def test_single_mode_one_prompt_in_batches_of_growing_size(call: str, temperature: float) -> None:
    model = near_tied("bfloat16")
    prompt = random_prompt(random.Random(1), model, 7, 7)
    _one_answer_each(CALLS[call], model, temperature, [[prompt] * size for size in range(1, NUM_TRIALS + 1)])


@pytest.mark.parametrize(("call", "temperature"), CASES)
def test_mixed_mode_two_short_prompts_and_a_long_one(call: str, temperature: float) -> None:
    model, draw = near_tied("bfloat16"), random.Random(2)
    short, other, long = (random_prompt(draw, model, n, n) for n in (6, 11, LENGTHS[-1]))
    batches = []
    for size in range(1, NUM_TRIALS + 1):
        num_long = draw.randint(1, 3) if size > 3 else 0
        num_short = draw.randint(1, size - num_long)
        batches.append([short] * num_short + [other] * (size - num_long - num_short) + [long] * num_long)
    _one_answer_each(CALLS[call], model, temperature, batches)


@pytest.mark.parametrize(("call", "temperature"), CASES)
def test_prefix_mode_prompts_that_begin_alike(call: str, temperature: float) -> None:
    model, draw = near_tied("bfloat16"), random.Random(3)
    _one_answer_each(CALLS[call], model, temperature, _prefix_batches(model, draw, NUM_TRIALS))


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_prefix_mode_of_a_real_model(call: str) -> None:
    batches = _prefix_batches(smollm2(), random.Random(4), 3)
    _one_answer_each(CALLS[call], smollm2(), 0.0, batches)


def test_more_than_one_answer_is_noticed() -> None:
    """The control: answers that depend on the size of the batch fail the check."""

    def by_size(model: CachedLM, prompts: list[list[int]], chosen: cp.SamplingParams) -> list[TokenIds]:
        return [(len(prompts) > 3,)] * len(prompts)

    batches = [[[1, 2]] * size for size in range(1, 6)]
    with pytest.raises(AssertionError, match="2 answers"):
        _one_answer_each(by_size, near_tied("bfloat16"), 0.0, batches)


def _prefix_batches(model: CachedLM, draw: random.Random, num_trials: int) -> list[list[list[int]]]:
    long = random_prompt(draw, model, LENGTHS[-1], LENGTHS[-1])
    prompts = [long[:length] for length in LENGTHS]
    return [[draw.choice(prompts) for _ in range(size)] for size in range(1, num_trials + 1)]


def _one_answer_each(generate: Generate, model: CachedLM, temperature: float, batches: list[list[list[int]]]) -> None:
    """Fails unless each prompt has the same answer wherever it stands in whichever batch."""
    answers: dict[TokenIds, set[TokenIds]] = defaultdict(set)
    for batch in batches:
        for prompt, said in zip(batch, generate(model, batch, sampling(temperature, NEW_TOKENS)), strict=True):
            answers[tuple(prompt)].add(said)
    for prompt, given in answers.items():
        assert len(given) == 1, f"{len(given)} answers to the prompt of {len(prompt)} tokens: {sorted(given)}"
