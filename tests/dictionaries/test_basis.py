"""A dictionary made of a basis: signed components of least squares, the largest ones recorded during a run."""

import numpy as np
import pytest
import torch

import cacheprobe as cp
from cacheprobe.lenses.dictionaries.dictionary import Dictionary, DictionaryError
from tests.tiny import PROMPTS, SMALL, loaded

HOOK = "blocks.1.hook_resid_post"


def coefficients(basis: torch.Tensor, state: torch.Tensor) -> list[float]:
    """The coefficients of the vectors in the sum that is nearest to the state, by numpy's least squares in float64."""
    return np.linalg.lstsq(basis.double().numpy().T, state.double().numpy(), rcond=None)[0].tolist()


def test_vectors_of_very_different_lengths() -> None:
    """Principal components times their deviation, beside a massive activation."""
    units = torch.linalg.qr(torch.randn(32, 16, generator=torch.manual_seed(3))).Q.T
    basis = units * torch.tensor([3000.0, *[0.05] * 14, 1e-5])[:, None]
    states = torch.randn(5, 32, generator=torch.manual_seed(4))
    projected = states.double() @ units.double().T @ units.double()
    torch.testing.assert_close(Dictionary.from_basis(basis, HOOK).reconstruct(states), projected.float())


@pytest.mark.parametrize("is_orthonormal", [True, False])
def test_the_largest_components_are_recorded(is_orthonormal: bool) -> None:
    vectors = torch.randn(12, 32, generator=torch.manual_seed(0))
    basis = torch.linalg.qr(vectors.T).Q.T if is_orthonormal else vectors
    mine = Dictionary.from_basis(basis, HOOK)
    capture = cp.CaptureConfig("S", dictionary=mine, top_features=3)
    trace = cp.run(loaded(), PROMPTS[:2], **SMALL, drafter=cp.drafters.EarlyExit(layer=1), capture=capture)
    table = trace.features()
    assert set(table.status) >= {"committed", "rolled_back"} and (table.groupby("row").size() == 3).all()
    rows = trace.rows()
    for row, found in table.groupby("row"):
        state = trace.vectors("S", 1, rows[rows.row == row])[0]
        slowly = coefficients(basis, state)
        largest = sorted(range(12), key=lambda i: -abs(slowly[i]))[:3]
        signed = [i if slowly[i] > 0 else 12 + i for i in largest]
        assert found.feature.tolist() == signed
        assert found.activation.tolist() == pytest.approx([abs(slowly[i]) for i in largest], rel=1e-4, abs=1e-5)


def test_all_components_give_the_projection() -> None:
    basis = torch.randn(5, 32, generator=torch.manual_seed(1))
    states = torch.randn(7, 32, generator=torch.manual_seed(2))
    nearest = torch.tensor([coefficients(basis, state) for state in states], dtype=torch.float64)
    projected = nearest @ basis.double()
    torch.testing.assert_close(Dictionary.from_basis(basis, HOOK).reconstruct(states), projected.float())


@pytest.mark.parametrize("basis", [torch.ones(32), torch.ones(1, 1, 32), torch.ones(0, 32)])
def test_what_is_no_list_of_vectors(basis: torch.Tensor) -> None:
    with pytest.raises(DictionaryError, match="a tensor of vectors"):
        Dictionary.from_basis(basis, HOOK)


@pytest.mark.parametrize("basis", [torch.ones(2, 32), torch.randn(33, 32), torch.full((1, 32), float("nan"))])
def test_a_basis_that_cannot_be_one(basis: torch.Tensor) -> None:
    with pytest.raises(DictionaryError, match="linearly independent"):
        Dictionary.from_basis(basis, HOOK)
