"""Builds a model of the same architecture with fresh random weights, as a baseline for probes."""

import copy

import torch

from cacheprobe.core.live import LiveModule
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.loaders import load_model


def untrained(model: LiveModule, seed: int = 0) -> CachedLM:
    """Returns a model of the same shape, tokenizer and dtype with new random weights, embeddings included.

    model: from `load_model`.  seed: of the weights, drawn by the architecture's own initialisation.
    Raises: ModelError for a model without a transformers config, such as one around a ThinkingPretrained.
    Source: the untrained control of Zhang and Bowman 2018 (arXiv 1809.10040), section 4.
    """
    from cacheprobe.models.thinking.lm import ThinkingLM
    from cacheprobe.models.thinking.model import ThinkingModel

    if isinstance(model, ThinkingLM) and type(model.model) is ThinkingModel:
        fresh = ThinkingModel(model.config, seed).to(model.device, model.dtype)
        return ThinkingLM(fresh, model.tokenizer, f"{model.name} untrained", f"weights drawn with seed {seed}")
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise ModelError(f"{model!r:.60} cannot be made anew: it has no transformers config")

    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        live = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    live = live.to(model.device, model.dtype).eval()
    live.generation_config.eos_token_id = list(model.stop_token_ids) or None
    loaded = load_model(live, model.tokenizer, prepend_bos=model.prepend_bos)
    loaded.name, loaded.weights_note = f"{model.name} untrained", f"weights drawn with seed {seed}"
    return loaded
