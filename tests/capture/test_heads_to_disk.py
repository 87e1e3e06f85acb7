"""A drafter's head on the disk: saved, replaced, read while the run grows, and continued with the same head alone.
`tests.capture.test_to_disk` has heads in runs that are killed."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.engine.fingerprint import FingerprintMismatch, RunGuard
from cacheprobe.trace.journal import read_journal
from cacheprobe.trace.manifest import damaged_files
from cacheprobe.trace.recording import disk_writer
from cacheprobe.trace.stored import GrowingRun, StoredRun, growing_run
from tests.capture.recorded_run import LONG, failing_after
from tests.capture.test_to_disk import _part_each_round, require_equal  # noqa: F401  (a fixture)
from tests.models.heads.tiny_head import TinyHeadDrafter
from tests.planted_drafts import planted
from tests.tiny import PROMPTS, SMALL, loaded


def run(drafter: TinyHeadDrafter | None, **settings: Any) -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **{**LONG, **settings}, drafter=drafter)


def head_of(trace: cp.Trace) -> cp.Trace:
    assert isinstance(trace.head, cp.Trace)
    return trace.head


def test_a_saved_head_is_loaded_and_replaced(tmp_path: Path) -> None:
    whole = run(TinyHeadDrafter())
    assert {*head_of(whole).row_table.status} == {"committed", "superseded", "rolled_back"}
    saved = whole.save(tmp_path / "run")
    again = cp.load_trace(saved, loaded())
    require_equal(again, whole)
    assert head_of(again).model is None
    stored = StoredRun(saved)
    assert stored.head is not None and stored.head.head is None and stored.head.version != stored.version
    pd.testing.assert_frame_equal(stored.head.rows, head_of(whole).row_table)
    table = head_of(again).table_files["hypotheses"]
    assert table == stored.head.table_files["hypotheses"] == f"head_{stored.table_files['hypotheses']}"
    again.save(saved, overwrite=True)  # its shards are those of the run that it replaces
    require_equal(cp.load_trace(saved), whole)
    assert len([*saved.glob("head_states-*")]) == 1
    (shard,) = saved.glob("head_states-*")
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert [shard.name in fault for fault in damaged_files(saved)[1]] == [True]
    run(None, max_new_tokens=2).save(saved, overwrite=True)
    assert cp.load_trace(saved).head is None and not [*saved.glob("head_*")]


def test_drafts_that_a_run_does_not_keep_are_recorded(tmp_path: Path) -> None:
    with planted(draft=0.0, verify=1e9):
        whole = run(TinyHeadDrafter())
        require_equal(run(TinyHeadDrafter(), out=tmp_path / "run"), whole)
    rows = head_of(whole).row_table
    assert rows.status.eq("abandoned").sum() > 20 and not rows.status.eq("").any()


def test_a_head_takes_part_in_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, write = [], disk_writer.DiskWriter._write
    monkeypatch.setattr(
        disk_writer.DiskWriter,
        "_write",
        lambda self: (held.append(sum(part.source.num_bytes for part in self._parts)), write(self))[1],
    )
    monkeypatch.setattr(disk_writer, "SECONDS", 1e9)
    settings = dict(capture=cp.CaptureConfig("S", layers=(0,)), max_new_tokens=30)
    run(TinyHeadDrafter(), **settings, out=tmp_path, memory_budget="120kB")
    assert len(held) > 3 and max(held) < 2 * 40_000  # a pass more than a third of the budget


def test_a_head_is_read_while_the_run_grows(tmp_path: Path) -> None:
    whole, settings = run(TinyHeadDrafter()), {k: v for k, v in LONG.items() if k != "progress"}
    settings |= dict(drafter=TinyHeadDrafter(), capture="STCZ", out=tmp_path / "run")
    stream = cp.stream(loaded(), PROMPTS, **settings)
    followed: GrowingRun | None = None
    num_read = 0
    for number, _ in enumerate(stream):
        if number % 8 or read_journal(tmp_path / "run") is None:
            continue
        followed = growing_run(tmp_path / "run") if followed is None else followed.read_on()
        assert followed is not None and followed.head is not None
        head = head_of(cp.load_trace(tmp_path / "run"))
        pd.testing.assert_frame_equal(followed.head.rows, head.row_table)
        theirs, rows = head_of(whole), head.rows(0, "committed")
        if len(rows):
            num_read += 1
            same = theirs.rows(0, "committed").iloc[: len(rows)]
            assert torch.equal(head.vectors("S", 1, rows), theirs.vectors("S", 1, same))
            assert followed.head.read_on() is not None and followed.head.readings(0).layer.max() == 2
    assert num_read > 2
    require_equal(stream.trace(), whole)


def test_a_run_goes_on_with_the_same_head_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with failing_after(60):
        run(TinyHeadDrafter(), out=tmp_path / "run")
    bind = TinyHeadDrafter.bind
    with monkeypatch.context() as patched:
        patched.setattr(TinyHeadDrafter, "bind", lambda self, model: bind(TinyHeadDrafter(scale=0.02), model))
        with pytest.raises(FingerprintMismatch, match="head.*weights_sha256"):
            cp.resume(tmp_path / "run", loaded(), drafter=TinyHeadDrafter(), progress=False)
    assert cp.resume(tmp_path / "run", loaded(), drafter=TinyHeadDrafter(), progress=False).head is not None


def test_nothing_stays_of_a_run_whose_weights_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(guard: RunGuard) -> None:
        assert [*tmp_path.glob("head_rows-*")]
        raise FingerprintMismatch

    monkeypatch.setattr(RunGuard, "require_unchanged", changed)
    with pytest.raises(FingerprintMismatch):
        cp.run(loaded(), PROMPTS, **SMALL, drafter=TinyHeadDrafter(), out=tmp_path)
    assert not [*tmp_path.iterdir()]


def test_an_unfinished_head_is_replaced(tmp_path: Path) -> None:
    with failing_after(60):
        run(TinyHeadDrafter(), out=tmp_path)
    assert [*tmp_path.glob("head_rows-*")]
    assert run(None, max_new_tokens=2, out=tmp_path, overwrite=True).head is None
    assert cp.load_trace(tmp_path).head is None and not [*tmp_path.glob("head_*")]


def test_a_run_goes_on_with_the_edits_of_its_head(tmp_path: Path) -> None:
    """The head computes the rows of the journal again, with the edits that they had: always, or in early steps."""
    about = dict(request_id=0, own_fingerprint=True)
    edits = [
        cp.interventions.add(torch.linspace(-3, 3, 32), site=site, layer=layer, steps=steps, **about)
        for site, layer, steps in (("S", 3, None), ("S", 1, None), ("T", 4, range(9)))
    ]
    whole = run(TinyHeadDrafter(), interventions=edits)
    with failing_after(45):
        run(TinyHeadDrafter(), interventions=edits, out=tmp_path)
    (last,) = {part["step"] for part in read_journal(tmp_path).parts[-1:]}
    again = cp.resume(tmp_path, loaded(), drafter=TinyHeadDrafter(), interventions=edits, progress=False)
    assert again.committed(0) == whole.committed(0) and again.digest(0) == whole.digest(0)
    ours, theirs = (head_of(t).rows(0, "committed") for t in (again, whole))
    count = min(len(ours), len(theirs))
    assert last >= 9 and (ours.step[:count] > last).sum() > 2
    pair = (head_of(t).vectors("S", 2, rows.iloc[:count]) for t, rows in ((again, ours), (whole, theirs)))
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-3)
