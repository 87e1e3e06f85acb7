"""Answers are taken as they follow the prompt, unknown words are refused, and answers of several tokens are scored
whole. The right numbers come from whole forwards of transformers without a cache, with hooks for the patches."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.tasks import Example, Question
from tests.by_hand import changed, forward, generated
from tests.reported.small_tokenizers import llama_like, whole_words
from tests.tiny import hf_model

PROMPT, OTHER = "The coin is heads. Alice flips it, it is", "The coin is tails. Alice flips it, it is"
HEADS, TAILS, NOT = 6, 7, 12
"""Ids of ▁heads, ▁tails and ▁not in `llama_like`."""


@cache
def live() -> torch.nn.Module:
    return copy.deepcopy(hf_model())


@cache
def model() -> object:
    one = cp.load_model(copy.deepcopy(live()))
    one.tokenizer = llama_like()
    return one


def ids_of(text: str) -> list[int]:
    return llama_like()(text, add_special_tokens=False).input_ids


def nats_of(prompt: Sequence[int], answer: Sequence[int], hook: "Callable | None" = None, layer: int = 0) -> float:
    """The sum of the log-probabilities of an answer's tokens after a prompt."""
    with changed(live().model.layers[layer], hook or (lambda states: None)):
        logits = forward(live(), [*prompt, *answer])[0].double().log_softmax(-1)
    return sum(float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(answer))


def put(positions: Sequence[int], states: Tensor) -> Callable[[Tensor], None]:
    """Replaces what leaves a block at some positions by these states."""
    return lambda left: left[0].__setitem__(list(positions), states)


GRIDS = {
    "activation": lambda **given: cp.patching.activation(model(), PROMPT, OTHER, progress=False, **given),
    "prefix": lambda **given: cp.patching.prefix(model(), PROMPT, OTHER, progress=False, **given),
    "attribution": lambda **given: cp.patching.attribution(model(), PROMPT, OTHER, progress=False, real=False, **given),
}


def test_a_leading_space_belongs_to_the_word() -> None:
    grid = GRIDS["activation"](answer=(" heads", " tails"), layers=[0])
    assert grid.meta["answer_ids"] == [HEADS, TAILS]
    same = GRIDS["activation"](
        answer=("heads", "tails"), layers=[0]
    )  # which would be glued to "is", so words of their own
    assert same.meta["answer_ids"] == [HEADS, TAILS] and same.table.equals(grid.table)


def test_after_a_bracket_the_word_has_no_space() -> None:
    grid = cp.patching.activation(
        model(), f"{PROMPT} (", f"{OTHER} (", answer=("heads", "tails"), layers=[0], progress=False
    )
    tokens = llama_like().convert_ids_to_tokens(grid.meta["answer_ids"])
    assert tokens == ["heads", "tails"]


def everywhere(answer: object) -> list[Callable[[], object]]:
    """Every function that takes an answer or a token."""
    trace = cp.run(model(), PROMPT, capture="STC", window=1, max_new_tokens=2, progress=False)
    pair = (answer, HEADS)
    return [
        *(lambda kind=kind: GRIDS[kind](answer=pair, layers=[0]) for kind in GRIDS),
        lambda: cp.patching.causal_tracing(model(), PROMPT, [1], answer=answer, samples=1, progress=False),
        lambda: cp.analysis.answer_logprobs(model(), PROMPT, [answer]),
        lambda: cp.analysis.attribution(trace, 0, 3, token=answer),
        lambda: cp.gradients(model(), PROMPT, cp.analysis.token_logprob(answer), progress=False),
        lambda: cp.gradients(model(), PROMPT, cp.analysis.logit_difference(HEADS, answer), progress=False),
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (" zebra", "the tokenizer does not know all of ' zebra', whose tokens read '<unk>'"),
        ("zebra", "the tokenizer does not know all of 'zebra'"),
        (" heads zebra", "the tokenizer does not know all of ' heads zebra'"),
        (5.7, "a token id must be a whole number of at least 0, got 5.7"),
        (True, "a token id must be a whole number of at least 0, got True"),
        (b"heads", "a token id must be a whole number of at least 0, got b'heads'"),
        (97, r"token ids below 97, got \[97\]"),
        ("", "'' has no token"),
    ],
)
def test_what_is_no_answer_is_refused_everywhere(answer: object, message: str) -> None:
    for call in everywhere(answer):
        with pytest.raises((ValueError, TypeError), match=f"{message}|violates type hint"):  # if calls are checked
            call()


def test_an_unknown_word_of_a_tokenizer_without_a_name_for_it_is_refused() -> None:
    words = cp.load_model(copy.deepcopy(hf_model()))
    words.tokenizer = whole_words()
    with pytest.raises(ValueError, match="does not know all of ' zebra', whose tokens read '<unk>'"):
        cp.analysis.answer_logprobs(words, "The coin is", [" zebra"])
    assert cp.analysis.answer_logprobs(words, "The coin is", [" heads", "tails"]).token_ids.tolist() == [[4], [5]]


