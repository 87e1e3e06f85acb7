"""A shard is there whole or not at all, in a folder and in an object store, whoever is cut off when."""

import io
import json
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cacheprobe.sweeps import index
from cacheprobe.sweeps.events import Event, EventLog
from cacheprobe.sweeps.storage.store import SHARDS, SweepStore
from cacheprobe.trace.manifest import MANIFEST
from tests.sweeps.test_sweeps import SMALL

FILES = {"rows.parquet": b"rows", "states.safetensors": b"states", MANIFEST: b"{}"}


def build(directory: Path, files: dict[str, bytes] = FILES) -> None:
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)


def held(store: SweepStore, digest: str) -> dict[str, bytes]:
    return {Path(p).name: store.fs.cat_file(p) for p in store.fs.find(store.path(f"{SHARDS}/{digest}"))}


@pytest.fixture(params=["folder", "object store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SweepStore:
    return SweepStore(tmp_path / "s" if request.param == "folder" else f"memory://{tmp_path.name}")


class Cut(BaseException):
    """What a kill looks like from within."""


def test_a_commit_that_is_cut_leaves_nothing_that_counts(store: SweepStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for last in range(len(FILES)):
        puts = 0

        def cut(*args: Any, real: Any = store.fs.pipe_file, last: int = last) -> None:
            nonlocal puts
            puts += 1
            if puts > last:
                raise Cut
            real(*args)

        def cut_build(directory: Path, last: int = last) -> None:
            build(directory, dict(list(FILES.items())[:last]))
            raise Cut

        with monkeypatch.context() as patch, pytest.raises(Cut):
            patch.setattr(store.fs, "pipe_file", cut)
            store.commit("aa", cut_build if store.is_local else build)
        assert store.committed() == set()
    assert store.commit("aa", build) == sum(map(len, FILES.values()))
    assert store.committed() == {"aa"} and held(store, "aa") == FILES


def test_a_shard_that_is_there_is_left_and_half_a_one_is_replaced(store: SweepStore) -> None:
    store.commit("aa", build)
    store.commit("aa", build)  # by another worker, which began when nothing was there
    assert held(store, "aa") == FILES
    store.write(f"{SHARDS}/bb/rows.parquet", b"half")
    assert store.committed() == {"aa"}
    store.commit("bb", build)
    assert store.committed() == {"aa", "bb"} and held(store, "bb") == FILES
    assert not store.is_local or not list(Path(store.path(".staging")).iterdir())


def test_the_index_is_read_in_its_own_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of pyarrow that still held the bytes when Python ended aborted one of five commands, exit code 134."""
    import cacheprobe as cp

    cp.sweep(SMALL, out=tmp_path / "s", progress=False)
    threads = set()

    class Watched(io.BytesIO):
        def read(self, *args: Any) -> bytes:
            threads.add(threading.get_ident())
            return super().read(*args)

    monkeypatch.setattr(index.io, "BytesIO", Watched)
    assert len(cp.load_sweep(tmp_path / "s")) == 3
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("is_folder_gone", [False, True])
def test_a_write_that_fails_costs_one_event(tmp_path: Path, is_folder_gone: bool) -> None:
    """The next line had been written behind the half of the failed one, so that neither could be read."""
    store = SweepStore(str(tmp_path))
    with EventLog(store) as log:
        assert log._file is not None
        path = Path(store.path(log.name))

        def takes_half(line: str) -> int:
            path.write_text(line[: len(line) // 2], encoding="utf-8")
            raise OSError("no space left")

        log._file.write = takes_half
        if is_folder_gone:
            store.path = lambda name: str(tmp_path / "gone" / name)  # pyright: ignore[reportAttributeAccessIssue]
        log.write(Event("started", "a"))
        log.write(Event("ended", "b"))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == (1 if is_folder_gone else 2)
    assert is_folder_gone or json.loads(lines[1])["digest"] == "b"


def test_a_damaged_index_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged bytes inside a page are an OSError to Arrow, and no ArrowInvalid."""
    table = pa.table({field.name: pa.nulls(2000, field.type) for field in index.SCHEMA}).cast(index.SCHEMA)
    names = pa.array([f"{number:064x}" for number in range(2000)])
    table = table.set_column(0, index.SCHEMA.field(0), names.cast(index.SCHEMA.field(0).type))
    sink = io.BytesIO()
    pq.write_table(table, sink)
    whole, store = sink.getvalue(), SweepStore(str(tmp_path))
    raised = set()
    for start in range(4, len(whole) // 2, 997):
        damaged = whole[:start] + b"\xff" * 64 + whole[start + 64 :]
        store.write(index.INDEX, damaged)
        try:
            pq.ParquetFile(io.BytesIO(damaged)).read(use_threads=False)
        except Exception as error:
            raised.add(type(error))
            assert index._stored(store).num_rows == 0
    assert OSError in raised
