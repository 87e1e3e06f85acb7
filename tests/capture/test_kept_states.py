"""What a run keeps of its states: int8, statuses, every n-th position, a predicate; beside a run that keeps all."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.config import CaptureConfig, TokenRow
from cacheprobe.core.records import ObserverError
from cacheprobe.ops.equality import bitwise
from cacheprobe.ops.state_codec import decode, encode
from cacheprobe.trace import journal
from cacheprobe.trace.journal import read_journal
from cacheprobe.trace.manifest import FORMAT_VERSION, JOURNAL, TraceError
from cacheprobe.trace.recording import disk_writer
from cacheprobe.trace.recording.kept_states import KeptStates
from cacheprobe.trace.recording.stored_states import chosen_lens
from tests.capture.test_to_disk import require_equal
from tests.dashboard.growing_run import part_each_round
from tests.tiny import PROMPTS, SMALL, loaded

SITES = dict(sites="STCZ", heads=("q", "pattern"))
DRAFTERS = {"early exit": lambda: cp.drafters.EarlyExit(layer=1), "n-gram": cp.drafters.NGram}
ROUNDING = 1e-4
"""Of a scale: 127 quotients of float32 are this exact by far."""


def even(token: TokenRow) -> bool:
    return token.token_id % 2 == 0


CHOICES: dict[str, tuple[dict[str, Any], Callable[[pd.DataFrame], pd.Series]]] = {
    "rejected": (dict(statuses=("rolled_back",)), lambda rows: rows.status == "rolled_back"),
    "not rejected": (dict(statuses=("committed", "superseded")), lambda rows: rows.status != "rolled_back"),
    "both": (
        dict(keep=even, statuses=("committed",), every=2, dtype="int8"),
        lambda rows: (rows.token_id % 2 == 0) & (rows.status == "committed") & (rows.position % 2 == 0),
    ),
}


@pytest.fixture(autouse=True)
def _part_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    part_each_round(monkeypatch)


def made(drafter: str, capture: dict[str, Any], **settings: Any) -> cp.Trace:
    chosen = {**SMALL, "max_new_tokens": 8, "deterministic": [1], **settings}
    return cp.run(loaded(), PROMPTS, **chosen, drafter=DRAFTERS[drafter](), capture=CaptureConfig(**SITES, **capture))


@pytest.fixture(scope="module")
def whole() -> cp.Trace:
    """A run that keeps every state."""
    return made("early exit", {})


@pytest.mark.parametrize("choice", CHOICES)
def test_the_rows_that_are_kept_are_those_of_a_run_that_keeps_all(whole: cp.Trace, choice: str, tmp_path: Path) -> None:
    """Tables have the same lines; states and readings of the chosen rows have the same bits, in memory and on disk."""
    every_row, (capture, chosen) = whole, CHOICES[choice]
    trace = made("early exit", capture)
    require_equal(made("early exit", capture, out=tmp_path / "run"), trace)
    require_equal(cp.load_trace(tmp_path / "run", loaded()), trace)
    if choice == "both":
        require_equal(cp.load_trace(trace.save(tmp_path / "saved"), loaded()), trace)
    rows = trace.row_table
    pd.testing.assert_frame_equal(
        rows.drop(columns="state_index"), every_row.row_table.drop(columns="state_index"), check_exact=True
    )
    assert ((rows.state_index >= 0) == chosen(rows)).all()
    kept = rows[chosen(rows)]
    assert sorted(kept.state_index) == list(range(len(kept))) and len(kept)
    for site in ("S", "q") if "dtype" not in capture else ():
        assert bitwise(trace.vectors(site, 1, kept), every_row.vectors(site, 1, kept.row.tolist()))
    for ours, theirs in zip(trace.pattern_rows(1, kept), every_row.pattern_rows(1, kept.row.tolist()), strict=True):
        assert bitwise(ours, theirs)
    readings = every_row.hypothesis_table
    assert readings is not None and trace.hypothesis_table is not None
    wanted = readings[readings.row.isin(kept.row)].reset_index(drop=True)
    pd.testing.assert_frame_equal(trace.hypothesis_table, wanted, check_exact=True)
    assert cp.verify(trace, loaded()).first_difference is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_number_differs_by_at_most_half_a_scale(dtype: torch.dtype) -> None:
    """Slowly, by Python's numbers: also of tiny and of huge vectors."""
    draw = torch.Generator().manual_seed(0)
    for factor in (1e-30, 1e-3, 1.0, 1e3) if dtype != torch.float16 else (1e-3, 1.0, 1e3):
        states = (torch.randn(20, 33, generator=draw) * factor).to(dtype)
        for vector, read in zip(states.double().tolist(), decode(encode(states)).double().tolist(), strict=True):
            scale = max(map(abs, vector)) / 127
            assert all(abs(x - y) <= (0.5 + ROUNDING) * scale for x, y in zip(vector, read, strict=True))
            assert math.isclose(max(map(abs, read)), max(map(abs, vector)), rel_tol=1e-6)  # the largest keeps its place
    assert decode(encode(states)).dtype == torch.float32 and encode(states).shape == (20, 37)


