"""Settings of the process around a run: each is told in the fingerprint, or makes no difference."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.engine.fingerprint import FingerprintMismatch, require_same
from cacheprobe.models import settings
from cacheprobe.models import weights as facts
from cacheprobe.models.base import ModelError
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.models.settings import numeric_settings, require_one_flush_mode
from cacheprobe.models.weights import checksum_of
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

LIGHT = dict(SMALL, deterministic=True, max_new_tokens=6, capture=cp.CaptureConfig(sites="STC", heads=("z",)))
STREAMED = {name: value for name, value in LIGHT.items() if name != "progress"}
BACKEND = torch.backends

RECORDED: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {  # by key: how to set it, how to undo it
    "float32_matmul_precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "mkldnn": (lambda: setattr(BACKEND.mkldnn, "enabled", False), lambda: setattr(BACKEND.mkldnn, "enabled", True)),
    "threads": (
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        lambda: torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"])),
    ),
    "deterministic_algorithms": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "attention_kernels": (
        lambda: BACKEND.cuda.enable_flash_sdp(False),
        lambda: BACKEND.cuda.enable_flash_sdp(True),
    ),
}

OUTSIDE: dict[str, Callable[[], AbstractContextManager[Any]]] = {  # what may stand around a call
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "default dtype float64": lambda: DefaultDtype(torch.float64),
    "default dtype bfloat16": lambda: DefaultDtype(torch.bfloat16),
}


class DefaultDtype(AbstractContextManager):
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(torch.float32)


def fresh(family: str = "llama", dtype: torch.dtype = torch.float32) -> PlainLM:
    return cp.load_model(hf_model(family, dtype))


def digests(model: Any, **over: Any) -> list[str]:
    trace = cp.run(model, PROMPTS[:3], **{**LIGHT, **over})
    return [trace.digest(i) for i in range(3)]


@pytest.mark.parametrize("key", RECORDED)
def test_a_setting_that_may_change_bits_is_in_the_fingerprint(key: str) -> None:
    """`torch.set_float32_matmul_precision("medium")` gave other tokens under the same fingerprint."""
    apply, undo = RECORDED[key]
    model, before = loaded(), numeric_settings()
    trace = cp.run(model, PROMPTS[:2], **LIGHT)
    apply()
    try:
        with pytest.raises(FingerprintMismatch, match=f"under different schedules; {key}: "):
            cp.verify(trace, model, progress=False)
        there = cp.run(model, PROMPTS[:2], **LIGHT)
        assert cp.verify(there, model, progress=False).is_equal
        assert numeric_settings() != before
    finally:
        undo()
    assert numeric_settings() == before
    assert cp.verify(trace, model, progress=False).is_equal
    with pytest.raises(FingerprintMismatch, match=f"; {key}: "):
        cp.verify(there, model, progress=False)


def test_environment_variables_of_the_libraries_are_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded()
    for name in ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"):
        before = model.fingerprint()
        with monkeypatch.context() as patched:
            patched.setenv(name, "another")
            with pytest.raises(FingerprintMismatch, match=f"; {name.lower()}: .* against 'another'"):
                require_same(before, model.fingerprint(), "two runs")


def test_denormal_numbers_are_flushed_by_all_threads_or_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.set_flush_denormal` acts in the thread that calls it, and in those that it starts later."""
    trace = cp.run(loaded(), PROMPTS[:2], **LIGHT)
    assert trace.fingerprint["flush_denormal"] is False
    torch.set_flush_denormal(True)
    try:
        assert numeric_settings()["flush_denormal"] is True
        with pytest.raises(ValueError, match="flush_denormal"):  # in all threads another fingerprint, else refused
            cp.verify(trace, loaded(), progress=False)
    finally:
        torch.set_flush_denormal(False)
    monkeypatch.setattr(settings, "_flushes", lambda least, one: True)  # in this thread, and not in the others
    with pytest.raises(ModelError, match=r"call torch.set_flush_denormal\(False\)"):
        require_one_flush_mode()
    with pytest.raises(ModelError, match="in some threads of this process"):
        cp.run(loaded(), PROMPTS[:2], **LIGHT)


@pytest.mark.parametrize(
    ("outside", "path"), [*zip(OUTSIDE, ("bridge", "plain", "bridge", "plain", "plain"), strict=True)]
)
def test_what_stands_around_a_run_makes_no_difference(outside: str, path: str) -> None:
    """Under autocast a float32 model gave bfloat16 states, under one fingerprint."""
    model, live = loaded(), hf_model()
    want = digests(model, path=path)
    with OUTSIDE[outside]():
        inside = switches()
        assert digests(model, path=path) == want
        assert switches() == inside
        again = cp.load_model(live)  # loaded there as well
        assert digests(again, path=path) == want
        assert switches() == inside
    assert digests(model, path=path) == digests(again, path=path) == want


def switches() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
        torch.is_inference_mode_enabled(), torch.is_grad_enabled(),
    )  # fmt: skip


def test_a_stream_leaves_settings_alone_between_its_pieces() -> None:
    """Also one that is let go, and one that ends with an error."""
    model = loaded()
    want = cp.run(model, PROMPTS[:2], **LIGHT)
    with OUTSIDE["autocast"]():
        inside = switches()
        stream = cp.stream(model, PROMPTS[:2], **STREAMED)
        for _ in stream:
            assert switches() == inside
        assert stream.trace().digest(0) == want.digest(0)
        left = cp.stream(model, PROMPTS[:2], **STREAMED)
        next(left)
        del left
        assert switches() == inside
        interrupted(model, RuntimeError("of mine"), 2)
        assert switches() == inside
    assert digests(model)[0] == want.digest(0)


