"""In which parts of cacheprobe a job spends its time."""

import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import cacheprobe

PARTS = {
    "compiled loops": ("ops/compiled/basics.py",),
    "forward and lens, outside the loops": ("models/", "ops/", "kvcache/", "lenses/"),
    "recording": ("trace/"),
    "checksums of the weights": ("models/weights.py",),
    "main loop and the rest": ("",),
}
"""By part: beginnings of the paths, below the package, of files whose functions count for it; the longest decides."""
_EVERY = 0.001
_ROOT = f"{Path(cacheprobe.__file__).parent}/"


def shares(job: Callable[[], object], repeats: int = 1) -> dict[str, float]:
    """Returns the shares of the job's time by part, from a sample of the main thread's stack every millisecond.

    The time of a call of torch or of a compiled loop counts for the innermost function of cacheprobe that made it. Only
    in the main thread.
    """
    taken: Counter[str] = Counter()
    last = 0.0

    def sample(number: int, frame: FrameType | None) -> None:
        """Adds the time since the last sample, which may be a long call of torch, to the part that runs."""
        nonlocal last
        now = time.perf_counter()
        taken[_part(frame)] += now - last
        last = now

    before = signal.signal(signal.SIGALRM, sample)
    last = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, _EVERY, _EVERY)
    try:
        for _ in range(repeats):
            job()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return {part: round(taken[part] / taken.total(), 2) for part in PARTS}


def _part(frame: FrameType | None) -> str:
    """Returns the part of the innermost frame that is in the package."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_ROOT):
            path = frame.f_code.co_filename.removeprefix(_ROOT)
            return max(PARTS, key=lambda part: max(len(one) if path.startswith(one) else -1 for one in PARTS[part]))
        frame = frame.f_back
    return "main loop and the rest"
