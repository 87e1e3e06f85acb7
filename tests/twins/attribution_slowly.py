"""Direct logit attribution the slow way: one uncached Hugging Face forward, every part by a plain hook.

Each part goes through the final norm alone, whose scale is written out by hand.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_OUTPUTS = ("o_proj", "dense", "c_proj")
_BEHIND = {"T": "post_attention_layernorm", "C": "post_feedforward_layernorm"}
"""In post-norm families, what leaves these is added to the stream; elsewhere the first stands before the MLP."""


def _norm(model: PreTrainedModel) -> nn.Module:
    base = model.base_model
    return next(
        m for name in ("norm", "ln_f", "final_layer_norm", "final_layernorm") if (m := getattr(base, name, None))
    )


def frozen_slowly(norm: nn.Module, parts: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Parts [n, m] through the norm with its scale at `at` [m], and its bias [m], from its weights by their names."""
    is_layer_norm = isinstance(norm, nn.LayerNorm)
    weight = norm.weight.double() + (1.0 if "Gemma" in type(norm).__name__ else 0.0)
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    if is_layer_norm:
        scale = torch.sqrt(at.double().var(unbiased=False) + eps)
        return (parts - parts.mean(-1, keepdim=True)) / scale * weight, norm.bias.double()
    return parts / torch.sqrt(at.double().square().mean() + eps) * weight, torch.zeros_like(weight)


def attribution_slowly(model: PreTrainedModel, token_ids: Sequence[int], token_id: int) -> dict[tuple, float]:
    """The last position's logit of a token by (site, layer, head), before a soft cap; "sum" is its total."""
    heard: dict[tuple[str, int | None], Tensor] = {}
    handles = []

    def listen(module: nn.Module, note: Callable[[Tensor, Tensor], None]) -> None:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            into = args[0] if args else next(iter(kwargs.values()))
            note(into[0, -1].double(), (output[0] if isinstance(output, tuple) else output)[0, -1].double())

        handles.append(module.register_forward_hook(hook, with_kwargs=True))

    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    is_post = hasattr(blocks[0], "post_feedforward_layernorm")
    projections = []
    for layer, block in enumerate(blocks):
        parts = dict(block.named_children())
        attention = next(parts[name] for name in ("self_attn", "attn", "attention") if name in parts)
        projections.append(next(m for n, m in attention.named_children() if n in _OUTPUTS))
        listen(projections[-1], lambda into, _, at=("z", layer): heard.update({at: into}))
        for site, inner in (("T", attention), ("C", parts["mlp"])):
            listen(parts[_BEHIND[site]] if is_post else inner, lambda _, out, at=(site, layer): heard.update({at: out}))
    listen(blocks[0], lambda into, _: heard.update({("embed", None): into}))
    listen(_norm(model), lambda into, _: heard.update({("last", None): into}))
    with torch.inference_mode():
        model(torch.tensor([list(token_ids)]), use_cache=False)
        for handle in handles:
            handle.remove()
        head = model.get_output_embeddings()
        direction, at = head.weight[token_id].double(), heard["last", None]
        bias = 0.0 if head.bias is None else float(head.bias[token_id])
        out = {("unembed bias", None, None): bias}

        def put(key: tuple, part: Tensor) -> None:
            through, norm_bias = frozen_slowly(_norm(model), part[None], at)
            out[key] = float(through[0] @ direction)
            out["norm bias", None, None] = float(norm_bias @ direction)

        put(("embed", None, None), heard["embed", None])
        heads = model.config.num_attention_heads
        for layer, projection in enumerate(projections):
            put(("C", layer, None), heard["C", layer])
            put(("T", layer, None), heard["T", layer])
            z = heard["z", layer].view(heads, -1)
            silent = projection.double()(torch.zeros_like(z).flatten())
            whole = projection(z.flatten())
            for h in range(heads):
                alone = torch.zeros_like(z)
                alone[h] = z[h]
                part = projection(alone.flatten()) - silent
                if is_post:
                    part, _ = (x[0] if i == 0 else x for i, x in enumerate(
                        frozen_slowly(blocks[layer].post_attention_layernorm, part[None], whole)))  # fmt: skip
                put(("T", layer, h), part)
            projection.to(model.dtype)
    out["sum", None, None] = sum(value for (site, _, head), value in out.items() if head is None)
    return out
