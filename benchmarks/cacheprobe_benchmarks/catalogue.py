"""Lists the benchmarks. A benchmark is one file in a folder here with `run(rounds) -> dict`; no other list names it."""

import ast
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

HOME = Path(__file__).parent
Benchmark = Callable[[int], dict[str, Any]]


def questions() -> dict[str, str]:
    """Returns the first line of each benchmark's file, by name. Reads the files and imports none."""
    return {name: question for name, (question, _) in sorted(_found().items())}


def benchmark(name: str) -> Benchmark:
    """Raises: ValueError where there is none of this name."""
    return _module(name).run


def small(name: str) -> Benchmark:
    """The same with the settings of its SMALL. Raises: ValueError where it has none, or there is none of this name."""
    module = _module(name)
    if not hasattr(module, "SMALL"):
        raise ValueError(f"benchmark {name!r} has no small form; leave out --small, and give --rounds 1")
    return partial(module.run, **module.SMALL)


def _found() -> dict[str, tuple[str, str]]:
    """Returns each benchmark's question and module, by name. Raises: ValueError if two files have one name."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(HOME.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            continue
        name, question = path.stem.replace("_", "-"), (ast.get_docstring(tree) or "").split("\n\n")[0]
        module = ".".join((HOME.name, *path.relative_to(HOME).with_suffix("").parts))
        if name in found:
            raise ValueError(f"two files are benchmark {name!r}, {found[name][1]} and {module}; rename one")
        found[name] = question.replace("\n", " "), module
    return found


def _module(name: str) -> Any:
    if name not in (known := _found()):
        raise ValueError(f"unknown benchmark {name!r}; there are {', '.join(sorted(known))}")
    return import_module(known[name][1])
