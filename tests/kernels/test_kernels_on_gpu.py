"""Kernels compiled and run: on a GPU the whole of it, and everywhere what it makes of its measurements."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cacheprobe_kernels.checks.on_gpu import Device, complaints, table, timed
from cacheprobe_kernels.matmul import Matmul
from cacheprobe_kernels.rms_norm import RmsNorm

ROOT = Path(__file__).parents[2]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_kernels_keep_their_contract_on_this_gpu() -> None:
    """Correctness, invariance and the distance from the roof; the table goes to kernels/results."""
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    command = ["-m", "cacheprobe_kernels.checks.on_gpu", "--json", f"kernels/results/{name}.json"]
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert (ROOT / command[-1]).exists()


def test_without_a_gpu_it_says_so() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "cacheprobe_kernels.checks.on_gpu"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "there is no GPU" in done.stderr


def test_a_time_is_held_against_the_longer_of_bytes_and_products() -> None:
    """Bytes and products counted by hand; calls that are timed are made."""
    made: list[object] = []
    best = Device("one", bytes_per_second=1e9, flops_per_second=1e9)

    def clock(call: object) -> float:
        made.append(call())  # type: ignore[operator]
        return 1e-4

    product = timed(Matmul, Matmul.cases[1], torch.device("cpu"), best, clock)
    assert (product.limited_by, product.roof_microseconds) == ("products", pytest.approx(2 * 18 * 33 * 10 / 1e3))
    assert product.share_of_roof == pytest.approx(2 * 18 * 33 * 10 / 1e9 / 1e-4)
    norm = timed(RmsNorm, RmsNorm.cases[3], torch.device("cpu"), best, clock)
    assert (norm.limited_by, norm.roof_microseconds) == ("bytes", pytest.approx((2 * 7 * 130 + 130) * 4 / 1e3))
    assert len(made) == 4 and all(torch.is_tensor(one) for one in made)
    lines = list(table([product, norm]))
    assert lines[2].startswith("| matmul | n=18 i=33 o=10 has_bias=0 | 100.0 | 100.0 | 11.9 | 0.12 | products |")


def test_a_broken_kernel_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import cacheprobe_kernels.checks.on_gpu as on_gpu

    right, small = RmsNorm.plan, RmsNorm.cases[1]
    monkeypatch.setattr(RmsNorm, "cases", (small,))
    monkeypatch.setattr(RmsNorm, "full", small)
    monkeypatch.setattr(on_gpu, "available", lambda kind: {"rms_norm": RmsNorm})
    said: list[str] = []
    assert complaints(torch.device("cpu"), said.append) == [] and said[0].endswith("good")
    monkeypatch.setattr(RmsNorm, "plan", staticmethod(lambda values, weight, eps: right(values, weight, eps + 1)))
    found = complaints(torch.device("cpu"), said.append)
    assert found and all(text.startswith("rms_norm one float32") for text in found) and "its reference" in said[1]
