"""Computes matrix products and statistics of logits on a CPU in loops that numba compiles, and chooses, for a dtype on
this machine, between these loops and torch's own operations.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from einops import rearrange
from numba.core.ccallback import CFunc
from torch import Tensor
from torch.nn.functional import linear, pad, silu

from cacheprobe.ops.compiled.basics import COMPILER, FEATURES, find_thread_runner, run_on_threads
from cacheprobe.ops.compiled.lanes import FLOATS, FORMATS, INNER_STEP, KINDS, LANES, OUTPUTS, PAIRS, TILES
from cacheprobe.ops.compiled.queue import LLAMA, PLUS_ONE, ROUNDED_ONCE, NormKind, Queue, rows_at_once
from cacheprobe.ops.compiled.queue_loops import SUM
from cacheprobe.ops.compiled.reading_loops import CHUNK, NUMBERS, combine, logits_work, states_work, targets_work
from cacheprobe.ops.compiled.tiles import SIDE, refusal_of_tiles, require_tiles
from cacheprobe.ops.readout import Readout, read_logits


class CompiledProduct:
    """Computes values weight^T + bias in loops compiled by numba. The bits of an output vector do not depend on the
    other vectors, on how many there are, or on the number of threads.

    kind FLOATS: float32 arithmetic, on tensors of float32 or 16 bits.  PAIRS: the processor's dot products of bfloat16.
    TILES: its matrix units for bfloat16. PAIRS and TILES take denormal factors, products and sums as zero.
    Twin: torch.nn.functional.linear in float64, to one unit in the last place of the dtype or of the largest term, and
    to the smallest normal number.
    """

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"CompiledProduct({KINDS[self.kind]})"

    def __call__(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns values weight^T + bias, [..., o], from values [..., i], weight [o, i] and bias [o] or None.

        Raises: TypeError for tensors of several dtypes or of a dtype without such a product, ValueError for another
        width or device. With gradients (not in forward mode), torch computes the product.
        """
        if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in (values, weight, bias)):
            return linear(values, weight, bias)
        require_operands(self.kind, values, weight, bias)
        if not weight.numel():
            return linear(values, weight, bias)
        queue = Queue(self.kind, weight.dtype)
        out = queue.product(values.contiguous(), weight.contiguous(), bias)
        queue.run()
        return out


