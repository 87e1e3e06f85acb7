"""The files of a run are written while the model goes on: in their order, waited for, and named in the journal."""

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.trace.recording import disk_writer
from cacheprobe.trace.recording.recorder import Recorder
from tests.capture.recorded_run import LONG
from tests.tiny import PROMPTS, SMALL, loaded


@pytest.fixture(autouse=True)
def _part_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_writer, "SECONDS", 0.0)
    monkeypatch.setattr(disk_writer, "_SHARE", 0.0)


def test_the_recorder_waits_until_the_part_before_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    write, take = disk_writer.RunFiles._write_whole, Recorder.take

    def slowly(self: Any, name: str, fill: Any) -> None:
        time.sleep(0.05)
        write(self, name, fill)
        events.append("written" if name.startswith("states-") else "")

    def noted(self: Any) -> Any:
        events.append("taken" if self.num_bytes else "")
        return take(self)

    monkeypatch.setattr(disk_writer.RunFiles, "_write_whole", slowly)
    monkeypatch.setattr(Recorder, "take", noted)
    cp.run(loaded(), PROMPTS[:2], **{**SMALL, "max_new_tokens": 4}, out=tmp_path, memory_budget=1)
    ordered = [event for event in events if event]
    assert len(ordered) > 4 and ordered == ["taken", "written"] * (len(ordered) // 2)


def test_the_model_runs_while_a_part_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first file of states is not written before the second round has ended."""
    rounds, second = itertools.count(1), threading.Event()
    write, end_round = disk_writer.RunFiles._write_whole, disk_writer.DiskWriter.end_round

    def later(self: Any, name: str, fill: Any) -> None:
        if name.startswith("states-"):
            assert second.wait(60), "the second round has not ended"
        write(self, name, fill)

    def noted(self: Any, states: Any, **given: Any) -> None:
        if next(rounds) == 2:
            second.set()
        end_round(self, states, **given)

    monkeypatch.setattr(disk_writer.RunFiles, "_write_whole", later)
    monkeypatch.setattr(disk_writer.DiskWriter, "end_round", noted)
    cp.run(loaded(), PROMPTS[:2], **{**SMALL, "max_new_tokens": 4}, out=tmp_path)


def test_a_slow_disk_gets_lines_of_the_journal_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder is full again before the files of the part before are written."""
    lines, append, write = [], disk_writer.append_part, disk_writer.RunFiles._write_whole
    monkeypatch.setattr(disk_writer, "append_part", lambda at, part: (lines.append(part["step"]), append(at, part)))
    monkeypatch.setattr(disk_writer.RunFiles, "_write_whole", lambda *given: (time.sleep(0.02), write(*given))[1])
    trace = cp.run(loaded(), PROMPTS[:2], **{**SMALL, "max_new_tokens": 12}, out=tmp_path, memory_budget=1)
    assert len(lines) > trace.events().step.nunique() / 3


def test_a_line_of_the_journal_tells_nothing_of_later_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written in the background, while the run goes on: here two rounds later."""
    lines, append, end_round = [], disk_writer.append_part, disk_writer.DiskWriter.end_round
    rounds, written, numbers = threading.Semaphore(0), threading.Semaphore(0), itertools.count(1)

    def late(directory: Path, part: dict[str, Any]) -> None:
        for _ in range(2):
            rounds.acquire(timeout=0.1)  # none comes after the last round
        lines.append((part["step"], [step for _, step in part["preemptions"]]))
        append(directory, part)
        written.release()

    def noted(self: Any, states: Any, **given: Any) -> None:
        end_round(self, states, **given)
        rounds.release()
        if next(numbers) % 4 == 0:  # a quick machine would end the run before the second line
            written.acquire(timeout=1)

    monkeypatch.setattr(disk_writer, "append_part", late)
    monkeypatch.setattr(disk_writer.DiskWriter, "end_round", noted)
    cp.run(loaded(), PROMPTS, **(LONG | {"max_kv_tokens": 90, "max_new_tokens": 24}), capture="S", out=tmp_path)
    assert any(preempted for _, preempted in lines[:-1])
    assert all(step <= last for last, preempted in lines for step in preempted)


def test_parts_whose_passes_end_before_a_layer_keep_their_rows(tmp_path: Path) -> None:
    """Draft passes end after layer 0, so a small part may have no pass that reached layer 2."""
    capture = cp.CaptureConfig(sites="Z", heads=("z",), layers=(2,))
    shape: dict[str, Any] = dict(window=3, group=2, capacity=64, max_new_tokens=6, progress=False)
    prompts = [[3, 10, 17, 24, 31, 38, 45, 52], [4, 9, 30, 22]]
    shape |= dict(capture=capture, drafter=cp.drafters.EarlyExit(layer=0))
    kept = cp.run(loaded("llama"), prompts, **shape)
    read = cp.run(loaded("llama"), prompts, **shape, out=tmp_path / "run", memory_budget=1000)
    for request in (0, 1):
        found, expected = read.heads("z", 2, request), kept.heads("z", 2, request)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
