"""Executes the notebooks and stores them with their outputs: python scripts/run_notebooks.py [NAME ...].

The .py is what is edited; its .ipynb is written anew. Every picture is stored as PNG. GitHub shows no SVG inside HTML,
so the HTML of pictures that are drawn without plotly is not stored; running the cell shows it again.
"""

import argparse
import os
import re
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jupytext
import nbformat
import plotly.graph_objects as go
from nbclient import NotebookClient
from nbformat import NotebookNode
from playwright.sync_api import Page, sync_playwright

from cacheprobe.views.images import browser_path, image
from cacheprobe.views.style import FIGURE_CONFIG

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SECONDS = 600
"""Of one cell, at most."""
KEPT = {"jupytext", "kernelspec", "language_info"}
PROGRESS = re.compile(r"generating: \d+ of \d+ ")
PLOTLY, PICTURE = "application/vnd.plotly.v1+json", '<div class="cp alone">'
WIDTH = 960
"""Pixels of a stored picture; more where a part of it is wider."""
WHOLE = "<style>body{margin:0;background:white}.cp .ladder,.cp .verdicts{max-height:none !important}</style>"
WIDEST = "Math.max(0, ...[...document.querySelectorAll('.scroll, .wide')].map(part => part.scrollWidth))"


def paired(source: Path) -> NotebookNode:
    """The notebook that a .py stands for, without outputs. Cells are numbered: the same text is the same file."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"
        cell.metadata = NotebookNode()
    return notebook


def executed(notebook: NotebookNode) -> NotebookNode:
    """The same with the outputs of a fresh process. Raises: CellExecutionError where a cell fails."""
    os.environ |= {"PLOTLY_RENDERER": "plotly_mimetype", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm's bars need ipywidgets; text will do
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(FOLDER)}})
    client.execute()
    notebook.metadata = NotebookNode({key: value for key, value in notebook.metadata.items() if key in KEPT})
    for cell in notebook.cells:
        cell.metadata = NotebookNode()  # when it ran says nothing to a reader
        if cell.cell_type == "code":  # a busy machine gets lines of progress
            cell.outputs = [output for output in cell.outputs if not PROGRESS.match(output.get("text", ""))]
    return notebook


@contextmanager
def white_page() -> Iterator[Page]:
    """A page of a browser without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        try:
            yield browser.new_page(viewport={"width": WIDTH, "height": 600}, color_scheme="light")
        finally:
            browser.close()


def add_pictures(notebook: NotebookNode, page: Page) -> None:
    """Adds a PNG to each figure of plotly, and puts one in place of each picture that is HTML."""
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        data = output.get("data", {})
        if PLOTLY in data:
            data[PLOTLY]["config"] = {**data[PLOTLY].get("config", {}), **FIGURE_CONFIG}
            figure = go.Figure({part: data[PLOTLY][part] for part in ("data", "layout")})
            data["image/png"] = b64encode(image(figure, "png", width=WIDTH)).decode()
        elif data.get("text/html", "").startswith(PICTURE):
            page.set_viewport_size({"width": WIDTH, "height": 600})
            page.set_content(f"{WHOLE}{data.pop('text/html')}")
            needed = page.evaluate(WIDEST)
            page.set_viewport_size({"width": max(WIDTH, needed + 40), "height": 600})
            data["image/png"] = b64encode(page.locator(".cp.alone").screenshot()).decode()


def with_outputs_of(notebook: NotebookNode, stored: NotebookNode) -> NotebookNode:
    """The notebook, with the outputs that the same code once had. Raises: ValueError where the code is another."""
    mine, theirs = ([cell for cell in one.cells if cell.cell_type == "code"] for one in (notebook, stored))
    if [cell.source for cell in mine] != [cell.source for cell in theirs]:
        raise ValueError("the code has changed, so the stored outputs are not its own; run it without --prose")
    for new, old in zip(mine, theirs, strict=True):
        new.outputs, new.execution_count = old.outputs, old.execution_count
    notebook.metadata = stored.metadata
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute notebooks and store them with their outputs.")
    parser.add_argument("names", nargs="*", help="such as 01; all of them by default")
    parser.add_argument("--prose", action="store_true", help="the text alone has changed: run nothing")
    asked = parser.parse_args()
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
        if not asked.prose:
            with white_page() as page:
                add_pictures(notebook, page)
        nbformat.write(notebook, target)


if __name__ == "__main__":
    main()
