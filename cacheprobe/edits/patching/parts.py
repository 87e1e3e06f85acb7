"""Stores finished cells of a patching grid on disk, so that the grid can resume: a JSON file for each group."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from cacheprobe.core.files import write_json
from cacheprobe.core.values import folder as checked_folder
from cacheprobe.edits.patching.runs import AnswerLogits

_SETTINGS_FILE = "asked.json"


class CellStore:
    """Stores results of a patching grid in a folder, so that the grid can resume; without a folder, stores no file."""

    def __init__(self, folder: "str | Path | None", settings: Mapping[str, object]) -> None:
        """Opens or creates the folder of a grid's results; does nothing if `folder` is None. settings: everything that
        the results depend on.

        Raises: ValueError for a folder that contains results of another grid, or files but no settings of a grid.
        """
        self.folder = None if folder is None else checked_folder("store", folder)
        if self.folder is None:
            return
        requested = json.loads(json.dumps(settings))
        path = self.folder / _SETTINGS_FILE
        if path.exists():
            stored = _read(path)
            if differing := [name for name in {**stored, **requested} if stored.get(name) != requested.get(name)]:
                name = differing[0]
                raise ValueError(
                    f"{self.folder} holds the cells of another grid: {name} is {stored.get(name)!r:.80} there and "
                    f"{requested.get(name)!r:.80} here; give another store=, or remove the folder"
                )
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} is not empty and holds no cells of a grid; give another store=")
        else:
            write_json(path, requested, indent=None)

    def get(self, name: str) -> list[AnswerLogits] | None:
        """Returns the stored results of a group of patched runs, as a list of AnswerLogits. Returns None if there is no
        folder, or no file of the group in the folder."""
        if self.folder is None or not (path := self._path(name)).exists():
            return None
        return [AnswerLogits(float(a), float(b), float(c), int(d)) for a, b, c, d in _read(path)]

    def put(self, name: str, results: Sequence[AnswerLogits]) -> None:
        """Writes the results of a group of patched runs to the folder, if there is one."""
        if self.folder is not None:
            write_json(self._path(name), [list(one) for one in results], indent=None)

    def _path(self, name: str) -> Path:
        """Returns the path of the JSON file with the results of a group."""
        assert self.folder is not None
        return self.folder / f"cells-{name}.json"


def _read(path: Path):
    """Returns the content of a JSON file of a CellStore. Raises: ValueError if the file is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no file of a grid ({error!s:.80}); remove it and run again") from error
