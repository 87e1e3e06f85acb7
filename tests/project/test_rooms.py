"""The layout of the code: import circles, files per folder, the size of Trace, arguments of functions, frames."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath

import pytest

import cacheprobe as cp
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.models.plain.lm import PlainLM
from tests.project.counting import LIMITS, docs, lines_of_code, over_the_limits, project, words_over_the_limits
from tests.project.test_structure import source_files
from tests.tiny import hf_model

ON_THE_PATH = ("kernels", "analyses", "benchmarks")
"""Folders that hold a package beside cacheprobe, which is imported without the folder's name."""
CODE = source_files("cacheprobe", *ON_THE_PATH, "scripts", "tests")
MOST_METHODS, MOST_ARGUMENTS = 15, 12


def modules(files: Mapping[str, str]) -> dict[str, str]:
    """Returns the text of each file by the dotted name that it is imported by."""
    found = {}
    for path, text in files.items():
        parts = PurePosixPath(path.removesuffix(".py").removesuffix("/__init__")).parts
        found[".".join(parts[1:] if parts[0] in ON_THE_PATH else parts)] = text
    return found


def targets(source: str, known: Mapping[str, str]) -> set[str]:
    """Returns the known modules that a file imports anywhere, in functions and for types too."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            named |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            named |= {str(node.module), *(f"{node.module}.{one.name}" for one in node.names)}
    return named & set(known)


def circles(files: Mapping[str, str]) -> list[list[str]]:
    """Groups of modules that import each other, by whatever detour. A package may import what lies in it."""
    known = modules(files)
    edges = {
        name: {to for to in targets(source, known) if to != name and not name.startswith(f"{to}.")}
        for name, source in known.items()
    }
    reach = {name: set(to) for name, to in edges.items()}
    for middle in reach:
        for name in reach:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    inside = [name for name in reach if name in reach[name]]
    groups = {tuple(sorted(b for b in inside if b in reach[a] and a in reach[b])) for a in inside}
    return [list(group) for group in sorted(groups)]


def repeated_classes(files: Mapping[str, str]) -> Iterator[str]:
    """Names that two classes or type aliases of the package share."""
    places: dict[str, list[str]] = {}
    for path, source in files.items():
        tree = ast.parse(source)
        named = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                named += [node.targets[0].id] if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", node.targets[0].id) else []
        for name in named:
            places.setdefault(name, []).append(path)
    yield from (f"{name} is defined in {', '.join(paths)}" for name, paths in places.items() if len(paths) > 1)


def test_no_modules_import_each_other() -> None:
    """Everywhere: in tests too, whose helpers import each other."""
    assert circles(CODE) == []


def test_the_house_is_within_its_limits() -> None:
    assert list(over_the_limits(*project())) == []
    assert list(words_over_the_limits(*docs())) == []


def test_lines_of_code_are_counted() -> None:
    """A statement over three lines, and one with a comment; not the docstrings, the blank line and the comment."""
    source = '"""Text."""\n\nx = f(\n    1,\n)\n# a comment\ndef g():\n    """Two\n    lines."""\n    return 1  # so\n'
    assert lines_of_code(source) == 5


def test_a_class_has_a_name_of_its_own() -> None:
    """Before: four classes were called Place, three Cell, three Piece."""
    assert list(repeated_classes(source_files("cacheprobe"))) == []


def test_a_trace_is_data() -> None:
    """Of its own methods; the look-ups that tables and files share stand in TraceData."""
    own = [name for name, held in vars(cp.Trace).items() if inspect.isfunction(held) and not name.startswith("_")]
    assert 0 < len(own) <= MOST_METHODS, own


@pytest.mark.parametrize("name", [name for name in cp.__all__ if inspect.isfunction(getattr(cp, name))])
def test_a_public_function_has_few_arguments(name: str) -> None:
    assert len(inspect.signature(getattr(cp, name)).parameters) <= MOST_ARGUMENTS


def test_a_circle_is_noticed() -> None:
    late = "def later():\n    from cacheprobe.b import y\n"
    found = circles({"cacheprobe/a.py": late, "cacheprobe/b.py": "from cacheprobe import c", "cacheprobe/c.py": ""})
    assert found == []
    closed = {"cacheprobe/a.py": late, "cacheprobe/b.py": "from cacheprobe import c"}
    closed["cacheprobe/c.py"] = "import cacheprobe.a"
    assert circles(closed) == [["cacheprobe.a", "cacheprobe.b", "cacheprobe.c"]]


def test_every_folder_of_code_is_looked_at() -> None:
    assert {path.split("/")[0] for path in CODE} == {"cacheprobe", *ON_THE_PATH, "scripts", "tests"}


MOST_FRAMES = LIMITS["cacheprobe"]["frames"]
"""Functions on the stack of a forward pass, from `cp.run` to the model's `forward`, both and decorators counted."""


@contextmanager
def counted_frames() -> Iterator[dict[str, set[int]]]:
    """Inside the `with`, collects by phase how many functions, with decorators, each forward pass needs."""
    found: dict[str, set[int]] = {}
    forward = PlainLM._forward
    begins, runs_a_pass = (inspect.unwrap(function).__code__ for function in (cp.run, ModelRunner.run))

    def counting(*args: object, **settings: object) -> object:
        frame, count, phase = sys._getframe().f_back, 1, None  # from `forward` on; the run is counted too
        while frame is not None and frame.f_code is not begins:
            code = frame.f_code
            count += not code.co_name.startswith("<")
            if code is runs_a_pass:
                phase = frame.f_locals["a_pass"].phase
            frame = frame.f_back
        if frame is not None and phase is not None:
            found.setdefault(phase, set()).add(count)
        return forward(*args, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainLM, "_forward", counting)
        yield found


def test_few_frames_lie_between_a_run_and_a_forward_pass() -> None:
    with counted_frames() as found:
        cp.run(cp.load_model(hf_model()), [[1, 2, 3]], max_new_tokens=4, window=4, deterministic=True, progress=False)
    assert found == {phase: {MOST_FRAMES} for phase in ("prefill", "decode", "verify")}
