"""The loss of a reconstruction: what the model predicts with reconstructed states, against an uncached forward."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cacheprobe as cp
from cacheprobe.lenses.dictionaries.dictionary import Dictionary, DictionaryError
from tests.dictionaries.planted import random_dictionary, saved
from tests.tiny import PROMPTS, SMALL, hf_model, loaded
from tests.twins.features_slowly import logprobs_slowly


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS[:2], **SMALL, drafter=cp.drafters.EarlyExit(layer=1), capture="S")


def test_logprobs_are_those_of_a_hook_without_a_cache(trace: cp.Trace, tmp_path: Path) -> None:
    mine = random_dictionary("topk")
    table = cp.analysis.reconstruction(trace, mine, include_special=True)
    folder = saved(mine, tmp_path)
    for request_id, prompt in enumerate(PROMPTS[:2]):
        own, text = table[table.request_id == request_id], [*prompt, *trace.committed(request_id)]
        slowly = logprobs_slowly(hf_model(), 1, folder, text, len(prompt))
        assert own.reconstructed_logprob_nats.tolist() == pytest.approx(slowly, abs=1e-4)
        assert own.logprob_nats.tolist() == pytest.approx(trace.logprobs(request_id), abs=1e-4)
        assert own.token_id.tolist() == trace.committed(request_id)
        assert own.position.tolist() == list(range(len(prompt) - 1, len(text) - 1))
        states = trace.states("S", 1, request_id)
        error = (states - mine.reconstruct(states)).square().sum(-1)
        assert own.squared_error.tolist() == pytest.approx(error[len(prompt) - 1 :].tolist(), rel=1e-3)
        apart = (states - states.mean(0)).square().sum(-1)
        assert own.squared_distance.tolist() == pytest.approx(apart[len(prompt) - 1 :].tolist(), rel=1e-3)
    assert (table.change_nats == table.reconstructed_logprob_nats - table.logprob_nats).all()
    assert table.change_nats.abs().max() > 0.01


def test_a_perfect_dictionary_changes_nothing(trace: cp.Trace) -> None:
    """Two features for each dimension, one for each sign, give every state back."""
    eye = torch.eye(32)
    mine = random_dictionary("standard")
    tensors = {"W_enc": torch.cat([eye, -eye], 1), "W_dec": torch.cat([eye, -eye]), "b_enc": torch.zeros(64)}
    whole = Dictionary(replace(mine.config, d_sae=64), {**tensors, "b_dec": torch.full((32,), 0.1)})
    table = cp.analysis.reconstruction(trace, whole)
    assert table.change_nats.abs().max() < 1e-4
    assert 1 - table.squared_error.sum() / table.squared_distance.sum() > 1 - 1e-6


def test_another_place_is_noticed(trace: cp.Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the reconstruction of a neighbour's state gives other log-probabilities."""
    right = Dictionary.reconstruct
    monkeypatch.setattr(Dictionary, "reconstruct", lambda self, states: right(self, states.roll(1, 0)))
    with pytest.raises(AssertionError):
        test_logprobs_are_those_of_a_hook_without_a_cache(trace, tmp_path)


def test_what_cannot_be_measured_is_refused(trace: cp.Trace) -> None:
    fixtures = Path(__file__).parents[1] / "fixtures/saelens"
    with pytest.raises(DictionaryError, match="states of width 16, LlamaForCausalLM has 32"):
        cp.analysis.reconstruction(trace, random_dictionary(width=16))
    with pytest.raises(DictionaryError, match="layer 9"):
        cp.analysis.reconstruction(trace, random_dictionary(layer=9))
    with pytest.raises(DictionaryError, match="cannot be put in the model's place"):
        cp.analysis.reconstruction(trace, Dictionary.load(fixtures / "standard-heads"))
    change = cp.interventions.zero(request_id=0, site="C", layer=0, positions=2)
    edited = cp.run(loaded(), PROMPTS[:1], **SMALL, interventions=change)
    with pytest.raises(ValueError, match="had interventions"):
        cp.analysis.reconstruction(edited, random_dictionary())
