"""Thinking States on real Hugging Face architectures: the backbone as it was, T and C as they should be."""

import copy
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.models.thinking.model import thought_table
from cacheprobe.models.thinking.pretrained import ThinkingPretrained, config_of
from cacheprobe.models.thinking.store import save_thinking
from cacheprobe.tasks import Annotated, CoinFlip, annotate_all, mixed, word_tokenizer
from cacheprobe.tasks.base import Example
from cacheprobe.tasks.words import split_words, vocabulary_of
from cacheprobe.training.loop import LoopSettings, ModelLoop
from cacheprobe.training.thinking.evaluate import evaluate
from cacheprobe.training.thinking.losses import collate, losses
from cacheprobe.training.thinking.recurrent import own_thoughts
from cacheprobe_benchmarks.shared.tiny import VOCAB, tiny_model
from tests.twins.thinking_pretrained_slowly import read_slowly

KINDS = ("llama", "llama-tied", "qwen2", "qwen3", "mistral")
CLOSE = dict(rtol=0, atol=1e-5)
"""Float32 logits of standard deviation 1.7: sums of 32 terms in another order."""
CHOICES = dict(eos_id=1, pad_id=0, chunk=4, max_thought=4)
VARIANTS = {
    "paper": {},
    "odd-chunk": dict(chunk=3),
    "whole-loop": dict(l_in=0, l_out=3),
    "deep-thinking": dict(l_in=0, l_out=2, thinking_layers=2),
}


def tiny(kind: str = "llama", **changes) -> tuple[ThinkingPretrained, PreTrainedModel]:
    """A model with T and C, and its backbone. T ends its thoughts now and then."""
    backbone = tiny_model(kind)
    model = ThinkingPretrained(backbone, config_of(backbone, **{**CHOICES, **changes})).eval()
    if model.config.thinks:
        with torch.no_grad():
            model.thinking.unembed.weight[1] *= 4.0
    return model, backbone


def text(n: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(2, VOCAB) for _ in range(n)]


@cache
def questions() -> tuple[list[Example], PreTrainedTokenizerFast]:
    """64 of one or two people, and a tokenizer of their words, all of which the tiny models hold."""
    drawn = mixed(CoinFlip(people=2), (1, 2), n=400, seed=0)
    words = vocabulary_of(q.question.text + q.question.answer for q in drawn[:40])[: VOCAB - 3]
    known = [q for q in drawn if set(split_words(q.question.text + q.question.answer)) <= set(words)]
    return known[:64], word_tokenizer(words)


@cache
def coins() -> list[Annotated]:
    """The questions with gold thoughts."""
    return annotate_all(*questions(), 8, "restate")


# -- the backbone


@pytest.mark.parametrize("kind", KINDS)
def test_without_states_it_is_the_backbone(kind: str) -> None:
    """No thoughts; states of zero; thoughts that are not fed back. And the states matter otherwise."""
    model, backbone = tiny(kind)
    ids, thoughts = torch.tensor([text(26), text(26, 1)]), torch.randint(2, VOCAB, (2, 6, 3))
    with torch.inference_mode():
        want = backbone(ids).logits
        with model.hooks(fwd_hooks=[("compression.hook_state", lambda value, hook: value * 0)]):
            torch.testing.assert_close(model(ids, thoughts)[0], want, **CLOSE)
        torch.testing.assert_close(tiny(kind, feeds_back=False)[0](ids, thoughts)[0], want, **CLOSE)
        torch.testing.assert_close(tiny(kind, thinks=False)[0](ids)[0], want, **CLOSE)
        with_states = model(ids, thoughts)[0]
    torch.testing.assert_close(with_states[:, :4], want[:, :4], **CLOSE)  # S_1 is zero
    assert ((with_states - want)[:, 4:].abs().amax(-1) > 1e-2).all()


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2"])
def test_copies_share_nothing_and_the_embedding_is_the_backbones(kind: str) -> None:
    model, backbone = tiny(kind, thinking_layers=2)
    own = {weight.data_ptr() for weight in backbone.parameters()}
    added = [*model.thinking.parameters(), *model.compression.parameters()]
    assert not own & {weight.data_ptr() for weight in added}
    assert set(added) == set(model.added_parameters())
    assert own | {weight.data_ptr() for weight in added} == {weight.data_ptr() for weight in model.parameters()}
    assert model.embed is backbone.get_input_embeddings() and model.unembed is backbone.get_output_embeddings()

    layers = backbone.model.layers
    copied = [(model.thinking.blocks[0], layers[1]), (model.thinking.blocks[1], layers[2])]
    for block, layer in [*copied, (model.compression.block, layers[0])]:
        assert torch.equal(block.attn.source.q_proj.weight, layer.self_attn.q_proj.weight)
        assert torch.equal(block.mlp.down_proj.weight, layer.mlp.down_proj.weight)
        assert torch.equal(block.ln2.source.weight, layer.post_attention_layernorm.weight)
    assert torch.equal(model.thinking.ln_final.source.weight, backbone.model.norm.weight)
    assert torch.equal(model.thinking.unembed.weight[2:], backbone.lm_head.weight[2:])


