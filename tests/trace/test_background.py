"""Jobs in the background run in their order, none after one that failed, and the end of the block waits for them."""

import threading

import pytest

from cacheprobe.trace.parts.background import Background


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
