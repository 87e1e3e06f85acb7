"""Prepared operations: the bits of operations that are queued again, and the memory that their results share."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from cacheprobe.ops.compiled.lanes import FLOATS
from cacheprobe.ops.compiled.queue import PreparedQueue, Queue, _shared_offsets
from cacheprobe.ops.equality import bitwise
from tests.ops.test_compiled import all_cases, drawn, on_threads
from tests.ops.test_compiled_queue import attention_of, block

pytestmark = pytest.mark.determinism


def layers(made: Queue, stream: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The stream before and after each of three blocks."""
    streams = [stream]
    for _ in range(3):
        streams.append(block(made, streams[-1], weights))
    return streams


@pytest.mark.parametrize("threads", [1, 3])
@all_cases
def test_every_run_has_the_bits_of_operations_queued_again(kind: int, dtype: torch.dtype, threads: int) -> None:
    """Other numbers each time; and what an earlier run returned stays as it is."""
    first, second, *weights = drawn(dtype, (9, 64), (9, 64), (64,), (192, 64), (192, 64), (64, 192))
    plain, queued = Queue(kind, dtype), Queue(kind, dtype)
    prepared = PreparedQueue(queued, layers(queued, torch.empty_like(first), weights))
    assert "0 queued" in repr(queued)
    wanted = []
    for stream in (first, second):
        streams = layers(plain, stream, weights)
        plain.run()
        wanted.append(torch.stack(streams))
    with on_threads(threads):
        found = [prepared.run((first, second)[number % 2]) for number in range(40)]
    assert all(bitwise(one, wanted[number % 2]) for number, one in enumerate(found))
    assert not bitwise(*wanted), "the control: the streams differ"


@all_cases
def test_attention_reads_what_its_inputs_hold_now(kind: int, dtype: torch.dtype) -> None:
    """Cache, mask and places are changed between the runs. A request without attention gives zeros in every run."""
    (q, k, v), (keys, values, mask, rows, starts), places = attention_of(dtype, 2)
    stream = torch.zeros(3, 2, 6 * 8, dtype=dtype)
    for count in (3, 2):
        queued, own = Queue(kind, dtype), places[:count].copy()
        held = keys.clone(), values.clone(), mask.clone(), rows.clone(), starts.clone()

        def queue(made: Queue, own: np.ndarray, held: tuple[Tensor, ...], stream: Tensor) -> list[Tensor]:
            """The stream; and the stream after attention."""
            made.store(k.transpose(1, 2), v.transpose(1, 2), *held[:2], *held[3:])
            attended = made.attend(q.transpose(1, 2), held[0][4:], held[1][4:], held[2], own, 0.25)
            return [stream, made.added(stream, attended.transpose(1, 2).flatten(2))]

        prepared = PreparedQueue(queued, queue(queued, own, held, torch.empty_like(stream)))
        for step in range(3):
            held[4][:] = starts + step
            own[:, 3:] = places[:count, 3:] + step
            held[2][:] = torch.zeros_like(mask) if step else mask
            plain, other = Queue(kind, dtype), tuple(tensor.clone() for tensor in held)
            wanted = queue(plain, own, other, stream)
            plain.run()
            found = prepared.run(stream)
            assert bitwise(found, torch.stack(wanted))
            assert bitwise(held[0], other[0]) and bitwise(held[1], other[1])
            assert bool((found[1][count:] == 0).all())


@all_cases
def test_results_share_memory_unless_they_are_fresh_or_fixed(kind: int, dtype: torch.dtype) -> None:
    stream, *weights = drawn(dtype, (9, 64), (64,), (192, 64), (192, 64), (64, 192))
    made, normed = Queue(kind, dtype), []
    streams = [torch.empty_like(stream)]
    for _ in range(8):
        normed.append(made.norm(streams[-1], weights[0], 1e-5))
        streams.append(made.added(streams[-1], made.product(made.product(normed[-1], weights[1]), weights[3])))
    num_bytes = sum(result.nbytes for result in made._results)
    prepared = PreparedQueue(made, [streams[0], streams[-1]], normed[:2])
    prepared.run(stream)
    assert prepared._scratch.nbytes < num_bytes / 3
    plain = Queue(kind, dtype)
    wanted = plain.norm(stream, weights[0], 1e-5)
    plain.run()
    assert bitwise(normed[0], wanted), "fixed results hold their values after the run"


def test_an_operation_that_reads_a_part_of_a_result_is_refused() -> None:
    """Only whole results have a place of their own."""
    made, stream = Queue(FLOATS, torch.float32), torch.randn(4, 64)
    doubled = made.added(stream, stream)
    made.silu(doubled[2:])
    with pytest.raises(ValueError, match="a part of another one's result"):
        PreparedQueue(made, [stream])


@pytest.mark.parametrize("seed", range(10))
def test_no_two_results_in_use_share_a_byte(seed: int) -> None:
    """Random operations: one may run together with those before it, back to the last that waits."""
    dice = random.Random(seed)
    sizes = {2**40 + number: dice.choice((64, 100, 4096)) for number in range(60)}
    uses = []
    for address in sizes:  # each operation writes one result, and reads some of the last ten
        earlier = [one for one in sizes if one < address][-10:]
        uses.append([0, 7, *dice.sample(earlier, min(2, len(earlier))), address])
    waits = [dice.random() < 0.6 for _ in uses]
    offsets, total = _shared_offsets(uses, sizes, waits)
    assert offsets.keys() == sizes.keys()
    spans = {}
    for number, address in enumerate(sizes):
        last = max(index for index, used in enumerate(uses) if address in used)
        begin = max((index for index in range(number + 1) if waits[index]), default=0)
        end = next((index for index in range(last + 1, len(uses)) if waits[index]), len(uses))
        spans[address] = range(begin, end)
    for one in sizes:
        assert offsets[one] + sizes[one] <= total
        for other in sizes:
            if one < other and set(spans[one]) & set(spans[other]):
                apart = offsets[one] + sizes[one] <= offsets[other] or offsets[other] + sizes[other] <= offsets[one]
                assert apart, (one, other)
    assert total < sum(sizes.values())
