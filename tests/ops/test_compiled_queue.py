"""Operations of a forward in compiled loops: their numbers beside torch's, their bits in any batch, and the waiting of
threads for each other."""

from importlib import import_module

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from cacheprobe.models.weights import rms_norm_of
from cacheprobe.ops.compiled import queue, queue_loops
from cacheprobe.ops.compiled.attention import decode_attention
from cacheprobe.ops.compiled.lanes import FLOATS
from cacheprobe.ops.compiled.queue import LLAMA, PLUS_ONE, ROUNDED_ONCE, FixedQueue, NormKind, Queue
from cacheprobe.ops.compiled.queue_loops import COPY, MINUS, SUM, TIMES
from cacheprobe.ops.equality import bitwise
from cacheprobe.ops.references import store_kv
from tests.ops.test_compiled import ROUNDING, all_cases, drawn, on_threads

pytestmark = pytest.mark.determinism

KINDS = {LLAMA: LlamaRMSNorm, ROUNDED_ONCE: Olmo2RMSNorm, PLUS_ONE: Gemma2RMSNorm}


def norm_of(kind: NormKind, values: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """The RMSNorm of transformers' own class."""
    module = KINDS[kind](len(weight), eps).to(weight.dtype)
    module.weight.data = weight
    return module(values).detach()


@pytest.mark.parametrize("width", [15, 576])
@all_cases
def test_norms_and_activations_are_those_of_torch(kind: int, dtype: torch.dtype, width: int) -> None:
    """To one rounding of the dtype: torch adds the squares, and computes exp, in other ways."""
    values, weight = drawn(dtype, (3, 5, width), (width,))
    made = Queue(kind, dtype)
    found = [made.norm(values, weight, 1e-5, how) for how in KINDS] + [made.silu(values * 9)]
    made.run()
    wanted = [norm_of(how, values, weight) for how in KINDS] + [silu(values * 9)]
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=4 * ROUNDING[dtype], atol=2**-20)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Olmo2", "Gemma2", "Gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_is_known_by_its_values(family: str, dtype: torch.dtype) -> None:
    """Also where its weight is all ones, as in a new model; a LayerNorm is none."""
    module = getattr(
        import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}"), f"{family}RMSNorm"
    )
    made = module(48).to(dtype)
    found = rms_norm_of(made)
    assert found is not None and found.weight is made.weight
    wanted = {"Olmo2": ROUNDED_ONCE, "Gemma2": PLUS_ONE, "Gemma3": PLUS_ONE}.get(family, LLAMA)
    assert found.kind == (LLAMA if dtype == torch.float32 and wanted == ROUNDED_ONCE else wanted)  # they round alike
    assert rms_norm_of(torch.nn.LayerNorm(48)) is None and rms_norm_of(torch.nn.Linear(48, 48, bias=False)) is None


@all_cases
def test_maps_have_the_bits_of_torch(kind: int, dtype: torch.dtype) -> None:
    """Every step is one operation of IEEE 754, rounded to the dtype: of slices, of heads, of what is broadcast."""
    q, other, cos = drawn(dtype, (2, 5, 4, 16), (2, 5, 4, 16), (2, 5, 16))
    heads, half = q.transpose(1, 2), q[..., 8:]
    cases = [
        (SUM, q, other), (SUM, heads, other.transpose(1, 2)), (TIMES, heads, cos[:, None]), (MINUS, half, half),
        (COPY, half, half), (COPY, heads, heads), (TIMES, q[0, 0, 0], q[0, 0, 1]), (SUM, q[:, :1], q),
    ]  # fmt: skip
    wanted = [{SUM: torch.add, TIMES: torch.mul}.get(how, lambda a, _: a)(a, b) for how, a, b in cases]
    wanted = [-one if how == MINUS else one for one, (how, _, _) in zip(wanted, cases, strict=True)]
    made, found = Queue(kind, dtype), [torch.empty_like(one) for one in wanted]
    for (how, a, b), out in zip(cases, found, strict=True):
        made.mapped(how, a, b, out)
    made.run()
    assert all(bitwise(one.contiguous(), other.contiguous()) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("number", [float("nan"), -float("inf"), 200.0])
@all_cases
def test_strange_numbers_pass_as_in_torch(kind: int, dtype: torch.dtype, number: float) -> None:
    values = torch.full((1, 40), number, dtype=dtype)
    made = Queue(kind, dtype)
    found = made.silu(values), added(made, values, values), made.norm(values, torch.ones(40, dtype=dtype), 0.0)
    made.run()
    wanted = silu(values), values + values, norm_of(LLAMA, values, torch.ones(40, dtype=dtype), 0.0)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=4 * ROUNDING[dtype], atol=1e-30, equal_nan=True)