def test_a_frozen_backbone_stays_and_what_was_added_learns() -> None:
    model, backbone = tiny("llama-tied")
    backbone.requires_grad_(False)
    assert all(weight.requires_grad for weight in ThinkingPretrained(backbone, model.config).added_parameters())
    before = copy.deepcopy(backbone.state_dict())
    model.train_backbone(False)
    batch = collate(coins()[:4], "thinking")
    list(ModelLoop(model, LoopSettings(steps=2, lr=1e-2, warmup=1)).minimise(lambda step: losses(model, batch)))
    assert all(torch.equal(before[name], weight) for name, weight in backbone.state_dict().items())
    assert not torch.equal(model.compression.block.mlp.down_proj.weight, backbone.model.layers[0].mlp.down_proj.weight)
    model.train_backbone(True)
    assert all(weight.requires_grad for weight in backbone.parameters())


# -- thinking


@pytest.mark.parametrize(
    "kind, variant",
    [*[(k, "paper") for k in KINDS], ("qwen2", "odd-chunk"), ("qwen2", "whole-loop"), ("llama", "deep-thinking")],
)
def test_every_way_of_reading_equals_the_recurrence(kind: str, variant: str) -> None:
    """Rounds over the cache, whole and in parts; the batched reader; and all chunks at once under the same thoughts."""
    model, backbone = tiny(kind, **VARIANTS[variant])
    c = model.config.chunk
    ids = text(6 * c + 2)
    want = read_slowly(model, backbone, ids, 6 * c)
    assert len(want.thoughts) == 6 and len(set(want.thoughts)) > 1 and any(1 in thought for thought in want.thoughts)

    for parts in ([len(ids)], [c + 1, 2, 3 * c - 1, c]):
        lm, start, pieces, made = ThinkingLM(model), 0, [], []
        cache = lm.new_cache(1, 48)
        assert cache.allocate() == 0  # a free row is nobody's
        cache.prompt_lengths[:] = 6 * c
        assert cache.keys[0].shape[1] == 2  # grouped heads are cached as they are
        for size in [*parts, len(ids) - sum(parts)]:
            if size:
                pieces.append(lm.forward(torch.tensor([ids[start : start + size]]), cache, [0], [start])[0])
                made += sorted(cache.take_thoughts(), key=lambda thought: thought.end)
                start += size
        assert [thought.token_ids for thought in made] == want.thoughts
        torch.testing.assert_close(torch.cat(pieces), want.logits, **CLOSE)

    assert own_thoughts(model, [ids[: 6 * c]]) == [tuple(want.thoughts)]
    with torch.inference_mode():
        logits, thought_logits = model(torch.tensor([ids]), thought_table([want.thoughts], 0))
    torch.testing.assert_close(logits[0], want.logits, **CLOSE)
    again = thought_logits[0].argmax(-1)
    assert all(tuple(row[: len(t)].tolist()) == t for row, t in zip(again, want.thoughts, strict=True))


