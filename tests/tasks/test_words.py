"""The word-level tokenizer: pieces, exact decoding, strictness, files and errors."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheprobe.tasks import CoinFlip, encode_strictly, load_tokenizer, save_tokenizer, word_tokenizer
from cacheprobe.tasks.words import MARKS, SPECIAL_TOKENS, split_words, vocabulary_of

TEXT = "A coin's state is heads. Alice flips, then Bob does not flip. What's the state? A:"
PIECES = "A coin's state is heads . Alice flips , then Bob does not flip . What's the state ? A :".split()
LETTERS = st.characters(exclude_categories=("C", "Z"), exclude_characters=MARKS)


def test_words_are_whole_and_marks_apart():
    words = CoinFlip().vocabulary()
    tokenizer = word_tokenizer(words)
    assert tokenizer.convert_ids_to_tokens(encode_strictly(tokenizer, TEXT)) == PIECES
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) == ["<pad>", "<eos>", "<unk>", *words]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)


WORDS = st.text(LETTERS, min_size=1).filter(lambda word: not any(token in word for token in SPECIAL_TOKENS))


@given(st.lists(st.one_of(WORDS, st.sampled_from([*MARKS, "\n"])), min_size=1))
def test_texts_come_back_exactly(words):
    """Any words, with one space between them and none before a mark or beside a line break."""
    text = ""
    for word in words:
        is_apart = text and word not in (*MARKS, "\n") and text[-1] != "\n"
        text += " " + word if is_apart else word
    tokenizer = word_tokenizer(vocabulary_of([text]))
    token_ids = encode_strictly(tokenizer, text)
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.convert_ids_to_tokens(token_ids) == words == split_words(text)
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    assert [text[start:end] for start, end in offsets] == words
    assert tokenizer.decode([0, 0, *token_ids, 1], skip_special_tokens=True) == text


def test_an_unknown_word_is_refused_by_name():
    tokenizer = word_tokenizer(CoinFlip().vocabulary())
    with pytest.raises(ValueError, match=r"the word 'Zoe' of .* is not in the task vocabulary of \d+ words"):
        encode_strictly(tokenizer, TEXT.replace("Alice", "Zoe"))
    assert tokenizer("Zoe flips")["input_ids"][0] == 2


def test_a_file_gives_back_the_same_tokenizer(tmp_path):
    tokenizer = word_tokenizer(CoinFlip().vocabulary())
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["type"] == "WordLevel"
    tokenizer.save_pretrained(tmp_path / "both")
    for path in (tmp_path / "tokenizer.json", tmp_path / "both/tokenizer.json"):
        loaded = load_tokenizer(path)
        assert encode_strictly(loaded, TEXT) == encode_strictly(tokenizer, TEXT)
        assert loaded.decode(encode_strictly(loaded, TEXT)) == TEXT
        assert (loaded.pad_token, loaded.eos_token, loaded.unk_token_id) == ("<pad>", "<eos>", 2)


VOCABULARY_ALONE = '{"model": {"vocab": {"<pad>": 0, "<eos>": 1, "<unk>": 2}}}'


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {"vocab": {"<pad>": 5}}}', VOCABULARY_ALONE])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer.json .*; write it with save_tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("word", ["two words", "end.", "", "<pad>", "a<eos>b", " a"])
def test_a_vocabulary_holds_single_words(word):
    with pytest.raises(ValueError, match="which is no single word"):
        word_tokenizer(["fine", word])


@pytest.mark.parametrize("vocabulary", [[], ["a", "a"]])
def test_a_vocabulary_holds_each_word_once(vocabulary):
    with pytest.raises(ValueError, match="each word once, and one at least"):
        word_tokenizer(vocabulary)
