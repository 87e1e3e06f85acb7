"""Computes experts batch-invariantly: each token's experts in the order of their ids, each by a product whose bits do
not depend on the other tokens.

transformers calls `invariant_experts` if a config's `_experts_implementation` is INVARIANT. Its own functions compute
all tokens of an expert in one product, whose bits depend on the number of these tokens.
"""

from functools import partial

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from cacheprobe.core.live import LiveModule
from cacheprobe.models.experts.products import RowProduct, in_even_parts, rows_alone

INVARIANT = "cacheprobe"
"""Our name in transformers' table of experts functions."""
PRODUCT = "_cacheprobe_product"
"""Name under which a module keeps the product to compute with; without one, `rows_alone`."""


def invariant_experts(experts: LiveModule, states: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """Returns, for states [n, m], the sum of the outputs of each token's k experts, times their weights: [n, m].

    expert_ids, weights: [n, k]. The sum is in float32 (in float64 for a float64 model), in ascending order of the ids.
    Twin: the class's own forward, close(1e-5) in float32, since sums are in another order.
    """
    width, top_k = states.shape[-1], expert_ids.shape[-1]
    flat = states.reshape(-1, width)
    expert_ids, order = expert_ids.reshape(-1, top_k).sort(dim=-1, stable=True)
    weights = weights.reshape(-1, top_k).gather(1, order)
    pairs = expert_ids.flatten()
    outputs = flat.new_zeros(len(pairs), width)
    for expert in pairs.unique().tolist():
        if expert < experts.num_experts:  # a number beyond them says "none"
            rows = (pairs == expert).nonzero()[:, 0]
            outputs[rows] = _output(experts, expert, flat[rows // top_k])
    weighted = (outputs.view(-1, top_k, width) * weights[..., None]).to(_sum_dtype(states.dtype))
    total = weighted[:, 0]
    for rank in range(1, top_k):
        total = total + weighted[:, rank]
    return total.to(states.dtype).view(states.shape)


def _output(experts: LiveModule, expert: int, states: Tensor) -> Tensor:
    """Returns the output [n, m] of one expert for states [n, m]."""
    product: RowProduct = vars(experts).get(PRODUCT, rows_alone)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = product(states, *_layer(experts, name, expert))
    activate = experts._apply_gate if experts.has_gate else experts.act_fn
    inner = in_even_parts(activate, inner, parts=2 if experts.has_gate else 1)
    output = product(inner, *_layer(experts, "down_proj", expert))
    return torch.cat([experts.post_expert_norm(row[None]) for row in output]) if _has_norm(experts) else output


def _layer(experts: LiveModule, name: str, expert: int) -> tuple[Tensor, Tensor | None]:
    """Returns (weight [o, i], bias [o] or None) of one linear layer of one expert."""
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return weight.T.contiguous() if experts.is_transposed else weight, bias


def _has_norm(experts: LiveModule) -> bool:
    return bool(getattr(experts, "has_post_expert_norm", False))


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_of(product: RowProduct | None, dtype: torch.dtype) -> RowProduct:
    """Returns a product for tensors of any dtype: `product` for those of the model's dtype, `rows_alone` for others.
    product: None if torch computes the products."""
    return rows_alone if product is None else partial(_by_dtype, product, dtype)


def _by_dtype(product: RowProduct, dtype: torch.dtype, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return (product if values.dtype == weight.dtype == dtype else rows_alone)(values, weight, bias)


ALL_EXPERTS_FUNCTIONS.register(INVARIANT, invariant_experts)
