"""Damage to a stored run: each kind is noticed, and named, by `cp.verify` and by `cacheprobe verify`."""

import copy
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.cli.app import verify as verify_command
from cacheprobe.core.records import Request
from cacheprobe.trace.manifest import damaged_files
from cacheprobe.trace.state_store import MemoryStore
from tests.tiny import PROMPTS, SMALL, loaded
from tests.twins.tables_slowly import require_right_tables

EARLY = cp.drafters.EarlyExit(layer=1)


@pytest.fixture(scope="module")
def run() -> cp.Trace:
    """Two deterministic requests of three, preempted, drafted and rolled back, with states, heads and readings."""
    heads = cp.CaptureConfig(sites="STCZ", heads=("z",))
    return cp.run(loaded(), PROMPTS[:3], **SMALL, drafter=EARLY, deterministic=[0, 2], max_kv_tokens=70, capture=heads)


def table(trace: cp.Trace, name: str) -> pd.DataFrame:
    made = getattr(trace, f"{name}_table").copy()
    setattr(trace, f"{name}_table", made)
    return made


def change(name: str, column: str, where: str, new: Callable[[object], object]) -> Callable[[cp.Trace], None]:
    """Another value in one cell of a table."""

    def damage(trace: cp.Trace) -> None:
        made = table(trace, name)
        line = made.query(where).index[-1]
        made.at[line, column] = new(made.at[line, column])

    return damage


def drop(name: str, where: str) -> Callable[[cp.Trace], None]:
    def damage(trace: cp.Trace) -> None:
        made = table(trace, name)
        setattr(trace, f"{name}_table", made.drop(made.query(where).index[-1]).reset_index(drop=True))

    return damage


def change_state(trace: cp.Trace) -> None:
    states = {
        (s, x): trace.store.all_of(s, x).clone() for s in (*trace.store.sites, *trace.store.heads) for x in range(3)
    }
    row = trace.rows(0, "committed").iloc[-1]
    states["z", 1][row.state_index, 0, 0] += 1
    trace.store = MemoryStore(states)


def plus(amount: float) -> Callable[[object], object]:
    return lambda value: value + amount  # type: ignore[operator]


DRAFTED, OURS = "request_id == 0 and num_rolled_back > 1", "request_id == 0 and status == "
READING, LOGPROBS = "the reading of layer", "committed_logprobs_nats"
DAMAGES = {
    "a wrong position": (change("row", "position", OURS + "'committed'", plus(1)), "the oracle has no row there"),
    "a log-probability": (change("event", LOGPROBS, DRAFTED, lambda v: [v[0] - 1e-4, *v[1:]]), "log-probabilities"),
    "a missing verdict": (drop("event", DRAFTED), "log-probabilities"),
    "a reading's entropy": (change("hypothesis", "entropy_nats", OURS + "'committed'", plus(1e-3)), READING),
    "a reading's status": (change("hypothesis", "status", OURS + "'rolled_back'", lambda _: "committed"), READING),
    "a head's state": (change_state, "site z of layer 1"),
}
OTHER_DAMAGES = {
    "a verdict's target": change("event", "target_token_ids", DRAFTED, lambda v: [(v[0] + 1) % 96, *v[1:]]),
    "an accepted count": change("event", "num_accepted", DRAFTED, plus(1)),
    "a role": change("row", "role", "role == 'recovered'", lambda _: "bonus"),
    "a status": change("row", "status", OURS + "'superseded'", lambda _: "rolled_back"),
    "a missing row": drop("row", "request_id == 0 and phase == 'decode'"),
    "a missing event": drop("event", "request_id == 0 and phase == 'decode'"),
    "a provenance": change("ledger", "provenance", "provenance == 'verified'", lambda _: "provisional"),
    "a missing change": drop("ledger", "request_id == 0 and provenance == 'free'"),
    "a reading's first choice": change("hypothesis", "token_id", "status == 'rolled_back'", lambda v: (v + 1) % 96),
    "a missing reading": drop("hypothesis", "request_id == 1"),
}
"""What `cp.verify` cannot see: the oracle has another schedule, without drafts."""


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_noticed_by_name(run: cp.Trace, name: str, tmp_path: Path) -> None:
    """Written wrong: the checksums fit, so only the oracle shows it."""
    damage, said = DAMAGES[name]
    damaged = copy.copy(run)
    damage(damaged)
    stored = cp.load_trace(damaged.save(tmp_path / "run"))
    assert damaged_files(tmp_path / "run")[1] == []
    result = cp.verify(stored, loaded(), progress=False)
    assert result.first_difference is not None and said in result.first_difference


