"""Notes beside a run: what is written, who may write at once, and what is refused."""

import json
import multiprocessing
import shutil
import tempfile
from pathlib import Path

import pytest

import cacheprobe as cp
from cacheprobe.trace import notes as notes_module
from cacheprobe.trace.notes import MOST_LETTERS, NoteError, Notes, read_notes
from cacheprobe.trace.stored import StoredRun
from tests.tiny import PROMPTS, SMALL, loaded
from tests.trace.test_saving import as_a_user


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cp.run(loaded(), PROMPTS[:3], **SMALL).save(tmp_path_factory.mktemp("noted") / "run")


def notes_of(run: Path) -> Notes:
    stored = StoredRun(run)
    return Notes(run, stored.requests, stored.token_texts)


@pytest.fixture
def run(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "run"))


def test_a_trace_knows_its_notes(run: Path) -> None:
    trace = cp.load_trace(run)
    assert trace.notes.table().empty
    prompt, committed = list(trace.requests[1].prompt_token_ids), trace.committed(1)
    first = trace.notes.add(1, "why here?", position=len(prompt) + 2)
    trace.notes.add(2, "odd")
    trace.notes.add(0, position=1)
    assert first.token_id == committed[2]
    table = cp.load_trace(run).notes.table()
    assert table.request_id.tolist() == [0, 1, 2] and table.text.tolist() == ["", "why here?", "odd"]
    assert table.position.tolist()[:2] == [1, len(prompt) + 2] and table.position.isna().tolist() == [
        False,
        False,
        True,
    ]
    assert table.token.tolist() == [trace.token_texts[trace.requests[0].prompt_token_ids[1]],
                                    trace.token_texts[committed[2]], ""]  # fmt: skip
    assert table.is_of_run.all()
    again = trace.notes.add(1, "because", position=len(prompt) + 2)  # in place of the one on the same token
    assert [note.text for note in read_notes(run)] == ["", "because", "odd"]
    trace.notes.remove(again.note_id)
    assert trace.notes.table().request_id.tolist() == [0, 2]
    assert json.loads((run / "notes.json").read_text())["format"] == "cacheprobe notes"
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]


def test_a_copy_of_a_run_has_its_notes(run: Path, tmp_path: Path) -> None:
    trace = cp.load_trace(run)
    trace.notes.add(1, "kept")
    copied = trace.save(tmp_path / "copy")
    assert cp.load_trace(copied).notes.table().text.tolist() == ["kept"]
    trace.save(run, overwrite=True)
    assert trace.notes.table().text.tolist() == ["kept"]


def test_what_no_file_can_hold_is_refused(run: Path) -> None:
    trace = cp.load_trace(run)
    with pytest.raises(NoteError, match="surrogate"):
        trace.notes.add(0, "\ud800")
    large = [{"note_id": "a", "request_id": 10**23}]
    (run / "notes.json").write_text(json.dumps({"format": "cacheprobe notes", "format_version": 1, "notes": large}))
    with pytest.raises(NoteError, match="whole numbers"):
        trace.notes.table()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((3, "x"), "there is no request 3; the run has 0 to 2"),
        ((0, "x", 999), "request 0 has no token at position 999; it has positions 0 to"),
        ((0, "x", -1), "request 0 has no token at position -1"),
        ((0, "x" * (MOST_LETTERS + 1)), "at most 2,000 letters, got 2,001"),
    ],
)
def test_what_no_note_can_be_is_refused(run: Path, arguments: tuple, says: str) -> None:
    with pytest.raises(NoteError, match=says):
        cp.load_trace(run).notes.add(*arguments)
    assert not (run / "notes.json").exists()


def test_a_trace_in_memory_has_no_place_for_notes(run: Path) -> None:
    trace = cp.run(loaded(), PROMPTS[:1], **SMALL)
    assert trace.notes.table().empty
    with pytest.raises(NoteError, match="save it, and load it with"):
        trace.notes.add(0, "x")
    with pytest.raises(NoteError, match="there is no note 'abc'"):
        cp.load_trace(run).notes.remove("abc")


