"""Runs that are recorded to disk: equal to runs in memory, readable while they grow, and continued after a kill."""

import errno
import itertools
import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.ops.equality import bitwise
from cacheprobe.trace.journal import read_journal
from cacheprobe.trace.manifest import JOURNAL, TraceError
from cacheprobe.trace.recording import disk_writer
from tests.capture.recorded_run import DRAFTERS, LONG, failing_after, recorded, recording_process
from tests.dashboard.growing_run import part_each_round
from tests.models.heads.tiny_head import TinyHeadDrafter
from tests.tiny import PROMPTS, SMALL, loaded

TABLES = ("row_table", "hypothesis_table", "event_table", "ledger_table", "token_table")


@pytest.fixture(autouse=True)
def _part_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    part_each_round(monkeypatch)


def require_equal(a: cp.Trace, b: cp.Trace) -> None:
    """Tables, tokens, texts, metadata and states of two runs."""
    for name in TABLES:
        ours, theirs = getattr(a, name), getattr(b, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            ours, theirs = (t.drop(columns="seconds", errors="ignore") for t in (ours, theirs))
            pd.testing.assert_frame_equal(ours, theirs, check_dtype=False, obj=name)
    assert a.tokens == b.tokens and dict(a.texts) == dict(b.texts)
    assert (a.store.sites, a.store.heads, a.store.layers) == (b.store.sites, b.store.heads, b.store.layers)
    for site in (*a.store.sites, *a.store.heads):
        for layer in a.store.layers:
            assert bitwise(a.store.all_of(site, layer), b.store.all_of(site, layer))
    assert json.loads(json.dumps(a.meta)) == json.loads(json.dumps(b.meta))
    assert (a.head is None) == (b.head is None)
    if isinstance(a.head, cp.Trace) and isinstance(b.head, cp.Trace):
        require_equal(a.head, b.head)


@pytest.mark.parametrize(
    "settings",
    [
        dict(deterministic=[1], drafter=cp.drafters.NGram()),
        dict(drafter=cp.drafters.EarlyExit(layer=1), capture=cp.CaptureConfig("STCZ", heads=("q", "pattern"))),
        dict(capture="Z", prompts=[cp.Request(PROMPTS[0], sampling=cp.SamplingParams(n=3, temperature=1.0))]),
        dict(capture=cp.CaptureConfig("S", positions=[3], dtype="float32"), max_kv_tokens=70),
        dict(capture=None),
        dict(lens="later"),
        dict(drafter=TinyHeadDrafter(), max_kv_tokens=70),
        dict(drafter=TinyHeadDrafter(), capture=cp.CaptureConfig("SZ", heads=("q", "pattern"), statuses=["committed"])),
    ],
    ids=str,
)
def test_a_run_on_disk_is_the_run_in_memory(settings: dict[str, Any], tmp_path: Path) -> None:
    prompts = settings.pop("prompts", PROMPTS)
    settings = {**SMALL, "max_new_tokens": 8, **settings}
    in_memory = cp.run(loaded(), prompts, **settings)
    on_disk = cp.run(loaded(), prompts, **settings, out=tmp_path / "run")
    require_equal(on_disk, in_memory)
    require_equal(cp.load_trace(tmp_path / "run", loaded()), in_memory)
    assert not {path.name for path in (tmp_path / "run").iterdir()} - {
        "manifest.json",
        *json.loads((tmp_path / "run" / "manifest.json").read_text())["files"],
    }


def test_parts_are_written_before_the_recorder_holds_more_than_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []
    write = disk_writer.DiskWriter._write
    monkeypatch.setattr(
        disk_writer.DiskWriter, "_write", lambda self: (held.append(self.recorder.num_bytes), write(self))[1]
    )
    monkeypatch.setattr(disk_writer, "SECONDS", 1e9)
    cp.run(loaded(), PROMPTS, **{**SMALL, "max_new_tokens": 40}, out=tmp_path, memory_budget="300kB")
    assert len(held) > 4 and max(held) < 2 * 100_000  # a pass more than a third of the budget


def test_a_stream_is_recorded_and_read_while_it_grows(tmp_path: Path) -> None:
    of, settings = loaded(), {k: v for k, v in LONG.items() if k != "progress"}
    whole = cp.run(of, PROMPTS, **LONG, drafter=cp.drafters.NGram())
    stream = cp.stream(of, PROMPTS, **settings, drafter=cp.drafters.NGram(), capture="STCZ", out=tmp_path / "run")
    num_read = 0
    for number, _ in enumerate(stream):
        if number % 8 or not parts_in(tmp_path / "run"):
            continue
        num_read += 1
        growing = cp.load_trace(tmp_path / "run", of)
        assert growing.meta["growing"]["parts"] > 0 and "not finished" in repr(growing)
        for i in range(5):
            so_far = growing.committed(i)
            assert so_far == whole.committed(i)[: len(so_far)]
        rows = growing.rows(0, "committed")
        if len(rows):
            assert torch.equal(
                growing.vectors("S", 1, rows), whole.vectors("S", 1, whole.rows(0, "committed"))[: len(rows)]
            )
    assert num_read > 2
    require_equal(stream.trace(), whole)


def require_continued_head(again: cp.Trace, whole: cp.Trace) -> None:
    """Compares what is recorded of a drafter's head. Its passes have another shape if the run was interrupted, so that
    its states and readings are the same up to rounding."""
    for i in range(5):
        ours, theirs = (t.rows(i, "committed") for t in (again, whole))
        assert ours.position.tolist() == list(range(1, len(ours) + 1)) and len(ours) >= len(PROMPTS[i]) + 12 - 6
        if i not in LONG["deterministic"]:
            continue
        both = range(min(len(ours), len(theirs)))
        assert ours.token_id.tolist()[: len(both)] == theirs.token_id.tolist()[: len(both)]
        for site, layer in itertools.product("STC", range(3)):
            pair = (t.vectors(site, layer, rows.iloc[both]) for t, rows in ((again, ours), (whole, theirs)))
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-3)
        ours, theirs = (
            t.hypotheses().query(f"request_id == {i} and status == 'committed' and position <= {len(both)}")
            for t in (again, whole)
        )
        ours, theirs = (t.sort_values(["position", "layer"], ignore_index=True) for t in (ours, theirs))
        assert len(ours) and ours.committed_token_id.equals(theirs.committed_token_id)
        np.testing.assert_allclose(ours.committed_logprob_nats, theirs.committed_logprob_nats, atol=1e-3)
    assert not again.row_table.status.eq("").any() and again.row_table.row.is_unique


