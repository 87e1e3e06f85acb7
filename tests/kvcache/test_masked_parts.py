"""Cache rows hidden in some layers or heads alone: against attention patterns that are cut in a whole forward."""

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.core.hook_names import hook_name
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.kvcache.surgery import KVSnapshot, put_snapshot, take_snapshot
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.ops.equality import close
from tests.thinking.test_thinking import tiny
from tests.tiny import SMALL, loaded

SUMS = "without our cache the sums have other shapes"
PROMPT = [1, 2, 3, 4, 5, 6]
LIGHT = {**SMALL, "max_new_tokens": 8, "capture": "S", "sampling": cp.SamplingParams(stop_token_ids=())}
PLACES = [(0, 1, 2), (2, 0, 2), (2, 0, 4)]
"""(layer, head of keys and values, position)."""


def masked(rows: KVSnapshot) -> KVSnapshot:
    return rows.masked(2, layers=0, heads=1).masked([2, 4], layers=2, heads=[0])


def expected_states(model, text: list[int], key_heads: list[int]) -> Tensor:
    """[t, m] S of the last layer, without a cache, patterns of later tokens cut at PLACES and made to sum to one."""
    last: list[Tensor] = []

    def cut(pattern: Tensor, hook: object, layer: int) -> Tensor:
        kept = pattern.clone()
        shared = pattern.shape[1] // key_heads[layer]
        for of_layer, head, position in PLACES:
            if of_layer == layer:
                kept[:, head * shared : (head + 1) * shared, len(PROMPT) - 1 :, position] = 0
        return kept / kept.sum(-1, keepdim=True)

    def hook_of(layer: int):
        return lambda pattern, hook: cut(pattern, hook, layer)

    hooks = [(hook_name("pattern", layer), hook_of(layer)) for layer in range(len(key_heads))]
    hooks.append((hook_name("S", len(key_heads) - 1), lambda value, hook: last.append(value[0].clone())))
    with torch.inference_mode(), model.hooks(fwd_hooks=hooks):
        model(torch.tensor([text]))
    return last[0]


def require_cut(lm, model, **settings) -> None:
    """Generation from masked rows equals the whole forward with patterns cut, and not the one without."""
    rows = cp.kv_snapshot(lm, PROMPT, capacity=96)
    trace = cp.run(lm, [cp.Request(PROMPT, cached=masked(rows), own_fingerprint=True)], **settings, **LIGHT)
    text = [*PROMPT, *trace.committed(0)[:-1]]
    key_heads = [held.shape[0] for held in rows.keys]
    ours = trace.states("S", len(key_heads) - 1, 0)
    assert close(ours, expected_states(model, text, key_heads)[5:], 1e-5, because=SUMS)
    plain = cp.run(lm, [cp.Request(PROMPT, cached=rows, own_fingerprint=True)], **settings, **LIGHT)
    assert not close(
        ours[:1], plain.states("S", len(key_heads) - 1, 0)[:1], 1e-3, because="the control: the mask shows"
    )


@pytest.mark.parametrize(
    ("family", "path"), [("llama", "plain"), ("llama", "bridge"), ("gpt2", "plain"), ("gemma3", "bridge")]
)
def test_parts_are_hidden_in_every_family(family: str, path: str) -> None:
    lm = loaded(family)
    require_cut(lm, lm.bridge, path=path)


def test_parts_are_hidden_beyond_a_sliding_window() -> None:
    """A windowed mask and a plain one in one model; both are set for each layer."""
    lm = loaded("gemma2", window=8)
    rows = masked(cp.kv_snapshot(lm, PROMPT, capacity=96))
    settings = {**LIGHT, "max_new_tokens": 16}
    traces = [
        cp.run(lm, [cp.Request(PROMPT, cached=rows, own_fingerprint=True)], path=path, **settings)
        for path in ("plain", "bridge")
    ]
    assert traces[0].committed(0) == traces[1].committed(0)
    ours, theirs = (trace.states("S", 2, 0) for trace in traces)
    assert close(ours, theirs, 1e-4, because="fused attention against eager")


