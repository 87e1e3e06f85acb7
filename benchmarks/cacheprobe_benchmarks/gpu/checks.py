"""Checks of the loop in Triton kernels that time nothing: against the CPU in float32, and D1 with a negative control.

They run on a GPU, and on a small model in Triton's interpreter on a CPU.
"""

from typing import Any

import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.core.config import DETERMINISMS
from cacheprobe.engine.passes import EngineError
from cacheprobe.engine.shapes import ShapeRefused
from cacheprobe.models.base import CachedLM
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.equality import bitwise
from cacheprobe.ops.kernel_set import KernelSet
from cacheprobe.trace.trace import Trace
from cacheprobe_benchmarks.shared.tiny import Size, tiny_model

SMALL = Size(vocab=32, hidden=16, mlp=32, layers=2, heads=4, initializer_range=0.3)
"""For a dry run. Whole registers of a processor, so that torch's activations compute every element alike."""
SIZE = Size(vocab=1024, hidden=256, mlp=512, layers=4, heads=4, initializer_range=0.1)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [30, 20, 10, 0]]
SHAPE = dict(window=4, draft_length=3, group=2, capacity=64, prefill_chunk=8, path="plain")
"""The path is required: a hook would leave the run to the bridge and to torch. So is the length of drafts: an adaptive
one depends on measured times, and may be 0."""
MOST_APART = 1e-4
"""Of a state's largest number, in float32: sums of four blocks are reordered."""


class PlantedProduct(KernelSet):
    """The kernels, but for a product whose bits depend on the batch: rows behind the first are one unit in the last
    place larger if the pass holds more than four tokens."""

    def product(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = super().product(values, weight, bias)
        if len(values) > 1 and values.shape[:-1].numel() > 4:
            out[1:] = torch.nextafter(out[1:], torch.full_like(out[1:], torch.inf))
        return out


def model_on(device: str, size: Size = SIZE, products: str = "kernels") -> PlainLM:
    """Returns a random llama-like model in float32 on a device."""
    return cp.load_model(tiny_model(size=size).to(device), products=products)


def loop_complaints(device: str, size: Size = SIZE, new_tokens: int = 16) -> list[str]:
    """Returns where a run in kernels on a device is not the run by torch on the CPU: tokens, labels of rows, states and
    the first tokens of readings. Drafts come from half of the blocks, so that some are rejected."""
    ours = _run(model_on(device, size), PROMPTS, new_tokens, deterministic=True)
    theirs = _run(model_on("cpu", size, "torch"), PROMPTS, new_tokens, deterministic=True)
    if ours.tokens != theirs.tokens:
        return [f"tokens are {ours.tokens} where the CPU has {theirs.tokens}"]
    found = [] if "rolled_back" in set(ours.row_table.status) else ["no draft was rejected: the check proves little"]
    if not ours.row_table.equals(theirs.row_table):
        return [*found, "rows have other labels than on the CPU"]
    for site in "STC":
        for layer in range(size.layers):
            mine, other = (trace.store.all_of(site, layer) for trace in (ours, theirs))
            apart = ((mine - other).abs().amax(-1) / other.abs().amax(-1)).nan_to_num(0)
            if not (mine.isnan() == other.isnan()).all() or not float(apart.max()) <= MOST_APART:
                found.append(f"{site} of layer {layer} is {float(apart.max()):.1e} of its largest number away")
    first = [trace.hypotheses().sort_values(["row", "layer"]).token_id.tolist() for trace in (ours, theirs)]
    return found if first[0] == first[1] else [*found, "readings have other first tokens than on the CPU"]


def determinism_complaints(device: str, size: Size = SIZE, new_tokens: int = 16) -> list[str]:
    """Returns where a request has other bits alone than beside others, with a verifier and without one, and whether a
    planted product whose bits depend on the batch goes unnoticed."""
    model, planted, found = model_on(device, size), model_on(device, size), []
    planted.use_operations(PlantedProduct("with a planted fault"))
    if not differing(planted, new_tokens, deterministic=False):
        found.append("plain: a planted batch-dependent product was not noticed")
    for way in DETERMINISMS:
        settings: dict[str, Any] = dict(determinism=way, deterministic=True, is_drafted=way == "verify")
        found += [f"{way}: {name} differs" for name in differing(model, new_tokens, **settings)]
        try:
            differing(planted, new_tokens, **settings)
            found.append(f"{way}: a planted batch-dependent product was not refused")
        except (ShapeRefused, EngineError):  # by the trial before the run, or for one request alone by the check in it
            pass
    return found


def patching_complaints(device: str, size: Size = SIZE, new_tokens: int = 16) -> list[str]:
    """Returns where a grid of activation patching in kernels on a device is not torch's on the CPU. Its prompts grow
    with `new_tokens`."""
    corrupt = [*PROMPTS[0], *range(new_tokens // 4)]
    clean = [corrupt[0] + 1, *corrupt[1:]]
    models = model_on(device, size), model_on("cpu", size, "torch")
    given: Any = dict(answer=(7, 11), progress=False, path="plain")
    ours, theirs = (cp.patching.activation(one, clean, corrupt, **given).table.logit_difference for one in models)
    apart = float((ours - theirs).abs().max() / theirs.abs().max())
    found = [] if theirs.std() > 0.01 else ["all cells have about the same logit difference: the check proves little"]
    return found if apart <= MOST_APART else [*found, f"a logit difference is {apart:.1e} of the largest away"]


COMPLAINTS = {"loop": loop_complaints, "determinism": determinism_complaints, "patching": patching_complaints}
"""By check: function of a device, the size of a model and the number of new tokens."""


def differing(model: CachedLM, new_tokens: int, is_drafted: bool = False, **settings: Any) -> list[str]:
    """Returns the names of what differs of one request, alone and beside two others: tokens, states, readings."""
    alone = _run(model, PROMPTS[1:2], new_tokens, is_drafted, **settings)
    beside = _run(model, PROMPTS, new_tokens, is_drafted, **settings)
    a, b = _of_request(alone, 0), _of_request(beside, 1)
    return [name for name in a if not bitwise(a[name], b[name])]


def _run(model: CachedLM, prompts: list[list[int]], new_tokens: int, is_drafted: bool = True, **settings: Any) -> Trace:
    """Runs with early-exit drafts, or with none."""
    drafter = cp.drafters.EarlyExit(layer=model.n_layers // 2 - 1) if is_drafted else None
    return cp.run(model, prompts, drafter=drafter, max_new_tokens=new_tokens, progress=False, **SHAPE, **settings)


def _of_request(trace: Trace, request_id: int) -> dict[str, Tensor]:
    """Returns the tokens, states and readings of a request's committed rows, by position and layer."""
    rows = trace.row_table
    mine = rows[(rows.request_id == request_id) & (rows.status == "committed")].sort_values("position")
    states = {
        f"{site} of layer {layer}": trace.store.all_of(site, layer)[mine.state_index.tolist()]
        for site in "STC"
        for layer in trace.store.layers
    }
    read = trace.hypotheses()
    read = read[read.row.isin(mine.row)].sort_values(["position", "layer"])
    numbers = read[["token_id", "rank", "logprob_nats", "entropy_nats"]].to_numpy(dtype="float64", na_value=-1.0)
    return {"tokens": torch.tensor(trace.tokens[request_id]), **states, "Z": torch.tensor(numbers)}
