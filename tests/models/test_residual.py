"""T and C are what a block adds to the stream, wherever a family puts its norms, on both paths."""

import pytest
import torch
from torch import Tensor

from cacheprobe.models.fast.lm import FastLM
from cacheprobe.ops.equality import close
from tests.feeding import fed_in_parts, texts
from tests.tiny import FAMILIES, hf_model, loaded

SUMS = "two additions in another order"
POST_NORM = ("olmo2", "gemma2", "gemma3")
"""Families with a norm between the attention, or the MLP, and the stream."""


@pytest.mark.parametrize("path", ["bridge", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_block_adds_t_and_c(family: str, path: str) -> None:
    """Ragged rows, pads, blocks that were taken back: pre + T + C = S."""
    model = loaded(family)
    rows = texts(21, 13)
    seen = fed_in_parts(model if path == "bridge" else FastLM(model), rows)
    for row in range(len(rows)):
        pre = seen[f"pre 0 row {row}"]
        for layer in range(model.n_layers):
            attn, mlp, post = (seen[f"{site} {layer} row {row}"] for site in "TCS")
            assert close(pre + attn + mlp, post, 1e-5, because=SUMS), layer
            assert not close(pre + attn, post, 1e-2, because="the control: C is no small change")
            assert not close(pre + mlp, post, 1e-2, because="the control: nor is T")
            pre = post


@pytest.mark.parametrize("family", POST_NORM)
def test_t_and_c_stand_behind_their_norms(family: str) -> None:
    """By plain hooks on a Hugging Face model: what leaves the norm, and not what leaves the attention or the MLP."""
    plain, (text,) = hf_model(family), texts(11)
    block, heard = plain.model.layers[1], dict[str, Tensor]()

    def hear(name: str) -> None:
        def keep(module: torch.nn.Module, args: object, output: object) -> None:
            heard[name] = (output[0] if isinstance(output, tuple) else output)[0]

        getattr(block, name).register_forward_hook(keep)

    for name in ("self_attn", "post_attention_layernorm", "mlp", "post_feedforward_layernorm"):
        hear(name)
    with torch.inference_mode():
        plain(text[None], use_cache=False)
    for model in (loaded(family), FastLM(loaded(family))):
        seen = fed_in_parts(model, [text])
        for site, inner, outer in (
            ("T", "self_attn", "post_attention_layernorm"),
            ("C", "mlp", "post_feedforward_layernorm"),
        ):
            assert close(seen[f"{site} 1 row 0"], heard[outer], 1e-5, because="fused attention reorders sums")
            assert not close(seen[f"{site} 1 row 0"], heard[inner], 1e-1, because="the control: the norm matters")
