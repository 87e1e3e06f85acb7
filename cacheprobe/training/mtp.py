"""Makes MTP modules for a model, and trains them on the states of a trace."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from transformers.modeling_layers import MtpModel

from cacheprobe.core.files import write_json, write_whole
from cacheprobe.core.live import LiveModule, require_usable_process
from cacheprobe.core.values import Json
from cacheprobe.models.base import CachedLM
from cacheprobe.models.heads.load_mtp import config_with_module, usable
from cacheprobe.models.heads.mtp import MtpModule, mtp_module
from cacheprobe.training.heads import HeadTraining, checkpoint_folder, model_of_trace, split_texts, train_head
from cacheprobe.training.settings import MtpSettings

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

SHARED = ("model.embed_tokens.weight", "model.target_norm.weight", "lm_head.weight")
"""Parameters of an MTP module that are the target's own."""


def fresh_mtp(model: CachedLM, settings: MtpSettings) -> MtpModule:
    """Returns an untrained MTP module with a block of the model's own family. Embedding, final norm, rotation and
    unembedding are the model's own modules.

    It begins near the target: its block and its last norm are copies of the target's last ones, and its projection
    gives the state, and small random numbers of the embedding.
    Raises: ModelError for a model whose modules an MTP module cannot share; ValueError for one that is not in float32.
    """
    if model.dtype != torch.float32:
        raise ValueError(f"an MTP module is trained in float32, {model.name} is in {model.dtype}; load it in float32")
    live: LiveModule = usable(model).live
    stand_in = copy.copy(live)  # the same modules under another config
    stand_in.config = config_with_module(live.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        family = MtpModel(stand_in, 1)
    layer: LiveModule = family.layers[0]
    decoder = live.get_decoder()
    with torch.no_grad():
        layer.eh_proj.weight[:, model.d_model :].fill_(0).fill_diagonal_(1)
    layer.mtp_block.load_state_dict(decoder.layers[-1].state_dict())
    layer.post_norm.load_state_dict(decoder.norm.state_dict())
    return mtp_module(family, live, states_first=False)


def save_mtp(module: MtpModule, folder: Path, n_layers: int) -> Path:
    """Writes the module's own weights to a folder, named as in DeepSeek's checkpoints, and returns the folder's path.
    n_layers: number of layers of the target. `load_mtp(model, folder)` reads it beside a model without such weights."""
    tensors = {}
    for name, weight in module.named_parameters():
        if name not in SHARED:
            own = name.removeprefix("model.").removeprefix("layers.0.")
            own = "shared_head.norm.weight" if own == "norm.weight" else own
            tensors[f"model.layers.{n_layers}.{own}"] = weight.detach().cpu().contiguous()
    write_json(folder / "config.json", {"architectures": [type(module).__name__], "num_nextn_predict_layers": 1})
    write_whole(folder / "model.safetensors", lambda place: save_file(tensors, place, {"format": "pt"}))
    return folder


def train_mtp(trace: "Trace", settings: MtpSettings, out: Path, *, progress: bool = True) -> dict[str, Json]:
    """Trains an MTP module on the canonical states S of a trace's last layer, and writes it to the folder `out`, which
    `cp.drafters.MTP(folder=out)` loads. Returns the contents of about.json there; see `train_head`.

    A training that was stopped goes on from its checkpoint in out/training, with the same bits.
    Raises: as `train_eagle3`, and ValueError for a model that is not in float32.
    """
    require_usable_process(is_computing=True)
    model = model_of_trace(trace)
    texts, held_out = split_texts(trace, [model.n_layers - 1], settings)
    module = fresh_mtp(model, settings)
    training = HeadTraining(module, None, SHARED, texts, settings, checkpoint_folder(out))
    return train_head(training, held_out, out, lambda folder: save_mtp(module, folder, model.n_layers), progress)