def require_continued(directory: Path, drafter: str, whole: cp.Trace, is_verified: bool) -> None:
    """Continues the run and compares it with one that was not interrupted, and with the slow reference if
    `is_verified`."""
    if read_journal(directory) is None:  # killed before the journal began, or after the manifest
        if not (directory / "manifest.json").exists():
            return
        again = cp.load_trace(directory, loaded())
    else:
        growing = cp.load_trace(directory, loaded())
        for i in range(5):
            so_far = growing.committed(i)
            assert i not in LONG["deterministic"] or so_far == whole.committed(i)[: len(so_far)]
        again = cp.resume(directory, loaded(), drafter=DRAFTERS[drafter](), progress=False)
    for i in range(5):
        rows = again.rows(i, "committed")
        assert rows.position.is_unique and len(rows) == len(PROMPTS[i]) + len(again.committed(i)) - 1
        if i in LONG["deterministic"]:
            assert again.committed(i) == whole.committed(i) and again.digest(i) == whole.digest(i)
            assert again.text(i) == whole.text(i)
            ours, theirs = (
                t.hypotheses().query(f"request_id == {i} and status == 'committed'").sort_values(["position", "layer"])
                for t in (again, whole)
            )
            for name in ("position", "layer", "top_token_ids", "logprob_nats", "rank", "committed_token_id"):
                np.testing.assert_array_equal(
                    np.stack(ours[name].to_numpy()) if name == "top_token_ids" else ours[name].to_numpy(),
                    np.stack(theirs[name].to_numpy()) if name == "top_token_ids" else theirs[name].to_numpy(),
                )
    assert not again.row_table.status.eq("").any() and set(again.meta["finish"].values()) == {"length"}
    assert (again.head is None) == (whole.head is None)
    if isinstance(again.head, cp.Trace) and isinstance(whole.head, cp.Trace):
        require_continued_head(again.head, whole.head)
    events = again.events()
    assert sum(len(ids) for ids in events.committed_token_ids) == sum(len(again.committed(i)) for i in range(5))
    assert not is_verified or cp.verify(again, loaded(), progress=False).is_equal
    assert not list(directory.glob("readings-*")) and not (directory / JOURNAL).exists()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_run_goes_on_wherever_it_stopped(drafter: str, tmp_path: Path) -> None:
    """The disk fails at the n-th write, for several n: the parts before stay, and the run is continued."""
    whole = cp.run(loaded(), PROMPTS, **LONG, drafter=DRAFTERS[drafter]())
    for number in (2, 20):
        directory = tmp_path / str(number)
        with failing_after(number):
            recorded(directory, drafter)
        require_continued(directory, drafter, whole, is_verified=number == 20)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_runs_go_on(seed: int, tmp_path: Path) -> None:
    """kill -9 at once and at random times: 3, or 90 more in `make test-all`."""
    draw = random.Random(seed)
    wholes = {name: cp.run(loaded(), PROMPTS, **LONG, drafter=make()) for name, make in DRAFTERS.items()}
    codes: list[int | None] = []
    for number in range(3 if seed == 0 else 90):
        directory, drafter = tmp_path / str(number), draw.choice([*DRAFTERS])
        process = recording_process(directory, drafter)
        while not (directory / JOURNAL).exists() and process.is_alive():
            time.sleep(0.001)
        process.join(draw.uniform(0, 1.2) if number else 0)
        process.kill()
        process.join()
        codes.append(process.exitcode)
        require_continued(directory, drafter, wholes[drafter], is_verified=number % 10 == 0)
    assert {*codes} <= {0, -signal.SIGKILL} and -signal.SIGKILL in codes


