"""A trace on disk: the same as in memory, whole or absent, whatever happens while it is written."""

import errno
import json
import os
import shutil
from pathlib import Path

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.ops.equality import bitwise
from cacheprobe.trace.manifest import FORMAT_VERSION, TraceError
from cacheprobe.trace.storage import RunFiles
from cacheprobe.trace.stored import StoredRun
from tests.tiny import PROMPTS, SMALL, loaded

EXAMPLE = cp.tasks.CoinFlip(people=2, shots=1).examples(1, seed=4)[0]


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    requests = [cp.Request(PROMPTS[0], is_deterministic=True), *PROMPTS[1:]]
    return cp.run(loaded(), requests, **SMALL, drafter=cp.drafters.EarlyExit(layer=1))


@pytest.fixture
def saved(trace: cp.Trace, tmp_path: Path) -> Path:
    return trace.save(tmp_path / "run")


def test_round_trip(trace: cp.Trace, saved: Path) -> None:
    again = cp.load_trace(saved)
    assert repr(again) == repr(trace) and again.meta == json.loads(json.dumps(trace.meta))
    for i in range(5):
        assert again.committed(i) == trace.committed(i) and again.text(i) == trace.text(i)
        assert again.digest(i) == trace.digest(i)
        assert again.requests[i] == trace.requests[i]
        pd.testing.assert_frame_equal(again.ledger(i), trace.ledger(i))
        rows = trace.rows(i, "rolled_back").query("phase == 'verify'")
        assert bitwise(again.vectors("T", 2, again.rows(i).loc[rows.index]), trace.vectors("T", 2, rows))
    for name in ("events", "hypotheses"):
        ours, theirs = getattr(trace, name)(), getattr(again, name)()
        lists = [column for column in ours if isinstance(ours[column].iloc[0], list) or column.startswith("top_")]
        pd.testing.assert_frame_equal(theirs.drop(columns=lists), ours.drop(columns=lists), check_dtype=False)
        for column in lists:
            assert [list(value) for value in theirs[column]] == [list(value) for value in ours[column]]
    pd.testing.assert_frame_equal(cp.analysis.agreement(again), cp.analysis.agreement(trace))


def test_examples_survive(tmp_path: Path) -> None:
    from tests.models.test_load_model import tokenizer

    # a word tokenizer knows "heads" and "tails", so that the task can be scored
    model = cp.load_model(loaded().bridge, tokenizer=tokenizer())
    try:
        run = cp.run(model, [EXAMPLE], **SMALL)
    finally:
        model.bridge.tokenizer = None
    assert cp.load_trace(run.save(tmp_path)).requests[0].example == EXAMPLE
    assert run.meta["behaviour"]["num_examples"] == 1 and 0 < run.meta["behaviour"]["answer_mass"] < 1


def test_activation_cache_needs_the_model(saved: Path) -> None:
    with pytest.raises(ValueError, match="load_trace\\(dir, model="):
        cp.analysis.to_activation_cache(cp.load_trace(saved), 0)
    assert cp.analysis.to_activation_cache(cp.load_trace(saved, model=loaded()), 0)["resid_post", 0].shape == (
        1,
        24,
        32,
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "manifest.json").unlink(), "not saved to its end; run it again"),
        (lambda d: (d / "manifest.json").write_text('{"format": "cacheprobe tr'), "not readable as JSON"),
        (lambda d: (d / "manifest.json").write_text("[]"), "is not a cacheprobe trace"),
        (lambda d: next(d.glob("states-*")).unlink(), "is missing"),
        (lambda d: os.truncate(next(d.glob("rows-*")), 100), "bytes instead of"),
        (lambda d: shutil.rmtree(d), "is not a directory"),
    ],
)
def test_damage_is_named(saved: Path, damage, message: str) -> None:
    damage(saved)
    with pytest.raises(TraceError, match=message) as caught:
        cp.load_trace(saved)
    assert str(saved) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("version", "written_by", "reader"),
    [
        (FORMAT_VERSION + 1, {"cacheprobe": "0.3.1"}, "0.3.1"),
        (FORMAT_VERSION - 1, {}, "commit 29bbc91e"),
        (True, {}, "commit 29bbc91e"),
    ],
)
def test_another_format_is_refused_with_the_version_that_reads_it(
    saved: Path, version: object, written_by: dict[str, str], reader: str
) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    del manifest["cacheprobe"]
    (saved / "manifest.json").write_text(json.dumps({**manifest, **written_by, "format_version": version}))
    said = f"{saved} is of trace format {version}, this cacheprobe reads {FORMAT_VERSION}; read it with .* {reader}"
    for opened in (cp.load_trace, StoredRun):
        with pytest.raises(TraceError, match=said):
            opened(saved)


