"""Prompts as people hand them over, and the texts of tokens.

Right values: the tokenizer's own calls, `generate`, or by hand.
"""

import copy
from pathlib import Path

import pandas as pd
import pytest
import sentencepiece
from transformers import AutoTokenizer, GPTSw3Tokenizer, PreTrainedTokenizerFast

import cacheprobe as cp
from cacheprobe.edits.gradient_texts import texts_of_prompts
from cacheprobe.models.base import CachedLM
from cacheprobe.models.known import smollm2_directory
from cacheprobe.views.dashboard.reader import tokenizer_texts
from cacheprobe.views.report.listings import request_listings
from tests.reported.tokenizers import NAMES, TEMPLATE, TEXTS, build
from tests.tiny import SMALL, VOCAB, hf_model


def with_tokenizer(tokenizer: object, **generation: object) -> CachedLM:
    live = copy.deepcopy(hf_model())
    for name, value in generation.items():
        setattr(live.generation_config, name, value)
    return cp.load_model(live, tokenizer)


# -- two start tokens


def test_a_rendered_chat_has_one_start_token() -> None:
    tokenizer = build("metaspace, start token added")
    tokenizer.chat_template = "<s>" + TEMPLATE
    chat = [{"role": "user", "content": "heads or tails"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    right = tuple(tokenizer(text, add_special_tokens=False).input_ids)
    assert tokenizer(text).input_ids[:2] == [tokenizer.bos_token_id] * 2
    model = with_tokenizer(tokenizer)
    settings = dict(window=4, group=2, capacity=96, max_new_tokens=4)
    with pytest.warns(RuntimeWarning, match="begins with <s>, and the tokenizer adds another; one is kept"):
        runs = [cp.run(model, text, progress=False, **settings), cp.reference(model, text, progress=False, **settings)]
    with pytest.warns(RuntimeWarning, match="one is kept"):
        stream = cp.stream(model, text, **settings)
        list(stream)
    with pytest.warns(RuntimeWarning, match="one is kept"):
        answer = {"prompt": text, "token_ids": [9, 10]}
        runs += [stream.trace(), cp.replay(model, [answer], progress=False)]
    with pytest.warns(RuntimeWarning, match="one is kept"):
        assert cp.kv_snapshot(model, text).token_ids == right[:-1]
    with pytest.warns(RuntimeWarning, match="one is kept"):
        prompts = texts_of_prompts(model, [text])
    assert [run.requests[0].prompt_token_ids for run in runs] == [right] * 4
    assert prompts[0].token_ids == right
    assert cp.run(model, cp.Chat(chat), **SMALL).requests[0].prompt_token_ids == right


# -- padding


@pytest.mark.parametrize(("owner", "side"), [("own additions", "left"), ("end token added", "right")])
def test_padding_is_no_text(owner: str, side: str) -> None:
    """The second tokenizer pads with its end token."""
    tokenizer = build(f"metaspace, {owner}")
    tokenizer.padding_side = side
    model, texts = with_tokenizer(tokenizer), ["the coin", "the coin is heads or tails"]
    right = [tuple(tokenizer(text).input_ids) for text in texts]
    padded = tokenizer(texts, padding=True)
    assert [r.prompt_token_ids for r in cp.run(model, padded, **SMALL).requests] == right
    tensors = tokenizer(texts, padding=True, return_tensors="pt")
    assert [r.prompt_token_ids for r in cp.run(model, tensors, **SMALL).requests] == right
    for prompts in (padded.input_ids, tensors.input_ids, [cp.Request(ids) for ids in padded.input_ids]):
        for act in (cp.run, cp.reference):
            with pytest.raises(ValueError, match="request 0: its token ids begin or end with the padding token"):
                act(model, prompts, **SMALL)
    one = tokenizer(texts[0], padding="max_length", max_length=len(right[0]) + 3).input_ids
    with pytest.raises(ValueError, match="padding token"):
        cp.run(model, [one], **SMALL)
    assert cp.run(model, [list(ids) for ids in right], **SMALL).requests[1].prompt_token_ids == right[1]
    assert cp.run(model, tokenizer(texts[0]), **SMALL).requests[0].prompt_token_ids == right[0]


# -- what ends a request


def chatting() -> PreTrainedTokenizerFast:
    """<|end|> ends a turn in the template; the tokenizer's own end of texts is </s>."""
    tokenizer = build("metaspace, start token not added")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_the_end_of_a_turn_stops_a_chat() -> None:
    """In a text, the generation config's token alone stops, as in `generate`; in a chat, the turn's end too."""
    tokenizer = chatting()
    unk, pad = tokenizer.unk_token_id, tokenizer.convert_tokens_to_ids("<pad>")
    turn_end, text_end = tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id
    model = with_tokenizer(tokenizer, eos_token_id=[pad])
    chat, text = cp.Chat([{"role": "user", "content": "heads or tails"}]), "heads or tails"
    trace = cp.run(model, [chat, text], **SMALL)
    stops = [set(request.sampling.stop_token_ids) for request in trace.requests]
    assert stops == [{pad, turn_end, text_end}, {pad}]
    own = cp.run(model, cp.Request(chat, cp.SamplingParams(stop_token_ids=(unk,))), **SMALL)
    assert own.requests[0].sampling.stop_token_ids == (unk,)
    of_run = cp.run(model, chat, **{**SMALL, "sampling": cp.SamplingParams(stop_token_ids=())})
    assert of_run.requests[0].sampling.stop_token_ids == ()


def test_the_trace_says_what_stopped(tmp_path: Path) -> None:
    """The model's next tokens are known from a run without stops; each is then made the token that stops."""
    tokenizer = chatting()
    free = cp.run(with_tokenizer(tokenizer), "heads or tails", **SMALL)
    third = free.committed(0)[2]
    assert third not in free.committed(0)[:2]
    model = with_tokenizer(tokenizer, eos_token_id=third)
    trace = cp.run(model, "heads or tails", out=tmp_path / "run", **SMALL)
    shown = tokenizer.convert_ids_to_tokens(third).replace("▁", " ")
    assert trace.committed(0) == free.committed(0)[:3]
    assert trace.meta["stopped_by"] == {"0": f"token {third} ({shown}) of the generation config"}
    assert cp.load_trace(tmp_path / "run").meta["stopped_by"] == trace.meta["stopped_by"]
    listed = dict(request_listings(trace, 0)[0].rows)
    assert listed["finish"] == f"stop, by token {third} ({shown}) of the generation config"
    given = cp.SamplingParams(stop_token_ids=third)
    trace = cp.run(with_tokenizer(tokenizer), "heads or tails", sampling=given, **SMALL)
    assert trace.meta["stopped_by"] == {"0": f"token {third} ({shown}) of SamplingParams.stop_token_ids"}
    assert free.meta["stopped_by"] == {}


@pytest.mark.parametrize("kind", ["metaspace", "sentencepiece"])
def test_a_stop_text_may_begin_with_the_first_generated_token(kind: str) -> None:
    """Decoded alone, the first token loses the space in front of it; after the prompt it has one."""
    tokenizer = build(f"{kind}, bare")
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    word = next(i for i, name in enumerate(names) if name.startswith("▁") and len(name) > 1)
    text, prompt = names[word].replace("▁", " "), tokenizer("the coin").input_ids
    known = tokenizer.decode(prompt)
    assert tokenizer.decode([word]) == text[1:] and tokenizer.decode([*prompt, word, word]) == known + text + text
    model = with_tokenizer(tokenizer)
    forced = cp.run(model, [cp.Request(prompt, forced_token_ids=(word, word))], **SMALL)
    assert forced.texts[0] == text + text

    prompts = [[i, i + 1] for i in range(8, len(names) - 1)]
    firsts = [run[0] for run in cp.run(model, prompts, **{**SMALL, "max_new_tokens": 1}).tokens.values()]
    prompt = next(p for p, i in zip(prompts, firsts, strict=True) if i < len(names) and names[i].startswith("▁"))
    free, known = cp.run(model, [prompt], **SMALL), tokenizer.decode(prompt)
    first = free.committed(0)[0]
    said = tokenizer.decode([*prompt, first]).removeprefix(known)
    assert said.startswith(" ") and not tokenizer.decode([first]).startswith(" ")
    stopped = cp.run(model, [prompt], sampling=cp.SamplingParams(stop=(said,)), **SMALL)
    assert stopped.committed(0) == [first]
    assert stopped.meta["stopped_by"] == {"0": f"a text of SamplingParams.stop, {said!r}"}
    pieces = list(cp.stream(model, [prompt], window=4, group=2, capacity=96, max_new_tokens=20))
    assert "".join(piece.text for piece in pieces) == free.texts[0] and free.texts[0].startswith(said)


# -- texts of tokens


def sentencepiece_tokenizer(folder: Path) -> GPTSw3Tokenizer:
    """A tokenizer of the library sentencepiece, which raises an IndexError for an id that it does not have."""
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXTS * 8), model_prefix=str(folder / "spiece"), vocab_size=60, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    return GPTSw3Tokenizer(str(folder / "spiece.model"))


def test_an_id_beyond_the_tokenizer_is_shown_as_its_number(tmp_path: Path) -> None:
    """The model's vocabulary is padded beyond the tokenizer's."""
    tokenizer = sentencepiece_tokenizer(tmp_path)
    beyond = VOCAB - 1
    with pytest.raises(IndexError):
        tokenizer.decode([beyond])
    model = with_tokenizer(tokenizer)
    ids = tuple(tokenizer("the coin").input_ids)
    request = cp.Request(ids, forced_token_ids=(ids[-1], beyond, ids[-1]))
    trace = cp.run(model, [request, ids], **SMALL)
    word = tokenizer.decode(ids).removeprefix(tokenizer.decode(ids[:-1]))
    assert trace.texts[0] == f"{word}<{beyond}>{word.strip()}" or trace.texts[0] == f"{word}<{beyond}>{word}"
    assert set(trace.rows(0).query("token_id == @beyond").token) == {f"<{beyond}>"}
    assert model.token_texts([beyond, 10**6]) == [f"<{beyond}>", "<1000000>"]
    fast = with_tokenizer(build("byte-level, bare"))
    assert fast.decode([beyond]) == f"<{beyond}>" and fast.token_texts([beyond]) == [f"<{beyond}>"]


def require_distinct(model: CachedLM) -> None:
    texts = model.token_texts(range(model.d_vocab))
    assert len(set(texts)) == model.d_vocab and not any("\ufffd" in text for text in texts)


@pytest.mark.parametrize("name", NAMES[::6])
def test_no_two_ids_have_one_text(name: str) -> None:
    tokenizer = build(name)
    model = with_tokenizer(tokenizer)
    require_distinct(model)
    alone = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    texts = model.token_texts(range(len(tokenizer)))
    assert all(text in (own, f" {own}") for text, own in zip(texts, alone, strict=True))


def test_parts_of_characters_are_shown_as_bytes() -> None:
    """265 ids of SmolLM2 are parts of characters, which decode to one sign."""
    folder = smollm2_directory()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    alone = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    model = cp.load_model("smollm2-135m")
    require_distinct(model)
    texts = model.token_texts(range(len(tokenizer)))
    assert all(text == own for text, own in zip(texts, alone, strict=True) if "\ufffd" not in own)
    assert alone.count("\ufffd") == 265

    trace = cp.run(model, "東京🙂", max_new_tokens=2, progress=False)
    ids = tokenizer("東京🙂").input_ids
    by_hand = ["<0xE6><0x9D>", "<0xB1>", "<0xE4><0xBA>", "<0xAC>", "<0xF0><0x9F>", "<0x99><0x82>"]
    rows = trace.rows(0).sort_values("position").head(len(ids))
    assert rows.token.tolist() == by_hand
    table = trace.hypotheses()
    assert table.groupby("token").token_id.nunique().max() == 1
    assert tokenizer_texts("smollm2-135m", set(ids)) == dict(zip(ids, by_hand, strict=True))
    report = pd.Series(trace.token_texts)
    assert report.nunique() == len(report)


# -- reasoning


THINKING = (
    "{% for m in messages %}<|turn|>{{ m['role'] }} {{ m['content'] }} <|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant <think>{% endif %}"
)


def test_reasoning_is_the_models_own() -> None:
    """By hand: which tokens of a conversation stand between tags in the model's own turns."""
    tokenizer = build("words, own additions")
    tokenizer.chat_template = THINKING
    model = with_tokenizer(tokenizer)
    messages = [
        {"role": "user", "content": "what is <think> alice"},
        {"role": "assistant", "content": "<think> heads or"},  # cut inside
        {"role": "user", "content": "the coin"},
        {"role": "assistant", "content": "<think></think> tails"},
        {"role": "user", "content": "is it </think> heads"},
    ]
    generated = "bob flips </think> tails <|end|>".split()
    forced = tuple(tokenizer.convert_tokens_to_ids(generated))
    trace = cp.run(model, [cp.Request(cp.Chat(messages), forced_token_ids=forced)], **SMALL)
    words = tokenizer.convert_ids_to_tokens([*trace.requests[0].prompt_token_ids, *forced])
    spans = cp.analysis.reasoning_spans(trace)
    said = [words[s.first_position : s.end_position] for s in spans.itertuples()]
    assert said == [["heads", "or"], [], ["bob", "flips"]]
    assert spans.is_closed.tolist() == [False, True, True]


def test_the_token_that_ends_the_turn_is_no_reasoning() -> None:
    tokenizer = build("words, own additions")
    tokenizer.chat_template = THINKING
    model = with_tokenizer(tokenizer)
    forced = tuple(tokenizer.convert_tokens_to_ids(["bob", "flips", "<|end|>"]))
    chat = cp.Chat([{"role": "user", "content": "heads or tails"}])
    trace = cp.run(model, [cp.Request(chat, forced_token_ids=forced)], **SMALL)
    (span,) = cp.analysis.reasoning_spans(trace).itertuples()
    start = trace.requests[0].num_prompt_tokens
    assert (span.first_position, span.end_position, span.is_closed) == (start, start + 2, False)


def test_a_question_that_names_the_tag_loses_no_answer() -> None:
    prompt = "<think> or </think> is <think> it"
    tokenizer = build("words, own additions")
    model = with_tokenizer(tokenizer)
    example = cp.tasks.CoinFlip(people=2).examples(1, seed=0)[0]
    forced = tuple(tokenizer.convert_tokens_to_ids([example.answer.strip()]))
    trace = cp.run(model, [cp.Request(prompt, forced_token_ids=forced, example=example)], **SMALL)
    assert trace.meta["behaviour"]["accuracy"] == 1 and not len(cp.analysis.reasoning_spans(trace))
