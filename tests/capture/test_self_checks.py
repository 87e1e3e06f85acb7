"""The check that a layer's output is the sum of its parts, of all layers of a pass."""

import pytest
import torch
from torch import Tensor

from cacheprobe.models.base import BlockSum
from cacheprobe.trace.self_checks import CaptureError, Check, add_errors, block_errors, residual_check, residual_errors

LAYERS, ROWS = 7, 5
FORMS = [*[BlockSum()] * 3, BlockSum(scale=0.5), *[BlockSum(mlp_parts=2)] * 3]


def states(
    dtype: torch.dtype, forms: list[BlockSum], entering: tuple[int, ...] = (0,)
) -> dict[tuple[str, int], Tensor]:
    """S, T and C of layers that add up, and the input of some layers."""
    generator = torch.Generator().manual_seed(0)
    made: dict[tuple[str, int], Tensor] = {}
    for layer, form in enumerate(forms):
        drawn = [torch.randn(ROWS, 8, generator=generator).to(dtype) for _ in range(3)]
        made["T", layer], made["C", layer], below = drawn
        if layer in entering:
            made["pre", layer] = below
        below = made.get(("pre", layer), made.get(("S", layer - 1)))
        assert below is not None
        made["S", layer] = form.scale * below + made["T", layer] + made["C", layer]
    return made


def check_blocks(
    check: Check,
    made: dict[tuple[str, int], torch.Tensor],
    forms: list[BlockSum],
    unchanged: dict[int, list[int]],
    step: int,
) -> None:
    add_errors([(check, block_errors(check, made, forms, unchanged))], step)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_rows_of_every_layer_are_checked(dtype: torch.dtype) -> None:
    made = states(dtype, FORMS, (0, 5))
    unchanged = {1: [0, 3], 5: [], 6: [4]}
    together, alone = residual_check(dtype), residual_check(dtype)
    check_blocks(together, made, FORMS, unchanged, 0)
    for layer, form in enumerate(FORMS):
        rows = unchanged.get(layer, list(range(ROWS)))
        below = made["pre" if layer in (0, 5) else "S", layer if layer in (0, 5) else layer - 1]
        parts = (part[rows] for part in (below, *(made[site, layer] for site in "TCS")))
        errors = residual_errors(*parts, form=form)
        alone.num_rows += len(errors)
        alone.add([errors.max()] if len(rows) else [], step=0)
    assert together == alone and together.num_rows == 4 * ROWS + 3
    check_blocks(together, {("pre", 0): made["pre", 0]}, [], {}, 0)
    assert together == alone, "a pass of no layer has nothing to check"


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("site", ["T", "C", "S"])
def test_a_wrong_state_of_any_layer_is_found(layer: int, site: str) -> None:
    made = states(torch.float32, FORMS)
    made[site, layer] = made[site, layer].clone()
    made[site, layer][3, 2] += 0.1
    with pytest.raises(CaptureError, match="step 9: resid_post = resid_pre"):
        check_blocks(residual_check(torch.float32), made, FORMS, {}, 9)
    others = [row for row in range(ROWS) if row != 3]
    excluded = {layer: others} | ({layer + 1: others} if site == "S" else {})
    check_blocks(residual_check(torch.float32), made, FORMS, excluded, 9)
