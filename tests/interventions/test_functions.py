"""Interventions that compute a state from itself: against a plain hook in an uncached forward, against the oracle under
traffic, and what is refused; and steering vectors from files."""

import os
import re
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file
from torch import Tensor

import cacheprobe as cp
from cacheprobe.edits.interventions import ablate, add, clamp, hook, project, read_steering, steer
from cacheprobe.ops.equality import bitwise, close
from tests.interventions.test_interventions import LIGHT, PLACES, SUMS, WIDTH, generated_slowly, hooked_slowly
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

LAYER, POSITIONS = 1, (2, 7, 9)


def turned(state: Tensor, context: cp.interventions.StateContext) -> Tensor:
    return state.flip(0) * 0.5 + context.position


def by_hook(f: Callable, *, site: str, **where: Any) -> tuple[cp.interventions.Intervention, ...]:
    return hook(site, f, **where)


def directions(width: int, count: int = 2) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(5))


def part_slowly(state: Tensor, along: Tensor) -> np.ndarray:
    """The part of a state in the span of directions, by least squares in float64."""
    columns = along.double().numpy().T
    return columns @ np.linalg.lstsq(columns, state.double().numpy(), rcond=None)[0]


def without(along: Tensor) -> Callable[[Tensor, int], Tensor]:
    return lambda state, position: torch.from_numpy(state.double().numpy() - part_slowly(state, along)).float()


def alone(along: Tensor) -> Callable[[Tensor, int], Tensor]:
    return lambda state, position: torch.from_numpy(part_slowly(state, along)).float()


def set_to(direction: Tensor, value: float) -> Callable[[Tensor, int], Tensor]:
    unit = (direction / direction.norm()).double()
    return lambda state, position: (state.double() + (value - state.double() @ unit) * unit).float()


CHANGES = {  # what makes the intervention, and a new state from an old one and its position
    "function": lambda width: ((by_hook, turned), lambda state, position: state.flip(0) * 0.5 + position),
    "ablate": lambda width: ((ablate, directions(width)), without(directions(width))),
    "project": lambda width: ((project, directions(width)), alone(directions(width))),
    "clamp": lambda width: ((clamp, directions(width)[0], 3.0, 3.0), set_to(directions(width)[0], 3.0)),
}


AT = [("function", *place, "plain") for place in PLACES] + [("function", "T", 2, "bridge")]
AT += [(kind, site, head, "plain") for kind in ("ablate", "project", "clamp") for site, head in (("S", None), ("T", 2))]


@pytest.mark.parametrize(("kind", "site", "head", "path"), AT, ids=str)
def test_a_run_equals_a_plain_hook_without_a_cache(kind: str, site: str, head: int | None, path: str) -> None:
    """A drafter that is mostly wrong: the changed positions are drafted, rolled back and computed again."""
    prompt, width = PROMPTS[0], 32 if head is None else WIDTH
    (make, *given), slowly = CHANGES[kind](width)
    where = dict(request_id=1, site=site, layers=[LAYER], head=head, positions=POSITIONS)
    drafts = dict(drafter=cp.drafters.EarlyExit(layer=0), path=path)
    trace = cp.run(loaded(), [PROMPTS[1], prompt], interventions=make(*given, **where), **LIGHT, **drafts)
    changes = {position: lambda old, position=position: slowly(old, position) for position in POSITIONS}
    with hooked_slowly(model := hf_model(), site, head, changes):
        tokens, states = generated_slowly(model, prompt, 10)
    assert trace.committed(1) == tokens
    assert close(trace.states("S", 2, 1), states, 1e-4, because=SUMS)
    assert trace.num_rolled_back > 0 and trace.edits().committed[0] == 3
    plain = cp.run(loaded(), [PROMPTS[1], prompt], **LIGHT, **drafts)
    assert not close(plain.states("S", 2, 1)[2:5], states[2:5], 1e-2, because="the control: the change shows")
    assert plain.committed(0) == trace.committed(0)


def breaks(state: Tensor, context: cp.interventions.StateContext) -> Tensor:
    if context.position == 6:
        raise KeyError("my own fault")
    return state


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (breaks, "breaks of request 0 at site S of layer 1, position 6: the function raised KeyError: 'my own fault'"),
        (
            lambda state, context: state[:4],
            r"the function returned \[4\] torch.float32 .*, where a state is a tensor \[32\]",
        ),
        (
            lambda state, context: state.double(),
            r"the function returned \[32\] torch.float64 ",
        ),
        (lambda state, context: state / 0, r"makes a state of positions \[.*\] NaN or infinite"),
        (lambda state, context: 3.0, "the function returned float, where a state is a tensor"),
    ],
    ids=["raises", "shape", "dtype", "nan", "no tensor"],
)
def test_a_function_that_fails_ends_its_request_alone(f: Callable[..., Tensor], message: str) -> None:
    one = hook("S", f, request_id=0, layers=1)
    with pytest.warns(RuntimeWarning, match="request 0"):
        trace = cp.run(loaded(), PROMPTS[:2], interventions=one, **LIGHT)
    assert trace.meta["finish"] == {"0": "error", "1": "length"}
    assert re.search(message, trace.meta["errors"]["0"])
    plain = cp.run(loaded(), PROMPTS[:2], **LIGHT)
    assert trace.committed(1) == plain.committed(1)


