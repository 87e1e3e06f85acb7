"""Steering and ablation of a feature during a generation with drafts: against a hook on an uncached forward."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cacheprobe as cp
from cacheprobe.edits.interventions import StateContext, ablate_feature, add, steer_feature
from cacheprobe.lenses.dictionaries.dictionary import Dictionary, DictionaryError
from cacheprobe.ops.equality import bitwise, close
from tests.by_hand import changed
from tests.dictionaries.planted import random_dictionary
from tests.interventions.test_interventions import LIGHT, SUMS, generated_slowly
from tests.tiny import PROMPTS, hf_model, loaded

DRAFTED = {**LIGHT, "drafter": cp.drafters.EarlyExit(layer=1)}
CONTEXT = StateContext(0, "S", 1, None, 0, "prefill")


def active_feature(dictionary: Dictionary) -> int:
    """The feature that is active in most states of the first prompt's run."""
    plain = cp.run(loaded(), [PROMPTS[0]], **LIGHT)
    return int(plain.features(dictionary, top=48).feature.mode()[0])


def test_steering_adds_the_decoders_row() -> None:
    """The same bits as `add` with that vector."""
    mine = random_dictionary()
    steered, added = (
        cp.run(loaded(), [PROMPTS[0]], interventions=change, **DRAFTED)
        for change in (
            steer_feature(mine, 5, 2.5, request_id=0, positions=[3, 8]),
            add(2.5 * mine.tensors["W_dec"][5], request_id=0, site="S", layer=1, positions=[3, 8]),
        )
    )
    assert steered.digest(0) == added.digest(0) != cp.run(loaded(), [PROMPTS[0]], **DRAFTED).digest(0)
    assert steered.meta["interventions"][0]["name"] == "steer_feature"


@pytest.mark.parametrize(("path", "settings"), [("plain", {}), ("bridge", {"normalize_activations": "layer_norm"})])
def test_ablation_equals_a_plain_hook_without_a_cache(path: str, settings: dict) -> None:
    """At every position, drafted, rolled back and computed again."""
    mine = random_dictionary("standard", **settings)
    feature = active_feature(mine)
    change = ablate_feature(mine, feature, request_id=1, include_special=True)
    trace = cp.run(loaded(), [PROMPTS[1], PROMPTS[0]], interventions=change, **DRAFTED, path=path)
    model = hf_model()

    def ablate(states: torch.Tensor) -> None:
        features = mine.encode(states[0])
        without = features.index_fill(1, torch.tensor(feature), 0)
        states[0] -= mine.decode(features, states[0]) - mine.decode(without, states[0])

    with changed(model.model.layers[1], ablate):
        tokens, states = generated_slowly(model, PROMPTS[0], 10)
    assert trace.committed(1) == tokens and trace.num_rolled_back > 0
    assert close(trace.states("S", 2, 1), states, 1e-5, because=SUMS)
    plain = cp.run(loaded(), [PROMPTS[1], PROMPTS[0]], **DRAFTED, path=path)
    assert not close(plain.states("S", 2, 1)[:5], states[:5], 1e-2, because="the control: the change shows")
    assert plain.digest(0) == trace.digest(0)


def test_an_ablated_feature_is_gone_if_directions_do_not_overlap() -> None:
    """With orthonormal rows that are encoder and decoder alike, its activation is zero and the others stay."""
    rows = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))[0]
    mine = random_dictionary("standard")
    tensors = {"W_enc": rows.T.contiguous(), "W_dec": rows, "b_enc": torch.zeros(32), "b_dec": torch.zeros(32)}
    mine = Dictionary(replace(mine.config, d_sae=32), tensors)
    states = torch.randn(6, 32)
    left = ablate_feature(mine, 4, request_id=0).changed(states, [CONTEXT] * 6)
    before, after = mine.encode(states), mine.encode(left)
    assert float(before[:, 4].max()) > 0.5 and float(after[:, 4].abs().max()) < 1e-5
    others = [f for f in range(32) if f != 4]
    assert close(before[:, others], after[:, others], 1e-4, because="float32")
    inactive = before[:, 4] == 0
    assert inactive.any() and bitwise(left[inactive], states[inactive])


def test_two_dictionaries_have_two_fingerprints() -> None:
    def entry(seed: int, feature: int) -> str:
        change = ablate_feature(random_dictionary(seed=seed), feature, request_id=0)
        return cp.run(loaded(), [PROMPTS[0]], interventions=change, **LIGHT).fingerprint["interventions"]

    assert len({entry(0, 1), entry(0, 2), entry(1, 1)}) == 3 and entry(0, 1) == entry(0, 1)


def test_what_cannot_be_changed_is_refused() -> None:
    fixtures = Path(__file__).parents[1] / "fixtures/saelens"
    where = dict(request_id=0)
    with pytest.raises(DictionaryError, match="no feature 48; the dictionary has 0 to 47"):
        ablate_feature(random_dictionary(), 48, **where)
    with pytest.raises(DictionaryError, match="no feature -1"):
        steer_feature(random_dictionary(), -1, 1.0, **where)
    with pytest.raises(DictionaryError, match="states at blocks.1.hook_mlp_in cannot|a transcoder's features"):
        ablate_feature(Dictionary.load(fixtures / "transcoder", hook="blocks.1.hook_mlp_out"), 0, **where)
    with pytest.raises(DictionaryError, match="states at blocks.1.attn.hook_z cannot be changed"):
        steer_feature(Dictionary.load(fixtures / "standard-heads"), 0, 1.0, **where)
    with pytest.raises(ValueError, match="width 16"):
        change = steer_feature(random_dictionary(width=16), 0, 1.0, **where)
        cp.run(loaded(), [PROMPTS[0]], interventions=change, **LIGHT)
    with pytest.raises(ValueError, match="width 16"):
        change = ablate_feature(random_dictionary(width=16), 0, **where)
        cp.run(loaded(), [PROMPTS[0]], interventions=change, **LIGHT)
    steered = steer_feature(Dictionary.load(fixtures / "transcoder"), 3, 1.0, **where)
    assert steered.place == ("C", 1)


def test_a_float64_state_in_which_the_feature_is_not_active_keeps_its_bits() -> None:
    mine = random_dictionary()
    states = torch.randn(6, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for state in states:
        idle = int((mine.encode(state[None])[0] == 0).nonzero()[0])
        (kept,) = ablate_feature(mine, idle, request_id=0).changed(state[None], [CONTEXT])
        assert bitwise(kept, state)
