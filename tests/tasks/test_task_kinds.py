"""What is particular to each task beside the coin flip: its words by hand, its settings and its errors."""

import re
from collections import Counter
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheprobe.tasks import (
    NAMES,
    Boxes,
    CoinFlip,
    CoinFlipSparse,
    CoinFlipWei,
    Example,
    Permutations,
    TwoCoins,
    Variables,
    accuracy_by,
    annotate,
    answer_token_ids,
    mixed,
    word_tokenizer,
)
from cacheprobe.tasks.coin_flip_wei import wei_question
from cacheprobe.tasks.drawing import FILLERS
from cacheprobe.tasks.permutations import group_question, parity
from cacheprobe.tasks.variables import variables_question


@given(st.lists(st.permutations("abc"), min_size=1, max_size=5))
def test_no_update_loses_a_value(orders):
    """Different starts end differently, so every value of every variable stays as likely as it was."""
    events = [(one, other) for one, other, _ in orders]
    ends = {variables_question(start, events, "a", 3).states[-1] for start in product(range(3), repeat=3)}
    assert len(ends) == 27


def test_variables_are_asked_of_alike_with_the_question_first():
    last, first = (Variables(question_first=first).examples(20, seed=6) for first in (False, True))
    assert [(e.events, e.states, e.answer) for e in last] == [(e.events, e.states, e.answer) for e in first]
    assert {e.question.text.split("What is ")[1][0] for e in last} == {"a", "b", "c"}
    pairs = {event for e in last for event in e.events}
    assert pairs == set(permutations("abc", 2))


def test_the_word_problem_by_hand():
    """231 takes 1 to 2, 2 to 3, 3 to 1; then 132 takes 2 to 3 and 3 to 2."""
    question = group_question(["231", "132"])
    assert (question.text, question.states, question.answer) == ("231 132 A:", ("231", "321"), " 321")
    assert question.answers == (" 123", " 132", " 213", " 231", " 312", " 321")
    other_way = group_question(["132", "231"])
    assert other_way.states[-1] == "213"


def test_parity_is_that_of_the_swaps():
    for order in map("".join, permutations("12345")):
        assert (-1) ** parity(order) == round(np.linalg.det(np.eye(5)[[int(one) - 1 for one in order]]))
    for example in Permutations(wording="group", elements=5, steps=6).examples(20):
        actions = [example.states[0], *example.events]
        assert parity(example.states[-1]) == sum(map(parity, actions)) % 2


def test_jitter_moves_the_words_and_nothing_else():
    for kind in (Permutations, Variables):
        still, moved = (kind(jitter=jitter).examples(30, seed=2) for jitter in (0, 5))
        for one, other in zip(still, moved, strict=True):
            words = [word for word in other.prompt.replace(".", " .").split() if word not in FILLERS]
            assert " ".join(words) == one.prompt.replace(".", " .")
            assert (one.states, one.events) == (other.states, other.events)
        lengths = Counter(len(e.prompt.split()) for e in moved)
        assert len(lengths) > 5


def test_two_coins_tell_one_story_with_the_question_first_and_last():
    last, first = (TwoCoins(people=5, question_first=first).examples(40, seed=3) for first in (False, True))
    assert [(e.events, e.states, e.answer) for e in last] == [(e.events, e.states, e.answer) for e in first]
    assert {coin for e in last for _, coin, _ in e.events} == {"red", "blue"}
    starts = Counter(e.states[0] for e in TwoCoins(people=5).examples(800))
    assert len(starts) == 4 and all(150 < count < 250 for count in starts.values())


def test_wei_is_worded_as_published():
    question = wei_question([("Ka", True), ("Sherrie", False)])
    expected = (
        "Q: A coin is heads up. Ka flips the coin. Sherrie does not flip the coin. Is the coin still heads up?\nA:"
    )
    assert (question.text, question.answer, question.states) == (expected, " no", ("heads", "tails", "tails"))
    with pytest.raises(ValueError, match="at least one event"):
        wei_question([])


def test_wei_flips_as_the_coin_flip_does():
    coins = CoinFlip(people=3, initial="heads", shots=2).examples(10, seed=4)
    weis = CoinFlipWei(people=3, shots=2).examples(10, seed=4)
    assert [(e.events, e.states) for e in coins] == [(e.events, e.states) for e in weis]
    assert [shot.events for e in coins for shot in e.shots] == [shot.events for e in weis for shot in e.shots]
    assert all((e.answer == " yes") == (e.states[-1] == "heads") for e in weis)
    assert weis[0].prompt.count("\nA: ") == 2 and weis[0].prompt.count("\n\nQ: ") == 2


@pytest.mark.parametrize("chunk", [5, 7, 8, 16])
@pytest.mark.parametrize("density", [0.05, 0.25, 1, 0.4])
def test_the_share_of_chunks_that_say_something_is_exact(density, chunk):
    task = CoinFlipSparse(people=4, density=density, chunk=chunk)
    tokenizer = word_tokenizer(task.vocabulary())
    for example in task.examples(5, seed=2):
        found = annotate(example, tokenizer, chunk)
        assert found.token_ids[0] != tokenizer.pad_token_id
        speaking = [len(thought) > 1 for thought in found.thoughts]
        opening, closing = {5: (2, 2), 7: (1, 2)}.get(chunk, (1, 1))  # 6 tokens each, and 7 leaves no room for words
        story = speaking[opening : len(speaking) - closing]
        assert sum(speaking) == sum(story) == 4 and len(story) == round(4 / density)
        assert all(len(thought) <= 2 for thought in found.thoughts)


