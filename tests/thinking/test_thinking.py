"""The Thinking States model: one chunk after another is what every faster way must give."""

import dataclasses
import random
from functools import cache

import pytest
import torch

from cacheprobe.models.base import ModelError
from cacheprobe.models.thinking.config import ThinkingConfig
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.models.thinking.model import ThinkingModel, pad_in_front, thought_table
from tests.twins.thinking_slowly import read_slowly

TINY = dict(d_vocab=19, n_ctx=128, d_model=32, n_layers=3, n_heads=2, d_mlp=32, l_in=1, l_out=2, max_thought=4)
VARIANTS = {
    "paper": {},
    "nope": dict(positions="nope"),
    "alibi": dict(positions="alibi"),
    "window": dict(attention_window=6),
    "alibi-window-odd-chunk": dict(positions="alibi", attention_window=5, chunk=3),
    "first-state": dict(learned_first_state=True),
    "no-feedback-first-state": dict(feeds_back=False, learned_first_state=True),
    "query-pooling": dict(pooling="query"),
    "causal-compression": dict(compression_is_causal=True),
    "bidirectional-prefix": dict(bidirectional_prefix=True),
    "bidirectional-prefix-alibi": dict(bidirectional_prefix=True, positions="alibi"),
    "while-decoding": dict(think_while_decoding=True),
    "deep-thinking": dict(thinking_layers=2, l_in=0, l_out=3),
    "one-token-chunks": dict(chunk=1),
}
CLOSE = dict(rtol=0, atol=1e-5)
"""Float32 logits of up to 6, sums of 32 terms in another order: 7.6e-6 at most with AVX2, less with AVX-512 and without
either."""


