"""The number of cache slots is chosen by the longest request; bits do not depend on it; unused slots take no memory."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import ANY_CAPACITY, fingerprint_differences
from cacheprobe.engine import shape_trial, shapes
from cacheprobe.engine.shapes import choose_shapes
from cacheprobe.engine.sizes import with_capacity
from cacheprobe.kvcache import cache as storage
from cacheprobe.models.thinking.lm import ThinkingLM
from tests.thinking.test_thinking import text, tiny
from tests.tiny import PROMPTS, QUICK, loaded

RUN: dict[str, Any] = dict(deterministic=[0, 2], window=4, group=2, max_new_tokens=12, progress=False)
LONG = [(7 * i + i // 5) % 97 for i in range(520)]


@pytest.mark.parametrize(
    ("needed", "n_ctx", "capacity"),
    [(1, 2048, 512), (512, 2048, 512), (513, 2048, 1024), (1025, 2048, 2048), (2049, 2048, 2112), (3000, 8192, 4096),
     (8193, 8192, 8256), (600, 600, 640), (20, 64, 512)],
)  # fmt: skip
def test_the_ladder(needed: int, n_ctx: int, capacity: int) -> None:
    config = EngineConfig(window=4, pad_prefill=False)
    sizes = [(1, 1, 0), (needed - 3, 1, 0)]  # a window of 4 begins at the last token that is fed
    assert with_capacity(config, sizes, n_ctx, is_window_open=False).capacity == capacity


def test_an_open_window_has_room_to_grow() -> None:
    config = EngineConfig(window=1, pad_prefill=False)
    sizes = [(500, 10, 0)]
    assert with_capacity(config, sizes, 2048, is_window_open=False).capacity == 512
    assert with_capacity(config, sizes, 2048, is_window_open=True).capacity == 1024


def test_a_given_capacity_stays() -> None:
    assert "capacity" in choose_shapes(None, False, {"capacity": None})[1]
    assert "capacity" not in choose_shapes(None, False, {"capacity": 512})[1]
    assert cp.run(loaded(), PROMPTS, capacity=192, **RUN).meta["config"]["capacity"] == 192
    with pytest.raises(ValueError, match="need 534 cache slots, capacity is 512; set capacity=534 or more"):
        cp.run(loaded(), [LONG], capacity=512, **{**RUN, "deterministic": True})


def test_the_longest_request_chooses() -> None:
    trace = cp.run(loaded(), PROMPTS, **RUN)
    assert trace.meta["config"]["capacity"] == 512 and trace.meta["fingerprint"]["capacity"] == ANY_CAPACITY
    beside = cp.run(loaded(), [*PROMPTS, LONG], **RUN)
    assert beside.meta["config"]["capacity"] == 1024
    assert [beside.digest(i) for i in (0, 2)] == [trace.digest(i) for i in (0, 2)]


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float32) for family in QUICK), ("llama", torch.bfloat16)], ids=str
)
def test_bits_do_not_depend_on_the_capacity(family: str, dtype: torch.dtype) -> None:
    """Tokens, states and readings of deterministic requests, drafted and not."""
    model = loaded(family, dtype)
    for drafter in (None, cp.drafters.EarlyExit(layer=1)):
        traces = [cp.run(model, PROMPTS, drafter=drafter, capacity=c, **RUN) for c in (128, 1024)]
        prints = [trace.meta["fingerprint"] for trace in traces]
        if prints[0]["path"] == "bridge":
            assert [fingerprint["capacity"] for fingerprint in prints] == [128, 1024]
            continue
        assert {fingerprint["capacity"] for fingerprint in prints} == {ANY_CAPACITY}
        assert not fingerprint_differences(prints[0], prints[1])
        for i in RUN["deterministic"]:
            assert traces[0].digest(i) == traces[1].digest(i)


def test_thoughts_do_not_depend_on_the_capacity() -> None:
    model = ThinkingLM(tiny(), name="thinker")
    prompts = [text(8), text(17, 1), [5] * 20]
    settings = dict(deterministic=True, window=4, group=2, prefill_chunk=8, max_new_tokens=10, progress=False)
    one, two = (cp.run(model, prompts, capacity=c, **settings) for c in (64, 576))
    assert [one.digest(i) for i in range(3)] == [two.digest(i) for i in range(3)]
    assert one.meta["fingerprint"]["capacity"] == ANY_CAPACITY


def test_where_bits_depend_on_it_the_fingerprint_has_its_number() -> None:
    for settings in (dict(capacity=128, path="bridge"), dict(capacity=100)):
        trace = cp.run(loaded(), PROMPTS, **settings, **RUN)
        assert trace.meta["fingerprint"]["capacity"] == settings["capacity"]


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [(ANY_CAPACITY, 512, True), (512, ANY_CAPACITY, True), (ANY_CAPACITY, 500, False), (512, 512, True),
     (512, 1024, False), (ANY_CAPACITY, None, False)],
)  # fmt: skip
def test_fingerprints_of_earlier_versions_compare(one: object, other: object, is_equal: bool) -> None:
    assert (fingerprint_differences({"capacity": one}, {"capacity": other}) == []) is is_equal


def test_the_trial_of_shapes_is_as_short_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    class Counted(shapes.ShapeTrial):
        def __init__(self, model: Any, *shape: Any, **more: Any) -> None:
            tried.append(shape[2])
            super().__init__(model, *shape, **more)

    monkeypatch.setattr(shapes, "ShapeTrial", Counted)
    monkeypatch.setattr(shape_trial, "_known", type(shape_trial._known)())
    cp.run(loaded(), [LONG], capacity=4096, **{**RUN, "deterministic": True})
    assert {*tried} == {512}


def test_a_snapshot_of_a_long_prompt_has_room() -> None:
    snapshot = cp.kv_snapshot(loaded(), LONG)
    assert len(snapshot) == len(LONG) - 1
    with pytest.raises(ValueError, match="capacity is 512; set capacity="):
        cp.kv_snapshot(loaded(), LONG, capacity=512)


# -- memory


def test_a_mapped_tensor_is_zero_and_written_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        mapped = storage.zeros((3, 2, 100_000, 4), dtype, "cpu")
        assert mapped.shape == (3, 2, 100_000, 4) and mapped.dtype == dtype
        assert torch.equal(mapped, torch.zeros(3, 2, 100_000, 4, dtype=dtype))
        mapped[1, :, 7] = 1
        assert int((mapped != 0).sum()) == 8
    slots = storage.zero_slots(3, 2, 70, 4, torch.float32, "cpu")
    assert slots.shape == (3, 2, 70, 4) and slots.data_ptr() % 64 == 0 and slots[1].data_ptr() % 64 == 0


_RESIDENT = """
import os, torch
from cacheprobe.kvcache.cache import KVCache
def resident(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
torch.zeros(8).sum()
before = resident()
cache = KVCache(17, 8192, [(3, 64, 64)] * 30, torch.bfloat16)
for tensor in (*cache.keys, *cache.values):
    tensor[0, :, :512] = 1
cache.check_integrity()
print(resident() - before, cache.cache_bytes)
pid = os.fork()
if pid == 0:
    cache.keys[0][0, 0, 0] = 7
    os._exit(0)
os.waitpid(pid, 0)
print(float(cache.keys[0][0, 0, 0, 0]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is mapped on Linux")
def test_only_written_slots_take_memory_and_a_fork_has_its_own() -> None:
    root = Path(__file__).parents[2]
    answer = subprocess.run(
        [sys.executable, "-c", _RESIDENT], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    ).stdout.split()  # fmt: skip
    grown, whole, first = int(answer[0]), int(answer[1]), float(answer[2])
    written = 512 * 30 * 3 * 64 * 2 * 2
    assert whole > 3_000_000_000 and grown < 2 * written + 20_000_000, grown
    assert first == 1
