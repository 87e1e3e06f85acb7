"""Lists for a terminal which models this machine has, and which model families will run."""

from cacheprobe.core.terminal import Listing
from cacheprobe.models.known import (
    REFUSED,
    SMOLLM2,
    SMOLLM2_ON_HUB,
    TESTED_FAMILIES,
    shipped_adapters,
    shipped_models,
    smollm2_state,
)
from cacheprobe.models.plain.files import SLIDING_FAMILIES
from cacheprobe.models.smollm2 import INSTALL, WEIGHTS_NOTE, cache_directory


def model_listings() -> list[Listing]:
    """Returns a list of tables to print: models of this machine, adapters, tested families, and how to get other
    models."""
    installed = [(m.name, f"shipped, {m.parameters:,} parameters, {m.made_by}") for m in shipped_models()]
    state = smollm2_state()
    if state != "absent":
        installed.append((SMOLLM2, _smollm2_text(state)))
    adapters = [(task, f"for {model}: load_model({model!r}, adapter={task!r})") for task, model in shipped_adapters()]
    smollm2_lines = [(SMOLLM2, f"{INSTALL} (half a gigabyte in {cache_directory()} at its first use)")]
    return [
        Listing("here", (), installed),
        Listing("adapters", (), adapters, "" if adapters else "none is shipped"),
        Listing("families that will run", (), _families()),
        Listing(
            "how to get others",
            (),
            [
                *(smollm2_lines if state == "absent" else ()),
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


def _smollm2_text(state: str) -> str:
    if state == "hub":
        return f"{SMOLLM2_ON_HUB}, from the hub's cache"
    return WEIGHTS_NOTE + ("" if state == "converted" else "; it is converted at its first use, once")
