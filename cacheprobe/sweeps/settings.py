"""Checks the settings of a sweep's file; errors name the unknown setting or wrong value and its place."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cacheprobe.core.run_flags import ModelFlags, PromptFlags, RunFlags
from cacheprobe.core.values import JsonDict, nearest_or_all

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def _listed(value: object) -> list | tuple:
    return value if isinstance(value, list | tuple) else [value]


def _none(value: object) -> object:
    return None if value == "none" else value


Text = Annotated[str, Field(min_length=1)]
Maybe = Annotated[Text | None, BeforeValidator(_none)]
DType = Literal["float32", "bfloat16", "float16"]
Products = Literal["torch", "compiled"]
Rows = Annotated[int, Field(ge=1, strict=True)]
Seed = Annotated[int, Field(ge=0, strict=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Axes(_Strict):
    """One value of each axis: together they are a cell. Names, and defaults unless written here, are those of
    `cacheprobe run`.
    """

    model: Text = ModelFlags.model
    dtype: DType = "float32"
    adapter: Maybe = ModelFlags.adapter
    products: Products = ModelFlags.products
    task: Text = "coin_flip"
    drafter: Maybe = RunFlags.drafter
    window: Rows = 16
    lens: Text = "logit"
    """logit, or KIND:DIRECTORY of a stored lens, such as tuned:lenses/smollm2."""
    intervention: Maybe = None
    """zero, add, mean or resample, such as zero:site=T,layer=3,positions=4-9; applies to every request."""
    seed: Seed = RunFlags.seed


def _many(of: Any, listed: Callable[[object], object] = _listed) -> Any:
    """Returns the type of a list of values, at least one; pydantic reads it at run time."""
    return Annotated[tuple[of, ...], BeforeValidator(listed), Field(min_length=1)]


def _seeds(value: object) -> list[object]:
    return [seed for given in _listed(value) for seed in _span(given)]


def _span(given: object) -> Iterable[object]:
    """Returns the seeds of a range such as 0-99; another value unchanged in a list, for pydantic to check."""
    found = _RANGE.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        return [given]
    first, last = int(found[1]), int(found[2])
    if not 0 <= last - first < MOST_SEEDS:
        raise ValueError(f"{given!r} should go from the smaller seed to the larger, over {MOST_SEEDS} at most")
    return range(first, last + 1)


_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")
MOST_SEEDS = 100_000
"""Largest number of seeds in one range; more is likely a typing error, and would fill the memory."""


class Grid(_Strict):
    """Lists of values of the same axes; every combination is a cell. layer=0-5 in a text is six values, seed: 0-5 six
    seeds.
    """

    model: _many(Text) = ("smollm2-135m",)  # pyright: ignore[reportInvalidTypeForm]
    dtype: _many(DType) = ("float32",)  # pyright: ignore[reportInvalidTypeForm]
    adapter: _many(Maybe) = (None,)  # pyright: ignore[reportInvalidTypeForm]
    products: _many(Products) = ("torch",)  # pyright: ignore[reportInvalidTypeForm]
    task: _many(Text) = ("coin_flip",)  # pyright: ignore[reportInvalidTypeForm]
    drafter: _many(Maybe) = (None,)  # pyright: ignore[reportInvalidTypeForm]
    window: _many(Rows) = (16,)  # pyright: ignore[reportInvalidTypeForm]
    lens: _many(Text) = ("logit",)  # pyright: ignore[reportInvalidTypeForm]
    intervention: _many(Maybe) = (None,)  # pyright: ignore[reportInvalidTypeForm]
    seed: _many(Seed, _seeds) = (0,)  # pyright: ignore[reportInvalidTypeForm]


class RunSettings(_Strict):
    """Settings that all cells share. Names, and defaults unless written here, are those of `cacheprobe run`."""

    n: Rows = PromptFlags.n
    """Examples of the task in each cell."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """cpu, cuda or cuda:1. A Ray actor sees the GPUs that `resources.num_gpus` gives it, counted from 0."""
    max_new_tokens: Rows = RunFlags.max_new_tokens
    capacity: Rows = RunFlags.capacity
    group: Rows | None = RunFlags.group
    """None takes the choice of `cp.run`, here and for the three settings below."""
    prefill_chunk: Rows | None = None
    prefill_group: Rows | None = None
    pad_prefill: Annotated[bool, Field(strict=True)] | None = None
    deterministic: Annotated[float, Field(ge=0, le=1)] = RunFlags.deterministic
    capture: str | None = "Z"
    """Sites to keep, of S, T, C and Z."""
    layers: tuple[Annotated[int, Field(strict=True)], ...] | None = None
    temperature: Annotated[float, Field(ge=0)] = RunFlags.temperature
    top_k: Annotated[int, Field(ge=0, strict=True)] = RunFlags.top_k
    top_p: Annotated[float, Field(gt=0, le=1)] = RunFlags.top_p
    stop: Annotated[tuple[Text, ...], BeforeValidator(_listed)] = RunFlags.stop


class Resources(_Strict):
    """Resources of one worker, which holds one model. Only `threads` changes bits."""

    workers: Rows = 2
    num_cpus: Annotated[float, Field(ge=0)] = 1
    """CPUs of a Ray actor."""
    num_gpus: Annotated[float, Field(ge=0)] = 0
    threads: Rows = 1
    """Threads of torch. Sums depend on their number, so it is part of a cell's digest."""
    retries: Annotated[int, Field(ge=0, strict=True)] = 2
    """How often a cell is run again after its worker died."""


