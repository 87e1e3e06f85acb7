"""Queues the cells (runs) of a sweep by model, so that a worker continues with its loaded model as long as possible."""

from collections import deque
from collections.abc import Iterable

from cacheprobe.sweeps.cells import Cell, ModelKey


class Waiting:
    """Holds the cells (runs) of a sweep that are not started yet, in a queue for each model."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self._by_model: dict[ModelKey | None, deque[Cell]] = {}
        self._holders: dict[ModelKey | None, int] = {}  # number of workers that have the model loaded
        self.is_stopped = False
        for cell in cells:
            self._by_model.setdefault(cell.model_key, deque()).append(cell)

    def __len__(self) -> int:
        return sum(map(len, self._by_model.values()))

    def take(self, loaded: ModelKey | None = None) -> Cell | None:
        """Removes the next cell for a worker from the queues, and returns the cell; None if no cell is left, or after
        `stop`.

        loaded: key of the model that the worker has loaded; the cell is of this model if possible. Otherwise the cell
        is of the model with the most waiting cells per worker that has the model loaded, this worker included.
        """
        if self.is_stopped:
            return None
        if not self._by_model.get(loaded):
            if loaded is not None:
                self._holders[loaded] = max(self._holders.get(loaded, 0) - 1, 0)
            waiting = [key for key, cells in self._by_model.items() if cells]
            if not waiting:
                return None
            loaded = max(waiting, key=lambda key: len(self._by_model[key]) / (1 + self._holders.get(key, 0)))
            self._holders[loaded] = self._holders.get(loaded, 0) + 1
        return self._by_model[loaded].popleft()

    def put_back(self, cell: Cell) -> None:
        """Puts the cell of a dead worker back to the front of the queue of its model."""
        self._by_model[cell.model_key].appendleft(cell)
        self._holders[cell.model_key] = max(self._holders.get(cell.model_key, 0) - 1, 0)

    def stop(self) -> None:
        """Makes `take` return None from now on."""
        self.is_stopped = True
