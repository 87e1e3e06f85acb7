"""Defines and checks the settings in the file of a sweep. Errors name the wrong setting or value, and its place."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator

from cacheprobe.core.settings import DEFAULT_SAMPLING, ModelFlags, PromptFlags, RunFlags
from cacheprobe.core.values import JsonDict, nearest_or_all

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def _as_list(value: object) -> list | tuple:
    """Returns a list or tuple unchanged, and any other value in a list."""
    return value if isinstance(value, list | tuple) else [value]


def _none_of_text(value: object) -> object:
    """Returns None for the text "none", and any other value unchanged."""
    return None if value == "none" else value


Text = Annotated[str, Field(min_length=1)]
Maybe = Annotated[Text | None, BeforeValidator(_none_of_text)]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Products = Literal["auto", "torch"]
Count = Annotated[int, Field(ge=1, strict=True)]
Seed = Annotated[int, Field(ge=0, strict=True)]


class _Strict(BaseModel):
    """Base of all settings of a sweep: unknown settings are refused, and an instance cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Axes(_Strict):
    """Holds one value for each axis of a sweep. A cell is one combination of values.

    `lens` and `intervention` exist only in sweeps. The other names are those of `cacheprobe run`, and so are their
    defaults, except those that this class sets itself.
    """

    model: Text = ModelFlags.model
    dtype: DType = "auto"
    adapter: Maybe = ModelFlags.adapter
    products: Products = ModelFlags.products
    task: Text = "coin_flip"
    drafter: Maybe = RunFlags.drafter
    window: Count = 16
    lens: Text = RunFlags.lens
    """logit, or KIND:DIRECTORY of a stored lens, such as tuned:lenses/smollm2."""
    intervention: Maybe = None
    """zero, add, mean or resample, such as zero:site=T,layer=3,positions=4-9; applies to every request."""
    seed: Seed = RunFlags.seed


def _many(of: Any, convert: Callable[[object], object] = _as_list) -> Any:
    """Returns the pydantic type of a tuple of one or more values of type `of`. convert: makes a list of the input."""
    return Annotated[tuple[of, ...], BeforeValidator(convert), Field(min_length=1)]


def _seeds(value: object) -> list[object]:
    """Returns a list of seeds from a value or a list of values; a range such as "0-99" gives the seeds 0 to 99."""
    return [seed for given in _as_list(value) for seed in (span(given) if isinstance(given, str) else [given])]


def span(text: str) -> range:
    """Returns the numbers of a text such as "4-9", both ends included, or of one number. Raises: ValueError if it is
    neither."""
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and (not last.isdigit() or int(last) < int(first))):
        raise ValueError(f"{text!r} must be a number, or a range from the smaller to the larger one, such as 4-9")
    return range(int(first), int(last or first) + 1)


_GRID_FIELDS: dict[str, Any] = {
    name: (_many(of, _seeds if name == "seed" else _as_list), (Axes.model_fields[name].default,))
    for name, of in get_type_hints(Axes, include_extras=True).items()
    if name in Axes.model_fields
}
Grid = create_model("Grid", __base__=_Strict, **_GRID_FIELDS)
"""Holds a list of values for each axis of a sweep. Every combination of the values is a cell.

In a text, layer=0-5 gives six values, one for each of the layers 0 to 5. For the seeds, 0-5 gives six seeds.
"""


