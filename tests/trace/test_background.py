"""Jobs in the background run in their order, none after one that failed, and the end of the block waits for them."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cacheprobe as cp
from cacheprobe.trace.recording.background import Background


def test_jobs_run_in_their_order_and_the_end_waits() -> None:
    ran: list[int] = []
    gate = threading.Event()
    with Background() as background:
        background.add(lambda: gate.wait(30))
        for number in range(20):
            background.add(lambda number=number: ran.append(number))
        assert ran == []
        gate.set()
    assert ran == list(range(20))


def test_no_job_runs_after_one_that_failed() -> None:
    ran: list[int] = []
    gate = threading.Event()

    def fail() -> None:
        gate.wait(30)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"), Background() as background:
        background.add(fail)
        background.add(lambda: ran.append(1))
        gate.set()
        with pytest.raises(OSError, match="No space"):
            background.wait()
        with pytest.raises(OSError, match="No space"):
            background.add(lambda: ran.append(2))
    assert ran == []


def test_an_error_of_the_block_is_not_replaced() -> None:
    ran: list[int] = []
    with pytest.raises(KeyError), Background() as background:
        background.add(lambda: ran.append(1))
        raise KeyError
    assert ran == [1]


@pytest.mark.parametrize("closed", [False, True])
def test_an_error_of_a_job_is_not_lost_when_a_stream_is_closed(closed: bool) -> None:
    def fail() -> None:
        raise OSError("No space left on device")

    def stream() -> Iterator[int]:
        with Background() as background:
            background.add(fail)
            yield 1
            raise KeyError("the model")

    pieces = stream()
    next(pieces)
    if closed:
        with pytest.raises(OSError, match="No space"):
            pieces.close()
        return
    with pytest.raises(KeyError, match="the model") as caught:
        next(pieces)
    assert "No space left" in caught.value.__notes__[0]


@pytest.mark.parametrize("where", ["in the block", "at its end"])
def test_ctrl_c_drops_jobs_and_waits_for_the_one_that_runs(where: str) -> None:
    ran: list[int] = []
    began = threading.Event()

    def first() -> None:
        began.set()
        time.sleep(0.3)
        if where == "at its end":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.3)
        ran.append(1)

    with pytest.raises(KeyboardInterrupt), Background() as background:
        background.add(first)
        background.add(lambda: ran.append(2))
        began.wait(30)
        if where == "in the block":
            raise KeyboardInterrupt
    assert ran == [1]
    time.sleep(0.1)
    assert ran == [1]


def test_a_run_goes_on_when_the_main_thread_has_ended(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_THREAD, str(tmp_path / "run")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "40" and not done.stderr.strip()
    assert len(cp.load_trace(tmp_path / "run").committed(0)) == 40


IN_A_THREAD = """
import sys, threading, time
import cacheprobe as cp
from tests.tiny import SMALL, loaded

def record():
    time.sleep(0.5)
    trace = cp.run(loaded(), [[1, 2, 3]], **{**SMALL, "max_new_tokens": 40, "capacity": 128}, out=sys.argv[1])
    print(len(trace.committed(0)))

threading.Thread(target=record).start()
"""
