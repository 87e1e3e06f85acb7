"""Defines cells: one combination of the axes, named by the hash of everything that its bits depend on."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from cacheprobe.core.registry import names, same_name
from cacheprobe.core.values import JsonDict
from cacheprobe.sweeps.settings import Axes, SweepConfig

AXES = tuple(Axes.model_fields)
ModelKey: TypeAlias = tuple[str, str, str | None, str, str]
"""Name, dtype, adapter, products and device: cells of one key can run on one loaded model."""
_RANGE = re.compile(r"\blayer=(\d+)-(\d+)\b")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep, as plain values."""

    axes: JsonDict
    """Value of each axis, by the names of AXES."""
    run: JsonDict
    """RunSettings, the same for all cells."""
    origin: JsonDict
    """Everything else that the bits depend on: code, trace format, libraries, threads, and the bytes of the model."""

    @property
    def digest(self) -> str:
        """20 hexadecimal digits of the SHA-256 of the canonical JSON; the name of the cell's shard."""
        return hashlib.sha256(canonical(self.to_json()).encode()).hexdigest()[:20]

    @property
    def model_key(self) -> ModelKey:
        """Name, dtype, adapter, products and device of the cell's model."""
        axes = self.axes
        return axes["model"], axes["dtype"], axes["adapter"], axes["products"], self.run["device"]

    def to_json(self) -> JsonDict:
        """Returns the cell as plain JSON values."""
        return {"axes": dict(self.axes), "run": dict(self.run), "origin": dict(self.origin)}

    @classmethod
    def from_json(cls, held: JsonDict) -> "Cell":
        """Returns the cell that `to_json` wrote."""
        return cls(held["axes"], held["run"], held["origin"])

    def __str__(self) -> str:
        """Returns the axes that are set, such as model=x seed=3."""
        return " ".join(f"{name}={value}" for name, value in self.axes.items() if value is not None)


def distinguishing_labels(cells: Mapping[str, Cell]) -> dict[str, str]:
    """Returns a label for each cell, keyed by digest: axis=value for every axis that differs between the cells.

    If no axis differs, the label has every axis that is set.
    """
    varied = [name for name in AXES if len({canonical(cell.axes[name]) for cell in cells.values()}) > 1]
    return {digest: _said(cell.axes, varied) if varied else str(cell) for digest, cell in cells.items()}


def _said(axes: JsonDict, names: list[str]) -> str:
    return " ".join(f"{name}={'none' if axes[name] is None else axes[name]}" for name in names)


def canonical(held: object) -> str:
    """Returns JSON with sorted names and no spaces: equal values give equal text."""
    return json.dumps(held, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def combinations(config: SweepConfig) -> Iterator[JsonDict]:
    """Yields the axes of every cell, each combination once; a grid's last axis changes fastest."""
    grids = [[(getattr(cell, name),) for name in AXES] for cell in config.cells or ()]
    if config.grid is not None:
        grids = [[getattr(config.grid, name) for name in AXES]]
    seen = set()
    for grid in grids:
        for chosen in itertools.product(*map(_spread, grid)):
            axes: JsonDict = dict(zip(AXES, chosen, strict=True))
            axes["task"] = _as_registered(axes["task"])
            if (key := canonical(axes)) not in seen:
                seen.add(key)
                yield axes


def _as_registered(task: str) -> str:
    """Returns the task with its name as registered, since - and _ are equal in names; unknown names stay as
    they are.
    """
    name, colon, options = task.partition(":")
    return f"{same_name(name, names('tasks')) or name}{colon}{options}"


def _spread(values: Iterable[object]) -> list[object]:
    """Replaces every text with layer=A-B by one text for each layer from A to B."""
    out = []
    for value in values:
        if not isinstance(value, str) or (found := _RANGE.search(value)) is None:
            out.append(value)
            continue
        first, last = int(found[1]), int(found[2])
        if first > last:
            raise ValueError(f"{value!r}: there is no layer from {first} to {last}; write the smaller one first")
        for layer in range(first, last + 1):
            out.append(value[: found.start()] + f"layer={layer}" + value[found.end() :])
    return out
