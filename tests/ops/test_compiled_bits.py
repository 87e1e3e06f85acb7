"""Loops that two processes compile, from an empty cache and in another order, give the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cacheprobe.ops.compiled.basics import SOURCES

pytestmark = pytest.mark.determinism

DIGESTS = """
import hashlib, sys
import numpy as np, torch
from cacheprobe.ops.compiled.attention import decode_attention
from cacheprobe.ops.compiled.lanes import FLOATS
from cacheprobe.ops.compiled.operations import CompiledProduct
from cacheprobe.ops.compiled.operations import CompiledReadout

torch.set_num_threads(2)
product = CompiledProduct(FLOATS)
readout = CompiledReadout(product)

def drawn(*sizes, dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]

def readings(dtype):
    states, weight = drawn((20, 64), (1300, 64), dtype=dtype)
    targets = torch.arange(20) * 37
    return [*readout.of_states(states, weight, None, targets, 5)]

def of_logits(dtype):
    (logits,) = drawn((20, 1300), dtype=dtype)
    return [*readout.of_logits(logits, torch.arange(20) * 37, 5)]

def attention(dtype):
    q, keys, values = drawn((3, 6, 1, 24), (3, 2, 130, 24), (3, 2, 130, 24), dtype=dtype)
    step = keys.stride(0)
    places = np.array([[row, row * step, row * step, 100 + row, 99 + row] for row in range(3)])
    mask = torch.zeros(3, 1, 1, 130, dtype=dtype)
    return [decode_attention(q, keys[:1], values[:1], mask, places, 0.2)]

cases = {"states": readings, "logits": of_logits, "attention": attention}
for name in sorted(cases, reverse=sys.argv[1] == "backwards"):
    if sys.argv[1] == "logits alone" and "logits" not in name:
        continue
    held = b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in cases[name](torch.bfloat16))
    print(name, hashlib.sha256(held).hexdigest())
"""


def digests(what: str, seed: int, cache: Path) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", DIGESTS, what], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_every_process_compiles_the_same_bits(tmp_path: Path) -> None:
    """LLVM's choices depend on the names in the code and on what was compiled before it. If it may reorder a sum, a
    process that finds half of the loops in the cache computes other bits than one that compiles them all."""
    digests("logits alone", 1, tmp_path / "half")
    of_half = digests("forwards", 2, tmp_path / "half")
    of_all = digests("backwards", 3, tmp_path / "none")
    assert len(of_half) == 3 and of_half == of_all
    kept = [path.name for path in (tmp_path / "none").rglob("*.nbi")]
    assert kept and all(f"_{SOURCES}-" in name for name in kept), "no cache survives a change of the loops' sources"
    assert len({line.split()[-1] for line in of_all}) == 3, "the control: other inputs, other digests"
