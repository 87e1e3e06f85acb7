"""Records the passes of a draft head, and applies interventions to them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from cacheprobe.core.records import HEAD_PHASE, Finished, ForwardRecord, Observer, RowSlot, StepRecord
from cacheprobe.edits.interventions.editor import Editor, TokenSlot
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.heads.lm import DraftHeadLM
from cacheprobe.trace.recording.recorder import Recorder


class HeadPasses(Observer):
    """Gives a draft head's rows to a recorder of their own, with the verdicts of the run; applies interventions.

    A row of a committed token is recorded once, also if the head computes it again after a preemption.
    """

    def __init__(self, head: DraftHeadLM, recorder: Recorder, editor: Editor | None, newest: Mapping[int, int]) -> None:
        """recorder: of the head as its model.  editor: of the interventions on the head's layers; None without any.
        newest: of a run that goes on, see `newest`."""
        self.head, self.recorder, self._editor = head, recorder, editor
        self.newest = {**newest}
        """By request id: the last position whose canonical row is recorded."""
        self._unconfirmed: dict[int, int] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Inside the `with`, the hooks of interventions and recorder are on the head."""
        with ExitStack() as stack:
            if self._editor is not None:  # first, so that the changed states are recorded
                stack.enter_context(self.head.editing(self._editor.sites, self._editor.edit))
            stack.enter_context(self.head.capturing(self.recorder.wanted(), self.recorder.on_state))
            yield

    @contextmanager
    def around(self, step: int, rows: Sequence[RowSlot], shape: tuple[int, int]) -> Iterator[None]:
        """Records the pass that runs inside the `with`. step: number of the draft's step.  shape: (batch, token
        slots)."""
        newest = {**self.newest, **self._unconfirmed}
        is_again = [row.is_canonical and row.position <= newest.get(row.request_id, 0) for row in rows]
        new = tuple(row for row, was in zip(rows, is_again, strict=True) if not was)
        if self._editor is not None:
            given = [(r.request_id, r.batch_index, r.slot, r.position, HEAD_PHASE, r.token_id) for r in rows]
            self._editor.aim(step, [TokenSlot(*one, was) for one, was in zip(given, is_again, strict=True)])
        if new:
            self.recorder.before_forward(step, HEAD_PHASE, new, shape)
        try:
            yield
        finally:
            if self._editor is not None:
                self._editor.rest()
        if new:
            rewritten = {} if self._editor is None else _without(self._editor.rewritten, is_again)
            self.recorder.after_forward(ForwardRecord(step, HEAD_PHASE, new, rewritten=rewritten))
        self._unconfirmed |= {row.request_id: row.position for row in new if row.is_canonical}

    def abandon(self, states: Sequence[SequenceState]) -> None:
        """Labels the rows behind the drafts of these requests, whose draft tokens are not kept: they get no verdict.
        Confirms all rows, since no step may follow that does."""
        for state in states:
            first = state.last_committed_position + 1 + len(state.draft)
            self.recorder.on_abandon(state.request_id, -1, first, first + self.head.n_ctx)
        self.recorder.confirm()
        self._confirm()

    def _confirm(self) -> None:
        self.newest |= self._unconfirmed
        self._unconfirmed = {}

    # -- events

    def on_step(self, record: StepRecord) -> None:
        """Confirms the rows of the step."""
        self._confirm()
        self.recorder.on_step(record)

    def on_failure(self, step: int) -> None:
        """Discards the rows of a step that failed."""
        self._unconfirmed = {}
        self.recorder.on_failure(step)

    def on_rollback(self, request_id: int, step: int, start: int, end: int) -> None:
        """Labels the rows fed a rejected draft token or one after it."""
        self.recorder.on_rollback(request_id, step, start, end)

    def on_abandon(self, request_id: int, step: int, start: int, end: int) -> None:
        """Labels the rows fed a draft token without a verdict."""
        self.recorder.on_abandon(request_id, step, start, end)

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        """Labels the rows fed an accepted draft token, and gives the lens the committed tokens."""
        self.recorder.on_commit(request_id, step, start, token_ids, roles)

    def on_finish(self, finished: Finished) -> None:
        """Passes on how a request ended."""
        self.recorder.on_finish(finished)


def _without(rewritten: Mapping[int, frozenset[int]], is_left_out: Sequence[bool]) -> dict[int, frozenset[int]]:
    """Returns `Editor.rewritten`, whose numbers count the rows of a pass, for a list without some of them."""
    kept = [number for number, is_out in enumerate(is_left_out) if not is_out]
    return {layer: frozenset(i for i, n in enumerate(kept) if n in found) for layer, found in rewritten.items()}
