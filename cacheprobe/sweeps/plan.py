"""Makes the plan of a sweep from its settings: the cells, each checked, with an estimate of its size on disk."""

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cacheprobe.core.config import CaptureConfig, resolve_layers
from cacheprobe.core.hook_names import SITES
from cacheprobe.core.registry import make, parse_options
from cacheprobe.core.values import JsonDict
from cacheprobe.engine.shapes import choose_shapes
from cacheprobe.lenses.base import LensError
from cacheprobe.lenses.tuned import require_tuned_lens
from cacheprobe.sweeps.cells import Cell, canonical, code_version, combinations, origin
from cacheprobe.sweeps.factory import lens_folder, parse_change
from cacheprobe.sweeps.facts import ModelFacts, folder_digest, model_facts
from cacheprobe.sweeps.settings import SweepConfig, SweepRunSettings
from cacheprobe.sweeps.store import SweepStore

SHOWN = 8
NEEDS_OBJECTS = {"draft_head": "a trained file", "draft_model": "a loaded model", "scripted": "a function"}
"""Drafters that a text cannot describe, and the object that each needs."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHARD_BYTES, ROW_BYTES, READING_BYTES = 40_000, 24, 40
"""Rough bytes on disk: of an empty shard, of a row (one token of one pass), and of a reading (one row at one layer)."""


@cache
def prompt_lengths(model: str, task: str, seed: int, n: int) -> tuple[int, ...]:
    """Returns a tuple with the number of tokens of each prompt of a cell of these axes with n examples."""
    facts = model_facts(model)
    examples = make("tasks", task).examples(n, seed)
    return tuple(facts.count_tokens(example.prompt_text(facts.tokenizer)) for example in examples)


def _prompts(axes: JsonDict, run: SweepRunSettings) -> tuple[int, ...]:
    return prompt_lengths(axes["model"], axes["task"], axes["seed"], run.n)


def complaint(axes: JsonDict, run: SweepRunSettings) -> str | None:
    """Returns text that says why a cell cannot run; None if no reason is known before the model's weights are
    loaded."""
    try:
        facts = model_facts(axes["model"])
        names = ("group", "capacity", "prefill_chunk", "prefill_group", "pad_prefill", "determinism")
        shapes = {"window": axes["window"], **{name: getattr(run, name) for name in names}}
        config, _ = choose_shapes(None, axes["drafter"] is not None, shapes)
        resolve_layers(run.layers, facts.n_layers)
        CaptureConfig(run.capture)
        _check_model(facts, axes)
        _check_parts(facts, axes)
        last_changed = max(_changed(axes).get("positions") or (-1,))
        if _changed(axes).get("phases") == ("verify",) and axes["drafter"] is None and not run.deterministic:
            return f"intervention {axes['intervention']!r}: nothing is verified without a drafter or run.deterministic"
        for tokens in _prompts(axes, run):
            if last_changed > (last := tokens + run.max_new_tokens - 2):  # the newest token is never fed
                return (
                    f"intervention {axes['intervention']!r}: position {last_changed} lies outside a prompt of {tokens} "
                    f"+ {run.max_new_tokens} new tokens, which computes 0 to {last} at most"
                )
            needed = config.slots_needed(tokens, run.max_new_tokens)
            if tokens + run.max_new_tokens > facts.n_ctx:
                return f"prompt of {tokens} + {run.max_new_tokens} new tokens exceed the context of {facts.n_ctx}"
            if run.capacity is not None and needed > run.capacity:
                return (
                    f"{needed} cache slots are needed, capacity is {run.capacity}; set run.capacity: {needed} or more"
                )
    except (ValueError, LensError, OSError) as error:
        return str(error)
    return None


def _check_model(facts: ModelFacts, axes: JsonDict) -> None:
    """Checks the adapter and window of a cell against the model. Raises: ValueError if they do not fit."""
    if facts.thinking is None:
        if axes["adapter"] is not None:
            from cacheprobe.models.hf.adapters import adapter_directory

            adapter_directory(axes["adapter"], axes["model"])
        return
    if axes["adapter"] is not None:
        raise ValueError(f"{facts.name} is a Thinking States model, which takes no adapter; write adapter: none")
    facts.thinking.check_window(facts.name, axes["window"])


def _check_parts(facts: ModelFacts, axes: JsonDict) -> None:
    """Checks drafter, lens and intervention of a cell. Raises: ValueError if one is unknown or unfit for the model."""
    if axes["drafter"] is not None:
        name, _, listed = axes["drafter"].partition(":")
        if name in NEEDS_OBJECTS:
            raise ValueError(
                f"drafter {axes['drafter']!r}: {name} is made of {NEEDS_OBJECTS[name]}; use cp.run with it"
            )
        layer = parse_options(listed, "drafters").get("layer")
        if layer is not None and (type(layer) is not int or not 0 <= layer < facts.n_layers - 1):
            raise ValueError(f"drafter {axes['drafter']!r}: {facts.name} can stop after 0 to {facts.n_layers - 2}")
        make("drafters", axes["drafter"])
    if (folder := lens_folder(axes["lens"])) is not None:
        _check_stored_lens(facts, axes["lens"], folder)
    if axes["intervention"] is not None:
        where = parse_change(axes["intervention"]).where
        if not 0 <= where["layer"] < facts.n_layers:
            raise ValueError(
                f"intervention {axes['intervention']!r}: {facts.name} has layers 0 to {facts.n_layers - 1}"
            )
        if not 0 <= where.get("head", 0) < facts.n_heads:
            raise ValueError(f"intervention {axes['intervention']!r}: {facts.name} has heads 0 to {facts.n_heads - 1}")


def _check_stored_lens(facts: ModelFacts, text: str, folder: Path) -> None:
    """Checks that `folder` has a tuned lens with the model's number of layers and width. Raises: ValueError if not."""
    if not folder.is_dir():
        raise ValueError(f"lens {text!r}: there is no directory {folder}")
    config = require_tuned_lens(folder)
    shape = (config.get("n_layers", config.get("num_hidden_layers")), config.get("d_model"))
    if shape != (facts.n_layers, facts.d_model):
        raise ValueError(
            f"lens {text!r} is for (layers, width) {shape}, {facts.name} has {(facts.n_layers, facts.d_model)}"
        )


