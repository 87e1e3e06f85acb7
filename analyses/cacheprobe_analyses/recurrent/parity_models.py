"""The models of `negative_eigenvalues` and `recurrent_coin`: tiny models of transformers, trained on a coin that is
flipped or left.

The eigenvalues of a recurrent layer's state transition reach from 0 to 1, or from -1 to 1 ("signed").
Source: Grazzi et al. 2024 (arXiv 2411.12537), sections 4 and 5.1: DeltaNet with twice the beta, Mamba with 2 s(x) - 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedModel,
)
from transformers.models.mamba.modeling_mamba import MambaMixer, causal_conv1d_fn, causal_conv1d_update

from cacheprobe.core.noise import derive_seed
from cacheprobe.training.loop import LoopSettings, ModelLoop, StepReport

LEAVE, FLIP, HEADS, TAILS = range(4)
"""Token ids. After each LEAVE or FLIP the model says how the coin lies; at first, heads are up."""
ARCHITECTURES = ("transformer", "deltanet", "mamba")
TEST_SEED = 900_000_000
"""Texts of the tests are drawn under seeds from here on, which no training uses."""


@dataclass(frozen=True)
class Subject:
    """A model to train on texts of `shortest` to `longest` tokens."""

    architecture: str
    is_signed: bool = False
    """Whether eigenvalues reach from -1 to 1."""
    seed: int = 0
    shortest: int = 3
    longest: int = 40
    layers: int = 1
    width: int = 64
    loop: LoopSettings = field(default_factory=lambda: LoopSettings(1000, 128, 3e-3, weight_decay=0.0))

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"unknown architecture {self.architecture!r}; choose {', '.join(ARCHITECTURES)}")
        if self.is_signed and self.architecture == "transformer":
            raise ValueError("a transformer has no state transition, so that is_signed means nothing; leave it out")

    @property
    def name(self) -> str:
        """Architecture, with the range of the eigenvalues if it has any."""
        if self.architecture == "transformer":
            return self.architecture
        return f"{self.architecture} [{'-1' if self.is_signed else '0'}, 1]"


class SignedMambaMixer(MambaMixer):
    """A Mamba layer whose state transition is 2 exp(A dt) - 1, between -1 and 1; with `is_signed` False, transformers'
    own exp(A dt), between 0 and 1."""

    is_signed = True

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Tensor:
        """Returns the outputs [b, t, m], and updates the states of a cache. Attention masks are not supported."""
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("SignedMambaMixer takes no pads; feed texts of one length")
        length, cache, index = hidden_states.shape[1], cache_params, self.layer_idx
        conv_state = None if cache is None else cache.get_conv_state(index, state_idx=0)
        state = None if cache is None else cache.get_recurrent_state(index, state_idx=0)
        inputs, gate = self.in_proj(hidden_states).transpose(1, 2).chunk(2, dim=1)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        if conv_state is not None and length == 1:
            inputs = causal_conv1d_update(inputs, conv_state, weight, bias, activation=self.activation)
        else:
            if cache is not None:
                inputs = cache.update_conv_state(inputs, index, conv_kernel_size=self.conv_kernel_size)
            inputs = causal_conv1d_fn(inputs, weight, bias, activation=self.activation)[:, :, -length:]
        sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        step, into, out_of = torch.split(self.x_proj(inputs.transpose(1, 2)), sizes, dim=-1)
        step = F.softplus(self.dt_proj(step))  # [b, t, d]
        kept = torch.exp(-torch.exp(self.A_log.float()) * step[..., None])  # [b, t, d, n]
        if self.is_signed:
            kept = 2 * kept - 1
        added = step[..., None] * into[:, :, None] * inputs.transpose(1, 2)[..., None]
        state = torch.zeros_like(kept[:, 0]) if state is None else state
        states = []
        for keep, add in zip(kept.unbind(1), added.unbind(1), strict=True):
            state = torch.addcmul(add, keep, state)
            states.append(state)
        if cache is not None:
            cache.update_recurrent_state(state, index)
        outputs = torch.einsum("btdn,btn->bdt", torch.stack(states, dim=1), out_of) + inputs * self.D[:, None]
        return self.out_proj((outputs * F.silu(gate)).transpose(1, 2))


class SignedMamba(MambaForCausalLM):
    """transformers' Mamba with SignedMambaMixer in every layer, as `config.is_signed` says."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for block in self.backbone.layers:
            mixer = SignedMambaMixer(config, block.mixer.layer_idx)
            mixer.is_signed = config.is_signed
            mixer.load_state_dict(block.mixer.state_dict())
            block.mixer = mixer