def test_the_remedy_for_a_joined_answer_works() -> None:
    with pytest.raises(ValueError, match="joins 'heads' to the prompt's last token; write ' heads'"):
        cp.analysis.answer_logprobs(model(), f"{PROMPT} ", ["heads"])
    assert len(cp.analysis.answer_logprobs(model(), f"{PROMPT} ", [" heads"]))


def test_answers_of_a_task_are_never_scored_as_unknown() -> None:
    def example(answers: tuple[str, ...]) -> Example:
        return Example(Question(PROMPT, answers[0], answers, (), (), ()))

    assert example((" heads", " tails")).answer_token_ids(llama_like()) == (HEADS, TAILS)
    with pytest.raises(ValueError, match="does not know all of ' zebra'"):
        example((" zebra", " tails")).answer_token_ids(llama_like())
    trace = cp.run(model(), [example((" zebra", " tails"))], window=1, max_new_tokens=2, progress=False)
    assert trace.meta["behaviour"]["answer_mass"] is None


def test_whole_answers_are_scored_by_the_sum_over_their_tokens() -> None:
    given = [" heads", " not heads", (NOT, TAILS), TAILS]
    table = cp.analysis.answer_logprobs(model(), [PROMPT, ids_of(OTHER)], given)
    tokens = [[HEADS], [NOT, HEADS], [NOT, TAILS], [TAILS]]
    assert [*map(list, table.token_ids)] == tokens * 2 and table.prompt.tolist() == [0] * 4 + [1] * 4
    wanted = [nats_of(ids_of(prompt), ids) for prompt in (PROMPT, OTHER) for ids in tokens]
    assert table.logprob_nats.tolist() == pytest.approx(wanted, abs=1e-4)
    total = math.log(sum(map(math.exp, wanted[:4])))
    assert table.share[:4].tolist() == pytest.approx([math.exp(nats - total) for nats in wanted[:4]], abs=1e-4)


def test_the_answers_of_an_example_may_begin_alike() -> None:
    question = Question(PROMPT, " not heads", (" not heads", " not tails"), (), (), ())
    with pytest.raises(ValueError, match="with the same token .* cp.analysis.answer_logprobs scores whole answers"):
        Example(question).answer_token_ids(llama_like())
    table = cp.analysis.answer_logprobs(model(), [Example(question)])
    assert table.answer.tolist() == [" not heads", " not tails"] and table.is_right.tolist() == [True, False]
    wanted = [nats_of(ids_of(PROMPT), ids) for ids in ([NOT, HEADS], [NOT, TAILS])]
    assert table.logprob_nats.tolist() == pytest.approx(wanted, abs=1e-4)


LONG = dict(answer=(" not tails", " heads"))
PAIR = ([NOT, TAILS], [HEADS])


def difference(prompt: Sequence[int], hook: "Callable | None" = None, layer: int = 0) -> float:
    first, second = (nats_of(prompt, ids, hook, layer) for ids in PAIR)
    return first - second


@pytest.mark.parametrize("kind", ["activation", "prefix"])
def test_a_grid_of_longer_answers_is_that_of_whole_forwards(kind: str) -> None:
    grid = GRIDS[kind](**LONG, layers=[0, 1])
    clean, corrupt = ids_of(PROMPT), ids_of(OTHER)
    high, low = difference(clean), difference(corrupt)
    assert grid.meta["answer_ids"] == [[NOT, TAILS], HEADS] and grid.meta["answer_tokens"] == [" not tails", " heads"]
    assert grid.meta["clean_logit_difference"] == pytest.approx(high, abs=1e-4)
    for cell in grid.table.itertuples():
        positions = [cell.position] if kind == "activation" else list(range(cell.position + 1))
        hook = put(positions, forward(live(), clean)[1][cell.layer][positions])
        wanted = difference(corrupt, hook, cell.layer)
        assert cell.logit_difference == pytest.approx(wanted, abs=2e-4), cell
        assert cell.nld == pytest.approx((wanted - low) / (high - low), abs=2e-4 / abs(high - low))
        assert cell.logprob_nats == pytest.approx(nats_of(corrupt, PAIR[0], hook, cell.layer), abs=2e-4)