def tiny(seed: int = 0, **changes) -> ThinkingModel:
    """Random weights, large enough that thoughts and states matter to what is said."""
    model = ThinkingModel(ThinkingConfig(**{**TINY, **changes}), seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.mul_(3.0)
            if name == "first_state":
                weight.normal_(generator=torch.Generator().manual_seed(seed))
    return model.eval()


@cache
def often_silent(share: float) -> tuple[ThinkingModel, list[int], list[bool]]:
    """A model and a text of 20 chunks of which about `share` get a thought that is not empty; and which do.

    The end's row of T's unembedding is moved along the mean of what it is multiplied with: its logit rises alike in
    every chunk.
    """
    for seed in range(12):
        ids, model, normed = text(20 * 4, seed), tiny(seed), []
        lm, rows = opened(model, len(ids), capacity=96)
        name = "thinking.ln_final.hook_normalized"
        with model.hooks(fwd_hooks=[(name, lambda value, hook, normed=normed: normed.append(value[0, 0].clone()))]):
            lm.forward(torch.tensor([ids]), rows, [0], [0])
        mean = torch.stack(normed).mean(0)
        ahead = sorted(float(t.first_logits[2:].max() - t.first_logits[1]) for t in rows.take_thoughts())
        with torch.no_grad():
            model.thinking.unembed.weight[1] += ahead[round((1 - share) * 20) - 1] * mean / mean.dot(mean) * (share < 1)
        lm.forward(torch.tensor([ids]), rows, [0], [0])
        speaks = [t.token_ids != (1,) for t in sorted(rows.take_thoughts(), key=lambda t: t.end)]
        if abs(sum(speaks) / len(speaks) - share) <= 0.1 and sum(speaks[:-1]):
            return model, ids, speaks
    raise AssertionError("no seed gives this share")


def text(n: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(2, TINY["d_vocab"]) for _ in range(n)]


def opened(model: ThinkingModel, num_prompt: int, rows: int = 1, capacity: int = 64):
    lm = ThinkingLM(model)
    cache = lm.new_cache(rows, capacity)
    for row in range(rows):
        assert cache.allocate() == row
    cache.prompt_lengths[:] = num_prompt
    return lm, cache


@pytest.mark.parametrize("variant", VARIANTS)
def test_rounds_equal_one_chunk_after_another(variant: str) -> None:
    model = tiny(**VARIANTS[variant])
    ids = text(26)
    want = read_slowly(model, ids, 22)
    lm, cache = opened(model, 22)
    logits = lm.forward(torch.tensor([ids]), cache, [0], [0])[0]
    thoughts = sorted(cache.take_thoughts(), key=lambda thought: thought.end)
    assert [thought.token_ids for thought in thoughts] == want.thoughts and len(want.thoughts) >= 22 // 4
    assert len(set(want.thoughts)) > 1
    torch.testing.assert_close(logits, want.logits, **CLOSE)


@pytest.mark.parametrize("variant", ["paper", "while-decoding", "alibi-window-odd-chunk"])
def test_any_split_with_rollbacks_reads_the_same(variant: str) -> None:
    """Rows of their own lengths, fed in blocks of 1 to 6 with pads; a third of the blocks are wrong and taken back."""
    model, dice = tiny(**VARIANTS[variant]), random.Random(1)
    texts = [text(n, seed=n) for n in (31, 18, 24)]
    prompts = [20, 18, 9]
    lm, cache = opened(model, 0, rows=3)
    cache.prompt_lengths[:] = torch.tensor(prompts)
    cache.chunk_states.normal_(), cache.layer_outputs.normal_()  # what lies there may not matter
    at, pieces, said = [0, 0, 0], [[], [], []], [{}, {}, {}]
    while any(start < len(ids) for start, ids in zip(at, texts, strict=True)):
        sizes = [min(dice.randint(1, 6), len(ids) - start) for start, ids in zip(at, texts, strict=True)]
        fed = torch.randint(2, 19, (3, 6), generator=torch.Generator().manual_seed(dice.randrange(10**6)))
        is_wrong = [dice.random() < 1 / 3 for _ in texts]
        for b, (ids, start, size) in enumerate(zip(texts, at, sizes, strict=True)):
            if not is_wrong[b]:
                fed[b, :size] = torch.tensor(ids[start : start + size])
        logits = lm.forward(fed, cache, [0, 1, 2], list(at))
        made = cache.take_thoughts()
        for b, size in enumerate(sizes):
            if not is_wrong[b]:
                said[b] |= {t.end: t.token_ids for t in made if t.cache_row == b and at[b] <= t.end < at[b] + size}
                at[b] += size
                pieces[b].append(logits[b, :size])
    for b, ids in enumerate(texts):
        want = read_slowly(model, ids, prompts[b])
        assert [said[b][end] for end in sorted(said[b])] == want.thoughts
        torch.testing.assert_close(torch.cat(pieces[b]), want.logits, **CLOSE)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "while-decoding"])
def test_all_chunks_at_once_under_their_thoughts_equal_the_recurrence(variant: str) -> None:
    model = tiny(**VARIANTS[variant])
    c = model.config.chunk
    ids = text(6 * c + 2)
    want = read_slowly(model, ids, 6 * c)
    table = thought_table([want.thoughts], 0)
    with torch.inference_mode():
        logits, thought_logits = model(torch.tensor([ids]), table)
    torch.testing.assert_close(logits[0], want.logits, **CLOSE)
    again = thought_logits[0].argmax(-1)
    assert all(tuple(row[: len(t)].tolist()) == t for row, t in zip(again, want.thoughts, strict=True))


@pytest.mark.parametrize("share", [0.05, 0.25, 1.0])
def test_speculative_prefill_is_exact_in_one_round_more_than_thoughts(share: float) -> None:
    """Against one pass for each chunk: the same thoughts and logits. The last chunk's thought acts beyond the text and
    costs no round."""
    model, ids, speaks = often_silent(share)
    lm, cache = opened(model, len(ids), capacity=96)
    whole = lm.forward(torch.tensor([ids]), cache, [0], [0])[0]
    assert lm.num_rounds == sum(speaks[:-1]) + 1
    at_once = {t.end: t.token_ids for t in cache.take_thoughts()}
    lm, cache = opened(model, len(ids), capacity=96)
    parts, one_by_one = [], {}
    for start in range(0, len(ids), 4):
        parts.append(lm.forward(torch.tensor([ids[start : start + 4]]), cache, [0], [start])[0])
        one_by_one |= {t.end: t.token_ids for t in cache.take_thoughts()}
    torch.testing.assert_close(whole, torch.cat(parts), **CLOSE)
    assert at_once == one_by_one and len(at_once) == 20
    assert [at_once[end] != (1,) for end in sorted(at_once)] == speaks