class SweepRunSettings(_Strict):
    """Holds the settings that all cells of a sweep share.

    Names and defaults are those of `cacheprobe run`, or of `cp.run` for prefill_chunk, prefill_group and pad_prefill;
    defaults that this class writes itself differ.
    """

    n: Count = PromptFlags.n
    """Number of the task's examples in each cell."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """cpu, cuda or cuda:1. A Ray actor sees the GPUs that `resources.num_gpus` gives it, counted from 0."""
    max_new_tokens: Count = DEFAULT_SAMPLING.max_new_tokens or 1
    capacity: Count | None = None
    group: Count | None = None
    """None: `cp.run` chooses. The same holds for `capacity`, `prefill_chunk`, `prefill_group` and `pad_prefill`."""
    prefill_chunk: Count | None = None
    prefill_group: Count | None = None
    draft_length: Count = 64
    """Most draft tokens before each verification. Never "adaptive": measured costs differ from machine to machine."""
    pad_prefill: Annotated[bool, Field(strict=True)] | None = None
    deterministic: Annotated[float, Field(ge=0, le=1)] = RunFlags.deterministic
    determinism: Literal["verify", "invariant"] = "verify"
    capture: str | None = "Z"
    """Sites to keep, of S (residual stream), T (attention output), C (MLP output) and Z (lens readings)."""
    layers: tuple[Annotated[int, Field(strict=True)], ...] | None = None
    temperature: Annotated[float, Field(ge=0)] = DEFAULT_SAMPLING.temperature or 0.0
    top_k: Annotated[int, Field(ge=0, strict=True)] = DEFAULT_SAMPLING.top_k or 0
    top_p: Annotated[float, Field(gt=0, le=1)] = DEFAULT_SAMPLING.top_p or 1.0
    stop: Annotated[tuple[Text, ...], BeforeValidator(_as_list)] = ()


class Resources(_Strict):
    """Holds the number of workers, and each worker's resources. Only `threads` changes bits of the results.

    A worker has one model loaded at a time.
    """

    workers: Count = 2
    num_cpus: Annotated[float, Field(ge=0)] = 1
    """Number of CPUs of each Ray actor."""
    num_gpus: Annotated[float, Field(ge=0)] = 0
    threads: Count = 1
    """Number of torch's threads. The bits of sums depend on this number, so it is part of a cell's digest."""
    retries: Annotated[int, Field(ge=0, strict=True)] = 2
    """Number of times that a cell is run again after its worker died."""


class SweepConfig(_Strict):
    """Holds the checked content of the settings file of a sweep."""

    out: str | None = None
    """Folder or fsspec address of the results, such as s3://bucket/sweep."""
    grid: Grid | None = None  # pyright: ignore[reportInvalidTypeForm]
    cells: tuple[Axes, ...] | None = None
    """List of cells, in place of a grid."""
    run: SweepRunSettings = SweepRunSettings()
    resources: Resources = Resources()
    disk_budget_gb: Annotated[float, Field(gt=0)] | None = None
    """Largest size of all results, in GB. A sweep starts no more cells once the budget is used up."""

    @model_validator(mode="after")
    def _one_source(self) -> "SweepConfig":
        """Checks that the file has either a grid or a list of cells that is not empty. Raises: ValueError otherwise."""
        if (self.grid is None) == (self.cells is None):
            raise ValueError("give either grid: (lists of values) or cells: (a list of combinations)")
        if self.cells is not None and not self.cells:
            raise ValueError("cells is empty; give at least one combination")
        return self

    @model_validator(mode="after")
    def _gpus_are_used(self) -> "SweepConfig":
        """Checks that `run.device` is a GPU if `resources.num_gpus` is above 0. Raises: ValueError otherwise."""
        if self.resources.num_gpus and self.run.device == "cpu":
            raise ValueError("resources.num_gpus takes GPUs, and run.device is the CPU; write run: {device: cuda}")
        return self


ConfigSource: TypeAlias = str | Path | JsonDict | SweepConfig
"""Settings of a sweep: the path of a YAML file, the content of such a file, or checked settings."""


def read_config(source: ConfigSource) -> SweepConfig:
    """Returns the checked settings (SweepConfig) of a sweep, from a YAML file or from its content as a dictionary.

    Raises: ValueError that names unknown settings and wrong values, with their places.
    """
    if isinstance(source, SweepConfig):
        return source
    where, content = "the sweep's settings", source
    if isinstance(source, str | Path):
        from cacheprobe.core.files import read_yaml

        where, content = str(source), read_yaml(Path(source), "sweep")
    if not isinstance(content, dict):
        raise ValueError(
            f"{where} holds a {type(content).__name__} instead of settings such as `grid: {{seed: [0, 1]}}`"
        )
    try:
        return SweepConfig.model_validate(content)
    except ValidationError as error:
        raise ValueError("; ".join(_error_text(item, where) for item in error.errors())) from None


def _error_text(item: "ErrorDetails", where: str) -> str:
    """Returns one validation error of pydantic as text, with the path of the setting. where: name of the file."""
    path = [part for part in item["loc"] if not str(part).startswith(("constrained", "function-"))]
    if item["type"] != "extra_forbidden":
        at = f"{'.'.join(map(str, path))} in {where}: " if path else f"{where}: "
        given = "" if item["type"] == "value_error" else f", got {item['input']!r:.60}"
        return at + item["msg"].removeprefix("Value error, ") + given
    sections = {"grid": Grid, "cells": Axes, "run": SweepRunSettings, "resources": Resources}
    section = SweepConfig if len(path) == 1 else sections[str(path[0])]
    remedy = nearest_or_all(str(path[-1]), list(section.model_fields))
    return f"unknown setting {'.'.join(map(str, path))!r} in {where}; {remedy}"