def test_attribution_patching_of_longer_answers_is_the_gradient() -> None:
    """By central differences along each position's change, on the way from the corrupted run to the clean one."""
    grid = GRIDS["attribution"](**LONG, layers=[1], steps=2)
    clean, corrupt = (forward(live(), ids_of(text))[1][1].double() for text in (PROMPT, OTHER))
    double = copy.deepcopy(hf_model()).double()

    def value(states: Tensor) -> float:
        """The difference of the answers with the prompt's states of block 1, in float64."""
        total = 0.0
        for sign, ids in ((1, PAIR[0]), (-1, PAIR[1])):
            with changed(double.model.layers[1], put(range(len(states)), states)):
                logits = forward(double, [*ids_of(OTHER), *ids])[0].log_softmax(-1)
            total += sign * sum(float(logits[len(states) - 1 + i, token]) for i, token in enumerate(ids))
        return total

    shares = [0.25, 0.75]
    for cell in grid.table.itertuples():
        slopes = []
        for share in shares:
            at, move = corrupt + share * (clean - corrupt), torch.zeros_like(corrupt)
            move[cell.position] = 1e-2 * (clean - corrupt)[cell.position]
            slopes.append((value(at + move) - value(at - move)) / 2e-2)
        wanted = sum(slopes) / len(slopes)
        assert cell.estimated_difference == pytest.approx(wanted, abs=1e-3, rel=1e-3), cell


def test_causal_tracing_of_a_longer_answer_multiplies_probabilities() -> None:
    grid = cp.patching.causal_tracing(
        model(), PROMPT, "coin", answer=" not tails", samples=1, layers=[1], noise=1e-6, progress=False
    )
    wanted = math.exp(nats_of(ids_of(PROMPT), PAIR[0]))
    assert grid.meta["clean_probability"] == pytest.approx(wanted, rel=1e-3)
    assert grid.table.probability.tolist() == pytest.approx([wanted] * len(grid.table), rel=1e-2)  # hardly any noise
    assert grid.meta["answer_ids"] == [[NOT, TAILS]] and not grid.table.is_top.any()
    likely = dict(answer=generated(live(), ids_of(PROMPT), 2), samples=1, layers=[1], noise=1e-6, progress=False)
    assert cp.patching.causal_tracing(model(), PROMPT, "coin", **likely).table.is_top.all()


def test_a_stored_grid_of_longer_answers_resumes(tmp_path) -> None:
    first = GRIDS["activation"](**LONG, layers=[0], store=tmp_path / "cells")
    assert GRIDS["activation"](**LONG, layers=[0], store=tmp_path / "cells").table.equals(first.table)
    with pytest.raises(ValueError, match="cells of another grid: answer is"):
        GRIDS["activation"](answer=(" heads", " tails"), layers=[0], store=tmp_path / "cells")


def test_a_number_of_one_token_takes_no_longer_answer() -> None:
    trace = cp.run(model(), PROMPT, capture="STC", window=1, max_new_tokens=2, progress=False)
    with pytest.raises(ValueError, match=r"' not heads' is 2 tokens, .* give one of the ids \[12, 6\]"):
        cp.analysis.attribution(trace, 0, 3, token=" not heads")
    both = cp.analysis.attribution(trace, 0, 3, token=[" heads", TAILS])
    assert both.token_id.unique().tolist() == [HEADS, TAILS]


# -- the subject of causal tracing


def test_the_subjects_tokens_are_found_in_the_prompt() -> None:
    tokens = llama_like().convert_ids_to_tokens(ids_of(PROMPT))
    for subject, wanted in (("coin", ["▁coin"]), ("it", ["▁it", "▁it"]), ("The coin", ["▁The", "▁coin"]),
                            (" Alice flips ", ["▁Alice", "▁flips"])):  # fmt: skip
        grid = cp.patching.causal_tracing(model(), PROMPT, subject, samples=1, layers=[0], progress=False)
        assert [tokens[at] for at in grid.meta["subject"]] == wanted
        by_hand = [at for at, token in enumerate(tokens) if token in wanted]
        same = cp.patching.causal_tracing(model(), PROMPT, by_hand, samples=1, layers=[0], progress=False)
        assert same.table.equals(grid.table)
    ids = [1, *ids_of(PROMPT)]  # a start token moves the positions
    grid = cp.patching.causal_tracing(model(), ids, "coin", samples=1, layers=[0], progress=False)
    assert [ids[at] for at in grid.meta["subject"]] == [ids_of("coin")[0]]


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("coi", "the subject 'coi' does not stand in the prompt as words of its own"),
        ("Bob", "the subject 'Bob' does not stand in the prompt as words of its own: 'The coin is heads"),
        ("", "the subject '' does not stand in the prompt"),
        ([1.5], "a position must be a whole number, got 1.5"),
        ([99], "position 99 lies outside the prompt"),
        ([], "there is no position"),
    ],
)
def test_a_subject_that_is_not_there_is_refused(subject: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{message}|violates type hint"):  # if calls are checked
        cp.patching.causal_tracing(model(), PROMPT, subject, samples=1, progress=False)


def test_one_position_is_a_subject() -> None:
    one, listed = (cp.patching.causal_tracing(model(), PROMPT, at, samples=1, progress=False) for at in (1, [1]))
    assert one.table.equals(listed.table)
