"""Kernels through Triton's compiler and ptxas, without a GPU; in processes of their own: here they are interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cacheprobe.core.registry import names

ROOT = Path(__file__).parents[2]

PLANTED = '''
"""A kernel that needs more registers than there are, and one compiled for its number of rows."""
from dataclasses import replace

import torch
import triton
import triton.language as tl

from cacheprobe_kernels.base import Launch, Plan
from cacheprobe_kernels.checks.builds import builds, schedule_complaints
from cacheprobe_kernels.rms_norm import RmsNorm


@triton.jit
def greedy(values, out, num_rows, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    held = tl.load(values + at)
    largest = tl.max(held, 0)
    tl.store(out + num_rows + at, held - largest)


class Greedy(RmsNorm):
    @staticmethod
    def plan(values, weight, eps):
        given = {"values": values, "out": values, "num_rows": len(values)}
        return Plan([Launch(greedy, (1,), given, {"BLOCK": 32768})], values)


built = list(builds(Greedy, (90,)))
print(*(one.complaint for one in built), *schedule_complaints(Greedy), sep="\\n")
'''


def in_compiler(folder: Path, *command: str) -> subprocess.CompletedProcess:
    """A process in which triton compiles, with a cache of its own."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_every_kernel_compiles_for_both_architectures_without_spills(tmp_path: Path) -> None:
    """A line for each function, type and architecture, which are those of the documentation."""
    out = tmp_path / "builds.md"
    done = in_compiler(tmp_path / "cache", "-m", "cacheprobe_kernels.checks.compile_all", "--table", str(out))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = [line.strip("| ").split(" | ") for line in out.read_text().splitlines()]
    built = [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
    assert {one["kernel"] for one in built} == set(names("kernels")) and {one["arch"] for one in built} == {"80", "90"}
    assert all(one["spill_bytes"] == "0" and 0 < int(one["registers"]) <= 255 for one in built)
    assert {one["dtype"] for one in built if one["kernel"] == "lens_topk"} == {"bfloat16", "float32"}
    assert f"{len(built)} builds with triton" in done.stdout and out.read_text() in done.stdout
    stored = ROOT / "kernels/results/builds.md"
    assert stored.read_text() == out.read_text(), f"run compile_all --table {stored.relative_to(ROOT)}"


def test_spills_and_other_builds_for_other_rows_are_caught(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(PLANTED)
    done = in_compiler(tmp_path / "cache", str(planted))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "greedy float32 sm_90 spills" in done.stdout
    assert "is compiled otherwise for 16 rows than for 1: num_rows" in done.stdout


def test_quick_kernels_compile(tmp_path: Path) -> None:
    """Those that compile within a second each; the others are in the slow test."""
    quick = ("rms_norm", "matmul", "store_kv")
    program = (
        "from cacheprobe.core.registry import find\nfrom cacheprobe_kernels.checks.builds import builds\n"
        f"for name in {quick}:\n    for one in builds(find('kernels', name), (90,)):\n"
        "        assert not one.complaint, one.complaint\n        print(one.kernel)"
    )
    done = in_compiler(tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) == set(quick)


def test_the_interpreter_compiles_nothing() -> None:
    from cacheprobe_kernels.checks.builds import all_builds

    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        next(all_builds())
