"""Saving a run: one process at a time, nothing of others deleted, and nothing lost by a kill or a full disk."""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.trace.manifest import TraceError, damaged_files
from cacheprobe.trace.places import recording, require_free
from tests.tiny import PROMPTS, SMALL, loaded


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS[:2], **SMALL)


@pytest.fixture
def saved(trace: cp.Trace, tmp_path: Path) -> Path:
    return trace.save(tmp_path / "run")


HOLDS = """
import sys
from pathlib import Path
from cacheprobe.trace.places import recording
with recording(Path(sys.argv[1]), "0a1b2c3d", overwrite=True, is_kept=False) as place:
    (place.staging / ".tmpX1y2Z3").write_bytes(b"half")
    (Path(sys.argv[1]) / "rows-0a1b2c3d.parquet").write_bytes(b"whole, and of no manifest")
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_saver_is_refused_by_name_and_a_killed_one_leaves_nothing(trace: cp.Trace, saved: Path) -> None:
    """Before, both could succeed and leave a manifest whose files were deleted."""
    before = sorted(saved.iterdir())
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(saved)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        for attempt in (lambda: trace.save(saved, overwrite=True), lambda: require_free(saved, overwrite=True)):
            with pytest.raises(TraceError, match=f"{saved} is being written by process {other.pid} on .*; wait for it"):
                attempt()
        assert cp.load_trace(saved).digest(0) == trace.digest(0)
        other.kill()
    assert len(list(saved.iterdir())) == len(before) + 3
    require_free(saved, overwrite=True)
    assert sorted(saved.iterdir()) == before
    trace.save(saved, overwrite=True)
    assert damaged_files(saved) == (7, []) and not [*saved.glob(".*")]


def test_a_save_in_the_same_process_is_refused_too(trace: cp.Trace, saved: Path) -> None:
    with recording(saved, "0a1b2c3d", overwrite=True, is_kept=False):
        with pytest.raises(TraceError, match=f"is being written by process {os.getpid()} on"):
            trace.save(saved, overwrite=True)
    assert damaged_files(saved) == (7, [])


def test_files_that_only_look_like_those_of_a_run_stay(trace: cp.Trace, saved: Path) -> None:
    """Before, every file named like rows-2024.parquet was deleted."""
    theirs = ["rows-2024.parquet", "rows-20240131.parquet", "states-mine.safetensors", "tokens-1.parquet.tmp"]
    for name in theirs:
        (saved / name).write_text("of a user")
    trace.save(saved, overwrite=True)
    assert damaged_files(saved) == (7, [])
    assert all((saved / name).read_text() == "of a user" for name in theirs)
    assert len(list(saved.iterdir())) == 7 + len(theirs)
    (saved / "manifest.json").unlink()  # as if an older version had been killed
    trace.save(saved)
    assert damaged_files(saved) == (7, []) and all((saved / name).exists() for name in theirs)


@contextmanager
def files_up_to(count: int) -> Iterator[None]:
    """Lets no file of this process grow beyond `count` bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("count", "capture"), [(10, "SZ"), (10_000, "SZ"), (3000, "Z")])
def test_a_disk_that_takes_no_more_is_named_and_nothing_is_lost(
    saved: Path, tmp_path: Path, count: int, capture: str
) -> None:
    """In the lock file, in the states, in tables."""
    trace = cp.run(loaded(), PROMPTS[:2], **SMALL, capture=capture)
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with files_up_to(count), pytest.raises(TraceError, match=f"cannot be saved in {saved}: .*too large.*unchanged"):
        trace.save(saved, overwrite=True)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    with files_up_to(count), pytest.raises(TraceError, match="cannot be saved in"):
        trace.save(tmp_path / "new" / "run")
    assert not (tmp_path / "new" / "run").exists()
    trace.save(saved, overwrite=True)


