"""Gives the states of one request as numpy arrays, and as an xarray Dataset with named dimensions."""

from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from cacheprobe.core.hook_names import CONVENTION, SITE_NAMES

if TYPE_CHECKING:
    import xarray

    from cacheprobe.trace.trace import Trace

NO_STATES = "this run kept no states at S, T or C; run it with capture='S' or more"


def as_numpy(states: Tensor) -> np.ndarray:
    """Returns a tensor as an array of the same numbers; bfloat16, which numpy does not have, as float32."""
    return (states.float() if states.dtype == torch.bfloat16 else states).contiguous().numpy()


def require_unused(folder: Path, pattern: str) -> None:
    """Creates a folder. Raises: ValueError if it holds files of an earlier export, which a reader would take for files
    of this one."""
    folder.mkdir(parents=True, exist_ok=True)
    if found := sorted(folder.glob(pattern)):
        raise ValueError(f"{folder} holds an earlier export, such as {found[0].name}; choose an empty folder")


def to_numpy(trace: "Trace", request_id: SupportsIndex) -> dict[str, np.ndarray]:
    """Returns site -> array [l, p, m] of the captured layers, in their order, and of the committed positions.

    Raises: ValueError if no site was captured, or the state of a position is missing; KeyError for an unknown request.
    """
    if not trace.store.sites:
        raise ValueError(NO_STATES)
    rows = trace.rows(request_id, "committed").sort_values("position")
    return {
        site: np.stack([as_numpy(trace.vectors(site, layer, rows)) for layer in trace.store.layers])
        for site in trace.store.sites
    }


def to_xarray(trace: "Trace", request_id: SupportsIndex) -> "xarray.Dataset":
    """Returns the arrays of `to_numpy` as variables with the dimensions layer, position and component.

    Coordinates: layer, position; token and token_id, by position.
    Raises: as `to_numpy`; ModuleNotFoundError without xarray, with the command that installs it.
    """
    try:
        import xarray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_xarray needs xarray: pip install 'cacheprobe[exports]'") from error
    rows = trace.rows(request_id, "committed").sort_values("position")
    dimensions = ("layer", "position", "component")
    return xarray.Dataset(
        {
            site: (dimensions, array, {"long_name": SITE_NAMES[site]})
            for site, array in to_numpy(trace, request_id).items()
        },
        coords={
            "layer": list(trace.store.layers),
            "position": rows.position.to_numpy(),
            "token_id": ("position", rows.token_id.to_numpy()),
            "token": ("position", np.array(rows.token.tolist(), dtype=object)),
        },
        attrs={"model": str(trace.fingerprint["model"]), "request_id": int(request_id), "convention": CONVENTION},
    )
