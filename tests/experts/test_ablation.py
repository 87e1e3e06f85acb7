"""Expert ablation against a plain model whose router has a logit of minus infinity."""

from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.ops.equality import bitwise, close
from tests.by_hand import generated
from tests.experts.families import loaded, plain
from tests.experts.slowly import ablated_slowly, routing_slowly
from tests.tiny import PROMPTS, SMALL

pytestmark = pytest.mark.determinism

CAPTURE = cp.CaptureConfig(sites="S", heads=("router",))
FEW: dict[str, Any] = {**SMALL, "max_new_tokens": 8, "capture": CAPTURE}
SUMS = "rows of other products, and the sum over experts: sums are in another order"
EARLY = cp.drafters.EarlyExit(layer=1)


def usual(family: str) -> int:
    """The expert of layer 1 that most tokens of the first request have."""
    table = cp.analysis.routing(cp.run(loaded(family), PROMPTS[:1], **FEW), layers=1)
    return int(table.expert.mode()[0])


@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("mixtral", "plain"),
        ("deepseek-v3", "bridge"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (
            ("mixtral", "bridge"), ("qwen3-moe", "plain"), ("olmoe", "plain"), ("qwen2-moe", "plain"),
            ("gpt-oss", "bridge"), ("deepseek-v2", "bridge"),
        )),
    ],
)  # fmt: skip
def test_equals_a_logit_of_minus_infinity(family: str, path: str) -> None:
    expert, layers = usual(family), [1] if family == "qwen2-moe" else [1, 2]
    both = cp.interventions.ablate_expert(expert, request_id=0, layers=layers, own_fingerprint=True)
    settings: dict[str, Any] = dict(**FEW, path=path, drafter=EARLY, deterministic=[0])
    trace = cp.run(loaded(family), PROMPTS[:2], **settings, interventions=both)
    slow = ablated_slowly(plain(family), layers, [expert])
    assert trace.committed(0) == generated(slow, PROMPTS[0], 8)
    there = routing_slowly(slow, [*PROMPTS[0], *trace.committed(0)][:-1])
    for layer in layers:
        experts, weights = there[layer]
        ours = trace.heads("router", layer, 0)
        assert torch.equal(ours[..., 0].long(), experts)
        is_ablated = ours[..., 0] == expert  # DeepSeek-V3's bias may still choose it, with a weight of zero
        assert not bool(ours[..., 1][is_ablated].any()) and (family == "deepseek-v3" or not bool(is_ablated.any()))
        assert close(ours[..., 1], weights, 1e-5, because=SUMS)
    untouched = cp.run(loaded(family), PROMPTS[:2], **settings)
    assert bool((untouched.heads("router", 1, 0)[..., 0] == expert).any())
    assert not bitwise(untouched.heads("router", 1, 0)[:5], trace.heads("router", 1, 0)[:5])
    assert untouched.committed(1) == trace.committed(1) and untouched.digest(0) != trace.digest(0)


def test_acts_at_its_positions_alone_and_reaches_the_oracle() -> None:
    model, expert = loaded("mixtral"), usual("mixtral")
    at: dict[str, Any] = dict(request_id=0, layers=1, positions=[2, 7], own_fingerprint=True)
    edits = cp.interventions.ablate_expert(expert, **at)
    settings: dict[str, Any] = dict(**FEW, interventions=edits)
    trace = cp.run(model, PROMPTS[:2], **settings, deterministic=[0], drafter=cp.drafters.NGram())
    oracle = cp.reference(model, PROMPTS[:1], **settings)
    assert trace.digest(0) == oracle.digest(0) and trace.edits().committed[0] == 2
    ids = trace.heads("router", 1, 0)[..., 0]
    assert not bool((ids[[2, 7]] == expert).any()) and bool((ids == expert).any())


def test_logits_may_be_changed_otherwise() -> None:
    """Site "router" takes the other interventions too: a logit raised by 100 makes its expert the first."""
    raised = torch.zeros(6)
    raised[4] = 100
    edit = cp.interventions.add(raised, request_id=0, site="router", layer=1)
    trace = cp.run(loaded("mixtral"), PROMPTS[:1], **FEW, interventions=edit)
    assert bool((trace.heads("router", 1, 0)[:, 0, 0] == 4).all())


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("mixtral", dict(experts=6, layers=1), "unknown expert 6; the layer has experts 0 to 5"),
        ("mixtral", dict(experts=range(5), layers=1), "1 experts remain, and 2 compute each token; ablate fewer"),
        ("mixtral", dict(experts=0, layers=3), "unknown layer 3"),
        ("deepseek-v3", dict(experts=0, layers=0), r"layer 0 has no experts; layers with experts: \[1, 2\]"),
        ("mixtral", dict(experts=-1, layers=0), "an expert must be a whole number of at least 0"),
        ("mixtral", dict(experts=[], layers=0), "experts is empty"),
        ("mixtral", dict(experts=0, layers=[]), "layers is empty"),
    ],
)
def test_what_cannot_be_ablated_is_refused(family: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        edit = cp.interventions.ablate_expert(**given, request_id=0)
        cp.run(loaded(family), PROMPTS[:1], **FEW, interventions=edit)
