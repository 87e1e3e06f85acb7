"""Counts what a pretend GPU saw: how often the host waited, which work was launched, and what a GPU would refuse."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ROOT = f"{Path(__file__).parents[2]}/"
_NOT_OURS = ("/site-packages/", "/tests/device/", "/lib/python", "<")


def place() -> str:
    """Returns "file:line" of the innermost caller in the project, without the files of this folder that stand for a
    driver. A backward pass may run in a thread without such a caller: then "torch"."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_ROOT) and (not any(part in name for part in _NOT_OURS) or "/test_" in name):
            return f"{name.removeprefix(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"


class Gpu:
    """Holds the counts of a pretend GPU. Set `phase` to name what runs; counts are kept for each phase."""

    def __init__(self) -> None:
        self.phase = ""
        self.waits: Counter[tuple[str, str, str]] = Counter()
        """(phase, kind, place) -> how often the host waited until the device had computed something."""
        self.launches: Counter[tuple[str, str, str]] = Counter()
        """(phase, operation, place) -> how often: one for each operation of torch that is no view, and for each call of
        one of our kernels. A real operation may launch more than one kernel."""
        self.passes: Counter[str] = Counter()
        """Phase -> how often it began."""
        self.refused: list[str] = []
        """Errors that a GPU would raise, also those that the tested code caught."""
        self.graph: Any = None
        """The `captured.CudaGraph` that is captured now; None for none."""
        self._on_their_way: list[tuple[Tensor, Tensor]] = []
        self.num_begun = 0
        """Number of copies to the host that have begun."""
        self.waits_are_errors: Callable[[str, str], bool] = lambda kind, at: False
        """Function (kind, place) that returns True if such a wait is to raise an error."""
        self.memory_ends_at: int | None = None
        """Number of launches after which one, and no other, finds no memory; None for none."""

    def waited(self, kind: str) -> None:
        """Counts a wait. Raises: RuntimeError if `waits_are_errors` says so, and while a graph is captured."""
        self.require_no_capture(kind)
        at = place()
        self.waits[self.phase, kind, at] += 1
        if self.waits_are_errors(kind, at):
            raise RuntimeError(f"the host waits for the device: {kind} at {at}")

    def begin_copy(self, target: Tensor, values: Tensor) -> None:
        """Begins a copy to the host, whose memory holds NaN, or the largest number, until the copy has arrived."""
        self._on_their_way.append((target, values.clone()))
        self.num_begun += 1
        target.fill_(torch.nan if target.is_floating_point() else torch.iinfo(target.dtype).max)

    def arrive(self, number: int) -> None:
        """Ends the copies that began before number `number`."""
        while self._on_their_way and self.num_begun - len(self._on_their_way) < number:
            target, values = self._on_their_way.pop(0)
            target.copy_(values)

    def launched(self, operation: str) -> None:
        """Counts a launch; captured work is not launched. Raises: torch.OutOfMemoryError if it is the one that finds no
        memory."""
        if self.graph is not None:
            return
        if self.memory_ends_at is not None:
            self.memory_ends_at -= 1
            if self.memory_ends_at < 0:
                self.memory_ends_at = None
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.launches[self.phase, operation, place()] += 1

    def require_no_capture(self, kind: str) -> None:
        """Raises: RuntimeError while a graph is captured."""
        if self.graph is not None:
            raise self.refusal(RuntimeError, f"operation not permitted when stream is capturing: {kind}")

    def refusal(self, kind: type[Exception], text: str) -> Exception:
        """Notes an error, and returns it for the caller to raise."""
        self.refused.append(f"{text}, at {place()}")
        return kind(self.refused[-1])

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Counts for `phase` inside the `with`."""
        before, self.phase = self.phase, phase
        self.passes[phase] += 1
        try:
            yield
        finally:
            self.phase = before

    def waits_by_phase(self) -> dict[str, int]:
        """Returns phase -> number of waits."""
        return _by_phase(self.waits)

    def launches_by_phase(self) -> dict[str, int]:
        """Returns phase -> number of launches."""
        return _by_phase(self.launches)

    def table(self, most: int = 8) -> str:
        """Returns lines of text: for each phase that began the waits and launches of one pass, and the most frequent
        waits with their places."""
        lines = []
        for phase, count in self.passes.items():
            waits = {key[1:]: number for key, number in self.waits.items() if key[0] == phase}
            launched = self.launches_by_phase().get(phase, 0) / count
            lines.append(f"{phase}: {count} passes of {sum(waits.values()) / count:.1f} waits, {launched:.0f} launches")
            for (kind, at), number in sorted(waits.items(), key=lambda item: -item[1])[:most]:
                lines.append(f"  {number / count:7.2f} {kind:<12} {at}")
        return "\n".join(lines)


def _by_phase(counts: Counter[tuple[str, str, str]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for (phase, _, _), number in counts.items():
        totals[phase] += number
    return dict(totals)
