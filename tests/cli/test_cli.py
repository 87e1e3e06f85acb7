"""The command line: quick help, one-line errors, and a run that is stored, replayed and drawn."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cacheprobe as cp
from cacheprobe.cli.app import app
from tests.command import cacheprobe
from tests.tiny import hf_model


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models.test_load_model import tokenizer

    path = tmp_path_factory.mktemp("tiny")
    hf_model().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def stored(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "coin"
    done = cacheprobe(
        *("run", "--out", str(out), "--model", str(model_directory), "--dtype", "float32"),
        *("--task", "coin_flip", "--n", "4", "--people", "2", "--drafter", "early_exit:layer=1", "--window", "4"),
        *("--max-new-tokens", "8", "--deterministic", "0.5"),
    )
    assert done.returncode == 0, done.stderr
    assert "behaviour:" in done.stdout and "chance 50%" in done.stdout and "check: resid_post" in done.stdout
    return out


def test_any_task_can_be_run_and_stored(model_directory: Path, tmp_path: Path) -> None:
    done = cacheprobe(
        *("run", "--out", str(tmp_path / "run"), "--model", str(model_directory), "--dtype", "float32"),
        *("--task", "variables:updates=1,question_first=true", "--n", "2", "--max-new-tokens", "2", "--capture", "Z"),
        *("--heads", "z", "--heads", "pattern"),
    )
    assert done.returncode == 0, done.stderr
    expected = cp.tasks.Variables(updates=1, question_first=True).examples(2)
    trace = cp.load_trace(tmp_path / "run")
    assert [request.example for request in trace.requests] == expected
    assert trace.store.heads == ("z", "pattern") and "path: plain: no hook is set" in done.stdout


def test_a_dry_run_prints_the_estimate_and_saves_nothing(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are those of the run with the same flags; a disk without room refuses it, with what to change."""
    words = ("--model", str(model_directory), "--dtype", "float32", "--max-new-tokens", "4", "--capture", "STC")
    words = (*words, "--prompt", "heads or tails", "--prompt", "heads")
    out = tmp_path / "run"
    done = cacheprobe("run", "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Estimate of 2 requests: ") and "up to 8 new tokens" in done.stdout
    assert "1 prefill, 3 decode, 0 verify" in done.stdout and "  time: " in done.stdout
    free = type("Usage", (), {"free": 100})()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: free)
        done = cacheprobe("run", "--dry-run", "--out", str(out), *words)
    assert done.returncode == 2 and "100 bytes (0.0 GiB) are free; capture fewer sites" in done.stderr
    assert not out.exists()
    done = cacheprobe("run", *words)
    assert done.returncode == 2 and "give --out, the directory for the trace, or --dry-run" in done.stderr


