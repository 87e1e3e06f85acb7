"""Chooses the shapes of passes that the caller left unset, and tries them before a run: a token must have the same bits
at every batch index and window slot, with determinism="invariant" in passes of any number of requests.

Libraries do not promise it, and some shapes break it: a vectorised loop ends with a scalar tail, and a matrix product
may treat its last row by itself, so that the last rows of an odd shape are rounded differently (measured on CPU: SiLU
over 9 rows of 48 in float32; 13 rows of 576 x 1536 in bfloat16).
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.devices import is_out_of_memory
from cacheprobe.core.records import CAPACITY_STEP
from cacheprobe.engine.shape_trial import ShapeTrial, known_results, num_trials, remember
from cacheprobe.models.base import CachedLM
from cacheprobe.models.settings import numeric_settings
from cacheprobe.ops.compiled.attention import MOST_TOKENS
from cacheprobe.ops.compiled.lanes import FORMATS

DRAFTED_WINDOW = 16
"""Default window, in tokens, of a run that drafts: long enough for the drafts of every drafter to pay."""
LEAST_CAPACITY = 512
"""Smallest default number of cache slots of a request; the larger ones are its doubles."""
UNPADDED_CHUNK, PADDED_CHUNK = 128, 32
"""Default prompt tokens of a prefill pass, without and with pads. With pads a longer pass costs more."""
_NEARBY = 8
"""Groups that exceed the given one by less than this are tried, so that the error message can name one that works."""
_GROUPS_OF_ONE_ROW = (16, 32, 8, 24, 48, 4, 2)
"""Groups to choose from if the window is 1, in this order: 16 requests cost little more in a pass than one."""
_GROUPS = (4, 8, 2, 16, 6, 12)
"""Groups to choose from for longer windows, in this order."""
_WINDOWS = (16, 8, 4, 2, 1)
"""Windows to try, in this order, if no group works with the chosen one."""
_NARROW = (2, 4, 8)
"""Widths, in tokens, of verify passes whose requests feed fewer tokens than the window."""
_LOWEST, _FIRST_TILE = 5, 8
"""Batch heights up to the first number are tried; above it, those around 8, 16, 32 ..., tiles of loops and kernels."""
_FEW = (1, 3)
"""Batch heights of the passes in which a run checks itself. Only these are tried in a width that is narrower than the
window, but for the narrowest widths."""
FEWEST_PROMPTS = 4
"""Fewest prompts for which to try whether a prefill pass may have several of them, and how many the trial has."""
_SHORT_TEXT, _MORE_THAN_LOOPS = 3, 4
"""Tokens of the short texts of that trial. The others are too long for attention in loops, by that many tokens."""
_BEYOND = "beyond the context"
"""First part of the key of the result of a pass over more cache slots than the model's context."""
_FORBIDDEN = "batched prompts"
"""Key of a fault that was found in a prefill pass with several prompts during a run."""


class ShapeRefused(ValueError):
    """Raised before a run if a trial on random texts found no batch-invariant pass shape among the allowed ones."""


@dataclass(frozen=True)
class Hooked:
    """Lists the hooks of a run. The trial puts the same ones on the model, since hooks may change how it computes."""

    listened: tuple[tuple[str, int], ...] = ()
    """(site, layer) of the attention heads and modules that are captured."""
    edited: tuple[tuple[str, int], ...] = ()
    """(site, layer) that interventions change."""


def serving_config(
    model: CachedLM,
    config: EngineConfig,
    unset_shapes: Collection[str] = (),
    hooked: Hooked = Hooked(),
    is_any_deterministic: bool = True,
    require_fit: Callable[[EngineConfig], None] | None = None,
) -> EngineConfig:
    """Tries verify passes on random texts, and returns the EngineConfig with a batch-invariant window and group.

    unset_shapes: which of "window" and "group" may be replaced. Another window is tried only if both may be replaced
    and no group works.
    is_any_deterministic: if False, and no group that may be chosen is batch-invariant, the first one is taken.
    require_fit: raises ValueError for a config whose window the model or a request cannot use.
    Raises: ShapeRefused, with another shape or setting to try, if the given group, all groups that may be chosen, or
    the prefill group are not batch-invariant.
    """
    faults: dict[EngineConfig, str] = {}

    def passes(shape: EngineConfig) -> bool:
        """Tries a shape and notes its fault, if it has one."""
        fault = _fault(model, shape.group, shape.window, shape.capacity, "verify", hooked)
        faults.update({} if fault is None else {shape: fault})
        return fault is None

    groups, is_given = _groups(config.window), "group" not in unset_shapes
    allowed = [config] if is_given else [replace(config, group=group) for group in groups]
    chosen = next(filter(passes, allowed), None)
    if chosen is None and not is_given and "window" in unset_shapes:
        chosen = next(filter(passes, _other_windows(model, config, require_fit)), None)
    if chosen is None and not is_given and not is_any_deterministic:
        chosen = allowed[0]
    if chosen is None:
        shape, fault = next(iter(faults.items()))
        said = f"no group of {', '.join(map(str, sorted(groups)))} gives every row the same bits with"
        said = f"{said} window={config.window} on this machine ({shape.group} x {shape.window}: {fault})"
        if is_given:
            said = f"verify passes of {config.group} x {config.window} rows do not compute every row alike on this"
            said = f"{said} machine: {fault}"
        nearby = (*range(config.group + 1, config.group + _NEARBY), *_GROUPS) if is_given else ()
        remedy = f"try {other_settings(model)}"
        if other := next(filter(passes, (replace(config, group=group) for group in nearby)), None):
            remedy = f"set group={other.group}"
        elif other := next(filter(passes, _other_windows(model, config)), None):
            remedy = f"set window={other.window} and group={other.group}"
        raise ShapeRefused(f"{said}; {remedy}")
    require_prefill(model, chosen, hooked)
    return chosen