def test_zeros_stay_zeros_and_a_vector_with_a_hole_is_all_nan() -> None:
    states = torch.ones(6, 5)
    states[0], states[1, 2], states[2, 0], states[3, 4], states[4] = 0.0, torch.nan, torch.inf, -torch.inf, 1e-42
    read = decode(encode(states))
    assert bitwise(read[0], torch.zeros(5)) and read[1:4].isnan().all()
    assert (read[4] - states[4]).abs().max() <= torch.finfo(torch.float32).tiny / 2
    assert (read[5] - 1).abs().max() <= 2 * torch.finfo(torch.float32).eps  # roundings of scale and product
    assert decode(encode(torch.zeros(0, 5))).shape == (0, 5) and bitwise(decode(states), states)


def test_int8_changes_states_alone(whole: cp.Trace, tmp_path: Path) -> None:
    """Z is read from the exact states, so every table has the same bits; the files of states are a quarter of those of
    float32, and 4 bytes for each vector."""
    exact, trace = whole, made("early exit", {"dtype": "int8"})
    assert trace.meta["capture"]["dtype"] == "int8" and exact.meta["capture"]["dtype"] is None
    for name in ("row_table", "hypothesis_table", "ledger_table", "token_table"):
        pd.testing.assert_frame_equal(getattr(trace, name), getattr(exact, name), check_exact=True)
    assert trace.tokens == exact.tokens and trace.logprobs(1) == exact.logprobs(1)
    for site in ("S", "T", "C", "q"):
        for layer in range(3):
            ours, theirs = trace.store.all_of(site, layer), exact.store.all_of(site, layer)
            assert bitwise(ours, decode(encode(theirs))) and ours.dtype == torch.float32
            error = ((ours - theirs).abs() / (theirs.abs().amax(-1, keepdim=True) / 127)).nan_to_num(0.0)
            assert 0.4 < float(error.max()) <= 0.5 + ROUNDING
            assert trace.store.stored(site, layer).shape == (*theirs.shape[:-1], theirs.shape[-1] + 4)
    assert bitwise(trace.store.all_of("pattern", 1), exact.store.all_of("pattern", 1))
    replay = cp.verify(trace, loaded())
    assert replay.first_difference is None and any("rounded to int8" in said for said in replay.not_compared)
    cp.load_trace(trace.save(tmp_path / "run")).save(tmp_path / "again")
    require_equal(cp.load_trace(tmp_path / "again", loaded()), trace)


def test_what_needs_exact_states_refuses_int8() -> None:
    with pytest.raises(ValueError, match='lens="later" needs S unrounded: capture dtype int8'):
        chosen_lens("later", CaptureConfig(dtype="int8"), loaded())
    trace = cp.run(loaded(), PROMPTS[:1], **SMALL, capture=CaptureConfig("STC", dtype="int8"))
    with pytest.raises(ValueError, match="this run rounded them to int8"):
        cp.analysis.attribution(trace, 0, position=3)


