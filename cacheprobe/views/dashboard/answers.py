"""Keeps the newest answers of the server, so that a view that was drawn once is not computed again."""

import json
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from cacheprobe.views.dashboard.questions import CannotShow, PageAnswer, PageQuestion, answered
from cacheprobe.views.dashboard.reader import RECORDED
from cacheprobe.views.dashboard.shelf import Shelf

MOST_LETTERS = 48 * 2**20
"""Largest size of all kept answers together, with their questions, as JSON."""
KEPT = frozenset(
    "story overview timeline decode cache window card insight text range grid gave rejected thoughts compare".split()
)
"""Views whose answer is decided by the question alone, for a run that does not grow and the readings that it recorded.
What a lens reads now depends on files, which may change."""


class Answers:
    """Answers the page's questions as lines of JSON, and keeps the newest answers of runs that do not grow."""

    def __init__(self, shelf: Shelf, views: dict[str, Callable[[PageQuestion], str | PageAnswer]]) -> None:
        self.shelf = shelf
        self.views = views
        self._lines: OrderedDict[str, str] = OrderedDict()
        self._letters = 0
        self._lock = Lock()

    def line(self, view: str, question: PageQuestion) -> str:
        """Returns one line of JSON: the view's name and its answer. An answer with an error is not kept."""
        key = json.dumps([view, question], sort_keys=True)
        is_kept = view in KEPT and (question.get("lens") or RECORDED) == RECORDED and self._is_fixed(question)
        with self._lock:
            if is_kept and key in self._lines:
                self._lines.move_to_end(key)
                return self._lines[key]
        answer = answered(self.views[view], question)
        line = json.dumps({"view": view, **answer}) + "\n"
        if is_kept and "error" not in answer:
            self._keep(key, line)
        return line

    def _is_fixed(self, question: PageQuestion) -> bool:
        """Returns whether no run that the question names is recorded while the dashboard shows it."""
        try:
            named = [question[name] for name in ("run", "against") if question.get(name) is not None]
            return all(self.shelf.follower(number) is None for number in named)
        except CannotShow:
            return False

    def _keep(self, key: str, line: str) -> None:
        with self._lock:
            self._letters += len(key) + len(line)
            if (before := self._lines.pop(key, None)) is not None:
                self._letters -= len(key) + len(before)
            self._lines[key] = line
            while self._letters > MOST_LETTERS:
                oldest, dropped = self._lines.popitem(last=False)
                self._letters -= len(oldest) + len(dropped)
