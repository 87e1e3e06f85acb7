"""What `make gpu` does, as far as it can be done without a GPU: its checks in Triton's interpreter, and its refusal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cacheprobe.ops.kernel_set import KernelSet
from cacheprobe.trace.recording import lens_reader
from cacheprobe_benchmarks.gpu import checks, everything
from cacheprobe_benchmarks.gpu.jobs import Shape, main_job, random_llama
from cacheprobe_benchmarks.shared.tiny import Size
from cacheprobe_benchmarks.speed.products import Rates

SMALL = Size(vocab=32, hidden=16, mlp=32, layers=2, heads=4, initializer_range=0.3)
"""Whole registers of a processor, so that torch's activations compute every element alike."""


@pytest.fixture(autouse=True)
def small_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes seconds for a tile of Z; its height is fixed, and any will do."""
    monkeypatch.setattr(lens_reader, "LENS_TILE", 48)


@pytest.mark.slow
def test_the_loop_in_kernels_is_the_cpus_and_d1_holds_both_ways() -> None:
    """With the negative control: a planted batch-dependent product is noticed, or this check complains."""
    found = everything.checked("cpu", lambda device: [], size=SMALL, new_tokens=3)
    assert found == {"kernels": [], "loop": [], "determinism": []}


def test_a_wrong_product_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = KernelSet.product
    monkeypatch.setattr(KernelSet, "product", lambda self, *given: right(self, *given) * (1 + 2e-3))
    monkeypatch.setattr(everything, "determinism_complaints", lambda device, **small: 1 / 0)
    found = everything.checked("cpu", lambda device: ["rms_norm is wrong"], size=SMALL, new_tokens=2)
    assert len(found["loop"]) == 1 and "differs from the model without it" in found["loop"][0]
    assert found["determinism"] == ["failed with ZeroDivisionError: division by zero"]
    assert "kernels: rms_norm is wrong" in capsys.readouterr().err


@pytest.mark.slow
def test_states_that_are_too_far_away_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: sums do differ, by less than the bound."""
    monkeypatch.setattr(checks, "MOST_APART", 1e-9)
    told = checks.loop_complaints("cpu", SMALL, 2)
    assert len(told) > 3 and "of its largest number away" in told[-1]
    assert not any("tokens are" in text or "rows have" in text or "readings have" in text for text in told)


def test_a_control_that_goes_unnoticed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "model_on", lambda device, size: type("Model", (), {})())
    monkeypatch.setattr(checks, "differing", lambda model, new_tokens, **settings: [])
    told = checks.determinism_complaints("cpu", SMALL)
    ways = ["plain", "verify", "invariant"]
    assert [text.split(":")[0] for text in told] == ways and all("planted" in text for text in told)


def test_without_a_gpu_it_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    env = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "cacheprobe_benchmarks.gpu.everything", "--json", str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and not out.exists()
    assert "make gpu: there is no GPU" in done.stderr and "nothing was run or written" in done.stderr


def test_a_job_is_held_against_hugging_face_and_the_roofline() -> None:
    """On a model of two layers, on the CPU."""
    live = random_llama(Shape(64, 32, 48, 2, 4, 2), "cpu", torch.float32)
    told = main_job(live, [[1, 2, 3], [4, 5]], Rates({"a": {"torch": 1.0}}, 1.0), rounds=1, new_tokens=2)
    names = ("stc", "stcz", "stcz_half_deterministic")
    assert all(told[f"{name}_ratio"] > 0 and told[f"{name}_over_roofline"] > 1 for name in names)
    assert told["seconds_median"].keys() == {"hf", *names}
