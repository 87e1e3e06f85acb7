"""Bugs of the cache: provenance, lengths, masks, rows that leak, and of the model over it."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from cacheprobe.ops.attention import spans_of_pass
from tests.mutations.in_engine import COMMITTER, RUN, SCHEDULER
from tests.mutations.mutate import bug, instead, without

CACHE = "cacheprobe.kvcache.cache:KVCache"
STAGED = "cacheprobe.kvcache.staged:StagedCache"
MARKS_VERIFIED = f"{COMMITTER}.mark_slots"


def _keeps_drafted(real: Any) -> Any:
    def run(self: Any, a_pass: Any) -> Any:
        held = (*self.cache.keys, *self.cache.values)
        before = [one.clone() for one in held]
        out = real(self, a_pass)
        for entry in a_pass.entries if a_pass.phase == "verify" and not a_pass.is_rebuild else ():
            row, drafted = entry.state.cache_row, slice(entry.start, entry.start + len(entry.state.draft))
            for one, kept in zip(held, before, strict=True):
                one[row, :, drafted] = kept[row, :, drafted]
        return out

    return run


def _marks(change: Any) -> Any:
    """Verified positions are marked with the (end, provenance) of `change(end)`."""

    def make(real: Any) -> Any:
        def mark_slots(self: Any, state: Any, start: int, end: int, provenance: str) -> None:
            real(self, state, start, *(change(end) if provenance == "verified" else (end, provenance)))

        return mark_slots

    return make


def _adds(real: Any) -> Any:
    def store(self: Any, layer: int, k: Any, v: Any, *more: Any) -> Any:
        width = k.shape[2]
        places = zip(self.rows, self.starts, strict=True)
        held = [self.keys[layer][row, :, start : start + width] for row, start in places]
        return real(self, layer, k + torch.stack(held), v, *more)

    return store


def _forgets_the_last(real: Any) -> Any:
    def copy_row(self: Any, source: int, target: int, length: int) -> None:
        before = [held[target, :, length - 1].clone() for held in (*self.keys, *self.values)]
        real(self, source, target, length)
        for held, old in zip((*self.keys, *self.values), before, strict=True):
            held[target, :, length - 1] = old

    return copy_row


def _after_rollback(harm: Any) -> Any:
    """After a verdict with a rollback, `harm(cache, row)` is done."""

    def make(real: Any) -> Any:
        def apply_verdict(self: Any, state: Any, verdict: Any) -> None:
            real(self, state, verdict)
            if verdict.is_rollback:
                harm(self.cache, state.cache_row)

        return apply_verdict

    return make


def _shorten_others(cache: Any, row: int) -> None:
    cache.lengths[:] = (cache.lengths - 1).clamp(min=0)
    cache.lengths[row] += 1


def _keeps_cancelled(real: Any) -> Any:
    def retire(self: Any) -> Any:
        kept, release = {s.cache_row for s in self.running if s.finish == "cancelled"}, self.cache.release
        with patch.object(self.cache, "release", lambda row: None if row in kept else release(row)):
            return real(self)

    return retire


def _from_the_window(real: Any) -> Any:
    def inputs(*given: Any, **named: Any) -> Any:
        made = real(*given, **named)
        at = made["position_ids"]
        return {**made, "position_ids": at - at[:, :1]}

    return inputs


def _one_slot_later(real: Any) -> Any:
    def mask(self: Any, *given: Any) -> Any:
        with patch.object(self, "positions", self.positions + 1):
            return real(self, *given)

    return mask


def _drafter_is_canonical(real: Any) -> Any:
    def on_commit(self: Any, request_id: int, *more: Any) -> None:
        decided = [row for row in self._undecided[request_id] if not row.role]
        real(self, request_id, *more)
        for row in decided:
            row.status = "superseded" if row.phase == "verify" else "committed"

    return on_commit


def _tile_as_needed(real: Any) -> Any:
    def read_tile(self: Any) -> None:
        taken = self._take()
        count = sum(len(queued.layers) for queued in taken)
        with (
            patch("cacheprobe.trace.recording.lens_reader.LENS_TILE", count),
            patch.object(self, "_take", lambda: taken),
        ):
            real(self)

    return read_tile


def _stays(real: Any) -> Any:
    def listen(*given: Any) -> Any:
        real(*given)
        return SimpleNamespace(remove=lambda: None)

    return listen


def _no_grad_after(real: Any) -> Any:
    def prepare(*given: Any) -> Any:
        torch.set_grad_enabled(False)
        return real(*given)

    return prepare


MUTATIONS = [
    # -- who wrote a row
    bug("the fast path's keys and values stay", ("02", "13_kv_provenance"), RUN, _keeps_drafted),
    bug(
        "the ledger calls verified rows provisional", ("13",), MARKS_VERIFIED, _marks(lambda end: (end, "provisional"))
    ),
    bug("keys are added to what a slot held", ("04", "13"), f"{STAGED}.store", _adds),
    bug("one row of a shared prompt is forgotten", ("22",), f"{CACHE}.copy_row", _forgets_the_last),
    # -- lengths
    bug("rejected rows are not truncated", ("14",), f"{COMMITTER}.apply_verdict", without("_truncate")),
    bug("verified rows reach one too far", ("14",), MARKS_VERIFIED, _marks(lambda end: (end + 1, "verified"))),
    bug("a rollback shortens everybody", ("14", "16"), f"{COMMITTER}.apply_verdict", _after_rollback(_shorten_others)),
    bug(
        "a rollback zeroes the rows of its neighbour",
        ("16",),
        f"{COMMITTER}.apply_verdict",
        _after_rollback(lambda cache, row: cache.scrub((row + 1) % cache.rows, 0)),
    ),
    # -- rows
    bug("the row of a cancelled request is kept", ("15",), f"{SCHEDULER}.retire", _keeps_cancelled),
    bug("a preempted request's row is kept", ("15",), f"{COMMITTER}.preempt", without("cache.release")),
    bug(
        "a row is given twice",
        ("15",),
        f"{CACHE}.allocate",
        instead(lambda self: self._taken.__setitem__(0, True) or 0),
    ),
    bug(
        "releasing twice is allowed",
        ("15_no_double_free",),
        f"{CACHE}.release",
        lambda real: lambda self, row: self._taken.__setitem__(row, True) or real(self, row),
    ),
    # -- masks and shapes
    bug(
        "the mask shows one slot more",
        ("06_padding_independence_in_one", "08"),
        f"{STAGED}.mask",
        _one_slot_later,
    ),
    bug(
        "attention runs over the used length",
        ("07_window_offset_independence_of_shapes",),
        "cacheprobe.engine.passes:spans_of",
        instead(lambda phase, width: spans_of_pass),
    ),
    bug(
        "positions count from the window's start",
        ("07",),
        "cacheprobe.models.plain.lm:forward_inputs",
        _from_the_window,
    ),
    bug(
        "the cache begins as NaN",
        ("02", "05"),
        "cacheprobe.kvcache.cache:zero_slots",
        lambda real: lambda *given: real(*given).fill_(torch.nan),
    ),
    bug(
        "a neighbour's row is attended",
        ("05",),
        f"{STAGED}.row_view",
        lambda real: lambda self, layer, batch_row, span: real(self, layer, batch_row - 1, span),
    ),
    bug(
        "logits differ from call to call",
        ("04",),
        "cacheprobe.models.plain.lm:PlainLM._forward",
        lambda real: lambda *given, **more: (out := real(*given, **more)) + 1e-4 * torch.rand_like(out),
    ),
    # -- the capture
    bug(
        "the drafter's rows are canonical",
        ("02",),
        "cacheprobe.trace.recording.recorder:Recorder.on_commit",
        _drafter_is_canonical,
    ),
    bug(
        "a tile of readings is as high as it needs",
        ("09_fixed_shape_also",),
        "cacheprobe.trace.recording.lens_reader:LensReader._read_tile",
        _tile_as_needed,
    ),
    # -- switches
    bug("hooks stay on the model", ("26",), "cacheprobe.models.plain.sites:change", _stays),
    bug(
        "attention leaves one thread behind",
        ("26",),
        "cacheprobe.ops.attention:_Threads.__exit__",
        lambda real: lambda self, *error: setattr(self, "_all", self._now) or real(self, *error),
    ),
    bug("gradients stay off", ("26",), "cacheprobe.engine.loop:Engine", _no_grad_after),
]
