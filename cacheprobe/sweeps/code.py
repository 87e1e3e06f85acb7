"""Computes the version of the code that makes a shard (saved run): a hash of source files of cacheprobe."""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cacheprobe.core.values import JsonDict

_PACKAGE = Path(__file__).parents[1]
_PARTS = (
    "core", "api.py", "ops", "kvcache", "tasks", "models", "lenses", "edits", "engine", "trace", "analysis",
    "sweeps/workers/work.py",
    "sweeps/factory.py",
)  # fmt: skip
"""Parts of cacheprobe that are hashed. Plots, commands and scheduling of a sweep change no bit of a shard."""


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
