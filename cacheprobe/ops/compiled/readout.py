"""Compiles, on this machine, the statistics of bfloat16 logits: one pass for the maximum, one for the sums, no stored
copy."""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cacheprobe.ops.compiled.block import CompiledBlock
from cacheprobe.ops.compiled.build import CompilerError, library
from cacheprobe.ops.compiled.product import CompiledProduct
from cacheprobe.ops.readout import BLOCK, Readout, best_of_blocks, read_logits


class CompiledReadout:
    """Computes the Readout of bfloat16 logits (as `ops.readout.read_logits`) in compiled C++. The bits of a row depend
    only on that row.

    Twin: ops.readout.read_logits: ids and ranks ==, numbers close(1e-5) since sums are reordered.
    """

    def __init__(self, folder: Path) -> None:
        """Loads the compiled library from `folder` (builds it there if absent) and tests it. Raises: CompilerError if
        it cannot be built or gives wrong results."""
        loaded, self.digest = library("readout.cpp", folder)
        self._run = loaded.cacheprobe_readout
        self._run.argtypes = [ctypes.c_void_p] * 8 + [ctypes.c_long] * 2 + [ctypes.c_int]
        self._run.restype = None
        _compare_with_torch(self)

    def __repr__(self) -> str:
        return f"CompiledReadout({self.digest})"

    def __call__(self, logits: Tensor, target_token_ids: Tensor, top_k: int) -> Readout:
        """Returns the Readout (top tokens, entropy, target ranks and log-probabilities) of logits [n, v];
        target_token_ids [n], -1 for none. Logits of another dtype than bfloat16 are computed by torch, in
        `read_logits`."""
        if logits.dtype != torch.bfloat16:
            return read_logits(logits, target_token_ids, top_k)
        logits, targets = logits.contiguous(), target_token_ids.contiguous()
        rows, width = logits.shape
        target_values = logits.gather(1, targets.clamp(min=0)[:, None]).float()[:, 0]
        tops = target_values.new_empty(rows, -(-width // BLOCK))
        best, total, weighted = (torch.empty_like(target_values) for _ in range(3))
        before = torch.empty_like(targets)
        self._run(
            *(tensor.data_ptr() for tensor in (logits, targets, target_values, tops, best, total, weighted, before)),
            rows,
            width,
            torch.get_num_threads(),
        )
        logsumexp = total.log() + best
        values, ids = best_of_blocks(logits, tops, top_k)
        return Readout(
            ids,
            values.float() - logsumexp[:, None],
            total.log() - weighted / total,
            before,
            torch.where(targets >= 0, target_values - logsumexp, torch.nan),
        )


class Compiled(NamedTuple):
    """Holds the three operations compiled on this machine: matrix product, readout of logits, and norm and rotation."""

    product: CompiledProduct
    readout: CompiledReadout
    block: CompiledBlock


@cache
def compiled(folder: Path) -> Compiled:
    """Returns the operations compiled on this machine, as a Compiled; built at the first call, with their libraries
    kept in `folder`. Raises: CompilerError if one cannot be built or gives wrong results."""
    return Compiled(CompiledProduct(folder), CompiledReadout(folder), CompiledBlock(folder))


def _compare_with_torch(readout: CompiledReadout) -> None:
    """Compares the compiled readout with torch's on three rows. Raises: CompilerError if they differ."""
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).mul_(4).bfloat16()
    logits[1, 40:] = -torch.inf
    targets = torch.tensor([7, 30, -1])
    for name, result, expected in zip(
        Readout._fields, readout(logits, targets, 5), read_logits(logits, targets, 5), strict=True
    ):
        if not torch.allclose(result.float(), expected.float(), rtol=1e-5, atol=1e-5, equal_nan=True):
            raise CompilerError(
                f"the compiled readout has another {name} than torch's; name another compiler in CXX, or leave out "
                'products="compiled"'
            )