@pytest.mark.parametrize("position", [5, 7, 9])
def test_a_function_that_fails_while_a_draft_grows_ends_the_run(position: int) -> None:
    """The draft was dropped and decoded again without end, if it failed at a draft's second token or later. Committed
    tokens from before stay."""
    calls = 0

    def fails(state: Tensor, context: cp.interventions.StateContext) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 200:
            raise SystemExit("it does not end")
        if context.position == position:
            raise KeyError("my own fault")
        return state

    one = hook("S", fails, request_id=0, layers=1, own_fingerprint=True)
    with pytest.warns(RuntimeWarning, match="request 0"):
        trace = cp.run(loaded(), PROMPTS[:2], interventions=one, **{**LIGHT, "deterministic": True})
    plain = cp.run(loaded(), PROMPTS[:2], **{**LIGHT, "deterministic": True})
    assert trace.meta["finish"] == {"0": "error", "1": "length"} and trace.digest(1) == plain.digest(1)
    assert trace.committed(0) == plain.committed(0)[: position - len(PROMPTS[0]) + 1]


def test_a_function_gets_copies_and_is_told_the_place() -> None:
    told = []

    def spoils(state: Tensor, context: cp.interventions.StateContext) -> Tensor:
        told.append(context)
        kept = state.clone()
        state.zero_()
        return kept

    settings = dict(**LIGHT, drafter=cp.drafters.EarlyExit(layer=1))
    one = hook("S", spoils, request_id=0, layers=[0, 2], phases=["prefill", "decode"])
    trace = cp.run(loaded(), PROMPTS[:2], interventions=one, **settings)
    assert trace.digest(0) == cp.run(loaded(), PROMPTS[:2], **settings).digest(0)
    prefilled = {(c.layer, c.position) for c in told if c.phase == "prefill"}
    assert prefilled == {(layer, position) for layer in (0, 2) for position in range(5)}
    assert {c.phase for c in told} == {"prefill", "decode"} and {c.request_id for c in told} == {0}


def test_a_run_is_replayed_with_its_function_and_with_no_other(tmp_path: Path) -> None:
    one = hook("S", turned, request_id=0, layers=1, positions=3, own_fingerprint=True)
    cp.run(loaded(), PROMPTS[:1], deterministic=True, interventions=one, **LIGHT).save(tmp_path / "run")
    stored = cp.load_trace(tmp_path / "run", model=loaded())
    assert stored.meta["interventions"][0]["name"] == "turned"
    assert cp.verify(stored, interventions=one, progress=False).is_equal
    for other in (
        hook("S", breaks, request_id=0, layers=1, positions=3, own_fingerprint=True, name="turned"),
        ablate(directions(32), request_id=0, site="S", layers=1, positions=3, own_fingerprint=True),
    ):
        with pytest.raises(ValueError, match="different schedules; interventions: 'request 0"):
            cp.verify(stored, interventions=other, progress=False)


WHERE: dict[str, Any] = dict(request_id=0, site="S", layers=1)


@pytest.mark.parametrize(
    "of", [lambda x: eval(f"lambda state, context: state * {x}"), lambda x: partial(scaled, x)], ids=["text", "partial"]
)
def test_functions_are_told_apart(of: Callable[[float], Callable[..., Tensor]]) -> None:
    """Those without a source, and those whose source is the same."""
    first, other, same = (by_hook(of(x), **WHERE)[0].record()["source_sha256"] for x in (2.0, 3.0, 2.0))
    assert first == same != other != by_hook(partial(turned), **WHERE)[0].record()["source_sha256"] != first


def scaled(factor: float, state: Tensor, context: cp.interventions.StateContext) -> Tensor:
    return factor * state


