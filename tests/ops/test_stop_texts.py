"""A request ends at the same token as by a decode of its whole text, and a long text decodes no more per token."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from transformers import AutoTokenizer

from cacheprobe.core.tokens import WINDOW
from cacheprobe.models.known import smollm2_directory
from cacheprobe.ops.acceptance import StopRule, clip_draft, find_ending
from tests.twins.equivalence import ends_slowly

TEXT = "Über 日本語 text 😀👩‍👩‍👧 naïve — “quoted”\n\n\tcode(x) == 0;  three   spaces. 한국어 ümlaut ¿qué? "


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(smollm2_directory(progress=False))


@pytest.fixture(scope="module")
def decode(tokenizer) -> Callable[[Sequence[int]], str]:
    """As the model's (models/hf/text.py)."""
    return lambda ids: tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


def sequences(tokenizer, count: int) -> Iterator[tuple[np.random.Generator, list[int]]]:
    """Random tokens of the whole vocabulary, of bytes that are no characters, of a text in many scripts, and all mixed.

    The first 17 token ids are special ones, such as the end of a text.
    """
    rng = np.random.default_rng(11)
    written = tokenizer.encode(TEXT * 30)
    halves = [t for t in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([t])]
    for number in range(count):
        length = int(rng.integers(1, 500))
        kinds = [rng.integers(0, len(tokenizer), length), rng.choice(halves, length), np.array(written[:length])]
        ids = kinds[number % 4] if number % 4 < 3 else np.choose(rng.integers(0, 3, length), kinds)
        if number % 5 == 4:
            ids = np.where(rng.random(len(ids)) < 0.3, rng.integers(0, 17, len(ids)), ids)
        yield rng, [int(token) for token in ids]


def stops(rng: np.random.Generator, text: str) -> tuple[str, ...]:
    """A piece of the end of the text, of 1 to 150 characters, mostly spanning tokens; and one that the text lacks."""
    length = int(rng.choice([1, 3, 8, 30, 150]))
    start = int(rng.integers(int(len(text) * 0.7), max(len(text) - length, int(len(text) * 0.7) + 1)))
    return (text[start : start + length] or "a", "never \0 said")


def test_a_request_ends_at_the_same_token_as_by_the_whole_text(tokenizer, decode) -> None:
    """Token by token, and in passes of several tokens between drafts that are rolled back."""
    ended = spanning = 0
    for rng, ids in sequences(tokenizer, 80):
        rule = StopRule(frozenset(), stops(rng, decode(ids)), decode)
        want = next((n for n in range(1, len(ids) + 1) if ends_slowly(ids[:n], rule)), None)
        got = next((n for n in range(1, len(ids) + 1) if rule.ends(ids[:n])), None)
        assert got == want, (rule.texts, ids)
        at, passes = 0, None
        while at < len(ids) and passes is None:
            rejected = [int(token) for token in rng.integers(0, len(tokenizer), 20)]
            clip_draft(ids[:at], rejected, rule, 20)  # asks about tokens that are never committed
            width = int(rng.integers(1, 9))
            ending = find_ending(ids[:at], tuple(ids[at : at + width]), rule, len(ids))
            passes, at = (at + ending.num_kept if ending.finish else None), at + width
        assert passes == want, (rule.texts, ids)
        ended += want is not None
        spanning += want is not None and want > 2 * WINDOW
    assert ended > 40 and spanning > 20


@pytest.mark.parametrize("words", [TEXT, "a b c d "])
def test_a_token_of_a_long_text_decodes_as_many_tokens_as_one_of_a_short_text(tokenizer, decode, words: str) -> None:
    """Before, every token decoded the whole text: 16,000 tokens for the last one."""
    ids = (tokenizer.encode(words) * 8000)[:16_000]
    counts: list[int] = []

    def counting(token_ids: Sequence[int]) -> str:
        counts[-1] += len(token_ids)
        return decode(token_ids)

    rule, generated = StopRule(frozenset(), ("never said", "x" * 40), counting), []
    for token in ids:
        counts.append(0)
        assert find_ending(generated, (token,), rule, 10**6).finish is None
        generated.append(token)
    early, late = np.mean(counts[1024:2048]), np.mean(counts[-1024:])
    assert max(counts[:WINDOW]) <= WINDOW and abs(late / early - 1) < 0.05 and late < 2 * WINDOW
    assert max(counts) < 20 * WINDOW


def test_half_a_character_at_the_beginning_of_a_window_ends_nothing() -> None:
    """Tokens are bytes. The half character that a window may begin with is in no text."""
    rule = StopRule(frozenset(), ("\ufffdX",), lambda ids: bytes(ids).decode(errors="replace"))
    ids = list(("éX" * 200).encode())
    assert not any(rule.ends(ids[:n]) or ends_slowly(ids[:n], rule) for n in range(1, len(ids) + 1))
    assert rule.ends([*ids, 0xC3, ord("X")]) and rule.ends(ids, [0xC3, ord("X")])