def test_declared_deviations_hold_in_rounds_and_in_one_pass() -> None:
    """Learned pooling rows and first state take the backbone's dtype; both ways of reading agree on all of them."""
    deviations = dict(pooling="query", learned_first_state=True, bidirectional_prefix=True, attention_window=9)
    half = ThinkingPretrained(tiny_model("qwen2", torch.bfloat16), tiny("qwen2", **deviations)[0].config)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    model, _ = tiny("qwen2", **deviations)
    torch.nn.init.normal_(model.first_state, generator=torch.Generator().manual_seed(0))
    lm, ids = ThinkingLM(model), torch.tensor([text(26)])
    cache = lm.new_cache(1, 48)
    assert cache.allocate() == 0  # a free row is nobody's
    cache.prompt_lengths[:] = 24
    logits = lm.forward(ids, cache, [0], [0])
    thoughts = [t.token_ids for t in sorted(cache.take_thoughts(), key=lambda t: t.end)]
    assert len(set(thoughts)) > 1
    with torch.inference_mode():
        torch.testing.assert_close(model(ids, thought_table([thoughts], 0))[0], logits, **CLOSE)


def test_hook_points_have_transformer_lens_names() -> None:
    model, _ = tiny("qwen3")
    ids, thoughts = torch.tensor([text(8)]), torch.full((1, 2, 3), 5)
    _, seen = model.run_with_cache(ids, thoughts)
    for place in ("blocks.0", "blocks.2", "thinking.blocks.0", "compression.block"):
        sites = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        assert {f"{place}.hook_{site}" for site in sites} <= set(seen.keys())
        assert {f"{place}.attn.hook_{what}" for what in "qkvz"} <= set(seen.keys())
    assert {"hook_embed", "hook_state", "hook_h", "thinking.hook_logits", "compression.hook_state"} <= set(seen.keys())
    assert torch.equal(seen["hook_h"], seen["blocks.1.hook_resid_post"])
    assert torch.equal(seen["blocks.0.hook_resid_post"] + seen["hook_state"], seen["blocks.1.hook_resid_pre"])
    with model.hooks(fwd_hooks=[("blocks.2.attn.hook_pattern", lambda value, hook: value)]):
        patterned = model(ids, thoughts)[0]
    torch.testing.assert_close(patterned, model(ids, thoughts)[0], **CLOSE)


def test_the_engine_runs_it_deterministically() -> None:
    """Through the whole loop: drafted and verified beside other requests, against the oracle, bit for bit."""
    lm = ThinkingLM(tiny("qwen2")[0], name="tiny-thinking")
    prompts, rules = [text(16), text(12, 1), text(20, 2)], dict(window=4, group=2, capacity=64, max_new_tokens=4)
    trace = cp.run(lm, prompts, **rules, drafter=cp.drafters.NGram(), deterministic=True, progress=False)
    oracle = cp.reference(lm, prompts, **rules, progress=False)
    for i in range(3):
        assert trace.committed(i) == oracle.committed(i) and trace.digest(i) == oracle.digest(i)
    assert "ThinkingPretrained" in trace.fingerprint["architecture"]


