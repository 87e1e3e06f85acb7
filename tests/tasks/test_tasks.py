"""What every registered task keeps: draws, balance, states, words. A task whose file is added is tested by it."""

from collections import Counter
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheprobe.core import registry
from cacheprobe.tasks import Task, annotate, encode_strictly, mixed, word_tokenizer
from tests.simulators import SIMULATORS

TASKS = dict(registry.available("tasks"))
VARIANTS = [(name, options) for name in TASKS for options in SIMULATORS[name].variants]
PINNED = {
    "boxes": "77181f4e390ce360",
    "coin_flip": "8bc19d713e582059",
    "coin_flip_sparse": "ed63d551247fd44e",
    "coin_flip_wei": "20ec0501cae3c77b",
    "permutations": "f54e7b48b3c56978",
    "two_coins": "31667a7f8723c67d",
    "variables": "0b468ca906a92031",
}
every_variant = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=[f"{n}-{o}" for n, o in VARIANTS])


def made(name: str, options: dict, operations: int = 3) -> Task:
    return TASKS[name](**options).with_operations(operations)


@every_variant
def test_the_number_of_operations_is_as_asked(name, options):
    task = TASKS[name](**options)
    for count in (1, 2, 7):
        other = task.with_operations(count)
        assert other.num_operations == count and other.with_operations(task.num_operations) == task
        assert {len(e.events) for e in other.examples(4)} == {count}
    with pytest.raises(ValueError, match="must be a whole number"):
        task.with_operations(-1)


@every_variant
def test_a_larger_set_continues_a_smaller_one(name, options):
    task = made(name, options)
    examples = task.examples(12, seed=3)
    assert made(name, options).examples(5, seed=3) == examples[:5]
    assert [task.example(index, seed=3) for index in range(12)] == examples
    assert task.examples(12, seed=4) != examples and len({example.prompt for example in examples}) > 1
    for bad in ({"n": 0}, {"n": True}, {"n": 1, "seed": False}):
        with pytest.raises(ValueError, match="must be a whole number"):
            task.examples(**bad)


@every_variant
def test_mixed_sets_are_made_of_plain_ones(name, options):
    task = made(name, options)
    plain = {count: task.with_operations(count).examples(12, seed=5) for count in (1, 2, 4)}
    found = mixed(task, (1, 2, 4), n=12, seed=5)
    assert found == [plain[len(e.events)][index] for index, e in enumerate(found)]
    assert mixed(task, (1, 2, 4), n=7, seed=5) == found[:7]
    assert mixed(task, [2], n=12, seed=5) == plain[2]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), operations=st.integers(1, 8))
@every_variant
def test_the_text_alone_gives_states_spans_and_answer(name, options, seed, operations):
    """An independent reader of the words says the same as the task."""
    for example in made(name, options, operations).examples(2, seed):
        question = example.question
        read = SIMULATORS[name].read(question.text, options)
        assert (read.states, read.thoughts) == (question.states, question.thoughts)
        assert f" {read.answer}" == question.answer and question.answer in question.answers
        assert [question.text[start:end] for start, end in question.spans] == read.clauses


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999), operations=st.integers(1, 12), chunk=st.integers(3, 12))
@every_variant
def test_its_words_are_all_it_says(name, options, seed, operations, chunk):
    tokenizer = word_tokenizer(TASKS[name](**options).vocabulary())
    for example in made(name, options, operations).examples(2, seed):
        question = example.question
        for text in (question.text, question.text + question.answer, *question.states, *question.thoughts):
            assert tokenizer.decode(encode_strictly(tokenizer, text)) == text
        assert annotate(example, tokenizer, chunk, pads_before_closing=1).num_events == operations


@every_variant
def test_its_vocabulary_is_sorted_stable_and_needed(name, options):
    task = made(name, options)
    words = task.vocabulary()
    assert list(words) == sorted(set(words)) and words == task.with_operations(9).vocabulary()
    tokenizer = word_tokenizer(words)
    examples = mixed(task, (1, 2, 5), n=450, seed=2)
    texts = [text for e in examples for q in (e.question,) for text in (q.text, q.answer, *q.states, *q.thoughts)]
    used = {token for ids in tokenizer(texts)["input_ids"] for token in ids}
    unused = set(words) - set(tokenizer.convert_ids_to_tokens(sorted(used)))
    assert not unused


@every_variant
def test_answers_are_balanced_as_promised(name, options):
    task = made(name, options)
    run = task.answers_balanced_over
    examples = task.examples(8 * run)
    for first in range(0, 8 * run, run) if run > 1 else ():
        counts = Counter(e.answer for e in examples[first : first + run])
        assert counts == {answer: run / len(examples[0].answers) for answer in examples[0].answers}


@every_variant
def test_no_guess_beats_chance(name, options):
    """Always the commonest answer: of many rare ones, some stand more often than four standard errors above theirs."""
    task = made(name, options, operations=2)
    n = 400
    commonest = Counter(e.answer for e in task.examples(n, seed=8)).most_common(1)[0][1]
    expected = task.chance * n
    assert task.chance == 1 / len(task.example(0).answers) < 1
    assert task.answers_are_even == (commonest <= expected + 4 * expected**0.5 + 4)


@pytest.mark.parametrize("name", PINNED)
def test_seeds_give_what_they_always_gave(name):
    """Stored results name a task and a seed: a change of what these draw must be meant."""
    drawn = [(e.prompt, e.answer, e.events, e.states) for e in TASKS[name]().examples(20, seed=11)]
    assert sha256(repr(drawn).encode()).hexdigest()[:16] == PINNED[name]


@pytest.mark.parametrize(
    ("options", "digest"),
    [
        ({"people": 5, "shots": 2, "flip_probability": 0.3}, "2646c3e802ab3685"),
        ({"people": 40, "initial": "heads", "flip_probability": 0.9}, "708746b7f9fcc6c6"),
        ({"people": 3, "initial": "tails", "balanced": False}, "38ac48793b0975d5"),
    ],
)
def test_seeds_of_the_coin_flip_in_other_settings(options, digest):
    drawn = [(e.prompt, e.answer, e.events, e.states) for e in TASKS["coin_flip"](**options).examples(20, seed=11)]
    assert sha256(repr(drawn).encode()).hexdigest()[:16] == digest


def test_mixed_needs_numbers_of_operations():
    task = TASKS["coin_flip"]()
    with pytest.raises(ValueError, match="operations is empty"):
        mixed(task, [], n=3)
    with pytest.raises(ValueError, match="n must be a whole number of at least 1, got 0"):
        mixed(task, n=0)


def test_mixed_sets_are_uniform_over_operations_and_balanced_in_each():
    examples = mixed(TASKS["coin_flip"](), range(1, 6), n=5000, seed=1)
    counts = Counter(len(e.events) for e in examples)
    assert all(860 < counts[k] < 1140 for k in range(1, 6))  # 2,500 pairs, a fifth each
    for k in range(1, 6):
        answers = Counter(e.answer for e in examples if len(e.events) == k)
        assert answers[" heads"] == answers[" tails"]


def test_every_task_has_an_independent_reader():
    assert sorted(SIMULATORS) == sorted(TASKS), "give the task a reader of its text in tests/simulators.py"
    for name, kind in TASKS.items():
        assert issubclass(kind, Task) and kind().with_operations(2) == replace(kind().with_operations(2)), name