@pytest.mark.parametrize("path", ["plain", "bridge"])
def test_a_model_in_train_mode_runs_in_eval_mode_and_gets_its_mode_back(path: str) -> None:
    """GPT-2's dropout was active on the bridge: deterministic runs differed every time, under one fingerprint."""
    model = fresh("gpt2")
    live = model.bridge.original_model
    want = digests(model, path=path)
    live.train()
    mode = [module.training for module in live.modules()]
    assert all(mode) and digests(model, path=path) == digests(model, path=path) == want
    assert [module.training for module in live.modules()] == mode
    live.eval()
    live.transformer.h[1].train()
    mode = [module.training for module in live.modules()]
    assert any(mode) and digests(model, path=path) == want
    assert [module.training for module in live.modules()] == mode


def test_an_edit_through_data_is_another_model() -> None:
    """`param.data.mul_` changes neither address nor edit count: the hash was that of before."""
    model = fresh(dtype=torch.bfloat16)
    trace = cp.run(model, PROMPTS[:2], **LIGHT)
    first = model.weights_sha256
    weight = model.bridge.blocks[1].mlp.out.original_component.weight
    held = weight.data.clone()
    weight.data.mul_(1.01)
    assert model.weights_sha256 != first
    with pytest.raises(FingerprintMismatch, match="weights_sha256"):
        cp.verify(trace, model, progress=False)
    weight.data.copy_(held)
    assert model.weights_sha256 == first
    assert cp.verify(trace, model, progress=False).is_equal


def test_an_edit_through_data_of_a_copy_that_the_bridge_keeps() -> None:
    """GPT-NeoX's joint projection is split into copies: far less was edited than the comparison would notice."""
    model = fresh("gpt-neox")
    assert choose_path(model)[1].startswith("plain")
    model.bridge.blocks[0].attn.q.weight.data.mul_(1 + 1e-6)
    chosen, reason = choose_path(model)
    assert chosen is model.bridged() and "weights of the bridge were edited" in reason
    assert chosen.weights_sha256 != model.weights_sha256


@pytest.mark.parametrize("numbers", [7, 10_001])
def test_a_checksum_sees_every_edit_of_a_weight(numbers: int) -> None:
    """The sums that stand for a weight on another device, too: a byte changed, rows swapped, words swapped."""
    weight = torch.randn(numbers, 6)
    for at_once in (True, False):
        seen = {checksum_of([("w", weight)], at_once)}
        swapped, moved, changed = weight.clone(), weight.clone(), weight.clone()
        swapped[[0, 1]] = weight[[1, 0]]
        moved[3, :4] = weight[3, [2, 3, 0, 1]]
        changed.view(torch.uint8).view(-1)[-1] ^= 1
        seen |= {checksum_of([("w", one)], at_once) for one in (swapped, moved, changed)}
        seen.add(checksum_of([("v", weight)], at_once))
        seen.add(checksum_of([("w", weight.view(6, numbers))], at_once))
        assert len(seen) == 6


def test_a_run_reads_the_weights_at_its_begin_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of the forward and the fingerprint need the same checksum; an edit between two runs changes it."""
    model, read, real = fresh(), [], checksum_of
    cp.run(model, PROMPTS[:1], **LIGHT)
    monkeypatch.setattr(facts, "checksum_of", lambda named: (read.append(1), real(named))[1])
    before = cp.run(model, PROMPTS[:1], **LIGHT).fingerprint
    assert len(read) == 2
    with torch.no_grad():
        next(model.bridge.original_model.parameters()).data.mul_(1.5)
    assert len(read) == 2
    after = cp.run(model, PROMPTS[:1], **LIGHT).fingerprint
    assert len(read) == 4 and before["weights_sha256"] != after["weights_sha256"]


def test_an_edit_while_a_run_starts_is_read() -> None:
    """By the weight's edit count, or its address."""
    model = fresh()
    layer = model.bridge.original_model.model.norm
    with facts.hashing_once():
        found = [model.weights_checksum]
        with torch.no_grad():
            layer.weight.add_(1)
        found.append(model.weights_checksum)
        layer.weight.data = layer.weight.data + 1
        found.append(model.weights_checksum)
    assert len(set(found)) == 3 and found[-1] == model.weights_checksum


def test_a_setting_that_changes_between_two_pieces_ends_the_stream() -> None:
    apply, undo = RECORDED["threads"]
    stream = cp.stream(loaded(), PROMPTS[:2], **STREAMED)
    next(stream)
    apply()
    try:
        with pytest.raises(FingerprintMismatch, match="two steps of one run.*; threads: "):
            list(stream)
    finally:
        undo()
    assert digests(loaded())


def interrupted(model: PlainLM, error: BaseException, after: int) -> None:
    """A run whose bridge has a hook that raises in one of its passes."""
    calls = 0

    def fail(value: torch.Tensor, hook: object) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error

    with model.bridge.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", fail)]), suppress(Exception, KeyboardInterrupt):
        cp.run(model, PROMPTS[:3], **LIGHT)
    assert calls > after
