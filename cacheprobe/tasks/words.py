"""Makes a word-level tokenizer for task texts: every word, punctuation mark and line break is one token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, EOS, UNKNOWN)
"""Special tokens, with the ids 0, 1 and 2."""

MARKS = ".,;:?!"
WORD = rf"[{MARKS}\n]|[^\s{MARKS}]+"
"""Regular expression of a token. Apostrophes, quotes, hyphens and signs such as = belong to the adjacent word."""

UNSPACED = rf" (?=[{MARKS}\n])|(?<=\n) "
"""Regular expression of the spaces that decoding removes: before a mark, and on both sides of a line break."""


def split_words(text: str) -> list[str]:
    """Returns the list of words, punctuation marks and line breaks in a text.  Twin: the tokenizer's splitting, ==."""
    return re.findall(WORD, text)


def vocabulary_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns the different words, punctuation marks and line breaks of `texts` as a tuple, sorted by code point: the
    order is equal on every machine."""
    return tuple(sorted({word for text in texts for word in split_words(text)}))


def word_tokenizer(vocabulary: Sequence[str]) -> PreTrainedTokenizerFast:
    """Returns a transformers tokenizer with one token for each word of `vocabulary`, numbered from 3 in this order.

    <pad> is 0, <eos> 1, <unk> 2; encoding adds no special token. A word is the same token with or without a space
    before the word. Decoding puts one space between words and none before a mark, which restores every task's texts.
    Encoding turns other words into <unk>; `encode_strictly` raises an error for such a text.
    Raises: ValueError for an empty vocabulary, a repeated word, or an entry that is not a single word or mark, or that
    contains one of these three special tokens.
    """
    for word in vocabulary:
        if split_words(word) != [word] or any(token in word for token in SPECIAL_TOKENS):
            raise ValueError(
                f"vocabulary holds {word!r}, which is no single word; give words without spaces and without {MARKS!r}, "
                f"those marks by themselves, and none of {SPECIAL_TOKENS}"
            )
    if not vocabulary or len(set(vocabulary)) < len(vocabulary):
        raise ValueError(f"vocabulary must hold each word once, and one at least; got {len(vocabulary)} words")

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    numbered = {word: index for index, word in enumerate((*SPECIAL_TOKENS, *vocabulary))}
    tokenizer = Tokenizer(models.WordLevel(numbered, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    # WordPiece puts one space before every token that does not begin with `prefix`, and no word begins with a space
    joined = decoders.WordPiece(prefix=" ", cleanup=False)
    tokenizer.decoder = decoders.Sequence([joined, decoders.Fuse(), decoders.Replace(Regex(UNSPACED), "")])
    return _wrapped(tokenizer)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, path: str | Path) -> None:
    """Writes a word tokenizer to `path` as one JSON file, such as tokenizer.json, for `load_tokenizer`."""
    tokenizer.backend_tokenizer.save(str(path))


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Returns the word tokenizer in a JSON file of `save_tokenizer`. Raises: ValueError if the file holds no
    tokenizer, or if its vocabulary does not give <pad>, <eos> and <unk> the ids 0, 1 and 2."""
    from tokenizers import Tokenizer

    text = Path(path).read_text(encoding="utf-8")
    try:
        words = json.loads(text)["model"]["vocab"]
        special = [words.get(token) for token in SPECIAL_TOKENS]
        tokenizer = Tokenizer.from_str(text) if special == [0, 1, 2] else None
    except Exception as error:  # Tokenizer.from_str raises a plain Exception
        raise ValueError(f"{path} holds no tokenizer ({error!r}); write it with save_tokenizer") from error
    if tokenizer is None:
        raise ValueError(f"{path} numbers {SPECIAL_TOKENS} as {special}, not 0, 1, 2; write it with save_tokenizer")
    return _wrapped(tokenizer)


def encode_strictly(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Returns the token ids of a text, without special tokens. Raises: ValueError for a word outside the vocabulary."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    refuse_unknown(tokenizer, text, encoded["input_ids"], encoded["offset_mapping"])
    return list(encoded["input_ids"])


def refuse_unknown(
    tokenizer: PreTrainedTokenizerFast, text: str, token_ids: Sequence[int], offsets: Sequence[tuple[int, int]]
) -> None:
    """Checks an encoded text. Raises: ValueError, with the first unknown word, if a token id is that of <unk>.

    offsets: characters (start, end) of each token in `text`.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in token_ids:
        return
    start, end = offsets[token_ids.index(unknown)]
    words = sorted(set(tokenizer.get_vocab()) - set(SPECIAL_TOKENS))
    raise ValueError(
        f"the word {text[start:end]!r} of {text!r:.80} is not in the task vocabulary of {len(words)} words "
        f"({words[0]!r} to {words[-1]!r}); use its own words, which model.tokenizer.get_vocab() lists of a model, or "
        "make the tokenizer from the vocabulary() of the task that wrote the text"
    )


def _wrapped(tokenizer) -> PreTrainedTokenizerFast:
    """Returns a transformers tokenizer for a tokenizer of the `tokenizers` library, with the special tokens set."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
