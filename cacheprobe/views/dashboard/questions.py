"""Checks the values in the page's questions, and turns errors into answers."""

import logging
from collections.abc import Callable
from typing import NoReturn, TypeVar

from pyarrow import ArrowException

from cacheprobe.core.values import JsonDict
from cacheprobe.views.text import markup

PageQuestion = JsonDict
"""A question of the page for one view, as JSON, such as {"run": 0, "step": 7}. The functions below check its
values."""
PageAnswer = JsonDict
"""html: HTML with every text of a run escaped.  graphs: components from `View.graphs`.  more: HTML below the graphs.
error: the reason if the view cannot be shown.
"""

T = TypeVar("T", bound=str)

_EXPECTED = (ValueError, KeyError, OSError, ArrowException)
_log = logging.getLogger(__name__)


class CannotShow(ValueError):
    """Raised if a view cannot be shown, for example because the run lacks the data. The message is shown on the
    page."""


def answered(view: Callable[[PageQuestion], str | PageAnswer], question: PageQuestion) -> PageAnswer:
    """Calls a view with the page's question, and returns the view's result as a dict for the page. An error becomes a
    dict with html and error, so that an error in one view does not affect the others."""
    try:
        result = view(_Question(question))
    except _EXPECTED as error:
        message = message_of(error)
    except Exception as error:
        _log.exception("no answer to %r", question)
        message = f"this cannot be shown: {type(error).__name__}: {error}"
    else:
        return {"html": result} if isinstance(result, str) else result
    return {"html": f'<p class="refused">{markup(message)}</p>', "error": message}


def message_of(error: Exception) -> str:
    """Returns the message of an error; of a KeyError without quotation marks."""
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error)


class _Question(JsonDict):
    """Holds a question, and says which of its values is missing."""

    def __missing__(self, name: str) -> NoReturn:
        raise CannotShow(f"the question has no {name}")


def whole(value: object, what: str, count: int) -> int:
    """Returns `value` if it is a whole number from 0 to count - 1. what: the name of the value in the error.
    Raises: CannotShow for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise CannotShow(f"there is no {what} {value!r:.40}; there are {count}, counted from 0")
    return value


def span(value: object, what: str, most: int) -> range:
    """Returns range(first, end), `end` excluded, if the value is a list [first, end] of two whole numbers and the range
    has 1 to `most` numbers. what: the name of the value in the error. Raises: CannotShow for anything else."""
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not 0 < (end := number(value[1], what)) - (first := number(value[0], what)) <= most
    ):
        raise CannotShow(f"{what} is [first, end], at most {most} apart, got {value!r:.60}")
    return range(first, end)


def number(value: object, what: str) -> int:
    """Returns the value if it is a whole number of at most 9 digits. what: the name of the value in the error. Raises:
    CannotShow for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 10**9:
        raise CannotShow(f"{what} is a whole number of at most 9 digits, got {value!r:.40}")
    return value


def one_of(value: object, what: str, known: tuple[T, ...]) -> T:
    """Returns the value if it is one of `known`. what: the name of the value in the error. Raises: CannotShow for
    anything else."""
    if value not in known:
        raise CannotShow(f"{what} is {' or '.join(known)}, got {value!r:.40}")
    return known[known.index(value)]
