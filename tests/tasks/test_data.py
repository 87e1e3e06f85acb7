"""Sets of examples: how they are drawn, kept in files and scored, and the committed ones in data/."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise, product
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheprobe.tasks import (
    Accuracy,
    CoinFlip,
    Example,
    accuracy,
    coin_question,
    load_examples,
    parse_answer,
)
from tests.tasks.test_coin_flip import CONFIGS, SENTENCE

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "coin_flip_bench.jsonl": {4: 16},
    "coin_flip_demo.jsonl": {2: 4, 3: 2, 4: 2},
    "coin_flip_eval.jsonl": {1: 50, 2: 50, 3: 50, 4: 50},
}


@settings(max_examples=60, deadline=None)
@given(CONFIGS.filter(lambda task: task.balanced), st.integers(1, 15), st.integers(0, 50))
def test_balance_is_exact(task, n, seed):
    examples = task.examples(n, seed)
    assert abs(2 * sum(e.answer == " heads" for e in examples) - n) == n % 2
    for example in examples:
        shots = [shot.answer for shot in example.shots]
        assert abs(2 * shots.count(" heads") - len(shots)) == len(shots) % 2


def test_the_order_of_answers_is_random():
    """Were example i's answer i's parity, any split into every other example would be a split by answer."""
    answers = [e.answer for e in CoinFlip().examples(4000)]
    first = answers[::2]  # of each pair, the other one has the other answer
    repeated = sum(a == b for a, b in pairwise(first))
    for count, number in ((first.count(" heads"), 2000), (repeated, 1999)):  # 3.5 standard deviations: 0.46 to 0.54
        assert abs(count - number / 2) < 3.5 * number**0.5 / 2


@pytest.mark.parametrize("balanced", [True, False])
def test_flips_are_bernoulli_and_the_initial_state_is_independent_of_them(balanced):
    examples = CoinFlip(people=3, flip_probability=0.3, balanced=balanced).examples(4000, seed=3)
    counts = Counter((e.states[0], *(flipped for _, flipped in e.events)) for e in examples)
    for initial, *flips in product(("heads", "tails"), *[(True, False)] * 3):
        expected = 2000 * prod(0.3 if flip else 0.7 for flip in flips)
        assert abs(counts[initial, *flips] - expected) < 4.5 * expected**0.5, (initial, flips)


def test_with_a_fixed_initial_state_flips_are_bernoulli_given_the_answer():
    examples = CoinFlip(people=3, flip_probability=0.3, initial="tails").examples(4000, seed=3)
    counts = Counter(tuple(flipped for _, flipped in e.events) for e in examples)
    for flips in product((True, False), repeat=3):
        weight = {f: prod(0.3 if flip else 0.7 for flip in f) for f in product((True, False), repeat=3)}
        expected = 2000 * weight[flips] / sum(w for f, w in weight.items() if sum(f) % 2 == sum(flips) % 2)
        assert abs(counts[flips] - expected) < 4.5 * expected**0.5, flips


@pytest.mark.parametrize("flip_probability", [5e-324, 1e-17, 1 - 2**-53])
def test_flips_given_the_answer_exist_at_the_edge(flip_probability):
    examples = CoinFlip(people=3, flip_probability=flip_probability, initial="heads").examples(10)
    assert sorted(e.answer for e in examples) == [" heads"] * 5 + [" tails"] * 5


@pytest.mark.parametrize("flip_probability", [0, 1])
def test_certain_flips_are_balanced_by_the_initial_state(flip_probability):
    examples = CoinFlip(people=3, flip_probability=flip_probability).examples(10)
    assert sorted(e.states[0] for e in examples) == ["heads"] * 5 + ["tails"] * 5
    assert all(flipped == flip_probability for e in examples for _, flipped in e.events)
    unbalanced = CoinFlip(people=3, flip_probability=flip_probability, initial="heads", balanced=False).examples(10)
    assert {e.answer for e in unbalanced} == {" tails" if flip_probability else " heads"}


GOOD = {
    "prompt": SENTENCE,
    "answer": " heads",
    "events": [["Alice", True], ["Bob", True]],
    "states": ["heads", "tails", "heads"],
}


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "Expecting"),
        ("", "Expecting"),
        ("[1]", "expected an object"),
        (json.dumps({**GOOD, "people": 2}), "expected an object"),
        (json.dumps({**GOOD, "prompt": SENTENCE + " "}), "prompt is"),
        (json.dumps({**GOOD, "answer": " tails"}), "answer is ' tails', but the events give ' heads'"),
        (json.dumps({**GOOD, "states": ["heads", "heads", "heads"]}), "states are"),
        (json.dumps({**GOOD, "states": []}), "unknown initial state"),
        (json.dumps({**GOOD, "events": 3}), "not iterable"),
        (json.dumps({**GOOD, "shots": [{}]}), "expected an object"),
        (b"\xff", "decode"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "set.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(ValueError, match=r"set\.jsonl, line 2: ") as error:
        load_examples(path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_empty_file_is_an_error(tmp_path):
    path = tmp_path / "set.jsonl"
    path.touch()
    with pytest.raises(ValueError, match="holds no examples"):
        load_examples(path)


@pytest.mark.parametrize(
    "text, word",
    [
        (" heads", "heads"),
        ("Tails. Not heads", "tails"),
        ("the coin is HEADS-up", "heads"),
        ("overheads, then tails", "tails"),
        ("head", None),
        ("tailspin", None),
        ("", None),
    ],
)
def test_the_first_whole_word_is_the_answer(text, word):
    assert parse_answer(text) == word


@pytest.mark.parametrize("chat", [False, True])
def test_accuracy_counts_unparsed_as_wrong(chat):
    examples = [
        Example(coin_question(initial, [("Alice", True)]), chat=chat)
        for initial in ("heads", "heads", "tails", "tails")
    ]
    score = accuracy(examples, [" tails", " heads", "no idea", "Heads!"])
    assert score == Accuracy(num_examples=4, num_correct=2, num_unparsed=1, chance=0.5)
    assert score.accuracy == 0.5 and "2 of 4" in repr(score) and "1 unparsed" in repr(score)
    with pytest.raises(ValueError, match="got 4 and 1"):
        accuracy(examples, [" tails"])
    with pytest.raises(ValueError, match="got 0 and 0"):
        accuracy([], [])


def test_impossible_counts_are_refused():
    for counts in ((0, 0, 0), (3, 4, 0), (3, 2, 2), (3, -1, 0), (3, 0, -1)):
        with pytest.raises(ValueError, match="examples cannot have"):
            Accuracy(*counts, chance=0.5)


def test_the_script_makes_the_committed_bytes(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, ROOT / "scripts/make_data.py", tmp_path], check=True, env=environment)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "data").glob("*.jsonl")}
    assert sorted(made) == sorted(committed) == sorted(SIZES)
    for name in made:
        assert made[name] == committed[name], f"data/{name} differs; run python scripts/make_data.py"


@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_balance_are_as_documented(name):
    examples = load_examples(ROOT / "data" / name)
    assert Counter(len(example.events) for example in examples) == SIZES[name]
    answers = Counter((len(example.events), example.answer) for example in examples)
    assert answers == {(people, a): n // 2 for people, n in SIZES[name].items() for a in (" heads", " tails")}


def test_no_question_stands_twice():
    prompts = [example.prompt for name in SIZES for example in load_examples(ROOT / "data" / name)]
    assert len(set(prompts)) == len(prompts) == 224


def test_the_benchmark_set_is_the_one_a_notebook_makes():
    assert load_examples(ROOT / "data/coin_flip_bench.jsonl") == CoinFlip(people=4).examples(n=16, seed=0)


def test_the_readme_speaks_of_every_file():
    readme = (ROOT / "data/README.md").read_text()
    assert "python scripts/make_data.py" in readme and "Apache-2.0" in readme
    for path in (ROOT / "data").glob("*.jsonl"):
        assert path.name in readme
