"""Long jobs say how far they are: a bar with rate and time left on a terminal, plain lines elsewhere."""

import ast
import importlib
import inspect
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cacheprobe as cp
import cacheprobe_analyses
import cacheprobe_benchmarks
from cacheprobe.cli.app import app
from cacheprobe.core import terminal
from cacheprobe.core.terminal import Progress
from tests.tiny import PROMPTS, SMALL, loaded

QUICK = {
    "bench compare",
    "findings",
    "show",
    "hypotheses",
    "models",
    "doctor",
    "dash",
    "query",
    "import generate",
    "import vllm",
}
"""Commands that are done in seconds."""
BY_ITSELF = {"bench"}
"""Shows its progress without a flag: each benchmark does, see below."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass where the test says so."""
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def test_a_line_at_times_where_there_is_no_terminal(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(200, "generating", "tokens", done=100) as bar:
        clock[0] += 10
        bar.advance(20)
        assert capsys.readouterr().err == ""
        clock[0] += 15
        bar.advance(30, "going well")
        assert capsys.readouterr().err == (
            "generating: 150 of 200 tokens, 2.0 tokens/s, going well, 0.4 minutes left\n"  # 50 in 25 s, not 150
        )
        clock[0] += 5
        bar.set_done(200)
        assert capsys.readouterr().err == ""
        bar.say("a line that stays")
    said = capsys.readouterr()
    assert said.err == "a line that stays\n" and said.out == ""


def test_the_end_is_said_where_it_is_worth_a_line(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2, "training", "steps", says_end=True) as bar:
        clock[0] += 1
        bar.advance()
        bar.advance()
    assert capsys.readouterr().err == "training: 2 of 2 steps, 2.0 steps/s, 0.0 minutes left\n"


def test_what_is_not_enabled_says_nothing(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for screen in (None, Terminal()):
        if screen is not None:
            monkeypatch.setattr(sys, "stderr", screen)
        with Progress(2, "training", "steps", enabled=False, says_end=True) as bar:
            clock[0] += 60
            bar.advance()
            bar.say("no")
            bar.advance()
    assert screen.getvalue() == "" and capsys.readouterr().err == ""


def test_a_bar_with_rate_and_time_left_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    with Progress(40, "generating", "[red]tokens") as bar:
        bar.advance(10, "[bold]note")
        bar.say("[blue]a line")
        bar._bar.refresh()
    drawn = screen.getvalue()
    assert "generating" in drawn and "10/40" in drawn and "[red]tokens/s, [bold]note" in drawn
    assert "[blue]a line" in drawn and (":" in drawn.split("10/40")[1])  # h:mm:ss, or -:--:-- until it is known
    with bar, pytest.raises(KeyError):  # entered again, and left by an error: the terminal is given back
        raise KeyError
    assert bar._bar is None


def test_seconds_outside_do_not_count(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress(3, "testing", "cells")
    for _ in range(2):
        with bar:
            clock[0] += 30
            bar.advance()
        clock[0] += 1000
        bar.set_done(bar.done)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(", ")[1] for line in lines] == ["0.033 cells/s"] * 2


def test_a_run_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.0)
    cp.run(loaded(), PROMPTS[:2], **{**SMALL, "progress": True})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("generating: ") and lines[-1].startswith("generating: 40 of 40 tokens, ")
    assert all("tokens/s" in line and "minutes left" in line for line in lines)


def test_a_report_and_a_grid_tell_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.0)
    run = cp.run(loaded(), PROMPTS[:1], **SMALL)
    cp.plots.write_report(run, tmp_path / "report.html", progress=True)
    assert capsys.readouterr().err.splitlines()[-1].startswith("drawing: 2 of 2 sections, ")
    cp.patching.activation(loaded(), [1, 2, 3], [1, 4, 3], answer=(5, 6), progress=True)
    assert capsys.readouterr().err.splitlines()[-1].startswith("patching: 9 of 9 cells, ")


def commands(of: Any = app, name: str = "") -> Iterator[tuple[str, Any]]:
    for word in of:
        if not word.startswith("-"):
            one, whole = of[word], f"{name} {word}".strip()
            yield from [(whole, one)] if one.default_command else ()
            yield from commands(one, whole)


def test_every_long_command_shows_progress_unless_told_not_to() -> None:
    found = dict(commands())
    assert set(found) >= QUICK | BY_ITSELF | {"run", "demo", "report", "verify", "train lora"}
    for name in set(found) - QUICK - BY_ITSELF:
        given = inspect.signature(found[name].default_command).parameters
        assert "progress" in given and given["progress"].default is True, f"{name} has no progress flag"
        said = re.search(r"^progress\n +(.*)", inspect.getdoc(found[name].default_command), re.MULTILINE)
        assert said and "progress" in said.group(1), f"{name} --help does not say what progress does"
    for name in QUICK | BY_ITSELF:
        assert "progress" not in inspect.signature(found[name].default_command).parameters


def modules_of(package: ModuleType) -> list[str]:
    home = Path(package.__file__).parent
    files = (path.relative_to(home).with_suffix("").parts for path in sorted(home.rglob("*.py")))
    names = (".".join((package.__name__, *parts)) for parts in files)
    return [name for name in names if {"run", "main"} & defined(name)]


def defined(name: str) -> set[str]:
    """Functions of a module, without importing it."""
    spec = importlib.util.find_spec(name)
    tree = ast.parse(open(spec.origin, encoding="utf-8").read())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def calls(name: str) -> set[str]:
    source = open(importlib.util.find_spec(name).origin, encoding="utf-8").read()
    return {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}


@pytest.mark.parametrize("name", [name for name in modules_of(cacheprobe_benchmarks) if ".gpu." not in name])
def test_every_benchmark_shows_progress(name: str) -> None:
    assert calls(name) & {"measuring", "Progress", "train_tuned_lens"}, f"{name} measures for minutes and says nothing"


@pytest.mark.parametrize("name", modules_of(cacheprobe_analyses))
def test_every_analysis_shows_progress(name: str) -> None:
    source = open(importlib.util.find_spec(name).origin, encoding="utf-8").read()
    run = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "run")
    main = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "main")
    assert "progress" in {argument.arg for argument in run.args.args}, f"{name}.run takes no progress"
    told = ("progress=True", "command(__doc__, ", "command_of_subjects(__doc__, ")  # the last two say it themselves
    assert any(text in ast.unparse(main) for text in told), f"{name} shows none when it is run"
    shown = calls(name) & {"Progress", "TrainingProgress"} or "progress=progress" in source
    assert shown, f"{name} does nothing with it"
