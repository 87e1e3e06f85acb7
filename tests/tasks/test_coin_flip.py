"""The coin-flip task: text, true states, shots, token states, chat, answer tokens and errors."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from cacheprobe.tasks import NAMES, CoinFlip, Example, answer_token_ids, coin_question, to_dataset
from tests.tasks.tokenizers import byte_pieces

SENTENCE = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
TEMPLATE = (
    "{{ '<s>system\nAnswer heads or tails.</s>\n' }}{% for message in messages %}"
    "{{ '<s>' + message['role'] + '\n' + message['content'] | trim + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
CONFIGS = st.builds(
    CoinFlip,
    people=st.integers(1, 6),
    flip_probability=st.sampled_from([0.1, 0.5, 0.9]),
    initial=st.sampled_from(["random", "heads", "tails"]),
    balanced=st.booleans(),
    shots=st.integers(0, 3),
)


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Adds <s> and </s> when asked."""
    tokenizer = byte_pieces(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words and punctuation, no chat template; every word it does not know, tails among them, is <unk>."""
    words = ["<unk>", "A", "coin", "'", "s", "state", "is", "heads", ".", "flips", ",", "then", "What", "the", "?", ":"]
    model = models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.fixture(scope="module")
def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Every character is a token, so both answers begin with the same one."""
    characters = {character: index for index, character in enumerate(sorted(set(SENTENCE + "tails")))}
    tokenizer = Tokenizer(models.BPE(characters, []))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def sentence_tokenizer() -> PreTrainedTokenizerFast:
    """Whole sentences are tokens, the full stop included."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(".", behavior="merged_with_previous")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def state_read_from(text: str) -> str | None:
    """Slow twin of `Rendering.state_at`: read the text from its last stated coin on, and count the flips."""
    stated = list(re.finditer(r"A coin's state is (heads|tails)", text))
    if not stated:
        return None
    story = text[stated[-1].end() :]
    if re.search(r"What's the state\? A:.*?(heads|tails).", story, re.DOTALL):  # answered, and something after it
        return None
    initial = stated[-1].group(1)
    return initial if story.count(" flips") % 2 == 0 else {"heads": "tails", "tails": "heads"}[initial]


def test_prompts_are_worded_exactly():
    two = coin_question("heads", [("Alice", True), ("Bob", True)])
    assert (two.text, two.answer, two.states) == (SENTENCE, " heads", ("heads", "tails", "heads"))
    one = coin_question("tails", [("Alice", False)])
    assert one.text == "A coin's state is tails. Alice does not flip. What's the state? A:"
    three = coin_question("heads", [("Alice", True), ("Bob", False), ("Carol", True)])
    assert "heads. Alice flips, then Bob does not flip, then Carol flips. What's" in three.text


def test_an_example_shows_what_it_asks():
    (example,) = CoinFlip(people=1, shots=2, chat=True, names=["Alice", "Bob"]).examples(1)
    assert repr(example) == f"Example({example.question.text!r} -> {example.answer!r}, shots=2, chat=True)"


def test_names_can_return_where_people_outnumber_them():
    (example,) = CoinFlip(people=1000, distinct=False).examples(1, seed=4)
    names = [name for name, _ in example.events]
    assert len(names) == 1000 and set(names) == set(NAMES)
    many = [name for e in CoinFlip(people=100, distinct=False).examples(100) for name, _ in e.events]
    assert all(60 < many.count(name) < 180 for name in NAMES)  # 10,000 draws, 1 of 88 each
    (example,) = CoinFlip(people=2, shots=2, names=["Al"], distinct=False).examples(1)
    assert example.prompt.count("Al") == 6


def test_a_question_that_contradicts_itself_is_refused():
    good = coin_question("heads", [("Alice", True)])
    with pytest.raises(ValueError, match="1 events need one state and one span more, got 1 states and 2 spans"):
        replace(good, states=("heads",))
    with pytest.raises(ValueError, match="2 states need one thought each, got"):
        replace(good, thoughts=("heads",))
    with pytest.raises(ValueError, match="spans must lie in order inside the text"):
        replace(good, spans=good.spans[::-1])
    with pytest.raises(ValueError, match="answer ' edge' is not one of"):
        replace(good, answer=" edge")


def test_shots_stand_in_front_with_their_answers():
    plain, shown = (CoinFlip(people=3, shots=shots).examples(20, seed=5) for shots in (0, 3))
    for bare, example in zip(plain, shown, strict=True):
        assert example.question == bare.question
        assert example.prompt == "".join(s.text + s.answer + "\n\n" for s in example.shots) + bare.prompt
        asked = {name for name, _ in example.events}
        assert not any(name in asked for shot in example.shots for name, _ in shot.events)


def test_every_example_has_shots_of_its_own():
    examples = CoinFlip(people=4, shots=3).examples(20)
    assert len({shot.text for example in examples for shot in example.shots}) == 60


@settings(max_examples=40, deadline=None)
@given(task=CONFIGS, seed=st.integers(0, 9))
def test_token_states_agree_with_reading_the_text(byte_tokenizer, task, seed):
    (example,) = task.examples(1, seed)
    offsets = byte_tokenizer(example.prompt, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    for (_, end), state in zip(offsets, example.states_after_tokens(byte_tokenizer), strict=True):
        assert state == state_read_from(example.prompt[:end]), example.prompt[:end]


def test_added_special_tokens_leave_the_state_alone(byte_tokenizer):
    (example,) = CoinFlip(people=3).examples(1)
    plain = example.states_after_tokens(byte_tokenizer)
    assert example.states_after_tokens(byte_tokenizer, add_special_tokens=True) == [None, *plain, example.states[-1]]


def test_a_token_that_holds_more_than_the_verb_counts(sentence_tokenizer):
    example = Example(coin_question("heads", [("Alice", True), ("Bob", False)]))
    assert example.states_after_tokens(sentence_tokenizer) == ["heads", "tails", "tails"]


def test_a_tokenizer_without_offsets_is_refused():
    """One in Python, which leaves the offsets out."""
    with pytest.raises(ValueError, match="gives no character offsets; load a fast tokenizer"):
        CoinFlip().examples(1)[0].states_after_tokens(ByT5Tokenizer())


def test_chat_renders_turns_and_keeps_the_states_in_place(byte_tokenizer):
    shot, asked = coin_question("tails", [("Alice", True)]), coin_question("heads", [("Alice", True), ("Bob", True)])
    example = Example(asked, (shot, asked), chat=True)
    text = example.prompt_text(byte_tokenizer)
    assert text == (
        "<s>system\nAnswer heads or tails.</s>\n"
        f"<s>user\n{shot.text}</s>\n<s>assistant\nheads</s>\n"
        f"<s>user\n{SENTENCE}</s>\n<s>assistant\nheads</s>\n"
        f"<s>user\n{SENTENCE}</s>\n<s>assistant\n"
    )
    rendering = example.rendering(byte_tokenizer)
    assert [text[a:b] for a, b in rendering.operations] == ["Alice flips", "Bob flips"]
    assert rendering.operations[0][0] == text.rindex("Alice")
    offsets = byte_tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    states = example.states_after_tokens(byte_tokenizer)
    assert len(states) == len(offsets) and states[-1] == "heads"
    for (_, end), state in zip(offsets, states, strict=True):
        assert state == state_read_from(text[:end]), text[:end]


def test_chat_changes_how_a_question_is_put_and_not_the_question(byte_tokenizer):
    plain, chat = (CoinFlip(people=3, shots=1, chat=chat).examples(6) for chat in (False, True))
    assert [e.question for e in plain] == [e.question for e in chat]
    assert [e.prompt for e in plain] == [e.prompt for e in chat] == [e.prompt_text() for e in plain]
    assert [e.answer for e in chat] == [e.answer.strip() for e in plain]
    assert chat[0].prompt_text(byte_tokenizer).endswith("<s>assistant\n")


def test_chat_errors_name_the_remedy(byte_tokenizer, word_tokenizer):
    (example,) = CoinFlip(chat=True).examples(1)
    for tokenizer in (None, word_tokenizer):
        with pytest.raises(ValueError, match="no chat template; use chat=False"):
            example.prompt_text(tokenizer)
    shouting = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer.backend_tokenizer,
        chat_template="{% for message in messages %}{{ message['content'] | upper }}{% endfor %}",
    )
    with pytest.raises(ValueError, match="does not show this text unchanged"):
        example.states_after_tokens(shouting)


def test_answer_tokens_are_those_that_follow_the_prompt(byte_tokenizer):
    heads, tails = answer_token_ids(byte_tokenizer)
    assert byte_tokenizer.decode([heads])[0] == " " == byte_tokenizer.decode([tails])[0]
    for chat in (False, True):
        (example,) = CoinFlip(chat=chat).examples(1)
        text = example.prompt_text(byte_tokenizer)
        ids = example.answer_token_ids(byte_tokenizer)
        assert ids == answer_token_ids(byte_tokenizer, chat=chat)
        for answer, first in zip(example.answers, ids, strict=True):
            assert answer.startswith(byte_tokenizer.decode([first]))
            assert byte_tokenizer(text + answer, add_special_tokens=False)["input_ids"].count(first) >= 1


def test_answers_that_cannot_be_told_apart_are_refused(letter_tokenizer, sentence_tokenizer, word_tokenizer):
    with pytest.raises(ValueError, match="with the same token"):
        answer_token_ids(letter_tokenizer)
    with pytest.raises(ValueError, match="joins ' heads' to the prompt's last token"):
        answer_token_ids(sentence_tokenizer)
    with pytest.raises(ValueError, match="does not know all of ' tails', whose tokens read '<unk>'"):
        answer_token_ids(word_tokenizer)


def test_bad_calls_are_one_line_errors():
    with pytest.raises(ValueError, match="unknown initial state 'edge'"):
        coin_question("edge", [("Alice", True)])
    with pytest.raises(ValueError, match="at least one event"):
        coin_question("heads", [])
    with pytest.raises(ValueError, match="num_chars=99 is outside the text; give 0 to 74"):
        Example(coin_question("heads", [("Alice", True), ("Bob", True)])).state_at(99)


def test_the_export_has_the_fields_of_the_public_set(byte_tokenizer):
    examples = CoinFlip(people=3, shots=1).examples(4)
    for row, example in zip(to_dataset(examples), examples, strict=True):
        assert row["inputs"] == example.prompt
        assert tuple(zip(row["names"], row["flips"], strict=True)) == example.events
    chat = CoinFlip(chat=True).examples(2)
    assert to_dataset(chat, byte_tokenizer)["inputs"][0].endswith("assistant\n")
    with pytest.raises(ValueError, match="no chat template"):
        to_dataset(chat)
    with pytest.raises(ValueError, match="no examples to export"):
        to_dataset([])
