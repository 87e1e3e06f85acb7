"""Changes of recurrent states where they are rounded, costly, without effect or impossible."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.edits.interventions import replace, swap, zero
from cacheprobe.edits.interventions.editor import Editor
from cacheprobe.edits.patching.cells import Edit, cell, run_cells, run_once
from cacheprobe.models.base import ModelError
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.equality import close
from tests.field.tiny_family import tiny_family
from tests.interventions.recurrent_slowly import logits_slowly

A, B = [5, 80, 33, 4], [5, 81, 33, 4]
SHAPE: dict[str, Any] = dict(window=4, group=2, capacity=96, max_new_tokens=4, progress=False)
KEPT = cp.CaptureConfig(heads=("recurrent",))


@cache
def model(family: str, dtype: torch.dtype = torch.float32) -> PlainLM:
    one = cp.load_model(copy.deepcopy(tiny_family(family)).to(dtype), products="torch")
    assert isinstance(one, PlainLM)
    return one


def layer_of(one: PlainLM) -> int:
    return next(iter(one.state_shapes))


def test_states_rounded_to_16_bits_are_not_swapped() -> None:
    """Between equal prompts a swap changes nothing; with rounded states it did."""
    one = model("olmo_hybrid", torch.bfloat16)
    where: Any = dict(site="recurrent", layer=layer_of(one), positions=[2])
    rounded = cp.run(one, [A, A], capture=KEPT, **SHAPE)
    with pytest.raises(ValueError, match=r"recorded in torch.bfloat16, .* record them with CaptureConfig\(.*float32"):
        swap(rounded, 0, 1, **where)
    exact = cp.CaptureConfig(heads=("recurrent",), dtype="float32")
    plain = cp.run(one, [A, A], capture=exact, **SHAPE)
    swapped = cp.run(one, [A, A], capture=exact, interventions=swap(plain, 0, 1, **where), **SHAPE)
    assert torch.equal(plain.states("S", one.n_layers - 1, 0), swapped.states("S", one.n_layers - 1, 0))


def test_a_swap_names_the_layers_with_a_state() -> None:
    one = model("olmo_hybrid")
    attends = next(layer for layer in range(one.n_layers) if layer not in one.state_shapes)
    there = ", ".join(map(str, one.state_shapes))
    trace = cp.run(one, [A, B], capture=KEPT, **SHAPE)
    with pytest.raises(ValueError, match=f"swap: layer {attends} has no recurrent state; layers with one: {there}$"):
        swap(trace, 0, 1, site="recurrent", layer=attends, positions=[1])


def test_a_store_of_whole_states_is_none_of_heads(tmp_path: Path) -> None:
    settings: Any = dict(site="recurrent", layers=[0], answer=[1, 2], progress=False, store=tmp_path / "cells")
    cp.patching.activation(model("mamba2"), A, B, **settings)
    with pytest.raises(ValueError, match="cells of another grid: axes is"):
        cp.patching.activation(model("mamba2"), A, B, heads=True, **settings)


@pytest.mark.parametrize("heads", [False, True])
def test_a_cell_may_patch_several_positions(heads: bool) -> None:
    one, live = model("mamba2"), tiny_family("mamba2")
    donor_states = logits_slowly(live, A, {})[1][0]
    with torch.inference_mode():
        base, donor = (run_once(one, text, ["recurrent"]) for text in (B, A))
        states = donor.at("recurrent", 0)[1:3]
        edit = Edit(("recurrent", 0), (1, 2), states[:, 1] if heads else states, 1 if heads else None)
        (ours,) = run_cells(one, base, [cell([edit])])

    def patched(position: int) -> Any:
        def change(old: Tensor) -> Tensor:
            chosen: Any = 1 if heads else slice(None)
            old[chosen] = donor_states[position][chosen]
            return old

        return change

    theirs = logits_slowly(live, B, {(0, position): patched(position) for position in (1, 2)})[0][-1]
    assert close(ours, theirs, 1e-4, because="sums are reordered")
    assert not close(ours, base.logits, 1e-3, because="the patch changes more than rounding")


def test_an_edit_copies_one_state_however_long_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    edit, copied = Editor.edit, list[int]()

    def counted(self: Editor, site: str, layer: int, value: Tensor) -> Tensor | None:
        edited = edit(self, site, layer, value)
        copied.extend(part.untyped_storage().nbytes() for part in (value, edited) if part is not None)
        return edited

    monkeypatch.setattr(Editor, "edit", counted)
    one, text = model("mamba2"), [(7 * i) % 90 + 3 for i in range(48)]
    heads, width = one.state_shapes[0]
    cp.run(one, [text], interventions=[zero(request_id=0, site="recurrent", layer=0, positions=[2, 40])], **SHAPE)
    rows = max(SHAPE["group"], 1)
    assert len(copied) > 48 and max(copied) <= rows * heads * width * 4


def test_large_numbers_fit_a_state_in_float32() -> None:
    one = model("olmo_hybrid", torch.float16)
    layer = layer_of(one)
    assert one.initial[layer]["recurrent", 0].dtype == torch.float32
    where: Any = dict(request_id=0, layer=layer, positions=[1])
    cp.run(one, [A], interventions=[replace(torch.full((1,), 7e4), site="recurrent", **where)], **SHAPE)
    with pytest.raises(ValueError, match="vectors are infinite in torch.float16"):
        cp.run(one, [A], interventions=[replace(torch.full((1,), 7e4), site="S", **where)], **SHAPE)


def test_the_state_after_the_newest_computed_token_is_refused() -> None:
    last = len(A) + SHAPE["max_new_tokens"] - 2

    def run(position: int) -> cp.Trace:
        one = zero(request_id=0, site="recurrent", layer=0, positions=[position])
        return cp.run(model("mamba2"), [A], interventions=[one], **SHAPE)

    assert run(last - 1).edits().committed.tolist() == [1]
    said = f"position {last} lies outside .* goes on from the states after 0 to {last - 1}"
    with pytest.raises(ValueError, match=said):
        run(last)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba"])
def test_a_stream_in_float32_beside_16_bits_is_refused_with_its_remedy(family: str) -> None:
    with pytest.raises(ModelError, match='load it with dtype="float32", or with config.residual_in_fp32=False'):
        cp.load_model(tiny_family(family).bfloat16(), products="torch")
    assert cp.load_model(tiny_family(family, {"residual_in_fp32": False}).bfloat16(), products="torch")


def test_the_sites_that_can_be_changed_are_listed() -> None:
    with pytest.raises(ValueError, match="choose one of S, T, C, pre, router, recurrent"):
        zero(request_id=0, site="foo", layer=2)
