"""Tests, before a run, whether a pass shape gives a token the same bits at every batch index and every window slot;
with determinism="invariant", whether passes of any number of requests do. Also tests whether prompts may share a pass.

Libraries do not promise it, and some shapes break it: a vectorised loop ends with a scalar tail, and a matrix product
may treat its last row by itself, so that the last rows of an odd shape are rounded differently (measured on CPU: SiLU
over 9 rows of 48 in float32; 13 rows of 576 x 1536 in bfloat16).
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cacheprobe.core.config import EngineConfig
from cacheprobe.engine.model_runner import is_out_of_memory
from cacheprobe.engine.shapes import config_to_try
from cacheprobe.engine.trial import Cycle, num_cycles
from cacheprobe.engine.watch import other_settings
from cacheprobe.models.base import CachedLM
from cacheprobe.models.settings import numeric_settings
from cacheprobe.ops.compiled.attention import MOST_TOKENS
from cacheprobe.ops.compiled.lanes import FORMATS

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
_FEWEST_PROMPTS = 4
"""Fewest prompts for which to try whether a prefill pass may have several of them, and how many the trial has."""
_SHORT_TEXT, _MORE_THAN_LOOPS = 3, 4
"""Tokens of the short texts of that trial. The others are too long for attention in loops, by that many tokens."""
_BEYOND = "beyond the context"
"""First part of the key in `_known` of a pass over more cache slots than the model's context."""
_FORBIDDEN = "batched prompts"
"""Key in `_known` of a fault that was found in a prefill pass with several prompts during a run."""


class ShapeRefused(ValueError):
    """Raised before a run if a trial on random texts found no batch-invariant pass shape among the allowed ones."""


@dataclass(frozen=True)
class Hooked:
    """Lists the hooks of a run. The trial puts the same ones on the model, since hooks may change how it computes."""

    listened: tuple[tuple[str, int], ...] = ()
    """(site, layer) of the attention heads that are captured."""
    edited: tuple[tuple[str, int], ...] = ()
    """(site, layer) that interventions change."""


_known: "WeakKeyDictionary[CachedLM, dict[Hashable, str | None]]" = WeakKeyDictionary()
"""Results of `_fault` and of the trials of narrow widths, by model, then by shape, hooks and numeric settings."""


def serving_config(
    model: CachedLM,
    config: EngineConfig,
    open_shapes: Collection[str] = (),
    hooked: Hooked = Hooked(),
    is_any_deterministic: bool = True,
    require_fit: Callable[[EngineConfig], None] | None = None,
) -> EngineConfig:
    """Tries verify passes on random texts, and returns the EngineConfig with a batch-invariant window and group.

    open_shapes: which of "window" and "group" may be replaced. Another window is tried only if both may be replaced and
    no group works.
    is_any_deterministic: if False, and no group that may be chosen is batch-invariant, the first one is taken.
    require_fit: raises ValueError for a config whose window the model or a request cannot use.
    Raises: ShapeRefused, with another shape or setting to try, if the given group, all groups that may be chosen, or
    the prefill group are not batch-invariant.
    """
    if "group" in open_shapes:
        others = _other_windows(model, config, require_fit) if "window" in open_shapes else ()
        faults = []
        for shape in (replace(c, group=g) for c in chain([config], others) for g in _groups(c.window)):
            fault = _fault(model, shape.group, shape.window, shape.capacity, "verify", hooked)
            if fault is None:
                break
            faults.append(f"{shape.group} x {shape.window}: {fault}")
        else:
            shape = replace(config, group=_groups(config.window)[0])
            if is_any_deterministic:
                raise ShapeRefused(
                    f"no group of {', '.join(map(str, sorted(_groups(config.window))))} gives every row the same bits "
                    f"with window={config.window} on this machine ({faults[0]}); {_remedy(model, config, hooked)}"
                )
        config = shape
    else:
        _require_verify(model, config, hooked)
    _require_prefill(model, config, hooked)
    return config


def _require_prefill(model: CachedLM, config: EngineConfig, hooked: Hooked) -> None:
    """Raises: ShapeRefused if prefill passes of the given group and chunk are not batch-invariant, in a trial."""
    chunk = config.prefill_chunk, config.capacity, "prefill"
    if config.prefill_group > 1 and (fault := _fault(model, config.prefill_group, *chunk, hooked)):
        raise ShapeRefused(
            f"prefill passes of {config.prefill_group} x {config.prefill_chunk} rows do not compute every row alike on "
            f"this machine: {fault}; set prefill_group=1"
        )


