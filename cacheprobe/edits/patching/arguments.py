"""Reads and checks the arguments of a patching grid before the model runs."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from cacheprobe.core.hook_names import HEADS, RECURRENT
from cacheprobe.core.values import listed, require_known_options, whole_number
from cacheprobe.models.base import CachedLM
from cacheprobe.models.experts.sites import state_shapes
from cacheprobe.models.paths import usable as usable
from cacheprobe.models.prompts import Prompt, as_token_ids

RESIDUAL_SITES = ("pre", "S")
PATCHED_SITES = (*RESIDUAL_SITES, "T", "C")


class GridOptions(TypedDict, total=False):
    """Declares the keyword arguments that the three functions of `cp.patching` share."""

    layers: "Iterable[int] | None"
    """Layers of the grid; None for all."""
    positions: "Iterable[int] | None"
    """Positions of the grid; None for all."""
    store: "str | Path | None"
    """A folder for finished cells, from which the same call resumes."""
    path: str
    """"fast", "bridge" or "auto", as in `cp.run`."""
    progress: bool
    """Whether to draw a progress bar on a terminal."""


@dataclass(frozen=True)
class GridConfig:
    """Holds the options of one patching grid (layers, positions, store, path, progress), with defaults."""

    layers: "Iterable[int] | None" = None
    positions: "Iterable[int] | None" = None
    store: "str | Path | None" = None
    path: str = "auto"
    progress: bool = True


def grid_config(**options: Unpack[GridOptions]) -> GridConfig:
    """Returns the options of a patching grid as a GridConfig, with defaults. Raises: TypeError for an unknown
    option."""
    require_known_options(options, GridOptions.__annotations__)
    return GridConfig(**options)


def as_pair(model: CachedLM, clean: Prompt, corrupt: Prompt) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (token ids of the clean prompt, token ids of the corrupted prompt).

    Raises: ValueError for prompts of different length, equal prompts, and a prompt that `as_token_ids` refuses.
    """
    pair = as_token_ids(model, clean, "clean"), as_token_ids(model, corrupt, "corrupted")
    if len(pair[0]) != len(pair[1]):
        raise ValueError(
            f"the clean and the corrupted prompt have {len(pair[0])} and {len(pair[1])} tokens, so their positions do "
            "not mean the same; use prompts of one length"
        )
    if pair[0] == pair[1]:
        raise ValueError("the clean and the corrupted prompt are the same, so nothing would be patched; change a token")
    return pair


def check_site(site: str, sites: Iterable[str]) -> None:
    """Checks that `site` is one of `sites`, those that a patching grid supports. Raises: ValueError otherwise."""
    if site not in sites:
        raise ValueError(f"unknown site {site!r}; sites of this grid are {', '.join(sites)}")


def patched_place(site: str, heads: bool) -> str:
    """Returns the site whose states are patched: that of single heads, or `site`. Raises: ValueError for a site that
    `activation` does not support, and for heads at another site than T."""
    check_site(site, (*PATCHED_SITES, RECURRENT))
    if heads and site not in ("T", RECURRENT):
        raise ValueError(f"site {site} has no heads, only T and {RECURRENT} do; leave out heads=, or use site='T'")
    return HEADS if heads and site == "T" else site


def as_layers(layers: "Iterable[int] | None", model: CachedLM, sites: Iterable[str] = ()) -> tuple[int, ...]:
    """Returns the layers of the grid as a tuple; None means all, or those with a recurrent state if `sites` has it.
    Raises: ValueError for no layer, an unknown one, or one without the recurrent state of `sites`."""
    if RECURRENT not in sites:
        return _numbers(layers, model.n_layers, "layer", "the model")
    there = tuple(state_shapes(model))
    if not there:
        raise ValueError(f"{model.name} has no recurrent states to patch; choose another site")
    chosen = there if layers is None else _numbers(layers, model.n_layers, "layer", "the model")
    if bad := [layer for layer in chosen if layer not in there]:
        raise ValueError(f"layer {bad[0]} has no recurrent state; layers with one: {', '.join(map(str, there))}")
    return chosen


def as_positions(positions: "Iterable[int] | None", length: int) -> tuple[int, ...]:
    """Returns the positions of the grid as a tuple; None means all. Raises: ValueError for none, or one not in 0 to
    length - 1."""
    return _numbers(positions, length, "position", "the prompt")


def _numbers(given: "Iterable[int] | None", count: int, noun: str, whole: str) -> tuple[int, ...]:
    """Returns the distinct given numbers as a tuple; 0 to count - 1 for None. Raises: ValueError for none, or one out
    of range."""
    chosen = range(count) if given is None else [whole_number(f"{noun}s: a {noun}", x) for x in listed(given)]
    if not chosen:
        raise ValueError(f"there is no {noun}, so the grid is empty; leave out {noun}s= for all")
    if bad := [x for x in chosen if not 0 <= x < count]:
        raise ValueError(f"{noun} {bad[0]} lies outside {whole}, which has {noun}s 0 to {count - 1}")
    return tuple(dict.fromkeys(chosen))
