"""Tries whether a fixed shape gives a token the same bits in every batch index and window slot, before a run relies on
it.

Decode-verify-rollback needs the same bits for a token in any row of the batch and any slot of the window. Libraries do
not promise it, and some shapes break it: a vectorised loop ends with a scalar tail, and a matrix product may treat its
last row by itself, so that the last rows of an odd shape are rounded differently (measured on CPU: SiLU over 9 rows of
48 in float32; 13 rows of 576 x 1536 in bfloat16).
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cacheprobe.core.config import EngineConfig
from cacheprobe.models.base import CachedLM
from cacheprobe.models.settings import numeric_settings
from cacheprobe.ops.attention.by_request import SPAN_STEP, Reach, reach_of_pass, reach_of_positions
from cacheprobe.ops.equality import bitwise

_NEARBY = 8
"""Larger groups that are tried for the error message."""
_GROUPS_OF_ONE_ROW = (16, 32, 8, 24, 48, 4, 2)
"""Groups to choose from for windows of one row: as many requests as a decode serves at little more cost than one."""
_GROUPS = (4, 8, 2, 16, 6, 12)
"""Groups to choose from for longer windows."""
_WINDOWS = (16, 8, 4, 2, 1)
"""Windows to try if no group serves the one that was chosen."""
_STREAMS = 5
"""Texts of a trial at most; neighbouring rows of a pass hold different ones."""
_STARTS = (0.0, 0.37, 0.71, 0.13, 1.0, 0.52, 0.89)
"""Where the texts begin, as shares of the capacity."""
_ROWS_TRIED, _MOST_CYCLES = 1000, 6
"""Rows x layers to compute at least in a trial, and rounds of other texts at most: a fault shows in a few elements
only, so small models are tried with more texts."""


class ShapeRefused(ValueError):
    """The trial found that a fixed shape does not give every row the same bits. Raised before a request is computed."""


@dataclass(frozen=True)
class Hooked:
    """Lists the hooks that a run puts on the model: a model with hooks may run another forward than one without."""

    listened: tuple[tuple[str, int], ...] = ()
    """(site, layer) of attention heads that are listened to."""
    edited: tuple[tuple[str, int], ...] = ()
    """(site, layer) that interventions change."""


_known: "WeakKeyDictionary[CachedLM, dict[Hashable, str | None]]" = WeakKeyDictionary()


def serving_config(
    model: CachedLM,
    config: EngineConfig,
    open_shapes: Collection[str] = (),
    hooked: Hooked = Hooked(),
    is_any_deterministic: bool = True,
    require_fit: Callable[[EngineConfig], None] | None = None,
) -> EngineConfig:
    """Returns the config with a window and a group whose passes are batch-invariant.

    open_shapes: which of "window" and "group" may be replaced. Another window is tried only if no group serves this
    one.
    is_any_deterministic: whether any request is deterministic. If none is, and no shape is batch-invariant, the first
    group tried is taken: drafts are then checked in a shape whose rounding may depend on the batch index, as in any
    other engine.
    require_fit: raises ValueError if the model or a request cannot have another window.
    Each shape is tried once for a model and the numeric settings of the process.
    Raises: ShapeRefused for a given group that is not batch-invariant, naming one that is; and if no shape is.
    """
    if "group" in open_shapes:
        windows = _other_windows(model, config, require_fit) if "window" in open_shapes else ()
        config = _choose(model, config, windows, hooked, is_any_deterministic)
    else:
        _require_verify(model, config, hooked)
    chunk = config.prefill_chunk, config.capacity, "prefill"
    if config.prefill_group > 1 and (fault := _fault(model, config.prefill_group, *chunk, hooked)):
        raise ShapeRefused(
            f"prefill passes of {config.prefill_group} x {config.prefill_chunk} rows do not compute every row alike on "
            f"this machine: {fault}; set prefill_group=1"
        )
    return config


def _choose(
    model: CachedLM, config: EngineConfig, others: Iterable[EngineConfig], hooked: Hooked, is_any_deterministic: bool
) -> EngineConfig:
    faults = []
    for shape in (config, *others):
        for group in _groups(shape.window):
            fault = _fault(model, group, shape.window, shape.capacity, "verify", hooked)
            if fault is None:
                return replace(shape, group=group)
            faults.append(f"{group} x {shape.window}: {fault}")
    groups = _groups(config.window)
    if not is_any_deterministic:
        return replace(config, group=groups[0])
    raise ShapeRefused(
        f"no group of {', '.join(map(str, sorted(groups)))} gives every row the same bits with window={config.window} "
        f"on this machine ({faults[0]}); {_remedy(model, config, hooked)}"
    )


def _groups(window: int) -> tuple[int, ...]:
    return _GROUPS_OF_ONE_ROW if window == 1 else _GROUPS


def _other_windows(
    model: CachedLM, config: EngineConfig, require_fit: Callable[[EngineConfig], None] | None = None
) -> Iterator[EngineConfig]:
    """Yields the config with each other window that its capacity, its other settings and the model allow."""
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
    size = config.window, config.capacity, "verify"
    fault = _fault(model, config.group, *size, hooked)
    if fault is None:
        return
    nearby = (*range(config.group + 1, config.group + _NEARBY), *_GROUPS)
    better = next((group for group in nearby if _fault(model, group, *size, hooked) is None), None)
    remedy = f"set group={better}" if better else _remedy(model, config, hooked)
    raise ShapeRefused(
        f"verify passes of {config.group} x {config.window} rows do not compute every row alike on this machine: "
        f"{fault}; {remedy}"
    )


def _remedy(model: CachedLM, config: EngineConfig, hooked: Hooked) -> str:
    """Returns a remedy, as text, for a window that no group serves."""
    for other in _other_windows(model, config):
        for group in _groups(other.window):
            if _fault(model, group, other.window, config.capacity, "verify", hooked) is None:
                return f"set window={other.window} and group={group}"
    return "try torch.set_num_threads(1), or path='bridge'"


def _fault(model: CachedLM, batch: int, width: int, capacity: int, phase: str, hooked: Hooked) -> str | None:
    """Returns in words the first token whose bits differ from the same token's elsewhere in the shape, or None."""
    shapes = _known.setdefault(model, {})
    key = (batch, width, capacity, phase, hooked, *numeric_settings().values())
    if key in shapes:
        return shapes[key]
    found, num_cycles = None, min(max(_ROWS_TRIED // (batch * width * model.n_layers), 1), _MOST_CYCLES)
    with ExitStack() as stack:
        stack.enter_context(model.editing(hooked.edited, _change_nothing)) if hooked.edited else None
        stack.enter_context(model.capturing(hooked.listened, _hear_nothing)) if hooked.listened else None
        for number in range(num_cycles):
            cycle = _Cycle(model, batch, width, capacity, phase, number)
            while found is None and cycle.has_more():
                found = cycle.run()
    shapes[key] = found
    return found


class _Cycle:
    """Computes a few texts several times at different batch indices, window slots and neighbours, and compares the
    bits.

    Every cache row holds one text. Logits, states, keys and values of a token must have the bits of the first pass. The
    texts begin at positions spread over the capacity, after keys and values drawn at random.
    """

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
        """By site, layer and stream: the bits of its tokens in the first pass."""
        self.found: str | None = None
        self.shift_of_row: list[int] = []
        self.is_compared: list[bool] = []
        self.stream_of_row: list[int] = []

    def _fill(self, draw: torch.Generator) -> None:
        held = self.cache.keys[0]
        for row in range(self.batch):
            start = self.starts[row % self.num_streams]
            for kept in (*self.cache.keys, *self.cache.values):
                if kept.shape[1:] != held.shape[1:] or (row < self.num_streams and kept is held):
                    noise = torch.randn(kept.shape[1], start, kept.shape[3], generator=draw)
                    kept[row, :, :start] = noise.to(kept)
                else:
                    kept[row, :, :start] = held[row % self.num_streams, :, :start]

    def has_more(self) -> bool:
        """Returns whether a pass is left to run. The last pass has other neighbours, if there are any."""
        return self.num_run < self.num_passes + (self.batch > 1)

    def run(self) -> str | None:
        """Runs the next pass; returns the first difference from the first pass, in words."""
        number, self.num_run = self.num_run, self.num_run + 1
        rows = [(b + number) % self.batch for b in range(self.batch)]
        turn = [(b + number + self.number) % len(self.shifts) for b in range(self.batch)]
        has_others = number == self.num_passes
        self.shift_of_row = [self.shifts[i] if number and not has_others else 0 for i in turn]
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
            for name, held in (("keys", keys), ("values", values)):
                pieces = [held[row, :, s : s + self.width].transpose(0, 1) for row, s in zip(rows, starts, strict=True)]
                self._compare(name, layer, pieces)
        return self.found

    def _replace_neighbours(self, fed: Tensor) -> None:
        """Every second row feeds another text, so that the rows between them have other neighbours than before."""
        for b in range(self.batch):
            if (b + self.number) % 2:
                self.is_compared[b] = False
                fed[b] = (fed[b] + 1 + b) % self.model.d_vocab

    def _compare(self, site: str, layer: int, value: "Tensor | Sequence[Tensor]") -> None:
        if self.found is not None:
            return
        for b, (stream, shift) in enumerate(zip(self.stream_of_row, self.shift_of_row, strict=True)):
            if not self.is_compared[b]:
                continue
            key = site, layer, stream
            if key not in self.first:
                self.first[key] = value[b].clone()
                continue
            known = self.first[key][shift:] if shift else self.first[key]
            ours = value[b][: len(known)]
            if not bitwise(ours, known):
                same = [bitwise(ours[t], known[t]) for t in range(len(known))]
                slot, what = same.index(False), site if site == "logits" else f"{site} of layer {layer}"
                self.found = f"row {b} slot {slot} gives other {what} than the same token in slot {slot + shift}"
                return


def _change_nothing(site: str, layer: int, value: Tensor) -> None: ...


def _hear_nothing(site: str, layer: int, value: Tensor) -> None: ...
