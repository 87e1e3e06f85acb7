"""What texts of the project say of it, checked: commands to install, dependencies, sizes and titles of pages."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.project.test_structure import imports, listed_files, source_files

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_OF_PAGE = 1_200
"""Words, those of code blocks included."""
IMPORTED_BY_OTHERS = {"gguf"}
"""Dependencies that transformers imports: it reads SmolLM2's weights with gguf."""


def words(text: str) -> int:
    return len(re.findall(r"\w+", text))


def page_complaints(pages: Mapping[str, str]) -> Iterator[str]:
    """Pages whose title is no question, and pages that are too long; a page of results may be longer."""
    for name, text in pages.items():
        title = text.splitlines()[0]
        if name != "index.md" and not (title.startswith("# ") and title.endswith("?")):
            yield f"{name}: the title {title!r} is no question"
        if words(text) > MOST_OF_PAGE and not name.startswith("results-"):
            yield f"{name}: {words(text)} words"


def quoting_complaints(files: Mapping[str, str]) -> Iterator[str]:
    """Commands that install an extra without quotes: a shell such as zsh takes the brackets for a pattern."""
    for path, text in files.items():
        for command in re.findall(r"pip install [^\n]*", text):
            if re.search(r"(?<![\w'\".{}\]])[\w.]+\[\w", command.split("pip install", 1)[1]):
                yield f"{path}: {command}"


def dependency_complaints(dependencies: list[str], files: Mapping[str, str]) -> Iterator[str]:
    """Dependencies that no file of the package imports."""
    imported = {name.split(".")[0] for source in files.values() for _, name in imports(source)}
    for line in dependencies:
        name = re.split(r"[^\w-]", line)[0]
        module = {"pyyaml": "yaml"}.get(name, name.replace("-", "_"))
        if module not in imported | IMPORTED_BY_OTHERS:
            yield f"{name} is declared and never imported"


def test_pages_are_short_and_their_titles_are_questions() -> None:
    assert list(page_complaints(PAGES)) == []


def test_extras_are_quoted() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says which files are the project's")
    files = {path: text for path, text in listed_files().items() if not path.startswith("tests/")}
    assert list(quoting_complaints(files)) == []


def test_every_dependency_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert list(dependency_complaints(project["dependencies"], source_files("cacheprobe"))) == []


def test_what_opens_notebooks_is_named_where_it_is_used() -> None:
    """`jupyter` is in no extra, so each page that calls it says what installs it."""
    for name, text in {**PAGES, "README.md": README}.items():
        assert "jupyter lab" not in text or re.search(r"pip install .*jupyterlab", text), name


def test_the_doctor_is_right_which_runs_use_kernels() -> None:
    """All kernels go through ops/kernel_set.py; another import of the dispatcher, and the doctor's and the
    documentation's word would be wrong."""
    allowed = {"cacheprobe/ops/dispatch.py", "cacheprobe/ops/kernel_set.py"}
    using = {
        path
        for path, source in source_files("cacheprobe").items()
        if any("ops.dispatch" in name or "cacheprobe_kernels" in name for _, name in imports(source))
    }
    assert using - allowed == set()
    assert "each kernel that passed its trial, and torch for the others" in PAGES["kernels.md"].replace("\n", " ")
