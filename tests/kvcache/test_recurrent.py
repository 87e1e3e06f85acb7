"""Recurrent and convolution states beside the KV cache: against transformers' own generation, against runs that never
saw a rejected token, and with a planted fault."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import cacheprobe as cp
from cacheprobe.kvcache.ledger import CacheIntegrityError
from cacheprobe.kvcache.recurrent import RecurrentCache, memory_of
from cacheprobe.models.base import ModelError
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.equality import close
from tests.feeding import fed_in_parts, texts
from tests.field.original import generated
from tests.field.tiny_family import tiny_family
from tests.interventions.recurrent_slowly import fed, states_in
from tests.invariants.runs import wrong_at
from tests.tiny import loaded

_SLOW = ("qwen3_next", "xlstm", "falcon_h1", "nemotron_h", "zamba", "zamba2")
FAMILIES = [
    *("mamba2", "bamba", "rwkv"),
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("olmo_hybrid", "lfm2", *_SLOW)),
]
"""State spaces alone, a Mamba hybrid, and states of two modules; slow ones have Gated DeltaNet, convolutions, experts,
mLSTMs, states beside keys and values, blocks of one module, or shared attention."""
PROMPTS = [[3, 10, 17, 24, 31, 38, 45, 52, 59, 66, 73], [5, 80, 33], [3] * 21, [7, 8, 9, 10], [5, 80, 33]]
SHAPE: dict[str, Any] = dict(window=4, group=2, capacity=96, max_new_tokens=10, progress=False)
SHAPE |= dict(sampling=cp.SamplingParams(stop_token_ids=()))


@cache
def original(family: str) -> PreTrainedModel:
    return tiny_family(family, {"eos_token_id": None})  # random weights may give a stop token early


@cache
def model(family: str) -> PlainLM:
    loaded = cp.load_model(copy.deepcopy(original(family)), products="torch")
    assert isinstance(loaded, PlainLM)
    return loaded


@cache
def oracle(family: str) -> cp.Trace:
    return cp.reference(model(family), PROMPTS, **SHAPE)


def drafted(family: str, **settings: Any) -> cp.Trace:
    """A deterministic run whose drafts are wrong at changing places."""
    drafter = wrong_at(oracle(family), [1, 0, None, 2, 1])
    return cp.run(model(family), PROMPTS, drafter=drafter, deterministic=True, **{**SHAPE, **settings})


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_give_the_tokens_of_generate_and_the_bits_of_the_oracle(family: str) -> None:
    trace = drafted(family)
    assert 0 < trace.num_rolled_back < trace.num_drafted
    for request, prompt in enumerate(PROMPTS):
        assert trace.committed(request) == generated(original(family), prompt, 10, [])
        assert trace.digest(request) == oracle(family).digest(request)


@pytest.mark.parametrize(
    "settings",
    [
        dict(max_kv_tokens=40),
        dict(prefill_group=2, prefill_chunk=8, pad_prefill=True),
        dict(prefill_chunk=4),
    ],
    ids=["preempted", "padded prompts", "prompts in parts"],
)
def test_the_schedule_changes_no_token(settings: dict[str, Any]) -> None:
    trace = drafted("bamba", **settings)
    assert bool(trace.meta["preemptions"]) == ("max_kv_tokens" in settings)
    assert [trace.committed(r) for r in range(5)] == [oracle("bamba").committed(r) for r in range(5)]


@pytest.mark.parametrize("drafter", [cp.drafters.EarlyExit(2), cp.drafters.NGram()], ids=["early exit", "n-grams"])
def test_drafters_that_use_the_model_or_the_text(drafter: Any) -> None:
    trace = cp.run(model("bamba"), PROMPTS, drafter=drafter, deterministic=True, **SHAPE)
    assert trace.num_drafted
    assert [trace.committed(r) for r in range(5)] == [oracle("bamba").committed(r) for r in range(5)]


def test_a_recurrent_draft_model() -> None:
    near = copy.deepcopy(original("mamba2"))
    with torch.no_grad():
        near.lm_head.weight += 0.05 * torch.randn(near.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
    drafter = cp.drafters.DraftModel(cp.load_model(near, products="torch"))
    trace = cp.run(model("mamba2"), PROMPTS, drafter=drafter, deterministic=True, **SHAPE)
    assert 0 < trace.num_rolled_back < trace.num_drafted / 2, "nearly the same model, from its own states"
    assert [trace.committed(r) for r in range(5)] == [oracle("mamba2").committed(r) for r in range(5)]


def test_the_invariant_way() -> None:
    alone = cp.run(model("mamba"), PROMPTS[:1], deterministic=True, determinism="invariant", **SHAPE)
    among = cp.run(model("mamba"), PROMPTS[:3], deterministic=True, determinism="invariant", **SHAPE)
    assert alone.digest(0) == among.digest(0)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_texts_with_pads_and_wrong_blocks(family: str) -> None:
    rows = texts(33, 21, 12)
    ours = fed_in_parts(model(family), rows)
    for b, text in enumerate(rows):
        with torch.inference_mode():
            theirs = original(family)(text[None], use_cache=False).logits[0]
        # chunks of tokens and single tokens round differently, by about 1e-6 of the largest value; a pad, wrong token
        # or other row in a state changes logits by more than .1
        assert close(ours[f"logits row {b}"], theirs, 1e-4, because="sums are reordered")


def test_few_positions_are_kept_if_states_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheprobe.kvcache.recurrent.MOST_BYTES", 1)
    monkeypatch.setattr("cacheprobe.kvcache.recurrent.LEAST_KEPT", 6)
    held = model("mamba2").new_cache(1, 96)
    for start in range(0, 40, 4):
        model("mamba2").forward(torch.tensor([[1, 2, 3, 4]]), held, [0], [start])
    memory = memory_of(held)
    assert memory is not None and isinstance(held, RecurrentCache)
    assert {at for _, at, *_ in memory.states(0)} == set(range(30, 40))
    assert held.cache_bytes == 6 * memory.bytes_of_position
    with pytest.raises(CacheIntegrityError, match="no recurrent state of layer 0 after position 19: .* 6 positions"):
        model("mamba2").forward(torch.tensor([[1]]), held, [0], [20])
    free = {**SHAPE, "window": 5, "group": None}  # not every processor computes 2 x 5 rows alike
    trace = cp.run(model("mamba2"), PROMPTS[:2], deterministic=True, **free)
    assert [trace.committed(r) for r in range(2)] == [oracle("mamba2").committed(r) for r in range(2)]
    with pytest.raises(CacheIntegrityError, match="choose a window below 6"):
        cp.run(model("mamba2"), PROMPTS, deterministic=True, **{**SHAPE, "window": 8})


@pytest.mark.parametrize(
    "family",
    [
        *("mamba2", "rwkv"),
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("mamba", "olmo_hybrid", "xlstm", "falcon_h1")),
    ],
)
def test_captured_states_are_those_of_the_original(family: str) -> None:
    """Against transformers' own cache after the same tokens, fed at once; also of rejected drafts."""
    one = model(family)
    drafter = wrong_at(oracle_of(family), [1, 0, 2])
    capture = cp.CaptureConfig(heads=("recurrent",))
    trace = cp.run(one, PROMPTS[:2], drafter=drafter, deterministic=True, capture=capture, **SHAPE)
    text = [*PROMPTS[1], *trace.committed(1)][:-1]
    rows = trace.rows()
    first = rows[(rows["status"] == "rolled_back") & (rows["request_id"] == 1)].iloc[:1]
    beside = [*text[: int(first["position"].iloc[0])], int(first["token_id"].iloc[0])]
    for layer, (heads, width) in one.state_shapes.items():
        ours = trace.heads("recurrent", layer, 1)
        assert ours.shape == (len(text), heads, width)
        rejected = trace.vectors("recurrent", layer, first)[0]
        for state, tokens in ((ours[0], text[:1]), (ours[-1], text), (rejected, beside)):
            theirs = states_in(fed(original(family), tokens)[1])[layer].flatten()
            # transformers computes the whole text in chunks; rounding differs by about 1e-6 of the largest value
            assert close(state.flatten(), theirs, 1e-4, because="sums are reordered")


