"""Gold thoughts: what a Thinking States model should have said after each chunk of a question.

Source: Amos et al. 2026, "Latent Reasoning with Supervised Thinking States", arXiv 2602.08332, on data construction:
the word that completes an operation marks its step, and every step marked in a chunk is said after that chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

from cacheprobe.tasks.base import Example, Question
from cacheprobe.tasks.drawing import check_count
from cacheprobe.tasks.words import encode_strictly, refuse_unknown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMATS = ("state", "restate", "repeat", "delta")
"""state: after each operation that ends in the chunk, what the question has to say of it (the state, in most tasks).
restate: in every chunk, the state after the last operation that ended so far, the stated initial one before the first.
repeat: as restate, but what the question has to say where that is not the state.
delta: as state, but only for operations that change the state.
The statement of the initial state is no operation. A chunk with nothing to say has an empty thought."""
CHAINS = ("operations", "states")
"""What a chain of thought writes between prompt and answer.
operations: the initial state, then the words of each operation and the state after it.
states: the state after each operation alone."""


@dataclass(frozen=True, slots=True)
class Annotated:
    """A question in tokens, cut into chunks, with what is to be thought after each of them.

    token_ids: the prompt, its end on a chunk boundary: pads in front fill it up to whole chunks.
    thoughts: [n] per chunk, what is to be produced FROM it (so it acts on the next one), <eos> at the end of each.
    answer_ids: the answer's tokens, then <eos>.  num_events: operations of the question.
    chain_ids: what a chain of thought writes before the answer, where one was asked for.
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
        """Tokens in a chunk."""
        return len(self.token_ids) // len(self.thoughts)


def annotate(
    example: Example,
    tokenizer: PreTrainedTokenizerFast,
    chunk: int,
    form: str = "state",
    phase: int = 0,
    max_thought: int | None = None,
) -> Annotated:
    """One example in chunks of `chunk` tokens with gold thoughts in one of FORMATS; see `annotate_all`."""
    return annotate_all([example], tokenizer, chunk, form, [phase], max_thought)[0]


