"""Computes random texts in several passes, at other batch indices, slots and neighbours, and compares the bits. Keeps
what trials found in the user's cache folder, so that a later process need not try again.

A file of results belongs to one fingerprint: weights, libraries, processor and settings of the process. So no result is
used where the bits may be others.
"""

import json
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cacheprobe.core.files import write_json
from cacheprobe.core.hook_names import SITES
from cacheprobe.kvcache.recurrent import memory_of
from cacheprobe.kvcache.staged import PassAttention
from cacheprobe.models.base import CachedLM
from cacheprobe.models.converted import cache_directory
from cacheprobe.models.settings import processor_name
from cacheprobe.ops.attention import AttentionSpans, spans_of
from cacheprobe.ops.compiled.basics import SOURCES
from cacheprobe.ops.equality import bitwise

_STREAMS = 5
"""Maximum number of different texts in a trial; neighbouring batch indices hold different ones."""
_STARTS = (0.0, 0.37, 0.71, 0.13, 1.0, 0.52, 0.89)
"""Positions at which the texts begin, as shares of the capacity."""
_ROWS_TRIED, _MOST_TRIALS = 1000, 6
"""Minimum of tokens x layers that the trials of a shape compute, and most trials, each with new texts. Small models
need more texts, because a fault shows in few elements."""


PARTS = {
    "pre": "the residual stream that enters",
    "keys": "the keys (made by a norm and a product)",
    "values": "the values (made by a norm and a product)",
    "T": "the attention output (made by attention and a product)",
    "C": "the MLP output (made by a norm, products and an activation)",
    "S": "the residual stream that leaves",
}
"""What is compared in a layer, by site, in the order of computation; the values are words for messages."""


def order_of(at: tuple[int, str]) -> tuple[int, int]:
    """Returns a key that sorts (layer, site) by the order of computation."""
    return at[0], list(PARTS).index(at[1])


def all_sites(model: CachedLM) -> list[tuple[str, int]]:
    """Returns (site, layer) of S, T and C of every layer."""
    return [(site, layer) for layer in range(model.n_layers) for site in SITES]


