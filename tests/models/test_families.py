"""Every decoder family, in float32: the loop against the oracle, Hugging Face, and a clean run_with_cache."""

import pytest
import torch

import cacheprobe as cp
from cacheprobe.ops.equality import close
from tests.tiny import FAMILIES, PROMPTS, QUICK, QUICK_FAMILIES, SMALL, hf_model, loaded
from tests.twins.equivalence import hf_greedy

DRAFTERS = {"none": None, "early exit": cp.drafters.EarlyExit(layer=1), "fast path": cp.drafters.FastPath()}


ALIKE = [family for family in FAMILIES if family not in QUICK]
"""`make test` tries each of these families once, `make test-all` as the others."""


@pytest.mark.parametrize("name", ALIKE)
def test_a_family_like_another(name: str) -> None:
    """Twin and bridge commit Hugging Face's tokens, and rolled-back drafts leave nothing in the states."""
    early_exit, new = DRAFTERS["early exit"], SMALL["max_new_tokens"]
    for path in ("plain", "bridge"):
        oracle = cp.reference(loaded(name), PROMPTS[:2], **SMALL, path=path)
        trace = cp.run(loaded(name), PROMPTS[:2], **SMALL, path=path, drafter=early_exit, deterministic=True)
        assert trace.num_rolled_back > 0 and trace.fingerprint["path"] == path
        for i, prompt in enumerate(PROMPTS[:2]):
            assert trace.committed(i) == oracle.committed(i) == hf_greedy(hf_model(name), prompt, new)
            assert trace.digest(i) == oracle.digest(i), f"request {i}: states differ"


@pytest.fixture(scope="module", params=QUICK_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def oracle(family: str) -> cp.Trace:
    return cp.reference(loaded(family), PROMPTS, **SMALL)


def test_oracle_equals_hugging_face(family: str, oracle: cp.Trace) -> None:
    plain = hf_model(family)
    for i, prompt in enumerate(PROMPTS):
        assert oracle.committed(i) == hf_greedy(plain, prompt, SMALL["max_new_tokens"])
    assert len({tuple(oracle.committed(i)) for i in range(len(PROMPTS))}) == len(PROMPTS)  # the model has an opinion


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
def test_loop_equals_oracle(family: str, oracle: cp.Trace, drafter: str) -> None:
    trace = cp.run(loaded(family), PROMPTS, **SMALL, drafter=DRAFTERS[drafter], deterministic=True)
    for i in range(len(PROMPTS)):
        assert trace.committed(i) == oracle.committed(i)
        assert trace.digest(i) == oracle.digest(i), f"request {i}: states differ"
    if drafter == "early exit":
        assert trace.num_rolled_back > 0 and trace.num_rolled_back < trace.num_drafted


def test_the_bridges_loop_equals_its_oracle(family: str, oracle: cp.Trace) -> None:
    """The tests above run on the twin, as a run does by default."""
    settings = dict(**SMALL, path="bridge")
    trace = cp.run(loaded(family), PROMPTS, **settings, drafter=DRAFTERS["early exit"], deterministic=True)
    its_oracle = cp.reference(loaded(family), PROMPTS, **settings)
    assert (oracle.fingerprint["path"], trace.fingerprint["path"]) == ("plain", "bridge")
    assert trace.num_rolled_back > 0
    for i in range(len(PROMPTS)):
        assert trace.committed(i) == its_oracle.committed(i) == oracle.committed(i)
        assert trace.digest(i) == its_oracle.digest(i)


@pytest.mark.parametrize("path", ["plain", "bridge"])
@pytest.mark.parametrize("drafter", ["none", "early exit"])
def test_states_equal_a_clean_run_with_cache(family: str, drafter: str, path: str) -> None:
    model = loaded(family)
    trace = cp.run(model, PROMPTS[:3], **SMALL, drafter=DRAFTERS[drafter], path=path)
    names = {"S": "hook_resid_post", "T": "hook_attn_out", "C": "hook_mlp_out"}
    for i, prompt in enumerate(PROMPTS[:3]):
        text = torch.tensor([prompt + trace.committed(i)])[:, :-1]
        with torch.inference_mode():
            _, clean = model.bridge.run_with_cache(text)
        ours = cp.analysis.to_activation_cache(trace, i)
        for layer in range(model.n_layers):
            for site, name in names.items():
                states = trace.states(site, layer, i)
                assert states.shape == (len(prompt) + len(trace.committed(i)) - 1, model.d_model)
                there = clean[f"blocks.{layer}.{name}"][0]
                assert close(states, there, 1e-5, because="rows of other products: sums are reordered")
                assert torch.equal(ours[f"blocks.{layer}.{name}"][0], states)


def test_states_differ_between_positions(family: str) -> None:
    """The control of the test above: the tolerance is far below what a wrong position would show."""
    trace = cp.run(loaded(family), PROMPTS[:1], **SMALL)
    states = trace.states("S", 2, 0)
    assert not close(states[1:], states[:-1], 1e-2, because="neighbouring positions")