def proven_shapes(
    model: CachedLM,
    config: EngineConfig,
    open_shapes: Collection[str],
    hooked: Hooked,
    is_any_deterministic: bool,
    require_fit: Callable[[EngineConfig], None],
    num_requests: int,
) -> tuple[EngineConfig, tuple[int, ...]]:
    """Tries the shapes of a run's deciding passes on random texts. Returns (EngineConfig of these passes, widths below
    its window that they may have, too).

    Arguments and errors: see `serving_config`; with determinism="invariant", see `invariant_widths`.
    """
    tried = config_to_try(config, model.attends_by_request)
    if config.is_invariant:
        _require_prefill(model, tried, hooked)
        return config, invariant_widths(model, tried, hooked, num_requests)

    def fits(other: EngineConfig) -> None:
        """Calls `require_fit` with the run's capacity."""
        require_fit(replace(other, capacity=config.capacity))

    tried = serving_config(model, tried, open_shapes, hooked, is_any_deterministic, fits)
    return replace(tried, capacity=config.capacity), narrow_widths(model, tried, hooked)


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
    known = _known.setdefault(model, {})
    settings = (window, "invariant", config.capacity, hooked, *numeric_settings().values())
    if untried := [shape for shape in shapes if (*shape, *settings) not in known]:
        found = _invariant_faults(model, config, untried, hooked)
        known.update({(*shape, *settings): found.get(shape) for shape in untried})
    faults = {shape: fault for shape in shapes if (fault := known[*shape, *settings]) is not None}
    if of_window := [shape for shape in faults if shape[1] == window]:
        height, _ = of_window[0]
        raise ShapeRefused(
            f"determinism='invariant' needs a token to have the same bits beside any other requests, but on this "
            f"machine a pass of {height} x {window} tokens differs from one of 1 x {window}: "
            f"{faults[of_window[0]]}; set determinism='verify'"
        )
    return tuple(sorted(set(widths) - {width for _, width in faults}))


def _invariant_faults(
    model: CachedLM, config: EngineConfig, shapes: Sequence[tuple[int, int]], hooked: Hooked
) -> dict[tuple[int, int], str]:
    """Computes texts by themselves, then in passes of each shape (height, width). Returns text about the first
    difference of each shape that has one."""
    found: dict[tuple[int, int], str] = {}
    most = max(height for height, _ in shapes)
    num_tokens = sum(height * width for height, width in shapes)
    with _hooks(model, hooked):
        for number in range(num_cycles(model, num_tokens, 1)):
            cycle = Cycle(model, most, config.window, config.capacity, "verify", number, is_alone=True)
            for shape in [shape for shape in shapes if shape not in found]:
                if (fault := cycle.run_at(*shape)) is not None:
                    found[shape] = fault
    return found


def _heights(most: int) -> tuple[int, ...]:
    """Returns the batch heights, ascending from 1 to `most`, that stand for all where rows do not depend on each
    other."""
    heights, tile = {*range(1, min(most, _LOWEST) + 1), most}, _FIRST_TILE
    while tile <= most + 1:
        heights |= {height for height in (tile - 1, tile, tile + 1) if height <= most}
        tile *= 2
    return tuple(sorted(heights))


def _independent_width(model: CachedLM) -> int:
    """Returns `FastLM.independent_width`; 0 for another kind of model. A trial alone does not make a width safe: a
    fault that shows in one text of thirty passes it."""
    return getattr(model, "independent_width", 0)


def narrow_widths(model: CachedLM, config: EngineConfig, hooked: Hooked = Hooked()) -> tuple[int, ...]:
    """Returns the widths, ascending and below the window, in which verify passes give every token the bits that it has
    in a whole window: 2, 4 and 8, as far as a trial on random texts finds no difference. A pass of short drafts then
    computes fewer pads.

    Returns () unless results are independent of the width by construction, and with interventions, which may look at a
    whole pass.
    """
    if config.window > _independent_width(model) or hooked.edited:
        return ()
    known, shape = _known.setdefault(model, {}), (config.group, config.window, config.capacity)
    settings = (hooked, *numeric_settings().values())
    faults = {width: (width, "narrow", *shape, *settings) for width in _NARROW if width < config.window}
    if untried := {width: key for width, key in faults.items() if key not in known}:
        with _hooks(model, hooked):
            for number in range(num_cycles(model, config.group, config.window)):
                cycle = Cycle(model, *shape, "verify", number)
                cycle.run()
                for width, key in untried.items():
                    known[key] = known.get(key) or cycle.fault_at(width)
    return tuple(width for width, key in faults.items() if known[key] is None)


