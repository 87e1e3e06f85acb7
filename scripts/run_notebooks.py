"""Execute the notebooks, in full, and store them with their outputs: python scripts/run_notebooks.py [NAME ...].

The .py is what is edited; its .ipynb is written anew. CACHEPROBE_PRESET=tiny shows quickly whether one runs at all;
nothing is stored then.
"""

import argparse
import os
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SECONDS = 600
"""Of one cell, at most."""
KEPT = {"jupytext", "kernelspec", "language_info"}


def paired(source: Path) -> NotebookNode:
    """The notebook that a .py stands for, without outputs. Cells are numbered: the same text is the same file."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"
        cell.metadata = NotebookNode()
    return notebook


def executed(notebook: NotebookNode) -> NotebookNode:
    """The same with the outputs of a fresh process. Raises: CellExecutionError where a cell fails."""
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(FOLDER)}})
    client.execute()
    notebook.metadata = NotebookNode({key: value for key, value in notebook.metadata.items() if key in KEPT})
    for cell in notebook.cells:
        cell.metadata = NotebookNode()  # when it ran says nothing to a reader
    return notebook


def with_outputs_of(notebook: NotebookNode, stored: NotebookNode) -> NotebookNode:
    """The notebook, with the outputs that the same code once had. Raises: ValueError where the code is another; not for
    the first cell, which sets up and shows nothing."""
    mine, theirs = ([cell for cell in one.cells if cell.cell_type == "code"] for one in (notebook, stored))
    if [cell.source for cell in mine[1:]] != [cell.source for cell in theirs[1:]] or theirs[0].outputs:
        raise ValueError("the code has changed, so the stored outputs are not its own; run it without --prose")
    for new, old in zip(mine, theirs, strict=True):
        new.outputs, new.execution_count = old.outputs, old.execution_count
    notebook.metadata = stored.metadata
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute notebooks and store them with their outputs.")
    parser.add_argument("names", nargs="*", help="such as 01; all of them by default")
    parser.add_argument(
        "--prose", action="store_true", help="the text or the first cell alone has changed: run nothing"
    )
    asked = parser.parse_args()
    is_stored = os.environ.get("CACHEPROBE_PRESET", "full") == "full"
    for source in sorted(FOLDER.glob("[0-9]*.py")):
        if asked.names and not source.name.startswith(tuple(asked.names)):
            continue
        start, before = time.perf_counter(), os.times()
        target = source.with_suffix(".ipynb")
        if asked.prose:
            notebook = with_outputs_of(paired(source), nbformat.read(target, as_version=4))
        else:
            notebook = executed(paired(source))
        after = os.times()  # the notebook's process has ended, so its seconds are among those of children
        processor = sum(after[2:4]) - sum(before[2:4])
        seconds = time.perf_counter() - start
        print(f"{source.stem}: {seconds:.0f} s, {processor:.0f} s of processor", flush=True)
        if is_stored:
            nbformat.write(notebook, target)


if __name__ == "__main__":
    main()
