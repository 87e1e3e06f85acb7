"""Finished cells on the disk, so that a grid goes on where it was: one small file for each group, written whole."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cacheprobe.patching.runs import Said

_ASKED = "asked.json"


class Parts:
    """A folder of finished groups of one grid, or, without a folder, none."""

    def __init__(self, folder: "str | Path | None", asked: Mapping[str, Any]) -> None:
        """asked: all that the cells' numbers depend on.

        Raises: ValueError for a folder that holds the cells of another grid, or something else.
        """
        self.folder = None if folder is None else Path(folder)
        if self.folder is None:
            return
        wanted = json.loads(json.dumps(asked))
        path = self.folder / _ASKED
        if path.exists():
            held = _read(path)
            if differing := [name for name in {**held, **wanted} if held.get(name) != wanted.get(name)]:
                name = differing[0]
                raise ValueError(
                    f"{self.folder} holds the cells of another grid: {name} is {held.get(name)!r:.80} there and "
                    f"{wanted.get(name)!r:.80} here; give another store=, or remove the folder"
                )
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} is not empty and holds no cells of a grid; give another store=")
        else:
            write_json(path, wanted)

    def get(self, name: str) -> list[Said] | None:
        """What a finished group's cells said; None where it is still to be run."""
        if self.folder is None or not (path := self._path(name)).exists():
            return None
        return [Said(float(a), float(b), float(c), int(d)) for a, b, c, d in _read(path)]

    def put(self, name: str, said: Sequence[Said]) -> None:
        """Keep a finished group."""
        if self.folder is not None:
            write_json(self._path(name), [list(one) for one in said])

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"cells-{name}.json"


def write_json(path: Path, content: Any) -> None:
    """The whole file or none of it. Numbers keep all their digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump(content, stream)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no file of a grid ({error!s:.80}); remove it and run again") from error
