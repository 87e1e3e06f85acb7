"""Lists for a terminal which models are here and which families will run."""

from cacheprobe.core.terminal import Listing
from cacheprobe.models.inventory import (
    REFUSED,
    SMOLLM2,
    SMOLLM2_ON_HUB,
    TESTED_FAMILIES,
    shipped_adapters,
    shipped_models,
    smollm2_state,
)
from cacheprobe.models.loaders import SLIDING_FAMILIES
from cacheprobe.models.smollm2 import INSTALL, WEIGHTS_NOTE, cache_directory


def model_listings() -> list[Listing]:
    """Returns the models of this machine, adapters, tested families, and how to get other models."""
    here = [(m.name, f"shipped, {m.parameters:,} parameters, {m.made_by}") for m in shipped_models()]
    state = smollm2_state()
    if state != "absent":
        here.append((SMOLLM2, _said_of_smollm2(state)))
    adapters = [(task, f"for {model}: load_model({model!r}, adapter={task!r})") for task, model in shipped_adapters()]
    absent = [(SMOLLM2, f"{INSTALL} (half a gigabyte in {cache_directory()} at its first use)")]
    return [
        Listing("here", (), here),
        Listing("adapters", (), adapters, "" if adapters else "none is shipped"),
        Listing("families that will run", (), _families()),
        Listing(
            "how to get others",
            (),
            [
                *(absent if state == "absent" else ()),
                ("from the hub", "load_model('ORGANISATION/NAME') fetches it with its tokenizer, once"),
                ("from a folder", "load_model('path/to/folder'), as transformers' save_pretrained leaves it"),
                ("from memory", "load_model(model, tokenizer) wraps a live transformers model, or a TransformerBridge"),
                ("trained here", "cacheprobe train thinking-states, cacheprobe train lora"),
            ],
        ),
    ]


def _families() -> list[tuple[str, str]]:
    return [
        ("tested", ", ".join(TESTED_FAMILIES)),
        ("tested with sliding windows", ", ".join(SLIDING_FAMILIES)),
        ("refused by name", REFUSED),
        ("others", "are compared with their own uncached forward when they are loaded, and refused where they differ"),
    ]


def _said_of_smollm2(state: str) -> str:
    if state == "hub":
        return f"{SMOLLM2_ON_HUB}, from the hub's cache"
    return WEIGHTS_NOTE + ("" if state == "converted" else "; it is converted at its first use, once")
