"""Readers of task texts: they find the clauses and work out the states from the words alone, sharing no code."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True)
class Read:
    """states: after 0, 1, ... operations.  clauses: the words of the initial statement and of each operation."""

    states: tuple[str, ...]
    clauses: list[str]
    answer: str
    thoughts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Simulator:
    """read: a question's text and the task's settings -> what it says.  variants: settings of the task to test."""

    read: Callable[[str, dict], Read]
    variants: tuple[dict, ...]


OTHER = {"heads": "tails", "tails": "heads"}


def flipped(side: str, clause: str) -> str:
    if re.search(r" does not flip( |$)", clause):
        return side
    if not re.search(r" flips( |$)", clause):
        raise ValueError(f"who does what? {clause!r}")
    return OTHER[side]


def read_coin(text: str, settings: dict) -> Read:
    statement, story, _ = text.split(". ")
    states, clauses = [statement.split()[-1]], [statement]
    for clause in story.split(", then "):
        states.append(flipped(states[-1], clause))
        clauses.append(clause)
    return Read(tuple(states), clauses, states[-1])


def read_wei(text: str, settings: dict) -> Read:
    assert text.startswith("Q: A coin is heads up. ") and text.endswith(" Is the coin still heads up?\nA:")
    clauses = text.removeprefix("Q: ").rsplit(". ", 1)[0].split(". ")
    states = ["heads"]
    for clause in clauses[1:]:
        assert clause.endswith(" the coin")
        states.append(flipped(states[-1], clause))
    return Read(tuple(states), clauses, "yes" if states[-1] == "heads" else "no")


def read_sparse(text: str, settings: dict) -> Read:
    """Everything in small letters is meaningless, but for the words of the coin."""
    clauses, states = [], []
    for sentence in text.split(". ")[:-1]:
        if found := re.match(r"A coin's state is (heads|tails)", sentence):
            states.append(found[1])
        elif found := re.match(r"[A-Z]\w+ (flips|does not flip)", sentence):
            states.append(flipped(states[-1], found[0]))
        else:
            assert sentence == sentence.lower()
            continue
        clauses.append(found[0])
    return Read(tuple(states), clauses, states[-1])


def read_two_coins(text: str, settings: dict) -> Read:
    asked = re.search(r"What's the (red|blue) coin's state\?", text)[1]
    first = text.startswith("What's")
    assert first == settings.get("question_first", False)
    sentences = text.removeprefix(f"What's the {asked} coin's state? ").split(". ")
    assert sentences[2] == ("A:" if first else f"What's the {asked} coin's state? A:")
    words = sentences[0].split()
    red, blue = words[4], words[10]
    clauses, states = [sentences[0]], [f"{red} {blue}"]
    thoughts = [red if asked == "red" else blue] if settings.get("says") == "asked" else [states[0]]
    for clause in sentences[1].split(", then "):
        if clause.endswith(" red"):
            red, named = flipped(red, clause), "red"
        elif clause.endswith(" blue"):
            blue, named = flipped(blue, clause), "blue"
        states.append(f"{red} {blue}")
        clauses.append(clause)
        if settings.get("says") == "asked":
            thoughts.append(red if asked == "red" else blue)
        else:
            thoughts.append(f"{named} {red if named == 'red' else blue}")
    answer = red if asked == "red" else blue
    return Read(tuple(states), clauses, answer, tuple(thoughts) if settings.get("says", "both") != "both" else ())


def read_variables(text: str, settings: dict) -> Read:
    first, last = re.match(r"What is (\w)\? ", text), re.search(r"What is (\w)\? A:$", text)
    assert bool(first) == settings.get("question_first", False) != bool(last) and text.endswith(" A:")
    asked = (first or last)[1]
    sentences = text[first.end() if first else 0 :].split(". ")[:-1]
    values = {name: int(value) for name, value in re.findall(r"(\w) = (\d+)", sentences[0])}
    states, clauses, thoughts = [], [], []
    for sentence in sentences:
        if sum_of := re.match(r"(\w) = (\w) \+ (\w)", sentence):
            clauses.append(sum_of[0])
            values[sum_of[1]] = (values[sum_of[2]] + values[sum_of[3]]) % settings.get("modulus", 10)
            whole = settings.get("says") == "assignment"
            thoughts.append(f"{sum_of[1]} = " * whole + str(values[sum_of[1]]))
        else:
            clauses.append(sentence)
        states.append(" ".join(str(value) for value in values.values()))
    return Read(tuple(states), clauses, str(values[asked]), (states[0], *thoughts))


def read_permutations(text: str, settings: dict) -> Read:
    if settings.get("wording") == "group":
        clauses = re.findall(r"\d+", text)
        product, states = {i: int(c) for i, c in enumerate(clauses[0], 1)}, [clauses[0]]
        for clause in clauses[1:]:
            action = {i: int(c) for i, c in enumerate(clause, 1)}
            product = {i: action[place] for i, place in product.items()}
            states.append("".join(str(product[i]) for i in sorted(product)))
        return Read(tuple(states), clauses, states[-1])
    statement, *swaps, question = text.split(". ")
    cups = dict(zip(count(1), statement.removeprefix("The cups hold ").split(), strict=False))
    states, clauses = [" ".join(cups.values())], [statement]
    for sentence in swaps:
        swap = re.match(r"Swap (\d) and (\d)", sentence)
        one, two = int(swap[1]), int(swap[2])
        cups[one], cups[two] = cups[two], cups[one]
        states.append(" ".join(cups[i] for i in sorted(cups)))
        clauses.append(swap[0])
    asked = re.match(r"What is in cup (\d)\?", question)
    return Read(tuple(states), clauses, cups[int(asked[1])] if asked else states[-1])


def read_boxes(text: str, settings: dict) -> Read:
    statement, *story, question = text.split(". ")
    boxes = {}
    for number, content in re.findall(r"Box (\d+) contains ([^,]+)", statement):
        boxes[int(number)] = [] if content == "nothing" else [item.split()[1] for item in content.split(" and ")]

    def shown(number: int) -> str:
        return " ".join(sorted(boxes[number])) if boxes[number] else "nothing"

    states = [", ".join(shown(number) for number in boxes)]
    thoughts = list(states)
    for sentence in story:
        words = sentence.split()
        numbers = [int(word) for word in words if word.isdigit()]
        thing = words[2]
        if words[0] in ("Remove", "Move"):
            assert thing in boxes[numbers[0]]
            boxes[numbers[0]].remove(thing)
        else:
            assert words[0] == "Put" and not any(thing in content for content in boxes.values())
        if words[0] in ("Put", "Move"):
            boxes[numbers[-1]].append(thing)
            assert len(boxes[numbers[-1]]) <= settings.get("at_most", 3)
        states.append(", ".join(shown(number) for number in boxes))
        thoughts.append(", ".join(f"Box {number} {shown(number)}" for number in numbers))
    content = sorted(boxes[int(re.search(r"Box (\d+)", question)[1])])
    answer = " and ".join(f"the {thing}" for thing in content) if content else "nothing"
    return Read(tuple(states), [statement, *story], answer, tuple(thoughts))


SIMULATORS = {
    "boxes": Simulator(read_boxes, ({}, {"boxes": 3, "at_most": 1, "objects": ("cat", "dog", "ant")})),
    "coin_flip": Simulator(
        read_coin, ({}, {"initial": "tails"}, {"distinct": False, "balanced": False}, {"flip_probability": 0.1})
    ),
    "coin_flip_sparse": Simulator(read_sparse, ({}, {"density": 1, "chunk": 5}, {"density": 0.05, "chunk": 11})),
    "coin_flip_wei": Simulator(read_wei, ({}, {"balanced": False, "distinct": False})),
    "permutations": Simulator(
        read_permutations,
        (
            {},
            {"elements": 5, "asked": "all", "jitter": 3},
            {"wording": "group"},
            {"wording": "group", "elements": 5, "jitter": 2},
        ),
    ),
    "two_coins": Simulator(
        read_two_coins, ({}, {"says": "named", "question_first": True}, {"says": "asked", "distinct": False})
    ),
    "variables": Simulator(
        read_variables,
        ({}, {"modulus": 23, "says": "assignment", "variables": 5}, {"question_first": True, "jitter": 4}),
    ),
}