HELP = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from cacheprobe.cli.app import main
sys.argv = ["cacheprobe", "--help"]
main()
"""
HEAVY = {"torch", "transformers", "transformer_lens", "numpy", "pandas", "pyarrow", "datasets", "plotly", "pydantic"}


def test_help_imports_nothing_heavy() -> None:
    """What the help imports is what a shell waits for: 223 modules, where importing torch alone brings over a
    thousand."""
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    commands = ("demo", "run", "show", "hypotheses", "report", "verify", "bench", "train", "models", "doctor")
    assert all(f"│ {command} " in done.stdout for command in commands)
    imported = done.stderr.split()
    assert not HEAVY & set(imported) and len(imported) < 400


def test_stored_run_verifies(stored: Path) -> None:
    done = cacheprobe("verify", str(stored))
    assert done.returncode == 0, done.stderr
    assert "equal to the oracle: 32 tokens of 4 requests" in done.stdout


def test_the_edits_that_flip_a_verdict_are_listed_and_drawn(stored: Path, tmp_path: Path) -> None:
    line = cp.load_trace(stored).rejected().iloc[0]
    words, place = ("flip", str(stored), "--request", str(line.request_id)), ("--step", str(line.step))
    done = cacheprobe(*words, *place, "--sites", "S", "--out", str(tmp_path / "flips.html"))
    assert done.returncode == 0, done.stderr
    title, names, *layers, note, _, written = done.stdout.splitlines()
    assert f"request {line.request_id}, step {line.step}: drafted “" in title
    assert names.split()[:5] == ["layer", "zero", "S", "mean", "S"] and "of 12 edits flip" in note
    assert [row.split()[0] for row in layers] == ["2", "1", "0"] and "*" in layers[0]
    assert "plotly" in Path(written).read_text(encoding="utf-8")
    assert "ending in .html" in cacheprobe(*words, *place, "--out", "x.pdf").stderr
    assert "step 0: expected a step that rejected" in cacheprobe(*words, "--step", "0").stderr


def test_verify_exits_1_with_the_first_difference(stored: Path, tmp_path: Path) -> None:
    """A forged token in the stored run is found, with its place."""
    trace = cp.load_trace(stored)
    trace.tokens = {**trace.tokens, 2: [*trace.tokens[2][:3], (trace.tokens[2][3] + 1) % 97, *trace.tokens[2][4:]]}
    forged = trace.save(tmp_path / "forged")
    done = cacheprobe("verify", str(forged))
    position = trace.requests[2].num_prompt_tokens + 3
    assert done.returncode == 1 and f"request 2 position {position}" in done.stdout


def test_verify_refuses_another_schedule(stored: Path, tmp_path: Path) -> None:
    hf_model(seed=9).save_pretrained(tmp_path)
    done = cacheprobe("verify", str(stored), "--model", str(tmp_path))
    assert done.returncode == 2 and "weights_sha256" in done.stderr and done.stderr.count("\n") == 1


def test_report_is_drawn(stored: Path, tmp_path: Path) -> None:
    done = cacheprobe("report", str(stored), "--out", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("run", "--out", "x"), "give either --prompt"),
        (
            ("run", "--out", "x", "--task", "boxes", "--people", "2"),
            "argument 'people'",
        ),
        (("run", "--out", "x", "--prompt", "a", "--drafter", "early_exit:layer"), "not key=value"),
        (("run", "--config", "nowhere.yaml", "--out", "x"), "there is no config file nowhere.yaml"),
        (("hypotheses", "nowhere", "--out", "x.txt"), "x.txt ends in .txt"),
        (("report", "nowhere", "--out", "x", "--figures", "y"), "give one of them"),
        (("verify", "nowhere"), "not a directory"),
        (("bench", "nothing"), "unknown benchmark 'nothing'; there are"),
    ],
)
def test_errors_are_one_line(args: tuple[str, ...], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = cacheprobe(*args)
    assert done.returncode == 2 and part in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not done.stdout


BOTH = """
import sys
from cacheprobe.cli.app import main

for words in (["--task", "two_coins:question_first=no"], ["--prompt", "a", "--drafter", "early_exit:layer=two"]):
    sys.argv = ["cacheprobe", "run", "--out", "x", "--model", "coinflip-plain", *words]
    try:
        main()
    except SystemExit as end:
        print(end.code)
"""


def test_settings_of_a_wrong_kind_are_one_line() -> None:
    """In a process of its own: the tests' checks of shapes refuse them earlier, in other words."""
    done = subprocess.run([sys.executable, "-c", BOTH], capture_output=True, text=True)
    assert done.stdout.split() == ["2", "2"], done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") for line in lines)
    assert "question_first must be True or False, got 'no'" in lines[0]
    assert "layer of early_exit must be a whole number, got 'two'" in lines[1]


KILLED = """
import os, signal, sys
from cacheprobe.cli import app as cli
from cacheprobe.core import terminal

def set_done(self, done, note=""):
    self.done = done
    if done >= 3:
        print("killed after", done, "tokens", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

terminal.Progress.set_done = set_done
cli.main()
"""


PLAIN: Any = dict(result_action="return_value", exit_on_error=False, print_error=False)


def test_a_killed_run_is_continued(model_directory: Path, tmp_path: Path) -> None:
    """Killed in the middle of a generation, at the same token on every machine."""
    out = tmp_path / "run"
    killed = [sys.executable, "-c", KILLED, "run", "--out", str(out), "--model", str(model_directory)]
    done = subprocess.run([*killed, "--prompt", "heads", "--max-new-tokens", "40"], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL and "killed after" in done.stdout, done.stderr
    assert "not finished" in repr(cp.load_trace(out))
    with pytest.raises(ValueError, match="cacheprobe resume"):
        app(["run", "--out", str(out), "--model", str(model_directory), "--prompt", "heads"], **PLAIN)
    app(["resume", str(out), "--no-progress"], **PLAIN)
    assert len(cp.load_trace(out).committed(0)) == 40
    with pytest.raises(ValueError, match="holds a finished run; there is nothing to continue"):
        app(["resume", str(out)], **PLAIN)
