"""Which benchmarks there are. A benchmark is one file here with `run(rounds) -> dict`; no other list names it."""

import ast
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

Benchmark = Callable[[int], dict[str, Any]]


def questions() -> dict[str, str]:
    """By name: the first line that its file says of itself. Reads the files and imports none."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[path.stem.replace("_", "-")] = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
    return found


def benchmark(name: str) -> Benchmark:
    """Raises: ValueError where there is none of this name."""
    return _module(name).run


def small(name: str) -> Benchmark:
    """The same with the settings of its SMALL. Raises: ValueError where it has none, or there is none of this name."""
    module = _module(name)
    if not hasattr(module, "SMALL"):
        raise ValueError(f"benchmark {name!r} has no small form; leave out --small, and give --rounds 1")
    return partial(module.run, **module.SMALL)


def _module(name: str) -> Any:
    if name not in (known := questions()):
        raise ValueError(f"unknown benchmark {name!r}; there are {', '.join(known)}")
    return import_module(f"cacheprobe_benchmarks.{name.replace('-', '_')}")
