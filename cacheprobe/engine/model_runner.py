"""Runs one forward pass of the engine, and reports the pass to the observer. Commits no token."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from cacheprobe.core.devices import is_out_of_memory
from cacheprobe.core.records import ForwardRecord, Observer, Thought
from cacheprobe.edits.interventions.editor import Editor
from cacheprobe.engine.checker import RecomputeChecker
from cacheprobe.engine.drafts.target_states import TargetStates
from cacheprobe.engine.passes import EngineError, Pass
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.sampling import top_two


class ModelRunner:
    """Runs passes of the model over one cache. `step` is the number of the last step; -1 at first."""

    def __init__(
        self,
        model: CachedLM,
        cache: KVCache,
        observer: Observer,
        checker: RecomputeChecker,
        editor: Editor | None = None,
        step: int = -1,
    ) -> None:
        """Prepares passes of `model` over `cache`, which are reported to `observer`.

        checker: computes tokens of some passes twice and compares the bits.
        editor: applies interventions; `run` calls its method `aim` before each pass.
        step: number of the last step that an earlier process has run; -1 for a new run.
        """
        self.model, self.cache, self.observer = model, cache, observer
        self.checker, self.editor, self.step = checker, editor, step
        self.seconds = 0.0
        self.shape = (0, 0)
        self.targets: TargetStates | None = None
        """Keeps the states that a drafter's head reads; None if it reads none."""

    def next_step(self) -> int:
        """Counts a step and returns its number."""
        self.step += 1
        return self.step

    def skip(self) -> None:
        """Counts a step without a pass of the model."""
        self.next_step()
        self.shape, self.seconds = (0, 0), 0.0

    def run(self, a_pass: Pass) -> Tensor:
        """Runs a pass. Returns what CachedLM.forward returns: logits [b, t, v], or the residual stream [b, t, m].

        Raises: EngineError if the model fails or gives NaN or infinity, or if the observer runs out of memory;
        ShapeFault if tokens that were computed twice have different bits.
        """
        self.shape, began = a_pass.shape, time.perf_counter()
        self.checker.plan(a_pass)
        slots = a_pass.row_slots()
        if not a_pass.is_rebuild:
            with self.out_of_memory_named(a_pass):
                self.observer.before_forward(a_pass.step, a_pass.phase, slots, a_pass.shape)
        if self.editor is not None:
            self.editor.aim(a_pass.step, a_pass.token_slots())
        try:
            try:
                reading = nullcontext() if self.targets is None else self.targets.reading(a_pass)
                with self.checker.watching(a_pass), reading:
                    out = self.model.forward(
                        a_pass.token_ids,
                        self.cache,
                        a_pass.cache_rows,
                        a_pass.starts,
                        num_layers=a_pass.num_layers,
                        logit_slots=a_pass.logit_slots,
                        attention=a_pass.attention(self.model.attends_by_request),
                    )
            finally:
                if self.editor is not None:
                    self.editor.rest()
            difference = self.checker.compare(a_pass, out)
        except Exception as error:
            raise self._failed(a_pass, error) from error
        if a_pass.is_compared:
            self.observer.on_compared(a_pass.step, None if difference is None else str(difference))
        if difference is not None:
            raise self.checker.fault(a_pass, difference)
        with self.out_of_memory_named(a_pass):
            self._require_numbers(a_pass, out)
            if not a_pass.is_rebuild:
                logits = out if a_pass.num_layers is None and a_pass.logit_slots is None else None
                rewritten = {} if self.editor is None else self.editor.rewritten
                record = ForwardRecord(a_pass.step, a_pass.phase, slots, logits, a_pass.num_layers, rewritten)
                self.observer.after_forward(record)
        self._report_thoughts(a_pass)
        self.seconds = time.perf_counter() - began
        return out

    def _failed(self, a_pass: Pass, error: Exception, phase: str | None = None) -> EngineError:
        """Returns an EngineError that names the pass, its requests and the error that the pass ended with."""
        names = ", ".join(str(entry.state.request_id) for entry in a_pass.entries)
        batch, width = a_pass.shape
        return EngineError(
            f"step {a_pass.step}: the {phase or a_pass.phase} pass of requests {names}, {batch} x {width}, failed with "
            f"{type(error).__name__}: {error!s:.200}; nothing of it was committed"
        )

    @contextmanager
    def out_of_memory_named(self, a_pass: Pass, phase: str | None = None) -> Iterator[None]:
        """Turns an out-of-memory error inside the `with` into an EngineError. phase: another name of the pass."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._failed(a_pass, error, phase) from error

    def _report_thoughts(self, a_pass: Pass) -> None:
        """Reports the thoughts (of Thinking States) whose chunk ends in a real token; none in a pass of a rebuild."""
        by_row = {entry.state.cache_row: entry for entry in a_pass.entries}
        for made in self.cache.take_thoughts():
            entry = by_row.get(made.cache_row)
            if a_pass.is_rebuild or entry is None or not entry.start <= made.end < entry.end:
                continue
            self.observer.on_thought(
                Thought(
                    entry.state.request_id,
                    a_pass.step,
                    a_pass.phase,
                    (made.end + 1) // len(made.state) - 1,
                    made.end,
                    made.token_ids,
                    made.has_ended,
                    made.logprobs,
                    made.first_logits,
                    made.state,
                )
            )

    def _require_numbers(self, a_pass: Pass, out: Tensor) -> None:
        """Raises: EngineError if the output for a real token contains NaN, or if its maximum is infinite."""
        if out.device.type != "cpu" and a_pass.num_layers is None:
            a_pass.best = top_two(out.flatten(0, 1)).cpu()
            top = a_pass.best[:, 3].view(out.shape[:2])
        else:
            top = out.amax(-1).cpu()  # the largest number of each slot
        if bool(torch.isfinite(top).all()):
            return
        chosen = a_pass.logit_slots
        slots = range(a_pass.width) if chosen is None else chosen
        for entry, b in zip(a_pass.entries, a_pass.batch_index, strict=True):
            own = [i for i, slot in enumerate(slots) if slot < len(entry.token_ids)]
            own = own[-1:] if len(slots) < a_pass.width else own  # of chosen slots, the entry needs only its last
            for i in own:
                if not torch.isfinite(top[b, i]):
                    raise EngineError(
                        f"request {entry.state.request_id} step {a_pass.step}: logits for position "
                        f"{entry.start + slots[i] + 1} hold {'NaN' if torch.isnan(top[b, i]) else float(top[b, i])}; "
                        f"nothing of this step was committed; load {self.model.name} in float32 or check its weights"
                    )
