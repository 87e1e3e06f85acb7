"""Tiny checkpoints with a multi-token-prediction module, in the layouts of published ones, and the slow way to run
it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.field.tiny_family import tiny_family

VOCAB = 12
_FIELDS = dict(vocab_size=VOCAB, eos_token_id=None, bos_token_id=None, pad_token_id=None)
_ONE_LAYER = dict(
    num_hidden_layers=1, first_k_dense_replace=0, layer_types=["full_attention"], mlp_layer_types=["sparse"]
)


class Layout(NamedTuple):
    """Key of each tensor beside the block: norms of the embedding and of the state, projection, last norm; and the
    beginning of the keys of the block."""

    around: tuple[str, str, str, str]
    block: str


_DEEPSEEK = Layout(("enorm", "hnorm", "eh_proj", "shared_head.norm"), "model.layers.4.")
_QWEN = Layout(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "mtp.layers.0.")
MIMO = Layout(("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), "model.mtp_layers.0.")
FAMILIES: Mapping[str, Layout] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "bailing_hybrid": _DEEPSEEK,
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen2": MIMO,
}


def weights_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def write_checkpoint(family: str, folder: Path) -> dict[str, Tensor]:
    """Writes a tiny model of random weights with a module, all norms among them, and returns the module's tensors."""
    trunk = tiny_family(family, _FIELDS)
    with torch.no_grad():
        trunk.get_input_embeddings().weight *= 12
    own = {name: value for name, value in _ONE_LAYER.items() if getattr(trunk.config, name, None) is not None}
    return save_with_module(trunk, tiny_family(family, {**_FIELDS, **own}, seed=1), FAMILIES[family], folder)


def save_with_module(trunk: PreTrainedModel, block: PreTrainedModel, layout: Layout, folder: Path) -> dict[str, Tensor]:
    """Saves a model with a module, and returns the module's tensors. Its block is the first layer of `block`, in the
    names in which transformers saves it."""
    trunk.save_pretrained(folder)
    block.save_pretrained(folder / "block")
    whole, saved = load_file(weights_file(folder)), load_file(weights_file(folder / "block"))
    vocabulary, width = trunk.get_input_embeddings().weight.shape
    start = "model.layers.0."
    module = {layout.block + key.removeprefix(start): value for key, value in saved.items() if key.startswith(start)}
    draw = torch.Generator().manual_seed(2)
    place = layout.block if layout is not _QWEN else "mtp."
    *norms, projection, last = (f"{place}{name}.weight" for name in layout.around)
    for name in norms:
        module[name] = 1 + torch.randn(width, generator=draw) / 2
    module[projection] = torch.randn(width, 2 * width, generator=draw) / width**0.5
    # so that it drafts the right token now and then: its stream and the model's are mostly a token's embedding
    module[projection][:, width if layout is MIMO else 0 :][:, :width] += 8 * torch.eye(width)
    module[last] = trunk.get_decoder().norm.weight.detach() + torch.randn(width, generator=draw) / 4
    if layout is _DEEPSEEK:  # published ones hold copies, which are not used; here they are others
        for name in ("embed_tokens", "shared_head.head"):
            module[f"{place}{name}.weight"] = torch.randn(vocabulary, width, generator=draw)
    save_file({**whole, **module}, weights_file(folder), {"format": "pt"})
    return module


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """Replaces the tensors of a checkpoint."""
    save_file(dict(change(load_file(weights_file(folder)))), weights_file(folder), {"format": "pt"})


def original(folder: Path) -> PreTrainedModel:
    """The model as transformers loads it, made to find its module by transformers' own fields."""
    live = AutoModelForCausalLM.from_pretrained(folder)
    config = live.config
    config.num_mtp_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.mtp_layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mtp_mlp_layer_types = ["sparse"]
    live._keys_to_ignore_on_load_unexpected = [r"^mtp\.", r"model\.layers\.4\."]
    live.set_experts_implementation("eager") if hasattr(live, "set_experts_implementation") else None
    return live.eval()


Module = Callable[[Tensor, Sequence[int]], Tensor]
"""Function (states [t, m] after the final norm, token ids of t rows) -> output [t, m] of the module, after its norm."""


def module_slowly(family: str, folder: Path, live: PreTrainedModel) -> Module:
    """transformers' own MtpModel over whole texts; for MiMo, whose layout it does not know, the steps written down."""
    if family == "qwen2":
        return _mimo_slowly(folder, live)
    model = MtpModel.from_pretrained(live)

    def run(states: Tensor, token_ids: Sequence[int]) -> Tensor:
        positions = torch.arange(1, len(token_ids) + 1)[None]
        cache = MtpCache(config=live.config.get_mtp_config())
        return model.forward_layer(0, states[None], positions, cache, input_ids=torch.tensor([list(token_ids)]))[0]

    return run


def _mimo_slowly(folder: Path, live: PreTrainedModel) -> Module:
    """MiMo's module: the state comes first in the projection."""
    start = FAMILIES["qwen2"].block
    weights = {
        key.removeprefix(start): w for key, w in load_file(weights_file(folder)).items() if key.startswith(start)
    }
    layer = copy.deepcopy(live.model.layers[0])
    around = {f"{name}.weight" for name in FAMILIES["qwen2"].around}
    layer.load_state_dict({name: weight for name, weight in weights.items() if name not in around})

    def norm(name: str, values: Tensor) -> Tensor:
        return rms_norm(values, values.shape[-1:], weights[f"{name}.weight"], live.config.rms_norm_eps)

    def run(states: Tensor, token_ids: Sequence[int]) -> Tensor:
        embeds = live.model.embed_tokens(torch.tensor([list(token_ids)]))
        joined = torch.cat([norm("hidden_layernorm", states[None]), norm("token_layernorm", embeds)], dim=-1)
        positions = torch.arange(1, len(token_ids) + 1)[None]
        mask = torch.full((len(token_ids),) * 2, torch.finfo(torch.float32).min).triu(1)[None, None]
        rotations = live.model.rotary_emb(embeds, positions)
        out = layer(joined @ weights["input_proj.weight"].T, attention_mask=mask, position_embeddings=rotations)
        return norm("final_layernorm", out[0])

    return run


@torch.inference_mode()
def logits_slowly(live: PreTrainedModel, module: Module, token_ids: Sequence[int]) -> Tensor:
    """Logits [t - 1, v] of the module's rows over a whole text."""
    states = live(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False).hidden_states[-1][0]
    return live.lm_head(module(states[:-1], token_ids[1:]))


@torch.inference_mode()
def draft_slowly(live: PreTrainedModel, module: Module, token_ids: Sequence[int], length: int) -> list[int]:
    """Greedy draft after a text: every row is computed again for each token."""
    states = live(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False).hidden_states[-1][0, :-1]
    tokens, drafted = list(token_ids[1:]), list[int]()
    while len(drafted) < length:
        newest = module(states, tokens)[-1]
        drafted.append(int(live.lm_head(newest).argmax()))
        states, tokens = torch.cat([states, newest[None]]), [*tokens, drafted[-1]]
    return drafted
