"""Makes EAGLE-3 heads for a model, and trains them on the states of a trace."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cacheprobe.core.live import LiveConfig, LiveModule, require_usable_process
from cacheprobe.core.values import Json
from cacheprobe.models.base import CachedLM
from cacheprobe.models.heads.eagle3 import Eagle3Module, eagle3_config
from cacheprobe.models.heads.eagle3_files import save_eagle3, target_sites
from cacheprobe.models.heads.lm import HeadLM
from cacheprobe.models.hf.masks import text_config
from cacheprobe.models.known import EMBEDDED
from cacheprobe.models.settings import live_model
from cacheprobe.training.heads import (
    HeadTexts,
    HeadTraining,
    checkpoint_folder,
    model_of_trace,
    split_texts,
    train_head,
)
from cacheprobe.training.settings import Eagle3Settings

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

_DIMENSIONS = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps vocab_size "
    "max_position_embeddings"
).split()
SHARED = ("model.embed_tokens.weight",)
"""Parameters of an EAGLE-3 head that are the target's own."""


def sites_of(model: CachedLM, settings: Eagle3Settings) -> list[tuple[str, int]]:
    """Returns (site, layer) of the target's states that a head with these settings reads. Raises: ValueError for layer
    ids that the model lacks, or for the input of block 0."""
    ids = settings.layer_ids or (2, model.n_layers // 2, model.n_layers - 3)
    if 0 in ids:
        raise ValueError("a head is trained on recorded outputs of blocks, not on the input of block 0; leave out 0")
    return target_sites(ids, "inputs", model.n_layers)


def fresh_eagle3(model: CachedLM, token_ids: Tensor, settings: Eagle3Settings) -> Eagle3Module:
    """Returns an untrained EAGLE-3 head in float32, with one Llama-shaped block (Qwen3-shaped for a Qwen3).

    It begins near the target: its unembedding and last norm are the target's, its fc gives the mean of the states that
    it reads, and its block is the target's last one, as far as that has the same parameters; the columns of the
    embedding are small random numbers.
    token_ids: [v], the target's ids of the head's vocabulary, in ascending order.
    """
    live: LiveModule = live_model(model)
    config: LiveConfig = text_config(live.config)
    block = {name: getattr(config, name) for name in _DIMENSIONS if hasattr(config, name)}
    block |= {"model_type": "qwen3" if config.model_type == "qwen3" else "llama", "num_hidden_layers": 1}
    if "rope_theta" in (rope := config.rope_parameters or {}):
        block["rope_parameters"] = dict(rope)
    own = {"draft_vocab_size": len(token_ids), "norm_output": settings.norm_output}
    width, num_states = model.d_model, len(sites_of(model, settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        module = Eagle3Module(eagle3_config(block, own, num_states, width, model.n_ctx)).float()
    with torch.no_grad():
        module.get_parameter(SHARED[0]).copy_(live.get_input_embeddings().weight).requires_grad_(False)
        module.lm_head.weight.copy_(model.unembedding[token_ids])
        norm = model.output_parts().norm
        module.get_parameter("model.norm.weight").copy_(norm(torch.ones(1, 1, width, dtype=model.dtype))[0, 0])
        module.fc.weight.copy_(torch.eye(width).repeat(1, num_states) / num_states)
        _copy_block(live.get_decoder().layers[-1], module.model.layers[0])
    return module.eval()


def _copy_block(source: nn.Module, block: nn.Module) -> None:
    """Copies the weights of a decoder layer to the half of a head's block that reads states, in place. Does nothing for
    a layer with other parameters."""
    given = dict(source.named_parameters())
    own = dict(block.named_parameters())
    if given.keys() != own.keys() - {"hidden_norm.weight"}:
        return
    own["hidden_norm.weight"].copy_(given["input_layernorm.weight"])
    for name in given.keys() - {"input_layernorm.weight"}:
        own[name][..., -given[name].shape[-1] :].copy_(given[name])


def draft_vocabulary(texts: HeadTexts, d_vocab: int, size: int) -> Tensor:
    """Returns the ids of the `size` most frequent tokens of the texts, in ascending order; of equally frequent ones,
    the smaller."""
    counts = torch.zeros(d_vocab, dtype=torch.long)
    for request_id in texts.request_ids:
        counts += torch.bincount(torch.tensor(texts.token_ids(request_id)), minlength=d_vocab)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def train_eagle3(trace: "Trace", settings: Eagle3Settings, out: Path, *, progress: bool = True) -> dict[str, Json]:
    """Trains an EAGLE-3 head on the canonical states S of a trace, and writes it to the folder `out` in speculators'
    layout, which `cp.drafters.Eagle3` loads. Returns the contents of about.json there; see `train_head`.

    A training that was stopped goes on from its checkpoint in out/training, with the same bits.
    Raises: ValueError if `out` exists, for a trace without its model or of another one, without these states or with
    too few texts, and for a checkpoint of another training.
    """
    require_usable_process(is_computing=True)
    model = model_of_trace(trace)
    sites = sites_of(model, settings)
    texts, held_out = split_texts(trace, [layer for _, layer in sites], settings)
    token_ids = draft_vocabulary(texts, model.d_vocab, settings.draft_vocab)
    module = fresh_eagle3(model, token_ids, settings)
    training = HeadTraining(module, token_ids, SHARED, texts, settings, checkpoint_folder(out))
    hub_name = EMBEDDED[model.name].hub if model.name in EMBEDDED else model.name

    def save(folder: Path) -> None:
        """Writes the head."""
        save_eagle3(HeadLM(module, model, folder.name, sites, token_ids), folder, hub_name)

    return train_head(training, held_out, out, save, progress)