BROKEN = ["{", "[]", '{"notes": []}', '{"format": "cacheprobe notes", "format_version": 2, "notes": []}',
          '{"format": "cacheprobe notes", "format_version": 1, "notes": [{"note_id": "a", "request_id": "0"}]}',
          '{"format": "cacheprobe notes", "format_version": 1, "notes": [{"note_id": "a", "request_id": 0, "m": 1}]}',
          '{"format": "cacheprobe notes", "format_version": 1}', "[" * 100_000]  # fmt: skip


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_file_is_said_and_stays(run: Path, content: str) -> None:
    path = run / "notes.json"
    path.write_text(content)
    trace = cp.load_trace(run)
    for attempt in (trace.notes.table, lambda: trace.notes.add(0, "x"), lambda: trace.notes.remove("a")):
        with pytest.raises(NoteError, match=f"{path} .*(mend the file, or move it away)"):
            attempt()
    assert path.read_text() == content


def test_a_large_file_is_not_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes_of(run).add(0, "x")
    monkeypatch.setattr(notes_module, "MOST_BYTES", 20)
    with pytest.raises(NoteError, match="more than 20 bytes"):
        read_notes(run)


def test_the_number_of_notes_has_a_limit(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes_module, "MOST_NOTES", 2)
    notes = notes_of(run)
    for request_id in (0, 1):
        notes.add(request_id, "x")
    with pytest.raises(NoteError, match="2 notes, and no more are kept"):
        notes.add(2, "x")
    notes.add(1, "in place of the other")
    assert [note.text for note in read_notes(run)] == ["x", "in place of the other"]


def _write(run: Path, request_id: int, positions: range) -> None:
    notes = notes_of(run)
    for position in positions:
        notes.add(request_id, f"{request_id} {position}", position)


def test_writers_at_once_lose_nothing(run: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(run, request_id, range(3))) for request_id in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [note.text for note in read_notes(run)] == [f"{r} {p}" for r in range(3) for p in range(3)]


def test_a_second_writer_waits_and_then_says_who_writes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait, and without the lock, the later of two writers would win."""
    from cacheprobe.core.files import only_writer

    monkeypatch.setattr(notes_module, "_PATIENCE", 0.1)
    with only_writer(run / ".notes.lock"), pytest.raises(NoteError, match="is being written by process"):
        notes_of(run).add(0, "x")
    assert read_notes(run) == ()


def test_a_read_only_directory_says_so(stored: Path) -> None:
    requests = StoredRun(stored).requests
    with tempfile.TemporaryDirectory() as name:
        run = Path(shutil.copytree(stored, name, dirs_exist_ok=True))
        with as_a_user(run), pytest.raises(NoteError, match=f"{run} is read-only, so it takes no notes; copy the run"):
            Notes(run, requests, {}).add(0, "x")


def test_a_note_says_if_another_run_took_its_place(run: Path) -> None:
    trace = cp.load_trace(run)
    position = len(trace.requests[0].prompt_token_ids)
    trace.notes.add(0, "the first token", position=position)
    trace.notes.add(2, "kept")
    trace.save(run, overwrite=True)  # the same run
    assert cp.load_trace(run).notes.table().is_of_run.tolist() == [True, True]
    other = [token_id + 1 for token_id in PROMPTS[0]]
    cp.run(loaded(), [other], **SMALL).save(run, overwrite=True)
    table = cp.load_trace(run).notes.table()
    same = cp.load_trace(run).committed(0)[0] == trace.committed(0)[0] and len(other) == position
    assert table.text.tolist() == ["the first token", "kept"] and table.is_of_run.tolist() == [same, False]


def test_notes_alone_do_not_bar_a_new_run(run: Path, tmp_path: Path) -> None:
    """As after the files of a run were deleted by hand."""
    cp.load_trace(run).notes.add(0, "x")
    (tmp_path / "new").mkdir()
    shutil.copy(run / "notes.json", tmp_path / "new")
    cp.load_trace(run).save(tmp_path / "new")
    assert cp.load_trace(tmp_path / "new").notes.table().text.tolist() == ["x"]
    with pytest.raises(NoteError, match="there is no note"):
        notes_of(tmp_path / "new").remove("nope")
