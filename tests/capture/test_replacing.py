"""Runs that replace a finished run while they are recorded to disk: the old run stays whole until the new one is."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import cacheprobe as cp
from cacheprobe.trace import places
from cacheprobe.trace.journal import read_journal
from cacheprobe.trace.manifest import JOURNAL
from cacheprobe.trace.recording.observers import ProgressBar
from tests.capture.recorded_run import LONG, Stopped, failing_after
from tests.capture.test_to_disk import _part_each_round, require_equal  # noqa: F401  (a fixture)
from tests.models.heads.tiny_head import TinyHeadDrafter
from tests.tiny import PROMPTS, SMALL, loaded

SETTINGS: dict[str, Any] = {**LONG, "max_new_tokens": 12, "deterministic": True}


@pytest.fixture
def old(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    """A finished run with a report, and the bytes of its files by name."""
    directory = tmp_path / "run"
    cp.run(loaded(), PROMPTS[:2], **SMALL).save(directory)
    (directory / "report.html").write_text("a report")
    return directory, {path.name: path.read_bytes() for path in directory.iterdir()}


def require_old(directory: Path, files: dict[str, bytes]) -> None:
    """The old run is what is loaded, with the bytes that it had."""
    assert {name: (directory / name).read_bytes() for name in files} == files
    assert len(cp.load_trace(directory).requests) == 2


def test_the_old_run_stays_while_the_new_one_grows(old: tuple[Path, dict[str, bytes]]) -> None:
    directory, files = old
    whole = cp.run(loaded(), PROMPTS, **SETTINGS)
    settings = {name: value for name, value in SETTINGS.items() if name != "progress"}
    stream = cp.stream(loaded(), PROMPTS, **settings, capture="STCZ", out=directory, overwrite=True)
    for _ in stream:
        if stream._trace is None and (directory / JOURNAL).exists():
            require_old(directory, files)
    journal_parts = len([name for name in os.listdir(directory) if name.startswith("states-")])
    require_equal(cp.load_trace(directory, loaded()), whole)
    assert journal_parts > 3 and not {path.name for path in directory.iterdir()} & ({*files} - {"manifest.json"})


def test_a_killed_one_is_continued_and_then_replaces_it(old: tuple[Path, dict[str, bytes]]) -> None:
    directory, files = old
    whole = cp.run(loaded(), PROMPTS, **SETTINGS)
    with failing_after(20):
        cp.run(loaded(), PROMPTS, **SETTINGS, out=directory, overwrite=True)
    require_old(directory, files)
    assert read_journal(directory) is not None
    again = cp.resume(directory, loaded(), progress=False)
    assert all(again.digest(i) == whole.digest(i) and again.committed(i) == whole.committed(i) for i in range(5))
    assert len(cp.load_trace(directory).requests) == 5 and not (directory / "report.html").exists()


@pytest.mark.parametrize("drafter", [None, TinyHeadDrafter()], ids=str)
def test_one_that_ctrl_c_stopped_is_beside_it(
    drafter: TinyHeadDrafter | None, old: tuple[Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, files = old
    committed, seen = ProgressBar.on_commit, iter(range(10**6))

    def press(self: ProgressBar, *given: Any) -> None:
        committed(self, *given)
        if next(seen) == 8:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(ProgressBar, "on_commit", press)
        with pytest.raises(cp.Interrupted) as caught:
            cp.run(loaded(), PROMPTS, **SETTINGS, drafter=drafter, out=directory, overwrite=True)
    require_old(directory, files)
    assert {path.name for path in directory.iterdir()} == {*files}
    beside = directory.with_name("run-stopped")
    assert caught.value.directory == beside and caught.value.num_cancelled
    stopped = cp.load_trace(beside, loaded())
    require_equal(stopped, caught.value.trace)
    assert (stopped.head is None) == (drafter is None)
    assert sum(map(len, stopped.tokens.values())) > 8 and cp.verify(stopped, progress=False).is_equal


def test_a_kill_after_the_new_manifest_leaves_no_file_of_the_old_run(
    old: tuple[Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next writer of the directory deletes them, with the old report."""
    directory, files = old
    clean, left = places._clean, []

    def stop(where: Path, note: Any) -> None:
        if note.get("replaces"):
            left.append((where / places.LOCK).read_text())
            raise Stopped
        clean(where, note)

    with monkeypatch.context() as patched:
        patched.setattr(places, "_clean", stop)
        with pytest.raises(Stopped):
            cp.run(loaded(), PROMPTS[:1], **SETTINGS, out=directory, overwrite=True)
    (directory / places.LOCK).write_text(left[0])  # a process that is killed does not delete it
    assert {*files} <= {path.name for path in directory.iterdir()}
    cp.resume(directory, loaded(), progress=False)
    assert not {path.name for path in directory.iterdir()} & ({*files} - {"manifest.json"})


def test_a_kill_just_before_the_new_manifest_loses_no_part(
    old: tuple[Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, files = old
    finish = places.Recording.finish

    def stop() -> list[str]:
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(places.Recording, "finish", lambda place, write: finish(place, stop))
        with pytest.raises(Stopped):
            cp.run(loaded(), PROMPTS, **SETTINGS, out=directory, overwrite=True)
    require_old(directory, files)
    parts = [path.name for path in directory.iterdir() if path.name.startswith("states-")]
    whole = cp.run(loaded(), PROMPTS, **SETTINGS)
    again = cp.resume(directory, loaded(), progress=False)
    assert all(again.digest(i) == whole.digest(i) for i in range(5)) and len(parts) > 3
    assert not {path.name for path in directory.iterdir()} & ({*files} - {"manifest.json"})


def test_a_stopped_run_of_the_current_folder_has_a_name(old: tuple[Path, dict[str, bytes]], monkeypatch) -> None:
    monkeypatch.chdir(old[0])
    assert places.free_beside(Path(".")).name == "run-stopped"