def test_load_model_takes_it_with_its_tokenizer() -> None:
    model, (examples, tokenizer) = tiny("llama", chunk=8)[0], questions()
    lm, rules = cp.load_model(model, tokenizer), dict(window=8, capacity=64, max_new_tokens=3, progress=False)
    assert isinstance(lm, ThinkingLM) and lm.model is model and not model.training
    trace = cp.run(lm, examples[:2], **rules)
    thoughts = trace.thoughts()
    assert len(thoughts) == sum(r.num_prompt_tokens // 8 for r in trace.requests) > 2 and thoughts.text.str.len().all()
    by_ids = cp.run(cp.load_model(model), [list(r.prompt_token_ids) for r in trace.requests], **rules)
    assert [by_ids.committed(i) for i in (0, 1)] == [trace.committed(i) for i in (0, 1)]


@pytest.mark.parametrize(
    "asked, message",
    [
        (dict(dtype="bfloat16"), r"ThinkingPretrained is in float32, not bfloat16; convert it with .to\(torch"),
        (dict(device="cpu"), "a live ThinkingPretrained stays where it is"),
        (dict(adapter="coin-flip"), "not into a live ThinkingPretrained"),
    ],
)
def test_what_a_live_one_cannot_be_given_is_refused(asked: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        cp.load_model(tiny()[0], **asked)


def test_it_is_kept_as_the_refusal_to_save_it_says(tmp_path: Path) -> None:
    """`save_thinking` wrote what `load_thinking` then refused: a config does not make the backbone's layers."""
    model, backbone = tiny("llama-tied")
    with torch.no_grad():
        backbone.model.norm.weight.mul_(1.5)  # it may have learnt too
    with pytest.raises(ModelError, match=r"ThinkingPretrained is of a LlamaForCausalLM.* keep its weights with safet"):
        save_thinking(tmp_path / "model", model, questions()[1], {})
    assert not (tmp_path / "model").exists()
    save_file(dict(model.named_parameters()), tmp_path / "weights.safetensors")
    again = ThinkingPretrained(tiny_model("llama-tied"), model.config).eval()
    ids, thoughts = torch.tensor([text(26)]), torch.randint(2, VOCAB, (1, 6, 3))
    assert not torch.equal(again(ids, thoughts)[1], model(ids, thoughts)[1])
    again.load_state_dict(load_file(tmp_path / "weights.safetensors"), strict=False)
    assert all(torch.equal(a, b) for a, b in zip(again(ids, thoughts), model(ids, thoughts), strict=True))


# -- training


def test_a_short_training_lowers_both_losses() -> None:
    items = coins()
    model, _ = tiny("qwen2", chunk=8)
    loop = ModelLoop(model, LoopSettings(steps=30, lr=3e-3, warmup=5))
    seen = [
        p.losses for p in loop.minimise(lambda step: losses(model, collate(items[step % 4 * 16 :][:16], "thinking")))
    ]
    for name in ("lm", "thoughts"):
        first, last = (sum(step[name] for step in part) for part in (seen[:3], seen[-3:]))
        assert last < 0.5 * first, name
    assert all(weight.grad is not None for weight in model.parameters())
    assert len(evaluate(model, items[:4], "thinking").is_right) == 4


# -- refusals


def changed(**fields) -> PreTrainedModel:
    backbone = tiny_model("llama")
    for name, value in fields.items():
        setattr(backbone.config, name, value)
    return backbone


REFUSED = [
    (lambda: tiny_model("gpt2"), "T and C cannot be added to a GPT2LMHeadModel; give one of LlamaForCausalLM"),
    (lambda: tiny_model("gemma2"), "cannot be added to a Gemma2ForCausalLM"),
    (lambda: tiny_model("olmo2"), "cannot be added to a Olmo2ForCausalLM"),
    (lambda: LlamaForSequenceClassification(tiny_model("llama").config), "cannot be added to a LlamaForSequenceCl"),
    (lambda: tiny_model("mistral", window=8), "slides over a window of 8 tokens; set config.sliding_window=None"),
    (lambda: tiny_model("qwen2", window=8), "Qwen2ForCausalLM slides over a window of 8"),
    (lambda: changed(attention_dropout=0.1), "drops 0.1 of its attention"),
    (lambda: changed(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}), "turns positions by 'dynamic'"),
]


@pytest.mark.parametrize("make, message", REFUSED)
def test_other_architectures_are_refused_by_name(make, message: str) -> None:
    backbone = make()
    with pytest.raises(ModelError, match=message):
        config_of(backbone, eos_id=1, pad_id=0)
    with pytest.raises(ModelError, match=message):
        ThinkingPretrained(backbone, tiny()[0].config)


BAD = [
    (dict(n_layers=4), "n_layers is 3 in LlamaForCausalLM and 4 in the config"),
    (dict(positions="alibi"), "positions is 'rope' in LlamaForCausalLM and 'alibi'"),
    (dict(thinking_layers=4), "T copies the last layers, 1 to 3 of them, not 4"),
]


@pytest.mark.parametrize("changes, message", BAD)
def test_impossible_settings_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tiny(**changes)
