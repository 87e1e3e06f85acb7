"""Hooks on modules: against transformers with the same PyTorch hook, in `generate` and in whole forwards; what a
rollback leaves of them, which requests they concern, and what the fingerprint holds of a function."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.edits.interventions import StateContext, add, hook, on_rejected, zero
from cacheprobe.edits.interventions.digests import function_digest
from cacheprobe.edits.interventions.editor import Editor
from cacheprobe.models.base import ModelError
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.trace.recording import disk_writer
from tests.capture.recorded_run import failing_after
from tests.planted_drafts import planted
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

SUMS = "without a cache the sums have other shapes"
LIGHT: dict[str, Any] = {**SMALL, "max_new_tokens": 12, "capture": "S"}
EXIT = cp.drafters.EarlyExit(layer=1)
PLACES = [
    ("llama", "model.layers.0.mlp.down_proj"),
    ("llama", "model.layers.0"),
    ("llama", "model.norm"),
    ("llama", "lm_head"),
    ("qwen3", "model.layers.1.self_attn.q_norm"),
    ("gpt2", "transformer.h.1.attn.c_attn"),
    ("gemma3", "model.layers.0.self_attn.k_norm"),
]


def turned(state: Tensor, *context: object) -> Tensor:
    return state.flip(-1) * 0.7


@contextmanager
def transformers_hook(model: Any, name: str) -> Iterator[None]:
    """PyTorch's own hook on a module of the transformers model, at every token."""

    def change(module: object, args: object, output: Any) -> Any:
        return (turned(output[0]), *output[1:]) if isinstance(output, tuple) else turned(output)

    handle = model.get_submodule(name).register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(("family", "name"), PLACES)
def test_tokens_are_those_of_generate_with_the_same_hook(family: str, name: str) -> None:
    """With drafts of which most are rejected: every status of a row goes through the hook."""
    trace = cp.run(loaded(family), PROMPTS[:2], interventions=hook(name, turned), drafter=EXIT, **LIGHT)
    model = hf_model(family)
    for request, prompt in enumerate(PROMPTS[:2]):
        ids = torch.tensor([prompt])
        with transformers_hook(model, name), torch.inference_mode():
            right = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert trace.committed(request) == right[0, len(prompt) :].tolist()
    assert trace.num_rolled_back and trace.edits().rolled_back.sum() > 3
    plain = cp.run(loaded(family), PROMPTS[:2], **LIGHT)
    assert plain.committed(0) != trace.committed(0)


def test_a_hook_that_misses_a_phase_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = Editor.edit
    monkeypatch.setattr(Editor, "edit", lambda *given: edit(*given) if given[0]._step % 4 else None)
    with pytest.raises(AssertionError):
        test_tokens_are_those_of_generate_with_the_same_hook(*PLACES[0])


@pytest.mark.parametrize("side", ["output", "input"])
def test_positions_phases_and_sampling(side: str) -> None:
    """At chosen positions, of sampled tokens with drafts: the last block's states against a whole forward."""
    name, positions = "model.layers.1.mlp", (2, 7, 9)
    edits = hook(f"{name}.{side}", turned, request_id=1, positions=positions)
    sampled = dict(sampling=cp.SamplingParams(temperature=1.0), seed=4)
    trace = cp.run(loaded("qwen3"), PROMPTS[:3], interventions=edits, drafter=EXIT, **LIGHT, **sampled)
    model, text = hf_model("qwen3"), [*PROMPTS[1], *trace.committed(1)][:-1]

    def change(value: Tensor) -> Tensor:
        value = value.clone()
        for position in positions:
            value[0, position] = turned(value[0, position])
        return value

    module, seen = model.get_submodule(name), list[Tensor]()
    handles = [model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0][0].clone()))]
    if side == "output":
        handles += [module.register_forward_hook(lambda module, args, output: change(output))]
    else:
        handles += [module.register_forward_pre_hook(lambda module, args: (change(args[0]),))]
    with torch.inference_mode():
        model(torch.tensor([text]), use_cache=False)
    for handle in handles:
        handle.remove()
    assert close(trace.states("S", 2, 1), seen[0], 1e-4, because=SUMS)
    plain = cp.run(loaded("qwen3"), PROMPTS[:3], drafter=EXIT, **LIGHT, **sampled)
    assert plain.committed(0) == trace.committed(0) and plain.committed(2) == trace.committed(2)


