"""Writes states as the vLLM project's library speculators reads them to train draft models."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

import torch
from safetensors.torch import save_file
from torch import Tensor

from cacheprobe.analysis.exports.arrays import require_unused
from cacheprobe.core.files import write_whole
from cacheprobe.core.hook_names import CONVENTION
from cacheprobe.core.terminal import Progress
from cacheprobe.trace.state_store import layer_number

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

FEWEST_LAYERS = 7
"""Of a model for which EAGLE-3's three layers are different."""


def to_speculators(
    trace: "Trace",
    folder: "str | Path",
    layers: Sequence[SupportsIndex] | None = None,
    progress: bool = True,
) -> list[Path]:
    """Writes hs_REQUEST.safetensors for each request into a folder, which is created, and returns the paths.

    A file has token_ids [t], of all tokens but the newest, which was not computed; and hidden_states [t, l, m], site S
    at `layers`, and last at the model's last layer, before its final norm. Its metadata names these layers, so that
    `cp.import_vllm` reads it without layers=.
    layers: by default 1, n/2 - 1 and n - 4 of n layers. vLLM, which counts the stream that enters a block, gives these
    to EAGLE-3 as layers 2, n/2 and n - 3.
    Source: github.com/vllm-project/speculators, check_hidden_states.
    Raises: ValueError for a run without S at one of these layers or positions, with tokens from a KVSnapshot, or with
    fewer than 7 layers if `layers` are not given; also for a folder with an earlier export.
    """
    n = int(trace.row_table.num_layers.max())
    if layers is None and n < FEWEST_LAYERS:
        raise ValueError(f"the model has {n} layers, too few for EAGLE-3's choice of three; give layers=")
    chosen = [layer_number(one, trace.row_table) for one in ((1, n // 2 - 1, n - 4) if layers is None else layers)]
    folder = Path(folder)
    require_unused(folder, "hs_*.safetensors")
    paths, named = [], {"layers": ",".join(map(str, (*chosen, n - 1))), "convention": CONVENTION}
    with Progress(len(trace.requests), "writing", "requests", enabled=progress) as bar:
        for request in trace.tokens:
            tensors = _tensors(trace, request, (*chosen, n - 1))
            save = partial(save_file, tensors, metadata=named)
            paths.append(write_whole(folder / f"hs_{request}.safetensors", save))
            bar.advance()
    return paths


def _tensors(trace: "Trace", request: int, layers: Sequence[int]) -> dict[str, Tensor]:
    """Returns the content of one request's file. Raises: ValueError, see `to_speculators`."""
    rows = trace.rows(request, "committed").sort_values("position")
    if rows.position.tolist() != list(range(len(rows))):
        raise ValueError(f"request {request} began from cached keys and values, whose states were not computed")
    states = torch.stack([trace.vectors("S", layer, rows) for layer in layers], dim=1)
    return {"token_ids": torch.tensor(rows.token_id.tolist()), "hidden_states": states.contiguous()}
