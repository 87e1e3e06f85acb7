"""Dictionaries of the tiny model's width, for tests of what is computed with them."""

from pathlib import Path

import torch

from cacheprobe.core.hook_names import hook_name
from cacheprobe.lenses.dictionaries.config import DictionaryConfig
from cacheprobe.lenses.dictionaries.dictionary import Dictionary
from cacheprobe.lenses.dictionaries.formats import shapes_of

WIDTH, FEATURES = 32, 48


def random_dictionary(
    architecture: str = "jumprelu",
    site: str = "S",
    layer: int = 1,
    width: int = WIDTH,
    seed: int = 0,
    **settings: object,
) -> Dictionary:
    """A dictionary of the tiny model with random weights: about half of the features are active."""
    generator = torch.Generator().manual_seed(seed)
    config = DictionaryConfig(
        architecture=architecture, d_in=width, d_sae=FEATURES, d_out=width, hook=hook_name(site, layer),
        **{**({"k": 5} if architecture == "topk" else {}), **settings},
    )  # fmt: skip
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 2 else 0.05)
        for name, shape in shapes_of(config).items()
    }
    if "threshold" in tensors:
        tensors["threshold"].abs_()
    return Dictionary(config, tensors)


def saved(dictionary: Dictionary, folder: Path) -> Path:
    """SAELens' folder of it, which the slow twins read."""
    return dictionary.save(folder / "dictionary")
