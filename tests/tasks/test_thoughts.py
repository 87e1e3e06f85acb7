"""Gold thoughts by chunk: agreement with a walk over tokens, chains by hand, pads, limits and calls."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cacheprobe.tasks import (
    CHAINS,
    FORMATS,
    Annotated,
    CoinFlip,
    Example,
    Question,
    TwoCoins,
    annotate,
    annotate_all,
    coin_question,
    mixed,
    word_tokenizer,
)
from cacheprobe.tasks.two_coins import two_coins_question
from cacheprobe.training.thinking.presets import preset_of
from tests.tasks.tokenizers import byte_pieces

ONE_OF_EACH = Example(coin_question("heads", [("Alice", True), ("Bob", False), ("Carol", True)]))


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return word_tokenizer(CoinFlip().vocabulary())


@pytest.fixture(scope="module")
def pieces() -> PreTrainedTokenizerFast:
    tokenizer = byte_pieces(["<pad>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def annotate_slowly(example: Example, tokenizer, chunk: int, form: str, num_pads: int) -> Annotated:
    """Slow twin of `annotate`: lay the tokens out one by one; look in each chunk for the operations it completes."""
    question, pad, eos = example.question, tokenizer.pad_token_id, tokenizer.eos_token_id
    encoded = tokenizer(question.text + question.answer, return_offsets_mapping=True, add_special_tokens=False)
    laid: list[tuple[int, int]] = []  # token, characters read once it is
    answer, has_space, is_shifted = [], False, False
    read = 0
    for token_id, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        has_space |= any(question.text[i] == " " for i in range(question.spans[-1][1], min(end, len(question.text))))
        if start >= len(question.text):
            answer.append(token_id)
            continue
        if has_space and not is_shifted:
            laid += [(pad, read)] * num_pads
            is_shifted = True
        read = end
        laid.append((token_id, read))
    while len(laid) % chunk:
        laid.insert(0, (pad, 0))

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    thoughts = []
    before = 0
    for first in range(0, len(laid), chunk):
        after = laid[first + chunk - 1][1]
        thought = []
        for step, (_, end) in enumerate(question.spans):
            ends_here = before < end <= after
            if form == "state" and ends_here and step > 0:
                thought += encode(question.states[step])
            elif form == "delta" and ends_here and step > 0 and question.states[step] != question.states[step - 1]:
                thought += encode(question.states[step])
            elif form in ("restate", "repeat") and end <= after:
                thought = encode(question.states[step])
        thoughts.append((*thought, eos))
        before = after
    tokens = tuple(token for token, _ in laid)
    return Annotated(tokens, tuple(thoughts), (*answer, eos), len(question.events))


@settings(max_examples=60, deadline=None)
@given(
    people=st.integers(1, 7),
    share=st.sampled_from([0, 0.3, 0.5, 1]),
    chunk=st.integers(1, 12),
    form=st.sampled_from(FORMATS),
    pads=st.lists(st.integers(0, 13), min_size=2, max_size=2),
    seed=st.integers(0, 99),
    cut=st.booleans(),
)
def test_thoughts_are_those_of_a_walk_over_the_tokens(words, pieces, people, share, chunk, form, pads, seed, cut):
    tokenizer = pieces if cut else words
    examples = CoinFlip(people=people, flip_probability=share).examples(2, seed)
    slow = [annotate_slowly(e, tokenizer, chunk, form, n) for e, n in zip(examples, pads, strict=True)]
    assert annotate_all(examples, tokenizer, chunk, form, pads) == slow
    assert [annotate(e, tokenizer, chunk, form, n) for e, n in zip(examples, pads, strict=True)] == slow


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ("operations", "heads Alice flips tails Bob does not flip tails Carol flips heads"),
        ("states", "tails tails heads"),
        (None, ""),
    ],
)
def test_chains_of_thought_by_hand(words, chain, expected):
    """Whatever the chunks and the format of thoughts are."""
    for chunk, form, num_pads in ((4, "state", 0), (7, "restate", 3), (99, "delta", 1)):
        (found,) = annotate_all([ONE_OF_EACH], words, chunk, form, [num_pads], chain=chain)
        assert words.decode(found.chain_ids).strip() == expected
        assert replace(found, chain_ids=()) == annotate(ONE_OF_EACH, words, chunk, form, num_pads)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", ["coin-flip", "variables", "s3", "s5"])
def test_a_chain_of_thought_is_in_the_vocabulary_and_ends_in_the_last_state(name, chain):
    preset = preset_of(name, "tiny")
    tokenizer = word_tokenizer(preset.vocabulary())
    for task in preset.tasks():
        examples = task.examples(8)
        for example, found in zip(examples, annotate_all(examples, tokenizer, 6, chain=chain), strict=True):
            written, states = tokenizer.decode(found.chain_ids).split(), example.question.states
            last = states[-1].split()
            assert written[-len(last) :] == last
            if chain == "states":
                assert written == " ".join(states[1:]).split()
            else:
                assert " ".join(written).startswith(" ".join(states[0].split()))


def cut_behind(marks: str) -> PreTrainedTokenizerFast:
    """Pieces of the example's text that end in one of `marks`, which stays on them."""
    splits = [pre_tokenizers.Split(mark, behavior="merged_with_previous") for mark in marks]
    pieces = pre_tokenizers.Sequence(splits).pre_tokenize_str(ONE_OF_EACH.prompt + ONE_OF_EACH.answer)
    tokens = dict.fromkeys(["<pad>", "<eos>", "heads", "tails", *(piece for piece, _ in pieces)])
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def test_pads_never_stand_before_the_last_operation():
    """Where a token holds its end and the space behind it, pads come after that token."""
    tokenizer = cut_behind(" :")
    found = annotate(ONE_OF_EACH, tokenizer, 1, pads_before_closing=2)
    shown = tokenizer.convert_ids_to_tokens(list(found.token_ids))
    last = shown.index("<pad>") - 1
    assert shown[last : last + 4] == ["flips. ", "<pad>", "<pad>", "What's "]
    assert [i for i, said in enumerate(found.thoughts) if len(said) > 1][-1] == last


