"""Logs the events of a sweep as lines of JSON."""

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TextIO

from cacheprobe.sweeps.cells import ModelKey
from cacheprobe.sweeps.storage.store import SweepStore
from cacheprobe.sweeps.workers.holder import Outcome

SECONDS_BETWEEN_PUTS = 10.0
"""Seconds between uploads to an object store: it cannot append, so the whole log is put again."""


@dataclass(frozen=True)
class Event:
    """One event: started, ended, worker_died of a cell; sweep_started, sweep_ended of the sweep."""

    event: str
    digest: str = ""
    worker: str = ""
    message: str = ""
    outcome: Outcome | None = None


class EventLog:
    """Log of one start of a sweep, open during a `with` block; after a kill, only the last moments are missing."""

    def __init__(self, store: SweepStore) -> None:
        began = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        self.name = f"events/{began}-{secrets.token_hex(3)}.jsonl"
        self._store, self._lines, self._put_at = store, [], 0.0
        self._file: TextIO | None = None

    def __enter__(self) -> "EventLog":
        if self._store.is_local:
            path = Path(self._store.path(self.name))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()
        else:
            self._put()

    def write(self, event: Event, **more: object) -> None:
        """Adds a line. On a full disk the line is lost and the sweep continues."""
        said = {k: v for k, v in asdict(event).items() if v not in ("", None)}
        said |= said.pop("outcome", {})
        said = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **said, **more}
        line = json.dumps(said, ensure_ascii=False) + "\n"
        if self._file is None:
            self._lines.append(line)
            if time.monotonic() - self._put_at > SECONDS_BETWEEN_PUTS:
                self._put()
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError:
            self._reopen(self._file)

    def _put(self) -> None:
        self._put_at = time.monotonic()
        try:
            self._store.write(self.name, "".join(self._lines).encode())
        except Exception:  # an error of the log does not end the sweep; the next put has these lines too
            self._put_at += SECONDS_BETWEEN_PUTS

    def _reopen(self, failed: TextIO) -> None:
        """Opens the log again; lines that could not be flushed are lost with the buffer."""
        path = Path(self._store.path(self.name))
        try:
            failed.close()
        except OSError:
            pass
        self._file = path.open("a", encoding="utf-8")


def seconds_by_model(store: SweepStore, keys: Mapping[str, ModelKey]) -> dict[ModelKey, tuple[float, float]]:
    """Returns {model key: (mean seconds of a committed cell, mean seconds of loading the model)}, from a sweep's event
    logs.

    keys: the model key of each cell, by the cell's digest. A model key is (name, dtype, adapter, products, device).
    """
    sums: dict[ModelKey, list[float]] = {}
    loads: dict[ModelKey, list[float]] = {}
    try:
        names = store.fs.find(store.path("events"))
    except FileNotFoundError:
        return {}
    for name in names:
        for line in store.fs.cat_file(name).decode("utf-8", "replace").splitlines():
            try:
                said = json.loads(line)
            except ValueError:  # cut short by a kill
                continue
            if said.get("event") == "ended" and not said.get("cause") and said.get("digest") in keys:
                sums.setdefault(keys[said["digest"]], []).append(said.get("seconds", 0.0))
                if load := said.get("load_seconds"):
                    loads.setdefault(keys[said["digest"]], []).append(load)
    return {key: (fmean(values), fmean(loads.get(key, [0.0]))) for key, values in sums.items()}
