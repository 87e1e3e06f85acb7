"""Records states as a researcher does without cacheprobe: PyTorch forward hooks around transformers' `generate`."""

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cacheprobe.core.live import LiveModule

ATTENTIONS, MLPS = ("self_attn", "attention", "attn"), ("mlp", "feed_forward")


class Hooks:
    """Copies S, T and C of every block in each forward inside the `with`, as [b, t, m] by (site, layer)."""

    def __init__(self, model: LiveModule) -> None:
        base = model.base_model
        blocks = getattr(base, "layers", None) or getattr(base, "h", None)
        assert blocks is not None
        self._modules = [(site, layer, module) for layer, block in enumerate(blocks) for site, module in _parts(block)]
        self.kept: dict[tuple[str, int], list[Tensor]] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Hooks":
        self.kept = {(site, layer): [] for site, layer, _ in self._modules}
        for site, layer, module in self._modules:
            kept = self.kept[site, layer]
            self._handles.append(module.register_forward_hook(lambda _m, _a, out, kept=kept: _keep(kept, out)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def generated_rows(self) -> list[Tensor]:
        """Returns S [n, m] of each layer at the tokens from which a new one was predicted."""
        layers = 1 + max(layer for _, layer in self.kept)
        return [torch.cat([part[:, -1] for part in self.kept["S", layer]]) for layer in range(layers)]


def _keep(kept: list[Tensor], out: object) -> None:
    kept.append((out[0] if isinstance(out, tuple) else out).clone())  # type: ignore[union-attr]


def _parts(block: nn.Module) -> list[tuple[str, nn.Module]]:
    named = dict(block.named_children())
    attention = next(named[name] for name in ATTENTIONS if name in named)
    mlp = next(named[name] for name in MLPS if name in named)
    return [("S", block), ("T", attention), ("C", mlp)]


def lens_by_torch(model: LiveModule, states: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns (token ids, log-probabilities, entropy) of the five likeliest tokens of each row, layer by layer."""
    base = model.base_model
    norm = getattr(base, "norm", None) or base.final_layer_norm
    readings = []
    for rows in states:
        logits = model.get_output_embeddings()(norm(rows)).float()
        if cap := getattr(model.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        best = logprobs.topk(5, -1)
        readings.append((best.indices, best.values, entropy))
    return readings