def _other_windows(
    model: CachedLM, config: EngineConfig, require_fit: Callable[[EngineConfig], None] | None = None
) -> Iterator[EngineConfig]:
    """Yields the config with each group of each other window that fits the capacity and that the model accepts."""
    for window in _WINDOWS:
        if window == config.window or 2 * window > config.capacity:
            continue
        try:
            other = replace(config, window=window)
            (require_fit or (lambda config: model.check_settings(config.window)))(other)
        except ValueError:
            continue
        yield from (replace(other, group=group) for group in _groups(window))


def _groups(window: int) -> tuple[int, ...]:
    """Returns the group sizes to try for a window, in this order."""
    return _GROUPS_OF_ONE_ROW if window == 1 else _GROUPS


def require_prefill(model: CachedLM, config: EngineConfig, hooked: Hooked) -> None:
    """Raises: ShapeRefused if prefill passes of the given group and chunk are not batch-invariant, in a trial."""
    chunk = config.prefill_chunk, config.capacity, "prefill"
    if config.prefill_group > 1 and (fault := _fault(model, config.prefill_group, *chunk, hooked)):
        raise ShapeRefused(
            f"prefill passes of {config.prefill_group} x {config.prefill_chunk} rows do not compute every row alike on "
            f"this machine: {fault}; set prefill_group=1"
        )


def invariant_widths(
    model: CachedLM, config: EngineConfig, hooked: Hooked = Hooked(), num_requests: int = 1
) -> tuple[int, ...]:
    """Requires that a token has the same bits in passes of 1 to `num_requests` requests, and of the three in which the
    run checks itself, as in a pass of its request alone. Returns the widths below the window in which it has them, too,
    ascending.

    If no row depends on another by construction, some heights stand for all, and all widths are tried in which a row
    does not depend on the width either; otherwise every height is tried, and no width but the window.
    Raises: ShapeRefused, with the height, the first differing operation and layer, and the remedy.
    """
    window, heights = config.window, {*range(1, num_requests + 1), *_FEW}
    widths: Sequence[int] = ()
    if independent := _independent_width(model):
        heights = {*_heights(num_requests), *_FEW}
        widths = () if hooked.edited or window > independent else range(1, window)
    shapes = [(h, window) for h in sorted(heights)]
    shapes += [(h, w) for w in widths for h in (sorted(heights) if w < _FEW[1] else _FEW)]

    def tried(shapes: Sequence[tuple[int, int]]) -> Iterator[ShapeTrial]:
        """Yields trials that compute texts by themselves."""
        most = max(height for height, _ in shapes)
        for number in range(num_trials(model, sum(height * width for height, width in shapes), 1)):
            yield ShapeTrial(model, most, window, config.capacity, "verify", number, is_alone=True)

    keys = {shape: (*shape, window, "invariant", config.capacity) for shape in shapes}
    faults = _faults(model, hooked, keys, tried)
    if of_window := [shape for shape in shapes if shape[1] == window and faults[shape] is not None]:
        height, _ = of_window[0]
        raise ShapeRefused(
            f"determinism='invariant' needs a token to have the same bits beside any other requests, but on this "
            f"machine a pass of {height} x {window} tokens differs from one of 1 x {window}: "
            f"{faults[of_window[0]]}; set determinism='verify'"
        )
    return tuple(sorted(set(widths) - {width for (_, width), fault in faults.items() if fault is not None}))


