"""Checks the cells (runs) of a sweep in advance: refuses impossible ones, and estimates the size of their shards."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from cacheprobe.core.config import CaptureConfig, resolve_layers
from cacheprobe.core.registry import make, parse_options
from cacheprobe.core.values import JsonDict
from cacheprobe.engine.shapes import choose_shapes
from cacheprobe.lenses.base import LensError
from cacheprobe.lenses.tuned import require_tuned_lens
from cacheprobe.sweeps.factory import lens_folder, parse_change
from cacheprobe.sweeps.facts import ModelFacts, model_facts
from cacheprobe.sweeps.settings import SweepRunSettings

SHOWN = 8
NEEDS_OBJECTS = {"draft_head": "a trained file", "draft_model": "a loaded model", "scripted": "a function"}
"""Drafters that a text cannot describe, and the object that each needs."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHARD_BYTES, ROW_BYTES, READING_BYTES = 40_000, 24, 40
"""Rough bytes on disk: of an empty shard, of a row (one token of one pass), and of a reading (one row at one layer)."""


PromptKey: TypeAlias = tuple[str, str, int]
"""(model, task, seed) of a cell. Cells with equal keys have equal prompts."""


def prompt_lengths(axes: JsonDict, run: SweepRunSettings, known: dict[PromptKey, tuple[int, ...]]) -> tuple[int, ...]:
    """Returns a tuple with the number of tokens of each prompt of a cell. known: dictionary PromptKey -> such a tuple;
    a missing one is added."""
    key = (axes["model"], axes["task"], axes["seed"])
    if key not in known:
        facts = model_facts(axes["model"])
        examples = make("tasks", axes["task"]).examples(run.n, axes["seed"])
        texts = [example.prompt_text(facts.tokenizer) for example in examples]
        known[key] = tuple(map(facts.count_tokens, texts))
    return known[key]


def complaint(axes: JsonDict, run: SweepRunSettings, known: dict[PromptKey, tuple[int, ...]]) -> str | None:
    """Returns text that says why a cell cannot run; None if no reason is known before the model's weights are loaded.

    known: dictionary PromptKey -> number of tokens of each prompt; a missing one is added.
    """
    try:
        facts = model_facts(axes["model"])
        names = ("group", "capacity", "prefill_chunk", "prefill_group", "pad_prefill", "determinism")
        shapes = {"window": axes["window"], **{name: getattr(run, name) for name in names}}
        config, _ = choose_shapes(None, axes["drafter"] is not None, shapes)
        resolve_layers(run.layers, facts.n_layers)
        CaptureConfig(run.capture)
        _check_model(facts, axes)
        _check_parts(facts, axes)
        last_changed = _last_changed(axes)
        if _phases(axes) == ("verify",) and axes["drafter"] is None and not run.deterministic:
            return f"intervention {axes['intervention']!r}: nothing is verified without a drafter or run.deterministic"
        for tokens in prompt_lengths(axes, run, known):
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


def _last_changed(axes: JsonDict) -> int:
    """Returns the largest position that the cell's intervention lists; -1 without such a position."""
    where = parse_change(axes["intervention"]).where if axes["intervention"] is not None else {}
    return max(where.get("positions") or (-1,))


def _phases(axes: JsonDict) -> tuple[str, ...] | None:
    """Returns the phases of the cell's intervention; None for all, or without an intervention."""
    return None if axes["intervention"] is None else parse_change(axes["intervention"]).where.get("phases")


def require_possible(combinations: Sequence[JsonDict], run: SweepRunSettings) -> dict[PromptKey, tuple[int, ...]]:
    """Checks all cells of a sweep. Returns a dictionary (model, task, seed) -> number of tokens of each prompt. Warns
    of interventions that change drafts alone.

    Raises: ValueError with the number of impossible cells, and one example for each of the first 8 reasons.
    """
    lengths: dict[PromptKey, tuple[int, ...]] = {}
    impossible: dict[str, list[JsonDict]] = {}
    for axes in combinations:
        if (reason := complaint(axes, run, lengths)) is not None:
            impossible.setdefault(reason, []).append(axes)
    if impossible:
        count = sum(map(len, impossible.values()))
        listed = "; ".join(f"{reason} ({_examples(cells)})" for reason, cells in list(impossible.items())[:SHOWN])
        more = f"; and {len(impossible) - SHOWN} reasons more" if len(impossible) > SHOWN else ""
        raise ValueError(f"{count} of {len(combinations)} cells are impossible, nothing was run: {listed}{more}")
    if drafts_alone := [axes for axes in combinations if _phases(axes) == ("decode",) and axes["drafter"] is not None]:
        warnings.warn(
            f"phases=decode changes draft tokens alone, and no committed row, if there is a drafter "
            f"({_examples(drafts_alone)}); write phases=decode+verify",
            RuntimeWarning,
            stacklevel=2,
        )
    return lengths


def _examples(cells: Sequence[JsonDict]) -> str:
    """Returns text: the axes of the first cell, and the number of cells if there are several."""
    first = " ".join(f"{name}={value}" for name, value in cells[0].items() if value is not None)
    return first if len(cells) == 1 else f"{len(cells)} cells, such as {first}"


def estimated_bytes(axes: JsonDict, run: SweepRunSettings, prompt_tokens: Iterable[int]) -> int:
    """Returns a rough estimate of the bytes that the shard (saved run) of a cell takes on disk.

    The estimate counts every generated token as computed twice. If most draft tokens of a long window are rejected, the
    shard is several times larger. A sweep with a disk budget stops when the budget is used up.
    """
    facts = model_facts(axes["model"])
    layers = len(resolve_layers(run.layers, facts.n_layers))
    counts = list(prompt_tokens)
    generated = len(counts) * run.max_new_tokens * 2
    rows = sum(counts) + generated
    sites = sum(site in (run.capture or "") for site in "STC")
    states = rows * sites * layers * facts.d_model * ITEM_BYTES[axes["dtype"]]
    readings = generated * layers * READING_BYTES if "Z" in (run.capture or "") else 0
    return SHARD_BYTES + rows * ROW_BYTES + states + readings
