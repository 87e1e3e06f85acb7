"""Random EAGLE-3 heads for a tiny target, and the folders that they are read from."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import cacheprobe as cp
from cacheprobe.core.values import JsonDict
from cacheprobe.models.heads.eagle3 import Eagle3Module, eagle3_config
from cacheprobe.models.heads.eagle3_files import save_eagle3
from cacheprobe.models.heads.lm import HeadLM
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe_benchmarks.shared.tiny import TINY
from tests.tiny import VOCAB, hf_model

LAYERS, DRAFT_VOCAB, T = 8, 40, 12
BLOCK: JsonDict = dict(
    model_type="llama", hidden_size=TINY.hidden, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, vocab_size=VOCAB, max_position_embeddings=512,
)  # fmt: skip
SITES = [("S", 1), ("S", 3), ("S", 4)]
"""What EAGLE-3's own choice, inputs of blocks 2, 4 and 5 of 8, is here."""


@cache
@torch.inference_mode(False)
def target() -> PlainLM:
    """A tiny model of 8 layers."""
    return cp.load_model(hf_model(size=replace(TINY, layers=LAYERS)))


def random_head(
    seed: int = 0, draft_vocab_size: int = DRAFT_VOCAB, block: JsonDict | None = None, **settings: bool
) -> HeadLM:
    """A head whose weights are all random, the norms too."""
    draw = torch.Generator().manual_seed(seed)
    config = eagle3_config({**BLOCK, **(block or {})}, dict(draft_vocab_size=draft_vocab_size, **settings), 3, 32, 512)
    module = Eagle3Module(config).eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw) * 0.3 + (weight.dim() == 1))
    ids = torch.randperm(VOCAB, generator=draw)[:draft_vocab_size].sort().values if draft_vocab_size < VOCAB else None
    return HeadLM(module.requires_grad_(False), target(), f"random {seed}", SITES, ids)


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    """States [1, t, l, m] and tokens [1, t] of the rows of one text."""
    draw = torch.Generator().manual_seed(seed)
    states = torch.randn(1, T, 3, TINY.hidden, generator=draw)
    return states, torch.randint(0, VOCAB, (1, T), generator=draw)


def speculators_folder(path: Path, **settings: bool) -> Path:
    """A random head in the layout of speculators."""
    return save_eagle3(random_head(**settings), path, "tiny")


@cache
@torch.inference_mode(False)
def folder_for_three_layers() -> Path:
    """A random head for the tiny model of `tests.tiny.loaded`, in a folder that goes with the process."""
    _folders.append(TemporaryDirectory())
    return change(speculators_folder(Path(_folders[0].name)), eagle_aux_hidden_state_layer_ids=[1, 2, 3])


_folders: list[TemporaryDirectory[str]] = []


def safeailab_folder(source: Path, path: Path, **changes: object) -> Path:
    """The head of a folder in speculators' layout, in that of SafeAILab: another config, other names, no embedding."""
    config = json.loads((source / "config.json").read_text())
    block = config["transformer_layer_config"]
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config["draft_vocab_size"]}
    tensors = load_file(source / "model.safetensors")
    del tensors["embed_tokens.weight"]
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**block, **own, **changes}))
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    torch.save(renamed, path / "pytorch_model.bin")
    return path


def change(folder: Path, **changed: object) -> Path:
    """Changes fields of a folder's config; a field of the block is named block_NAME, and None removes one."""
    config = json.loads((folder / "config.json").read_text())
    for name, value in changed.items():
        held = config["transformer_layer_config"] if name.startswith("block_") else config
        held.pop(name.removeprefix("block_"), None)
        held |= {} if value is None else {name.removeprefix("block_"): value}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change_tensors(folder: Path, **changed: Tensor | None) -> Path:
    """Replaces tensors of a folder, whose names have _ for the dots; None removes one."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changed.items():
        whole = next((one for one in tensors if one.replace(".", "_") == name), name)
        tensors.pop(whole, None)
        tensors |= {} if tensor is None else {whole: tensor}
    save_file(tensors, folder / "model.safetensors")
    return folder
