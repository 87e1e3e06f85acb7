"""Folders of small random heads that draft several tokens at once: DFlash in three layouts, Medusa in two."""

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from cacheprobe_benchmarks.shared.tiny import TINY, VOCAB
from tests.by_hand import generated
from tests.tiny import PROMPTS, hf_model
from tests.twins.block_heads_slowly import medusa_stream

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
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**HEADS, **specials, **(SHAPE | given | changed)))
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


# -- heads that are often right, and not always


@cache
def texts() -> list[tuple[int, list[int]]]:
    """(length of the prompt, the greedy text) of each of PROMPTS, as transformers continues them."""
    return [(len(prompt), [*prompt, *generated(hf_model(), prompt, 20)]) for prompt in PROMPTS]


@torch.inference_mode()
def hidden(token_ids: Sequence[int]) -> tuple[Tensor, ...]:
    """transformers' hidden states [p, m] of the tiny target: the embeddings, then those after each block."""
    out = hf_model()(torch.tensor([list(token_ids)]), output_hidden_states=True)
    return tuple(states[0] for states in out.hidden_states)


@torch.inference_mode()
def fit_dflash(model: MuseGlimmerAssistantModel, num_texts: int) -> None:
    """Fits the last linear layer of a head to what follows in the first `num_texts` of `texts`, in one least-squares
    step."""
    seen: dict[str, Tensor] = {}
    down, unembedding = model.layers[-1].mlp.down_proj, hf_model().lm_head.weight
    down.register_forward_hook(lambda module, args, out: seen.update(into=args[0][0], added=out[0]))
    model.norm.register_forward_hook(lambda module, args, out: seen.update(stream=args[0][0]))
    inputs, wanted = [], []
    for start, text in texts()[:num_texts]:
        states = torch.cat([hidden(text)[i + 1] for i in model.config.target_layer_ids], -1)
        for n in range(start + 1, len(text) - BLOCK + 2):
            block = torch.tensor([[text[n - 1], *[MASK] * (BLOCK - 1)]])
            model(hf_model().get_input_embeddings()(block), states[None, : n - 1], use_cache=False)
            inputs.append(seen["into"][1:])
            after = unembedding[text[n : n + BLOCK - 1]] / model.norm.weight
            wanted.append(100 * after - (seen["stream"] - seen["added"])[1:])
    down.weight.copy_(torch.linalg.lstsq(torch.cat(inputs), torch.cat(wanted)).solution.T)
    for module in (down, model.norm):
        module._forward_hooks.clear()


@cache
def often_right(kind: str, num_texts: int = 3) -> Path:
    """A folder of a head for the tiny target, that is often right in the first `num_texts` of `texts`. kind: "dflash"
    or "medusa"."""
    folder = Path(tempfile.mkdtemp()) / kind
    if kind == "dflash":
        model = native_folder(folder, intermediate_size=256)
        fit_dflash(model, num_texts)
        model.save_pretrained(folder)
        return folder
    tensors = medusa_tensors(3, 1)
    for head in range(3):
        inputs, wanted = [], []
        for start, text in texts()[:num_texts]:
            for state, token in zip(hidden(text)[-1][start - 1 :], text[start + 1 + head :], strict=False):
                inputs.append(medusa_stream(tensors, head, state, 1))
                wanted.append(torch.eye(VOCAB)[token])
        tensors[f"{head}.1.weight"] = torch.linalg.lstsq(torch.stack(inputs), torch.stack(wanted)).solution.T.clone()
    return medusa_folder(folder, tensors)