def test_directions_are_part_of_the_fingerprint() -> None:
    where = WHERE
    made = [
        ablate(directions(32), **where), ablate(directions(32) * 2 + 1, **where), project(directions(32), **where),
        clamp(directions(32)[0], 1, 2, **where), clamp(directions(32)[0], 1, 3, **where),
    ]  # fmt: skip
    assert len({repr(one.record()) for (one,) in made}) == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda where: ablate(torch.zeros(32), **where), "ablate: 1 directions, of which one is zero"),
        (lambda where: project(torch.ones(2, 32), **where), "2 directions, of which one is zero or lies in the span"),
        (lambda where: clamp(torch.full((32,), float("nan")), 1.0, **where), "clamp: directions hold NaN or infinity"),
        (lambda where: clamp(torch.ones(32), **where), "clamp: give finite low, high or both"),
        (lambda where: clamp(torch.ones(32), 2, 1, **where), "low at most high; got low=2, high=1"),
        (lambda where: clamp(directions(32), 1, **where), "clamp: give one direction, got 2"),
        (lambda where: ablate(torch.ones(1, 2, 3), **where), r"directions must be \[w\] or \[k, w\]"),
        (
            lambda where: clamp(directions(32)[0], float("nan"), **where),
            "clamp: give finite low.*got low=nan",
        ),
        (lambda where: by_hook(turned, **{**where, "layers": []}), "so nothing would change"),
        (lambda where: ablate(directions(32), **{**where, "layers": ()}), "so nothing would change"),
        (lambda where: steer({}, request_id=0), "so nothing would change"),
        (
            lambda where: cp.run(loaded(), PROMPTS[:1], interventions=ablate(torch.ones(31), **where), **SMALL),
            "ablate of request 0 .*: vectors of width 31, where states have 32",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(make: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(WHERE)


def control_vector(path: Path, by_layer: dict[int, Tensor], prefix: str = "direction.") -> Path:
    """A file as repeng's `export_gguf` writes it."""
    writer = GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(by_layer))
    for layer, vector in by_layer.items():
        writer.add_tensor(f"{prefix}{layer}", vector.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["gguf", "safetensors", "tensors"])
def test_steering_adds_each_layers_vector(tmp_path: Path, kind: str) -> None:
    vectors = {layer: directions(32, 3)[layer] for layer in (0, 2)}
    given: dict[int, Tensor] | Path = vectors
    if kind == "gguf":
        given = control_vector(tmp_path / "happy.gguf", vectors)
    elif kind == "safetensors":
        save_file({f"layer.{layer}": vector for layer, vector in vectors.items()}, given := tmp_path / "v.safetensors")
    trace = cp.run(loaded(), PROMPTS[:2], interventions=steer(given, 0.5, request_id=1), **LIGHT)
    where = dict(request_id=1, site="S")
    by_hand = [add(0.5 * vector, layer=layer, **where) for layer, vector in vectors.items()]
    expected = cp.run(loaded(), PROMPTS[:2], interventions=by_hand, **LIGHT)
    assert trace.digest(1) == expected.digest(1) != cp.run(loaded(), PROMPTS[:2], **LIGHT).digest(1)
    assert bitwise(trace.states("S", 2, 1), expected.states("S", 2, 1))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: save_file({"a": torch.ones(4)}, path), "key 'a' does not end in a layer's number"),
        (lambda path: save_file({"1": torch.ones(4), "x.1": torch.ones(4)}, path), "layer 1 is there twice"),
        (lambda path: save_file({"1": torch.ones(4), "2": torch.ones(5)}, path), r"the widths \[4, 5\]"),
        (lambda path: save_file({"1": torch.ones(1, 4)}, path), r"must be \[m\], got \[1, 4\]"),
        (lambda path: save_file({"1": torch.full((4,), float("inf"))}, path), "holds NaN or infinity"),
        (lambda path: save_file({"1": torch.ones(4, dtype=torch.int32)}, path), "holds torch.int32"),
        (lambda path: save_file({}, path), r"the vectors have the widths \[\]"),
        (lambda path: path.write_bytes(b"\xff" * 64), "no whole safetensors file"),
        (lambda path: path.write_bytes(b""), "no whole safetensors file"),
    ],
)
def test_files_without_steering_vectors_are_refused(tmp_path: Path, write: Callable, message: str) -> None:
    write(tmp_path / "v.safetensors")
    with pytest.raises(ValueError, match=message):
        read_steering(tmp_path / "v.safetensors")


def test_broken_control_vectors_are_refused(tmp_path: Path) -> None:
    whole = control_vector(tmp_path / "whole.gguf", {1: torch.ones(64), 2: torch.ones(64)}).read_bytes()
    part = tmp_path / "part.gguf"
    for length in range(0, len(whole), 7):
        part.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="part.gguf"):
            read_steering(part)
    foreign = control_vector(tmp_path / "model.gguf", {1: torch.ones(64)}, prefix="blk.")
    with pytest.raises(ValueError, match="tensor 'blk.1' is not named direction.LAYER"):
        read_steering(foreign)
    with pytest.raises(ValueError, match="read from .gguf and .safetensors"):
        read_steering(tmp_path / "v.pt")
    with pytest.raises(FileNotFoundError):
        read_steering(tmp_path / "missing.gguf")


def test_a_control_vector_that_promises_much_takes_little(tmp_path: Path) -> None:
    """One key with a list of 10^12 numbers, of which none is there."""
    key = b"a"
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    (tmp_path / "list.gguf").write_bytes(header + struct.pack("<IIQ", 9, 0, 10**12))
    (tmp_path / "keys.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 10**15, 10**15))
    (tmp_path / "text.gguf").write_bytes(struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**60))
    os.mkfifo(tmp_path / "pipe.safetensors")
    began = time.monotonic()
    for name, message in (
        ("list.gguf", "a list of 1000000000000"),
        ("keys.gguf", "1000000000000000 tensors"),
        ("text.gguf", "a text of"),
        ("pipe.safetensors", "no plain file"),
    ):
        with pytest.raises(ValueError, match=message):
            read_steering(tmp_path / name)
    assert time.monotonic() - began < 5
