"""T and C are what a block adds to the stream, wherever a family puts its norms, on both paths."""

import pytest
import torch
from torch import Tensor

from cacheprobe.ops.equality import close
from tests.feeding import fed_in_parts, texts
from tests.tiny import hf_model, loaded

POST_NORM = ("olmo2", "gemma2", "gemma3")
"""Families with a norm between the attention, or the MLP, and the stream."""


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
    for model in (loaded(family).bridged(), loaded(family)):
        seen = fed_in_parts(model, [text])
        for site, inner, outer in (
            ("T", "self_attn", "post_attention_layernorm"),
            ("C", "mlp", "post_feedforward_layernorm"),
        ):
            assert close(seen[f"{site} 1 row 0"], heard[outer], 1e-5, because="fused attention reorders sums")
            assert not close(seen[f"{site} 1 row 0"], heard[inner], 1e-1, because="the control: the norm matters")
