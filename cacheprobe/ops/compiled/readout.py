"""Computes statistics of vocabulary logits on a CPU in loops that numba compiles: of given logits, or of states, whose
logits are never stored."""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numba.core.ccallback import CFunc
from torch import Tensor

from cacheprobe.ops.compiled.basics import run_on_threads
from cacheprobe.ops.compiled.lanes import FORMATS
from cacheprobe.ops.compiled.product import CompiledProduct, operands
from cacheprobe.ops.compiled.queue import rows_at_once
from cacheprobe.ops.compiled.reading_loops import CHUNK, NUMBERS, combine, logits_work, states_work, targets_work
from cacheprobe.ops.compiled.tiles import require_tiles
from cacheprobe.ops.readout import Readout, read_logits


class CompiledReadout:
    """Computes the Readout of logits, or of states and an unembedding, in loops compiled by numba. The bits of a row
    depend only on that row.

    Rows with a NaN or an infinite largest logit are computed by torch.
    Twin: ops.readout.read_logits: ids and ranks ==, numbers close(1e-5) since sums are reordered.
    """

    def __init__(self, product: CompiledProduct) -> None:
        self.product = product

    def __repr__(self) -> str:
        return f"CompiledReadout({self.product})"

    def of_logits(self, logits: Tensor, target_token_ids: Tensor, top_k: int) -> Readout:
        """Returns the Readout of logits [n, v] (top tokens, entropy, target ranks and log-probabilities);
        target_token_ids [n], -1 for none. float64 is read by torch, in `read_logits`."""
        if logits.dtype not in FORMATS or logits.device.type != "cpu" or not logits.numel():
            return read_logits(logits, target_token_ids, top_k)
        logits = logits.contiguous()
        target_values = logits.gather(1, target_token_ids.clamp(min=0)[:, None]).float()[:, 0]
        call = _Call(target_token_ids, target_values, logits.shape[1], top_k)
        call.numbers[[0, 8]] = logits.data_ptr(), logits.shape[1] * logits.element_size()
        call.run(_loops_of_logits(FORMATS[logits.dtype]), len(logits))
        return call.readout(lambda rows: read_logits(logits[rows], target_token_ids[rows], top_k))

    def of_states(
        self, states: Tensor, weight: Tensor, bias: Tensor | None, target_token_ids: Tensor, top_k: int
    ) -> Readout:
        """Returns the Readout of the logits states weight^T + bias, in the dtype of the weight, from normalised states
        [n, m], an unembedding [v, m] and a bias [v] or None: the bits of `of_logits` of that product."""
        kind, rows = self.product.kind, len(states)
        if not rows:
            raise ValueError("there are no states to read")
        if not -1 <= int(target_token_ids.min()) <= int(target_token_ids.max()) < len(weight):
            raise IndexError(f"a target outside the vocabulary of {len(weight)} tokens")
        values, wide_weight, added, inner = operands(kind, states, weight, bias)
        target_logits = torch.empty(rows, dtype=weight.dtype)
        call = _Call(target_token_ids, torch.empty(rows), len(weight), top_k)
        call.numbers[[0, 1, 2, 6, 8, 9, 10, 16, 20, 21]] = (
            values.data_ptr(), wide_weight.data_ptr(), added.data_ptr(), inner, inner * values.element_size(),
            inner * weight.element_size(), min(rows_at_once(kind, inner * values.element_size()), rows),
            values.dtype != weight.dtype, 0 if bias is None else 4, target_logits.data_ptr(),
        )  # fmt: skip
        of_targets, of_all = _loops_of_states(kind, FORMATS[weight.dtype])
        call.run(of_targets, rows)
        call.target_values.copy_(target_logits)
        call.run(of_all, -(-len(weight) // CHUNK))
        return call.readout(
            lambda rows: read_logits(self.product(states[rows], weight, bias), target_token_ids[rows], top_k)
        )


@cache
def _loops_of_logits(format: int) -> CFunc:
    return logits_work(format)


@cache
def _loops_of_states(kind: int, format: int) -> tuple[CFunc, CFunc]:
    require_tiles(kind)
    return targets_work(kind, format), states_work(kind, format)


class _Call:
    """Holds the numbers and the results of one call of the loops that read."""

    def __init__(self, targets: Tensor, target_values: Tensor, width: int, top_k: int) -> None:
        rows, threads, self.k = len(targets), torch.get_num_threads(), min(top_k, width)
        self.targets, self.target_values = targets.long().contiguous(), target_values
        self.parts = np.zeros((-(-width // CHUNK), rows, 4))
        self.values = np.full((threads, rows, self.k), -np.inf, np.float32)
        self.ids = np.full((threads, rows, self.k), -1)
        self.numbers = np.zeros(NUMBERS, np.int64)
        self.numbers[[3, 4, 5, 7, 11, 12, 13, 14, 15]] = (
            self.targets.data_ptr(), target_values.data_ptr(), rows, width, self.parts.ctypes.data,
            self.values.ctypes.data, self.ids.ctypes.data, self.k, threads,
        )  # fmt: skip

    def run(self, loops: CFunc, num_tasks: int) -> None:
        """Runs the loops. Raises: RuntimeError if they ended early."""
        self.numbers[17:20] = 0  # thread, next part, parts done
        run_on_threads(loops, self.numbers)
        if self.numbers[19] != num_tasks:  # compiled loops print an error and return
            raise RuntimeError(f"a reading ended after {self.numbers[19]} of {num_tasks} parts")

    def readout(self, by_torch: Callable[[Tensor], Readout]) -> Readout:
        """Returns the Readout of all rows; rows without finite statistics by `by_torch`."""
        rows = len(self.targets)
        logprobs, ids = np.empty((rows, self.k), np.float32), np.empty((rows, self.k), np.int64)
        numbers, before = np.empty((rows, 2), np.float32), np.empty(rows, np.int64)
        combine(
            self.parts, self.values, self.ids, self.target_values.numpy(), (self.targets >= 0).numpy(), logprobs, ids,
            numbers, before,
        )  # fmt: skip
        found = Readout(*map(torch.from_numpy, (ids, logprobs, numbers[:, 0].copy(), before, numbers[:, 1].copy())))
        if len(strange := (~found.entropy_nats.isfinite()).nonzero()[:, 0]):
            for column, part in zip(found, by_torch(strange), strict=True):
                column[strange] = part
        return found
