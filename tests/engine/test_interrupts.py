"""Ctrl-C in the middle of a run: what was computed is handed over or saved, and a second Ctrl-C ends at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cacheprobe as cp
from cacheprobe.cli.app import main
from cacheprobe.core import terminal
from cacheprobe.trace.recording.observers import ProgressBar
from tests.tiny import PROMPTS, SMALL, loaded

LENGTHS = (2, 30, 30, 30, 30)
SHAPES: dict[str, Any] = dict(window=4, group=2, capacity=96, deterministic=[1], max_batch=3, progress=False)


def requests() -> list[cp.Request]:
    return [
        cp.Request(prompt, cp.SamplingParams(max_new_tokens=length))
        for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
    ]


@pytest.fixture
def press_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function of how many committed tokens Ctrl-C is pressed after, and how often."""
    committed = ProgressBar.on_commit

    def press(tokens: int, times: int = 1) -> None:
        seen = 0

        def on_commit(self: ProgressBar, request_id: int, step: int, start: int, ids: Any, roles: Any) -> None:
            nonlocal seen
            committed(self, request_id, step, start, ids, roles)
            seen += len(ids)
            if seen >= tokens > seen - len(ids):
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(ProgressBar, "on_commit", on_commit)

    return press


def test_run_hands_over_what_was_computed(press_at: Any) -> None:
    """Finished requests are complete, the others a prefix of what they would have been, bit for bit."""
    whole = cp.run(loaded(), requests(), **SHAPES)
    press_at(20)
    with pytest.raises(cp.Interrupted, match="1 of 5 requests finished, 4 cancelled") as caught:
        cp.run(loaded(), requests(), **SHAPES)
    trace = caught.value.trace
    assert isinstance(caught.value, KeyboardInterrupt) and caught.value.num_cancelled == 4
    assert list(trace.meta["finish"].values()) == ["length", *["cancelled"] * 4]
    assert trace.digest(0) == whole.digest(0)
    lengths = [len(trace.committed(i)) for i in range(5)]
    assert lengths[0] == 2 and sum(lengths) >= 20 and max(lengths[1:]) < 30 and lengths[4] == 0
    assert all(trace.committed(i) == whole.committed(i)[: lengths[i]] for i in range(5))
    assert cp.verify(trace, progress=False).is_equal
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_at_once(press_at: Any) -> None:
    press_at(10, times=2)
    with pytest.raises(KeyboardInterrupt) as caught:
        cp.run(loaded(), requests(), **SHAPES)
    assert not isinstance(caught.value, cp.Interrupted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_drafter_that_hangs_is_ended_and_what_was_recorded_is_kept(tmp_path: Path) -> None:
    asked: list[int] = []

    def hang_once(state: Any) -> list[int]:
        asked.append(state.request_id)
        if len(asked) == 40:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()
        return [1, 2]

    drafter, out = cp.drafters.Scripted(hang_once), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        cp.run(loaded(), requests(), **SHAPES, drafter=drafter, out=out, memory_budget="100kB")
    recorded = cp.load_trace(out)
    assert sum(map(len, recorded.tokens.values())) > 20
    resumed, whole = cp.resume(out, loaded(), drafter=drafter, progress=False), cp.run(loaded(), requests(), **SHAPES)
    assert [resumed.committed(i) for i in range(5)] == [whole.committed(i) for i in range(5)]
    assert all(resumed.committed(i)[: len(recorded.committed(i))] == recorded.committed(i) for i in range(5))


def test_ctrl_c_before_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheprobe.engine import execution

    class Guard(execution.RunGuard):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(execution, "RunGuard", Guard)
    with pytest.raises(cp.Interrupted, match="0 of 5 requests finished, 5 cancelled") as caught:
        cp.run(loaded(), requests(), **SHAPES)
    assert not len(caught.value.trace.rows(0)) and not len(caught.value.trace.events())


def test_the_oracle_ends_at_once(press_at: Any) -> None:
    press_at(10)
    with pytest.raises(KeyboardInterrupt) as caught:
        cp.reference(loaded(), requests(), **SHAPES)
    assert not isinstance(caught.value, cp.Interrupted)


def test_a_handler_of_the_programs_own_is_kept(press_at: Any) -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        press_at(10)
        trace = cp.run(loaded(), requests(), **SHAPES)
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [signal.SIGINT] and set(trace.meta["finish"].values()) <= {"length", "stop"}


def test_a_run_in_another_thread_is_left_alone() -> None:
    traces: list[cp.Trace] = []
    thread = threading.Thread(target=lambda: traces.append(cp.run(loaded(), PROMPTS[:1], **SMALL)))
    thread.start()
    thread.join()
    assert len(traces[0].committed(0)) == SMALL["max_new_tokens"]


def test_accuracy_is_that_of_finished_requests(press_at: Any) -> None:
    """An answer that was cut off is not a wrong one."""
    model = cp.load_model("coinflip-plain", progress=False)
    asked = cp.tasks.CoinFlip(people=2).examples(n=6, seed=0)
    press_at(4)
    with pytest.raises(cp.Interrupted) as caught:
        cp.run(model, asked, max_batch=2, max_new_tokens=2, capacity=96, progress=False)
    trace = caught.value.trace
    finished = [end for end in trace.meta["finish"].values() if end != "cancelled"]
    assert 0 < len(finished) < 6 and trace.meta["behaviour"]["num_examples"] == len(finished)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A function that runs `cacheprobe run`, in which Ctrl-C is pressed so many times after three tokens, and returns
    its exit status and what it wrote."""

    def run(out: Path, times: int, *words: str) -> tuple[int, str, str]:
        seen = 0

        def advance(self: terminal.Progress, units: int = 1, note: str = "") -> None:
            nonlocal seen
            seen += units
            if seen >= 3 > seen - units:
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(terminal.Progress, "advance", advance)
        given = "--model coinflip-plain --dtype float32 --task coin_flip:people=2 --n 3".split()
        given += "--max-new-tokens 30 --capacity 128 --capture SZ".split()
        monkeypatch.setattr(sys, "argv", ["cacheprobe", "run", "--out", str(out), *given, *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


def test_the_command_saves_what_is_finished(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    """Before, Ctrl-C in the middle of `cacheprobe run` left nothing."""
    status, said, told = command(tmp_path / "run", 1, "--max-batch", "1")
    assert status == 130, told
    assert "stopping after this pass; Ctrl-C again ends at once" in told
    assert "requests finished; the others end where they stood" in told
    assert said.endswith(f"run: {tmp_path / 'run'}\n")
    trace = cp.load_trace(tmp_path / "run")
    assert "cancelled" in trace.meta["finish"].values() and trace.meta["command"]["name"] == "run"
    assert sum(map(len, trace.tokens.values())) >= 3


def test_pressed_twice_it_ends_at_once_and_can_be_continued(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    status, said, told = command(tmp_path / "run", 2)
    assert status == 130 and "Traceback" not in told and not said
    assert f"continue what is on the disk: cacheprobe resume {tmp_path / 'run'}" in told
    resumed = cp.resume(tmp_path / "run", cp.load_model("coinflip-plain", dtype="float32"), progress=False)
    assert set(resumed.meta["finish"].values()) <= {"length", "stop"}
