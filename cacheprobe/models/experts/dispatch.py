"""Computes experts batch-invariantly: each token's experts in the order of their ids, each by a product whose bits do
not depend on the other tokens.

transformers calls `invariant_experts` if a config's `_experts_implementation` is INVARIANT. Its own functions compute
all tokens of an expert in one product, whose bits depend on the number of these tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from cacheprobe.core.live import LiveModule

RowProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function (values, weight, bias) -> values weight^T + bias."""

_NUMBERS_AT_ONCE = 2**15 - 1
"""torch computes so many numbers in one thread, without a split at a place that depends on their number."""
_EVEN = 64
"""Numbers of a loop step of torch in 16 bits. The rest of a loop has other code, and may get other bits."""


def rows_alone(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns values weight^T + bias, [n, o], from values [n, i]: one product for each of the n rows. Each row is
    copied, because a library may use other code for another memory address."""
    if not len(values):
        return linear(values, weight, bias)
    return torch.cat([linear(row.clone()[None], weight, bias) for row in values])


def in_even_parts(f: Callable[[Tensor], Tensor], values: Tensor, parts: int = 1) -> Tensor:
    """Returns f(values) of values [n, w], for a function that treats each row alike. On a CPU computes as many rows at
    once as give the same bits as one: all steps of torch's loops are whole, or there is one row.

    parts: a row consists of so many parts of equal width, from which `f` computes element by element.
    """
    n, width = values.shape
    if values.device.type != "cpu" or n <= 1:
        return f(values)
    at_once = max(1, _NUMBERS_AT_ONCE // width) if width % (parts * _EVEN) == 0 else 1
    return torch.cat([f(part.clone()) for part in values.split(at_once)])


def padded(f: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Returns f(values) of values [n, w], for a function of each number, as `in_even_parts` on rows with zeros at their
    end."""
    return in_even_parts(f, pad(values, (0, -values.shape[-1] % _EVEN)))[:, : values.shape[-1]]


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
