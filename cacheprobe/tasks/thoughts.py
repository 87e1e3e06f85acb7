"""Makes gold thoughts: the text that a Thinking States model should write after each chunk of a question's tokens.

Source: Amos et al. 2026, "Latent Reasoning with Supervised Thinking States", arXiv 2602.08332, on data construction:
the word that completes an operation marks its step, and the thought after a chunk states every step marked in that
chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from typing import TYPE_CHECKING

from cacheprobe.core.values import require_one_of, whole_number
from cacheprobe.tasks.base import Example, Question
from cacheprobe.tasks.words import encode_strictly, refuse_unknown

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

FORMATS = ("state", "restate", "repeat", "delta")
"""Names of the rules that say which text the thought after a chunk is.
state: after each operation that ends in the chunk, the question's thought for it (the state, in most tasks).
restate: in every chunk from the one that completes the statement of the initial state on, the state after the last
operation that has ended so far; before the first operation, the initial state.
repeat: like restate, but with the question's thought instead of the state.
delta: like state, but only for operations that change the state.
The statement of the initial state is no operation. A chunk to which the rule gives no text has an empty thought (<eos>
alone).
"""
CHAINS = ("operations", "states")
"""Names of the texts that a chain of thought can write between prompt and answer.
operations: the initial state, then the words of each operation and the state after it.
states: only the state after each operation.
"""


@dataclass(frozen=True, slots=True)
class Annotated:
    """Holds a question as token ids, cut into chunks of equal length, with the gold thought after each chunk.

    token_ids: the prompt, with pads in front to complete the first chunk, so that the prompt ends at a chunk boundary.
    thoughts: [n] token ids of the thought computed FROM each chunk, ending with <eos>; it acts on the next chunk.
    answer_ids: the right answer's tokens, then <eos>.
    num_events: operations of the question.
    chain_ids: the chain of thought before the answer, if one was requested.
    """

    token_ids: tuple[int, ...]
    thoughts: tuple[tuple[int, ...], ...]
    answer_ids: tuple[int, ...]
    num_events: int
    chain_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.thoughts or len(self.token_ids) % len(self.thoughts):
            raise ValueError(f"{len(self.token_ids)} tokens are no whole chunks for {len(self.thoughts)} thoughts")

    @property
    def chunk(self) -> int:
        """Number of tokens in a chunk."""
        return len(self.token_ids) // len(self.thoughts)


def annotate(
    example: Example,
    tokenizer: PreTrainedTokenizerFast,
    chunk: int,
    form: str = "state",
    pads_before_closing: int = 0,
    max_thought: int | None = None,
) -> Annotated:
    """Returns one example as Annotated: token ids in chunks of `chunk` tokens, with gold thoughts.

    form: the rule for thoughts, one of FORMATS.  pads_before_closing, max_thought: as in `annotate_all`, for this
    example.
    """
    return annotate_all([example], tokenizer, chunk, form, [pads_before_closing], max_thought)[0]


def annotate_all(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerFast,
    chunk: int,
    form: str = "state",
    pads_before_closing: Sequence[int] | None = None,
    max_thought: int | None = None,
    chain: str | None = None,
) -> list[Annotated]:
    """Returns a list of Annotated: each example as token ids in chunks of `chunk` tokens, with gold thoughts.

    form: the rule for thoughts, one of FORMATS.
    pads_before_closing: for each example, the number of pads directly before the closing words ("What's the state?
    A:"), which begin at the first space after the last operation. These pads shift the operations relative to the
    chunks; pads in front cannot, because the prompt ends at a chunk boundary. None: no pads before the closing words.
    max_thought: maximum tokens of a thought, including <eos>; a longer thought raises an error.
    chain: the chain of thought to write before the answer, one of CHAINS, without chunks or thoughts. None: no chain.
    If several operations end in one chunk, "state" and "delta" state all of them, in their order.
    Needs a fast tokenizer with pad and eos tokens, and examples without shots and chat template.
    Twin: tests.tasks.test_thoughts.annotate_slowly, ==.
    """
    whole_number("chunk", chunk, at_least=1)
    require_one_of("form", form, FORMATS)
    if chain is not None:
        require_one_of("chain", chain, CHAINS)
    if max_thought is not None:
        whole_number("max_thought", max_thought, at_least=1)
    if stateless := next((example for example in examples if not example.states), None):
        raise ValueError(f"{stateless!r} has no states to think of; give the task's states")
    if pads_before_closing is not None and len(pads_before_closing) != len(examples):
        numbers = len(pads_before_closing)
        raise ValueError(f"give one number of pads_before_closing for each of {len(examples)} examples, got {numbers}")
    if any(example.shots or example.chat for example in examples):
        raise ValueError("thoughts are known for bare questions; use examples with shots=0 and chat=False")
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    if not isinstance(pad, int) or not isinstance(eos, int):
        raise ValueError(f"a tokenizer with pad and eos tokens is needed, got pad={pad} and eos={eos}")
    if not examples:
        return []
    texts = [example.question.text + example.question.answer for example in examples]
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
    assert encoded.encodings is not None, "a fast tokenizer has encodings"
    encode = lru_cache(maxsize=None)(partial(encode_strictly, tokenizer))
    annotated = []
    pads = repeat(0) if pads_before_closing is None else pads_before_closing
    tokenized = zip(examples, encoded["input_ids"], encoded.encodings, pads, strict=pads_before_closing is not None)
    for index, (example, token_ids, encoding, num_pads) in enumerate(tokenized):
        if tokenizer.unk_token_id in token_ids:
            refuse_unknown(tokenizer, texts[index], token_ids, encoding.offsets)
        question, num_prompt = example.question, _end_of_prompt(example.question, encoding)
        prompt, front = _padded(question, encoding, token_ids[:num_prompt], chunk, num_pads, pad)
        chunks = [(front + _token_of(encoding, end - 1)) // chunk for _, end in question.spans]
        thoughts: list[tuple[int, ...]] = [(eos,)] * (len(prompt) // chunk)
        for at, words in _texts_to_think(question, chunks, len(thoughts), form):
            thoughts[at] = (*[token_id for text in words for token_id in encode(text)], eos)
            if max_thought is not None and len(thoughts[at]) > max_thought:
                raise ValueError(
                    f"example {index}, {question.text!r:.80}, chunk {at}: the thought {words} has "
                    f"{len(thoughts[at])} tokens with its end, and max_thought={max_thought}; allow more, or take a "
                    "smaller chunk"
                )
        answer_ids: tuple[int, ...] = (*token_ids[num_prompt:], eos)
        chain_ids = tuple(token_id for text in _texts_of_chain(question, chain) for token_id in encode(text))
        annotated.append(Annotated(tuple(prompt), tuple(thoughts), answer_ids, len(question.events), chain_ids))
    return annotated


def _padded(
    question: Question, encoding: Encoding, prompt: list[int], chunk: int, num_pads: int, pad: int
) -> tuple[list[int], int]:
    """Returns (the prompt's token ids with pads, number of pads in front), so that the prompt fills whole chunks.
    num_pads: number of pads before the closing words."""
    front, closing = -(len(prompt) + num_pads) % chunk, len(prompt)
    if num_pads:
        whole_number("pads_before_closing", num_pads, at_least=0)
        closing = _closing_token(question, encoding)
    return [pad] * front + prompt[:closing] + [pad] * num_pads + prompt[closing:], front


def _texts_to_think(
    question: Question, chunks: Sequence[int], count: int, form: str
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields (index of a chunk, texts that the thought after that chunk joins) for each chunk whose thought is not
    empty. chunks: index of the chunk in which each of the question's spans ends."""
    states = question.states
    words = states if form == "restate" else question.thoughts or states
    if form in ("restate", "repeat"):
        # every word is repeated until the chunk in which the next operation ends
        for (first, word), until in zip(zip(chunks, words, strict=True), (*chunks[1:], count), strict=True):
            yield from ((chunk, (word,)) for chunk in range(first, until))
        return
    by_chunk: dict[int, tuple[str, ...]] = {}
    for step in range(1, len(chunks)):
        if form == "state" or states[step] != states[step - 1]:
            by_chunk[chunks[step]] = (*by_chunk.get(chunks[step], ()), words[step])
    yield from by_chunk.items()


def _texts_of_chain(question: Question, chain: str | None) -> Iterator[str]:
    """Yields the texts of a chain of thought of the form `chain` (one of CHAINS), in order; none if `chain` is None."""
    if chain == "operations":
        yield question.states[0]
    for (begin, end), state in zip(question.spans[1:], question.states[1:], strict=True) if chain else ():
        if chain == "operations":
            yield question.text[begin:end]
        yield state


def _token_of(encoding: Encoding, char: int) -> int:
    """Returns the index of the token that contains character number `char` of the encoded text."""
    token = encoding.char_to_token(char)
    assert token is not None, f"no token holds character {char}"
    return token


def _end_of_prompt(question: Question, encoding: Encoding) -> int:
    """Returns the number of tokens of the question without its answer. Raises: ValueError if a token joins the two."""
    count = _token_of(encoding, len(question.text.rstrip()) - 1) + 1
    if encoding.offsets[count - 1][1] > len(question.text):
        raise ValueError(
            f"the tokenizer joins {question.answer!r} to the last token of {question.text!r}; take another"
        )
    return count


def _closing_token(question: Question, encoding: Encoding) -> int:
    """Returns the index, among the tokens of `encoding`, of the first token of the words after the last operation.
    Raises: ValueError if no words follow."""
    end = question.spans[-1][1]
    space = question.text.find(" ", end)
    if space < 0:
        raise ValueError(f"{question.text!r} has no words after its last operation, to set pads before; use phase=0")
    token_of_space = encoding.char_to_token(space)  # None if no token contains the space
    closing = _token_of(encoding, space + 1) if token_of_space is None else token_of_space
    return max(closing, _token_of(encoding, end - 1) + 1)
