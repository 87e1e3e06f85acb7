"""Cells that wait, by model: a worker goes on with the model that it holds for as long as there are cells of it."""

from collections import deque
from collections.abc import Iterable
from typing import Any

from cacheprobe.sweeps.cells import Cell


class Waiting:
    """A queue of cells for each model."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self._by_model: dict[Any, deque[Cell]] = {}
        self._holders: dict[Any, int] = {}
        self.is_stopped = False
        for cell in cells:
            self._by_model.setdefault(cell.model_key, deque()).append(cell)

    def __len__(self) -> int:
        return sum(map(len, self._by_model.values()))

    def take(self, held: Any = None) -> Cell | None:
        """The next cell for a worker that holds the model of key `held`: one of that model, or else of the model with
        the most cells waiting for each worker that already holds it. None where nothing is left to do."""
        if self.is_stopped:
            return None
        if not self._by_model.get(held):
            if held is not None:
                self._holders[held] = max(self._holders.get(held, 0) - 1, 0)
            waiting = [key for key, cells in self._by_model.items() if cells]
            if not waiting:
                return None
            held = max(waiting, key=lambda key: len(self._by_model[key]) / (1 + self._holders.get(key, 0)))
            self._holders[held] = self._holders.get(held, 0) + 1
        return self._by_model[held].popleft()

    def put_back(self, cell: Cell) -> None:
        """First in line again: its worker died."""
        self._by_model[cell.model_key].appendleft(cell)
        self._holders[cell.model_key] = max(self._holders.get(cell.model_key, 0) - 1, 0)

    def stop(self) -> None:
        """Hand out nothing more."""
        self.is_stopped = True
