"""Lists the names of people who act in tasks, and checks names that a user gives."""

from __future__ import annotations

from collections.abc import Sequence

NAMES = tuple(
    """
    Adam Alan Alice Amy Andrew Anna Anthony Arthur Barbara Ben Beth Bob Brian Carl Carol Charles Chris Claire
    Daniel David Diana Donald Dorothy Edward Ellen Emily Emma Eric Eva Frank Fred George Grace Hannah Harry
    Helen Henry Ian Jack Jacob James Jane Jason Jennifer Jessica John Joseph Julia Karen Kate Kevin Laura Lisa
    Louis Lucy Maria Mark Martha Martin Mary Matthew Michael Nancy Nicole Oliver Oscar Paul Peter Philip
    Rachel Ralph Rebecca Robert Roger Rose Ruth Sam Sarah Scott Simon Sophie Stephen Steven Susan Thomas Tim
    Victor Victoria Walter William
    """.split()
)
HELD_OUT_NAMES = NAMES[3::4]
"""Every fourth name. LoRA trainings do not use these names, so that a test has names that no adapter was trained on."""
TRAIN_NAMES = tuple(name for name in NAMES if name not in HELD_OUT_NAMES)


def check_names(names: Sequence[str], needed: int, why: str, remedy: str, what: str = "names") -> None:
    """Checks names. Raises: ValueError for one string in place of a sequence, for fewer than `needed` names, a repeated
    name, or a name that is not words with single spaces between them.

    why, remedy: first and last part of the error message about too few names.  what: the plural noun in the messages.
    """
    if isinstance(names, str):
        raise ValueError(f"{what}={names!r} is one string; give a sequence of {what}")
    for name in names:
        if not isinstance(name, str) or not name or name != " ".join(name.split()):
            raise ValueError(f"{what} holds {name!r}; give words, with single spaces between them at most")
    if len(set(names)) < len(names):
        raise ValueError(f"{what} holds a name more than once; give each once")
    if needed > len(names):
        raise ValueError(f"{why}, got {len(names)}; {remedy}")
