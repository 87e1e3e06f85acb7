"""Makes the plan of a sweep from its settings: its cells. Makes the parts of each once, to check their texts."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cacheprobe.core.config import CaptureConfig, EngineConfig
from cacheprobe.core.registry import make
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.adapters import adapter_directory
from cacheprobe.models.known import EMBEDDED, embedded_directory, require_known, shipped_folder
from cacheprobe.sweeps.cells import Cell, canonical, code_version, combinations, origin
from cacheprobe.sweeps.factory import lens_folder, make_change
from cacheprobe.sweeps.settings import SweepConfig
from cacheprobe.sweeps.store import SweepStore

SHOWN = 8


@dataclass(frozen=True)
class Plan:
    """Holds the cells (runs) of a sweep in the order of the grid or list, with their settings."""

    config: SweepConfig
    cells: Mapping[str, Cell]
    """Dictionary digest -> Cell."""

    @property
    def digest(self) -> str:
        """Hash of the digests of all cells, as 20 hexadecimal digits; the order of the cells does not change it."""
        return hashlib.sha256(canonical(sorted(self.cells)).encode()).hexdigest()[:20]

    def to_json(self) -> JsonDict:
        """Returns the plan as the dictionary of JSON values that sweep.json stores."""
        return {
            "format": "cacheprobe sweep",
            "format_version": 1,
            "plan": self.digest,
            "code": code_version(),
            "config": self.config.model_dump(mode="json"),
            "digests": list(self.cells),
        }


def make_plan(config: SweepConfig) -> Plan:
    """Returns the Plan of a sweep, with all cells of the sweep.

    Makes the task, the drafter and the intervention of each cell, and hashes its files. What only the loaded model can
    tell, such as the number of its layers, ends the cell itself with an error.
    Raises: ValueError with the number of impossible cells, and one example for each of the first 8 reasons.
    """
    cells: dict[str, Cell] = {}
    impossible: dict[str, list[JsonDict]] = {}
    combined = list(combinations(config))
    for axes in combined:
        try:
            _make_parts(axes, config)
            cell = Cell(axes, config.run.model_dump(mode="json"), origin(config.resources.threads, _sources(axes)))
            cells[cell.digest] = cell
        except (ValueError, OSError) as error:
            impossible.setdefault(str(error), []).append(axes)
    if impossible:
        count = sum(map(len, impossible.values()))
        listed = "; ".join(f"{reason} ({_examples(found)})" for reason, found in list(impossible.items())[:SHOWN])
        more = f"; and {len(impossible) - SHOWN} reasons more" if len(impossible) > SHOWN else ""
        raise ValueError(f"{count} of {len(combined)} cells are impossible, nothing was run: {listed}{more}")
    return Plan(config, cells)


def _make_parts(axes: JsonDict, config: SweepConfig) -> None:
    """Makes what the texts of a cell describe. Raises: ValueError for an unknown name, setting or value."""
    names = ("group", "capacity", "prefill_chunk", "prefill_group", "pad_prefill", "determinism")
    given = {name: value for name in names if (value := getattr(config.run, name)) is not None}
    EngineConfig(window=axes["window"], **given)
    CaptureConfig(config.run.capture)
    make("tasks", axes["task"])
    if axes["drafter"] is not None:
        make("drafters", axes["drafter"])
    if axes["intervention"] is not None:
        make_change(axes["intervention"])


def _examples(cells: Sequence[JsonDict]) -> str:
    """Returns text: the axes of the first cell, and the number of cells if there are several."""
    first = " ".join(f"{name}={value}" for name, value in cells[0].items() if value is not None)
    return first if len(cells) == 1 else f"{len(cells)} cells, such as {first}"


def _sources(axes: JsonDict) -> dict[str, str]:
    """Returns a dictionary name -> hash of the model, adapter and lens of a cell with these axes."""
    hashes = {"model": model_source(axes["model"])}
    if axes["adapter"] is not None:
        hashes["adapter"] = folder_digest(adapter_directory(axes["adapter"], axes["model"]))
    if (folder := lens_folder(axes["lens"])) is not None:
        hashes["lens"] = folder_digest(folder)
    return hashes


@cache
def model_source(name: str) -> str:
    """Returns the hash of a model's files, or the revision of a hub name. Raises: ModelError for an unknown model, and
    for one whose files cannot be read."""
    from transformers import CONFIG_NAME
    from transformers.utils.hub import cached_file

    require_known(name)
    if name in EMBEDDED:
        return embedded_directory(name, progress=False).name  # the folder is named by the hash of the weights
    folder = shipped_folder("checkpoints", name) if "/" not in name else None
    if folder is not None or Path(name).is_dir():
        return folder_digest(folder or Path(name))
    try:
        in_cache = cached_file(name, CONFIG_NAME)
    except OSError as error:
        raise ModelError(f"model {name!r} cannot be read: {str(error).strip().splitlines()[0]}") from error
    return Path(str(in_cache)).parent.name  # the hub's cache names the folder of a revision by its hash


@cache
def folder_digest(folder: Path) -> str:
    """Returns a hash of the names and bytes of all files in `folder`, at any depth: 20 hexadecimal digits.
    Later calls in the same process return the first result, even if the files have changed.

    Raises: ValueError if there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no directory {folder}; give an existing one")
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:20]


def bytes_left(plan: Plan, store: SweepStore, missing: Mapping[str, Cell]) -> float:
    """Returns the bytes that are left of the disk budget for the missing cells; infinity without a budget. Raises:
    ValueError if the committed cells have taken all of it."""
    if plan.config.disk_budget_gb is None:
        return math.inf
    committed = [digest for digest in plan.cells if digest not in missing]
    taken = sum(sum(manifest["files"].values()) for manifest in store.manifests(committed))
    left = plan.config.disk_budget_gb * 1e9 - taken
    if left < 0 and missing:
        raise ValueError(f"the committed cells take {taken / 1e9:.3g} GB, which is above disk_budget_gb; raise it")
    return left
