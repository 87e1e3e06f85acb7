"""Beside a library whose bits depend on what they may not, a run is right, refused or stopped; never other bits."""

from itertools import cycle
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.engine import shapes
from cacheprobe.engine.checker import RecomputeChecker
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.ops.compiled import operations as choice
from cacheprobe.trace.recording import lens_reader
from tests.planted import (
    DEPENDS_ON,
    Planted,
    as_seen_on_amd,
    ends,
    far,
    in_row,
    in_second_half,
    with_several_threads,
)
from tests.thinking.test_thinking import tiny
from tests.tiny import hf_model

PROMPTS = [[5, 6, 7], [*range(20, 32)], [*range(40, 57)], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
"""Some begin before the positions from which faults act, one behind them."""
RUN: dict[str, Any] = dict(max_new_tokens=5, capacity=64)
FLOATS = (torch.float32, torch.bfloat16)
ANYWHERE = ("product", "norm", "activation")
"""Operations that one call computes for the whole batch."""


@pytest.fixture(autouse=True)
def two_threads() -> None:
    """Some faults act on two threads alone. `conftest` sets the number of the environment again after the test."""
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def products_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are planted in torch's operations."""
    monkeypatch.setattr(choice, "choose", lambda *of: choice.LoopChoice(None, "faults are planted in torch"))


@pytest.fixture(autouse=True)
def few_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused shape is not held against many others, which would take most of the time."""
    monkeypatch.setattr(shapes, "_GROUPS", (4, 2))
    monkeypatch.setattr(shapes, "_GROUPS_OF_ONE_ROW", (16, 8))
    monkeypatch.setattr(shapes, "_NEARBY", 1)


def fresh(family: str = "qwen3", dtype: torch.dtype = torch.float32):
    """A model of which no shape was tried."""
    return cp.load_model(hf_model(family, dtype))


def without(monkeypatch: pytest.MonkeyPatch, *guards: str) -> None:
    """Replace guards by ones that find nothing."""
    if "trial" in guards:
        monkeypatch.setattr(shapes, "_fault", lambda *shape: None)
    if "check while it runs" in guards:
        monkeypatch.setattr(RecomputeChecker, "_add_duplicate", lambda *asked: None)
    if "attention by request" in guards:
        monkeypatch.setattr(PlainLM, "attends_by_request", False)


def later(fault: Planted, window: int, num_new: int, family: str = "qwen3"):
    """The verdict on a fault that begins after the shape was tried; one place of four is free."""
    model = fresh(family)
    shapes: dict[str, Any] = dict(window=window, group=4, max_new_tokens=num_new, capacity=64)
    cp.run(model, PROMPTS[:1], **shapes, deterministic=True, progress=False)
    return ends(model, fault, PROMPTS[:3], **shapes)


# -- the fault as it was seen


@pytest.mark.parametrize(("window", "dtype"), [(1, torch.bfloat16), (3, torch.float32)])
def test_the_fault_that_was_seen_changes_no_request(window: int, dtype: torch.dtype) -> None:
    fault = Planted("attention of torch", as_seen_on_amd)
    assert ends(fresh(dtype=dtype), fault, PROMPTS, alone=(1, 3), window=window, group=4, **RUN).kind == "right"


def test_the_fault_that_was_seen_is_tried_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention is one call for all requests, as on the bridge, the trial finds it."""
    fault = Planted("attention of torch", as_seen_on_amd)
    assert ends(fresh(), fault, PROMPTS, window=3, group=4, path="bridge", **RUN).kind == "refused"
    without(monkeypatch, "attention by request")
    assert ends(fresh(), fault, PROMPTS, window=3, group=4, **RUN).kind == "refused"


@pytest.mark.parametrize("window", [None, 3])
def test_the_fault_that_was_seen_changes_no_request_that_thinks(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On that machine no group of one row served a shipped Thinking States model, because one call attended for all."""
    fault = Planted("attention of torch", as_seen_on_amd)
    shapes: dict[str, Any] = dict(window=window, group=None if window is None else 4, **RUN)
    prompts = [[token_id % 13 + 3 for token_id in prompt] for prompt in PROMPTS]
    assert ends(ThinkingLM(tiny(), name="thinker"), fault, prompts, **shapes).kind == "right"
    monkeypatch.setattr(ThinkingLM, "attends_by_request", False)
    assert (
        ends(ThinkingLM(tiny(), name="thinker"), fault, prompts, **{**shapes, "window": window or 1}).kind == "refused"
    )


# -- each operation, by what it depends on

_windows, _groups, _dtypes = cycle((1, 3, 4, 5, 7)), cycle((4, 2, None)), cycle(FLOATS)
_families = cycle(("qwen3", "llama", "gpt-neox", "qwen3", "gpt2"))
CASES = [
    (operation, name, next(_families), next(_dtypes), next(_windows), next(_groups))
    for operation in ("attention", *ANYWHERE)
    for name in DEPENDS_ON
] + [
    ("attention", name, next(_families), next(_dtypes), 1, next(_groups))
    for name in DEPENDS_ON
    if name not in ("slot", "odd slots")  # one new token a request has one slot
]


FEWER_BY_DEFAULT = [
    case if i % 7 in (0, 3) else pytest.param(*case, marks=pytest.mark.slow) for i, case in enumerate(CASES)
]
"""Every family, dtype, window and group is among them: 7 has no factor in common with their numbers."""


@pytest.mark.parametrize(("operation", "name", "family", "dtype", "window", "group"), FEWER_BY_DEFAULT)
def test_no_fault_is_silent(
    operation: str, name: str, family: str, dtype: torch.dtype, window: int, group: int | None
) -> None:
    fault = Planted(operation, DEPENDS_ON[name], share=3)
    verdict = ends(fresh(family, dtype), fault, PROMPTS, window=window, group=group, **RUN)
    assert fault.num_calls and verdict.kind in ("right", "refused", "stopped"), verdict
    is_rounded_away = operation == "norm" and dtype == torch.bfloat16  # computed in float32
    if operation != "attention" and "slot" not in name and name != "address" and not is_rounded_away:
        assert verdict.kind == "refused", verdict


@pytest.mark.parametrize("operation", ["attention", *ANYWHERE])
def test_on_the_bridge_too(operation: str) -> None:
    fault = Planted(operation, in_second_half)
    assert ends(fresh(), fault, PROMPTS, window=3, group=4, path="bridge", **RUN).kind == "refused"


def test_what_depends_on_the_position_or_the_threads_alone_is_right() -> None:
    for condition in (far, with_several_threads):
        fault = Planted("activation" if condition is far else "product", condition)
        assert ends(fresh(), fault, PROMPTS, window=4, group=4, **RUN).kind == "right" and fault.num_changed


def test_with_one_thread_a_fault_of_the_second_thread_is_right() -> None:
    torch.set_num_threads(1)
    for operation, name in (("product", "threads"), ("attention", "threads")):
        assert ends(fresh(), Planted(operation, DEPENDS_ON[name]), PROMPTS, window=3, group=4, **RUN).kind == "right"


def test_a_group_is_chosen_that_the_fault_spares() -> None:
    fault = Planted("norm", lambda at: in_second_half(at) & (at.num_rows == 16))
    assert ends(fresh("llama"), fault, PROMPTS, window=1, **RUN).kind == "right" and fault.num_changed
    assert ends(fresh("llama"), fault, PROMPTS, window=1, group=16, **RUN).kind == "refused"


def test_a_window_is_chosen_that_the_fault_spares() -> None:
    """If the caller gave none. It must fit the cache, as the request's own tokens do."""
    fault, model = Planted("norm", lambda at: in_second_half(at) & (at.width == 1)), fresh("llama")
    assert ends(model, fault, PROMPTS, **RUN).kind == "right" and fault.num_changed
    with fault:
        run = cp.run(model, PROMPTS, **RUN, deterministic=True, progress=False)
        small = cp.run(model, PROMPTS[:1], **{**RUN, "capacity": 16}, deterministic=True, progress=False)
        assert cp.reference(model, PROMPTS, **RUN, progress=False).fingerprint == run.fingerprint
        assert cp.run(model, PROMPTS, **RUN, drafter=cp.drafters.NGram(), progress=False).fingerprint["window"] == 16
    assert (run.fingerprint["window"], small.fingerprint["window"]) == (16, 8)
    refused = ends(model, fault, PROMPTS, window=1, **RUN)
    assert refused.kind == "refused" and "set window=16 and group=4" in refused.said


# -- faults that begin after the shape was tried


@pytest.mark.parametrize(
    ("operation", "row", "window"), [("product", 0, 1), ("norm", 1, 1), ("activation", 2, 3), ("unembedding", 3, 4)]
)
def test_a_fault_of_a_row_that_begins_later_is_stopped(operation: str, row: int, window: int) -> None:
    verdict = later(Planted(operation, in_row(row)), window, 3 * window + 5)
    assert verdict.kind == "stopped", verdict
    for word in ("request ", f"of 4 x {window} rows", "batch indices", "set another group"):
        assert word in verdict.said
    assert "logits" in verdict.said if operation == "unembedding" else "layer 0" in verdict.said


@pytest.mark.parametrize(
    ("operation", "name", "window"),
    [
        ("product", "neighbours", 1),
        ("unembedding", "neighbours", 4),
        ("activation", "next neighbour", 1),
        ("attention", "slot", 3),
        ("norm", "odd slots", 4),
        ("activation", "position", 3),
        ("product", "threads", 1),
    ],
)
def test_any_fault_that_begins_later_is_stopped(operation: str, name: str, window: int) -> None:
    assert later(Planted(operation, DEPENDS_ON[name]), window, 4 * window + 9).kind == "stopped"


@pytest.mark.parametrize(("name", "window"), [("slot", 3), ("odd slots", 5)])
def test_a_fault_of_slots_that_begins_later_is_stopped_in_a_short_run(name: str, window: int) -> None:
    """Where one or two verify passes are all that a request gets, they compare slots."""
    assert later(Planted("product", DEPENDS_ON[name]), window, window + 2).kind == "stopped"


# -- each guard removed


@pytest.mark.parametrize(("operation", "window"), [("product", 1), ("norm", 3)])
def test_without_the_trial_the_check_while_it_runs_stops_it(
    operation: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "trial")
    shapes: dict[str, Any] = dict(window=window, group=4, max_new_tokens=3 * window + 5, capacity=64, capture="STC")
    assert ends(fresh(), Planted(operation, in_second_half), PROMPTS[:3], **shapes).kind == "stopped"
    without(monkeypatch, "check while it runs")
    assert ends(fresh(), Planted(operation, in_second_half), PROMPTS[:3], **shapes).kind == "different"


# -- reading Z


@pytest.mark.parametrize("operation", ["unembedding", "norm"])
def test_a_fault_of_places_in_a_reading_is_stopped(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows of one row, the odd slots of a reading are the only ones."""
    shapes: dict[str, Any] = dict(window=1, group=4, **RUN)
    verdict = ends(fresh(), Planted(operation, DEPENDS_ON["odd slots"]), PROMPTS, **shapes)
    assert verdict.kind == "stopped" and "for one vector" in verdict.said and "set_num_threads" in verdict.said
    monkeypatch.setattr(lens_reader, "_difference", lambda *read: None)
    verdict = ends(fresh(), Planted(operation, DEPENDS_ON["odd slots"]), PROMPTS, **shapes)
    assert verdict.kind == "different" and verdict.said.endswith("in readings")
