"""Tests, before a run, whether a pass shape gives a token the same bits at every batch index and every window slot.

Decode-verify-rollback relies on this. Libraries do not promise it, and some shapes break it: a vectorised loop ends
with a scalar tail, and a matrix product may treat its last row by itself, so that the last rows of an odd shape are
rounded differently (measured on CPU: SiLU over 9 rows of 48 in float32; 13 rows of 576 x 1536 in bfloat16).
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cacheprobe.core.config import EngineConfig
from cacheprobe.models.base import CachedLM
from cacheprobe.models.settings import numeric_settings
from cacheprobe.ops.attention.by_request import SPAN_STEP, Reach, reach_of_pass, reach_of_positions
from cacheprobe.ops.equality import bitwise

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
_STREAMS = 5
"""Maximum number of different texts in a trial; neighbouring batch indices hold different ones."""
_STARTS = (0.0, 0.37, 0.71, 0.13, 1.0, 0.52, 0.89)
"""Positions at which the texts begin, as shares of the capacity."""
_ROWS_TRIED, _MOST_CYCLES = 1000, 6
"""Minimum of tokens x layers that a trial computes, and maximum of its cycles, each with new texts. Small models need
more texts, because a fault shows in few elements."""


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
    chunk = config.prefill_chunk, config.capacity, "prefill"
    if config.prefill_group > 1 and (fault := _fault(model, config.prefill_group, *chunk, hooked)):
        raise ShapeRefused(
            f"prefill passes of {config.prefill_group} x {config.prefill_chunk} rows do not compute every row alike on "
            f"this machine: {fault}; set prefill_group=1"
        )
    return config


def narrow_widths(model: CachedLM, config: EngineConfig, hooked: Hooked = Hooked()) -> tuple[int, ...]:
    """Returns the widths, ascending and below the window, in which verify passes give every token the bits that it has
    in a whole window: 2, 4 and 8, as far as a trial on random texts finds no difference. A pass of short drafts then
    computes fewer pads.

    Returns () unless products run in compiled loops, whose rows do not depend on each other, and attention runs by
    request. Returns () with interventions, which may look at a whole pass.
    """
    is_by_row = getattr(model, "operations", None) is not None and model.attends_by_request
    if not is_by_row or hooked.edited:
        return ()
    known, shape = _known.setdefault(model, {}), (config.group, config.window, config.capacity)
    settings = (hooked, *numeric_settings().values())
    faults = {width: (width, "narrow", *shape, *settings) for width in _NARROW if width < config.window}
    if untried := {width: key for width, key in faults.items() if key not in known}:
        with model.capturing(hooked.listened, _ignore) if hooked.listened else nullcontext():
            for number in range(_num_cycles(model, config.group, config.window)):
                cycle = _Cycle(model, *shape, "verify", number)
                cycle.run()
                for width, key in untried.items():
                    known[key] = known.get(key) or cycle.fault_at(width)
    return tuple(width for width, key in faults.items() if known[key] is None)


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
    return "try torch.set_num_threads(1), or path='bridge'"


def _fault(model: CachedLM, batch: int, width: int, capacity: int, phase: str, hooked: Hooked) -> str | None:
    """Returns text about the first difference in a trial of a pass shape; None if all bits are equal. Stores the
    result."""
    shapes = _known.setdefault(model, {})
    key = (batch, width, capacity, phase, hooked, *numeric_settings().values())
    if key in shapes:
        return shapes[key]
    difference = None
    with ExitStack() as stack:
        stack.enter_context(model.editing(hooked.edited, _change_nothing)) if hooked.edited else None
        stack.enter_context(model.capturing(hooked.listened, _ignore)) if hooked.listened else None
        for number in range(_num_cycles(model, batch, width)):
            cycle = _Cycle(model, batch, width, capacity, phase, number)
            while difference is None and cycle.has_more():
                difference = cycle.run()
    shapes[key] = difference
    return difference


def _num_cycles(model: CachedLM, batch: int, width: int) -> int:
    """Returns the number of cycles of a trial, each with new texts."""
    return min(max(_ROWS_TRIED // (batch * width * model.n_layers), 1), _MOST_CYCLES)


class _Cycle:
    """Computes the same texts in several passes, at other batch indices, slots and neighbours; compares the bits."""

    def __init__(self, model: CachedLM, batch: int, width: int, capacity: int, phase: str, number: int) -> None:
        self.model, self.batch, self.width, self.phase, self.number = model, batch, width, phase, number
        has_room = width > 1 and capacity >= 2 * width and phase == "verify"
        self.shifts = sorted({0, 1, width // 2, width - 1}) if has_room else [0]
        self.num_streams = min(batch, _STREAMS)
        self.num_passes = 1 if batch == len(self.shifts) == 1 else 4 if len(self.shifts) > 1 else 3
        length = width + max(self.shifts)
        draw = torch.Generator().manual_seed(number)
        self.texts = torch.randint(0, model.d_vocab, (self.num_streams, length), generator=draw)
        shares = [_STARTS[(2 * number + j) % len(_STARTS)] for j in range(self.num_streams)]
        self.starts = [int(share * (capacity - length)) for share in shares]
        self.cache = model.new_cache(batch, capacity)
        self.num_run = 0
        self._fill(draw)
        self.first: dict[tuple[str, int, int], Tensor] = {}
        """By (site, layer, text): the values of the text's tokens in the first pass."""
        self.found: str | None = None
        self.shift_of_row: list[int] = []
        self.is_compared: list[bool] = []
        self.stream_of_row: list[int] = []

    def _fill(self, draw: torch.Generator) -> None:
        """Fills the slots before each text with random keys and values, equal in all cache rows with the same text."""
        first = self.cache.keys[0]
        for row in range(self.batch):
            start = self.starts[row % self.num_streams]
            for tensor in (*self.cache.keys, *self.cache.values):
                if tensor.shape[1:] != first.shape[1:] or (row < self.num_streams and tensor is first):
                    noise = torch.randn(tensor.shape[1], start, tensor.shape[3], generator=draw)
                    tensor[row, :, :start] = noise.to(tensor)
                else:  # layers of one shape share the noise of the first
                    tensor[row, :, :start] = first[row % self.num_streams, :, :start]

    def has_more(self) -> bool:
        """Returns True if a pass is left to run."""
        return self.num_run < self.num_passes + (self.batch > 1)

    def fault_at(self, width: int) -> str | None:
        """Runs two passes of another width, with other offsets. Returns text about the first difference from the first
        pass, or None."""
        self.width, self.found = width, None
        return self.run(has_others=False) or self.run(has_others=False)

    def run(self, has_others: bool | None = None) -> str | None:
        """Runs the next pass. Returns text about the first difference from the first pass, or None.

        has_others: whether every second text is another; by default in the last pass alone."""
        number, self.num_run = self.num_run, self.num_run + 1
        rows = [(b + number) % self.batch for b in range(self.batch)]
        shift_index = [(b + number + self.number) % len(self.shifts) for b in range(self.batch)]
        has_others = number == self.num_passes if has_others is None else has_others
        self.shift_of_row = [self.shifts[i] if number and not has_others else 0 for i in shift_index]
        self.stream_of_row = [row % self.num_streams for row in rows]
        of_row = list(zip(self.stream_of_row, self.shift_of_row, strict=True))
        starts = [self.starts[stream] + shift for stream, shift in of_row]
        fed = torch.stack([self.texts[stream, shift : shift + self.width] for stream, shift in of_row])
        self.is_compared = [True] * self.batch
        if has_others:
            self._replace_neighbours(fed)
        span, reach = self.cache.capacity, None
        if self.model.attends_by_request:
            of = reach_of_pass if self.phase == "prefill" and self.width > SPAN_STEP else reach_of_positions
            reach = Reach(tuple(of(start, self.width, self.cache.capacity) for start in starts))
            span = reach.span
        sites = [(site, layer) for layer in range(self.model.n_layers) for site in "STC"]
        with self.cache.attending_to(span, reach), self.model.capturing(sites, self._compare):
            logits = self.model.forward(fed, self.cache, rows, starts)
        self._compare("logits", self.model.n_layers, logits)
        for layer, (keys, values) in enumerate(zip(self.cache.keys, self.cache.values, strict=True)):
            for name, tensor in (("keys", keys), ("values", values)):
                pieces = [
                    tensor[row, :, s : s + self.width].transpose(0, 1) for row, s in zip(rows, starts, strict=True)
                ]
                self._compare(name, layer, pieces)
        return self.found

    def _replace_neighbours(self, fed: Tensor) -> None:
        """Changes the tokens `fed` [b, t] at every second batch index in place; these are not compared."""
        for b in range(self.batch):
            if (b + self.number) % 2:
                self.is_compared[b] = False
                fed[b] = (fed[b] + 1 + b) % self.model.d_vocab

    def _compare(self, site: str, layer: int, value: "Tensor | Sequence[Tensor]") -> None:
        """Stores a value [b, t, ...] in the first pass; later compares it, and sets `found` to text on a difference."""
        if self.found is not None:
            return
        for b, (stream, shift) in enumerate(zip(self.stream_of_row, self.shift_of_row, strict=True)):
            if not self.is_compared[b]:
                continue
            key = site, layer, stream
            if key not in self.first:
                self.first[key] = value[b].clone()
                continue
            known = self.first[key][shift : shift + self.width]
            ours = value[b][: len(known)]
            if not bitwise(ours, known):
                same = [bitwise(ours[t], known[t]) for t in range(len(known))]
                slot, what = same.index(False), site if site == "logits" else f"{site} of layer {layer}"
                self.found = f"row {b} slot {slot} gives other {what} than the same token in slot {slot + shift}"
                return


def _change_nothing(site: str, layer: int, value: Tensor) -> None: ...


def _ignore(site: str, layer: int, value: Tensor) -> None: ...
