"""Features of runs that are recorded to disk: those of the run in memory, read while it grows, kept after a kill."""

import signal
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.trace.journal import read_journal
from cacheprobe.trace.manifest import JOURNAL
from cacheprobe.trace.stored import growing_run
from tests.capture.recorded_run import DRAFTERS, LONG, failing_after, recorded, recording_process
from tests.command import cacheprobe
from tests.dashboard.growing_run import part_each_round
from tests.dictionaries.planted import random_dictionary
from tests.invariants.machines import Faulty, tiny
from tests.invariants.runs import PROMPTS as FAILING
from tests.invariants.runs import RUN
from tests.tiny import PROMPTS, SMALL, loaded

TWINS = [*PROMPTS[:3], PROMPTS[2], PROMPTS[2], PROMPTS[2]]
"""Prompts of which some are equal, so that their rows share features; the later ones begin when a place is free."""


@pytest.fixture(autouse=True)
def _part_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    part_each_round(monkeypatch)


@pytest.mark.parametrize(
    "settings",
    [
        dict(capture=None, drafter=cp.drafters.EarlyExit(layer=1)),
        dict(capture="SZ", deterministic=[0, 4], max_batch=2),
        dict(capture=cp.CaptureConfig("Z", statuses=("rolled_back",)), drafter=cp.drafters.EarlyExit(layer=1)),
        dict(capture=cp.CaptureConfig(None, keep=lambda row: False)),
    ],
    ids=["no states", "few places", "rolled back", "nothing kept"],
)
def test_they_are_those_of_the_run_in_memory(settings: dict[str, Any], tmp_path: Path) -> None:
    mine, given = random_dictionary(), {**SMALL, "max_new_tokens": 8, **settings}
    in_memory = cp.run(loaded(), TWINS, **given, dictionary=mine)
    on_disk = cp.run(loaded(), TWINS, **given, dictionary=mine, out=tmp_path / "run")
    wanted = in_memory.features()
    assert on_disk.features().equals(wanted), "other features"
    assert cp.load_trace(tmp_path / "run").features().equals(wanted)
    is_any = getattr(settings["capture"], "keep", None) is None
    assert (len(wanted) > 20) == is_any
    if settings["capture"] == "SZ":
        assert wanted.equals(on_disk.features(mine, top=8))


def test_they_are_read_while_the_run_grows(tmp_path: Path) -> None:
    mine, settings = random_dictionary(), {k: v for k, v in LONG.items() if k != "progress"}
    settings |= {"drafter": cp.drafters.EarlyExit(layer=1), "dictionary": mine, "capture": "S"}
    stream, numbers = cp.stream(loaded(), PROMPTS, **settings, out=tmp_path / "run"), []
    for number, _ in enumerate(stream):
        if number % 10 or read_journal(tmp_path / "run") is None:
            continue
        growing = cp.load_trace(tmp_path / "run")
        features = growing.features()
        assert features.equals(growing.features(mine, top=8))
        followed = growing_run(tmp_path / "run").features
        assert followed is not None and followed.equals(features)
        numbers.append(len(features))
    assert len(numbers) > 2 and numbers == sorted(numbers) and numbers[0] < numbers[-1] < len(stream.trace().features())


@pytest.mark.parametrize("is_drafted", [False, True])
def test_a_pass_that_fails_moves_no_feature(is_drafted: bool, tmp_path: Path) -> None:
    """The features that follow a failed pass belong to their rows, also if parts were written before it."""
    drafter = cp.drafters.EarlyExit(layer=1) if is_drafted else None
    settings = dict(RUN, deterministic=True, capture="S", dictionary=random_dictionary(), drafter=drafter)
    tried = tiny()
    cp.run(tried, FAILING[:4], **settings)  # tries the shapes of passes, so that the fault meets none of these trials
    for number in (2, 8):
        faults = {number: torch.OutOfMemoryError("for once")}
        model = Faulty(tried, lambda call, faults=faults: faults.pop(call.number, None))
        trace = cp.run(model, FAILING[:4], **settings, out=tmp_path / str(number))
        assert model.num_faults == 1 and not trace.meta["errors"]
        assert len(trace.features()) and trace.features().equals(trace.features(random_dictionary(), top=8))