def untrained(subject: Subject) -> PreTrainedModel:
    """Returns the subject's model with random weights, the same for the same seed."""
    torch.manual_seed(derive_seed(subject.seed, 0) % 2**63)
    common: dict[str, Any] = dict(
        vocab_size=8, hidden_size=subject.width, num_hidden_layers=subject.layers, pad_token_id=None, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    attention: dict[str, Any] = dict(
        intermediate_size=2 * subject.width, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512
    )
    if subject.architecture == "transformer":
        return LlamaForCausalLM(LlamaConfig(**common, **attention))
    if subject.architecture == "deltanet":
        return _deltanet(subject, {**common, **attention})
    mamba = MambaConfig(**common, state_size=4, expand=1, time_step_min=0.1, time_step_max=2.0)
    mamba.is_signed = subject.is_signed
    return SignedMamba(mamba)


def _deltanet(subject: Subject, fields: dict[str, Any]) -> PreTrainedModel:
    """Returns an OLMo Hybrid without attention layers, whose Gated DeltaNet keeps everything (gate 1): DeltaNet."""
    hybrid = OlmoHybridConfig(
        **{**fields, "num_hidden_layers": subject.layers + 1},
        layer_types=["linear_attention"] * subject.layers + ["full_attention"],
        linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=subject.width // 4,
        linear_value_head_dim=subject.width // 4, linear_allow_neg_eigval=subject.is_signed,
    )  # fmt: skip
    live = OlmoHybridForCausalLM(hybrid)
    del live.model.layers[-1]  # transformers asks for one attention layer
    hybrid.num_hidden_layers, hybrid.layer_types = subject.layers, ["linear_attention"] * subject.layers
    for block in live.model.layers:
        block.linear_attn.A_log.data.fill_(-30.0)
        block.linear_attn.A_log.requires_grad_(False)
    return live


def texts(count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns (tokens [count, length], LEAVE or FLIP; how the coin lies after each, HEADS or TAILS)."""
    draw = torch.Generator().manual_seed(derive_seed(seed, length) % 2**63)
    tokens = torch.randint(0, 2, (count, length), generator=draw)
    return tokens, HEADS + tokens.cumsum(1) % 2


def trained(subject: Subject, tell: Callable[[StepReport], None] = lambda at: None) -> tuple[PreTrainedModel, float]:
    """Returns (the subject's model, trained to say after each token how the coin lies; CPU seconds of the training).

    The loss covers the answers after `shortest` to `longest` tokens.
    """
    live = untrained(subject)
    loop = ModelLoop(live, subject.loop)
    loop.weights = {name: weight for name, weight in loop.weights.items() if weight.requires_grad}

    def losses_of(step: int) -> dict[str, Tensor]:
        tokens, lies = texts(subject.loop.batch, subject.longest, derive_seed(subject.seed, step + 1) % TEST_SEED)
        logits = live(tokens, use_cache=False).logits[:, subject.shortest - 1 :]
        return {"answers": F.cross_entropy(logits.flatten(0, 1), lies[:, subject.shortest - 1 :].flatten())}

    seconds = 0.0
    for at in loop.minimise(losses_of):
        tell(at)
        seconds = at.cpu_seconds
    return live.eval(), seconds


@torch.inference_mode()
def right(live: PreTrainedModel, count: int, length: int, seed: int) -> Tensor:
    """Returns bool [count, length]: whether the model's choice between HEADS and TAILS is right after each token of
    texts that it was not trained on."""
    tokens, lies = texts(count, length, TEST_SEED + seed)
    logits = live(tokens, use_cache=False).logits[..., [HEADS, TAILS]]
    return logits.argmax(-1) + HEADS == lies
