"""Runs of Thinking States models that are recorded to disk: their thoughts are those of a run in memory."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.ops.equality import bitwise
from cacheprobe.trace.stored import growing_run
from tests.capture.recorded_run import failing_after
from tests.capture.test_to_disk import _part_each_round, require_equal  # noqa: F401  (a fixture)
from tests.thinking.test_thinking_engine import FREE, PROMPTS, RUN, lm

EARLY = cp.drafters.EarlyExit(layer=1)
LONG: dict[str, Any] = {**RUN, "max_new_tokens": 10, "sampling": FREE, "deterministic": [0, 1, 3]}


def require_equal_thoughts(a: cp.Trace, b: cp.Trace) -> None:
    pd.testing.assert_frame_equal(a.thoughts(), b.thoughts())
    assert a.thought_states is not None and b.thought_states is not None
    assert bitwise(a.thought_states, b.thought_states)
    pd.testing.assert_frame_equal(a.hypotheses(), b.hypotheses(), check_dtype=False)


CASES: dict[str, tuple[bool, list[Any], dict[str, Any]]] = {
    "preemptions": (True, PROMPTS, dict(deterministic=[1], max_kv_tokens=64, max_new_tokens=6, sampling=FREE)),
    "one prompt": (False, [cp.Request(PROMPTS[1], sampling=cp.SamplingParams(n=3, temperature=1.0))], {}),
    "no thought": (False, [[5]], dict(max_new_tokens=1)),
}


@pytest.mark.parametrize("name", CASES)
def test_thoughts_on_disk_are_those_in_memory(name: str, tmp_path: Path) -> None:
    while_decoding, prompts, settings = CASES[name]
    model, settings = lm(while_decoding), RUN | settings
    in_memory = cp.run(model, prompts, **settings)
    on_disk = cp.run(model, prompts, **settings, out=tmp_path / "run")
    assert (in_memory.thought_table is None) == (name == "no thought")
    for trace in (on_disk, cp.load_trace(tmp_path / "run", model)):
        require_equal(trace, in_memory)
        if in_memory.thought_table is None:
            assert trace.thought_table is None and trace.meta["thinking"] is None
        else:
            require_equal_thoughts(trace, in_memory)


def test_thoughts_are_read_while_they_grow(tmp_path: Path) -> None:
    settings = {name: value for name, value in LONG.items() if name != "progress"}
    stream = cp.stream(lm(True), PROMPTS, **settings, drafter=EARLY, out=tmp_path / "run")
    counts = []
    for number, _ in enumerate(stream):
        if number % 6 == 0 and (tmp_path / "run" / "journal.jsonl").exists():
            growing, followed = cp.load_trace(tmp_path / "run"), growing_run(tmp_path / "run")
            if growing.thought_table is not None:
                pd.testing.assert_frame_equal(growing.thoughts(), followed.thoughts)
                rows = growing.row_table.set_index("row").loc[growing.thoughts().row]
                assert rows.position.tolist() == growing.thoughts().end.tolist()
                counts.append(len(growing.thoughts()))
    assert len({*counts}) > 1
    require_equal_thoughts(stream.trace(), cp.run(lm(True), PROMPTS, **LONG, drafter=EARLY, capture=None))


def committed_thoughts(trace: cp.Trace, request_id: int) -> pd.DataFrame:
    """One line for each chunk: a run that was continued computes some chunks once more."""
    table = trace.thoughts()
    own = table[(table.request_id == request_id) & (table.status == "committed")]
    own = own.sort_values(["chunk", "thought"]).drop_duplicates("chunk")
    return own.drop(columns=["thought", "row", "step", "phase", "role"]).reset_index(drop=True)


def test_a_run_with_thoughts_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """The disk fails at the ninth write."""
    whole = cp.run(lm(True), PROMPTS, **LONG, drafter=EARLY)
    with failing_after(9):
        cp.run(lm(True), PROMPTS, **LONG, drafter=EARLY, out=tmp_path / "run")
    again = cp.resume(tmp_path / "run", lm(True), drafter=EARLY, progress=False)
    for request_id in LONG["deterministic"]:
        assert again.committed(request_id) == whole.committed(request_id)
        assert again.digest(request_id) == whole.digest(request_id)
        pd.testing.assert_frame_equal(committed_thoughts(again, request_id), committed_thoughts(whole, request_id))