def added(made: Queue, values: Tensor, others: Tensor, operation: int = SUM) -> Tensor:
    out = torch.empty_like(values)
    made.mapped(operation, values, others, out)
    return out


def attention_of(dtype: torch.dtype, width: int) -> tuple[list[Tensor], list[Tensor], np.ndarray]:
    """New queries, keys and values [b, t, h, d]; a filled cache and a causal mask; and where three requests stand."""
    new = drawn(dtype, (3, width, 6, 16), (3, width, 2, 16), (3, width, 2, 8))
    held = drawn(dtype, (5, 2, 40, 16), (5, 2, 40, 8))
    rows, starts = torch.tensor([4, 0, 2]), torch.tensor([0, 7, 30])
    hidden = torch.arange(40) > (starts[:, None] + torch.arange(width))[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)[:, None]
    lines = [(b, *(int(row - rows[0]) * part.stride(0) for part in held), start + width, start)
             for b, (row, start) in enumerate(zip(rows, starts.tolist(), strict=True))]  # fmt: skip
    return new, [*held, mask, rows, starts], np.array(lines, np.int64)


@pytest.mark.parametrize("width", [1, 3])
@all_cases
def test_writes_and_attention_have_the_bits_of_single_calls(kind: int, dtype: torch.dtype, width: int) -> None:
    """Queries and keys are computed in the queue too: attention must wait for them, and for the write."""
    (q, k, v), (keys, values, mask, rows, starts), places = attention_of(dtype, width)
    plain_keys, plain_values = keys.clone(), values.clone()
    doubled_q, doubled_k = (part + part for part in (q, k))
    store_kv(doubled_k.transpose(1, 2), v.transpose(1, 2), plain_keys, plain_values, rows, starts)
    wanted = decode_attention(doubled_q.transpose(1, 2), plain_keys[4:], plain_values[4:], mask, places, 0.25)
    made = Queue(kind, dtype)
    queued_q, queued_k = added(made, q, q), added(made, k, k)
    made.store(queued_k.transpose(1, 2), v.transpose(1, 2), keys, values, rows, starts)
    found = made.attend(queued_q.transpose(1, 2), keys[4:], values[4:], mask, places, 0.25)
    made.run()
    assert bitwise(keys, plain_keys) and bitwise(values, plain_values) and bitwise(found.clone(), wanted.clone())


def test_a_row_that_is_compared_is_not_written() -> None:
    (_, k, v), (keys, values, _, rows, starts), _ = attention_of(torch.float32, 1)
    before, rows[1] = keys.clone(), -1
    made = Queue(FLOATS, torch.float32)
    made.store(k.transpose(1, 2), v.transpose(1, 2), keys, values, rows, starts)
    made.run()
    assert (keys != before).any((1, 2, 3)).nonzero()[:, 0].tolist() == [2, 4]


