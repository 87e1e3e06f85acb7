"""Computes lens readings that a run did not record; loads the run's model at the first use, if the model is on this
machine."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import pandas as pd

from cacheprobe import analysis
from cacheprobe.core.hook_names import SITE_NAMES, site_label
from cacheprobe.core.tokens import texts_of_backend
from cacheprobe.core.values import JsonDict
from cacheprobe.models.known import EMBEDDED, embedded_state, local_file
from cacheprobe.trace.stored import StoredRun
from cacheprobe.views.dashboard.questions import CannotShow
from cacheprobe.views.dashboard.run_tables import RunTables

if TYPE_CHECKING:
    from cacheprobe.analysis.flips import Flips
    from cacheprobe.lenses.base import Lens
    from cacheprobe.models.base import CachedLM
    from cacheprobe.trace.trace import Trace

RECORDED, NOW, PATCHSCOPE = "recorded", "logit", "patchscope"


class RunReader:
    """Loads each run's model at its first use, and reads the run's kept states through a lens. A lock allows one
    computation at a time."""

    def __init__(self, model: str | None = None, lenses: Sequence[Path] = ()) -> None:
        """model: name or directory of the model that is loaded instead of the one that a run names.  lenses:
        directories of tuned lenses."""
        self._model_name = model
        self._lenses = lenses
        self._lock = Lock()
        self._traces: dict[Path, tuple[StoredRun, Trace, CachedLM]] = {}
        """By directory: the run that was read, its trace and its model."""
        self._refused: dict[Path, str] = {}
        self._read: dict[tuple, pd.DataFrame] = {}

    def why_not(self, tables: RunTables) -> str:
        """Returns the reason why states of this run cannot be read on this machine, as text; "" if no reason is known.
        Loads no model."""
        if not set(tables.run.sites) & set("STC"):
            return f"this run kept no states; run it with {', '.join(map(site_label, SITE_NAMES))} in capture="
        return self.no_model(tables)

    def no_model(self, tables: RunTables) -> str:
        """Returns the reason why the run's model cannot be loaded on this machine, as text; "" if no reason is known.
        Loads no model."""
        name = self._model_name or tables.run.fingerprint["model"]
        if tables.run.directory not in self._refused and not is_on_this_machine(name):
            return f"the model {name} is not on this machine; give the directory of its weights with --model"
        return self._refused.get(tables.run.directory, "")

    def menu(self, tables: RunTables) -> list[JsonDict]:
        """Returns the options of the menu of lenses as a list of dicts: value, label, and whether the option is
        disabled."""
        reason = self.why_not(tables)
        none = "none recorded yet" if tables.run.is_unread else "none recorded"
        recorded = f"{tables.run.meta['lens']}, as recorded" if tables.run.has_readings else none
        items = [
            {"value": RECORDED, "label": recorded, "disabled": not tables.run.has_readings},
            {"value": NOW, "label": "logit, read now from kept states", "disabled": bool(reason)},
            {"value": PATCHSCOPE, "label": "patchscope, read now (slow)", "disabled": bool(reason)},
        ]
        for i, path in enumerate(self._lenses):
            items.append({"value": f"tuned:{i}", "label": f"tuned: {path.name}", "disabled": bool(reason)})
        return items

    def read(self, tables: RunTables, lens: str, site: str, rows: pd.DataFrame) -> pd.DataFrame:
        """Returns lens readings of the kept states of some rows as a DataFrame, as `cp.analysis.read_states` does. The
        64 newest results are cached. rows: lines of the rows table; rows without kept states are left out.

        Raises: CannotShow, with the reason, if the states cannot be read.
        """
        key = (tables.run.directory, tables.run.version, lens, site, tuple(rows.row))
        with self._lock:
            if key not in self._read:
                trace, model = self._with_states(tables)
                try:
                    kept = rows[rows.state_index >= 0]
                    self._read[key] = analysis.read_states(trace, self._lens(lens, model), site, rows=kept)
                except (ValueError, RuntimeError) as error:
                    raise CannotShow(str(error)) from error
                while len(self._read) > 64:
                    self._read.pop(next(iter(self._read)))
            return self._read[key]

    def attribution(self, tables: RunTables, row: int) -> pd.DataFrame:
        """Returns the logit attribution of one row as a DataFrame, as `cp.analysis.attribution` does. row: the row's
        number in the rows table. Raises: CannotShow, with the reason, if the row's states are missing or cannot be
        read; KeyError for an unknown row."""
        with self._lock:
            trace, _ = self._with_states(tables)
            try:
                line = tables.run.rows.set_index("row").loc[row]
                return analysis.attribution(trace, int(line.request_id), row=row)
            except (ValueError, RuntimeError) as error:
                raise CannotShow(str(error)) from error

    def flip(self, tables: RunTables, request: int, step: int, progress: Callable[[int, int], None]) -> "Flips":
        """Returns the result of `cp.analysis.flip` for one rejected draft. Raises: CannotShow if the model cannot be
        loaded; otherwise as `cp.analysis.flip`."""
        with self._lock:
            trace, model = self._trace(tables)
        return analysis.flip(trace, request, step, model=model, progress=progress)

    def _with_states(self, tables: RunTables) -> "tuple[Trace, CachedLM]":
        """Returns (trace, model) as `_trace`. Raises: CannotShow also if the run kept no states."""
        if reason := self.why_not(tables):
            raise CannotShow(reason)
        return self._trace(tables)

    def _trace(self, tables: RunTables) -> "tuple[Trace, CachedLM]":
        """Returns (trace, model) of the run, both loaded at the first use. Raises: CannotShow if the model cannot be
        loaded."""
        if reason := self.no_model(tables):
            raise CannotShow(reason)
        run, directory = tables.run, tables.run.directory
        earlier = self._traces.get(directory)
        if earlier is not None and earlier[0].run_id != run.run_id:
            earlier = None
        if earlier is None or earlier[0].version != run.version:
            from cacheprobe.api import load_trace

            try:
                model = self._model(tables) if earlier is None else earlier[2]
                self._traces[directory] = run, load_trace(directory, model), model
            except (ValueError, OSError, RuntimeError, ImportError) as error:
                if earlier is None:
                    self._refused[directory] = str(error)
                raise CannotShow(str(error)) from error
        return self._traces[directory][1:]

    def _model(self, tables: RunTables) -> "CachedLM":
        """Loads the model of a run. Raises: ValueError if it has other weights than the run's."""
        from cacheprobe.models.loaders import load_model

        fingerprint = tables.run.fingerprint
        model = load_model(
            self._model_name or fingerprint["model"], dtype=fingerprint["dtype"],
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
        if kind != "tuned" or not number.isdigit() or int(number) >= len(self._lenses):
            raise CannotShow(f"there is no lens {name!r:.40}")
        return TunedLens.load(self._lenses[int(number)], model)


def is_on_this_machine(name: str) -> bool:
    """Returns True if a model can probably be loaded without a network. Loads nothing."""
    if name in EMBEDDED:
        return embedded_state(name) != "absent"
    return Path(name).is_dir() or local_file(name, "config.json") is not None


def tokenizer_texts(model: str | None, token_ids: set[int]) -> dict[int, str]:
    """Returns a dict from token id to text, made by the tokenizer of a model; {} if the tokenizer's file is not on this
    machine. Ids outside the vocabulary are left out. Loads no weights, and no torch."""
    texts = _texts(model) if model and token_ids else []
    return {i: texts[i] for i in sorted(token_ids) if 0 <= i < len(texts)}


@lru_cache(maxsize=8)
def _texts(model: str) -> list[str]:
    """Returns the text of every token of a model's tokenizer; [] if its file is not on this machine."""
    path = local_file(model, "tokenizer.json")
    if path is None:
        return []
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return texts_of_backend(tokenizer, max(tokenizer.get_vocab().values(), default=-1) + 1)