def require_operands(kind: int, values: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raises: TypeError and ValueError as CompiledProduct."""
    dtypes = {part.dtype for part in (values, weight, bias) if part is not None}
    if len(dtypes) > 1 or weight.dtype not in (FORMATS if kind == FLOATS else (torch.bfloat16,)):
        raise TypeError(f"compiled products of {kind=} are not of {', '.join(map(str, dtypes))}")
    if {part.device.type for part in (values, weight, bias) if part is not None} != {"cpu"}:
        raise ValueError(f"compiled products are of CPU tensors, not of {values.device} and {weight.device}")
    if weight.ndim != 2 or weight.shape[1] != values.shape[-1]:
        raise ValueError(f"values of width {values.shape[-1]} and a weight {tuple(weight.shape)} do not make a product")
    if bias is not None and bias.shape != (len(weight),):
        raise ValueError(f"a bias {tuple(bias.shape)} for a weight {tuple(weight.shape)}")


def operands(kind: int, values: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns (values, weight, bias, inner width) as the loops that read states take them: contiguous, with an inner
    width that is a multiple of INNER_STEP (zeros are appended), values in float32 for kind FLOATS and packed for TILES,
    the bias in float32 (four zeros without a bias).

    Raises: TypeError and ValueError as CompiledProduct.
    """
    require_operands(kind, values, weight, bias)
    inner = values.shape[-1]
    if kind == FLOATS:
        values = values.float()
    if over := -inner % INNER_STEP[kind] if inner else INNER_STEP[kind]:
        values, weight = pad(values, (0, over)), pad(weight, (0, over))
    if kind == TILES:
        pairs = pad(values, (0, 0, 0, -len(values) % SIDE)).contiguous().view(torch.int32)
        values = rearrange(pairs, "(b r) p -> b p r", r=SIDE).contiguous().view(torch.bfloat16)
    added = torch.zeros(OUTPUTS) if bias is None else bias.float().contiguous()
    return values.contiguous(), weight.contiguous(), added, inner + over


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
        self,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_token_ids: Tensor,
        top_k: int,
        softcap: float = 0.0,
    ) -> Readout:
        """Returns the Readout of the logits states weight^T + bias, in the dtype of the weight, from normalised states
        [n, m], an unembedding [v, m] and a bias [v] or None: the bits of `of_logits` of that product. softcap: limits
        logits x to softcap * tanh(x / softcap), close to torch's; 0 for no limit."""
        kind, rows = self.product.kind, len(states)
        if not rows:
            raise ValueError("there are no states to read")
        if not -1 <= int(target_token_ids.min()) <= int(target_token_ids.max()) < len(weight):
            raise IndexError(f"a target outside the vocabulary of {len(weight)} tokens")
        values, wide_weight, added, inner = operands(kind, states, weight, bias)
        target_logits = torch.empty(rows, dtype=weight.dtype)
        call = _Call(target_token_ids, torch.empty(rows), len(weight), top_k)
        call.numbers[[0, 1, 2, 6, 8, 9, 10, 16, 20, 21, 22]] = (
            values.data_ptr(), wide_weight.data_ptr(), added.data_ptr(), inner, inner * values.element_size(),
            inner * weight.element_size(), min(rows_at_once(kind, inner * values.element_size()), rows),
            values.dtype != weight.dtype, 0 if bias is None else 4, target_logits.data_ptr(),
            np.float64(softcap).view(np.int64),
        )  # fmt: skip
        of_targets, of_all = _loops_of_states(kind, FORMATS[weight.dtype])
        call.run(of_targets, rows)
        call.target_values.copy_(target_logits)
        call.run(of_all, -(-len(weight) // CHUNK))

        def by_torch(rows: Tensor) -> Readout:
            """Returns the Readout of some rows, from torch's statistics."""
            logits = self.product(states[rows], weight, bias)
            logits = (logits / softcap).tanh() * softcap if softcap else logits
            return read_logits(logits, target_token_ids[rows], top_k)

        return call.readout(by_torch)


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
            self.parts, self.values, self.ids, (self.target_values.numpy(), (self.targets >= 0).numpy()),
            (logprobs, ids), numbers, before,
        )  # fmt: skip
        found = Readout(*map(torch.from_numpy, (ids, logprobs, numbers[:, 0].copy(), before, numbers[:, 1].copy())))
        if len(strange := (~found.entropy_nats.isfinite()).nonzero()[:, 0]):
            for column, part in zip(found, by_torch(strange), strict=True):
                column[strange] = part
        return found


TORCH = "torch"
"""Text in the fingerprint if torch computes the products and readings."""
READ_IN_LOOPS = f"torch, statistics of logits in loops by {COMPILER}"
"""Text in the fingerprint for `choose_readout`."""

_RELATIVE = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest relative difference from float64 that the trial accepts: one rounding, and for float32 the sum's order."""


class CompiledOperations(NamedTuple):
    """Holds the operations of a CPU that run in compiled loops: matrix product, and reading of logits and states."""

    product: CompiledProduct
    readout: CompiledReadout

    def norm(self, values: Tensor, weight: Tensor, eps: float, kind: NormKind = LLAMA) -> Tensor:
        """Returns the RMSNorm of values [..., m] with weight [m], without gradients."""
        queue = Queue(self.product.kind, weight.dtype)
        out = queue.norm(values.contiguous(), weight.contiguous(), eps, kind)
        queue.run()
        return out

    @property
    def text(self) -> str:
        """Text for the fingerprint: kind of product, width of a register, compiler and processor."""
        return f"{self.product!r}, blocks in loops, {LANES} lanes, {COMPILER}"


class LoopChoice(NamedTuple):
    """Holds the compiled operations for a dtype, or None if torch's are used, and the reason."""

    operations: CompiledOperations | None
    reason: str


@cache
def choose(dtype: torch.dtype, device: torch.device) -> LoopChoice:
    """Returns the LoopChoice for tensors of a dtype on a device. The first call for a dtype compiles the loops, or
    loads them from numba's cache, and compares them with torch in float64.

    `operations` is None, and `reason` says why, if that comparison fails, and where torch is faster: where the
    processor has matrix units for float16, and for float32 on Intel's processors.
    """
    kind, reason = _kind(dtype, device)
    if kind is None:
        return LoopChoice(None, reason)
    product = CompiledProduct(kind)
    operations = CompiledOperations(product, CompiledReadout(product))
    try:
        wrong = _product_error(product, dtype) or _row_error(operations, dtype)
        wrong = wrong or _readout_error(operations.readout, dtype)
    except Exception as error:  # numba and LLVM raise errors of many kinds
        wrong = f"{type(error).__name__}: {error!s:.200}"
    return (
        LoopChoice(None, f"the compiled loops failed their trial: {wrong}") if wrong else LoopChoice(operations, reason)
    )


@cache
def choose_readout(dtype: torch.dtype, device: torch.device) -> CompiledReadout | None:
    """Returns the loops that read given logits, for where torch computes the products because it is faster; None where
    they cannot run, or fail their trial."""
    if _refusal(dtype, device):
        return None
    readout = CompiledReadout(CompiledProduct(FLOATS))
    try:
        return None if _readout_error(readout, dtype, has_products=False) else readout
    except Exception:  # numba and LLVM raise errors of many kinds
        return None


def _refusal(dtype: torch.dtype, device: torch.device) -> str:
    """Returns why no loops run for a dtype on a device; "" if they can."""
    has = torch.cpu.get_capabilities()
    if device.type != "cpu" or dtype not in _RELATIVE:
        return f"{_name(dtype)} on {device.type} is computed by torch"
    if has.get("architecture") != "x86_64" or not (has.get("avx2") and has.get("fma3")):
        return "the processor is no x86-64 with AVX2"
    if not FEATURES >= {"+avx2", "+fma"}:
        return "numba compiles for a processor without AVX2 (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES)"
    if find_thread_runner() is None:
        return "this torch has no GNU OpenMP library, on whose threads the loops run"
    return ""


def _kind(dtype: torch.dtype, device: torch.device) -> tuple[int | None, str]:
    """Returns (kind of innermost loop, None for torch; the reason)."""
    has = torch.cpu.get_capabilities()
    is_intel = str(has.get("cpu_name", "")).startswith("Intel")
    if refusal := _refusal(dtype, device):
        return None, refusal
    if dtype == torch.float16 and has.get("amx_fp16"):
        return None, "the processor has matrix units for float16, which torch uses"
    if dtype == torch.float32 and is_intel:
        return None, "MKL's float32 is faster on Intel's processors"
    if dtype == torch.bfloat16 and has.get("amx_bf16"):
        if not (FEATURES >= {"+amx-bf16", "+amx-tile"} and LANES == SIDE):
            return (
                None,
                "torch uses the matrix units, numba compiles without (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES)",
            )
        if not (refusal := refusal_of_tiles()):
            return TILES, "matrix units for bfloat16 (AMX)"
        return FLOATS, f"float32 arithmetic; the operating system refused this process the matrix units: {refusal}"
    if dtype == torch.bfloat16 and has.get("avx512_bf16") and "+avx512bf16" in FEATURES and not is_intel:
        return PAIRS, "dot products of bfloat16 (AVX512-BF16)"
    return FLOATS, "float32 arithmetic; the processor has nothing faster for this dtype"


def _product_error(product: CompiledProduct, dtype: torch.dtype) -> str | None:
    """Compares products of several shapes with float64, since compilers have bugs. Returns an error text, or None."""
    generator = torch.Generator().manual_seed(0)
    wide = 8 * 64 * torch.get_num_threads()  # panels of 64 outputs
    for rows, inner, width in ((1, 64, 16), (7, 100, 37), (300, 70, 130), (9, 70, wide)):
        values, weight, bias = (
            torch.randn(size, generator=generator).to(dtype) for size in ((rows, inner), (width, inner), (width,))
        )
        expected = linear(values.double(), weight.double(), bias.double())
        error = (product(values, weight, bias).double() - expected).abs()
        if not bool((error <= expected.abs() * _RELATIVE[dtype] + 1e-4).all()):
            return f"a product of {rows} rows of {inner} is {float(error.max()):.3g} away from float64's"
    return None


def _row_error(operations: CompiledOperations, dtype: torch.dtype) -> str | None:
    """Compares norms, activations and sums with float64. Returns an error text, or None."""
    generator = torch.Generator().manual_seed(0)
    values, others, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((5, 70), (5, 70), (70,)))
    queue, total = Queue(operations.product.kind, dtype), torch.empty_like(values)
    made = {kind: operations.norm(values, weight, 1e-5, kind) for kind in (LLAMA, ROUNDED_ONCE, PLUS_ONE)}
    activated = queue.silu(values)
    queue.mapped(SUM, values, others, total)
    queue.run()
    wide = values.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    found = [(f"norm of kind {kind}", made[kind], normed * (weight.double() + kind[1])) for kind in made]
    found += [("silu", activated, silu(wide)), ("sum", total, wide + others.double())]
    for name, here, expected in found:
        error = (here.double() - expected).abs()
        if not bool((error <= expected.abs() * 2 * _RELATIVE[dtype] + 1e-6).all()):
            return f"a {name} is {float(error.max()):.3g} away from float64's"
    return None


def _readout_error(readout: CompiledReadout, dtype: torch.dtype, has_products: bool = True) -> str | None:
    """Compares readings with `read_logits`: of given logits and, with `has_products`, of states. Returns an error text,
    or None."""
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((9, 64), (1300, 64)))
    logits = readout.product(states, weight) if has_products else linear(states, weight)
    targets = torch.tensor([-1, 0, 5, 511, 512, 600, 1299, 700, -1])
    expected = read_logits(logits, targets, 5)
    found = [readout.of_logits(logits, targets, 5)]
    if has_products:
        found.append(readout.of_states(states, weight, None, targets, 5))
    for made in found:
        for name, here, there in zip(Readout._fields, made, expected, strict=True):
            if not torch.allclose(here.double(), there.double(), rtol=1e-5, atol=2e-5, equal_nan=True):
                return f"another {name} than torch's"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
