"""Defines the cells of a sweep. A cell is one run, named by a hash of all values that the run's result depends on."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from cacheprobe.core.registry import names, same_name
from cacheprobe.core.values import JsonDict
from cacheprobe.sweeps.settings import Axes, SweepConfig, span

AXES = tuple(Axes.model_fields)
ModelKey: TypeAlias = tuple[str, str, str | None, str, str]
"""(model name, dtype, adapter, products, device). Cells with equal keys can run on one loaded model."""
_PACKAGE = Path(__file__).parents[1]
_PARTS = (
    "core", "api.py", "ops", "kvcache", "tasks", "models", "lenses", "edits", "engine", "trace", "analysis",
    "sweeps/run_cell.py",
    "sweeps/factory.py",
)  # fmt: skip
"""Parts of cacheprobe that are hashed. Plots, commands and scheduling of a sweep change no bit of a shard."""
_RANGE = re.compile(r"\blayer=(\d+-\d+)\b")


@dataclass(frozen=True)
class Cell:
    """Describes one run of a sweep as JSON values (axes, common settings, versions on which the bits depend); holds no
    results."""

    axes: JsonDict
    """Value of each axis, by the names of AXES."""
    run: JsonDict
    """SweepRunSettings, the same for all cells."""
    origin: JsonDict
    """Everything else that the bits depend on: code, trace format, libraries, threads, and the bytes of the model."""

    @property
    def digest(self) -> str:
        """Name of the cell's shard: 20 hexadecimal digits of the SHA-256 of the cell's canonical JSON."""
        return hashlib.sha256(canonical(self.to_json()).encode()).hexdigest()[:20]

    @property
    def model_key(self) -> ModelKey:
        """(name, dtype, adapter, products, device) of the cell's model. Cells with equal keys share a loaded model."""
        axes = self.axes
        return axes["model"], axes["dtype"], axes["adapter"], axes["products"], self.run["device"]

    def to_json(self) -> JsonDict:
        """Returns the cell as a dictionary of JSON values; `from_json` reads it."""
        return {"axes": dict(self.axes), "run": dict(self.run), "origin": dict(self.origin)}

    @classmethod
    def from_json(cls, stored: JsonDict) -> "Cell":
        """Returns the Cell that a dictionary from `to_json` describes."""
        return cls(stored["axes"], stored["run"], stored["origin"])

    def __str__(self) -> str:
        """Returns the axes that are not None as text, such as model=x seed=3."""
        return " ".join(f"{name}={value}" for name, value in self.axes.items() if value is not None)


def distinguishing_labels(cells: Mapping[str, Cell]) -> dict[str, str]:
    """Returns a dictionary digest -> label of the cell: axis=value for every axis that differs between the cells.

    If no axis differs, the label has every axis that is set.
    """
    varied = [name for name in AXES if len({canonical(cell.axes[name]) for cell in cells.values()}) > 1]
    return {digest: _label(cell.axes, varied) if varied else str(cell) for digest, cell in cells.items()}


def _label(axes: JsonDict, names: list[str]) -> str:
    """Returns the named axes as text, such as drafter=none seed=3."""
    return " ".join(f"{name}={'none' if axes[name] is None else axes[name]}" for name in names)


def canonical(value: object) -> str:
    """Returns `value` as JSON text with sorted keys and no spaces, so that the order of keys does not matter."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def combinations(config: SweepConfig) -> Iterator[JsonDict]:
    """Yields the axes of every cell of a sweep as a dictionary, each once. In a grid, the last axis varies fastest."""
    grids = [[(getattr(cell, name),) for name in AXES] for cell in config.cells or ()]  # one value for each axis
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
    """Returns a task's text with its name as registered: coin_flip:people=3 for coin-flip:people=3."""
    name, colon, options = task.partition(":")
    return f"{same_name(name, names('tasks')) or name}{colon}{options}"


def _spread(values: Iterable[object]) -> list[object]:
    """Returns the values as a list, with one text for each layer from A to B in place of a text with layer=A-B. Raises:
    ValueError if A is larger than B."""
    out: list[object] = []
    for value in values:
        match = _RANGE.search(value) if isinstance(value, str) else None
        out += [value] if match is None else [_RANGE.sub(f"layer={n}", match.string, 1) for n in span(match[1])]
    return out


@cache
def code_version() -> str:
    """Returns the code version: 16 hexadecimal digits of a hash of cacheprobe's source files that make a shard (saved
    run)."""
    digest = hashlib.sha256()
    for part in _PARTS:
        path = _PACKAGE / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(_PACKAGE).as_posix().encode() + b"\0")
            digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def libraries() -> tuple[tuple[str, str], ...]:
    """Returns (name, installed version) of each main library that computes or writes a shard: torch, transformers,
    numba, llvmlite, pyarrow, pandas, safetensors. These versions are part of a cell's digest."""
    from importlib.metadata import version

    names = ("torch", "transformers", "numba", "llvmlite", "pyarrow", "pandas", "safetensors")
    return tuple((name, version(name)) for name in names)


def origin(threads: int, sources: Mapping[str, str]) -> JsonDict:
    """Returns the values, besides the settings, on which the bits of a cell depend, as a dictionary for JSON.

    Versions of code, trace format and libraries; threads; and sources: hashes of model, adapter and lens, by
    name.
    """
    from cacheprobe import __version__
    from cacheprobe.trace.manifest import FORMAT_VERSION

    own = {"version": __version__, "code": code_version(), "trace_format": FORMAT_VERSION, "threads": threads}
    return {**own, "libraries": dict(libraries()), "sources": dict(sources)}
