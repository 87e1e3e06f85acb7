"""The Jacobian lens against TransformerLens' own readout, with the matrices of its own lens object."""

import pytest
import torch
from transformer_lens.tools.analysis import JacobianLens as TheirLens

import cacheprobe as cp
from cacheprobe.lenses.base import LensError
from cacheprobe.ops.equality import close
from tests.tiny import PROMPTS, SMALL, loaded


def theirs(layers: tuple[int, ...] = (0, 1), width: int = 32) -> TheirLens:
    generator = torch.Generator().manual_seed(7)
    matrices = {layer: torch.eye(width) + 0.2 * torch.randn(width, width, generator=generator) for layer in layers}
    return TheirLens(matrices, n_prompts=3, d_model=width)


def test_readings_are_those_of_transformer_lens() -> None:
    model, lens = loaded(), theirs()
    text = torch.tensor([PROMPTS[4]])
    want = lens.readout(model.bridge, text, return_full_logits=True).lens_logits
    trace = cp.run(model, PROMPTS[4:], **SMALL)
    mine = cp.lenses.JacobianLens.of(lens, model)
    for layer in range(3):
        states = trace.states("S", layer, 0)[: text.shape[1]]
        logits = mine.logits(model, states, torch.full((len(states),), layer))
        assert close(logits, want[layer], 1e-5, because="cached and whole forwards, products of other heights")
    assert mine.about["n_prompts"] == 3


def test_what_is_not_its_model_is_refused() -> None:
    of, model = cp.lenses.JacobianLens.of, loaded()
    with pytest.raises(LensError, match="no matrix for layer 0; fit all of 0 to 1"):
        of(theirs((1,)), model)
    with pytest.raises(LensError, match="TransformerLens refuses this lens .*d_model=16"):
        of(theirs(width=16), model)
    with pytest.raises(LensError, match="expected a JacobianLens"):
        of(object(), model)
    with pytest.raises(LensError, match="is for a TransformerBridge"):
        of(theirs(), object())
