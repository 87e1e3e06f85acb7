"""Reads and writes the notes on a run: texts about a request or one of its tokens, in notes.json beside the run. Does
not import torch.

    notes.json       {"format": "cacheprobe notes", "format_version": 1, "notes": [{"note_id": ..., ...}, ...]}
    .notes.lock      lock file, while a process changes notes.json
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import index
from pathlib import Path
from typing import SupportsIndex

import pandas as pd

from cacheprobe.core.files import Locked, only_writer, write_json
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.manifest import NOTES, NOTES_LOCK

MOST_NOTES, MOST_LETTERS, MOST_BYTES = 1000, 2000, 16 * 2**20
"""Most notes of a run, letters of a note, and bytes of a file of notes that is read."""
_FORMAT = {"format": "cacheprobe notes", "format_version": 1}
_PATIENCE = 5.0
"""Seconds to wait for another writer, which holds the lock for some milliseconds."""


class NoteError(ValueError):
    """Raised if a file of notes cannot be read or written, or if a note is not allowed."""


@dataclass(frozen=True)
class Note:
    """Holds one note."""

    note_id: str
    """Eight hexadecimal digits, unlike those of the other notes of the run."""
    request_id: int
    position: int | None = None
    """Absolute position of the token, counted from the first token of the prompt; None for a note on the request."""
    token_id: int | None = None
    """Token that was there when the note was written; None for a note on the request."""
    text: str = ""
    """What the note says; "" for a pin, which only marks the place."""

    def __post_init__(self) -> None:
        numbers = [self.request_id] if self.position is None else [self.request_id, self.position, self.token_id]
        is_whole = all(type(number) is int and 0 <= number < 2**31 for number in numbers)
        if not isinstance(self.note_id, str) or not isinstance(self.text, str) or not is_whole:
            raise NoteError(
                "a note has the texts note_id and text, and the whole numbers request_id, position and token_id, got "
                f"{asdict(self)!r:.200}"
            )
        if len(self.text) > MOST_LETTERS:
            raise NoteError(f"a note has at most {MOST_LETTERS:,} letters, got {len(self.text):,}; shorten it")
        if self.text.encode(errors="ignore").decode() != self.text:
            raise NoteError("the text of a note holds half of a surrogate pair, which no file can hold; leave it out")


def read_notes(directory: Path) -> tuple[Note, ...]:
    """Returns the notes in a run's directory, by request and position; those on a whole request first. Without a file
    of notes, returns ().

    Raises: NoteError if the file cannot be read, or is not one of notes.
    """
    path = directory / NOTES
    remedy = "mend the file, or move it away"
    try:
        if path.stat().st_size > MOST_BYTES:
            raise NoteError(f"{path} has more than {MOST_BYTES:,} bytes; {remedy}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise NoteError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, NoteError):
            raise
        raise NoteError(f"{path} is not readable as JSON ({error}); {remedy}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT["format"]:
        raise NoteError(f"{path} is not a file of cacheprobe notes; {remedy}")
    if content.get("format_version") != _FORMAT["format_version"]:
        expected = _FORMAT["format_version"]
        raise NoteError(f"{path} has format {content.get('format_version')!r}, and {expected} was expected; {remedy}")
    try:
        notes = [Note(**item) for item in content["notes"]]
    except (TypeError, KeyError, NoteError) as error:
        raise NoteError(f"{path} holds a note that cannot be read ({error}); {remedy}") from error
    return tuple(sorted(notes, key=_place))


@dataclass(frozen=True)
class Notes:
    """Reads and writes the notes on one run: `trace.notes`. The dashboard and the report show them."""

    directory: Path | None
    """Directory of the run; None for a run in memory, which has no notes."""
    requests: Sequence[JsonDict]
    """Of the run, with prompt_token_ids and committed_token_ids, as in `StoredRun.requests`."""
    token_texts: Mapping[int, str]
    """Texts by token id."""

    def __repr__(self) -> str:
        return f"Notes(beside {'no directory' if self.directory is None else self.directory.name})"

    def table(self) -> pd.DataFrame:
        """Returns the notes as a DataFrame, by request and position; no line for a run in memory.

        Columns: note_id; request_id; position of the token, counted from the first token of the prompt, null for a note
        on the whole request; token, its text; text of the note, "" for a pin; is_of_run, False if the run has another
        token there, because the note was written for an earlier run in the directory.
        Raises: NoteError if the file of notes cannot be read.
        """
        lines = []
        for note in () if self.directory is None else read_notes(self.directory):
            token = "" if note.token_id is None else self.token_texts.get(note.token_id, f"<{note.token_id}>")
            is_here = is_of_run(note, self.requests)
            lines.append((note.note_id, note.request_id, note.position, token, note.text, is_here))
        table = pd.DataFrame(lines, columns=["note_id", "request_id", "position", "token", "text", "is_of_run"])
        return table.astype({"request_id": "int64", "position": "Int64", "is_of_run": bool})

    def copy_to(self, directory: Path) -> None:
        """Writes the notes beside a copy of the run, in place of those there. Raises: NoteError if they cannot be read
        or written."""
        notes = () if self.directory in (None, directory) else read_notes(self.directory)
        if notes:
            _change(directory, lambda _: list(notes))

    def add(self, request_id: SupportsIndex, text: str = "", position: SupportsIndex | None = None) -> Note:
        """Writes a note into notes.json in the run's directory, and returns it. It replaces the note on the same place.

        text: up to 2,000 letters; "" pins the place.  position: of a token, counted from the first token of the prompt;
        None for a note on the whole request.
        Raises: NoteError for a run in memory, for a place that the run does not have, for a text that is too long, for
        the note after the 1,000th, and if the file cannot be read or written; it then stays as it is.
        """
        directory, request = self._require_directory(), index(request_id)
        place = None if position is None else index(position)
        note = Note(secrets.token_hex(4), request, place, token_at(self.requests, request, place), text)

        def with_note(notes: tuple[Note, ...]) -> list[Note]:
            others = [one for one in notes if _place(one) != _place(note)]
            if len(others) >= MOST_NOTES:
                raise NoteError(f"{directory} has {MOST_NOTES:,} notes, and no more are kept; remove one first")
            return [*others, note]

        _change(directory, with_note)
        return note

    def remove(self, note_id: str) -> None:
        """Deletes one note. note_id: as in `table()`. Raises: NoteError for a run in memory, if there is no such note,
        and if the file cannot be read or written; it then stays as it is."""
        directory = self._require_directory()

        def without_note(notes: tuple[Note, ...]) -> list[Note]:
            if note_id not in {note.note_id for note in notes}:
                ids = ", ".join(note.note_id for note in notes[:8]) or "none"
                raise NoteError(f"there is no note {note_id!r:.40} in {directory}; its notes are {ids}")
            return [note for note in notes if note.note_id != note_id]

        _change(directory, without_note)

    def _require_directory(self) -> Path:
        """Returns the directory of the run. Raises: NoteError for a run in memory."""
        if self.directory is None:
            raise NoteError(
                "notes are kept beside a saved run, and this trace is in memory alone; save it, and load it with "
                "cp.load_trace"
            )
        return self.directory


def token_at(requests: Sequence[JsonDict], request_id: int, position: int | None) -> int | None:
    """Returns the token id at a position of a request; None for position None. Raises: NoteError for a request or a
    position that the run does not have."""
    if not 0 <= request_id < len(requests):
        raise NoteError(f"there is no request {request_id}; the run has 0 to {len(requests) - 1}")
    if position is None:
        return None
    token_ids = [*requests[request_id]["prompt_token_ids"], *requests[request_id]["committed_token_ids"]]
    if not 0 <= position < len(token_ids):
        raise NoteError(
            f"request {request_id} has no token at position {position}; it has positions 0 to {len(token_ids) - 1}"
        )
    return token_ids[position]


def is_of_run(note: Note, requests: Sequence[JsonDict]) -> bool:
    """Returns False if the run has another token at the note's place, or no such place: the note was then written for
    an earlier run in the directory."""
    try:
        return token_at(requests, note.request_id, note.position) == note.token_id
    except NoteError:
        return False


def _place(note: Note) -> tuple[int, int]:
    return note.request_id, -1 if note.position is None else note.position


def _change(directory: Path, change: Callable[[tuple[Note, ...]], list[Note]]) -> None:
    """Replaces the notes of a directory by what `change` makes of them. Only one writer at a time does this, so none
    loses what another one wrote."""
    path = directory / NOTES
    try:
        if not os.access(directory, os.W_OK | os.X_OK):
            raise NoteError(f"{directory} is read-only, so it takes no notes; copy the run to a folder of your own")
        with only_writer(directory / NOTES_LOCK, _PATIENCE):
            notes = sorted(change(read_notes(directory)), key=_place)
            write_json(path, {**_FORMAT, "notes": [asdict(note) for note in notes]})
    except Locked as holder:
        raise NoteError(f"{path} is being written by {holder}; try again") from None
    except OSError as error:
        raise NoteError(f"{path} cannot be written: {error.strerror or error}; it is unchanged") from error
