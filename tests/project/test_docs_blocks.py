"""Every example of the README and of the docs runs: Python blocks page by page, and the flags of every command.

A page's blocks run from top to bottom in one namespace, in an empty folder, on a CPU. The name "smollm2-135m" stands
for a tiny random model that knows the words of coin-flip questions and has SmolLM2's number of layers; with an adapter
it is SmolLM2 itself. A page that links to `quickstart.md#names-in-the-examples` has the names of the block there. A
block that cannot run here says why in its first line, as one of REASONS.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from cacheprobe.cli.app import app
from cacheprobe.core import registry
from cacheprobe.models.plain import files
from cacheprobe.tasks import CoinFlip, word_tokenizer
from cacheprobe_benchmarks.shared.tiny import TINY, tiny_model
from tests.dictionaries.planted import random_dictionary
from tests.reported.stated_outputs import run_and_compare

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REASONS = ("# needs a GPU", "# needs vLLM", "# needs a browser", "# needs a compiler")
NAMES = "quickstart.md#names-in-the-examples"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALLER = {
    "README.md": {"n=16": "n=2", "window=16": "window=4", ', dtype="bfloat16"': ""},
    "patching.md": {', adapter="coin-flip"': ""},
    "probes.md": {"n=240": "n=120", "n=4)": "n=1)"},
}
"""What is replaced in a page's blocks, so that the test is over soon."""
DICTIONARY = "runs/dictionary"
"""Folder of a dictionary that a page may load; the one of the test has random weights."""
LAYERS = 30
"""As many as SmolLM2 has."""


def blocks_of(text: str) -> list[str]:
    return BLOCK.findall(text)


def names_block() -> str:
    """The block of the quick start that other pages begin with."""
    text = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    return blocks_of(text.split("## Names in the examples")[1])[0]


def code_of(text: str) -> str:
    """A page's blocks as one program, without those that cannot run here."""
    return "\n".join(block for block in blocks_of(text) if not block.startswith(REASONS))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama that knows the words of coin-flip questions and has SmolLM2's number of layers."""
    tokenizer = word_tokenizer(CoinFlip(people=4).vocabulary())
    folder = tmp_path_factory.mktemp("small")
    size = replace(TINY, vocab=len(tokenizer), layers=LAYERS)
    tiny_model("llama-tied", size=size).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def names(small: Path) -> dict[str, Any]:
    """What the quick start's block of names defines, made once for all pages."""
    scope: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "_embedded", lambda name, progress: (str(small), "a tiny model of the tests"))
        exec(names_block(), scope)
    return scope


@pytest.fixture(autouse=True)
def no_plugins_of_pages() -> Iterator[None]:
    """What a page registers is gone after it."""
    yield
    for held in registry._plugins.values():
        for name in [name for name, plugin in held.items() if plugin.__module__ in {page.stem for page in PAGES}]:
            del held[name]


PYTHON = [page for page in PAGES if code_of(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(
    page: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = page.read_text(encoding="utf-8")
    code = code_of(text)
    for shown, small_one in SMALLER.get(page.name, {}).items():
        assert shown in code
        code = code.replace(shown, small_one)
    if "adapter=" not in code:
        monkeypatch.setattr(files, "_embedded", lambda name, progress: (str(small), "a tiny model of the tests"))
    monkeypatch.chdir(tmp_path)
    if DICTIONARY in code:
        random_dictionary(layer=12).save(DICTIONARY)
    known = request.getfixturevalue("names") if NAMES in text else {}
    assert run_and_compare(code, page.name, {**known, "__name__": page.stem}) == []


def test_what_does_not_run_says_why() -> None:
    """Blocks with another first line are run; and no block is fenced in a way that hides it from this test."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(re.findall(r"^ *[`~]{3,} *\{?(?:python|py|code-block|code-cell)", text, re.MULTILINE)) == len(
            blocks_of(text)
        ), page.name
    assert len(PYTHON) > 12


def commands_of(text: str) -> list[str]:
    """Lines that call cacheprobe, in indented blocks, shell fences and backticks, without variables before them."""
    fenced = re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in fenced for line in block.splitlines()]
    lines += [line.strip() for line in re.findall(r"^    (?:[A-Z_]+=\S+ )*cacheprobe .*$", text, re.MULTILINE)]
    lines += [line.replace("\n", " ") for line in re.findall(r"`((?:[A-Z_]+=\S+ )*cacheprobe [^`]*)`", text)]
    called = [re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line) for line in lines]
    return [re.split(r"  +| #", line)[0] for line in called if line.startswith("cacheprobe ")]


def complaint(line: str) -> str:
    """What is wrong with a command: no such command, or a flag that it does not have; nothing if it is right."""
    command: App = app
    words = line.split()[1:]
    while words and not words[0].startswith("-") and words[0] in list(command):
        command = command[words.pop(0)]
    if command is app and not line.split()[1].isupper():
        return f"{line}: no such command"
    flags = {word.lstrip("[").rstrip("]").split("=")[0] for word in words if word.lstrip("[").startswith("--")}
    arguments = command.assemble_argument_collection() if command.default_command else ()
    unknown = flags - {name for one in arguments for name in one.names} - {"--help", "--version"}
    return f"{line}: {', '.join(sorted(unknown))} no flag of it" if unknown else ""


def test_the_commands_of_all_pages_parse() -> None:
    found = [line for page in PAGES for line in commands_of(page.read_text(encoding="utf-8"))]
    assert len(found) > 60
    assert [said for line in found if (said := complaint(line))] == []
