"""Attention request by request: right, and the same bits whatever else is in the batch."""

from functools import partial

import pytest
import torch

from cacheprobe.ops import attention as request_attention
from cacheprobe.ops.attention import (
    AttentionSpans,
    attend_by_request,
    attend_together,
    first_slots,
    spans_of_pass,
    spans_of_positions,
)
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.ops.references import cached_attention

pytestmark = pytest.mark.determinism

CAPACITY = 200
STARTS = (3, 60, 127, 0)


def inputs(heads: int, groups: int, width: int, dtype: torch.dtype = torch.float32):
    draw = torch.Generator().manual_seed(heads + width)
    q = torch.randn(len(STARTS), heads, width, 16, generator=draw).to(dtype)
    keys, values = (torch.randn(len(STARTS), groups, CAPACITY, 16, generator=draw).to(dtype) for _ in range(2))
    positions = torch.tensor(STARTS)[:, None] + torch.arange(width)
    hidden = torch.arange(CAPACITY) > positions[..., None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)[:, None]
    return q, keys, values, positions, mask


def attended(q, keys, values, mask, spans, rows=None):
    rows = range(len(q)) if rows is None else rows
    places = list(rows)

    def held(row: int, span: int):
        return tuple(kept[places[row] : places[row] + 1, :, :span] for kept in (keys, values))

    return attend_by_request(q, held, mask, spans, 0.25)


@pytest.mark.parametrize(
    ("heads", "groups", "width", "is_big", "dtype"),
    [(4, 4, 1, True, torch.float32), (6, 2, 3, False, torch.bfloat16), (6, 2, 16, True, torch.bfloat16)],
)
def test_it_is_attention(
    heads: int, groups: int, width: int, is_big: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one thread and on all, and where a window's positions have two spans."""
    if is_big:
        monkeypatch.setattr(request_attention, "_ONE_THREAD_WORK", 0)
    q, keys, values, positions, mask = inputs(heads, groups, width, dtype)
    exact = cached_attention(q.float(), keys.float(), values.float(), torch.arange(len(q)), positions, 0.25)
    plain, error, why = exact.transpose(1, 2).flatten(2).to(dtype), 1e-5, "sums are ordered otherwise"
    if dtype == torch.bfloat16:
        error, why = 2**-6, "probabilities and sums are rounded to bfloat16"
    for of in (spans_of_positions, spans_of_pass):
        spans = AttentionSpans(tuple(of(start, width, CAPACITY) for start in STARTS))
        assert close(attended(q, keys, values, mask, spans), plain, error, because=why)
    assert close(attend_together(q, keys, values, mask, 0.25), plain, error, because=why)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 5), (torch.bfloat16, 1), (torch.bfloat16, 16)])
def test_a_request_alone_has_the_bits_of_a_request_in_a_batch(dtype: torch.dtype, width: int) -> None:
    q, keys, values, _, mask = inputs(6, 2, width, dtype)
    pieces = tuple(spans_of_positions(start, width, CAPACITY) for start in STARTS)
    together = attended(q, keys, values, mask, AttentionSpans(pieces))
    for row in range(len(q)):
        alone = attended(
            q[row : row + 1], keys, values, mask[row : row + 1], AttentionSpans(pieces[row : row + 1]), [row]
        )
        assert bitwise(alone[0], together[row])


def test_a_position_has_one_span_wherever_a_window_begins() -> None:
    for width in (1, 7, 16, 70):
        for start in range(150):
            for piece in spans_of_positions(start, width, 1000):
                for t in range(piece.first, piece.end):
                    assert piece.span == (start + t) // 64 * 64 + 64
    assert [(p.span, p.first, p.end) for p in spans_of_positions(60, 10, 100)] == [(64, 0, 4), (100, 4, 10)]
    assert [(p.span, p.first, p.end) for p in spans_of_pass(60, 10, 100)] == [(100, 0, 10)]


def test_rows_that_nothing_reads_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, which the compiled loops do not take."""
    q, keys, values, _, mask = inputs(4, 4, 3, torch.float64)
    calls = []
    real = request_attention.scaled_dot_product_attention
    monkeypatch.setattr(
        request_attention, "scaled_dot_product_attention", lambda *a, **k: calls.append(a) or real(*a, **k)
    )
    out = attended(q, keys, values, mask, AttentionSpans(((), spans_of_positions(60, 3, CAPACITY), (), ())))
    assert len(calls) == 1 and not out[[0, 2, 3]].any() and out[1].any()


def test_threads_are_as_many_as_before_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, values, _, mask = inputs(4, 4, 3, torch.float64)
    seen = []

    def fail(*args, **named):
        seen.append(torch.get_num_threads())
        raise RuntimeError("no")

    before = torch.get_num_threads()
    monkeypatch.setattr(request_attention, "scaled_dot_product_attention", fail)
    with pytest.raises(RuntimeError, match="no"):
        attended(q, keys, values, mask, AttentionSpans(tuple(spans_of_positions(s, 3, CAPACITY) for s in STARTS)))
    assert seen == [1] and torch.get_num_threads() == before
    assert not request_attention._thread_count.locked()


@pytest.mark.parametrize(
    ("dtype", "is_plain"), [(torch.float32, True), (torch.bfloat16, False), (torch.float64, True)], ids=str
)
def test_without_pads_each_request_has_the_bits_of_a_pass_by_itself(dtype: torch.dtype, is_plain: bool) -> None:
    """Lengths on both sides of those whose attention runs in loops; pads give zeros."""
    q, keys, values, _, mask = inputs(6, 2, 70, dtype)
    counts, more = (70, 16, 64, 17), {} if is_plain else {"softcap": 5.0, "sinks": torch.linspace(-1, 1, 6)}
    pieces = tuple(
        (spans_of_pass if count > 64 else spans_of_positions)(start, count, CAPACITY)
        for start, count in zip(STARTS, counts, strict=True)
    )

    def apart(row: int, count: int) -> torch.Tensor:
        held = partial(first_slots, keys[row : row + 1], values[row : row + 1])
        of_row = q[row : row + 1, :, :count], held, mask[row : row + 1, :, :count], AttentionSpans((pieces[row],))
        return attend_by_request(*of_row, 0.25, **more)[0]

    together = attend_by_request(
        q, partial(first_slots, keys, values), mask, AttentionSpans(pieces, True), 0.25, **more
    )
    for row, count in enumerate(counts):
        assert bitwise(together[row, :count], apart(row, count)), count
        assert not together[row, count:].any()
    nothing = AttentionSpans(((), *pieces[1:]), True)
    assert not attend_by_request(q, partial(first_slots, keys, values), mask, nothing, 0.25, **more)[0].any()
