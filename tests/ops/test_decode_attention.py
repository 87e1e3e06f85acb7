"""Attention of one new token a request: right, and the same bits beside any other request, thread or address."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cacheprobe.ops.compiled import attention as module
from cacheprobe.ops.compiled.attention import decode_attention, serves
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.ops.references import cached_attention

pytestmark = pytest.mark.determinism

CAPACITY = 300
POSITIONS = (3, 60, 127, 0, 299, 16)
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((4, 4, 16, 16), (6, 2, 20, 12), (9, 3, 64, 64), (8, 1, 7, 5))
"""Heads, heads of keys, their width and that of values."""
CASES = [*zip(SHAPES, (torch.float32, torch.bfloat16, torch.float16, torch.float32), strict=True)]


def drawn(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, keys, values and a causal mask of six requests."""
    heads, groups, depth, value_depth = shape
    draw = torch.Generator().manual_seed(heads)
    q = torch.randn(len(POSITIONS), heads, 1, depth, generator=draw).to(dtype)
    keys = torch.randn(len(POSITIONS), groups, CAPACITY, depth, generator=draw).to(dtype)
    values = torch.randn(len(POSITIONS), groups, CAPACITY, value_depth, generator=draw).to(dtype)
    hidden = torch.arange(CAPACITY) > torch.tensor(POSITIONS)[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    return q, keys, values, mask[:, None, None]


def attended(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, rows: Any = None) -> Tensor:
    """Attention of batch indices 0, 1, ..., which stand for requests `rows`."""
    rows = range(len(q)) if rows is None else rows
    places = [
        (b, row * keys.stride(0), row * values.stride(0), POSITIONS[row] + 1, POSITIONS[row])
        for b, row in enumerate(rows)
    ]  # fmt: skip
    return decode_attention(q, keys[:1], values[:1], mask, np.array(places, np.int64), 0.3)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_bits_depend_on_the_request_alone(
    shape: tuple[int, int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in reverse order, on one thread, on all for little work, at an odd address, over a longer mask."""
    q, keys, values, mask = drawn(shape, dtype)
    wanted = attended(q, keys, values, mask)
    for row in range(len(q)):
        assert bitwise(attended(q[row : row + 1], keys, values, mask[row : row + 1], [row])[0], wanted[row])
    order = list(reversed(range(len(q))))
    assert bitwise(attended(q[order], keys, values, mask[order], order), wanted[order])
    strided = torch.stack((q, -q), 1)[:, 0]
    assert not strided.is_contiguous() and bitwise(attended(strided, keys, values, mask), wanted)
    odd = torch.empty(q.numel() + 1, dtype=dtype)[1:].view(q.shape).copy_(q)
    assert bitwise(attended(odd, keys, values, mask), wanted)
    assert bitwise(attended(q, keys, values, mask.expand(-1, shape[0], -1, -1).contiguous()), wanted)
    for little in (0, 2**40):
        monkeypatch.setattr(module, "_LITTLE", little)
        assert bitwise(attended(q, keys, values, mask), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_of_one_request_or_head_changes_no_other(dtype: torch.dtype) -> None:
    """Head 4 of request 2 does not see position 5."""
    q, keys, values, mask = drawn(SHAPES[1], dtype)
    wanted = attended(q, keys, values, mask)
    of_heads = mask.expand(-1, 6, -1, -1).clone()
    of_heads[2, 4, 0, 5] = torch.finfo(dtype).min
    differs = (attended(q, keys, values, of_heads) != wanted).any(-1)[..., 0]
    assert differs.nonzero().tolist() == [[2, 4]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_other_slot_is_read(dtype: torch.dtype) -> None:
    """What lies behind a request's own position may be anything, no number included."""
    q, keys, values, mask = drawn(SHAPES[1], dtype)
    wanted = attended(q, keys, values, mask)
    for row, position in enumerate(POSITIONS):
        keys[row, :, position + 1 :] = torch.nan
        values[row, :, position + 1 :] = torch.inf
    assert bitwise(attended(q, keys, values, mask), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_stays_visible(dtype: torch.dtype) -> None:
    q, keys, values, mask = drawn(SHAPES[1], dtype)
    keys[2, 1, 5] = torch.nan
    out = attended(q, keys, values, mask)
    assert out[2, 3:].isnan().all() and not out[2, :3].isnan().any() and not out[[0, 1, 3, 4, 5]].isnan().any()


def test_rows_without_a_place_are_zero() -> None:
    q, keys, values, mask = drawn(SHAPES[0], torch.float32)
    places = np.array([(1, keys.stride(0), values.stride(0), POSITIONS[1] + 1, POSITIONS[1])], np.int64)
    out = decode_attention(q, keys[:1], values[:1], mask, places, 0.3)
    assert out[1].any() and not out[[0, 2, 3, 4, 5]].any()


def test_what_the_loops_would_misread_is_refused() -> None:
    q, keys, values, mask = drawn(SHAPES[1], torch.bfloat16)
    for wrong, said in (
        ((q, keys, values, mask.float()), "mask of torch.float32"),
        ((q, keys.float(), values, mask), "keys of torch.float32"),
        ((q, keys, values, mask[:1]), "a mask of"),
        ((q, keys, values, mask[..., :200]), "a mask of 200 slots for requests that attend to 300"),
        ((q, keys.mT.contiguous().mT, values, mask), "the last must be 1"),
    ):
        with pytest.raises(ValueError, match=said):
            attended(*wrong)


def test_loops_that_end_early_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled loop cannot raise: numba prints an error, and the output would stay zero."""
    monkeypatch.setattr(module, "run_on_threads", lambda *call: None)
    with pytest.raises(RuntimeError, match="ended after 0 of 12 heads"):
        attended(*drawn(SHAPES[1], torch.float32))


WINDOW, WINDOW_STARTS = 5, (3, 60, 122, 0, 295, 16)


def attended_window(windows: tuple[Tensor, Tensor, Tensor, Tensor], firsts: list[int], width: int) -> Tensor:
    """Attention of `width` tokens that begin at `firsts` in each request's window."""
    q, keys, values, mask = windows
    starts = [start + first for start, first in zip(WINDOW_STARTS, firsts, strict=True)]
    own_q = torch.stack([q[b, :, first : first + width] for b, first in enumerate(firsts)])
    own_mask = torch.stack([mask[b, :, first : first + width] for b, first in enumerate(firsts)])
    places = [
        (b, b * keys.stride(0), b * values.stride(0), min(start + width, CAPACITY), start)
        for b, start in enumerate(starts)
    ]
    return decode_attention(own_q, keys[:1], values[:1], own_mask, np.array(places, np.int64), 0.3)


def drawn_window(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, keys, values, _ = drawn(shape, dtype)
    q = torch.randn(len(WINDOW_STARTS), shape[0], WINDOW, shape[2], generator=torch.Generator().manual_seed(3))
    positions = torch.tensor(WINDOW_STARTS)[:, None] + torch.arange(WINDOW)
    hidden = torch.arange(CAPACITY) > positions[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    return q.to(dtype), keys, values, mask[:, None]


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_a_window_is_attention(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    q, keys, values, _ = windows = drawn_window(shape, dtype)
    positions = torch.tensor(WINDOW_STARTS)[:, None] + torch.arange(WINDOW)
    plain = cached_attention(q.float(), keys.float(), values.float(), torch.arange(len(q)), positions, 0.3)
    ours = attended_window(windows, [0] * len(q), WINDOW).float()
    most = 1e-5 if dtype == torch.float32 else 2**-7
    assert close(ours, plain, most, because="sums are ordered otherwise, and rounded to the dtype")


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_bits_of_a_window_depend_on_the_position_alone(
    shape: tuple[int, int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another slot of the window, in windows of other widths, alone, behind anything in later slots, and on any
    number of threads."""
    _, keys, values, _ = windows = drawn_window(shape, dtype)
    wanted = attended_window(windows, [0] * len(keys), WINDOW)
    for firsts, width in (([1, 0, 2, 2, 1, 0], 3), ([2] * 6, 2), ([4, 3, 2, 1, 0, 4], 1)):
        shifted = attended_window(windows, firsts, width)
        for b, first in enumerate(firsts):
            assert bitwise(shifted[b], wanted[b, :, first : first + width])
    for little in (0, 2**40):
        monkeypatch.setattr(module, "_LITTLE", little)
        assert bitwise(attended_window(windows, [0] * len(keys), WINDOW), wanted)
    keys[:, :, -1], values[0, :, 8:] = torch.nan, torch.inf
    assert bitwise(attended_window(windows, [0] * len(keys), WINDOW)[:4], wanted[:4])


IN_A_PROCESS = (
    "import torch; from cacheprobe.ops.compiled import attention; "
    "from cacheprobe.ops.compiled.operations import choose; "
    "choice = choose(torch.float16, torch.device('cpu')); "
    "print(attention.serves(torch.zeros(1, 1, 1, 4)), 'failed' not in choice.reason)"
)


@pytest.mark.slow
def test_without_a_folder_for_the_cache_it_is_compiled_all_the_same(tmp_path: Path) -> None:
    """numba looks for a folder beside the source, then for one of the user's; neither can be written here."""
    (tmp_path / "file").touch()
    nowhere = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserWideCacheLocator", "XDG_CACHE_HOME": str(tmp_path / "file")}
    done = run_python(IN_A_PROCESS, {**nowhere, "HOME": str(tmp_path / "file")})
    assert done.stdout.strip() == "True True", done.stderr


def test_without_a_compiler_the_import_says_why() -> None:
    done = run_python(IN_A_PROCESS, {"NUMBA_DISABLE_JIT": "1"})
    assert "unset NUMBA_DISABLE_JIT" in done.stderr.splitlines()[-1]


def run_python(code: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_it_serves_by_kind_and_width() -> None:
    q = torch.zeros(2, 3, 1, 4)
    assert serves(q) and serves(q.bfloat16()) and serves(q.half()) and not serves(q.double())
    for most, dtype in ((64, torch.float32), (16, torch.bfloat16), (16, torch.float16)):
        window = torch.zeros(2, 3, most, 4, dtype=dtype)
        assert serves(window) and not serves(torch.cat((window, window[:, :, :1]), 2))