def batches_prompts(model: CachedLM, config: EngineConfig, hooked: Hooked, num_prompts: int) -> bool:
    """Returns True if a prompt has the same bits in prefill passes with other prompts as by itself, as far as a trial
    on random texts finds no difference.

    num_prompts: how many are read at once, at most. False for fewer than 4, for which the trial takes longer than it
    saves; for padded chunks; unless rows are independent by construction; and with interventions, which may look at a
    whole pass.
    """
    if num_prompts < _FEWEST_PROMPTS or config.pad_prefill or config.prefill_group > 1 or hooked.edited:
        return False
    known = _known.setdefault(model, {})
    if not _independent_width(model) or known.get(_FORBIDDEN):
        return False
    capacity = config_to_try(config, model.attends_by_request).capacity
    in_loops = MOST_TOKENS[FORMATS[model.dtype]] if model.dtype in FORMATS else 0
    wanted = _SHORT_TEXT, in_loops + _MORE_THAN_LOOPS
    lengths = tuple(min(length, config.prefill_chunk, capacity) for length in wanted)
    key = ("prefill", lengths, capacity, hooked, *numeric_settings().values())
    if key not in known:
        with _hooks(model, hooked):
            cycle = Cycle(model, _FEWEST_PROMPTS, lengths[1], capacity, "prefill", 0, True, lengths)
            known[key] = cycle.run_at(_FEWEST_PROMPTS, lengths[1])
    return known[key] is None


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
    known, key = _known.setdefault(model, {}), (_BEYOND, capacity)
    if key not in known:
        try:
            model.forward(torch.zeros(1, 1, dtype=torch.long), model.new_cache(1, capacity), [0], [0])
            known[key] = None
        except (RuntimeError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            known[key] = f"{type(error).__name__}: {error!s:.120}"
    return known[key]


def forbid_batched_prompts(model: CachedLM, fault: str) -> None:
    """Makes `batches_prompts` return False for a model from now on. fault: text about the difference that was found."""
    _known.setdefault(model, {})[_FORBIDDEN] = fault


def _groups(window: int) -> tuple[int, ...]:
    """Returns the group sizes to try for a window, as a tuple in the order of trial."""
    return _GROUPS_OF_ONE_ROW if window == 1 else _GROUPS


def _other_windows(
    model: CachedLM, config: EngineConfig, require_fit: Callable[[EngineConfig], None] | None = None
) -> Iterator[EngineConfig]:
    """Yields copies of the config, each with another window that fits the capacity and that the model accepts."""
    for window in _WINDOWS:
        if window == config.window or 2 * window > config.capacity:
            continue
        try:
            other = replace(config, window=window)
            (require_fit or (lambda config: model.check_settings(config.window)))(other)
        except ValueError:
            continue
        yield other


def _require_verify(model: CachedLM, config: EngineConfig, hooked: Hooked) -> None:
    """Raises: ShapeRefused if verify passes of the given group and window are not batch-invariant, in a trial."""
    shape = config.window, config.capacity, "verify"
    fault = _fault(model, config.group, *shape, hooked)
    if fault is None:
        return
    nearby = (*range(config.group + 1, config.group + _NEARBY), *_GROUPS)
    better = next((group for group in nearby if _fault(model, group, *shape, hooked) is None), None)
    remedy = f"set group={better}" if better else _remedy(model, config, hooked)
    raise ShapeRefused(
        f"verify passes of {config.group} x {config.window} rows do not compute every row alike on this machine: "
        f"{fault}; {remedy}"
    )


def _remedy(model: CachedLM, config: EngineConfig, hooked: Hooked) -> str:
    """Returns text for an error message: another window with a group that passed the trial, or other settings to
    try."""
    for other in _other_windows(model, config):
        for group in _groups(other.window):
            if _fault(model, group, other.window, config.capacity, "verify", hooked) is None:
                return f"set window={other.window} and group={group}"
    return f"try {other_settings(model)}"


def _fault(model: CachedLM, batch: int, width: int, capacity: int, phase: str, hooked: Hooked) -> str | None:
    """Returns text about the first difference in a trial of a pass shape; None if all bits are equal. Stores the
    result."""
    shapes = _known.setdefault(model, {})
    key = (batch, width, capacity, phase, hooked, *numeric_settings().values())
    if key in shapes:
        return shapes[key]
    difference = None
    with _hooks(model, hooked):
        for number in range(num_cycles(model, batch, width)):
            cycle = Cycle(model, batch, width, capacity, phase, number)
            while difference is None and cycle.has_more():
                difference = cycle.run()
    shapes[key] = difference
    return difference


@contextmanager
def _hooks(model: CachedLM, hooked: Hooked) -> Iterator[None]:
    """Inside the `with`, hooks like those of the run are on the model; they change and keep nothing."""
    with ExitStack() as stack:
        stack.enter_context(model.editing(hooked.edited, _change_nothing)) if hooked.edited else None
        stack.enter_context(model.capturing(hooked.listened, _ignore)) if hooked.listened else None
        yield


def _change_nothing(site: str, layer: int, value: Tensor) -> None: ...


def _ignore(site: str, layer: int, value: Tensor) -> None: ...
