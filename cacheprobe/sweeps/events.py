"""Writes and reads the logs of a sweep's events, as lines of JSON."""

import io
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
from cacheprobe.sweeps.workers.holder import JobOutcome

SECONDS_BETWEEN_PUTS = 10.0
"""Seconds between uploads to an object store. An object store cannot append, so each upload is the whole log."""


@dataclass(frozen=True)
class Event:
    """Holds one event of a sweep, such as the end of a cell with its JobOutcome.

    event: started, ended or worker_died, for a cell; sweep_started or sweep_ended, for the sweep.
    """

    event: str
    digest: str = ""
    worker: str = ""
    message: str = ""
    outcome: JobOutcome | None = None


class EventLog:
    """Writes the log of one start of a sweep during a `with` block. After a kill, the newest lines may be missing; in
    an object store, all lines since the last upload."""

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
        """Adds an event to the log, with the time and the fields `more`. Does not raise if the log cannot be written.

        A local log gets the line at once; a line that cannot be written is lost. The log in an object store is uploaded
        whole, at most every SECONDS_BETWEEN_PUTS; after a failure, the next upload has the line too.
        """
        fields = {k: v for k, v in asdict(event).items() if v not in ("", None)}
        fields |= fields.pop("outcome", {})
        fields = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields, **more}
        line = json.dumps(fields, ensure_ascii=False) + "\n"
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
        """Uploads the whole log to the object store. Does not raise if the upload fails."""
        self._put_at = time.monotonic()
        try:
            self._store.write(self.name, "".join(self._lines).encode())
        except Exception:  # the next upload has these lines too
            self._put_at += SECONDS_BETWEEN_PUTS

    def _reopen(self, failed: TextIO) -> None:
        """Opens the file of the log again after a failed write. If that fails, later events are lost."""
        try:
            failed.close()
        except OSError:
            pass
        try:
            self._file = Path(self._store.path(self.name)).open("a", encoding="utf-8")
        except OSError:
            self._file = io.StringIO()
        self._file.write("\n")  # the failed write may have left half a line


def seconds_by_model(store: SweepStore, keys: Mapping[str, ModelKey]) -> dict[ModelKey, tuple[float, float]]:
    """Returns {model key: (mean seconds of a committed cell, mean seconds of loading the model)}, from a sweep's event
    logs. A model without a committed cell in the logs is left out; seconds of loading that no log has are 0.

    keys: the model key of each cell, by the cell's digest. A model key is (name, dtype, adapter, products, device).
    """
    cell_seconds: dict[ModelKey, list[float]] = {}
    load_seconds: dict[ModelKey, list[float]] = {}
    try:
        names = store.fs.find(store.path("events"))
    except FileNotFoundError:
        return {}
    for name in names:
        for line in store.fs.cat_file(name).decode("utf-8", "replace").splitlines():
            try:
                fields = json.loads(line)
            except ValueError:  # cut short by a kill
                continue
            if fields.get("event") == "ended" and not fields.get("cause") and fields.get("digest") in keys:
                cell_seconds.setdefault(keys[fields["digest"]], []).append(fields.get("seconds", 0.0))
                if load := fields.get("load_seconds"):
                    load_seconds.setdefault(keys[fields["digest"]], []).append(load)
    return {key: (fmean(values), fmean(load_seconds.get(key, [0.0]))) for key, values in cell_seconds.items()}
