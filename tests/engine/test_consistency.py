"""A fixed shape is tried before it is relied on: every row and slot must give the same bits."""

from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe.engine import shapes
from cacheprobe.engine.shapes import Hooked, narrow_widths, serving_config
from cacheprobe.models.paths import choose_path
from tests.invariants.machines import WithFault, rounding_by_shape
from tests.proxies import take_members
from tests.shapes import serving
from tests.tiny import PROMPTS, SMALL, hf_model

pytestmark = pytest.mark.determinism


class _LastPlaceDiffers:
    """A model whose last computed row is rounded otherwise where their number is odd, as vectorised loops do."""

    def __init__(self, model, slot: bool) -> None:
        self._model, self._slot = model, slot
        take_members(self, model)

    def forward(self, token_ids: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        out = self._model.forward(token_ids, *args, **kwargs).clone()
        if token_ids.numel() % 2 and token_ids.numel() > 1:
            last = (-1, -1) if self._slot else (-1, 0)
            out[last] += 1e-6 * out[last].abs().max()
        return out


@pytest.mark.parametrize("slot", [True, False])
def test_a_shape_that_rounds_its_last_row_otherwise_is_refused(slot: bool) -> None:
    model = _LastPlaceDiffers(cp.load_model(hf_model()), slot)
    better = serving(model, 3, at_least=4, capacity=64)
    assert better % 2 == 0, "an odd number of rows serves"
    # which of two places that differ is named depends on which of them was computed first
    with pytest.raises(
        ValueError, match=rf"3 x 3 rows do not compute every row alike.*row \d slot \d.*set group={better}"
    ):
        serving_config(model, EngineConfig(window=3, group=3, capacity=64))


def test_a_shared_prefill_is_tried_too() -> None:
    model = _LastPlaceDiffers(cp.load_model(hf_model()), slot=False)
    group = serving(model, 4, capacity=64)
    with pytest.raises(ValueError, match="set prefill_group=1"):
        serving_config(model, EngineConfig(window=4, group=group, capacity=64, prefill_chunk=5, prefill_group=3))


def test_it_is_tried_once_and_only_where_something_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cp.load_model(hf_model(seed=3))
    tried = []

    class Counted(shapes.ShapeTrial):
        def __init__(self, model: Any, *shape: Any) -> None:
            tried.append(shape)
            super().__init__(model, *shape)

    monkeypatch.setattr(shapes, "ShapeTrial", Counted)
    settings = {name: value for name, value in SMALL.items() if name != "group"}  # a group that serves is chosen
    cp.run(model, PROMPTS, **settings)
    assert not tried
    cp.run(model, PROMPTS, **settings, deterministic=True)
    once = list(tried)
    cp.run(model, PROMPTS, **settings, deterministic=True)
    assert tried == once
    verify = [shape for shape in once if shape[3] == "verify"]
    first = verify[: len(verify) // 2] if model.operations else verify  # then again, against narrower passes
    assert len(set(first)) == len(first) and verify in (first, first * 2)
    assert {(width, capacity) for _, width, capacity, *_ in verify} == {(4, 96)}
    assert len(once) - len(verify) == (1 if model.operations else 0)  # whether prompts may share a pass


@pytest.mark.parametrize("width", [0, 4, 16])
def test_a_narrow_pass_with_other_bits_is_not_run(width: int) -> None:
    """Only widths in which every token has the bits of a whole window are used."""
    fast = choose_path(cp.load_model(hf_model()), "plain")[0]
    config = EngineConfig(window=16, group=2, capacity=64)
    equal = () if width == 16 else tuple(one for one in (2, 4, 8) if one != width)
    assert narrow_widths(WithFault(fast, width=width), config) == (equal if fast.operations else ())


def test_no_narrow_pass_runs_where_bits_depend_on_the_shape_or_on_interventions() -> None:
    config = EngineConfig(window=16, group=2, capacity=64)
    assert narrow_widths(rounding_by_shape(), config) == ()
    assert (
        narrow_widths(cp.load_model(hf_model()).bridged(), config) == ()
    )  # the bridge attends over the whole batch at once
    fast = choose_path(cp.load_model(hf_model()), "plain")[0]
    assert narrow_widths(fast, config, Hooked(edited=(("S", 0),))) == ()
