"""Cells: one combination of the axes, named by the hash of all that its bits depend on."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cacheprobe.core.registry import names, same_name
from cacheprobe.sweeps.settings import Axes, SweepConfig

AXES = tuple(Axes.model_fields)
_RANGE = re.compile(r"\blayer=(\d+)-(\d+)\b")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep, as plain values."""

    axes: Mapping[str, Any]
    """By the names of AXES."""
    run: Mapping[str, Any]
    """RunSettings, the same for all cells."""
    origin: Mapping[str, Any]
    """What else its bits depend on: the code, the trace format, libraries, threads, and the bytes of the model."""

    @property
    def digest(self) -> str:
        """20 hexadecimal digits of the SHA-256 of the canonical JSON; the name of its shard."""
        return hashlib.sha256(canonical(self.to_json()).encode()).hexdigest()[:20]

    @property
    def model_key(self) -> tuple[str, str, str | None, str, str]:
        """Name, dtype, adapter, products and device: cells of one key can be run with one loaded model."""
        axes = self.axes
        return axes["model"], axes["dtype"], axes["adapter"], axes["products"], self.run["device"]

    def to_json(self) -> dict[str, Any]:
        return {"axes": dict(self.axes), "run": dict(self.run), "origin": dict(self.origin)}

    @classmethod
    def from_json(cls, held: Mapping[str, Any]) -> "Cell":
        return cls(held["axes"], held["run"], held["origin"])

    def __str__(self) -> str:
        """The axes that are set, as in model=x seed=3."""
        return " ".join(f"{name}={value}" for name, value in self.axes.items() if value is not None)


def told_apart(cells: Mapping[str, Cell]) -> dict[str, str]:
    """A name for each of these cells, by digest: the axes that differ among them; all that are set, where none does."""
    varied = [name for name in AXES if len({canonical(cell.axes[name]) for cell in cells.values()}) > 1]
    return {digest: _said(cell.axes, varied) if varied else str(cell) for digest, cell in cells.items()}


def _said(axes: Mapping[str, Any], names: list[str]) -> str:
    return " ".join(f"{name}={'none' if axes[name] is None else axes[name]}" for name in names)


def canonical(held: Any) -> str:
    """JSON with sorted names and no spaces: equal values give equal text."""
    return json.dumps(held, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def combinations(config: SweepConfig) -> Iterator[dict[str, Any]]:
    """The axes of every cell, a grid's last axis changing fastest; each combination once."""
    if config.grid is not None:
        values = [_spread(getattr(config.grid, name)) for name in AXES]
        every = (dict(zip(AXES, chosen, strict=True)) for chosen in itertools.product(*values))
    else:
        listed = [cell.model_dump() for cell in config.cells or ()]
        spread = ([_spread((cell[name],)) for name in AXES] for cell in listed)
        every = (dict(zip(AXES, chosen, strict=True)) for values in spread for chosen in itertools.product(*values))
    seen = set()
    for axes in every:
        axes["task"] = _as_registered(axes["task"])
        if (key := canonical(axes)) not in seen:
            seen.add(key)
            yield axes


def _as_registered(task: str) -> str:
    """A name with - or _ in the one spelling that it has, so that a task is one cell; unknown ones as they are."""
    name, colon, options = task.partition(":")
    return f"{same_name(name, names('tasks')) or name}{colon}{options}"


def _spread(values: Any) -> list[Any]:
    """Every text with layer=A-B becomes as many as there are layers from A to B."""
    out = []
    for value in values:
        found = _RANGE.search(value) if isinstance(value, str) else None
        if found is None:
            out.append(value)
            continue
        first, last = int(found[1]), int(found[2])
        if first > last:
            raise ValueError(f"{value!r}: there is no layer from {first} to {last}; write the smaller one first")
        for layer in range(first, last + 1):
            out.append(value[: found.start()] + f"layer={layer}" + value[found.end() :])
    return out
