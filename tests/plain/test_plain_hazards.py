"""What a plain model could get wrong without a word: massive dimensions in 16 bits, a pass that failed, a scale that
depends on the length, experts and caps that are not the model's own."""

import copy
import sys

import pytest
import torch

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.checks import check_model
from cacheprobe.models.experts import ALL_EXPERTS_FUNCTIONS, INVARIANT, invariant_experts
from cacheprobe.models.feeding import feed
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.models.plain.watch import _capped
from tests.field.tiny_family import tiny_family
from tests.field.variants import VARIANTS
from tests.tiny import SMALL

IDS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
SHARED = ["block_sparse_moe", "shared_mlp"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [1, 300])
def test_a_massive_dimension_hides_no_part_of_the_sum(dtype: torch.dtype, factor: float) -> None:
    live = tiny_family("granitemoeshared", dict(residual_multiplier=1.0))
    with torch.no_grad():
        live.model.layers[1].block_sparse_moe.experts.down_proj[:, 3] *= factor
    plain = PlainLM(live.to(dtype), None, "tiny")
    check_model(plain)
    assert [[part.path.rpartition(".")[2] for part in block.mlp] for block in plain.blocks] == [SHARED] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_massive_bias_is_no_reason_to_refuse(dtype: torch.dtype) -> None:
    live = tiny_family("opt")
    with torch.no_grad():
        for layer in live.model.decoder.layers:
            layer.fc2.bias[5] = 500.0
    check_model(PlainLM(live.to(dtype), None, "tiny"))


def test_the_real_model_in_16_bits_without_a_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cacheprobe.models.hf.bridge", None)
    model = cp.load_model("smollm2-135m", dtype="bfloat16", progress=False)
    assert isinstance(model, PlainLM)
    assert all(part.path.endswith("self_attn") for block in model.blocks for part in block.attended)


def test_a_pass_that_fails_leaves_nothing_in_the_next() -> None:
    """The engine tries each request of a failed pass again, with the same hooks."""
    plain = PlainLM(tiny_family("granitemoeshared"), None, "tiny")
    wanted = feed(plain, IDS, [("C", 1)]).states["C", 1]
    failures = iter([True])

    def fail(*given: object) -> None:
        if next(failures, False):
            raise torch.OutOfMemoryError("once")

    model, prompts = cp.load_model(tiny_family("granitemoeshared")), [IDS[0].tolist(), [4, 5, 6]]
    whole = cp.run(model, prompts, **SMALL)
    assert isinstance(model, PlainLM)
    shared = model.model.get_submodule(model.blocks[1].mlp[1].path)
    handle = shared.register_forward_pre_hook(fail)
    again = cp.run(model, prompts, **SMALL)
    handle.remove()
    assert next(failures, None) is None and not again.meta["errors"]
    for request_id in range(2):
        ours, theirs = (trace.states("C", 1, request_id) for trace in (again, whole))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # a request alone gets its sums in another order
    torch.testing.assert_close(whole.states("C", 1, 0)[: IDS.shape[1]], wanted[0], rtol=1e-4, atol=1e-4)


def test_a_scale_by_length_limits_the_context() -> None:
    """Llama 4 asks the cache for one length, and scales the queries of all rows by it from floor_scale on."""
    model = cp.load_model(tiny_family("llama4_text", dict(floor_scale=60, attn_scale=1.0)))
    assert model.n_ctx == 59
    with pytest.raises(ValueError, match="context of 59"):
        cp.run(model, [list(range(1, 50))], max_new_tokens=20, progress=False)


def test_experts_are_compared_with_the_models_own_at_load() -> None:
    live = tiny_family("mixtral")
    try:
        ALL_EXPERTS_FUNCTIONS.register(INVARIANT, lambda experts, states, ids, weights: torch.zeros_like(states))
        with pytest.raises(ModelError, match="differs from the model without it"):
            check_model(PlainLM(copy.deepcopy(live), None, "tiny"))
        with pytest.raises(ModelError, match="differs from the model without it"):
            cp.load_model(live)
    finally:
        ALL_EXPERTS_FUNCTIONS.register(INVARIANT, invariant_experts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cap_that_changes_the_probe_little_is_kept(dtype: torch.dtype) -> None:
    plain = PlainLM(tiny_family("gemma2", dict(final_logit_softcapping=30.0)).to(dtype), None, "tiny")
    assert getattr(plain.head.finish, "func", None) is _capped


def test_head_counts_of_each_layer() -> None:
    variant = VARIANTS["head counts per layer"]
    model = cp.load_model(tiny_family(variant.family, variant.fields))
    for layer, heads in ((0, 4), (1, 2)):
        with pytest.raises(ValueError, match=rf"layer {layer} has heads 0 to {heads - 1}"):
            cp.run(
                model, [[1, 2]], interventions=cp.interventions.zero(request_id=0, site="T", layer=layer, head=heads)
            )
    edit = cp.interventions.zero(request_id=0, site="T", layer=1, head=1)
    fast, bridge = (
        cp.run(model, [[1, 2, 3]], **SMALL, path=path, capture="T", interventions=edit) for path in ("plain", "bridge")
    )
    assert fast.committed(0) == bridge.committed(0)
    torch.testing.assert_close(fast.states("T", 1, 0), bridge.states("T", 1, 0), rtol=1e-4, atol=1e-5)
    unchanged = cp.run(model, [[1, 2, 3]], **SMALL, capture="T")
    assert not torch.allclose(fast.states("T", 1, 0)[:3], unchanged.states("T", 1, 0)[:3], atol=1e-3)


def test_a_path_that_is_not_there() -> None:
    model = cp.load_model(tiny_family("biogpt"))
    with pytest.raises(ModelError, match="TransformerBridge does not take BioGptForCausalLM"):
        cp.run(model, [[1, 2]], path="bridge", progress=False)