@pytest.mark.parametrize("changes", [{}, dict(positions="alibi", attention_window=7)], ids=["rope", "alibi, window"])
def test_parts_are_hidden_in_a_backbone_without_thoughts(changes: dict) -> None:
    lm = ThinkingLM(tiny(thinks=False, **changes))
    require_cut(lm, lm.model)


def test_all_layers_and_heads_are_the_whole_mask() -> None:
    lm = loaded()
    rows = cp.kv_snapshot(lm, PROMPT, capacity=96)
    drafter = cp.drafters.EarlyExit(layer=0)
    whole, parts = rows.masked([1, 2]), rows.masked([1, 2], layers=range(3), heads=range(2))
    assert not parts.hidden and len(parts.head_masks) == 12
    traces = [
        cp.run(lm, cp.Request(PROMPT, cached=rows, own_fingerprint=True), drafter=drafter, **LIGHT)
        for rows in (whole, parts)
    ]
    assert traces[0].committed(0) == traces[1].committed(0)
    assert close(traces[0].states("S", 2, 0), traces[1].states("S", 2, 0), 1e-6, because="other kernels, same masks")


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_edited_and_masked_rows_equal_the_oracle_under_traffic_and_preemptions(dtype: torch.dtype) -> None:
    lm = loaded(dtype=dtype)
    rows = masked(cp.kv_snapshot(lm, PROMPT, capacity=96)).edited(lambda old: old + 1, 2, heads=1).masked(0)
    request = cp.Request(PROMPT, cached=rows, is_deterministic=True, own_fingerprint=True, arrival_step=3)
    requests = [[7, 8, 9], cp.Request(PROMPT, is_deterministic=True), request]
    trace = cp.run(lm, requests, drafter=cp.drafters.EarlyExit(layer=0), max_kv_tokens=34, **LIGHT)
    oracle = cp.reference(lm, requests, **LIGHT)
    assert [trace.digest(i) for i in (1, 2)] == [oracle.digest(i) for i in (1, 2)]
    assert 2 in [request_id for request_id, _ in trace.meta["preemptions"]]
    assert trace.committed(1) != trace.committed(2)
    assert trace.fingerprint["cached"] == f"request 2: {rows.digest()}"


def test_parts_travel_with_rows_and_leave_with_them() -> None:
    rows = masked(cp.kv_snapshot(loaded(), PROMPT, capacity=96))
    assert rows.head_masks == frozenset(PLACES) and rows.provenance[2] == rows.provenance[4] == "edited"
    assert rows.cut(3).head_masks == {(0, 1, 2), (2, 0, 2)}
    assert rows.digest() != cp.kv_snapshot(loaded(), PROMPT, capacity=96).digest()
    cache = KVCache(2, 8, [(2, 8, 8)] * 3, torch.float32)
    row = cache.allocate()
    put_snapshot(rows, cache, row)
    cache.extend(row, 0, 5, "prefill")
    assert take_snapshot(cache, row, PROMPT[:5]).head_masks == rows.head_masks
    cache.truncate(row, 3)
    cache.extend(row, 3, 5, "decoded")
    assert take_snapshot(cache, row, PROMPT[:5]).head_masks == {(0, 1, 2), (2, 0, 2)}
    cache.release(row)
    assert not cache.head_masks.concern([row])


def test_a_model_on_two_devices_is_refused() -> None:
    cache = KVCache(1, 8, [(2, 8, 8)] * 2, torch.float32, [torch.device("cpu"), torch.device("meta")])
    row = cache.allocate()
    cache.head_masks.put(row, [(0, 0, 0)], [2, 2])
    staged = StagedCache(cache, [row], [2], 1)
    mask = staged.mask(torch.float32, "cpu")
    with pytest.raises(ValueError, match="need a model on one device; hide them in all layers"):
        staged.mask_by_layer(mask, 2)
