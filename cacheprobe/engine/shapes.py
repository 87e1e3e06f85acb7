"""Chooses the fixed shapes of a run that its caller left open, for the model and the device."""

from collections.abc import Mapping
from typing import Any

from cacheprobe.core.config import EngineConfig

DRAFTED_WINDOW = 16
"""Rows of a verify pass where something is drafted: enough for the drafts of every drafter to pay."""
UNPADDED_CHUNK, PADDED_CHUNK = 128, 32
"""Prompt tokens of a prefill pass: without pads a longer pass costs nothing, with pads they are a part of it."""


def choose_shapes(model: Any, is_drafted: bool, asked: Mapping[str, Any]) -> tuple[EngineConfig, frozenset[str]]:
    """Returns the engine's settings with every shape filled in, and which of "window" and "group" were not given: the
    trial of shapes may replace these.

    asked: fields of EngineConfig; None for what is chosen here. What is chosen depends on the model, its device and on
    whether there is a drafter, never on the requests, so that a request alone has the shapes of a request in a batch.

    Without a drafter on a CPU the window is one row: a verify pass is then a decode of a fixed shape, and nothing is
    computed twice. With a drafter, or on a GPU, it is 16. Prompts are read without pads, one a pass.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    window = given.get("window")
    if window is None:
        capacity = given.get("capacity")
        window = _window(model, is_drafted)
        window = given["window"] = min(window, capacity) if type(capacity) is int and capacity > 0 else window
    open_shapes = frozenset({"window", "group"} - {name for name in asked if asked[name] is not None})
    given.setdefault("group", 16 if window == 1 else 4)
    given.setdefault("prefill_group", 1)
    given.setdefault("pad_prefill", given["prefill_group"] != 1)
    given.setdefault("prefill_chunk", PADDED_CHUNK if given["pad_prefill"] else UNPADDED_CHUNK)
    return EngineConfig(**given), open_shapes


def _window(model: Any, is_drafted: bool) -> int:
    device = getattr(getattr(model, "device", None), "type", "cpu")
    wanted = DRAFTED_WINDOW if is_drafted or device != "cpu" else 1
    if not hasattr(model, "check_settings"):
        return wanted
    for window in (wanted, 4, 8, DRAFTED_WINDOW):  # a model may need a window of whole chunks
        try:
            model.check_settings(window)
        except ValueError:
            continue
        return window
    return wanted
