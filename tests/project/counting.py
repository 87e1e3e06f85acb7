"""Counts what `limits.toml` limits: lines of code, files, rooms, long functions, words."""

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from tests.project.test_structure import ROOT, source_files

LIMITS = tomllib.loads((ROOT / "tests/project/limits.toml").read_text(encoding="utf-8"))
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
BESIDE = ("kernels", "analyses", "benchmarks", "scripts")


def lines_of_code(source: str) -> int:
    """Returns the number of lines that hold a token of Python, without blanks, comments and docstrings."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(statement.value.value, str):
                    texts |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def functions(files: Mapping[str, str]) -> Iterator[tuple[str, int, int]]:
    """Yields (place, arguments without self, lines without the docstring) of every function."""
    for path, source in files.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                arguments = len(named) - (bool(named) and named[0].arg in ("self", "cls"))
                text = node.body[0] if ast.get_docstring(node) else None
                lines = (node.end_lineno or 0) - node.lineno + 1
                lines -= (text.end_lineno or 0) - text.lineno + 1 if text else 0
                yield f"{path}: {node.name}", arguments, lines


def words(text: str) -> int:
    """Returns the number of words outside fenced code blocks."""
    return len(re.findall(r"\w+", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))


def crowded(files: Mapping[str, str]) -> Iterator[str]:
    """Yields the folders with more files of code than a reader can hold in view; __init__ is none of them."""
    folders: dict[str, int] = {}
    for path in files:
        if PurePosixPath(path).name != "__init__.py":
            folder = str(PurePosixPath(path).parent)
            folders[folder] = folders.get(folder, 0) + 1
    for folder, count in folders.items():
        if count > LIMITS["folder"]["files_of_views" if folder.endswith("views") else "files"]:
            yield f"{folder} holds {count} files"


def over_the_limits(package: Mapping[str, str], beside: Mapping[str, str], tests: Mapping[str, str]) -> Iterator[str]:
    """Yields what is above its limit, with the places of functions that are too long or take too much."""
    limits = LIMITS["cacheprobe"]
    found = list(functions(package))
    wide = [
        f"{place} {count}"
        for place, count, _ in found
        if count > limits["arguments"] and not place.startswith("cacheprobe/api.py")
    ]
    long = [f"{place} {lines}" for place, _, lines in found if lines > limits["lines_of_a_function"]]
    text = "\n".join(package.values())
    counts = {
        "cacheprobe.lines_of_code": sum(map(lines_of_code, package.values())),
        "cacheprobe.files": len(package),
        "cacheprobe.rooms": len({path.split("/")[1] for path in package if path.count("/") > 1}),
        "cacheprobe.functions_with_more": len(wide),
        "cacheprobe.longer_functions": len(long),
        "cacheprobe.any": len(re.findall(r"\bAny\b", text)),
        "cacheprobe.private_getattr": len(re.findall(r'getattr\([\w.]+, "_\w+"', text)),
        "beside.lines_of_code": sum(map(lines_of_code, beside.values())),
        "tests.lines_of_code": sum(map(lines_of_code, tests.values())),
    }
    named = {"cacheprobe.functions_with_more": wide, "cacheprobe.longer_functions": long}
    for name, count in counts.items():
        table, key = name.split(".")
        if count > LIMITS[table][key]:
            yield f"{name}: {count}, at most {LIMITS[table][key]} {named.get(name, '')}"
    yield from crowded({**package, **beside, **tests})


def words_over_the_limits(readme: str, pages: Mapping[str, str]) -> Iterator[str]:
    """Yields what is above its limit among the words of the README and of docs/."""
    counts = {"readme": words(readme), "docs": sum(map(words, pages.values())), "pages": len(pages)}
    for name, count in counts.items():
        if count > LIMITS["words"][name]:
            yield f"words.{name}: {count}, at most {LIMITS['words'][name]}"


def project() -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Returns the source files of the package, of the folders beside it, and of the tests."""
    return source_files("cacheprobe"), source_files(*BESIDE), source_files("tests")


def docs() -> tuple[str, dict[str, str]]:
    """Returns the README and the pages of docs/."""
    pages = {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(ROOT / "docs").glob("*.md"))}
    return (ROOT / "README.md").read_text(encoding="utf-8"), pages