def test_a_full_disk_leaves_the_parts_before(tmp_path: Path) -> None:
    whole = cp.run(loaded(), PROMPTS, **LONG)
    said = "No space left.*its whole parts stay.*cacheprobe resume"
    with failing_after(40, OSError(errno.ENOSPC, "No space left on device")), pytest.raises(TraceError, match=said):
        recorded(tmp_path / "run", "none")
    assert any(cp.load_trace(tmp_path / "run").tokens.values())
    require_continued(tmp_path / "run", "none", whole, is_verified=True)


def test_a_run_with_preempted_requests_goes_on(tmp_path: Path) -> None:
    settings = {k: v for k, v in LONG.items() if k != "progress"} | {"max_kv_tokens": 90, "capture": "STCZ"}
    whole = cp.run(loaded(), PROMPTS, **settings, progress=False)
    stream = cp.stream(loaded(), PROMPTS, **settings, out=tmp_path / "run")
    while not any(line["preemptions"] for line in parts_in(tmp_path / "run")):
        next(stream)
    stream.close()
    require_continued(tmp_path / "run", "none", whole, is_verified=True)


def test_a_run_that_keeps_no_state_goes_on(tmp_path: Path) -> None:
    settings = {k: v for k, v in LONG.items() if k != "progress"}
    whole = cp.run(loaded(), PROMPTS, **LONG, capture=None)
    stream = cp.stream(loaded(), PROMPTS, **settings, out=tmp_path / "run")
    next(stream)
    stream.close()
    again = cp.resume(tmp_path / "run", loaded(), progress=False)
    assert all(again.committed(i) == whole.committed(i) for i in LONG["deterministic"])


def parts_in(directory: Path) -> tuple[dict[str, Any], ...]:
    """The parts in a run's journal so far."""
    journal = read_journal(directory)
    return journal.parts if journal is not None else ()


def test_a_run_is_continued_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="nothing to continue"):
        cp.resume(tmp_path, loaded())
    settings = {k: v for k, v in LONG.items() if k != "progress"}
    stream = cp.stream(loaded(), PROMPTS, **settings, out=tmp_path / "run", capture="S")
    next(stream)
    with pytest.raises(TraceError, match="is being written by process"):
        cp.resume(tmp_path / "run", loaded())
    stream.close()
    with pytest.raises(TraceError, match="cacheprobe resume"):
        cp.run(loaded(), PROMPTS, **SMALL, out=tmp_path / "run")
    with pytest.raises(ValueError, match="had the drafter None, given is NGram"):
        cp.resume(tmp_path / "run", loaded(), drafter=cp.drafters.NGram())
    with pytest.raises(ValueError, match="interventions"):
        cp.resume(
            tmp_path / "run",
            loaded(),
            interventions=cp.interventions.zero(site="S", layer=1, positions=[2], request_id=0),
        )
    with pytest.raises(ValueError, match="schedule"):
        cp.resume(tmp_path / "run", loaded("gpt2"))
    cp.run(loaded(), PROMPTS[:1], **SMALL, out=tmp_path / "run", overwrite=True)
    assert len(cp.load_trace(tmp_path / "run").requests) == 1


def test_a_run_on_disk_may_be_longer_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and readings that do not fit into memory are refused there, and recorded to disk. Tables must fit."""
    prompts, settings = [[1, 2, 3]] * 4, {**SMALL, "max_new_tokens": 60}
    assert loaded().layer_shapes
    monkeypatch.setattr("cacheprobe.engine.sizes.available_bytes", lambda device=None: 1_000_000)
    with pytest.raises(ValueError, match=r"need [\d,]+ bytes .* for what is kept of them"):
        cp.run(loaded(), prompts, **settings)
    trace = cp.run(loaded(), prompts, **settings, out=tmp_path / "run")
    assert len(trace.hypotheses()) and trace.states("C", 2, 3).shape[0] == 62
    with pytest.raises(ValueError, match="240 new tokens in all need"):
        monkeypatch.setattr("cacheprobe.engine.sizes.available_bytes", lambda device=None: 400_000)
        cp.run(loaded(), prompts, **settings, out=tmp_path / "none")
    assert not (tmp_path / "none").exists()