def _heights(most: int) -> tuple[int, ...]:
    """Returns the batch heights, from 1 to `most`, that stand for all where rows do not depend on each other."""
    heights, tile = {*range(1, min(most, _LOWEST) + 1), most}, _FIRST_TILE
    while tile <= most + 1:
        heights |= {height for height in (tile - 1, tile, tile + 1) if height <= most}
        tile *= 2
    return tuple(sorted(heights))


def _independent_width(model: CachedLM) -> int:
    """Returns `independent_width`, an optional member of CachedLM; 0 without it. A trial alone does not make a width
    safe: a fault that shows in one text of thirty passes it."""
    return getattr(model, "independent_width", 0)


def narrow_widths(model: CachedLM, config: EngineConfig, hooked: Hooked = Hooked()) -> tuple[int, ...]:
    """Returns the widths, ascending and below the window, in which verify passes give every token the bits that it has
    in a whole window: 2, 4 and 8, as far as a trial on random texts finds no difference. A pass of short drafts then
    computes fewer pads.

    Returns () with interventions, which may look at a whole pass, and unless results are independent of the width by
    construction.
    """
    if config.window > _independent_width(model) or hooked.edited:
        return ()
    group, window = config.group, config.window

    def tried(shapes: Sequence[tuple[int, int]]) -> Iterator[ShapeTrial]:
        """Yields trials that have computed their texts in a whole window."""
        for number in range(num_trials(model, group, window)):
            trial = ShapeTrial(model, group, window, config.capacity, "verify", number)
            trial.run()
            yield trial

    keys = {(group, width): (width, "narrow", group, window, config.capacity) for width in _NARROW if width < window}
    return tuple(width for (_, width), fault in _faults(model, hooked, keys, tried).items() if fault is None)


def batches_prompts(model: CachedLM, config: EngineConfig, hooked: Hooked, num_prompts: int) -> bool:
    """Returns True if a prompt has the same bits in prefill passes with other prompts as by itself, as far as a trial
    on random texts finds no difference.

    num_prompts: how many are read at once, at most. False for fewer than 4, for which the trial takes longer than it
    saves; for padded chunks; with interventions; and unless rows are independent by construction.
    """
    if num_prompts < FEWEST_PROMPTS or config.pad_prefill or config.prefill_group > 1 or hooked.edited:
        return False
    if not _independent_width(model) or known_results(model, [_FORBIDDEN]).get(_FORBIDDEN):
        return False
    capacity = config_to_try(config, model.attends_by_request).capacity
    in_loops = MOST_TOKENS[FORMATS[model.dtype]] if model.dtype in FORMATS else 0
    wanted = _SHORT_TEXT, in_loops + _MORE_THAN_LOOPS
    lengths = tuple(min(length, config.prefill_chunk, capacity) for length in wanted)

    def tried(shapes: Sequence[tuple[int, int]]) -> Iterator[ShapeTrial]:
        """Yields a trial that has computed each text by itself."""
        for height, width in shapes:
            yield ShapeTrial(model, height, width, capacity, "prefill", 0, True, lengths)

    keys = {(FEWEST_PROMPTS, lengths[1]): ("prefill", lengths, capacity)}
    return not any(_faults(model, hooked, keys, tried).values())


def forbid_batched_prompts(model: CachedLM, fault: str) -> None:
    """Makes `batches_prompts` return False for a model from now on. fault: text about the difference that was found."""
    remember(model, {_FORBIDDEN: fault})


def _faults(
    model: CachedLM,
    hooked: Hooked,
    keys: Mapping[tuple[int, int], Hashable],
    tried: Callable[[Sequence[tuple[int, int]]], Iterator[ShapeTrial]],
) -> dict[tuple[int, int], str | None]:
    """Returns text about the first difference of each shape (height, width) from the first computation of the texts of
    a trial; None without one. Stores the results.

    keys: of each shape, the key of its result.  tried: yields the trials of the shapes whose result is not known.
    """
    keys = {shape: (key, hooked, *numeric_settings().values()) for shape, key in keys.items()}
    known = known_results(model, keys.values())
    if untried := [shape for shape, key in keys.items() if key not in known]:
        found: dict[tuple[int, int], str] = {}
        with _hooks(model, hooked):
            for trial in tried(untried):
                for shape in [shape for shape in untried if shape not in found]:
                    if (fault := trial.run_at(*shape)) is not None:
                        found[shape] = fault
        remember(model, {keys[shape]: found.get(shape) for shape in untried})
    return {shape: known[key] for shape, key in keys.items()}


