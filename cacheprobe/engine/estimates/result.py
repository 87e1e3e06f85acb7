"""Defines Estimate, what a run is expected to take, and the checks that refuse a run that cannot fit."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cacheprobe.core.terminal import duration
from cacheprobe.engine.sizes import bytes_text


class Bounds(NamedTuple):
    """Holds the smallest, the likely and the largest value. All are equal if nothing is drafted."""

    least: float
    """If the verifier accepts every draft token."""
    likely: float
    """If the verifier accepts as many draft tokens as in a short trial of the drafter."""
    most: float
    """If the verifier rejects every draft token."""

    def text(self, unit: str = "") -> str:
        """Returns the likely value as text, in bytes, in seconds or without a unit, and the bounds if they differ."""
        kinds = {"bytes": _megabytes, "seconds": duration, "": lambda value: f"{value:,.0f}"}
        low, likely, high = (kinds[unit](value) for value in self)
        return likely if low == high else f"{likely} ({low} to {high})"


class PassCost(NamedTuple):
    """Holds the passes of one shape in a run, and the measured time of one such pass."""

    phase: str
    batch: int
    """Batch indices of the pass, dummies included."""
    width: int
    """Token slots of each batch index."""
    num_layers: int | None
    """Layers that run; None for all."""
    num_passes: int
    """Number of passes of this shape."""
    seconds: float
    """Time of one pass, recording included."""
    is_measured: bool
    """False if the time was interpolated between the measured passes of other batch sizes or widths."""


@dataclass(frozen=True, repr=False)
class Estimate:
    """Holds what a run is expected to take: tokens, passes, memory, disk space and seconds.

    Every request is assumed to generate all its new tokens. `assumptions` says what else was assumed.
    """

    num_requests: int
    prompt_tokens: int
    """Tokens of all prompts; each sample of a prompt (SamplingParams.n) counts."""
    new_tokens: int
    """Largest number of tokens that the run generates."""
    prefill_passes: Bounds
    decode_passes: Bounds
    """Passes of one token a request, those of a drafter that runs the model included."""
    verify_passes: Bounds
    rows: Bounds
    """Recorded rows; a row is one token of one pass."""
    cache_bytes: int
    """KV cache, as `KVCache.cache_bytes`."""
    state_bytes: Bounds
    """Recorded states and head activations, as they lie in the trace."""
    table_bytes: Bounds
    """The trace's pandas tables, as `DataFrame.memory_usage(deep=True)`."""
    disk_bytes: Bounds
    """All files of `trace.save`."""
    peak_bytes: Bounds
    """Largest memory of the run beyond the model: cache, records, and the logits of the largest pass or lens tile."""
    available_bytes: int | None
    """Memory that was available on the machine when the estimate was made; None if unknown."""
    seconds: Bounds
    """Time of `cp.run`, without loading the model and without saving."""
    costs: tuple[PassCost, ...] = field(default=())
    """The likely passes of the run, by shape."""
    assumptions: tuple[str, ...] = ()

    def __repr__(self) -> str:
        passes = ", ".join(
            f"{bounds.text()} {phase}"
            for phase, bounds in (
                ("prefill", self.prefill_passes), ("decode", self.decode_passes), ("verify", self.verify_passes)
            )
        )  # fmt: skip
        of = f" of {_megabytes(self.available_bytes)} available" if self.available_bytes is not None else ""
        lines = [
            f"Estimate of {self.num_requests} requests: {self.prompt_tokens:,} prompt tokens, up to "
            f"{self.new_tokens:,} new tokens",
            f"  passes:  {passes}; {self.rows.text()} rows",
            f"  memory:  {self.peak_bytes.text('bytes')} at most{of}: cache {_megabytes(self.cache_bytes)}, states "
            f"{self.state_bytes.text('bytes')}, tables {self.table_bytes.text('bytes')}",
            f"  disk:    {self.disk_bytes.text('bytes')}",
            f"  time:    {self.seconds.text('seconds')}",
            *(f"  assumed: {assumption}" for assumption in self.assumptions),
        ]
        return "\n".join(lines)

    def require_memory(self) -> None:
        """Checks the memory of the machine. Raises: ValueError if the run needs more than is available even if every
        draft token is accepted; the message says what to change."""
        if self.available_bytes is not None and self.peak_bytes.least > self.available_bytes:
            raise ValueError(
                f"the run needs about {bytes_text(round(self.peak_bytes.least))} of memory, {self._parts()}; "
                f"{bytes_text(self.available_bytes)} are available; {_REMEDY}"
            )

    def require_disk(self, directory: Path) -> None:
        """Checks the disk of a directory for the saved run. Raises: ValueError if the disk has less space than the run
        takes even if every draft token is accepted; the message says what to change."""
        there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        if self.disk_bytes.least > free:
            raise ValueError(
                f"the saved run needs about {bytes_text(round(self.disk_bytes.least))} in {directory}; "
                f"{bytes_text(free)} are free; {_REMEDY}, or save to another disk"
            )

    def _parts(self) -> str:
        """Returns the sizes of cache, states and tables as text."""
        return (
            f"of which the cache {_megabytes(self.cache_bytes)}, states {_megabytes(self.state_bytes.least)}, tables "
            f"{_megabytes(self.table_bytes.least)}"
        )


_REMEDY = "capture fewer sites, layers, positions or phases, lower max_new_tokens, or split the prompts over runs"


def _megabytes(count: float) -> str:
    """Returns a number of bytes as text, in MB or GB of 10**6 or 10**9 bytes."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