@pytest.mark.parametrize("name", OTHER_DAMAGES)
def test_the_check_of_tables_fails_for_a_damaged_one(run: cp.Trace, name: str) -> None:
    damaged = copy.copy(run)
    OTHER_DAMAGES[name](damaged)
    with pytest.raises(AssertionError):
        require_right_tables(damaged)


def test_a_whole_run_is_equal_and_says_what_was_not_compared(run: cp.Trace, tmp_path: Path) -> None:
    result = cp.verify(cp.load_trace(run.save(tmp_path / "run")), loaded(), progress=False)
    assert result.is_equal, result.first_difference
    assert result.num_requests == 3 and result.num_logprobs == 40 and result.num_tokens == 60
    assert result.num_states == (24 + 59) * 3 * 4 and result.num_readings == (20 + 20) * 3 and result.num_files == 7
    loose = len(run.rows(0)) + len(run.rows(2)) - 24 - 59
    text = str(result)
    assert "equal to the oracle: 60 tokens of 3 requests" in text and "compared with their checksums: 7 files" in text
    assert "not compared: log-probabilities, states and readings of 1 requests" in text
    assert f"not compared: states and readings of {loose} rows that are not committed" in text
    assert repr(result) == f"Replay({text})"


def test_requests_that_nobody_verified_are_named() -> None:
    text = str(cp.verify(cp.run(loaded(), PROMPTS[:3], **SMALL, deterministic=[1], capture=None), progress=False))
    assert "not compared: tokens of 2 requests (0, 2)" in text and "not compared: states: the run kept none" in text


@pytest.mark.parametrize("kind", ["rows", "events", "ledger", "hypotheses", "states", "manifest"])
def test_damage_on_the_disk_is_noticed_by_file(
    run: cp.Trace, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bit of each file, or a word of the manifest."""
    directory = run.save(tmp_path / "run")
    path = next(directory.glob(f"{kind}*"))
    if kind == "manifest":
        path.write_text(path.read_text(encoding="utf-8").replace('"kind": "run"', '"kind": "nur"'), encoding="utf-8")
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert verify_command(directory, progress=False) == 1
    assert f"damaged: {path.name} was changed after the run was saved" in capsys.readouterr().out


SAMPLED = cp.SamplingParams(temperature=0.8)
EVERY_WAY = [
    {},
    {"deterministic": [0, 2]},
    {"deterministic": True, "max_kv_tokens": 70},
    {"window": 1, "group": 4, "deterministic": [1]},
    {"drafter": EARLY, "acceptance": "rejection", "sampling": SAMPLED},
    {"drafter": cp.drafters.NGram(), "max_kv_tokens": 80},
    {"deterministic": True, "sampling": cp.SamplingParams(n=2)},
    {"deterministic": True, "capture": cp.CaptureConfig(positions=(5, 6, 7), phases=("decode", "verify"))},
]


@pytest.mark.parametrize("settings", EVERY_WAY)
def test_a_right_run_has_no_fault(settings: dict) -> None:
    """Every way of drafting and leaving that the loop has: the tables derived from the verdicts are those recorded."""
    trace = cp.run(loaded(), PROMPTS, **{**SMALL, **settings})
    require_right_tables(trace)


def test_cached_cancelled_and_shared_requests_have_no_fault() -> None:
    rows = cp.kv_snapshot(loaded(), [1, 2, 3, 4, 5], capacity=96)
    prompts = [Request([1, 2, 3, 4, 5, 6], cached=rows), [7, 7], [7, 7], [8, 9], [5]]
    stream = cp.stream(
        loaded(), prompts, window=4, group=2, capacity=96, max_kv_tokens=70, deterministic=[1, 2, 3], capture="Z"
    )
    for number, _ in enumerate(stream):
        if number == 6:
            stream.cancel(1)
    assert stream.trace().meta["finish"]["1"] == "cancelled"
    require_right_tables(stream.trace())