def _fault(model: CachedLM, batch: int, width: int, capacity: int, phase: str, hooked: Hooked) -> str | None:
    """Returns text about the first difference in a trial of a pass shape; None if all bits are equal. Stores the
    result."""
    key = (batch, width, capacity, phase, hooked, *numeric_settings().values())
    known = known_results(model, [key])
    if key not in known:
        with _hooks(model, hooked):
            numbers = range(num_trials(model, batch, width))
            trials = (ShapeTrial(model, batch, width, capacity, phase, number) for number in numbers)
            remember(model, {key: next(filter(None, (trial.fault() for trial in trials)), None)})
    return known[key]


def within_positions(model: CachedLM, config: EngineConfig, is_capacity_given: bool) -> EngineConfig:
    """Returns the config, with the capacity of the model's context if the model cannot attend over more cache slots.

    Raises: ValueError if it cannot, and the capacity is the user's own.
    """
    if config.capacity <= model.n_ctx or (why := _fault_beyond_context(model, config.capacity)) is None:
        return config
    if is_capacity_given:
        raise ValueError(
            f"capacity={config.capacity}: {model.name} attends over at most {model.n_ctx} cache slots, the length of "
            f"its table of positions ({why}); set capacity={model.n_ctx} or less"
        )
    return replace(config, capacity=model.n_ctx)


def _fault_beyond_context(model: CachedLM, capacity: int) -> str | None:
    """Tries a pass over `capacity` cache slots, more than the model's context. Returns the text of its error, such as
    that of a model with a table of positions (MPT's ALiBi); None without one, and if no pass attends over them all."""
    if model.attends_by_request:
        return None
    key = (_BEYOND, capacity)
    known = known_results(model, [key])
    if key not in known:
        fault = None
        try:
            model.forward(torch.zeros(1, 1, dtype=torch.long), model.new_cache(1, capacity), [0], [0])
        except (RuntimeError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            fault = f"{type(error).__name__}: {error!s:.120}"
        remember(model, {key: fault})
    return known[key]


@contextmanager
def _hooks(model: CachedLM, hooked: Hooked) -> Iterator[None]:
    """Inside the `with`, hooks like those of the run are on the model; they change and keep nothing."""
    with ExitStack() as stack:
        stack.enter_context(model.editing(hooked.edited, _change_nothing)) if hooked.edited else None
        stack.enter_context(model.capturing(hooked.listened, _ignore)) if hooked.listened else None
        yield


def other_settings(model: CachedLM) -> str:
    """Returns text for an error message: settings with which a pass of the model may be batch-invariant."""
    return "torch.set_num_threads(1)" + " or path='bridge'" * (getattr(model, "path", "") == "plain")


def _change_nothing(site: str, layer: int, value: Tensor) -> None: ...


def _ignore(site: str, layer: int, value: Tensor) -> None: ...


# -- defaults


def choose_shapes(model: Any, is_drafted: bool, settings: Mapping[str, Any]) -> tuple[EngineConfig, frozenset[str]]:
    """Returns (an EngineConfig with every shape filled in, which of "window", "group" and "capacity" the caller did not
    give).

    A trial on this machine may replace a window or group that was not given.
    `with_capacity` replaces the capacity when the requests are known. Nothing else depends on the requests, so a
    request alone gets the shapes of a batch.
    settings: fields of EngineConfig; a missing field or None is chosen here, for the model, its device and drafts.

    Without a drafter the window is 1 on a CPU, and with determinism="invariant" everywhere: each pass computes one new
    token of a request. Otherwise it is 16. A window that the model refuses is replaced, see `_window`. Prompts are read
    in chunks of their own length, one a pass or as `batches_prompts` allows, unless prefill_group is given.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    given_names = tuple(given)
    window = given.get("window")
    if window is None:
        capacity = given.get("capacity")
        window = _window(model, is_drafted, given.get("determinism") == "invariant")
        window = given["window"] = min(window, capacity) if type(capacity) is int and capacity > 0 else window
    unset_shapes = frozenset({"window", "group", "capacity", "prefill_group"} - set(given_names))
    given.setdefault("group", 16 if window == 1 or given.get("determinism") == "invariant" else 4)
    given.setdefault("prefill_group", 1)
    given.setdefault("pad_prefill", given["prefill_group"] != 1)
    given.setdefault("prefill_chunk", PADDED_CHUNK if given["pad_prefill"] else UNPADDED_CHUNK)
    return EngineConfig(**given), unset_shapes


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


def config_to_try(config: EngineConfig, attends_by_request: bool) -> EngineConfig:
    """Returns the config for the trial of pass shapes: with a capacity of about 512 where bits do not depend on it."""
    if not attends_by_request or config.capacity % CAPACITY_STEP:
        return config
    longest = max(LEAST_CAPACITY, 2 * config.window, config.prefill_chunk)
    return replace(config, capacity=min(config.capacity, -(-longest // CAPACITY_STEP) * CAPACITY_STEP))
