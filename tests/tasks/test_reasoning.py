"""Conversations as prompts, and the reasoning of a text between tags: found in any split into tokens."""

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import cacheprobe as cp
from cacheprobe.tasks.base import accuracy, after_reasoning
from cacheprobe.trace.tables.reasoning import spans_in
from cacheprobe_benchmarks.shared.tiny import VOCAB
from tests.tiny import SMALL, hf_model
from tests.twins.measures_slowly import reasoning_slowly

WORDS = ["<think>", "</think>", "user", "model", "heads", "tails", "so", "is", "it", "no", ".", "Is"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}model{% if thinking %} <think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def model() -> object:
    vocabulary = {word: i for i, word in enumerate([*WORDS, *(f"w{i}" for i in range(VOCAB - len(WORDS)))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.chat_template = TEMPLATE
    return cp.load_model(hf_model(), tokenizer)


def test_a_chat_is_the_templates_text(model: object) -> None:
    chat = cp.Chat([{"role": "user", "content": "Is it heads"}], {"thinking": True})
    trace = cp.run(model, [chat, "user Is it heads model <think>"], **SMALL)
    assert trace.requests[0].prompt == "user Is it heads model <think>" and trace.requests[0].example is None
    assert trace.committed(0) == trace.committed(1)
    plain = cp.run(model, cp.Chat([{"role": "user", "content": "Is it heads"}]), **SMALL)
    assert plain.requests[0].prompt_token_ids == trace.requests[0].prompt_token_ids[:-1]


def test_options_that_are_not_the_templates() -> None:
    with pytest.raises(ValueError, match="tokenize is set by cacheprobe"):
        cp.Chat([{"role": "user", "content": "Is it"}], {"tokenize": True})


@pytest.mark.parametrize("messages", ["hello", [], {"role": "user"}, [{"role": "user"}], ["hello"], [{"role": 1}]])
def test_what_is_no_conversation(messages: object) -> None:
    with pytest.raises(ValueError, match="message"):
        cp.Chat(messages)  # pyright: ignore[reportArgumentType]


def test_a_model_without_template() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        cp.run(cp.load_model(hf_model()), cp.Chat([{"role": "user", "content": "Is it"}]), **SMALL)


def test_a_chat_is_run_again_with_the_same_tokens(tmp_path: Path) -> None:
    """With a tokenizer that puts a token before every text, as Llama's does: a chat's text has its own."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "<s>"])}, unk_token="no"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", len(WORDS))])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="no", bos_token="<s>")
    tokenizer.chat_template = "<s> " + TEMPLATE
    model = cp.load_model(hf_model(), tokenizer)
    chat = cp.Chat([{"role": "user", "content": "Is it heads"}])
    trace = cp.run(model, [chat, "Is it"], **SMALL, out=tmp_path / "run")
    ids = [request.prompt_token_ids for request in trace.requests]
    assert ids[0].count(len(WORDS)) == ids[1].count(len(WORDS)) == 1
    stored = cp.load_trace(tmp_path / "run").requests
    for requests in (trace.requests, stored):
        again = cp.run(model, list(requests), **SMALL)
        assert [request.prompt_token_ids for request in again.requests] == ids
        assert cp.reference(model, list(requests), **SMALL).committed(0) == trace.committed(0)


def test_reasoning_that_does_not_end_holds_no_answer(model: object) -> None:
    """The template opens it, so the generated text has no tag."""
    example = cp.tasks.CoinFlip(people=2).examples(1, seed=0)[0]
    scores = []
    for prompt in ("Is it model <think>", "Is it model <think> </think>"):
        forced = (WORDS.index(example.answer.strip()),)
        request = cp.Request(prompt, forced_token_ids=forced, example=example)
        scores.append(cp.run(model, [request], **SMALL).meta["behaviour"]["accuracy"])
    assert scores == [0, 1]


def test_reasoning_of_prompt_and_text(model: object) -> None:
    """The template opens the reasoning; the model closes it, and thinks once more."""
    forced = [WORDS.index(w) for w in "so it is </think> heads . <think> no </think> tails".split()]
    chat = cp.Chat([{"role": "user", "content": "Is it heads"}], {"thinking": True})
    request = cp.Request(chat.prompt_text(model.tokenizer), forced_token_ids=tuple(forced))  # type: ignore[attr-defined]
    trace = cp.run(model, [request, [9, 9]], **SMALL)
    spans = cp.analysis.reasoning_spans(trace)
    start = trace.requests[0].num_prompt_tokens
    own = spans[spans.request_id == 0]
    assert own.first_position.tolist() == [start, start + 7] and own.end_position.tolist() == [start + 3, start + 8]
    assert own.is_closed.all() and own.num_tokens.tolist() == [3, 1]
    rows = cp.analysis.with_reasoning(trace, trace.rows(0))
    assert sorted(rows[rows.in_reasoning].token_id.unique()) == sorted({forced[i] for i in (0, 1, 2, 7)})
    table = pd.concat([trace.rows(), trace.rows().assign(position=range(len(trace.rows())))])
    marked, spans = cp.analysis.with_reasoning(trace, table).in_reasoning, list(spans.itertuples())
    for line, is_inside in zip(table.itertuples(), marked, strict=True):
        at = [
            s for s in spans if s.request_id == line.request_id and s.first_position <= line.position < s.end_position
        ]
        assert is_inside == bool(at)
    with pytest.raises(ValueError, match="no column position"):
        cp.analysis.with_reasoning(trace, trace.rows(0)[["request_id"]])
    with pytest.raises(ValueError, match="at least one character"):
        cp.analysis.reasoning_spans(trace, begin="")


PIECES = st.sampled_from("< <t <think > <think> k> </ </think> /think> a so. </think>c".split())


@given(st.lists(PIECES, max_size=14), st.integers(0, 6))
def test_spans_in_any_split(texts: list[str], num_prompt_tokens: int) -> None:
    num_prompt_tokens = min(num_prompt_tokens, len(texts))
    inside = [False] * len(texts)
    for first, stop, _ in spans_in(texts, num_prompt_tokens, "<think>", "</think>"):
        inside[first:stop] = [True] * (stop - first)
    assert inside == reasoning_slowly(texts, num_prompt_tokens, "<think>", "</think>")


def test_an_answer_inside_the_reasoning_does_not_count() -> None:
    example = cp.tasks.CoinFlip(people=2).examples(1, seed=0)[0]
    right = example.answer.strip()
    wrong = next(answer.strip() for answer in example.answers if answer.strip() != right)
    texts = [f"<think>{wrong}?</think> {right}", f"{wrong}</think>{right}", f"<think>{right}", f"{right}<think>{wrong}"]
    assert [accuracy([example], [text]).num_correct for text in texts] == [1, 1, 0, 1]
    assert after_reasoning("a</think>b</think>c <think>d") == "c "
