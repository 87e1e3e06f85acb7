"""Finds models that come with the package: in the checkout's data/ folder, or inside an installed wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "data", _PACKAGE.parent / "data")
"""The wheel's folder comes first: a folder named data beside an installed package may belong to someone else."""


def shipped_folder(kind: str, name: str) -> Path | None:
    """Returns the folder of a shipped item, such as ("checkpoints", "coinflip-thinking"); None if there is none."""
    found = (place / kind / name for place in _PLACES)
    return next((folder for folder in found if folder.is_dir()), None)


def shipped_names(kind: str) -> list[str]:
    """Returns the sorted names of the shipped items of one kind, such as "checkpoints"."""
    return sorted(
        {p.name for place in _PLACES if (place / kind).is_dir() for p in (place / kind).iterdir() if p.is_dir()}
    )