class SweepConfig(_Strict):
    """Content of a sweep's file."""

    out: str | None = None
    """Folder or fsspec address of the results, such as s3://bucket/sweep."""
    grid: Grid | None = None
    cells: tuple[Axes, ...] | None = None
    """List of cells, in place of a grid."""
    run: RunSettings = RunSettings()
    resources: Resources = Resources()
    disk_budget_gb: Annotated[float, Field(gt=0)] | None = None
    """Refuses a sweep whose estimated results are larger."""

    @model_validator(mode="after")
    def _one_source(self) -> "SweepConfig":
        if (self.grid is None) == (self.cells is None):
            raise ValueError("give either grid: (lists of values) or cells: (a list of combinations)")
        if self.cells is not None and not self.cells:
            raise ValueError("cells is empty; give at least one combination")
        return self

    @model_validator(mode="after")
    def _gpus_are_used(self) -> "SweepConfig":
        if self.resources.num_gpus and self.run.device == "cpu":
            raise ValueError("resources.num_gpus takes GPUs, and run.device is the CPU; write run: {device: cuda}")
        return self


ConfigSource: TypeAlias = str | Path | JsonDict | SweepConfig
"""A sweep's YAML file, its content, or its checked settings."""


def read_config(source: ConfigSource) -> SweepConfig:
    """Returns a sweep's settings from a YAML file, or from the content of one.

    Raises: ValueError with every unknown name or wrong value, and its place.
    """
    if isinstance(source, SweepConfig):
        return source
    where, held = "the sweep's settings", source
    if isinstance(source, str | Path):
        from cacheprobe.core.strict_yaml import read_yaml

        where, held = str(source), read_yaml(Path(source), "sweep")
    if not isinstance(held, dict):
        raise ValueError(f"{where} holds a {type(held).__name__} instead of settings such as `grid: {{seed: [0, 1]}}`")
    try:
        return SweepConfig.model_validate(held)
    except ValidationError as error:
        raise ValueError("; ".join(_said(item, where) for item in error.errors())) from None


def _said(item: "ErrorDetails", where: str) -> str:
    """Returns one error of pydantic as a sentence."""
    place = [part for part in item["loc"] if not str(part).startswith(("constrained", "function-"))]
    if item["type"] != "extra_forbidden":
        at = f"{'.'.join(map(str, place))} in {where}: " if place else f"{where}: "
        given = "" if item["type"] == "value_error" else f", got {item['input']!r:.60}"
        return at + item["msg"].removeprefix("Value error, ") + given
    holders = {"grid": Grid, "cells": Axes, "run": RunSettings, "resources": Resources}
    holder = SweepConfig if len(place) == 1 else holders[str(place[0])]
    remedy = nearest_or_all(str(place[-1]), list(holder.model_fields))
    return f"unknown setting {'.'.join(map(str, place))!r} in {where}; {remedy}"
