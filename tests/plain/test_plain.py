"""PlainLM, which runs a transformers model without a bridge: its sites against the bridge's and against sums, what it
refuses, and a run without transformer-lens."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.checks import check_model
from cacheprobe.models.feeding import feed
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.equality import close
from tests.field.tiny_family import tiny_family
from tests.tiny import hf_model, loaded

IDS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])


@pytest.mark.parametrize(
    "family", ["phi", "gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gpt2", "olmo2"))]
)
def test_its_sites_equal_the_bridges(family: str) -> None:
    bridge, plain = loaded(family), PlainLM(copy.deepcopy(hf_model(family)), None, family)
    check_model(plain)
    sites = [("pre", 0)] + [(site, layer) for layer in range(bridge.n_layers) for site in ("S", "T", "C", "z")]
    ours, theirs = feed(plain, IDS, sites), feed(bridge, IDS, sites)
    assert close(ours.out, theirs.out, 1e-4, because="fused attention reorders sums")
    for place in sites:
        assert close(ours.states[place], theirs.states[place], 1e-4, because="fused attention reorders sums"), place
    states = theirs.states["S", bridge.n_layers - 1][0]
    assert close(plain.read_out(states), bridge.read_out(states), 1e-5, because="the bridge adds a bias of zeros")
    assert plain.head_shape == bridge.head_shape and plain.layer_shapes == bridge.layer_shapes


MODULES = {
    "exaone4": ("post_attention_layernorm", ["post_feedforward_layernorm"], 1.0),
    "granite": ("self_attn", ["mlp"], 0.7),
    "bloom": ("self_attention.dense", ["mlp.dense_4h_to_h"], 1.0),
    "phi": ("self_attn", ["mlp"], 1.0),
    "granitemoeshared": ("self_attn", ["block_sparse_moe", "shared_mlp"], 0.7),
}
"""Written down from transformers' source: what adds T, what adds C, and the factor of both."""


@pytest.mark.parametrize("family", MODULES)
def test_the_modules_that_it_finds(family: str) -> None:
    plain = PlainLM(tiny_family(family), None, family)
    attended, mlp, factor = MODULES[family]
    for block in plain.blocks:
        start = len(block.path) + 1
        found = block.attended[0].path[start:], [part.path[start:] for part in block.mlp]
        assert len(block.attended) == 1 and found[0].startswith(attended) and found[1] == mlp, block
        assert {part.factor for part in (*block.attended, *block.mlp)} == {factor}


def test_an_edit_of_a_sum_of_two_modules_gives_the_edited_sum() -> None:
    plain = PlainLM(tiny_family("granitemoeshared"), None, "tiny")
    wanted = torch.ones(1, IDS.shape[1], plain.d_model)
    sites = [("S", 0), ("T", 1), ("S", 1)]
    with plain.editing([("C", 1)], lambda site, layer, value: wanted):
        states = feed(plain, IDS, sites).states
    total = states["S", 0] + states["T", 1] + wanted
    assert close(states["S", 1], total, 1e-5, because="the last summand is a difference")


def test_the_users_model_stays_as_it_was_and_shares_its_weights() -> None:
    live = tiny_family("opt")
    with torch.no_grad():
        before = live(IDS).logits
    plain = cp.load_model(live)
    assert isinstance(plain, PlainLM)
    with torch.no_grad():
        assert torch.equal(live(IDS).logits, before)
        live.model.decoder.layers[1].fc2.weight.mul_(0)
        assert close(feed(plain, IDS).out, live(IDS).logits, 1e-4, because="fused attention reorders sums")


def test_what_a_trace_says_of_the_path() -> None:
    model = cp.load_model(tiny_family("bloom"))
    trace = cp.run(model, [[1, 2, 3]], max_new_tokens=3, window=2, group=1, capacity=32, progress=False)
    assert trace.fingerprint["path"] == "plain"
    assert trace.meta["path_reason"] == "plain: no hook is set"


def test_positions_of_another_sequence_are_noticed() -> None:
    """A family that takes every position from the first sequence is wrong in a batch only."""
    plain = PlainLM(copy.deepcopy(hf_model("gemma3")), None, "gemma3")
    forward = plain.model.forward

    def of_first(token_ids: Tensor, position_ids: Tensor | None = None, **more: object) -> object:
        positions = None if position_ids is None else position_ids[:1].expand_as(position_ids)
        return forward(token_ids, position_ids=positions, **more)

    vars(plain.model)["forward"] = of_first
    with pytest.raises(ModelError, match="beside a sequence of another length"):
        check_model(plain)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        *[("bert", "not its input plus"), ("openai-gpt", "keep keys and values"), ("doge", "not its input plus")],
        *[("recurrent_gemma", "block 0 keeps nothing in the cache"), ("inkling_text", "several modules of block 0")],
    ],
)
def test_a_model_whose_values_do_not_add_up_is_refused(family: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        PlainLM(tiny_family(family), None, family)


_WITHOUT = """
import sys
sys.modules["transformer_lens"] = None
import cacheprobe as cp
from cacheprobe_benchmarks.shared.tiny import tiny_model
model = cp.load_model(tiny_model("llama"))
trace = cp.run(model, [[1, 2, 3]], max_new_tokens=4, window=2, group=1, capacity=32, progress=False)
print(trace.fingerprint["path"], trace.meta["path_reason"], trace.committed(0))
try:
    cp.analysis.to_activation_cache(trace, 0)
except ValueError as error:
    print(error)
"""


def test_without_transformer_lens_the_plain_model_runs() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = cp.run(loaded("llama"), [[1, 2, 3]], max_new_tokens=4, window=2, group=1, capacity=32, progress=False)
    assert f"plain plain: no hook is set {expected.committed(0)}" in done.stdout
    assert "needs transformer-lens" in done.stdout
