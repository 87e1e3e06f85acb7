"""Cases of the lens readout: random ones, ones full of ties, and their definition in float64."""

import math

import torch
from torch import Tensor

from cacheprobe_kernels.base import Arguments, Case, Draws, Outcome


def lens_inputs(case: Case, draws: Draws) -> Arguments:
    """Targets beside states; every third row has none.

    Exact: states of -1 and 1, and few whole numbers as logits, so that many are equal; with a step beside them they are
    so large that more of them are equal once they are rounded to 16 bits.
    """
    n, m, v = (case.sizes[name] for name in ("n", "m", "v"))
    targets = draws.integers(0, v, n)
    if draws.device.type != "meta":
        targets[1::3] = -1
    given = {"target_token_ids": targets, "top_k": case.sizes["top_k"], "eps": 0.0 if case.is_exact else 1e-5}
    if case.is_exact:
        states, norm_weight = draws.signs(n, m, dtype=case.dtype), draws.signs(m, dtype=case.dtype)
        unembedding, bias = (draws.integers(-1, 2, *shape, dtype=case.dtype) for shape in ((v, m), (v,)))
        if "flat" in case.sizes:  # all that come first are equal, and few that come later are above them
            unembedding[: case.sizes["flat"]] = bias[: case.sizes["flat"]] = 0
            bias[case.sizes["flat"] :] -= 20
            bias[case.sizes["flat"] + 1 :: 24] += 40
        unembedding += case.sizes.get("step", 0) * draws.integers(-1, 2, v, m, dtype=case.dtype)
    else:
        states, norm_weight = draws.normal(n, m, dtype=case.dtype), draws.normal(m, dtype=case.dtype)
        unembedding, bias = (draws.normal(*shape, dtype=case.dtype) for shape in ((v, m), (v,)))
        unembedding = unembedding / math.sqrt(m)
    given |= {"states": states, "norm_weight": norm_weight, "unembedding": unembedding}
    if case.sizes.get("is_normed"):
        given["norm_weight"] = None
    return {**given, "bias": bias} if case.sizes["has_bias"] else given


def exact_readout(
    states: Tensor, norm_weight: Tensor | None, eps: float, unembedding: Tensor, target_token_ids: Tensor, top_k: int,
    bias: Tensor | None = None,
) -> Outcome:  # fmt: skip
    """By the definitions, a row at a time; logits are rounded once, to the model's type."""
    rows = []
    for state, target in zip(states.double(), target_token_ids.tolist(), strict=True):
        if norm_weight is not None:
            state = state / math.sqrt(float((state * state).mean()) + eps) * norm_weight.double()
        logits = unembedding.double() @ state + (0.0 if bias is None else bias.double())
        logits = logits.to(states.dtype).double()
        logprobs = logits - torch.logsumexp(logits, 0)
        tops = logprobs.sort(descending=True).values[:top_k]
        rows.append((tops, -(logprobs.exp() * logprobs).sum(), logprobs[target] if target >= 0 else torch.nan))
    tops, entropies, of_targets = zip(*rows, strict=True)
    return {
        "top_logprob_nats": torch.stack(tops),
        "entropy_nats": torch.stack(entropies),
        "target_logprob_nats": torch.tensor([float(x) for x in of_targets], dtype=torch.float64, device=states.device),
    }
