"""Beside a library whose bits depend on what they may not, a run is right, refused or stopped; never other bits."""

import pytest
import torch

import cacheprobe as cp
from cacheprobe.engine import consistency
from cacheprobe.engine.watch import Watch
from cacheprobe.models.twin import TwinLM
from tests.planted import DEPENDS_ON, Condition, Planted, as_seen_on_amd, ends, far, in_row, in_second_half
from tests.tiny import hf_model

PROMPTS = [[5, 6, 7], [*range(20, 32)], [*range(40, 57)], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
"""Some begin before the positions from which faults act, one behind them."""
RUN = dict(max_new_tokens=8, capacity=64, alone=(-1,))
FLOATS = (torch.float32, torch.bfloat16)


def fresh(family: str = "qwen3", dtype: torch.dtype = torch.float32):
    """A model of which no shape was tried."""
    return cp.load_model(hf_model(family, dtype))


def unguarded(monkeypatch: pytest.MonkeyPatch, *guards: str) -> None:
    """Replace guards by ones that find nothing."""
    if "trial" in guards:
        monkeypatch.setattr(consistency, "_try", lambda *shape: None)
    if "watch" in guards:
        monkeypatch.setattr(Watch, "place_copy", lambda *asked: None)
    if "attention" in guards:
        monkeypatch.setattr(TwinLM, "attends_by_request", False)


# -- the fault as it was seen


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("window", [3, 5, 7])
def test_the_fault_that_was_seen_is_gone_by_construction(window: int, dtype: torch.dtype) -> None:
    fault = Planted("attention", as_seen_on_amd)
    assert ends(fresh(dtype=dtype), fault, PROMPTS, window=window, group=4, **RUN).kind == "right"
    assert fault.num_changed  # in the fast path's drafts, which promise nothing


def test_without_its_guards_the_fault_that_was_seen_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    unguarded(monkeypatch, "trial", "watch", "attention")
    cases = [(window, dtype) for window in (3, 5, 7) for dtype in FLOATS]
    faults = [Planted("attention", as_seen_on_amd) for _ in cases]
    kinds = [
        ends(fresh(dtype=dtype), fault, PROMPTS, window=window, group=4, **RUN).kind
        for (window, dtype), fault in zip(cases, faults, strict=True)
    ]
    assert kinds == ["different"] * 6


# -- each operation, by what it depends on


@pytest.mark.parametrize("window", [1, 3, 4])
@pytest.mark.parametrize("operation", ["attention", "product", "norm", "activation"])
@pytest.mark.parametrize("condition", [DEPENDS_ON["row"], DEPENDS_ON["slot"]], ids=["row", "slot"])
def test_no_fault_of_an_operation_is_silent(operation: str, condition: Condition, window: int) -> None:
    fault = Planted(operation, condition)
    verdict = ends(fresh(), fault, PROMPTS, window=window, group=4, **RUN)
    assert fault.num_calls and verdict.kind != "different", verdict.said
    if operation != "attention" and condition is in_second_half:
        assert verdict.kind == "refused" and "do not compute every row alike" in verdict.said


def test_what_depends_on_the_position_alone_is_the_request_s_own() -> None:
    fault = Planted("attention", far)
    assert ends(fresh(), fault, PROMPTS, window=4, group=4, **RUN).kind == "right" and fault.num_changed


# -- faults that begin after the shape was tried


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("operation", ["product", "norm", "activation"])
@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_a_fault_that_begins_later_is_stopped(operation: str, row: int, window: int) -> None:
    model = fresh()
    shapes = dict(window=window, group=4, max_new_tokens=8, capacity=64)
    cp.run(model, PROMPTS[:3], **shapes, deterministic=True, progress=False)
    verdict = ends(model, Planted(operation, in_row(row)), PROMPTS[:3], **shapes)
    assert verdict.kind == "stopped", verdict
    assert "request" in verdict.said and f"of 4 x {window} rows" in verdict.said and "set another" in verdict.said
