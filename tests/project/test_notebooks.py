"""Stored notebooks: executed, small, in step with their .py, and ending in claims. pytest runs them too, by nbmake."""

import re
import runpy
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from tests.project.test_structure import MACHINE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
LARGEST = 1_000_000
"""Bytes."""
every_notebook = pytest.mark.parametrize("source", SOURCES, ids=[path.stem for path in SOURCES])
paired = runpy.run_path(str(ROOT / "scripts/run_notebooks.py"))["paired"]


def stored(source: Path) -> NotebookNode:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_is_a_notebook_for_every_source() -> None:
    assert len(SOURCES) >= 7
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {path.stem for path in SOURCES}


@every_notebook
def test_both_halves_say_the_same(source: Path) -> None:
    mine, theirs = paired(source), stored(source)
    cells = [[(cell.cell_type, cell.source, cell.id) for cell in notebook.cells] for notebook in (mine, theirs)]
    assert cells[0] == cells[1], f"run python scripts/run_notebooks.py {source.stem[:2]}"
    assert theirs.metadata.jupytext.formats == "ipynb,py:percent"


@every_notebook
def test_it_was_executed_from_top_to_bottom(source: Path) -> None:
    cells = code(stored(source))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    shown = [output.get("data", {}) for output in outputs]
    assert [data for data in shown if "image/png" in data], "no picture"
    assert not [data for data in shown if "<svg" in data.get("text/html", "")], "GitHub does not show it"
    figures = [data for data in shown if "application/vnd.plotly.v1+json" in data]
    assert all("image/png" in data for data in figures)
    configs = [data["application/vnd.plotly.v1+json"].get("config", {}) for data in figures]
    assert all(config.get("showSendToCloud") is False for config in configs)  # plotly offers it where nothing is said


@every_notebook
def test_it_is_small_and_names_no_machine(source: Path) -> None:
    text = source.with_suffix(".ipynb").read_text()
    assert len(text.encode()) < LARGEST
    without_pictures = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not MACHINE.search(without_pictures)
    assert not re.search(r"/(home|tmp|Users)/", without_pictures)


@every_notebook
def test_it_begins_with_its_question_and_ends_in_findings_and_claims(source: Path) -> None:
    cells = stored(source).cells
    assert re.match(r"# .+\?$", cells[0].source, re.MULTILINE)
    first, *_, last = code(stored(source))
    assert "import cacheprobe as cp" in first.source
    assert not re.search(r"environ|google.colab|pio\.|filterwarnings", "".join(cell.source for cell in cells))
    assert cells[-2].source.startswith("## What was found") and cells[-1] == last
    assert [line for line in last.source.splitlines() if line.startswith("assert ")]
    assert not re.search(r"^def ", "\n".join(cell.source for cell in cells), re.MULTILINE)  # it calls, it defines not


def test_the_docs_name_them() -> None:
    page = (ROOT / "docs/quickstart.md").read_text()
    assert all(f"notebooks/{source.stem}\n" in page for source in SOURCES)
