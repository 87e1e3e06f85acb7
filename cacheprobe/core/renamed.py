"""Maps names of earlier versions to those of today, for errors that give the new name or the nearest one."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

RENAMED = {
    # arguments and attributes
    "kv_rows": "max_kv_tokens",
    "keep_rows": "keep_kv",
    "keeps_rows": "keeps_kv",
    "hidden_parts": "head_masks",
    # functions and classes
    "cache_rows": "kv_snapshot",
    "foresight": "rollback_prediction",
    "Foresight": "RollbackPrediction",
    "foresight_figure": "rollback_prediction_figure",
    "settling_figure": "prediction_depth_figure",
    "agreement_figure": "draft_verdicts",
    "settling": "prediction_depth",
    "read": "read_states",
    "readings": "lens_readings",
    "rejected": "rejected_tokens",
    "thought_readings": "read_thoughts",
    "thought_insides": "thought_activations",
    # columns and values
    "settling_layer": "prediction_depth",
    "candidate": "superseded",
    "twin": "fast",
    # presets of Thinking States
    "far": "attention-crowding",
    "all-jump": "position-jumps",
    "no-jumps": "no-position-jumps",
}
"""Maps names of earlier versions to those of today. An error mentions the new name only if the object in question has
it."""


def hint(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message for an unknown name: "; it is named NEW now" for a name of an earlier
    version, "; did you mean NEAR?" for a misspelt one, else ""."""
    known = tuple(known)
    if RENAMED.get(name) in known:
        return f"; it is named {RENAMED[name]} now"
    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def require_known_options(given: Mapping[str, object], known: Iterable[str]) -> None:
    """Checks that every option of `given` is in `known`. Raises: TypeError that gives the option's new name, or the
    nearest one."""
    known = tuple(known)
    for name in given:
        if name not in known:
            raise TypeError(f"unknown argument {name!r}{hint(name, known)}")


def no_attribute(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    """Returns an AttributeError for a name that `owner` does not have; its message gives the new name or the nearest
    one."""
    return AttributeError(f"{owner} has no attribute {name!r}{hint(name, known)}")


class HintsAtNewNames:
    """Gives its subclasses a helpful AttributeError: for an attribute of an earlier version, the message has today's
    name."""

    __slots__ = ()

    if not TYPE_CHECKING:  # hidden from the type checker, which would otherwise accept every misspelt name

        def __getattr__(self, name: str) -> object:
            if RENAMED.get(name) in dir(type(self)):
                raise no_attribute(f"{type(self).__name__!r} object", name, dir(type(self)))
            return object.__getattribute__(self, name)  # raises the error of a property again


class HintsAtNewArguments(HintsAtNewNames):
    """Checks the keywords of frozen settings: an unknown keyword of a subclass raises a TypeError that gives its new
    name, or the nearest one."""

    __slots__ = ()
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    def __new__(cls, *args: object, **settings: object):  # returns Self, which beartype does not take in a method
        """Raises: TypeError for an unknown keyword argument, with its new name or the nearest one."""
        require_known_options(settings, cls.__dataclass_fields__)
        return object.__new__(cls)
