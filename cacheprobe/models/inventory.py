"""Lists the models on this machine from names and records; loads no weights and uses no network."""

from typing import NamedTuple

from cacheprobe.models.hf.adapters import CONFIG, SHIPPED_ADAPTERS
from cacheprobe.models.known import SMOLLM2, SMOLLM2_ON_HUB, shipped_folder, shipped_names
from cacheprobe.models.smollm2 import converted_directory, is_complete
from cacheprobe.models.thinking.store import read_config

PLAIN, THINKING = "coinflip-plain", "coinflip-thinking"
"""Models with a fraction of a million parameters that were trained with this package and ship with it."""

TESTED_FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt-neox", "phi", "olmo2", "gemma2", "gemma3",
)  # fmt: skip
"""Architectures that the tests compare with Hugging Face's own cache, on both forwards (bridge and fast)."""

REFUSED = "local or chunked attention, recurrent states, encoder-decoders: their rollback is not defined here"


def smollm2_state() -> str:
    """Returns where SmolLM2 is: "converted", "installed" (converted at its first use), "hub" (in the local hub cache),
    or "absent"."""
    try:
        target = converted_directory()
    except FileNotFoundError:
        return "hub" if is_in_hub_cache(SMOLLM2_ON_HUB) else "absent"
    return "converted" if is_complete(target) else "installed"


def is_in_hub_cache(name: str) -> bool:
    """Returns whether the weights of a hub model were downloaded before. Uses no network."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "model.safetensors"), str)


class Shipped(NamedTuple):
    """A model that comes with the package."""

    name: str
    parameters: int
    made_by: str
    """The command that trained it."""


def shipped_models() -> list[Shipped]:
    """Returns the shipped Thinking States models and their plain baseline, as their training records describe them."""
    found = []
    for name in shipped_names("checkpoints"):
        folder = shipped_folder("checkpoints", name)
        record = read_config(folder)["record"] if folder is not None else {}
        found.append(Shipped(name, int(record.get("parameters", 0)), str(record.get("command", "not recorded"))))
    return found


def shipped_adapters() -> list[tuple[str, str]]:
    """Returns (task, model) of every adapter that comes with the package."""
    folders = sorted(path.parent.name for path in SHIPPED_ADAPTERS.glob(f"*/{CONFIG}"))
    return [(name.removesuffix(f"-{SMOLLM2}"), SMOLLM2) for name in folders if name.endswith(SMOLLM2)]