def committed(trace: cp.Trace, request_id: int) -> pd.DataFrame:
    """Features of the committed rows of a request, without what the order of passes decides."""
    found = trace.features(rows=trace.rows(request_id, "committed"))
    return found[["position", "rank", "feature", "activation"]].sort_values(["position", "rank"], ignore_index=True)


def require_continued(directory: Path, drafter: str, whole: cp.Trace) -> None:
    """Continues a run, and compares the features of its deterministic requests bit for bit."""
    growing = cp.load_trace(directory)
    if len(growing.features()):
        assert growing.features().equals(growing.features(random_dictionary(), top=8)), "part of a step"
    again = cp.resume(directory, loaded(), drafter=DRAFTERS[drafter](), dictionary=random_dictionary(), progress=False)
    assert again.features().equals(again.features(random_dictionary(), top=8))
    for request_id in LONG["deterministic"]:
        assert committed(again, request_id).equals(committed(whole, request_id))


def test_a_run_goes_on_with_its_features(tmp_path: Path) -> None:
    mine, drafter = random_dictionary(), "early exit"
    whole = cp.run(loaded(), PROMPTS, **LONG, drafter=DRAFTERS[drafter](), dictionary=mine)
    for number in (2, 20):
        directory = tmp_path / str(number)
        with failing_after(number):
            recorded(directory, drafter, mine)
        require_continued(directory, drafter, whole)


def test_a_killed_run_keeps_the_features_of_whole_steps(tmp_path: Path) -> None:
    """kill -9."""
    directory, drafter = tmp_path / "run", "early exit"
    process = recording_process(directory, drafter, has_features=True)
    while process.is_alive() and not ((directory / JOURNAL).exists() and len(read_parts(directory)) > 2):
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    whole = cp.run(loaded(), PROMPTS, **LONG, drafter=DRAFTERS[drafter](), dictionary=random_dictionary())
    require_continued(directory, drafter, whole)


def read_parts(directory: Path) -> tuple[dict[str, Any], ...]:
    """The parts that a run's journal names so far."""
    journal = read_journal(directory)
    return () if journal is None else journal.parts


def stopped(directory: Path) -> None:
    """A run with a dictionary that ends after its first steps."""
    settings = {k: v for k, v in LONG.items() if k != "progress"}
    stream = cp.stream(loaded(), PROMPTS, **settings, dictionary=random_dictionary(), out=directory)
    next(stream)
    stream.close()


def test_another_dictionary_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    for other in (None, random_dictionary(seed=1)):
        with pytest.raises(ValueError, match="recorded features of .*dictionary.* the same one"):
            cp.resume(tmp_path / "run", loaded(), dictionary=other)


def test_the_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(tmp_path / "run")
    monkeypatch.setattr("cacheprobe.models.loaders.model_of_run", lambda *_, **__: loaded())
    done = cacheprobe("resume", str(tmp_path / "run"), "--no-progress")
    assert done.returncode and "--dictionary" in done.stderr
    folder = random_dictionary().save(tmp_path / "dictionary")
    done = cacheprobe("resume", str(tmp_path / "run"), "--dictionary", str(folder), "--no-progress")
    assert done.returncode == 0, done.stderr
    whole = cp.run(loaded(), PROMPTS, **LONG, dictionary=random_dictionary(), capture=None)
    assert committed(cp.load_trace(tmp_path / "run"), 0).equals(committed(whole, 0))


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    cp.run(loaded(), PROMPTS[:2], **SMALL, dictionary=random_dictionary(), out=tmp_path / "run")
    assert cacheprobe("verify", "--files", str(tmp_path / "run")).returncode == 0
    path = next((tmp_path / "run").glob("features-*.parquet"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    done = cacheprobe("verify", "--files", str(tmp_path / "run"))
    assert done.returncode and f"damaged: {path.name}" in done.stdout