def test_queries_after_the_rotation_are_changed() -> None:
    """Zero queries attend evenly: z is the mean of all values up to the token, by hand."""
    edits = hook("model.layers.1.self_attn.query", lambda state, context: 0 * state, request_id=0, positions=[2, 6])
    capture = cp.CaptureConfig("S", heads=("v", "z"))
    trace = cp.run(loaded(), PROMPTS[:2], interventions=edits, drafter=EXIT, **LIGHT | {"capture": capture})
    values, z = trace.heads("v", 1, 0), trace.heads("z", 1, 0)
    for position in (2, 6):
        mean = values[: position + 1].mean(0).repeat_interleave(z.shape[1] // values.shape[1], 0)
        assert close(z[position], mean, 1e-5, because=SUMS)
    other = values[:4].mean(0).repeat_interleave(z.shape[1] // values.shape[1], 0)
    assert not close(z[3], other, 1e-2, because=SUMS)


def test_a_hook_point_of_the_bridge_does_what_the_module_does() -> None:
    both = [
        cp.run(loaded("qwen3"), PROMPTS[:2], interventions=hook(name, turned), drafter=EXIT, **LIGHT)
        for name in ("model.layers[1].self_attn.query", "blocks.1.attn.hook_rot_q")
    ]
    assert [trace.meta["path_reason"].split(":")[0] for trace in both] == ["plain", "bridge"]
    for request in (0, 1):
        assert both[0].committed(request) == both[1].committed(request)
        assert close(both[0].states("S", 2, request), both[1].states("S", 2, request), 1e-4, because=SUMS)


def test_other_edits_take_modules_too() -> None:
    name = "model.layers.*.mlp.down_proj"
    by_function = hook(name, lambda state, context: torch.zeros_like(state), layers=[0, 2], positions=[3])
    made = [zero(site=name, layer=layer, positions=[3]) for layer in (0, 2)]
    sites = [zero(site="C", layer=layer, positions=[3]) for layer in (0, 2)]
    runs = [cp.run(loaded(), PROMPTS[:1], interventions=one, **LIGHT) for one in (by_function, made, sites)]
    assert all(bitwise(runs[0].states("S", 2, 0), one.states("S", 2, 0)) for one in runs)
    with pytest.raises(ValueError, match="vectors of width 3, where states have 32"):
        cp.run(loaded(), PROMPTS[:1], interventions=add(torch.ones(3), site=name, layer=0), **LIGHT)


def test_an_edit_of_drafts_leaves_nothing_behind() -> None:
    """Only drafts are changed: other drafts, the same text and the same bits in cache and states."""
    keeping = [cp.Request(tuple(prompt), keep_kv=True) for prompt in PROMPTS[:2]]
    given = dict(drafter=EXIT, deterministic=True, **LIGHT)
    plain = cp.run(loaded(), keeping, **given)
    edits = hook("model.layers.0.mlp", turned, phases="decode", own_fingerprint=True)
    with pytest.warns(RuntimeWarning, match="of request 0 at model.layers.0.mlp changed no committed row"):
        changed = cp.run(loaded(), keeping, interventions=edits, **given)
    assert not plain.event_table.draft_token_ids.equals(changed.event_table.draft_token_ids)
    for request in (0, 1):
        assert changed.committed(request) == plain.committed(request)
        assert bitwise(changed.states("S", 2, request), plain.states("S", 2, request))
        ours, theirs = (cp.analysis.kv_snapshot(trace, request) for trace in (changed, plain))
        assert all(bitwise(a, b) for a, b in zip(ours.keys, theirs.keys, strict=True))


def test_deterministic_requests_are_the_same_beside_others_and_are_verified(tmp_path: Path) -> None:
    of_all = hook("model.layers.1.self_attn.q_norm", turned, own_fingerprint=True)
    given = dict(interventions=of_all, drafter=EXIT, deterministic=[0], window=4, group=2, capacity=96)
    given |= dict(progress=False, max_new_tokens=12, capture=cp.CaptureConfig("S", modules="model.layers.2.mlp"))
    alone = cp.run(loaded("qwen3"), PROMPTS[:1], **given)
    beside = cp.run(loaded("qwen3"), PROMPTS[:4], **given)
    assert alone.digest(0) == beside.digest(0)
    assert cp.verify(beside, progress=False).first_difference is None
    stored = cp.load_trace(beside.save(tmp_path / "run"), loaded("qwen3"))
    assert cp.verify(stored, interventions=of_all, progress=False).first_difference is None
    with pytest.raises(ValueError, match="under different schedules; interventions"):
        cp.verify(stored, interventions=hook("model.layers.1.mlp", turned, own_fingerprint=True), progress=False)


def test_a_stopped_run_goes_on_with_its_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(interventions=hook("model.layers.0.mlp", turned), drafter=EXIT, **LIGHT)
    for name in ("SECONDS", "_SHARE"):
        monkeypatch.setattr(disk_writer, name, 0.0)
    with planted(draft=0.0, verify=1e-9):
        memory = cp.run(loaded(), PROMPTS[:3], **given)
        with failing_after(12):
            cp.run(loaded(), PROMPTS[:3], **given, out=tmp_path / "run")
        resumed = dict(drafter=EXIT, progress=False)
        with pytest.raises(ValueError, match="interventions"):
            cp.resume(tmp_path / "run", loaded(), **resumed, interventions=hook("model.layers.0.mlp", torch.neg))
        again = cp.resume(tmp_path / "run", loaded(), **resumed, interventions=given["interventions"])
    assert [again.committed(r) for r in range(3)] == [memory.committed(r) for r in range(3)]


def test_a_replay_of_another_programs_tokens_takes_hooks() -> None:
    edits = hook("model.layers.0.mlp", turned)
    trace = cp.run(loaded(), PROMPTS[:1], interventions=edits, **LIGHT)
    one = {"prompt_token_ids": PROMPTS[0], "token_ids": trace.committed(0)}
    again = cp.replay(loaded(), one, interventions=edits, capture="S", progress=False)
    assert close(again.states("S", 2, 0), trace.states("S", 2, 0), 1e-4, because=SUMS)


def test_a_sweep_takes_hook_points(tmp_path: Path) -> None:
    """An MLP whose input is zero gives the same at every position."""
    edits = ["none", "zero:site=blocks.1.ln2.hook_normalized,positions=3-9"]
    grid = {"model": "coinflip-plain", "task": "coin_flip:people=2", "window": 4, "intervention": edits}
    run = {"n": 2, "max_new_tokens": 2, "capacity": 128, "capture": "C"}
    cp.sweep({"grid": grid, "run": run}, out=tmp_path / "s", progress=False)
    traces = [trace for _, trace in cp.load_sweep(tmp_path / "s").traces()]
    (edited,) = (trace for trace in traces if trace.meta.get("interventions"))
    (plain,) = (trace for trace in traces if not trace.meta.get("interventions"))
    for request in (0, 1):
        ours, theirs = (trace.states("C", 1, request)[3:10] for trace in (edited, plain))
        assert bitwise(ours, ours[:1].expand_as(ours)) and not bitwise(theirs, theirs[:1].expand_as(theirs))


# -- which requests


@pytest.mark.parametrize(
    ("named", "changed"),
    [(1, [1]), ([0, 2], [0, 2]), (slice(1, None), [1, 2, 3]), (slice(-2, None), [2, 3]), ("all", [0, 1, 2, 3])],
)
def test_requests_are_named_by_number_list_slice_or_all(named: Any, changed: list[int]) -> None:
    one_by_one = [zero(site="T", layer=1, request_id=request) for request in changed]
    both = [
        cp.run(loaded(), PROMPTS[:4], interventions=edit, **LIGHT)
        for edit in (zero(site="T", layer=1, request_id=named), one_by_one)
    ]
    assert both[0].edits().request_id.tolist() == changed and both[0].edits().equals(both[1].edits())
    assert both[0].fingerprint == both[1].fingerprint
    assert both[0].digest(0) == both[1].digest(0)


def test_every_function_acts_on_all_requests_unless_told() -> None:
    trace = cp.run(loaded(), PROMPTS[:3], interventions=zero(site="T", layer=1), **LIGHT)
    assert trace.edits().request_id.tolist() == [0, 1, 2] and (trace.edits().committed > 3).all()


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (3, "zero of request 3 at site T of layer 1: no request 3; the run has 0 to 1"),
        ([0, 5], "zero of requests 0, 5 at .*no request 5"),
        (slice(2, 9), r"zero of requests \[2:9\] at .*no request is named; the run has 0 to 1"),
        (-1, "request_id must be a whole number of at least 0, got -1"),
        ([1, 1], "give each request once"),
        ([], "give each request once"),
        ("every", "request_id must be a whole number"),
    ],
)
def test_a_request_that_is_not_there_is_refused_by_name(named: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        cp.run(loaded(), PROMPTS[:2], interventions=zero(site="T", layer=1, request_id=named), **LIGHT)


# -- rejected drafts


@pytest.mark.parametrize("phases", [None, "verify"])
def test_only_rejected_drafts_are_changed(phases: str | None) -> None:
    """Two runs: the text, its bits and the accepted drafts stay; the rejected ones differ."""
    given = dict(drafter=EXIT, deterministic=True, draft_length=3, **LIGHT)
    first = cp.run(loaded(), PROMPTS[:3], **given)
    edit = zero(site="S", layer=0, phases=phases, own_fingerprint=True)
    second = cp.run(loaded(), PROMPTS[:3], interventions=on_rejected(first, edit), **given)
    counts = second.edits()[["committed", "superseded", "rolled_back"]].sum()
    assert not counts.committed and counts.rolled_back > 3
    for request in range(3):
        assert second.digest(request) == first.digest(request)
    rejected = second.rows(status="rolled_back")
    is_zero = second.vectors("S", 0, rejected).eq(0).all(1)
    others = second.vectors("S", 0, second.rows()[lambda rows: rows.status != "rolled_back"])
    assert int(is_zero.sum()) == counts.rolled_back
    assert int(others.eq(0).all(1).sum()) == counts.superseded  # a draft that is now accepted
    if phases == "verify":  # the drafts themselves are the same, so every rejected one is changed
        same = ["step", "request_id", "draft_token_ids", "num_accepted", "committed_token_ids"]
        assert second.event_table[same].equals(first.event_table[same])
        assert bool(is_zero[torch.tensor((rejected.phase == "verify").to_numpy())].all())
    assert cp.verify(second, progress=False).first_difference is None


def test_a_run_without_such_drafts_is_refused() -> None:
    plain = cp.run(loaded(), PROMPTS[:1], **LIGHT)
    with pytest.raises(ValueError, match="the trace rejected no draft token that the edit could act on"):
        on_rejected(plain, zero(site="S", layer=1))


# -- what the fingerprint holds


def scaled(by: object) -> Any:
    def change(state: Tensor, context: StateContext) -> Tensor:
        return state * by

    return change


FACTOR = torch.tensor([2.0])


def by_global(state: Tensor, context: StateContext) -> Tensor:
    return state * FACTOR


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, state: Tensor, context: StateContext) -> Tensor:
        return state * self.by


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (scaled(2.0), scaled(2.0), scaled(3.0)),
        (
            scaled(torch.ones(999)),
            scaled(torch.ones(999)),
            scaled(torch.ones(999).index_fill_(0, torch.tensor(500), 2)),
        ),
        (partial(turned, 1.0), partial(turned, 1.0), partial(turned, 2.0)),
        (scaled([1, {"a": 2}]), scaled([1, {"a": 2}]), scaled([1, {"a": 3}])),
        (scaled(turned), scaled(turned), scaled(scaled)),
        (Scale(2.0), Scale(2.0), Scale(3.0)),
        (Scale(2.0).__call__, Scale(2.0).__call__, Scale(3.0).__call__),
        (torch.neg, torch.neg, torch.abs),
    ],
)
def test_a_function_is_told_apart_by_the_values_that_it_uses(one: Any, same: Any, other: Any) -> None:
    assert function_digest(one) == function_digest(same) != function_digest(other)
    assert not function_digest(one)[1]


