"""Lists for a terminal which models this machine has, and which model families will run."""

from cacheprobe.core.terminal import Listing
from cacheprobe.models.converted import cache_directory
from cacheprobe.models.known import (
    EMBEDDED,
    REFUSED,
    TESTED_FAMILIES,
    Embedded,
    embedded_state,
    shipped_adapters,
    shipped_models,
)
from cacheprobe.models.plain.files import SLIDING_FAMILIES


def model_listings() -> list[Listing]:
    """Returns a list of tables to print: models of this machine, adapters, tested families, and how to get other
    models."""
    installed = [(m.name, f"shipped, {m.parameters:,} parameters, {m.made_by}") for m in shipped_models()]
    states = {name: embedded_state(name) for name in EMBEDDED}
    installed += [(name, _text(EMBEDDED[name], state)) for name, state in states.items() if state != "absent"]
    adapters = [(task, f"for {model}: load_model({model!r}, adapter={task!r})") for task, model in shipped_adapters()]
    absent = [
        (name, f"{EMBEDDED[name].install} (converted in {cache_directory()} at its first use)")
        for name, state in states.items()
        if state == "absent"
    ]
    return [
        Listing("here", (), installed),
        Listing("adapters", (), adapters, "" if adapters else "none is shipped"),
        Listing("families that will run", (), _families()),
        Listing(
            "how to get others",
            (),
            [
                *absent,
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


def _text(model: Embedded, state: str) -> str:
    if state == "hub":
        return f"{model.hub}, from the hub's cache"
    return model.weights + ("" if state == "converted" else "; it is converted at its first use, once")