@cache
def oracle_of(family: str) -> cp.Trace:
    return cp.reference(model(family), PROMPTS[:2], **SHAPE)


def test_recurrent_states_where_there_are_none() -> None:
    with pytest.raises(ModelError, match="has no recurrent states, and those of layers"):
        cp.run(loaded(), [[1, 2]], capture=cp.CaptureConfig(heads=("recurrent",)), **SHAPE)
    attends = next(layer for layer in range(4) if layer not in model("bamba").state_shapes)
    with pytest.raises(ModelError, match="no recurrent state at layer"):
        with model("bamba").capturing([("recurrent", attends)], lambda site, layer, value: None):
            pass
    with pytest.raises(ModelError, match="no recurrent state at layer"):
        with model("bamba").editing([("recurrent", attends)], lambda site, layer, value: None):
            pass
    capture = cp.CaptureConfig(heads=("recurrent",))
    trace = cp.run(model("bamba"), [[1, 2]], capture=capture, **SHAPE)
    assert bool(trace.heads("recurrent", attends, 0).isnan().all())


def test_nan_in_a_state_is_named() -> None:
    held = model("mamba2").new_cache(1, 8)
    held.allocate()
    model("mamba2").forward(torch.tensor([[1, 2]]), held, [0], [0])
    held.extend(0, 0, 2, "prefill")
    held.check_integrity()
    memory = memory_of(held)
    assert memory is not None
    states = memory.after(0, 0, 0)
    memory.record(0, 0, 0, {key: torch.full_like(value, float("nan")) for key, value in states.items()})
    with pytest.raises(CacheIntegrityError, match="conv state of cache row 0 after position 0 holds NaN"):
        held.check_integrity()


def test_what_cannot_be_served_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="layer 0 is recurrent and has no attention heads"):
        model("bamba").head_writer(0)
