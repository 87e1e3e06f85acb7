"""A run that is read on part by part holds what is read of it at once, at every part."""

import fcntl
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.files import Locked, only_writer, writer_of
from cacheprobe.trace.journal import begin_journal, read_journal
from cacheprobe.trace.manifest import JOURNAL, TraceError
from cacheprobe.trace.stored import growing_run
from cacheprobe.trace.tables.build import hypotheses_table
from cacheprobe.views.dashboard import app
from cacheprobe.views.dashboard.questions import answered
from cacheprobe.views.dashboard.run_list import RunList, TokensSoFar, progress_of
from tests.dashboard.growing_run import MOST, SETTINGS, begun, go_on, part_each_round
from tests.tiny import PROMPTS


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interrupted run whose requests were preempted."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        part_each_round(patch)
        patch.setitem(SETTINGS, "max_kv_tokens", 70)
        stream = begun(directory)
        go_on(stream, directory, 30)
        stream.close()
    return directory


def upto(directory: Path, lines: list[bytes], count: int) -> None:
    (directory / JOURNAL).write_bytes(b"".join(lines[:count]))


def test_read_on_is_read_at_once(stopped: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(stopped, tmp_path / "run"))
    lines = (directory / JOURNAL).read_bytes().splitlines(keepends=True)
    upto(directory, lines, 1)
    followed = growing_run(directory)
    assert followed.rows.empty and followed.read_on() is followed
    for count in (3, 4, 15, len(lines)):
        upto(directory, lines, count)
        with (directory / JOURNAL).open("ab") as file:
            file.write(b"half a li")  # written at this moment
        newer = followed.read_on()
        assert newer is not None and newer is not followed
        followed, whole = newer, cp.load_trace(directory)
        assert followed.journal == read_journal(directory) and len(followed.journal.parts) == count - 1
        for ours, theirs in (
            (followed.rows, whole.row_table),
            (followed.events, whole.event_table),
            (followed.ledger, whole.ledger_table),
        ):
            pd.testing.assert_frame_equal(ours, theirs)
        assert [r["committed_token_ids"] for r in followed.requests] == list(whole.tokens.values())
        assert [r["text"] for r in followed.requests] == list(whole.texts.values())
        readings = whole.hypotheses(include_rolled_back=True)
        for request in range(len(PROMPTS)):
            own = readings[readings.request_id == request].reset_index(drop=True)
            pd.testing.assert_frame_equal(
                followed.readings(request).reset_index(drop=True), own, check_dtype=False, obj=f"request {request}"
            )


FOLLOWING = ("insight", "timeline", "cache", "card", "decode", "grid", "window", "thoughts")


def test_every_view_answers_at_every_part(stopped: Path, tmp_path: Path) -> None:
    """Of requests without a pass, with open drafts, and preempted ones."""
    directory = Path(shutil.copytree(stopped, tmp_path / "run"))
    lines = (directory / JOURNAL).read_bytes().splitlines(keepends=True)
    for count in (1, 2, 9, len(lines)):
        upto(directory, lines, count)
        run_list = RunList.of([directory])
        views = app.views_of(run_list)
        facts = answered(views["facts"], {"run": 0})
        assert facts["is_empty"] == (count == 1) and "error" not in facts
        for request in range(len(PROMPTS)) if count > 1 else ():
            story = answered(views["story"], {"run": 0, "request": request})
            for position in {story["prompt"] - 1, story["prompt"] + story["tokens"] - 2}:
                common = {"run": 0, "request": request, "step": facts["last"], "position": position, "row": None}
                common |= {"requests": [0, 5], "steps": [0, 80], "places": [0, 20], "place": 0, "width": 900}
                common |= {"site": "S", "lens": "recorded", "colour": "logprob", "rows": "all"}
                common |= {"measure": "verdict"}
                for name in (*FOLLOWING, "text", "overview"):
                    said = answered(views[name], common).get("error", "")
                    assert not said or "has no row" in said or "has no reading" in said, (name, request, said)


def test_a_reading_without_a_next_token_asks_for_no_text_of_token_0(stopped: Path) -> None:
    """A growing run knows the texts of the tokens that occurred. A reading without a committed next token asked for
    that of token 0, and the run could not be read."""
    followed = growing_run(stopped)
    row = followed.rows[followed.rows.request_id == 0].iloc[:1]
    one = {name: torch.tensor([-1]) for name in ("target", "target_rank")}
    one |= {"row": torch.tensor(row.row.to_numpy()), "layer": torch.tensor([0]), "entropy_nats": torch.tensor([0.1])}
    one |= {"top_token_ids": torch.tensor([[7]]), "top_logprob_nats": torch.tensor([[-0.5]])}
    one |= {"target_logprob_nats": torch.tensor([torch.nan])}
    readings = hypotheses_table(one, row, "logit", lambda ids: [{7: "seven"}[i] for i in ids])
    assert readings.token.tolist() == ["seven"] and readings.committed_token.isna().all()


def test_a_journal_that_is_of_another_run_or_shorter_is_read_anew(stopped: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(stopped, tmp_path / "run"))
    whole = (directory / JOURNAL).read_bytes()
    (directory / JOURNAL).write_bytes(whole[:-10])
    moved = growing_run(directory)
    assert moved.read_on() is moved
    upto(directory, whole.splitlines(keepends=True), 3)
    assert moved.read_on() is None
    (directory / JOURNAL).unlink()
    assert moved.read_on() is None
    begin_journal(directory, {**moved.journal.header, "run_id": "another"})
    assert moved.read_on() is None
    with pytest.raises(TraceError, match=f"has no {JOURNAL}"):
        growing_run(tmp_path / "none")


def test_the_writer_is_known_by_its_lock(tmp_path: Path) -> None:
    """A file that a killed writer left locks nothing; and who looks is in nobody's way."""
    path = tmp_path / "lock"
    assert writer_of(path) == "" and not path.exists()
    with only_writer(path):
        assert writer_of(path).startswith("process ")
        with pytest.raises(Locked):
            only_writer(path).__enter__()
    path.write_text('{"process": 1}')
    assert writer_of(path) == "" and path.exists()
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert writer_of(path) == ""


def test_progress_counts_what_is_left(stopped: Path) -> None:
    journal = read_journal(stopped)
    assert journal is not None
    at = progress_of(journal)
    tokens = sum(map(len, journal.tokens.values()))
    assert (at.num_tokens, at.most_tokens, at.can_stop) == (tokens, MOST, False)
    seconds = sum(part["seconds"] for part in journal.parts)
    assert at.tokens_per_second == pytest.approx(tokens / seconds) or seconds > 10
    assert TokensSoFar(10, 30, True, 4.0).time_left() == ", 4.0 tokens a second, at most 5.0 s left."
    assert TokensSoFar(0, 30, True, None).time_left() == "."
