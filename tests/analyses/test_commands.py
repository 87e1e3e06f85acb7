"""Commands of analyses: found by a name without a folder, settings from arguments, the result printed and stored."""

import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import cacheprobe_analyses
from cacheprobe_analyses.command import command, command_of_subjects
from tests.project.test_structure import ROOT, imports, source_files

HOME = Path(cacheprobe_analyses.__file__).parent
FILES = sorted(path for path in HOME.rglob("*.py") if path.name != "__init__.py")
COMMAND = re.compile(r"python -m cacheprobe_analyses\.([\w.]+)")


def test_a_command_runs_the_file_of_its_name_in_any_folder() -> None:
    """Those of the pages, and each that a file says of itself."""
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/tables").glob("*.txt")]
    said = {name for page in pages for name in COMMAND.findall(page.read_text("utf-8"))}
    assert said >= {"coin_rows", "rollback_prediction", "s3_algorithm", "thinking_states_table"}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if "\ndef main()" in text:
            assert COMMAND.findall(text)[:1] == [path.stem], path
            said.add(path.stem)
    for name in said:
        spec = find_spec(f"cacheprobe_analyses.{name}")
        assert (
            spec is not None and Path(spec.origin) in FILES and "\ndef main()" in Path(spec.origin).read_text("utf-8")
        )


def short_imports(files: dict[str, str]) -> list[str]:
    """Imports of an analysis by its command's name: a second copy of the module, whose classes are not the first's."""
    names = {f"cacheprobe_analyses.{path.stem}" for path in FILES if path.parent != HOME}
    return [f"{path}: {one}" for path, text in files.items() for _, one in imports(text) if one in names]


def test_a_name_is_one_file_and_imports_name_its_folder() -> None:
    assert [name for name, count in Counter(path.stem for path in FILES).items() if count > 1] == []
    files = source_files("cacheprobe", "analyses", "benchmarks", "scripts", "tests", "notebooks", "docs")
    assert short_imports(files) == []
    assert short_imports({"x.py": "from cacheprobe_analyses import coin_rows, records"}) == [
        "x.py: cacheprobe_analyses.coin_rows"
    ]


@dataclass(frozen=True)
class Config:
    """Settings of an analysis that does nothing."""

    texts: int = 3
    folder: Path = Path("here")
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """What it was given."""

    texts: int
    folder: str
    seed: int
    progress: bool

    def table(self) -> str:
        """Returns one line."""
        return f"{self.texts} texts"


def analysis(config: Config, progress: bool = False) -> Result:
    """Returns its settings."""
    return Result(config.texts, str(config.folder), config.seed, progress)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Arguments of the command line, with a file for the result."""
    arguments = ["analysis", "--json", str(tmp_path / "x.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    return arguments


def test_arguments_become_settings(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given += ["--texts", "5", "--folder", "there"]
    command("What is it?\n\nMore.", Config, analysis, texts="of the test", folder="")
    assert capsys.readouterr().out == "5 texts\n"
    assert json.loads(Path(given[2]).read_text()) == {"texts": 5, "folder": "there", "seed": 0, "progress": True}
    command("What is it?", Config, analysis, lambda result: f"{result.texts}!", texts="", folder="")
    assert capsys.readouterr().out == "5!\n"
    del given[1:]
    command("What is it?", Config, analysis, texts="")
    assert capsys.readouterr().out == "3 texts\n"
    given += ["--help"]
    with pytest.raises(SystemExit):
        command("What is it?\n\nMore.", Config, analysis, texts="of the test")
    said = capsys.readouterr().out
    assert (
        "What is it?" in said and "More." not in said and "--texts TEXTS  of the test" in said and "--seed" not in said
    )


def test_subjects_run_in_turn_or_one_alone(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    subjects = {"one": Config(1), "two": Config(2)}
    command_of_subjects("What is it?", subjects, analysis)
    assert capsys.readouterr().out == "## one\n\n1 texts\n\n## two\n\n2 texts\n\n"
    held = json.loads(Path(given[2]).read_text())
    assert list(held) == ["one", "two"] and held["two"]["texts"] == 2 and held["two"]["progress"] is True
    given += ["--only", "two"]
    command_of_subjects("What is it?", subjects, analysis)
    assert list(json.loads(Path(given[2]).read_text())) == ["two"]
