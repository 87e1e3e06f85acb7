"""The loss of a reconstruction: what the model predicts with reconstructed states, against an uncached forward."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cacheprobe as cp
from cacheprobe.lenses.dictionaries.dictionary import Dictionary, DictionaryError
from tests.dictionaries.planted import random_dictionary
from tests.tiny import PROMPTS, SMALL, loaded


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS[:2], **SMALL, drafter=cp.drafters.EarlyExit(layer=1), capture="S")


def test_a_perfect_dictionary_changes_nothing(trace: cp.Trace) -> None:
    """Two features for each dimension, one for each sign, give every state back."""
    eye = torch.eye(32)
    mine = random_dictionary("standard")
    tensors = {"W_enc": torch.cat([eye, -eye], 1), "W_dec": torch.cat([eye, -eye]), "b_enc": torch.zeros(64)}
    whole = Dictionary(replace(mine.config, d_sae=64), {**tensors, "b_dec": torch.full((32,), 0.1)})
    table = cp.analysis.reconstruction(trace, whole)
    assert table.change_nats.abs().max() < 1e-4
    assert 1 - table.squared_error.sum() / table.squared_distance.sum() > 1 - 1e-6


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