def num_trials(model: CachedLM, batch: int, width: int) -> int:
    """Returns the number of trials of a shape, each with new texts."""
    return min(max(_ROWS_TRIED // (batch * width * model.n_layers), 1), _MOST_TRIALS)


class ShapeTrial:
    """Computes the same texts in several passes, at other batch indices, slots and neighbours; compares the bits."""

    def __init__(
        self,
        model: CachedLM,
        batch: int,
        width: int,
        capacity: int,
        phase: str,
        number: int,
        is_alone: bool = False,
        lengths: Sequence[int] = (),
    ) -> None:
        """is_alone: each text is computed by itself first; by default the first pass computes all together.  lengths:
        number of tokens of each text; by default all have `width` tokens."""
        self.model, self.batch, self.width, self.phase, self.number = model, batch, width, phase, number
        has_room = width > 1 and capacity >= 2 * width and phase == "verify"
        self.shifts = sorted({0, 1, width // 2, width - 1}) if has_room else [0]
        self.num_streams = len(lengths) or min(batch, _STREAMS)
        self.lengths = lengths
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
        self.found: tuple[tuple[int, int], str] | None = None
        """Order of computation of, and text about, the first difference in the last pass."""
        self.is_alone, self.window = is_alone, width
        self.shift_of_row: list[int] = []
        self.is_compared: list[bool] = []
        self.text_of_row: list[int] = []
        if is_alone:
            self._compute_alone()

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
        if (memory := memory_of(self.cache)) is not None:
            for stream, start in enumerate(self.starts):
                memory.fill(range(stream, self.batch, self.num_streams), start - 1, draw)

    def fault(self) -> str | None:
        """Runs the passes of the fixed shape. Returns text about the first difference from the first pass, or None."""
        numbers = range(self.num_passes + (self.batch > 1))
        return next(filter(None, (self.run(has_others=number == self.num_passes) for number in numbers)), None)

    def run(self, has_others: bool = False) -> str | None:
        """Runs the next pass. Returns text about the first difference from the first pass, or None. has_others: every
        second text is another one."""
        number, self.num_run = self.num_run, self.num_run + 1
        rows = [(b + number) % self.batch for b in range(self.batch)]
        shifts = self._shifts(number, self.batch) if number and not has_others else [0] * self.batch
        return self._run(rows, shifts, has_others)

    def run_at(self, height: int, width: int) -> str | None:
        """Runs two passes of another number of rows and another width, with other offsets. Returns text about the first
        difference from the first computation, or None."""
        self.width, self.found = width, None
        fault = None
        for number in (self.num_run, self.num_run + 1):
            rows = [(b + number) % self.batch for b in range(height)]
            fault = fault or self._run(rows, self._shifts(number, height), False)
        self.num_run += 2
        if fault is not None and self.is_alone:  # later passes attend to what this one wrote
            self._compute_alone()
        return fault

    def _compute_alone(self) -> None:
        """Computes each text in a pass of its own, and writes its keys and values to all cache rows of the text."""
        self.width, self.found = self.window, None
        for stream, start in enumerate(self.starts):
            if self.lengths:
                self.width = self.lengths[stream]
            self._run([stream], [0], False)
            for tensor in (*self.cache.keys, *self.cache.values):
                written = slice(start, start + self.window)
                tensor[stream :: self.num_streams, :, written] = tensor[stream : stream + 1, :, written].clone()
            if (memory := memory_of(self.cache)) is not None:
                for row in range(stream + self.num_streams, self.batch, self.num_streams):
                    memory.share(memory, stream, row, self.cache.capacity)

    def _shifts(self, number: int, height: int) -> list[int]:
        """Returns the offset, in slots, of each batch index's text in pass `number`."""
        return [self.shifts[(b + number + self.number) % len(self.shifts)] for b in range(height)]

    def _run(self, rows: list[int], shifts: list[int], has_others: bool) -> str | None:
        """Runs a pass over these cache rows, with an offset for each. Returns text about the first difference, or
        None."""
        self.shift_of_row = shifts
        self.text_of_row = [row % self.num_streams for row in rows]
        of_row = list(zip(self.text_of_row, self.shift_of_row, strict=True))
        starts = [self.starts[stream] + shift for stream, shift in of_row]
        fed = torch.stack([self.texts[stream, shift : shift + self.width] for stream, shift in of_row])
        self.is_compared = [True] * len(rows)
        if has_others:
            self._replace_neighbours(fed)
        attention = PassAttention()
        if self.model.attends_by_request:
            counts = [self.lengths[stream] if self.lengths else self.width for stream in self.text_of_row]
            pieces = (
                spans_of(self.phase, count)(start, count, self.cache.capacity)
                for start, count in zip(starts, counts, strict=True)
            )
            attention = PassAttention(spans=AttentionSpans(tuple(pieces), bool(self.lengths) and len(rows) > 1))
        with self.model.capturing(all_sites(self.model), self._compare):
            logits = self.model.forward(fed, self.cache, rows, starts, attention=attention)
        self._compare("logits", self.model.n_layers, logits)
        for layer, (keys, values) in enumerate(zip(self.cache.keys, self.cache.values, strict=True)):
            for name, tensor in (("keys", keys), ("values", values)):
                pieces = [
                    tensor[row, :, s : s + self.width].transpose(0, 1) for row, s in zip(rows, starts, strict=True)
                ]
                self._compare(name, layer, pieces)
        return None if self.found is None else self.found[1]

    def _replace_neighbours(self, fed: Tensor) -> None:
        """Changes the tokens `fed` [b, t] at every second batch index in place; these are not compared."""
        for b in range(len(fed)):
            if (b + self.number) % 2:
                self.is_compared[b] = False
                fed[b] = (fed[b] + 1 + b) % self.model.d_vocab

    def _compare(self, site: str, layer: int, value: "Tensor | Sequence[Tensor]") -> None:
        """Keeps the first value [t, ...] of each text, and compares every other one with it, bit for bit. Keeps in
        `found` the difference that a forward computes first."""
        order = (layer, 0) if site == "logits" else order_of((layer, site))
        if self.found is not None and self.found[0] <= order:
            return
        for b, (text, shift) in enumerate(zip(self.text_of_row, self.shift_of_row, strict=True)):
            if not self.is_compared[b]:
                continue
            key = site, layer, text
            if key not in self.first:
                self.first[key] = value[b].clone()
                continue
            known = self.first[key][shift : shift + self.width]
            ours = value[b][: len(known)]
            if not bitwise(ours, known):
                same = [bitwise(ours[t], known[t]) for t in range(len(known))]
                slot, what = same.index(False), site if site == "logits" else f"{site} of layer {layer}, {PARTS[site]},"
                where = f"row {b} slot {slot} gives other {what} than the same token"
                self.found = order, f"{where} {'alone ' * self.is_alone}in slot {slot + shift}"
                return


# -- results

_known: "WeakKeyDictionary[CachedLM, dict[Hashable, str | None]]" = WeakKeyDictionary()
"""By model: results of this process, and those that it has read."""


def known_results(model: CachedLM, keys: Collection[Hashable] = ()) -> Mapping[Hashable, str | None]:
    """Returns text about the first difference that a trial found, None without one, by shape, hooks and settings; among
    them the stored results of `keys`."""
    known = _known.setdefault(model, {})
    if (missing := [key for key in keys if key not in known]) and (path := _path(model)) is not None:
        stored = _read(path)
        known.update({key: None for key in missing if repr(key) in stored})
    return known


def remember(model: CachedLM, found: Mapping[Hashable, str | None]) -> None:
    """Keeps results, and stores those without a difference if the cache folder can be written."""
    _known.setdefault(model, {}).update(found)
    equal = [repr(key) for key, fault in found.items() if fault is None]
    if not equal or (path := _path(model)) is None:
        return
    with suppress(OSError):
        write_json(path, sorted({*_read(path), *equal}))


def _path(model: CachedLM) -> Path | None:
    """Returns the file of a model's results; None if another process cannot know whether its model is the same: one
    with hooks of the user, or of the user's own class."""
    if getattr(model, "has_own_hooks", True) or type(model).__module__.split(".")[0] != __name__.split(".")[0]:
        return None
    facts = {**model.fingerprint(), "processor": processor_name(), "trials": _OWN_CODE, "loops": SOURCES}
    return cache_directory() / "trials" / f"{sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]}.json"


_OWN_CODE = sha256(Path(__file__).read_bytes()).hexdigest()[:12]


def _read(path: Path) -> set[str]:
    try:
        return {str(one) for one in json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError):
        return set()