def test_the_first_state_is_zero_and_an_empty_thought_is_compressed() -> None:
    model, ids, speaks = often_silent(0.25)
    seen = []
    with model.hooks(fwd_hooks=[("hook_state", lambda value, hook: seen.append(value.clone()))]):
        lm, cache = opened(model, len(ids), capacity=96)
        lm.forward(torch.tensor([ids]), cache, [0], [0])
    states = seen[-1][0].unflatten(0, (-1, 4))
    assert not states[0].any()
    silent = [state for state, spoke in zip(states[1:], speaks, strict=False) if not spoke]
    assert silent and silent[0].abs().max() > 0 and all(torch.equal(state, silent[0]) for state in silent)
    torch.testing.assert_close(silent[0], model.compress(torch.tensor([[1]]))[0], **CLOSE)


def test_a_short_thought_is_not_lost_among_pads() -> None:
    """Whatever the padding: every row of a one-word thought's state tells it from another's."""
    model = tiny()
    with torch.inference_mode():
        a, b = model.compress(torch.tensor([[5, 1], [6, 1]]))
        wide = model.compress(torch.tensor([[5, 1, 0, 0, 0, 0, 0], [6, 1, 0, 0, 0, 0, 0]]))
    assert ((a - b).abs().amax(-1) > 1e-2).all()
    torch.testing.assert_close(wide, torch.stack([a, b]), **CLOSE)


def test_hook_points_have_transformer_lens_names() -> None:
    model = tiny()
    ids, table = torch.tensor([text(8)]), torch.full((1, 2, 3), 5)
    _, cache = model.run_with_cache(ids, table)
    names = set(cache.keys())
    for layer in range(3):
        for site in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"):
            assert f"blocks.{layer}.hook_{site}" in names
        assert {f"blocks.{layer}.attn.hook_{what}" for what in "qkvz"} <= names
    assert {"hook_embed", "hook_state", "hook_h", "thinking.hook_logits", "compression.hook_state"} <= names
    assert {"thinking.blocks.0.hook_mlp_out", "compression.block.attn.hook_z"} <= names
    assert torch.equal(cache["hook_h"], cache["blocks.1.hook_resid_post"])
    summed = cache["blocks.0.hook_resid_post"] + cache["hook_state"]
    assert torch.equal(cache["blocks.1.hook_resid_pre"], summed)


def test_patterns_are_computed_where_they_are_asked_for() -> None:
    model, ids = tiny(attention_window=5), torch.tensor([text(9)])
    lm, cache = opened(model, 0)
    want = lm.forward(ids, cache, [0], [0])
    seen = {}
    name = "blocks.2.attn.hook_pattern"
    with model.hooks(fwd_hooks=[(name, lambda value, hook: seen.update({"pattern": value}))]):
        got = lm.forward(ids, cache, [0], [0])
    torch.testing.assert_close(got, want, **CLOSE)
    pattern = seen["pattern"][0, :, :, :9]
    torch.testing.assert_close(pattern.sum(-1), torch.ones(2, 9))
    assert (pattern.tril() == pattern).all() and not pattern[:, 8, :4].any()


def test_edited_weights_and_hooked_compression_are_noticed() -> None:
    """States of thoughts are kept from pass to pass, for as long as they hold."""
    model, ids = tiny(), torch.tensor([text(16)])
    lm, cache = opened(model, 16)
    before = lm.forward(ids, cache, [0], [0])
    with model.hooks(fwd_hooks=[("compression.hook_state", lambda value, hook: value * 0)]):
        without = lm.forward(ids, cache, [0], [0])
    assert torch.equal(lm.forward(ids, cache, [0], [0]), before) and not torch.equal(without, before)
    with torch.no_grad():
        model.compression.block.mlp.down.weight.mul_(-1)
    assert not torch.equal(lm.forward(ids, cache, [0], [0]), before)


