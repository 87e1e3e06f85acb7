"""The ways to make an intervention. `where` is the rest of its fields: request_id, site, layer, positions, head ..."""

from typing import Any

import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEADS
from cacheprobe.interventions.base import Intervention, as_wide


def zero(**where: Any) -> Intervention:
    """States become zero."""
    return Intervention(name="zero", action="replace", vectors=torch.zeros(1, 1), **where)


def replace(vectors: Tensor, **where: Any) -> Intervention:
    """States become `vectors`: [m] for all positions, or [n, m] with one for each; of a head, [d] or [n, d]."""
    return Intervention(name="replace", action="replace", vectors=vectors, **where)


def add(vectors: Tensor, **where: Any) -> Intervention:
    """`vectors`, as for `replace`, are added to the states, in the model's dtype."""
    return Intervention(name="add", action="add", vectors=vectors, **where)


def mean(states: Tensor, **where: Any) -> Intervention:
    """States become the mean of `states` [n, m], such as `trace.states("S", 3, 0)`, in float32, or in their float64.

    Source: mean ablation of Wang et al. 2022 (arXiv 2211.00593), section 2.1.
    """
    return Intervention(name="mean", action="replace", vectors=as_wide(_rows(states, "mean")).mean(0), **where)


def resample(states: Tensor, *, seed: int = 0, **where: Any) -> Intervention:
    """Each position takes one of `states` [n, m], drawn by (seed, position): the same one whenever it is computed.

    Source: resample ablation of causal scrubbing (Chan et al. 2022).
    """
    return Intervention(name="resample", action="replace", vectors=_rows(states, "resample"), seed=seed, **where)


def swap(trace: Any, a: int, b: int, **where: Any) -> tuple[Intervention, Intervention]:
    """Requests a and b take each other's states, as `trace`, a run of both without interventions, recorded them.

    Of a head of T, its z, which the trace's run must have kept: CaptureConfig(heads=("z",)).
    The requests that it is applied to must have prompts of the same length as those of the trace. Positions are
    needed, and must lie in what both computed.  Raises: ValueError where they do not, or for prompts of different
    length: there no position means the same in both.
    Source: interchange interventions, Geiger et al. 2021 (arXiv 2106.02997), section 3.
    """
    requests = {request.request_id: request for request in trace.requests}
    if missing := [r for r in (a, b) if r not in requests]:
        raise ValueError(f"swap: no request {missing[0]} in the trace; it has 0 to {len(requests) - 1}")
    lengths = [requests[r].num_prompt_tokens for r in (a, b)]
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"swap: the prompts of requests {a} and {b} have {lengths[0]} and {lengths[1]} tokens, so their positions "
            "do not mean the same; use prompts of one length, or replace() with the states that you mean"
        )
    if where.get("site") == "pre":
        raise ValueError("swap: a trace keeps sites S, T and C, and z of heads; swap one of those")
    if where.get("positions") is None:
        raise ValueError("swap: say which positions= to swap, such as range(4, 9)")
    if trace.meta.get("interventions"):
        raise ValueError("swap: the trace's own run was changed by interventions; take a trace of a plain run")

    def one(target: int, source: int) -> Intervention:
        blank = Intervention(name="swap", action="replace", vectors=torch.zeros(1, 1), request_id=target, **where)
        if blank.head is None:
            states = trace.states(blank.site, blank.layer, source)
        else:
            states = trace.heads(HEADS, blank.layer, source)[:, blank.head]
        if max(blank.positions) >= len(states):
            raise ValueError(
                f"swap: position {max(blank.positions)} lies outside request {source}, which computed 0 to "
                f"{len(states) - 1}"
            )
        taken = dict(vectors=states[list(blank.positions)], num_prompt_tokens=lengths[0])
        return Intervention(name="swap", action="replace", request_id=target, **taken, **where)

    return one(a, b), one(b, a)


def _rows(states: Tensor, what: str) -> Tensor:
    if states.dim() != 2 or not len(states):
        raise ValueError(f"{what}: states must be [n, m] with at least one row, got {list(states.shape)}")
    return states
