"""In tests every call is checked against its annotations: shapes by jaxtyping, other types by beartype."""

import jaxtyping
import pytest
import torch

from cacheprobe.ops.acceptance import StopRule, num_accepted
from cacheprobe.ops.references import rms_norm
from cacheprobe.ops.sampling import lowest_argmax


def test_shapes_agree_between_arguments() -> None:
    values = torch.ones(2, 4)
    assert rms_norm(values, torch.ones(4), 1e-5).shape == (2, 4)
    with pytest.raises(jaxtyping.TypeCheckError, match="weight"):
        rms_norm(values, torch.ones(3), 1e-5)


def test_types_of_functions_and_fields() -> None:
    with pytest.raises(TypeError, match="draft_token_ids"):
        num_accepted({1: 2}, [1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="token_ids"):
        StopRule([1], (), str)  # pyright: ignore[reportArgumentType]


def test_shapes_of_one_argument() -> None:
    """The option in pyproject.toml works only while nothing imports cacheprobe before pytest has read it."""
    assert lowest_argmax(torch.tensor([1.0, 3.0, 3.0])) == 1
    with pytest.raises(Exception, match="Type-check error"):
        lowest_argmax(torch.zeros(2, 2))