def _changed(axes: JsonDict) -> JsonDict:
    """Returns where the cell's intervention acts, for example its positions and phases; {} without one."""
    return {} if axes["intervention"] is None else parse_change(axes["intervention"]).where


def require_possible(combinations: Sequence[JsonDict], run: SweepRunSettings) -> None:
    """Checks all cells of a sweep. Warns of interventions that change drafts alone.

    Raises: ValueError with the number of impossible cells, and one example for each of the first 8 reasons.
    """
    impossible: dict[str, list[JsonDict]] = {}
    for axes in combinations:
        if (reason := complaint(axes, run)) is not None:
            impossible.setdefault(reason, []).append(axes)
    if impossible:
        count = sum(map(len, impossible.values()))
        listed = "; ".join(f"{reason} ({_examples(cells)})" for reason, cells in list(impossible.items())[:SHOWN])
        more = f"; and {len(impossible) - SHOWN} reasons more" if len(impossible) > SHOWN else ""
        raise ValueError(f"{count} of {len(combinations)} cells are impossible, nothing was run: {listed}{more}")
    drafted = [axes for axes in combinations if axes["drafter"] is not None]
    if drafts_alone := [axes for axes in drafted if _changed(axes).get("phases") == ("decode",)]:
        warnings.warn(
            f"phases=decode changes draft tokens alone, and no committed row, if there is a drafter "
            f"({_examples(drafts_alone)}); write phases=decode+verify",
            RuntimeWarning,
            stacklevel=2,
        )


def _examples(cells: Sequence[JsonDict]) -> str:
    """Returns text: the axes of the first cell, and the number of cells if there are several."""
    first = " ".join(f"{name}={value}" for name, value in cells[0].items() if value is not None)
    return first if len(cells) == 1 else f"{len(cells)} cells, such as {first}"


def estimated_bytes(axes: JsonDict, run: SweepRunSettings) -> int:
    """Returns a rough estimate of the bytes that the shard (saved run) of a cell takes on disk.

    The estimate counts every generated token as computed twice. If most draft tokens of a long window are rejected, the
    shard is several times larger. A sweep with a disk budget stops when the budget is used up.
    """
    facts = model_facts(axes["model"])
    layers = len(resolve_layers(run.layers, facts.n_layers))
    counts = _prompts(axes, run)
    generated = len(counts) * run.max_new_tokens * 2
    rows = sum(counts) + generated
    sites = sum(site in (run.capture or "") for site in SITES)
    states = rows * sites * layers * facts.d_model * ITEM_BYTES[axes["dtype"]]
    readings = generated * layers * READING_BYTES if "Z" in (run.capture or "") else 0
    return SHARD_BYTES + rows * ROW_BYTES + states + readings


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
    require_possible(chosen, config.run)
    cells, sizes = {}, {}
    for axes in chosen:
        cell = Cell(axes, config.run.model_dump(mode="json"), origin(config.resources.threads, _sources(axes)))
        cells[cell.digest] = cell
        sizes[cell.digest] = estimated_bytes(axes, config.run)
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
    committed = [digest for digest in plan.cells if digest not in missing]
    committed_bytes = sum(sum(manifest["files"].values()) for manifest in store.manifests(committed))
    missing_bytes = sum(plan.sizes[digest] for digest in missing)
    if committed_bytes + missing_bytes > budget * 1e9:
        raise ValueError(
            f"the sweep would take about {(committed_bytes + missing_bytes) / 1e9:.3g} GB "
            f"({committed_bytes / 1e9:.3g} GB are there, {len(missing)} cells are to come), "
            f"its disk_budget_gb is {budget:g}; keep fewer sites (run.capture), "
            "make the grid smaller, or raise the budget"
        )
    return budget * 1e9 - committed_bytes