def test_dropped_states_leave_the_memory_at_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of open drafts are held: at most those of one window of each request, and none at the end."""
    held, apply = [], KeptStates.apply_statuses

    def counting(self: KeptStates) -> None:
        apply(self)
        held.append((sum(one.num_bytes for one in self._undecided), self.num_bytes))

    monkeypatch.setattr(KeptStates, "apply_statuses", counting)
    made("early exit", {"statuses": ("abandoned",)})
    window = len(PROMPTS) * 2 * SMALL["window"] * 3 * 3 * loaded().d_model * 4  # draft and verify rows of S, T and C
    assert 0 < max(undecided for undecided, _ in held) <= window and held[-1] == (0, 0)
    assert max(appended for _, appended in held) == 0


def failing(token: TokenRow) -> bool:
    if token.is_draft and token.position > 6:
        raise KeyError("seven")
    return True


@pytest.mark.parametrize(
    ("keep", "said"),
    [(failing, r"keep=.*failing of CaptureConfig, called with TokenRow\(request_id=\d, step=\d+, .*KeyError"),
     (lambda token: None, "must return True or False, got None")],
)  # fmt: skip
def test_an_error_of_the_predicate_names_it_and_the_token(keep: Callable[[TokenRow], Any], said: str) -> None:
    """In a pass of a drafter, too, where it was taken for an error of the drafter and the pass was tried forever."""
    with pytest.raises(ObserverError, match=said):
        made("early exit", {"keep": keep})


def test_the_predicate_is_called_once_a_row_and_named_in_the_metadata(tmp_path: Path) -> None:
    asked: list[TokenRow] = []

    def asking(token: TokenRow) -> bool:
        asked.append(token)
        return token.position >= token.num_prompt_tokens

    trace = made("n-gram", {"keep": asking, "every": 2})
    rows = trace.row_table[trace.row_table.position % 2 == 0]
    ours = {(t.request_id, t.step, t.phase, t.position, t.token_id) for t in asked}
    columns = ["request_id", "step", "phase", "position", "token_id"]
    assert len(asked) == len(ours) == len(rows) and ours == set(rows[columns].itertuples(index=False, name=None))
    assert trace.meta["capture"]["keep"].endswith("asking") and trace.meta["capture"]["every"] == 2
    with pytest.raises(ValueError, match=r"position 0 .*every=2, keep=.*asking"):
        trace.states("S", 0, 0)
    json.dumps(trace.meta)


def stopped(directory: Path, capture: dict[str, Any]) -> None:
    """Records a run and leaves its directory as a kill after the first half of the journal does."""
    made("n-gram", capture, out=directory / "whole")
    seen: list[Path] = []
    end = disk_writer.DiskWriter.end_round

    class Killed(Exception):
        """Stands for a kill: the run ends between two rounds."""

    def until(self: disk_writer.DiskWriter, states: Any, *, is_last: bool = False) -> None:
        end(self, states, is_last=is_last)
        seen.append(directory)
        if len(seen) == 8:
            raise Killed

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
        patched.setattr(disk_writer.DiskWriter, "end_round", until)
        made("n-gram", capture, out=directory / "run")


def test_a_killed_run_goes_on_with_the_same_choice(tmp_path: Path) -> None:
    """Of deterministic requests, kept states and readings have the bits of a run that was not killed."""
    capture = {"keep": even, "statuses": ("committed", "rolled_back"), "dtype": "int8"}
    stopped(tmp_path, capture)
    again = [cp.drafters.NGram() for _ in range(3)]
    with pytest.raises(ValueError, match=r"with the predicate keep=.*even, which is not stored; given is None"):
        cp.resume(tmp_path / "run", loaded(), drafter=again[0], progress=False)
    with pytest.raises(ValueError, match=r"given is .*failing"):
        cp.resume(tmp_path / "run", loaded(), drafter=again[1], keep=failing, progress=False)
    resumed = cp.resume(tmp_path / "run", loaded(), drafter=again[2], keep=even, progress=False)
    want = cp.load_trace(tmp_path / "whole", loaded())
    ours, theirs = (trace.rows(1, "committed").query("state_index >= 0") for trace in (resumed, want))
    assert len(ours) and ours.position.tolist() == theirs.position.tolist()
    assert bitwise(resumed.vectors("S", 2, ours), want.vectors("S", 2, theirs))
    kept = resumed.row_table[resumed.row_table.state_index >= 0]
    assert set(kept.status) <= {"committed", "rolled_back"} and (kept.token_id % 2 == 0).all()
    assert cp.verify(resumed, loaded()).first_difference is None


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path, {})
    path = tmp_path / "run" / JOURNAL
    lines = [journal._content(line) for line in path.read_bytes().splitlines(keepends=True)]
    for version in (5, FORMAT_VERSION + 1):
        path.write_bytes(b"".join(map(journal._line, [{**lines[0], "format_version": version}, *lines[1:]])))
        with pytest.raises(TraceError, match=f"trace format {version}, .* reads {FORMAT_VERSION}; .* cacheprobe 0.1.0"):
            read_journal(tmp_path / "run")
