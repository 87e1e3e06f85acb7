"""Loads DFlash heads from folders in any of three layouts: z-lab's, speculators' and transformers' own."""

from pathlib import Path
from typing import NamedTuple

import torch
from transformers import CONFIG_MAPPING, Qwen3Config

from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.heads.dflash import BlockHeadLM, DFlashHead
from cacheprobe.models.heads.files import fill, open_head, target_token_ids
from cacheprobe.models.settings import live_model

_NATIVE = "muse_glimmer_assistant"
_NATIVE_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
_OF_TARGET = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight", "lm_head.weight", "t2d", "d2t")
"""Tensors in folders of speculators that are the target's, or that are read apart."""


class _BlockLayout(NamedTuple):
    """Holds what the config of a head says, in whatever layout."""

    fields: JsonDict
    """Of a Qwen3Config."""
    block: tuple[int, int]
    """Block size, and id of the mask token."""
    num_before: tuple[int, ...]
    """For each state that the head reads: how many of the target's blocks have run before it."""
    is_native: bool


def load_dflash(folder: "str | Path", target: CachedLM) -> BlockHeadLM:
    """Returns the DFlash head in a folder, for this target, whose embedding and unembedding it shares.

    The config tells the layout. z-lab's (`dflash_config`) and transformers' own (model_type muse_glimmer_assistant):
    layer id i is the stream that leaves block i, S of layer i. speculators' (`speculators_model_type`): id i is the
    stream that enters block i, S of layer i - 1.
    Raises: ValueError, with the name of what does not fit, for another kind of head; a head of another model (width,
    vocabulary, number of layers); absent tensors, or others; a layer or a mask token that the target lacks; a torch
    file that holds more than tensors.
    """
    files, name = open_head(folder), Path(folder).name
    layout = _layout(files.config, name)
    sites = _sites(layout, target, name)
    _require_fitting(layout, target, name)
    token_ids = target_token_ids(files, int(files.config.get("draft_vocab_size") or target.d_vocab), target.d_vocab)
    unembedding = target.unembedding.detach()
    unembedding = unembedding if token_ids is None else files.tensor("lm_head.weight").to(unembedding)
    embedding = live_model(target).get_input_embeddings()
    config = Qwen3Config.from_dict(
        layout.fields
        | {"num_states": len(sites), "embed_scale": float(getattr(embedding, "embed_scale", 1.0))}
        | {"vocab_size": len(embedding.weight), "draft_vocab_size": len(unembedding), "tie_word_embeddings": False}
    )
    with torch.device("meta"):
        head = DFlashHead(config)
    names = _NATIVE_NAMES if layout.is_native else {}
    fill(
        head,
        files,
        lambda own: names.get(own, own.removeprefix("model.")),
        {"model.embed_tokens.weight": embedding.weight.detach(), "lm_head.weight": unembedding},
        target.dtype,
        target.device,
        _OF_TARGET,
    )
    return BlockHeadLM(head, target, name, sites, layout.block, token_ids)


def _layout(config: JsonDict, name: str) -> _BlockLayout:
    """Returns the _BlockLayout of a head's config. Raises: ModelError if it is no DFlash head, or if some of its parts
    are not known here."""
    is_native = config.get("model_type") == _NATIVE
    if is_native:
        fields = CONFIG_MAPPING[_NATIVE].from_dict(config).to_dict()
        own, num_before = fields, [i + 1 for i in fields["target_layer_ids"]]
        # its window counts the distance of two rows, Qwen3's also the row itself
        fields |= {"sliding_window": fields["sliding_window"] + 1, "use_sliding_window": True, "model_type": "qwen3"}
    elif config.get("speculators_model_type") == "dflash":
        fields, own, num_before = config["transformer_layer_config"], config, config["aux_hidden_state_layer_ids"]
    elif "dflash_config" in config:
        fields, own = config, config | config["dflash_config"]
        num_before = [i + 1 for i in own.get("target_layer_ids", ())]
    else:
        raise ModelError(
            f"{name} is no DFlash head: its config.json has neither dflash_config nor speculators_model_type 'dflash', "
            f"and its model_type is {config.get('model_type')!r:.40}, not {_NATIVE!r}"
        )
    size, mask = own.get("block_size"), own.get("mask_token_id")
    if not size or size < 2 or mask is None or not num_before:
        raise ModelError(
            f"{name}: its config.json lacks a block_size above 1, mask_token_id, or the target's layer ids"
        )
    if own.get("sample_from_anchor"):
        raise ModelError(f"{name} drafts also in the newest token's row (sample_from_anchor), which is not read here")
    slides = "sliding_attention" in (fields.get("layer_types") or ())
    if slides and not (is_native and size < fields["sliding_window"]):
        raise ModelError(
            f"{name} has sliding layers, and which rows of a block these see is known for {_NATIVE} alone, with "
            "windows as wide as a block; use a head with full attention"
        )
    return _BlockLayout(fields, (size, mask), tuple(num_before), is_native)


def _sites(layout: _BlockLayout, target: CachedLM, name: str) -> tuple[tuple[str, int], ...]:
    """Returns (site, layer) of the target's states. Raises: ModelError for a layer that the target lacks, and for its
    last one, whose state transformers gives after the final norm."""
    for number in layout.num_before:
        if not 0 <= number < target.n_layers:
            raise ModelError(
                f"{name} reads the stream after {number} blocks; of {target.name} it can be read after 0 to "
                f"{target.n_layers - 1}; load the head with the model that it was trained for"
            )
    return tuple(("S", number - 1) if number else ("pre", 0) for number in layout.num_before)


def _require_fitting(layout: _BlockLayout, target: CachedLM, name: str) -> None:
    """Raises: ModelError if the head is for another width, vocabulary or number of layers, or its mask token is none of
    the vocabulary."""
    for field, here in (
        ("hidden_size", target.d_model),
        ("vocab_size", target.d_vocab),
        ("num_target_layers", target.n_layers),
    ):
        if (own := layout.fields.get(field, here)) != here:
            raise ModelError(
                f"{name} is a head for another model: its {field} is {own}, that of {target.name} is {here}; load it "
                "with the model that it was trained for"
            )
    if not 0 <= layout.block[1] < target.d_vocab:
        raise ModelError(
            f"{name}: its mask token {layout.block[1]} is outside of the {target.d_vocab} tokens of {target.name}; "
            "load the head with the model that it was trained for"
        )
