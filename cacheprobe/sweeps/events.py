"""What happens in a sweep, as a log that a program reads: a line of JSON for each event."""

import json
import secrets
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from cacheprobe.sweeps.storage.store import SweepStore
from cacheprobe.sweeps.workers.holder import Outcome

SECONDS_BETWEEN_PUTS = 10.0
"""An object store takes no appends: the log so far is put anew."""


@dataclass(frozen=True)
class Event:
    """started, ended, worker_died; and of the sweep itself: sweep_started, sweep_ended."""

    event: str
    digest: str = ""
    worker: str = ""
    message: str = ""
    outcome: Outcome | None = None


class EventLog:
    """Of one start of a sweep. `with` it; a killed sweep leaves all but its last moments."""

    def __init__(self, store: SweepStore) -> None:
        began = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        self.name = f"events/{began}-{secrets.token_hex(3)}.jsonl"
        self._store, self._lines, self._put_at = store, [], 0.0
        self._file: Any = None

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

    def write(self, event: Event, **more: Any) -> None:
        """Add a line. A full disk loses it, and not the sweep."""
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
            self._reopen()

    def _put(self) -> None:
        self._put_at = time.monotonic()
        try:
            self._store.write(self.name, "".join(self._lines).encode())
        except Exception:  # the log is no reason to end a sweep; the next put holds these lines too
            self._put_at += SECONDS_BETWEEN_PUTS

    def _reopen(self) -> None:
        """What could not be flushed is dropped with the buffer."""
        path = Path(self._store.path(self.name))
        try:
            self._file.close()
        except OSError:
            pass
        self._file = path.open("a", encoding="utf-8")


def seconds_by_model(store: SweepStore, keys: dict[str, Any]) -> dict[Any, tuple[float, float]]:
    """Mean seconds of the committed cells in a sweep's logs, and of loading their model, by model key.

    keys: the model key of each digest.
    """
    sums: dict[Any, list[float]] = {}
    loads: dict[Any, list[float]] = {}
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