def test_a_write_that_the_loops_would_misread_is_refused() -> None:
    (_, k, v), (keys, values, _, rows, starts), _ = attention_of(torch.float32, 2)
    new = k.transpose(1, 2), v.transpose(1, 2)
    made = Queue(FLOATS, torch.float32)
    for wrong, said in (
        ((new[0].transpose(2, 3), new[1], keys, values, rows, starts), "of strides"),
        ((*new, keys.double(), values, rows, starts), "a cache of torch.float64"),
        ((*new, keys, values, rows.int(), starts), "rows of torch.int32"),
    ):
        with pytest.raises(ValueError, match=said):
            made.store(*wrong)


def block(made: Queue, stream: Tensor, weights: list[Tensor]) -> Tensor:
    """A part of a layer: every operation needs the one before it, except the second product."""
    normed = made.norm(stream, weights[0], 1e-5)
    gate, up = made.product(normed, weights[1]), made.product(normed, weights[2], follows=False)
    return added(made, stream, made.product(added(made, made.silu(gate), up, TIMES), weights[3]))


@pytest.mark.parametrize("threads", [1, 3])
@all_cases
def test_a_row_has_the_same_bits_in_any_batch(kind: int, dtype: torch.dtype, threads: int) -> None:
    """And on any number of threads, many times: a thread that did not wait would read numbers of an earlier time."""
    stream, *weights = drawn(dtype, (70, 64), (64,), (200, 64), (200, 64), (64, 200))
    made = Queue(kind, dtype)
    alone = []
    for row in stream.split(1):
        alone.append(block(made, row, weights))
        made.run()
    with on_threads(threads):
        for _ in range(15):
            for count in (70, 7, 2):
                found = block(made, stream[:count], weights)
                made.run()
                assert bitwise(found, torch.cat(alone[:count]))


def test_a_thread_waits_for_the_operations_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers say which operation waits: all but the second product of one input."""
    seen: list[list[int]] = []
    monkeypatch.setattr(queue, "run_on_threads", lambda loops, call, is_little: seen.append(made._numbers[:7].tolist()))
    stream, *weights = drawn(torch.float32, (2, 64), (64,), (32, 64), (32, 64), (64, 32))
    made = Queue(FLOATS, torch.float32)
    block(made, stream, weights)
    with pytest.raises(RuntimeError, match="a queue of 7 operations ended early"):
        made.run()
    first = queue_loops.FIELDS
    assert [(one[first], one[first + 1]) for one in seen[0]] == [
        (queue_loops.NORM, 1), (queue_loops.PRODUCT, 1), (queue_loops.PRODUCT, 0), (queue_loops.SILU, 1),
        (queue_loops.MAP, 1), (queue_loops.PRODUCT, 1), (queue_loops.MAP, 1),
    ]  # fmt: skip


@all_cases
def test_a_fixed_queue_computes_again_what_its_memory_holds(kind: int, dtype: torch.dtype) -> None:
    stream, *weights = drawn(dtype, (7, 64), (64,), (192, 64), (192, 64), (64, 192))
    made = Queue(kind, dtype)
    held = stream.clone()
    out = block(made, held, weights)
    fixed = FixedQueue(made)
    assert len(made) == 0
    for turn in range(3):
        held.copy_(stream * (turn + 1))
        fixed.run()
        expected = block(made, stream * (turn + 1), weights)
        made.run()
        assert bitwise(out, expected)


def test_a_queue_that_failed_is_emptied() -> None:
    """An error between two operations must leave nothing for the next forward."""
    stream, *weights = drawn(torch.float32, (2, 64), (64,), (32, 64), (32, 64), (64, 32))
    made = Queue(FLOATS, torch.float32)
    block(made, stream, weights)
    made.clear()
    found = made.product(stream, weights[1])
    assert "1 queued" in repr(made)
    made.run()
    assert torch.allclose(found, linear(stream, weights[1]), atol=1e-4)


def test_a_full_queue_is_refused() -> None:
    made, value = Queue(FLOATS, torch.float32), torch.ones(1, 8)
    for _ in range(256):
        made.silu(value)
    with pytest.raises(RuntimeError, match=r"256 operations at most; call run\(\)"):
        made.silu(value)
