"""Captured heads and states where passes run that no observer is told of: after a preemption, and a drafter's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.config import CaptureConfig
from cacheprobe.core.hook_names import ATTENTION_SITES
from cacheprobe.core.records import ForwardRecord, RowSlot
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.ops.equality import bitwise
from cacheprobe.trace.recording.recorder import Recorder
from cacheprobe.trace.state_store import MemoryStore
from tests.engine.test_engine_errors import BAD, indigestible
from tests.tiny import SMALL, VOCAB, loaded

pytestmark = pytest.mark.determinism

TWO = [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
SHAPE = dict(window=4, group=2, capacity=64, deterministic=True, progress=False)


def differing(prompts: list[list[int]], capture: CaptureConfig, **settings: object) -> tuple[cp.Trace, list[int]]:
    """The run, and the requests whose tokens, states or heads differ from the oracle's."""
    given = {**SHAPE, "max_new_tokens": 12, "capture": capture, **settings}
    ours, oracle = cp.run(loaded(), prompts, **given), cp.reference(loaded(), prompts, **given)
    return ours, [i for i in range(len(prompts)) if not equal(ours, oracle, i)]


def equal(ours: cp.Trace, oracle: cp.Trace, request_id: int) -> bool:
    """Whether the tokens, and what was kept of the canonical rows, are the same bits."""
    tables = [trace.rows(request_id, "committed").sort_values("position") for trace in (ours, oracle)]
    a, b = (table[table.state_index >= 0] for table in tables)
    if ours.committed(request_id) != oracle.committed(request_id) or list(a.position) != list(b.position):
        return False
    pairs = [(site, layer) for site in (*ours.store.sites, *ours.store.heads) for layer in ours.store.layers]
    return all(bitwise(x, y) for pair in pairs for x, y in zip(ours.kept(*pair, a), oracle.kept(*pair, b), strict=True))


def test_heads_are_their_own_pass_s_after_a_preemption() -> None:
    """A preemption's rows are computed again in passes that nobody is told of; these have no place in the record."""
    ours, wrong = differing(TWO, CaptureConfig(sites="S", heads=("z",)), max_kv_tokens=25)
    assert ours.meta["preemptions"] and not wrong


@pytest.mark.parametrize("seed", range(4))
def test_random_runs_with_preemptions_equal_the_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 12)).tolist() for _ in range(int(rng.integers(2, 6)))]
    new = int(rng.integers(6, 20))
    heads = ATTENTION_SITES if seed % 3 == 0 else ("q", "z") if seed % 3 == 1 else ("k", "v")
    positions = None if seed % 4 else tuple(range(2, 9))
    capture = CaptureConfig(sites=("S", "STC", "TC")[seed % 3], heads=heads, positions=positions)
    rows = max(map(len, prompts)) + new + 4 + int(rng.integers(0, 12))
    drafter = cp.drafters.EarlyExit(layer=1) if seed % 2 else None
    ours, wrong = differing(prompts, capture, max_kv_tokens=rows, max_new_tokens=new, drafter=drafter)
    assert ours.meta["preemptions"] and not wrong


@dataclass
class Restless:
    """A drafter that runs the engine's own model, over a cache of its own, before it proposes."""

    name: ClassVar[str] = "restless"

    def check(self, model: object) -> None: ...

    def release(self, state: SequenceState) -> None: ...

    def extend(self, context: object, states: Sequence[SequenceState]) -> list[list[int]]:
        model = context.model  # type: ignore[attr-defined]
        width = int(states[0].last_committed_position) % 3 + 1
        model.forward(torch.full((6, width), 3), model.new_cache(6, 64), range(6), [0] * 6)
        return [[(state.token_ids[-1] + 1) % VOCAB] for state in states]


@pytest.mark.parametrize("path", ["plain", "bridge"])
def test_a_drafter_s_own_forwards_are_not_recorded(path: str) -> None:
    heads = ATTENTION_SITES if path == "bridge" else ("q", "k", "v", "z")
    capture = CaptureConfig(sites="STC", heads=heads)
    _, wrong = differing(TWO, capture, path=path, drafter=Restless())
    assert not wrong


def test_a_failed_pass_and_an_preemption_leave_the_others_heads_alone() -> None:
    """Its blocks are dropped; passes that follow unseen write into none of the blocks that are left."""
    capture = CaptureConfig(sites="S", heads=("q", "z"))
    settings = {**SMALL, "max_new_tokens": 12, "deterministic": True, "capture": capture}
    plain = cp.run(loaded(), TWO, **settings)
    late = cp.Request([BAD, 9], arrival_step=5)
    with pytest.warns(RuntimeWarning, match="ended with an error"):
        broken = cp.run(indigestible(), [*TWO, late], **settings, max_kv_tokens=25)
    assert broken.meta["errors"].keys() == {"2"} and broken.meta["preemptions"]
    assert [broken.digest(i) for i in (0, 1)] == [plain.digest(i) for i in (0, 1)]


def test_values_outside_of_a_pass_are_nobody_s() -> None:
    """Whatever the model computes between after_forward and the next before_forward leaves no trace."""
    model = loaded()
    recorder = Recorder(model, CaptureConfig(sites="STCZ", heads=("z",)), (0, 1, 2), LogitLens(), {0: [5, 6]})
    rows = (RowSlot(0, 0, 0, 0, 5, True), RowSlot(0, 0, 1, 1, 6, True))

    def hear(number: float) -> None:
        for site, layer in recorder.wanted():
            shape = (1, 2, 4, 12) if site == "z" else (1, 2, model.d_model)
            recorder.on_state(site, layer, torch.full(shape, number))

    recorder._seen_phases.add("prefill")  # no self-check: these numbers are made up
    hear(7.0)
    recorder.before_forward(1, "prefill", rows, (1, 2))
    hear(1.0)
    recorder.after_forward(ForwardRecord(1, "prefill", rows))
    hear(7.0)
    recorder.on_failure(2)
    hear(7.0)
    held = MemoryStore(recorder.take().states)
    assert all(not held.all_of(site, layer).eq(7).any() for site in (*held.sites, *held.heads) for layer in range(3))
