"""Chooses the pass shapes of a run (window, group, capacity, prefill chunk ...) that its caller did not give."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import ANY_CAPACITY, CAPACITY_STEP
from cacheprobe.ops.attention import BY_REQUEST

DRAFTED_WINDOW = 16
"""Default window, in tokens, of a run that drafts: long enough for the drafts of every drafter to pay."""
LEAST_CAPACITY = 512
"""Smallest default number of cache slots of a request; the larger ones are its doubles."""
UNPADDED_CHUNK, PADDED_CHUNK = 128, 32
"""Default prompt tokens of a prefill pass, without and with pads. With pads a longer pass costs more."""


def choose_shapes(model: Any, is_drafted: bool, settings: Mapping[str, Any]) -> tuple[EngineConfig, frozenset[str]]:
    """Returns (an EngineConfig with every shape filled in, which of "window", "group" and "capacity" the caller did not
    give).

    consistency.py tries the shape on this machine, and may replace a window or group that was not given.
    `with_capacity` replaces the capacity when the requests are known. Nothing else depends on the requests, so a
    request alone gets the shapes of a batch.
    settings: fields of EngineConfig; a missing field or None is chosen here, for the model, its device and drafts.

    Without a drafter the window is 1 on a CPU, and with determinism="invariant" everywhere: each pass computes one new
    token of a request. Otherwise it is 16. A window that the model refuses is replaced, see `_window`. Prompts are read
    in chunks of their own length, one a pass or as `consistency.batches_prompts` allows, unless prefill_group is given.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    given_names = tuple(given)
    window = given.get("window")
    if window is None:
        capacity = given.get("capacity")
        window = _window(model, is_drafted, given.get("determinism") == "invariant")
        window = given["window"] = min(window, capacity) if type(capacity) is int and capacity > 0 else window
    open_shapes = frozenset({"window", "group", "capacity", "prefill_group"} - set(given_names))
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


def with_capacity(
    config: EngineConfig, requests: Iterable[tuple[int, int, int]], n_ctx: int, is_window_open: bool
) -> EngineConfig:
    """Returns the config with the smallest default capacity that every request fits: 512, 1,024, 2,048 ... up to what
    the model's context needs.

    requests: (prompt tokens, new tokens, tokens already in the cache) of each.  n_ctx: tokens of the model's context.
    is_window_open: another window, up to 16, may replace that of the config.
    """
    widest = replace(config, window=max(config.window, DRAFTED_WINDOW)) if is_window_open else config
    needed = max((widest.slots_needed(*sizes) for sizes in requests), default=0)
    most = widest.slots_needed(n_ctx - 1, 1)
    capacity = LEAST_CAPACITY
    while capacity < needed:
        capacity *= 2
    longest = -(-max(most, LEAST_CAPACITY) // CAPACITY_STEP) * CAPACITY_STEP
    return replace(config, capacity=min(capacity, longest) if needed <= longest else capacity)


def shared_capacity(attention: object, capacity: int) -> int | str:
    """Returns the capacity's entry of a schedule fingerprint: ANY_CAPACITY where bits do not depend on it.

    attention: the fingerprint's entry of that name.
    """
    return ANY_CAPACITY if attention == BY_REQUEST and capacity % CAPACITY_STEP == 0 else capacity


def config_to_try(config: EngineConfig, attends_by_request: bool) -> EngineConfig:
    """Returns the config for the trial of pass shapes: with a capacity of about 512 where bits do not depend on it."""
    if not attends_by_request or config.capacity % CAPACITY_STEP:
        return config
    longest = max(LEAST_CAPACITY, 2 * config.window, config.prefill_chunk)
    return replace(config, capacity=min(config.capacity, -(-longest // CAPACITY_STEP) * CAPACITY_STEP))