def test_thoughts_that_do_not_end_are_cut_and_say_so() -> None:
    model = tiny()
    with torch.no_grad():
        model.thinking.unembed.weight[1] = 0
        model.thinking.unembed.weight[7] = 5 * model.thinking.unembed.weight[7]
    lm, cache = opened(model, 8)
    lm.forward(torch.tensor([text(8)]), cache, [0], [0])
    thoughts = cache.take_thoughts()
    long = [thought for thought in thoughts if not thought.has_ended]
    assert long and all(len(thought.token_ids) == TINY["max_thought"] for thought in long)
    assert cache.take_thoughts() == []


def test_padding_moves_to_the_front() -> None:
    ids = torch.tensor([[5, 1, 0], [6, 7, 1], [0, 0, 0]])
    assert pad_in_front(ids, 4, 0).tolist() == [[0, 0, 5, 1], [0, 6, 7, 1], [0, 0, 0, 0]]


BAD = [
    (dict(l_in=2, l_out=2), "l_in < l_out"),
    (dict(l_in=True), "l_in < l_out <= n_layers, got True, 2, 3"),
    (dict(chunk=0), "chunk must be"),
    (dict(n_heads=3), "does not split"),
    (dict(positions="learned"), "choose one of rope"),
    (dict(pooling="mean"), "choose one of last"),
    (dict(attention_window=0), "attention_window"),
    (dict(attention_window=True), "attention_window must be a whole number of at least 1 or None, got True"),
    (dict(eos_id=0), "token 0 cannot both end a thought and pad it; declare another pad_id"),
    (dict(eos_id=19), "eos_id of 19 is no token of a vocabulary of 19; give one of 0 to 18"),
    (dict(eos_id=True), "eos_id of True is no token"),
    (dict(pad_id=-1), "pad_id of -1 is no token"),
    (dict(thinking_layers=0), "thinking_layers must be a whole number of at least 1, got 0"),
    (dict(rope_theta=0.0), r"rope_theta must be a number above 0, got 0\.0"),
]


@pytest.mark.parametrize("changes, message", BAD)
def test_impossible_settings_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ThinkingConfig(**{**TINY, **changes})


def test_a_config_reads_what_it_wrote() -> None:
    config = ThinkingConfig(**TINY, positions="alibi")
    assert ThinkingConfig.from_json(config.to_json()) == config
    with pytest.raises(ModelError, match="unknown field 'depth'"):
        ThinkingConfig.from_json({**config.to_json(), "depth": 3})
    with pytest.raises(ModelError, match="format 99"):
        ThinkingConfig.from_json({**config.to_json(), "format": 99})
    with pytest.raises(ModelError, match="without the field 'd_vocab'; give it"):
        ThinkingConfig.from_json({name: value for name, value in config.to_json().items() if name != "d_vocab"})
    assert dataclasses.replace(config, chunk=2).chunk == 2


def test_thoughts_that_do_not_fit_the_model_or_the_text_are_refused() -> None:
    """Of 21 tokens in chunks of 4: five thoughts of up to 4 tokens each, and fewer where an answer follows."""
    model, ids = tiny(), torch.tensor([text(21)])
    for k in (1, 5):
        model(ids, torch.full((1, k, 4), 5))
    with pytest.raises(ModelError, match="thoughts of up to 5 tokens, .* max_thought=4; annotate the texts with max_"):
        model(ids, torch.full((1, 5, 5), 5))
    with pytest.raises(ModelError, match="of 6 chunks for texts of 21 tokens, which hold 5 chunks of 4; .* chunk=4"):
        model(ids, torch.full((1, 6, 4), 5))
