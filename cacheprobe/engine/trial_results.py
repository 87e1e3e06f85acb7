"""Keeps in the user's cache folder what the trials of pass shapes found, so that a later process need not try again.

A file belongs to one fingerprint: weights, libraries, processor and settings of the process. So no result is used where
the bits may be others.
"""

import json
from collections.abc import Collection, Hashable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from weakref import WeakKeyDictionary

from cacheprobe.core.files import write_json
from cacheprobe.models.base import CachedLM
from cacheprobe.models.converted import cache_directory

_known: "WeakKeyDictionary[CachedLM, dict[Hashable, str | None]]" = WeakKeyDictionary()
"""By model: results of this process, and those that it has read."""


def known_results(model: CachedLM, keys: Collection[Hashable] = ()) -> Mapping[Hashable, str | None]:
    """Returns text about the first difference that a trial found, None without one, by shape, hooks and settings; among
    them the stored results of `keys`."""
    known = _known.setdefault(model, {})
    if missing := [key for key in keys if key not in known]:
        stored = _read(_path(model))
        known.update({key: stored[repr(key)] for key in missing if repr(key) in stored})
    return known


def remember(model: CachedLM, found: Mapping[Hashable, str | None]) -> None:
    """Keeps results, and stores them if the cache folder can be written."""
    _known.setdefault(model, {}).update(found)
    path = _path(model)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**_read(path), **{repr(key): text for key, text in found.items()}})


def _path(model: CachedLM) -> Path:
    fingerprint = json.dumps(model.fingerprint(), sort_keys=True, default=str)
    return cache_directory() / "trials" / f"{sha256(fingerprint.encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> dict[str, str | None]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
