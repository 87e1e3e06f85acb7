"""Makes the plan of a sweep from its settings: the checked cells, with an estimate of their size on disk."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from cacheprobe.core.values import JsonDict
from cacheprobe.sweeps.cells import Cell, canonical, combinations
from cacheprobe.sweeps.checks import estimated_bytes, require_possible
from cacheprobe.sweeps.code import code_version, origin
from cacheprobe.sweeps.factory import lens_folder
from cacheprobe.sweeps.facts import folder_digest, model_facts
from cacheprobe.sweeps.settings import SweepConfig
from cacheprobe.sweeps.storage.store import SweepStore


@dataclass(frozen=True)
class Plan:
    """Holds the cells (runs) of a sweep in the order of the grid or list, with their settings and estimated sizes."""

    config: SweepConfig
    cells: Mapping[str, Cell]
    """Dictionary digest -> Cell."""
    sizes: Mapping[str, int]
    """Dictionary digest -> estimated bytes of the shard."""

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
    """Returns the Plan of a sweep, with all cells of the sweep. Raises: ValueError, with up to 8 reasons, if any cell
    is impossible."""
    chosen = list(combinations(config))
    prompts = require_possible(chosen, config.run)
    cells, sizes = {}, {}
    for axes in chosen:
        cell = Cell(axes, config.run.model_dump(mode="json"), origin(config.resources.threads, _sources(axes)))
        cells[cell.digest] = cell
        tokens = prompts[axes["model"], axes["task"], axes["seed"]]
        sizes[cell.digest] = estimated_bytes(axes, config.run, tokens)
    return Plan(config, cells, sizes)


def _sources(axes: JsonDict) -> dict[str, str]:
    """Returns a dictionary name -> hash of the model, adapter and lens of a cell with these axes."""
    hashes = {"model": model_facts(axes["model"]).source}
    if axes["adapter"] is not None:
        from cacheprobe.models.hf.adapters import adapter_directory

        hashes["adapter"] = folder_digest(adapter_directory(axes["adapter"], axes["model"]))
    if (folder := lens_folder(axes["lens"])) is not None:
        hashes["lens"] = folder_digest(folder)
    return hashes


def require_room(plan: Plan, store: SweepStore, missing: Mapping[str, Cell]) -> float:
    """Returns the bytes that are left of the disk budget for the missing cells; infinity without a budget.

    Raises: ValueError if the committed cells and the estimate for the missing ones together exceed the budget.
    """
    budget = plan.config.disk_budget_gb
    if budget is None:
        return math.inf
    committed_bytes = sum(size_of(store.manifest(digest)) for digest in plan.cells if digest not in missing)
    missing_bytes = sum(plan.sizes[digest] for digest in missing)
    if committed_bytes + missing_bytes > budget * 1e9:
        raise ValueError(
            f"the sweep would take about {(committed_bytes + missing_bytes) / 1e9:.3g} GB "
            f"({committed_bytes / 1e9:.3g} GB are there, {len(missing)} cells are to come), "
            f"its disk_budget_gb is {budget:g}; keep fewer sites (run.capture), "
            "make the grid smaller, or raise the budget"
        )
    return budget * 1e9 - committed_bytes


def size_of(manifest: JsonDict) -> int:
    """Returns the total bytes of the files that a shard's manifest lists; the manifest itself is not counted."""
    return sum(manifest["files"].values())
