"""Folders of small random heads that draft several tokens at once: DFlash in three layouts, Medusa in two."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from cacheprobe_benchmarks.shared.tiny import TINY, VOCAB

BLOCK, MASK = 5, VOCAB - 1
SHAPE = dict(hidden_size=TINY.hidden, intermediate_size=24, num_hidden_layers=2, rms_norm_eps=1e-5)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=6)


def spread(name: str, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Random weights; of a norm around 1, since unit weights would hide a norm that is left out or used twice."""
    return torch.randn(shape, generator=draw) * 0.3 + ("norm" in name)


def native_folder(folder: Path, **changed: Any) -> MuseGlimmerAssistantModel:
    """Writes a head in transformers' own layout, and returns transformers' model of it."""
    specials = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    rope = dict(rope_type="default", rope_theta=10000.0)
    given = dict(layer_types=["full_attention"] * 2, target_layer_ids=[0, 1], max_position_embeddings=128)
    given |= dict(sliding_window=8, block_size=BLOCK, mask_token_id=MASK, rope_parameters=rope)
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**SHAPE, **HEADS, **specials, **(given | changed)))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(spread(name, tuple(weight.shape), draw))
    model.eval().save_pretrained(folder)
    return model


def dflash_tensors(num_states: int = 2) -> dict[str, Tensor]:
    """The tensors of a random head by z-lab's names."""
    m, mlp = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    queries, keys = (HEADS[name] * HEADS["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"fc": (m, num_states * m), "hidden_norm": (m,), "norm": (m,)}
    for layer in range(SHAPE["num_hidden_layers"]):
        block = dict(input_layernorm=(m,), post_attention_layernorm=(m,))
        attention = dict(q_proj=(queries, m), k_proj=(keys, m), v_proj=(keys, m), o_proj=(m, queries))
        attention |= dict.fromkeys(("q_norm", "k_norm"), (HEADS["head_dim"],))
        mlps = dict(gate_proj=(mlp, m), up_proj=(mlp, m), down_proj=(m, mlp))
        for part, own in (("", block), ("self_attn.", attention), ("mlp.", mlps)):
            shapes |= {f"layers.{layer}.{part}{name}": shape for name, shape in own.items()}
    draw = torch.Generator().manual_seed(1)
    return {f"{name}.weight": spread(name, shape, draw) for name, shape in shapes.items()}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Writes a folder of config and tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


BLOCKS = dict(**SHAPE, **HEADS, model_type="qwen3", rope_theta=10000.0, max_position_embeddings=128, vocab_size=VOCAB)


def zlab_folder(folder: Path, ids: tuple[int, ...] = (0, 1), **changed: Any) -> dict[str, Tensor]:
    """Writes a head in z-lab's layout, and returns its tensors."""
    tensors = dflash_tensors(len(ids))
    own = {"target_layer_ids": list(ids), "mask_token_id": MASK}
    write(folder, {**BLOCKS, "num_target_layers": 3, "block_size": BLOCK, "dflash_config": own} | changed, tensors)
    return tensors


def speculators_folder(folder: Path, ids: tuple[int, ...] = (1, 2), **changed: Any) -> dict[str, Tensor]:
    """Writes a head in speculators' layout, with a vocabulary of 40 of the target's tokens, and returns its tensors."""
    tensors = dflash_tensors(len(ids))
    draft = torch.arange(3, 83, 2)
    tensors |= {"lm_head.weight": spread("lm_head", (len(draft), TINY.hidden), torch.Generator().manual_seed(2))}
    tensors |= {"d2t": draft - torch.arange(len(draft)), "t2d": torch.isin(torch.arange(VOCAB), draft)}
    config = dict(speculators_model_type="dflash", transformer_layer_config=BLOCKS, block_size=BLOCK)
    config |= dict(aux_hidden_state_layer_ids=list(ids), mask_token_id=MASK, draft_vocab_size=len(draft))
    write(folder, config | changed, tensors)
    return tensors


def medusa_tensors(num_heads: int = 3, num_layers: int = 2, width: int = TINY.hidden) -> dict[str, Tensor]:
    """The tensors of random Medusa heads by Medusa's own names."""
    draw, found = torch.Generator().manual_seed(3), {}
    for head in range(num_heads):
        for layer in range(num_layers):
            found[f"{head}.{layer}.linear.weight"] = spread("", (width, width), draw)
            found[f"{head}.{layer}.linear.bias"] = spread("", (width,), draw)
        found[f"{head}.{num_layers}.weight"] = spread("", (VOCAB, width), draw)
    return found


def medusa_folder(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Writes heads as Medusa's own code does, with a config of another number of heads, as published ones have."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder


def medusa_folder_of_vllm(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Writes the same heads by vLLM's names."""
    renamed = {}
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        renamed[f"blocks.{head}.layers.{layer}.{rest[-1]}" if len(rest) == 2 else f"lm_heads.{head}.weight"] = tensor
    return write(folder, {"num_heads": 2, "num_hidden_layers": 1}, renamed)