def test_a_changed_global_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = function_digest(by_global)
    monkeypatch.setitem(by_global.__globals__, "FACTOR", torch.tensor([3.0]))
    assert before != function_digest(by_global) and not before[1]


def test_a_function_that_cannot_be_told_apart_is_refused_where_that_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = threading.Lock()

    def locked(state: Tensor, context: StateContext) -> Tensor:
        with lock:
            return state * 2

    edit = hook("model.layers.0.mlp", locked, own_fingerprint=True)
    assert cp.run(loaded(), PROMPTS[:1], interventions=edit, **LIGHT).meta["interventions"][0]["unnamed"]
    with pytest.raises(ValueError, match="uses its variable lock, a lock, which no fingerprint can hold"):
        cp.run(loaded(), PROMPTS[:1], interventions=edit, deterministic=True, **LIGHT)
    for name in ("SECONDS", "_SHARE"):
        monkeypatch.setattr(disk_writer, name, 0.0)
    with failing_after(6):
        cp.run(loaded(), PROMPTS[:2], interventions=edit, **LIGHT, out=tmp_path / "run")
    with pytest.raises(ValueError, match="uses its variable lock, a lock, which cannot be compared"):
        cp.resume(tmp_path / "run", loaded(), interventions=edit, progress=False)


def test_a_function_that_returns_another_shape_ends_its_request_alone() -> None:
    edit = hook("model.layers.1.self_attn.q_norm", lambda state, context: state[:1], request_id=1)
    with pytest.warns(RuntimeWarning, match=r"of request 1 at model.layers.1.self_attn.q_norm, position .* \[1, 8\]"):
        trace = cp.run(loaded("qwen3"), PROMPTS[:2], interventions=edit, **LIGHT)
    assert len(trace.committed(0)) == 12 and not trace.committed(1)


def test_a_module_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="has no module model.layers.1.mlpp; did you mean model.layers.1.mlp"):
        cp.run(loaded(), PROMPTS[:1], interventions=hook("model.layers.1.mlpp", turned), **LIGHT)
