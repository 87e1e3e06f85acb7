"""What a page may ask, checked; and refusals that are shown instead of an answer."""

import logging
from collections.abc import Callable
from typing import Any

from pyarrow import ArrowException

from cacheprobe.dashboard.shelf import NotAsked, whole
from cacheprobe.plots.text import markup

Ask = dict[str, Any]
Answer = dict[str, Any]
"""html: markup, every text of a run escaped.  graphs: components, as `figures.graphs` makes them.  more: markup below
them.  error: why there is nothing else."""

_EXPECTED = (ValueError, KeyError, OSError, ArrowException)
_log = logging.getLogger(__name__)


def answered(view: Callable[[Ask], str | Answer], ask: Ask) -> Answer:
    """What the view says, or why it says nothing. What is wrong with one view is no matter of the others."""
    try:
        said = view(ask)
    except _EXPECTED as error:
        return {"html": refusal(error), "error": reason(error)}
    except Exception as error:
        _log.exception("no answer to %r", ask)
        said = f"this cannot be shown: {type(error).__name__}: {error}"
        return {"html": refusal(ValueError(said)), "error": said}
    return {"html": said} if isinstance(said, str) else said


def reason(error: Exception) -> str:
    """Its message, without the quotes that a KeyError puts around it."""
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error)


def refusal(error: Exception) -> str:
    return f'<p class="refused">{markup(reason(error))}</p>'


def span(value: object, what: str, most: int) -> range:
    """[first, end] as a range of 1 to `most` numbers. Raises: NotAsked for anything else."""
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        or not 0 < value[1] - value[0] <= most
    ):
        raise NotAsked(f"{what} is [first, end], at most {most} apart, got {value!r:.60}")
    return range(*value)


def number(value: object, what: str) -> int:
    """Raises: NotAsked for anything but a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise NotAsked(f"{what} is a whole number, got {value!r:.40}")
    return value


def one_of(value: object, what: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise NotAsked(f"{what} is {' or '.join(known)}, got {value!r:.40}")
    return str(value)


__all__ = ["Answer", "Ask", "NotAsked", "answered", "number", "one_of", "reason", "refusal", "span", "whole"]
