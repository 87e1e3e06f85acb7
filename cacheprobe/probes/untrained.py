"""The same architecture with fresh weights: what a probe finds in a model that has learnt nothing."""

import copy
from typing import Any

import torch

from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.loaders import load_model


def untrained(model: Any, seed: int = 0) -> CachedLM:
    """A model of the same shape, tokenizer and dtype whose weights are drawn anew, embeddings included.

    model: what `load_model` gave.  seed: of the draw; the weights are the architecture's own initialisation.
    Raises: ModelError for a model that cannot be made from its config.
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
    loaded: Any = load_model(live, model.tokenizer)
    loaded.name, loaded.weights_note = f"{model.name} untrained", f"weights drawn with seed {seed}"
    return loaded