def test_saving_over_a_run_replaces_it_whole(trace: cp.Trace, saved: Path) -> None:
    (saved / "report.html").write_text("of the run before")
    other = cp.run(loaded(), PROMPTS[:2], **SMALL)
    other.save(saved, overwrite=True)
    assert len(cp.load_trace(saved).requests) == 2
    names = {p.name for p in saved.iterdir()}
    assert names == {"manifest.json", *json.loads((saved / "manifest.json").read_text())["files"]}


def test_a_failed_save_leaves_the_earlier_run(trace: cp.Trace, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk at every single file: the directory holds the same files as before, and nothing of the new run."""
    whole, before = RunFiles._write_whole, sorted(saved.iterdir())
    other = cp.run(loaded(), PROMPTS[:2], **SMALL)
    for fail_at in range(len(before)):
        count = 0

        def full_disk(self: RunFiles, name: str, fill, fail_at: int = fail_at) -> None:
            nonlocal count
            count += 1
            if count > fail_at:
                (self.staging / ".tmpA1b2C3").write_bytes(b"half")
                raise OSError(errno.ENOSPC, "No space left on device")
            whole(self, name, fill)

        monkeypatch.setattr(RunFiles, "_write_whole", full_disk)
        with pytest.raises(TraceError, match="cannot be saved in .*run: No space left.*is unchanged"):
            other.save(saved, overwrite=True)
        assert sorted(saved.iterdir()) == before and cp.load_trace(saved).digest(0) == trace.digest(0)
    monkeypatch.setattr(RunFiles, "_write_whole", whole)
    other.save(saved, overwrite=True)
    assert len(cp.load_trace(saved).requests) == 2 and not [*saved.glob(".*")]


# -- lazy relations


def test_a_relation_has_the_lines_of_the_table(tmp_path: Path) -> None:
    """Of a run in memory, a saved one, and one that is recorded to disk."""
    trace = cp.run(loaded(), PROMPTS, drafter=cp.drafters.NGram(), **SMALL)
    trace.save(tmp_path / "saved")
    recorded = cp.run(loaded(), PROMPTS, drafter=cp.drafters.NGram(), **SMALL, out=tmp_path / "recorded")
    lengths = {"rows": len(trace.rows()), "events": len(trace.events())}
    for name in ("rows", "hypotheses", "events", "ledger", "tokens"):
        whole = trace.table(name).df()
        assert len(whole) and len(whole) == lengths.get(name, len(whole))
        left_out = ["seconds"] if name == "events" else []
        for other in (cp.load_trace(tmp_path / "saved"), recorded):
            assert other.table_files[name].startswith(name)
            pd.testing.assert_frame_equal(other.table(name).df().drop(columns=left_out), whole.drop(columns=left_out))


def test_a_query_reads_no_whole_table(tmp_path: Path) -> None:
    trace = cp.run(loaded(), PROMPTS, **SMALL)
    trace.save(tmp_path)
    opened = cp.load_trace(tmp_path)
    found = opened.table("hypotheses").filter("layer = 1 and rank = 0").project("request_id, position, token").df()
    expected = trace.recorded_readings.query("layer == 1 and rank == 0")
    assert found.token.tolist() == expected.token.tolist() and found.position.tolist() == expected.position.tolist()
    assert callable(opened.stored_readings)  # DuckDB alone has read them


def test_a_relation_is_of_the_trace_as_it_is_now(tmp_path: Path) -> None:
    cp.run(loaded(), PROMPTS, **SMALL).save(tmp_path)
    opened = cp.load_trace(tmp_path)
    opened.hypothesis_table = opened.recorded_readings.head(3)
    assert len(opened.table("hypotheses").df()) == 3


def test_what_a_relation_cannot_be_of_is_refused(tmp_path: Path) -> None:
    trace = cp.run(loaded(), PROMPTS, capture=None, **SMALL)
    with pytest.raises(ValueError, match="unknown table 'row'; tables are rows, .*did you mean"):
        trace.table("row")
    with pytest.raises(ValueError, match="this run has no table of hypotheses"):
        trace.table("hypotheses")
    trace.save(tmp_path)
    opened = cp.load_trace(tmp_path)
    path = next(tmp_path.glob("rows-*.parquet"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(TraceError, match=rf"{path.name} was changed after the run was saved"):
        opened.table("rows")
