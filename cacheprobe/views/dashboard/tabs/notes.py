"""Shows the notes on a run, and writes those that the page sends."""

from functools import cached_property

import pandas as pd

from cacheprobe.trace.notes import Notes
from cacheprobe.views.dashboard.questions import CannotShow, PageQuestion, number
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.run_tables import RunTables
from cacheprobe.views.dashboard.view import View, button
from cacheprobe.views.text import counted, markup, visible


class RunNotes(View):
    """The notes on a run, as a list whose lines lead to their places."""

    notebook = ("table = trace.notes.table()",)

    @cached_property
    def notes(self) -> pd.DataFrame:
        """Table of `Notes.table`. Raises: NoteError if the file of notes cannot be read."""
        return notes_of(self.tables).table()

    def table(self) -> pd.DataFrame:
        """Returns the notes."""
        return self.notes

    def draw(self) -> str:
        """Returns HTML of the list. A line carries data-noted and data-at, the request and the position of the row that
        predicts the token ("" for a note on the request), from which assets/notes.js marks the text."""
        head = "<h2>Notes</h2><p class='note'>"
        if self.notes.empty:
            return f"{head}None yet. Press <kbd>m</kbd> to pin the chosen token, or to write a note.</p>"
        lines = "".join(self._line(note) for note in self.notes.to_dict("records"))
        count = counted(len(self.notes), "note")
        return f"{head}{count}, kept in notes.json beside the run.</p><ul class='notes'>{lines}</ul>"

    def _line(self, note: "dict[str, object]") -> str:
        request, text = int(str(note["request_id"])), str(note["text"])
        words, place, at = f"request {request}", {"intent": "pick", "request": request}, ""
        if not pd.isna(note["position"]):
            position = int(str(note["position"]))
            words += f", position {position}: {visible(str(note['token']))}"
            if note["is_of_run"]:
                at = str(max(position, self.tables.prompt_length(request)) - 1)
                place = {"intent": "draft", "request": request, "position": at, "step": self._step(request, position)}
        remove = button("Remove", remove=note["note_id"])
        if not note["is_of_run"]:
            return f"<li><b>{markup(words)}</b>, of an earlier run in this directory: {_said(text)} {remove}</li>"
        about = f'data-noted="{request}" data-at="{at}" data-text="{markup(text)}"'
        return f"<li {about}>{button(words, **place)} {_said(text)} {remove}</li>"

    def _step(self, request: int, position: int) -> int:
        """Returns the step that committed the token at a position of a request."""
        num_before = position - self.tables.prompt_length(request)
        steps = self.tables.steps_in_words(request)
        return next(int(step) for step, _, _, num_committed in steps if int(num_committed) > num_before)


def notes_of(tables: RunTables) -> Notes:
    """Returns the notes on a run."""
    return Notes(tables.run.directory, tables.run.requests, tables.run.token_texts)


def _said(text: str) -> str:
    return f"<span>{markup(text)}</span>" if text else "<small>pinned</small>"


def write_note(run_list: RunList, question: PageQuestion) -> str:
    """Writes or deletes a note on a run that the page shows, and returns HTML of the run's notes.

    question: run; remove, the id of a note; or request, text, and position, of the row that predicts the token, or None
    for a note on the request. Raises: CannotShow for a wrong question; NoteError if the note cannot be written.
    """
    shown = RunNotes(run_list, question)
    notes = notes_of(shown.tables)
    if "remove" in question:
        notes.remove(str(question["remove"]))
        return shown.draw()
    text, position = question["text"], question["position"]
    if not isinstance(text, str):
        raise CannotShow(f"text is a text, got {text!r:.40}")
    notes.add(shown.request, text, None if position is None else number(position, "position") + 1)
    return shown.draw()
