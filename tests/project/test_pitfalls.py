"""What docs/pitfalls.md marks with ●: each mistake as it happens in other tools.

The mistakes are shown on the bridge and on transformers themselves; where one of them is mended there, its test fails,
and the page is to be changed.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.core.hook_names import hook_name
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.hf.cache import KVCacheAdapter
from cacheprobe.models.hf.masks import attention_masks
from cacheprobe.ops.equality import bitwise, close
from tests.tiny import PROMPTS, hf_model, loaded

TEXT = [*PROMPTS[4], 7, 8, 9]
LATER = len(TEXT) - 2
"""From here on the text is fed token by token."""
SUMS = "one token at a time and a whole text sum in other orders"
LIGHT = dict(window=4, group=2, capacity=96, max_new_tokens=6, progress=False)


def logits_in_steps(*hooks: tuple[str, Callable[..., Any]], cached: bool = True) -> Tensor:
    """[v] logits after TEXT on TransformerLens' own bridge: at once, or its first part and then token by token."""
    bridge = loaded().bridge
    parts = [TEXT[:LATER], *([token] for token in TEXT[LATER:])] if cached else [TEXT]
    cache, logits = None, None
    with torch.inference_mode(), bridge.hooks(fwd_hooks=list(hooks)):
        for part in parts:
            settings = dict(return_type="logits_and_cache", use_cache=True, past_key_values=cache)
            logits, cache = bridge.forward(torch.tensor([part]), **settings)
    assert logits is not None
    return logits[0, -1]


def test_index_0_is_the_newest_position() -> None:
    """The same hook, another model: with a cache it also changes every token that is fed by itself."""

    def change(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        value[:, 0] += 1.0
        return value

    where = (hook_name("S", 0), change)
    assert close(logits_in_steps(), logits_in_steps(cached=False), 1e-5, because=SUMS)
    assert not close(logits_in_steps(where), logits_in_steps(where, cached=False), 1e-2, because=SUMS)


def test_a_fixed_index_is_out_of_range_later() -> None:
    def zero(value: Tensor, hook: Any) -> Tensor:
        value[:, 7] = 0.0
        return value

    with pytest.raises(IndexError):
        logits_in_steps((hook_name("T", 1), zero))


def test_a_dictionary_by_name_keeps_the_last_step() -> None:
    seen: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any) -> None:
        seen["S"] = value.clone()

    logits_in_steps((hook_name("S", 1), keep))
    assert seen["S"].shape[1] == 1


def test_a_captured_tensor_is_no_copy() -> None:
    """What leaves block 0 is what enters block 1, and an edit in place there changes what was captured here."""
    held: list[Tensor] = []
    heard: list[Tensor] = []

    def keep(value: Tensor, hook: Any) -> None:
        held.append(value)
        heard.append(value.clone())

    def double(value: Tensor, hook: Any) -> None:
        value.mul_(2.0)

    logits_in_steps((hook_name("S", 0), keep), (hook_name("pre", 1), double), cached=False)
    assert bitwise(held[0], heard[0] * 2.0)

    twice = dict(request_id=0, site="pre", layer=1, positions=[2])
    plain = cp.run(loaded(), [TEXT], **LIGHT)
    vector = plain.states("S", 0, 0)[2]
    trace = cp.run(loaded(), [TEXT], interventions=cp.interventions.add(vector, **twice), **LIGHT)
    assert bitwise(trace.states("S", 0, 0)[2], vector)
    assert not close(trace.states("S", 1, 0)[2], plain.states("S", 1, 0)[2], 1e-2, because="the change shows")


def test_keys_are_those_of_new_tokens_and_patterns_no_squares() -> None:
    shapes: dict[str, list[tuple[int, ...]]] = {"k": [], "pattern": []}

    def note(site: str) -> tuple[str, Callable[..., None]]:
        return hook_name(site, 1), lambda value, hook: shapes[site].append(tuple(value.shape))

    logits_in_steps(note("k"), note("pattern"))
    assert [shape[1] for shape in shapes["k"]] == [LATER, 1, 1]
    assert shapes["pattern"][-1][-2:] == (1, len(TEXT))


def test_an_edit_of_values_lasts() -> None:
    """The hook acts in the first forward alone, and its edit is read in every later one."""
    calls: list[int] = []

    def once(value: Tensor, hook: Any) -> Tensor | None:
        calls.append(value.shape[1])
        return torch.zeros_like(value) if len(calls) == 1 else None

    where = (hook_name("v", 1), once)
    assert not close(logits_in_steps(where), logits_in_steps(), 1e-2, because=SUMS)
    assert calls == [LATER, 1, 1]


def test_a_mask_hides_no_nan() -> None:
    query, keys = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 3, 4)
    values = torch.randn(1, 1, 3, 4)
    values[0, 0, 2] = torch.nan
    mask = torch.tensor([[[[0.0, 0.0, -torch.inf]]]])
    assert torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask).isnan().any()
    rows = cp.kv_snapshot(loaded(), TEXT, capacity=96)
    with pytest.raises(ValueError, match=r"NaN or infinite .* use masked\(\) to hide positions"):
        rows.edited(lambda old: old * torch.nan, [2])


def test_a_boolean_mask_in_eager_attention_is_added() -> None:
    model = hf_model()
    model.set_attn_implementation("eager")
    token_ids = torch.tensor([TEXT])
    allowed = torch.ones(len(TEXT), len(TEXT), dtype=torch.bool).tril()[None, None]
    cache = KVCache(1, len(TEXT), [(2, 8, 8)], torch.float32, torch.device("cpu"))
    additive = attention_masks(model.config, StagedCache(cache, [0], [0], len(TEXT)), torch.float32, "cpu")
    with torch.inference_mode():
        right = model(token_ids).logits
        assert not close(model(token_ids, attention_mask=allowed).logits, right, 1e-2, because="it is wrong")
        assert close(model(token_ids, attention_mask=additive).logits, right, 1e-5, because="another mask, same sums")


def test_a_forgotten_mask_or_position_is_an_error() -> None:
    model = loaded()
    cache = StagedCache(model.new_cache(1, 32), [0], [0], len(TEXT))
    live = hf_model()
    settings = dict(past_key_values=KVCacheAdapter(cache), use_cache=True)
    positions = dict(position_ids=torch.arange(len(TEXT))[None])
    for given, missing in (({}, "position_ids"), (positions, "position_ids|attention mask")):
        with pytest.raises(RuntimeError, match=f"({missing}) must be passed"):
            live(torch.tensor([TEXT]), **given, **settings)


def test_cached_is_not_uncached_bit_for_bit() -> None:
    """On the very same library calls; in 16 bits the difference is as large as the format's steps."""
    whole, steps = logits_in_steps(cached=False), logits_in_steps()
    assert close(steps, whole, 1e-5, because=SUMS) and not bitwise(steps, whole)
