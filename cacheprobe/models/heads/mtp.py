"""Defines MtpModule, a multi-token-prediction (MTP) module of a checkpoint as a draft head: one decoder layer of the
model's own family over pairs of a state and the token after it."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_layers import MtpLayer, MtpModel

from cacheprobe.core.live import LiveConfig, LiveModule
from cacheprobe.models.heads.module import HeadModule


class MtpModule(HeadModule):
    """Runs a model's MTP module: projects the joined norms of a token's embedding and of a state to the width of the
    model, then runs one decoder layer, a norm, and the model's own unembedding.

    The states are the model's last ones after its final norm. Further rows of a chain take this module's own output
    after its norm. `mtp_module` makes a subclass for each family, so that `type(module)(module.config)` builds another.
    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2; transformers' MtpModel.
    Twin: `MtpModel.forward_layer` over the whole text, close(1e-5) in float32.
    """

    family: ClassVar[LiveModule]
    """transformers' MtpModel of the checkpoint, whose classes and sizes this module takes."""
    states_first: ClassVar[bool] = False
    """True if the projection reads [state, embedding], as MiMo's does; False for [embedding, state]."""

    def __init__(self, config: LiveConfig) -> None:
        super().__init__(config)
        family, width = self.family, config.hidden_size
        norm, embedding, unembedding = type(family.layers[0].enorm), family.embed_tokens, family.shared_head
        layer = MtpLayer(config, type(family.layers[0].mtp_block), norm, 0)
        self.model = nn.Module()
        self.model.embed_tokens = type(embedding)(embedding.num_embeddings, width)
        self.model.target_norm = norm(width, eps=config.rms_norm_eps)
        self.model.enorm, self.model.hnorm, self.model.eh_proj = layer.enorm, layer.hnorm, layer.eh_proj
        self.model.layers, self.model.norm = nn.ModuleList([layer.mtp_block]), layer.post_norm
        self.model.rotary_emb = type(family.rotary_emb)(config)
        self.lm_head = nn.Linear(width, unembedding.out_features, bias=unembedding.bias is not None)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Returns True: the experts are of the model's own family. transformers asks."""
        return True

    def entering(self, states: Tensor) -> Tensor:
        """Returns the states [..., m] of rows, after the model's final norm. states: [..., 1, m], before it."""
        return self.model.target_norm(states[..., 0, :])

    def fed_back(self, residual: Tensor) -> Tensor:
        """Returns the module's own output [..., m] after its norm, which the next row of a chain takes as its state."""
        return self.model.norm(residual)

    def block_input(self, states: Tensor, embeds: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the projection [b, t, m] of the joined norms of states and embeddings, and no further arguments."""
        parts = [self.model.enorm(embeds), self.model.hnorm(states)]
        return self.model.eh_proj(torch.cat(parts[::-1] if self.states_first else parts, dim=-1)), {}


def mtp_module(family: MtpModel, live: LiveModule, states_first: bool) -> MtpModule:
    """Returns the MtpModule of a checkpoint. It holds the weights of `family`, and the embedding, final norm, rotation
    and unembedding of `live` as the same modules.

    family: transformers' MtpModel with its weights.  live: the transformers model that the checkpoint is of.
    states_first: whether its projection reads [state, embedding].
    """
    name = f"{type(live).__name__.removesuffix('ForCausalLM')}MtpModule"
    kind = type(name, (MtpModule,), {"family": family, "states_first": states_first, "__module__": __name__})
    with torch.device("meta"):
        made: MtpModule = kind(family.config)
    layer: LiveModule = family.layers[0]
    decoder: LiveModule = live.get_decoder()
    made.model.layers.load_state_dict({f"0.{n}": w for n, w in layer.mtp_block.state_dict().items()}, assign=True)
    made.model.enorm, made.model.hnorm, made.model.eh_proj = layer.enorm, layer.hnorm, layer.eh_proj
    made.model.norm, made.model.target_norm = layer.post_norm, decoder.norm
    made.model.embed_tokens, made.model.rotary_emb = live.get_input_embeddings(), decoder.rotary_emb
    made.lm_head = live.get_output_embeddings()
    return made.eval()
