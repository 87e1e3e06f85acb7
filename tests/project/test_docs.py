"""The documentation builds without a warning, without a network, and shows what there is."""

import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import cacheprobe as cp
from cacheprobe.core.registry import available

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
converted = runpy.run_path(str(DOCS / "plain_docstrings.py"))["converted"]


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does, in a process of its own that finds no network."""
    out = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(out / "doctrees")]
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [*command, str(DOCS), str(out / "html")], capture_output=True, text=True, env={**os.environ, **nowhere}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out / "html"


def test_it_builds_and_every_page_is_in_the_contents(html: Path) -> None:
    index = (html / "index.html").read_text()
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert pages >= {"quickstart", "guarantees", "pitfalls", "plugins", "api"}
    assert all(f'href="{page}.html"' in index for page in pages)


def test_public_names_are_explained(html: Path) -> None:
    api = (html / "api.html").read_text()
    modules = {name: getattr(cp, name) for name in cp.__all__ if inspect.ismodule(getattr(cp, name))}
    names = [f"cacheprobe.{name}" for name in cp.__all__ if name not in modules]
    for module, held in modules.items():
        functions = [
            name for name in held.__all__ if inspect.isroutine(value := getattr(held, name)) or inspect.isclass(value)
        ]
        names += [f"cacheprobe.{module}.{name}" for name in functions]
    plugins = [
        f"cacheprobe.{kind}.{plugin.__name__}"
        for kind in ("tasks", "drafters", "lenses")
        for plugin in available(kind).values()
        if plugin.__module__.startswith("cacheprobe.")
    ]
    assert len(plugins) > 10
    assert [name for name in (*names, *plugins) if f'id="{name}"' not in api] == []
    assert "Barbara" not in api  # a hundred names are no signature


def test_notebooks_are_shown_with_their_pictures(html: Path) -> None:
    for source in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        page = (html / "notebooks" / f"{source.stem}.html").read_text()
        assert "<img" in page or "<svg" in page, source.name
        assert "AssertionError" not in page


def test_the_page_asks_for_nothing_from_elsewhere(html: Path) -> None:
    for path in html.rglob("*.html"):
        text = path.read_text()
        assert 'src="http' not in text and '<link rel="stylesheet" type="text/css" href="http' not in text, path.name


@pytest.mark.parametrize(
    ("plain", "wanted"),
    [
        ("window, group: rows of\n    a pass (W).", ["* ``window``, ``group``: rows of a pass (W)."]),
        ("Source: a paper.  Twin: slow, ==.", ["**Source:** a paper.", "**Twin:** slow, ==."]),
        ("k: one.  v: two", ["* ``k``: one.", "* ``v``: two"]),
        ("uses `states`'s *args and x_ | y", [r"uses ``states``\ 's \*args and x\_ \| y"]),
        ("D1: this is prose\nthat goes on", ["D1: this is prose that goes on"]),
        ("Two ways:\n- one\n- two", ["Two ways:", "* one", "* two"]),
    ],
)
def test_plain_docstrings_become_markup(plain: str, wanted: list[str]) -> None:
    assert [line for line in converted(plain.splitlines()) if line] == wanted
