"""A saved run is replaced only if the caller says so, and its report goes with it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.cli.app import app
from cacheprobe.trace import storage
from cacheprobe.trace.manifest import TraceError
from cacheprobe.trace.places import KINDS, require_free
from tests.tiny import PROMPTS, SMALL, loaded

MODEL = ("--model", "coinflip-plain", "--dtype", "float32")
RUN = ("run", *MODEL, "--task", "coin_flip", "--n", "1", "--people", "2", "--max-new-tokens", "1", "--no-progress")


def command(*words: str) -> object:
    return app(list(words), result_action="return_value", exit_on_error=False, print_error=False)


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS[:2], **SMALL)


@pytest.fixture
def saved(trace: cp.Trace, tmp_path: Path) -> Path:
    directory = trace.save(tmp_path / "run")
    (directory / "report.html").write_text("of the run before")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_save_keeps_the_run_that_is_there(trace: cp.Trace, saved: Path) -> None:
    before = contents(saved)
    with pytest.raises(TraceError, match=r"already holds a run \(LlamaForCausalLM, 2 requests\).*overwrite=True"):
        trace.save(saved)
    assert contents(saved) == before


def no_model(*_: Any, **__: Any) -> None:
    raise AssertionError("a model was loaded")


@pytest.mark.parametrize(
    "words",
    [RUN, ("import", "generate", "x.safetensors", *MODEL), ("import", "vllm", "x", "--layers", "1", *MODEL)],
    ids=["run", "import generate", "import vllm"],
)
def test_a_command_refuses_before_it_loads_a_model(
    words: tuple[str, ...], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, `cacheprobe run --out` over a run deleted it, after minutes of computing."""
    monkeypatch.setattr("cacheprobe.models.loaders.load_model", no_model)
    before = contents(saved)
    with pytest.raises(TraceError, match=r"already holds a run .*, or replace the run with --overwrite"):
        command(*words, "--out", str(saved))
    assert contents(saved) == before
    with pytest.raises(AssertionError, match="a model was loaded"):
        command(*words, "--out", str(saved), "--overwrite")


def test_run_replaces_the_run_with_overwrite(saved: Path) -> None:
    command(*RUN, "--out", str(saved), "--overwrite")
    trace = cp.load_trace(saved)
    assert trace.fingerprint["model"] == "coinflip-plain" and not (saved / "report.html").exists()
    assert "overwrite" not in trace.meta["command"]["settings"]


def test_an_import_replaces_the_run_with_overwrite(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"hidden_states": torch.zeros(3, 1, 8), "token_ids": torch.arange(3)}, tmp_path / "a.safetensors")
    words = ("import", "vllm", str(tmp_path / "a.safetensors"), "--layers", "1", "--out", str(saved))
    command(*words, "--overwrite")
    assert cp.load_trace(saved).meta["kind"] == "import" and not (saved / "report.html").exists()


def test_the_demo_refuses_a_directory_of_others_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces its own runs, as its help says; the second directory is checked before the first run too."""
    monkeypatch.setattr("cacheprobe.models.loaders.load_model", no_model)
    (tmp_path / "demo-thinking").mkdir()
    (tmp_path / "demo-thinking" / "thesis.tex").write_text("years of work")
    with pytest.raises(TraceError, match=r"demo-thinking holds files that are not a trace, such as thesis\.tex"):
        command("demo", "--out", str(tmp_path / "demo"), "--no-progress")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda d: d.write_text("x"), "is a file; choose a directory"),
        (lambda d: (d.mkdir(), (d / "a.txt").write_text("x")), r"such as a\.txt; choose an empty directory"),
        (lambda d: (d.mkdir(), (d / "manifest.json").write_text("{}")), "not of a cacheprobe trace; choose an empty"),
    ],
)
def test_what_is_no_run_is_refused_with_overwrite_too(tmp_path: Path, make: Any, said: str) -> None:
    make(tmp_path / "x")
    for overwrite in (False, True):
        with pytest.raises(TraceError, match=said):
            require_free(tmp_path / "x", overwrite)


def test_what_an_unfinished_save_left_is_free(trace: cp.Trace, saved: Path) -> None:
    """Without a manifest there is no run; a manifest that cannot be read may be replaced."""
    (saved / "manifest.json").write_text("{")
    with pytest.raises(TraceError, match=r"its manifest\.json cannot be read.*--overwrite"):
        require_free(saved)
    require_free(saved, overwrite=True)
    (saved / "manifest.json").unlink()
    trace.save(saved)
    require_free(saved / "absent")


def test_the_names_of_all_tables_are_known() -> None:
    assert set(storage.TABLES) | {"states", "readings", "waiting"} == set(KINDS)