def test_a_place_that_cannot_be_written_is_refused_at_once(trace: cp.Trace, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        for attempt in (trace.save, require_free):
            with pytest.raises(TraceError, match=f"{tmp_path / 'file'} is a file; choose a directory"):
                attempt(place)
    with tempfile.TemporaryDirectory() as name, as_a_user(Path(name)):
        for place in (Path(name), Path(name) / "a" / "run"):
            for attempt in (trace.save, require_free):
                with pytest.raises(TraceError, match=f"{name} is read-only; choose another directory"):
                    attempt(place)


@contextmanager
def as_a_user(read_only: Path) -> Iterator[None]:
    """Lets this process be another user than root, to whom a folder is read-only."""
    read_only.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:  # os.access asks for the real user
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if is_root:
            os.setresuid(0, 0, 0)
        read_only.chmod(0o755)


def test_a_run_that_is_overwritten_while_it_is_read_says_so(trace: cp.Trace, saved: Path) -> None:
    opened = cp.load_trace(saved)
    trace.save(saved, overwrite=True)
    with pytest.raises(TraceError, match=r"states-.* is gone since the run was opened: another run was saved in its"):
        opened.states("S", 0, 0)
    assert cp.load_trace(saved).digest(0) == trace.digest(0)


def test_a_run_saved_over_itself_keeps_its_states_without_writing_them(saved: Path) -> None:
    """As after the readings of lens="later" were made: the files of states get new names, and are compared first."""
    shard = next(saved.glob("states-*"))
    number, loaded_again = shard.stat().st_ino, cp.load_trace(saved)
    digest = loaded_again.digest(0)
    cp.load_trace(saved).save(saved, overwrite=True)
    new = next(saved.glob("states-*"))
    assert new.stat().st_ino == number and new.name != shard.name and damaged_files(saved) == (7, [])
    assert cp.load_trace(saved).digest(0) == digest
    data = bytearray(new.read_bytes())
    data[-1] ^= 1
    new.write_bytes(data)
    with pytest.raises(TraceError, match=f"{new.name} was changed after the run was saved: bytes 0 to"):
        cp.load_trace(saved).save(saved, overwrite=True)
    assert new.exists()


# -- kills

KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from cacheprobe.trace.trace import load_trace
import filelock, pyarrow.parquet, safetensors.torch

source, target = Path(sys.argv[1]), Path(sys.argv[2])
CHANGES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "open", "shutil.rmtree"}

def kill_at(number):
    count = 0
    def hook(event, arguments):
        nonlocal count
        if event in CHANGES and str(arguments[0]).startswith(str(target)):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

for number in range(1, 400):
    shutil.copytree(source, target / str(number))
    child = os.fork()
    if not child:
        target = target / str(number)
        kill_at(number)
        load_trace(source).save(target, overwrite=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        print(number)
        break
    assert os.WIFSIGNALED(status), status
"""
"""Forks a child for each change of a file that the work makes, and kills the child just before that change."""


def tables(directory: Path) -> list[pd.DataFrame]:
    trace = cp.load_trace(directory)
    kept = (trace.row_table, trace.recorded_readings, trace.event_table, trace.ledger_table)
    return [table.map(as_list) for table in kept if table is not None]


def as_list(cell: object) -> object:
    return list(cell) if isinstance(cell, np.ndarray) else cell


def test_killed_before_any_change_of_a_file_the_run_is_whole(trace: cp.Trace, tmp_path: Path) -> None:
    source, copies = trace.save(tmp_path / "run"), tmp_path / "copies"
    copies.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(source), str(copies)], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    last, wanted, want = int(done.stdout), tables(source), cp.load_trace(source)
    assert last > 30
    for number in range(1, last + 1):
        copy = copies / str(number)
        again = cp.load_trace(copy)
        for ours, theirs in zip(tables(copy), wanted, strict=True):
            pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
        assert again.meta == want.meta and again.tokens == want.tokens and again.texts == want.texts
        assert all(torch.equal(again.states(s, 1, 0), want.states(s, 1, 0)) for s in "STC")
        if number < last:
            require_free(copy, overwrite=True)  # deletes what the killed save left
        assert {path.name for path in copy.iterdir()} == {"manifest.json", *cp.load_trace(copy).store.files.sizes}
        assert not damaged_files(copy)[1]