def test_operations_stand_anywhere_among_the_fillers():
    task = CoinFlipSparse(people=1, density=0.25, chunk=8)
    tokenizer = word_tokenizer(task.vocabulary())
    places = Counter()
    for example in task.examples(200):
        places[[len(thought) > 1 for thought in annotate(example, tokenizer, 8).thoughts].index(True)] += 1
    assert set(places) == {1, 2, 3, 4} and min(places.values()) > 25


def box_of(example: Example) -> int:
    """The number of the box that a question asks for."""
    return int(re.search(r"What does Box (\d+) contain", example.question.text)[1])


def affecting(example: Example) -> int:
    """The number of operations that put an object into the question's box, or take one out of it."""
    return sum(box_of(example) in (source, target) for _, _, source, target in example.events)


def test_boxes_are_scored_by_what_affects_them():
    """Copying what the box held at first is right where nothing happened to it, and seldom elsewhere."""
    examples = mixed(Boxes(), range(1, 8), n=300)
    firsts = []
    for example in examples:
        things = example.states[0].split(", ")[box_of(example) - 1].split()
        firsts.append(" " + (" and ".join(f"the {thing}" for thing in things) if things != ["nothing"] else "nothing"))
    scores = accuracy_by(examples, firsts, affecting)
    assert list(scores) == sorted(scores) and scores[0].accuracy == 1 and scores[0].num_examples > 40
    assert scores[1].accuracy == 0 and sum(score.num_examples for score in scores.values()) == 300
    right = accuracy_by(examples, [e.answer + "." for e in examples], affecting)
    assert {score.accuracy for score in right.values()} == {1.0}
    with pytest.raises(ValueError, match="got 300 and 1"):
        accuracy_by(examples, ["nothing"], affecting)


def test_every_kind_of_operation_comes_up():
    counts = Counter(event[0] for e in Boxes(steps=5).examples(100) for event in e.events)
    assert set(counts) == {"put", "remove", "move"} and min(counts.values()) > 80
    for at_most, objects in ((1, ("cat", "dog")), (2, ("ant", "cat", "dog"))):  # boxes without room
        full = Boxes(steps=3, boxes=2, at_most=at_most, objects=objects).examples(60)
        assert {event[0] for e in full for event in e.events} == {"put", "remove", "move"}


def test_first_tokens_tell_answers_apart():
    """The word tokenizer makes every one-word answer a token of its own."""
    for task in (Variables(modulus=100), Permutations(elements=5), Permutations(wording="group", elements=5)):
        (example,) = task.examples(1)
        assert len(set(example.answer_token_ids(word_tokenizer(task.vocabulary())))) == len(example.answers)
    assert answer_token_ids(word_tokenizer(CoinFlip().vocabulary()))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (CoinFlip, {"people": 0}, "people must be a whole number of at least 1, got 0"),
        (CoinFlip, {"flip_probability": 1.5}, "flip_probability must be a number from 0 to 1, got 1.5"),
        (CoinFlip, {"flip_probability": float("nan")}, "from 0 to 1, got nan"),
        (CoinFlip, {"initial": "edge"}, "unknown initial 'edge'; choose one of random, heads, tails"),
        (CoinFlip, {"initial": "heads", "flip_probability": 0}, "every answer is the same; use initial='random'"),
        (CoinFlip, {"people": 3, "names": ["Alice", "Bob"]}, "people=3 needs 3 names, got 2; give more names or fewer"),
        (CoinFlip, {"people": 2, "shots": 1, "names": ["A", "B", "C"]}, "needs 4 names, as shots take other people"),
        (CoinFlip, {"names": ["Alice", "Bob", "Alice"]}, "names must be different words"),
        (CoinFlip, {"names": "Alice"}, "names must be different words"),
        (CoinFlip, {"names": ["Alice", " Bob"]}, "names must be different words"),
        (Variables, {"variables": 27}, "variables=27 is more than there are letters; give 26"),
        (Variables, {"says": "name"}, "unknown says 'name'; choose one of value, assignment"),
        (Permutations, {"elements": 6}, "elements=6 is too many; give 2 to 5"),
        (Permutations, {"wording": "cards"}, "unknown wording 'cards'"),
        (TwoCoins, {"people": len(NAMES) + 1}, "give more names or fewer people, or distinct=False"),
        (CoinFlipSparse, {"density": 0}, "density=0 would leave no room"),
        (CoinFlipSparse, {"chunk": 5, "names": ["Mary Ann"]}, "chunk must be a whole number of at least 6, got 5"),
        (Boxes, {"objects": ["apple"]}, "objects must be two at least, got 1"),
        (Boxes, {"objects": ["tea pot", "cup"]}, "objects must be single words"),
        (Boxes, {"objects": [f"thing{i}" for i in range(99)]}, "make 161,800 answers, and every question lists them"),
    ],
)
def test_bad_settings_are_one_line_errors(kind, options, message):
    with pytest.raises(ValueError) as error:
        kind(**options)
    assert message in str(error.value) and "\n" not in str(error.value)