def annotate_all(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerFast,
    chunk: int,
    form: str = "state",
    phases: Sequence[int] | None = None,
    max_thought: int | None = None,
    chain: str | None = None,
) -> list[Annotated]:
    """Examples in chunks of `chunk` tokens, with gold thoughts in one of FORMATS.

    phases: per example, how many pads stand right before its closing words, the first after the last operation that a
    space sets apart ("What's the state? A:"). The end of the prompt lies on a chunk boundary, so pads in front cannot
    shift operations against chunks, and these do. None: no such pads.
    max_thought: most tokens of a thought, its <eos> counted; a longer one is an error.
    chain: one of CHAINS, to be written without chunks or thoughts. None: there is no chain.
    Operations of which several end in one chunk are all said in "state" and "delta", in their order.
    Needs a fast tokenizer with pad and eos tokens, and bare questions: neither shots nor a chat template.
    Twin: tests.test_thoughts.annotate_slowly, ==.
    """
    check_count("chunk", chunk, at_least=1)
    if form not in FORMATS:
        raise ValueError(f"form={form!r} is unknown; use one of {FORMATS}")
    if chain is not None and chain not in CHAINS:
        raise ValueError(f"chain={chain!r} is unknown; use one of {CHAINS}")
    if max_thought is not None:
        check_count("max_thought", max_thought, at_least=1)
    if phases is not None and len(phases) != len(examples):
        raise ValueError(f"give one phase for each of {len(examples)} examples, got {len(phases)}")
    if any(example.shots or example.chat for example in examples):
        raise ValueError("thoughts are known for bare questions; use examples with shots=0 and chat=False")
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    if pad is None or eos is None:
        raise ValueError(f"a tokenizer with pad and eos tokens is needed, got pad={pad} and eos={eos}")
    if not examples:
        return []

    texts = [example.question.text + example.question.answer for example in examples]
    encoded: Any = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
    say = _encoder(tokenizer)
    annotated = []
    rows = zip(examples, encoded["input_ids"], encoded.encodings, phases or repeat(0), strict=phases is not None)
    for index, (example, token_ids, encoding, phase) in enumerate(rows):
        question = example.question
        if tokenizer.unk_token_id in token_ids:
            refuse_unknown(tokenizer, texts[index], token_ids, encoding.offsets)
        num_prompt = _end_of_prompt(question, encoding)
        closing = num_prompt
        if phase:
            check_count("phase", phase, at_least=0)
            closing = _closing_token(question, encoding)
        front = -(num_prompt + phase) % chunk
        padded = [pad] * front + token_ids[:closing] + [pad] * phase + token_ids[closing:num_prompt]
        chunks = [(front + encoding.char_to_token(end - 1)) // chunk for _, end in question.spans]
        thoughts: list[tuple[Any, ...]] = [(eos,)] * (len(padded) // chunk)
        for place, said in _said(question, chunks, len(thoughts), form):
            thought = (*[token_id for text in said for token_id in say(text)], eos)
            if max_thought is not None and len(thought) > max_thought:
                raise ValueError(
                    f"example {index}, {question.text!r:.80}, chunk {place}: the thought {said} has {len(thought)} "
                    f"tokens with its end, and max_thought={max_thought}; allow more, or take a smaller chunk"
                )
            thoughts[place] = thought
        answer_ids: tuple[Any, ...] = (*token_ids[num_prompt:], eos)
        chain_ids = tuple(token_id for text in _written(question, chain) for token_id in say(text))
        annotated.append(Annotated(tuple(padded), tuple(thoughts), answer_ids, len(question.events), chain_ids))
    return annotated


def _said(question: Question, chunks: Sequence[int], count: int, form: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(chunk, the texts said after it) for every chunk that has any; `chunks` are those in which the spans end."""
    states = question.states
    words = states if form == "restate" else question.thoughts or states
    if form in ("restate", "repeat"):
        for (place, word), until in zip(zip(chunks, words, strict=True), (*chunks[1:], count), strict=True):
            yield from ((later, (word,)) for later in range(place, until))
        return
    said: dict[int, tuple[str, ...]] = {}
    for step in range(1, len(chunks)):
        if form == "state" or states[step] != states[step - 1]:
            said[chunks[step]] = (*said.get(chunks[step], ()), words[step])
    yield from said.items()


def _written(question: Question, chain: str | None) -> Iterator[str]:
    """The texts of a chain of thought, in their order."""
    if chain == "operations":
        yield question.states[0]
    for (begin, end), state in zip(question.spans[1:], question.states[1:], strict=True) if chain else ():
        if chain == "operations":
            yield question.text[begin:end]
        yield state


def _end_of_prompt(question: Question, encoding: Any) -> int:
    """How many tokens the prompt has; the answer's begin there."""
    count = encoding.char_to_token(len(question.text.rstrip()) - 1) + 1
    if encoding.token_to_chars(count - 1)[1] > len(question.text):
        raise ValueError(
            f"the tokenizer joins {question.answer!r} to the last token of {question.text!r}; take another"
        )
    return count


def _closing_token(question: Question, encoding: Any) -> int:
    """The first token that a space sets apart from the last operation; it may hold that space."""
    end = question.spans[-1][1]
    space = question.text.find(" ", end)
    if space < 0:
        raise ValueError(f"{question.text!r} has no words after its last operation, to set pads before; use phase=0")
    holder = encoding.char_to_token(space)
    closing = encoding.char_to_token(space + 1) if holder is None else holder
    return max(closing, encoding.char_to_token(end - 1) + 1)


def _encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], list[int]]:
    """`encode_strictly` that remembers: a set has few different states."""
    known: dict[str, list[int]] = {}

    def say(text: str) -> list[int]:
        if text not in known:
            known[text] = encode_strictly(tokenizer, text)
        return known[text]

    return say