def test_an_answer_must_not_be_joined_to_the_prompt():
    joined = Example(replace(ONE_OF_EACH.question, answer="heads", answers=("heads",)))
    with pytest.raises(ValueError, match="joins 'heads' to the last token of"):
        annotate(joined, cut_behind(" "), 1)


def test_what_a_question_has_to_say_takes_the_place_of_its_states(words):
    said = Question("A is heads. Bob flips. state? A:", " heads", (" heads",), ("Bob",), ("heads", "tails"),
                    ((0, 10), (12, 21)), thoughts=("heads", "Bob is tails"))  # fmt: skip
    by_form = {form: annotate(Example(said), words, 99, form).thoughts[0] for form in FORMATS}
    decoded = {form: words.decode(thought) for form, thought in by_form.items()}
    own = "Bob is tails <eos>"
    assert decoded == {"state": own, "restate": "tails <eos>", "repeat": own, "delta": own}


def test_what_a_question_has_to_say_is_repeated_in_every_chunk():
    """Of the coin that is asked about, from the statement of both coins on, whatever the other coin does."""
    task = TwoCoins(says="asked", question_first=True)
    words = word_tokenizer(task.vocabulary())
    events = (("Alice", "blue", True), ("Bob", "red", True), ("Carol", "blue", False))
    example = Example(two_coins_question(("heads", "tails"), events, "red", "asked", question_first=True))
    found = annotate(example, words, 4, "repeat")
    rows = [words.decode(found.token_ids[i : i + 4]) for i in range(0, len(found.token_ids), 4)]
    assert rows[4:] == ["tails. Alice flips", "blue, then Bob", "flips red, then", "Carol does not flip", "blue. A:"]
    said = [words.decode(thought) for thought in found.thoughts]
    assert said == [*["<eos>"] * 4, *["heads <eos>"] * 2, *["tails <eos>"] * 3]


def test_a_thought_too_long_is_named(words):
    assert annotate(ONE_OF_EACH, words, 20, max_thought=4)
    short = Example(coin_question("heads", [("Alice", True)]))
    with pytest.raises(ValueError, match=r"example 1, \"A coin's .*, chunk 1: the thought .* has 4 .* max_thought=3"):
        annotate_all([short, ONE_OF_EACH], words, 20, max_thought=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "chunk must be a whole number of at least 1, got 0"),
        ({"form": "words"}, "unknown form 'words'"),
        ({"pads_before_closing": [1, 2]}, "one number of pads_before_closing for each of 1 examples, got 2"),
        ({"pads_before_closing": [-1]}, "pads_before_closing must be a whole number of at least 0, got -1"),
        ({"max_thought": 0}, "max_thought must be a whole number of at least 1"),
        ({"examples": CoinFlip(shots=1).examples(1)}, "use examples with shots=0"),
        ({"examples": CoinFlip(chat=True).examples(1)}, "chat=False"),
        ({"examples": CoinFlip(names=["Zoe", "Zac"]).examples(1)}, "the word 'Z"),
    ],
)
def test_bad_requests_are_one_line_errors(words, options, message):
    with pytest.raises(ValueError) as error:
        annotate_all(**{"examples": [ONE_OF_EACH], "tokenizer": words, "chunk": 4, **options})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_tokenizer_must_have_pads_and_an_end(words):
    bare = PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer, pad_token="<pad>")
    with pytest.raises(ValueError, match="pad and eos tokens is needed, got pad=0 and eos=None"):
        annotate(ONE_OF_EACH, bare, 4)


def test_a_padding_call_before_changes_nothing(words):
    """Padding asked of a tokenizer stays switched on in its core until the next call."""
    before = annotate(ONE_OF_EACH, words, 4)
    words(["A", "A coin's"], padding="max_length", max_length=60, truncation=True)
    assert annotate(ONE_OF_EACH, words, 4) == before


@pytest.mark.parametrize("form", FORMATS)
def test_many_examples_are_encoded_by_as_many_calls_as_few(
    words: PreTrainedTokenizerFast, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the tokenizer costs more than all else: one for all texts, and one for each different thought."""
    encode, calls = PreTrainedTokenizerFast.__call__, 0

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return encode(*args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counted)
    examples = mixed(CoinFlip(), range(1, 11), n=200, seed=1)
    annotated = annotate_all(examples, words, 6, form)
    distinct = {state for example in examples for state in example.question.states}
    assert len(annotated) == 200 and 1 < calls <= 1 + len(distinct)
