"""Chooses the pass shapes of a run (window, group, prefill chunk ...) that its caller did not give."""

from collections.abc import Mapping
from typing import Any

from cacheprobe.core.config import EngineConfig

DRAFTED_WINDOW = 16
"""Default window, in tokens, of a run that drafts: long enough for the drafts of every drafter to pay."""
UNPADDED_CHUNK, PADDED_CHUNK = 128, 32
"""Default prompt tokens of a prefill pass, without and with pads. With pads a longer pass costs more."""


def choose_shapes(model: Any, is_drafted: bool, settings: Mapping[str, Any]) -> tuple[EngineConfig, frozenset[str]]:
    """Returns (an EngineConfig with every shape filled in, which of "window" and "group" were not given by the caller).

    consistency.py tries the shape on this machine, and may replace a window or group that was not given.
    settings: fields of EngineConfig; a missing field or None is chosen here. The choice depends on the model, its
    device, and whether there is a drafter, not on the requests. So a request alone gets the shapes of a batch.

    Without a drafter the window is 1 on a CPU, and with determinism="invariant" everywhere: each pass computes one new
    token of a request. Otherwise it is 16. A window that the model refuses is replaced, see `_window`. Prompts are read
    without pads, one a pass, unless prefill_group is given.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    given_names = tuple(given)
    window = given.get("window")
    if window is None:
        capacity = given.get("capacity")
        window = _window(model, is_drafted, given.get("determinism") == "invariant")
        window = given["window"] = min(window, capacity) if type(capacity) is int and capacity > 0 else window
    open_shapes = frozenset({"window", "group"} - set(given_names))
    given.setdefault("group", 16 if window == 1 or given.get("determinism") == "invariant" else 4)
    given.setdefault("prefill_group", 1)
    given.setdefault("pad_prefill", given["prefill_group"] != 1)
    given.setdefault("prefill_chunk", PADDED_CHUNK if given["pad_prefill"] else UNPADDED_CHUNK)
    return EngineConfig(**given), open_shapes


def _window(model: Any, is_drafted: bool, is_invariant: bool) -> int:
    """Returns the default window, 1 or 16; if the model refuses it, the first of 4, 8 and 16 that the model accepts."""
    device = getattr(getattr(model, "device", None), "type", "cpu")
    wanted = DRAFTED_WINDOW if is_drafted or (device != "cpu" and not is_invariant) else 1
    if not hasattr(model, "check_settings"):
        return wanted
    for window in (wanted, 4, 8, DRAFTED_WINDOW):  # a model may need a window of whole chunks
        try:
            model.check_settings(window)
        except ValueError:
            continue
        return window
    return wanted
