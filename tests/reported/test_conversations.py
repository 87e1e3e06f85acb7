"""Conversations, replayed texts and what a tokenizer returns, as people hand them over.

Right values: the tokenizer's own calls, or by hand.
"""

import pytest
import torch
from tokenizers import processors
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import cacheprobe as cp
from tests.reported.test_text import with_tokenizer
from tests.reported.tokenizers import TEMPLATE, build
from tests.tiny import SMALL

USER = [{"role": "user", "content": "heads or tails"}]
TURN = "<|turn|>{{ m['role'] }} {{ m['content'] }}"
OPENED = "{% if add_generation_prompt %}<|turn|>assistant {% endif %}"


# -- tokens in front


def test_tokens_that_the_tokenizer_puts_in_front_are_there_once() -> None:
    """As GLM's [gMASK]<sop>: two tokens, and none is called the start token."""
    tokenizer = build("metaspace, bare")
    pairs = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "<pad>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> <pad> $A", special_tokens=pairs)
    tokenizer.chat_template = "<s><pad>" + TEMPLATE
    text = tokenizer.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    once = tuple(tokenizer(text, add_special_tokens=False).input_ids)
    model = with_tokenizer(tokenizer)
    assert tuple(tokenizer(text).input_ids) != once
    with pytest.warns(RuntimeWarning, match="the tokenizer adds another; one is kept"):
        assert cp.run(model, text, **SMALL).requests[0].prompt_token_ids == once
    assert cp.run(model, "the coin", **SMALL).requests[0].prompt_token_ids == tuple(tokenizer("the coin").input_ids)


def test_token_ids_with_two_start_tokens_are_named() -> None:
    tokenizer = build("metaspace, start token added")
    tokenizer.chat_template = "<s>" + TEMPLATE
    model = with_tokenizer(tokenizer)
    encoded = tokenizer([tokenizer.apply_chat_template(USER, tokenize=False)], return_tensors="pt")
    for prompt in (encoded, encoded.input_ids, [cp.Request(tuple(encoded.input_ids[0].tolist()))]):
        with pytest.warns(RuntimeWarning, match="request 0: its token ids begin with two start tokens, 1"):
            cp.run(model, prompt, **SMALL)


# -- the end of the model's turn


def ended(tokenizer: PreTrainedTokenizerFast, chat: cp.Chat) -> "set[str]":
    """The texts of the tokens that stop a chat."""
    trace = cp.run(with_tokenizer(tokenizer), [chat], **SMALL)
    return set(tokenizer.convert_ids_to_tokens(trace.requests[0].sampling.stop_token_ids))


@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        ("{% for m in messages %}" + TURN + "{% if not loop.last %}<|end|>{% endif %}{% endfor %}" + OPENED, USER, {}),
        (
            "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE,
            [{"role": "system", "content": "the state"}, *USER],
            {},
        ),
        ("{% if not mood %}{{ raise_exception('no mood') }}{% endif %}" + TEMPLATE, USER, {"mood": "good"}),
        (TEMPLATE.replace("m['content']", "m['content'] | upper"), USER, {}),
    ],
    ids=["between turns", "a system message needed", "an option needed", "words changed"],
)
def test_the_end_of_a_turn_is_found(template: str, messages: list, options: dict) -> None:
    tokenizer = build("metaspace, start token not added")
    tokenizer.chat_template = template
    assert ended(tokenizer, cp.Chat(messages, options)) == {"</s>", "<|end|>"}


def test_the_end_of_a_turn_need_not_be_special() -> None:
    tokenizer = build("metaspace, start token not added")
    tokenizer.add_tokens(["<bye>"])
    tokenizer.chat_template = TEMPLATE.replace("<|end|>", "<bye>")
    assert ended(tokenizer, cp.Chat(USER)) == {"</s>", "<bye>"}


# -- turns


BEFORE = {"role": "assistant", "content": "<think> bob </think> heads"}
THINKING = (
    "<|turn|>system write <think> two </think> {% for m in messages %}" + TURN + " <|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant <think>{% endif %}"
)


def test_words_of_the_template_are_no_turn_of_the_model() -> None:
    """A user's word that the template has in front, too, does not begin the model's turn there."""
    tokenizer = build("words, own additions")
    tokenizer.chat_template = THINKING
    messages = [
        {"role": "user", "content": "two"},
        BEFORE,
        *USER,
    ]
    trace = cp.run(with_tokenizer(tokenizer), [cp.Chat(messages)], **SMALL)
    words = tokenizer.convert_ids_to_tokens(trace.requests[0].prompt_token_ids)
    spans = list(cp.analysis.reasoning_spans(trace).itertuples())
    assert [words[span.first_position : span.end_position] for span in spans[:-1]] == [["bob"]]
    assert spans[-1].first_position == len(words)


