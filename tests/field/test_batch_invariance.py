"""The scenarios of vLLM's batch-invariance suite over `cp.run`: a needle, log-probabilities, and a failing control; and
the modes of SGLang's determinism test over `cp.run` and `cp.stream`: single, mixed and prefix."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product

import pytest

import cacheprobe as cp
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.models.base import CachedLM
from tests.field.subjects import SETTINGS, Answer, answer, near_tied, random_prompt, sampling, smollm2

pytestmark = pytest.mark.determinism

MODELS = {"float32": lambda: near_tied("float32"), "bfloat16": lambda: near_tied("bfloat16")}
DRAFTERS = {"undrafted": None, "drafted": cp.drafters.NGram(min_ngram=1)}
NUM_TRIALS, LARGEST_BATCH, NEW_TOKENS = 2, 8, 10
NUM_PROMPTS = 12

QUICK = [("float32", "undrafted", 0.6), ("bfloat16", "drafted", 0.6)]
"""The needle's cases that `make test` runs; the others are slow."""
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
    for case in product(("float32", "bfloat16"), DRAFTERS, (0.0, 0.6))
]


@pytest.mark.parametrize(("name", "drafter", "temperature"), CASES)
def test_needle_gets_the_same_answer_alone_and_among_random_requests(
    name: str, drafter: str, temperature: float
) -> None:
    _try_needle(MODELS[name](), DRAFTERS[drafter], temperature, NUM_TRIALS, LARGEST_BATCH)


@pytest.mark.slow
def test_needle_gets_the_same_answer_in_a_real_model() -> None:
    _try_needle(smollm2(), None, 0.0, num_trials=1, largest_batch=6)


def _try_needle(
    model: CachedLM, drafter: Drafter | None, temperature: float, num_trials: int, largest_batch: int
) -> None:
    """The needle is deterministic; some of the requests around it are, and the others are decoded unverified."""
    draw = random.Random(12345)
    chosen = sampling(temperature, NEW_TOKENS)
    needle = random_prompt(draw, model, 5, 9)
    alone = _run(model, [needle], chosen, [0], drafter)[0]
    for trial in range(num_trials):
        size = draw.randint(largest_batch // 2, largest_batch)
        place = draw.randrange(size)
        prompts = [needle if i == place else random_prompt(draw, model, 2, 60) for i in range(size)]
        verified = {place, *(i for i in range(size) if draw.random() < 0.5)}
        among = _run(model, prompts, chosen, sorted(verified), drafter)[place]
        assert among == alone, f"trial {trial}: the needle at place {place} of {size} got another answer"


def _run(
    model: CachedLM,
    prompts: list[list[int]],
    chosen: cp.SamplingParams,
    deterministic: Sequence[int],
    drafter: Drafter | None = None,
    capture: str | None = "STCZ",
) -> list[Answer]:
    trace = cp.run(
        model, prompts, sampling=chosen, deterministic=list(deterministic), drafter=drafter, capture=capture, **SETTINGS
    )
    return [answer(trace, i) for i in range(len(prompts))]


# -- SGLang's modes: batches grow from one request to many, and every prompt has one answer over all batches

LENGTHS = (1, 17, 40, 71)
"""Tokens of the prefixes: below, at about and above the chunks in which prompts are read."""

Prompts = list[list[int]]
Generate = Callable[[CachedLM, Prompts, cp.SamplingParams], list[tuple[int, ...]]]


def generate_by_run(model: CachedLM, prompts: Prompts, chosen: cp.SamplingParams) -> list[tuple[int, ...]]:
    trace = cp.run(model, prompts, sampling=chosen, deterministic=True, capture=None, **SETTINGS)
    return [tuple(trace.committed(i)) for i in range(len(prompts))]


def generate_by_stream(model: CachedLM, prompts: Prompts, chosen: cp.SamplingParams) -> list[tuple[int, ...]]:
    """Puts the streamed pieces together; the trace at the end must agree with them."""
    settings = {name: value for name, value in SETTINGS.items() if name != "progress"}
    stream = cp.stream(model, prompts, sampling=chosen, deterministic=True, **settings)
    said: dict[int, tuple[int, ...]] = defaultdict(tuple)
    for piece in stream:
        said[piece.request_id] += piece.token_ids
    trace = stream.trace()
    assert [list(said[i]) for i in range(len(prompts))] == [trace.committed(i) for i in range(len(prompts))]
    return [said[i] for i in range(len(prompts))]


def single(model: CachedLM, draw: random.Random) -> list[Prompts]:
    prompt = random_prompt(draw, model, 7, 7)
    return [[prompt] * size for size in range(1, 7)]


def mixed(model: CachedLM, draw: random.Random) -> list[Prompts]:
    """Two short prompts and a long one."""
    short, other, long = (random_prompt(draw, model, n, n) for n in (6, 11, LENGTHS[-1]))
    batches = []
    for size in range(1, 7):
        num_long = draw.randint(1, 3) if size > 3 else 0
        num_short = draw.randint(1, size - num_long)
        batches.append([short] * num_short + [other] * (size - num_long - num_short) + [long] * num_long)
    return batches


def prefixes(model: CachedLM, draw: random.Random, num_trials: int = 6) -> list[Prompts]:
    """Prompts that begin alike."""
    long = random_prompt(draw, model, LENGTHS[-1], LENGTHS[-1])
    prompts = [long[:length] for length in LENGTHS]
    return [[draw.choice(prompts) for _ in range(size)] for size in range(1, num_trials + 1)]


QUICK_MODES = [(single, "run", 0.0), (mixed, "stream", 0.8), (prefixes, "run", 0.0)]
CALLS = {"run": generate_by_run, "stream": generate_by_stream}
MODES = [
    pytest.param(mode, *call, marks=[] if (mode, *call) in QUICK_MODES else [pytest.mark.slow])
    for mode, call in product((single, mixed, prefixes), product(CALLS, (0.0, 0.8)))
]


@pytest.mark.parametrize(("mode", "call", "temperature"), MODES)
def test_a_prompt_has_one_answer_in_batches_of_growing_size(
    mode: Callable[[CachedLM, random.Random], list[Prompts]], call: str, temperature: float
) -> None:
    model = near_tied("bfloat16")
    _one_answer_each(CALLS[call], model, temperature, mode(model, random.Random(2)))


def _one_answer_each(generate: Generate, model: CachedLM, temperature: float, batches: list[Prompts]) -> None:
    """Fails unless each prompt has the same answer wherever it stands in whichever batch."""
    answers: dict[tuple[int, ...], set[tuple[int, ...]]] = defaultdict(set)
    for batch in batches:
        for prompt, said in zip(batch, generate(model, batch, sampling(temperature, NEW_TOKENS)), strict=True):
            answers[tuple(prompt)].add(said)
    for prompt, given in answers.items():
        assert len(given) == 1, f"{len(given)} answers to the prompt of {len(prompt)} tokens: {sorted(given)}"
