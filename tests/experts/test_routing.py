"""Routing: what a run keeps of it against hooks on Hugging Face's own routers; D1, D2, storage and statuses."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.ops.equality import bitwise, close
from tests.experts.families import DENSE, FAMILIES, TOP_K, loaded, plain
from tests.experts.slowly import routing_slowly
from tests.tiny import PROMPTS, SMALL
from tests.tiny import loaded as loaded_dense

pytestmark = pytest.mark.determinism

FEW: dict[str, Any] = {**SMALL, "max_new_tokens": 8}
EARLY = cp.drafters.EarlyExit(layer=1)
QUICK = ("mixtral", "gpt-oss", "deepseek-v3")
ALL = pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in QUICK else [pytest.mark.slow]) for family in FAMILIES]
)
SUMS = "rows of other products, and the sum over experts: sums are in another order"


def captured(sites: str | None = "S", **filters: Any) -> cp.CaptureConfig:
    return cp.CaptureConfig(sites=sites, heads=("router",), **filters)


@cache
def drafted(family: str = "mixtral") -> cp.Trace:
    """Mostly rolled back: an early layer drafts."""
    return cp.run(loaded(family), PROMPTS[:2], **FEW, capture=captured(), drafter=EARLY, deterministic=[0])


@ALL
def test_routing_equals_hooks_on_hugging_faces_routers(family: str) -> None:
    trace, model = drafted(family), plain(family)
    assert trace.num_rolled_back > 0
    table = cp.analysis.routing(trace)
    assert set(table.layer) == set(range(3)) - set(DENSE.get(family, ()))
    for i, prompt in enumerate(PROMPTS[:2]):
        there = routing_slowly(model, [*prompt, *trace.committed(i)][:-1])
        own = table[(table.request_id == i) & (table.status == "committed")]
        assert set(there) == set(own.layer)
        for layer, (experts, weights) in there.items():
            lines = own[own.layer == layer].sort_values(["position", "rank"])
            assert lines["rank"].tolist() == list(range(TOP_K[family])) * len(experts)
            assert lines.expert.tolist() == experts.flatten().tolist()
            ours = torch.tensor(lines.weight.to_numpy()).view(weights.shape)
            assert close(ours, weights, 1e-5, because=SUMS)


@pytest.mark.parametrize("family", ["mixtral", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_rejected_tokens_have_the_routing_of_their_branch(family: str) -> None:
    trace, model = drafted(family), plain(family)
    event = trace.events().query("num_rolled_back > 1").iloc[0]
    request, draft = int(event.request_id), list(event.draft_token_ids)
    text = [*PROMPTS[request], *trace.committed(request)][: event.draft_start] + draft
    rows = trace.rows(request, "rolled_back").query(f"step == {event.step}")
    table = cp.analysis.routing(trace, layers=2, rows=rows)
    assert set(table.status) == {"rolled_back"} and len(table) == TOP_K[family] * len(rows) > 0
    experts, weights = routing_slowly(model, text)[2]
    positions = rows.position.tolist()
    assert table.expert.tolist() == experts[positions].flatten().tolist()
    ours = torch.tensor(table.weight.to_numpy()).view(len(rows), -1)
    assert close(ours, weights[positions], 1e-5, because=SUMS)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=["bfloat16", "float32"]
)
@ALL
def test_a_deterministic_request_has_the_oracles_routing(family: str, dtype: torch.dtype) -> None:
    """D1 and D2: under traffic and a drafter, bit for bit what the request has alone."""
    settings: dict[str, Any] = dict(**FEW, capture=captured("STC"))
    model = loaded(family, dtype)
    late = cp.Request(PROMPTS[4], is_deterministic=True, arrival_step=3)
    trace = cp.run(model, [PROMPTS[0], late, PROMPTS[2]], **settings, deterministic=[0], drafter=cp.drafters.NGram())
    oracle = cp.reference(model, [PROMPTS[0], PROMPTS[4]], **settings)
    for number in (0, 1):
        assert trace.digest(number) == oracle.digest(number)
        assert bitwise(trace.heads("router", 1, number), oracle.heads("router", 1, number))


def test_verify_computes_the_routing_again() -> None:
    trace = cp.run(loaded("deepseek-v3"), PROMPTS[:1], **FEW, capture=captured(), deterministic=True)
    assert cp.verify(trace, progress=False).is_equal
    row = trace.rows(0, "committed").query("position == 9").state_index.item()
    trace.store.all_of("router", 2)[row, 0, 0] += 1
    assert "position 9: site router of layer 2 differs" in str(cp.verify(trace, progress=False).first_difference)


@pytest.mark.parametrize("is_recorded_to_disk", [False, True])
def test_a_stored_run_has_the_routing(tmp_path: Path, is_recorded_to_disk: bool) -> None:
    settings: dict[str, Any] = dict(**FEW, capture=captured(dtype="int8"), drafter=EARLY)
    out = tmp_path / "run"
    trace = cp.run(loaded("deepseek-v3"), PROMPTS[:2], **settings, out=out if is_recorded_to_disk else None)
    if not is_recorded_to_disk:
        trace.save(out)
    there = cp.load_trace(out)
    expected = cp.analysis.routing(cp.run(loaded("deepseek-v3"), PROMPTS[:2], **settings))
    assert cp.analysis.routing(there).equals(expected) and len(expected)
    assert expected.expert.between(0, 7).all()


def test_a_layer_without_experts_is_refused_by_name() -> None:
    trace = drafted("deepseek-v3")
    assert bool(trace.heads("router", 0, 0).isnan().all())
    with pytest.raises(ValueError, match="layer 0 of DeepseekV3ForCausalLM has no experts; leave out layers="):
        cp.analysis.routing(trace, layers=0)
    with pytest.raises(ModelError, match=r"has experts at layers 1, 2, and routing of layers \[0\] was asked for"):
        cp.run(loaded("deepseek-v3"), PROMPTS[:1], **FEW, capture=captured(layers=(0,)))
    with pytest.raises(ModelError, match="has no experts whose routing is known here, and routing of layers"):
        cp.run(loaded_dense(), PROMPTS[:1], **FEW, capture=captured())
    with pytest.raises(ValueError, match=r"site router was not captured.*CaptureConfig\(heads=\('router',\)\)"):
        cp.analysis.routing(cp.run(loaded("mixtral"), PROMPTS[:1], **FEW, capture="S"))
