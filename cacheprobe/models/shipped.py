"""Where the models that come with the package are: in the checkout's data/, or inside an installed wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "data", _PACKAGE.parent / "data")
"""The wheel's place first: beside an installed package, a folder named data would be somebody else's."""


def shipped_folder(kind: str, name: str) -> Path | None:
    """The folder of a shipped thing, such as ("checkpoints", "coinflip-thinking"); None where there is none."""
    found = (place / kind / name for place in _PLACES)
    return next((folder for folder in found if folder.is_dir()), None)


def shipped_names(kind: str) -> list[str]:
    return sorted(
        {p.name for place in _PLACES if (place / kind).is_dir() for p in (place / kind).iterdir() if p.is_dir()}
    )