def test_a_replayed_chat_has_the_turns_of_a_run() -> None:
    tokenizer = build("words, own additions")
    tokenizer.chat_template = THINKING
    messages = [
        {"role": "user", "content": "the coin"},
        BEFORE,
        *USER,
    ]
    said = tokenizer.convert_tokens_to_ids(["alice", "flips", "</think>", "tails"])
    model, chat = with_tokenizer(tokenizer), cp.Chat(messages)
    replayed = cp.replay(model, [{"token_ids": said}], prompts=[chat], progress=False)
    run = cp.run(model, [cp.Request(chat, forced_token_ids=tuple(said))], **SMALL)
    one, other = (cp.analysis.reasoning_spans(trace) for trace in (replayed, run))
    assert len(one) == 2 and one.equals(other)


def test_a_tokenizer_without_offsets_takes_a_chat() -> None:
    """A tokenizer in Python does not say where its tokens stand in the text."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'][:3] }};{% endfor %}"
    config = LlamaConfig(
        vocab_size=384, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = cp.load_model(LlamaForCausalLM(config), tokenizer)
    chat = cp.Chat([{"role": "user", "content": " 123"}])
    right = tuple(tokenizer(" 12;", add_special_tokens=False).input_ids)
    assert cp.run(model, [chat], **SMALL).requests[0].prompt_token_ids == right


# -- replayed text


@pytest.mark.parametrize(("owner", "is_text"), [("end token added", True), ("start token added", False)])
def test_a_replayed_text_has_its_own_tokens_alone(owner: str, is_text: bool) -> None:
    """What the tokenizer adds to every text is no part of the response."""
    tokenizer = build(f"metaspace, {owner}")
    before, said = "the coin", " is heads"
    bare = tokenizer(before, add_special_tokens=False).input_ids
    right = tokenizer(before + said, add_special_tokens=False).input_ids[len(bare) :]
    response = {"prompt": before, "text": said} if is_text else {"prompt_token_ids": bare, "text": said}
    trace = cp.replay(with_tokenizer(tokenizer), [response], progress=False)
    assert trace.committed(0) == right


# -- what a tokenizer returns


def test_what_a_tokenizer_returns_is_read_everywhere() -> None:
    tokenizer = build("metaspace, own additions")
    model, texts = with_tokenizer(tokenizer), ["the coin", "the coin is heads"]
    right = [tuple(tokenizer(text).input_ids) for text in texts]
    several = cp.run(model, [tokenizer(text) for text in texts], **SMALL)
    assert [request.prompt_token_ids for request in several.requests] == right
    assert cp.kv_snapshot(model, tokenizer(texts[1])).token_ids == right[1][:-1]
    grid = cp.patching.causal_tracing(model, tokenizer(texts[1]), [1], samples=1, progress=False)
    assert tuple(grid.meta["prompt"]) == right[1]


def test_a_mask_that_does_not_fit_is_refused() -> None:
    tokenizer = build("metaspace, own additions")
    model = with_tokenizer(tokenizer)
    with pytest.raises(ValueError, match="the traced prompt is one text, and 2 rows of input_ids were given"):
        cp.patching.causal_tracing(model, tokenizer(["the coin", "the coin"]), [1], samples=1, progress=False)
    hole = {"input_ids": [[1, 9, 10, 11]], "attention_mask": [[1, 0, 1, 1]]}
    with pytest.raises(ValueError, match="row 0 of attention_mask leaves out tokens between others"):
        cp.run(model, hole, **SMALL)
    short = {"input_ids": torch.tensor([[1, 9, 10]]), "attention_mask": torch.tensor([[1, 1]])}
    with pytest.raises(ValueError, match=r"attention_mask has rows of \[2\] tokens, input_ids of \[3\]"):
        cp.run(model, short, **SMALL)


def test_padding_is_refused_wherever_a_prompt_is_read() -> None:
    tokenizer = build("metaspace, own additions")
    model = with_tokenizer(tokenizer)
    padded = tokenizer(["the coin", "the coin is heads"], padding=True).input_ids
    assert padded[0][0] == tokenizer.pad_token_id
    metric = cp.analysis.token_logprob(9)
    for call in (
        lambda: cp.analysis.answer_logprobs(model, padded, [9]),
        lambda: cp.gradients(model, padded, metric, progress=False),
        lambda: cp.patching.causal_tracing(model, padded[0], [3], samples=1, progress=False),
        lambda: cp.patching.activation(model, padded[0], padded[1], progress=False),
    ):
        with pytest.raises(ValueError, match="its token ids begin or end with the padding token"):
            call()
