"""Computes the version of the code that made a shard: a hash of every source file that a run uses."""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cacheprobe.core.values import JsonDict

_PACKAGE = Path(__file__).parents[1]
_PARTS = (
    "core", "plan.py", "api.py", "ops", "kvcache", "tasks", "models", "lenses", "drafters", "interventions", "engine",
    "capture", "trace", "analysis", "sweeps/workers/work.py", "sweeps/factory.py",
)  # fmt: skip
"""Hashed parts. Plots, commands and the scheduling of a sweep change no bit of a shard, so they are left out."""


_SUFFIXES = {".py", ".cpp", ".h"}


@cache
def code_version() -> str:
    """Returns 16 hexadecimal digits of the hash."""
    digest = hashlib.sha256()
    for part in _PARTS:
        path = _PACKAGE / part
        inside = (file for file in path.rglob("*") if file.suffix in _SUFFIXES)
        for file in sorted(inside) if path.is_dir() else [path]:
            digest.update(file.relative_to(_PACKAGE).as_posix().encode() + b"\0")
            digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def libraries() -> tuple[tuple[str, str], ...]:
    """Returns (name, version) of the libraries that compute and write the bytes of a shard."""
    from importlib.metadata import version

    return tuple((name, version(name)) for name in ("torch", "transformers", "pyarrow", "pandas", "safetensors"))


def origin(threads: int, sources: Mapping[str, str]) -> JsonDict:
    """Returns what a cell's bits depend on besides its settings. sources: hashes of models and lenses, by name."""
    from cacheprobe import __version__
    from cacheprobe.trace.manifest import FORMAT_VERSION

    own = {"version": __version__, "code": code_version(), "trace_format": FORMAT_VERSION, "threads": threads}
    return {**own, "libraries": dict(libraries()), "sources": dict(sources)}
