"""Records a run: the states of every row, its role and status, and its lens readings. A row is one token of one pass.

`Recorder._label_row` sets the status of a row: committed, superseded, rolled_back or abandoned. A row that was fed a
draft token is labelled at the verdict (`on_commit`, `on_rollback`, `on_abandon`), every other row at once
(`after_forward`). So the states of a rejected draft token are in the rows that `on_rollback` labels rolled_back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from cacheprobe.core.config import CaptureConfig
from cacheprobe.core.hook_names import SITES
from cacheprobe.core.records import Finished, ForwardRecord, Observer, RowSlot, StepRecord, Thought
from cacheprobe.core.values import JsonDict
from cacheprobe.lenses.base import Lens
from cacheprobe.models.base import CachedLM, block_sum
from cacheprobe.models.feeding import captured_places, module_places
from cacheprobe.models.hf.text import TokenText
from cacheprobe.ops.kernel_set import DTYPES, KernelSet
from cacheprobe.trace import self_checks as checks
from cacheprobe.trace.recording.features import FeatureRecorder
from cacheprobe.trace.recording.kept_states import KeptStates, PassStates, is_kept, status_of
from cacheprobe.trace.recording.lens_reader import LensReader, Queued
from cacheprobe.trace.recording.pass_capture import PassCapture
from cacheprobe.trace.tables.build import LedgerChange, Part, RowRecord

CHECK_EVERY = 16
"""A pass is checked if its step is a multiple of this number; the first pass of each phase is checked too."""
_LENS_ROWS = 16
"""Maximum number of rows of a pass whose logits are compared with those read from the last layer's S."""
_ROW_BYTES, _READING_BYTES = 600, 44
"""Bytes of a row's records (row, events, ledger), and of a reading without its `top_k` tokens."""


class Source:
    """Gives what was recorded, part by part."""

    model: CachedLM | None
    """The model that runs; None for an import without a model."""
    reader: LensReader | None = None
    """The lens reader; None if no lens reads."""
    answer_mass: dict[int, tuple[float, ...]]
    """By request id: the probability of the first token of each answer."""
    texts: "CachedLM | TokenText"
    """Gives texts of token ids, with `token_texts` and `decode`."""

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of what the next call of `take` returns."""
        return 0

    def take(self) -> Part:
        """Returns what was recorded since the last call, and forgets it."""
        raise NotImplementedError

    def so_far(self) -> JsonDict:
        """Returns what a line of the journal says of the whole run so far: num_rows, num_states, preemptions,
        self_checks and checks."""
        raise NotImplementedError


@dataclass
class Unconfirmed:
    """Holds what was recorded since the rows were last confirmed: at each commit and at the end of each step. If a pass
    fails before, all of it is discarded."""

    rows: list[RowRecord] = field(default_factory=list)
    states: list[PassStates] = field(default_factory=list)
    thoughts: list[Thought] = field(default_factory=list)
    masses: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """New entries of `Recorder.answer_mass`."""


@dataclass
class Recorder(Observer, Source):
    """Collects during a run what its Trace is built from: rows with their status, states, lens readings and events."""

    model: CachedLM  # pyright: ignore[reportIncompatibleVariableOverride]  # never None here
    config: CaptureConfig
    layers: tuple[int, ...]
    lens: Lens
    prompts: Mapping[int, Sequence[int]]
    """Prompt token ids by request id."""
    answers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By request id: the first token id of each answer that the request's task allows."""
    answer_mass: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """By request id: the probability of the first token of each answer as the first generated token."""
    rows: list[RowRecord] = field(default_factory=list)
    """Rows since the last call of `take`."""
    num_taken: int = 0
    """Number of rows that `take` has returned; the first of `rows` has this number in the rows table."""
    steps: list[StepRecord] = field(default_factory=list)
    ledger: list[LedgerChange] = field(default_factory=list)
    finished: dict[int, Finished] = field(default_factory=dict)
    thoughts: list[Thought] = field(default_factory=list)
    preemptions: list[tuple[int, int]] = field(default_factory=list)
    """(request_id, step) of every preemption."""
    num_compared: int = 0
    """Number of passes in which one request was computed twice and compared."""
    differences: list[str] = field(default_factory=list)
    """One text for each of these passes whose two computations differed."""

    def __post_init__(self) -> None:
        self.texts = self.model
        modules = module_places(self.model, self.config.modules, self.layers)
        self.kept = KeptStates(self.config, self.layers, self.model.dtype, modules)
        self.reader = LensReader(self.model, self.lens, self.config.top_k) if self.config.reads_lens else None
        self.features = FeatureRecorder.of(self.config, self.model)
        operations = getattr(self.model, "operations", None)
        self._pack = operations.pack if isinstance(operations, KernelSet) and self.kept.dtype in DTYPES else None
        self.residual_check = checks.residual_check(self.model.dtype)
        self.lens_check = checks.lens_check(self.model.dtype)
        self._roles = {r: dict.fromkeys(range(len(p)), "prompt") for r, p in self.prompts.items()}
        self._undecided: dict[int, list[RowRecord]] = {request_id: [] for request_id in self.prompts}
        self._unconfirmed = Unconfirmed()
        self._unread: list[RowRecord] = []
        """Rows without a status, which the lens reads only if the status is one to keep."""
        self._late: list[RowRecord] = []
        """Rows without a status that `take` has returned."""
        self._prompt_rows: dict[int, list[RowRecord]] = {}
        """By request id: the prompt's committed rows, for requests with the same prompt."""
        self._prompt_thoughts: dict[int, list[Thought]] = {}
        self._seen_phases: set[str] = set()
        self._now: PassCapture | None = None

    def wanted(self) -> list[tuple[str, int]]:
        """Returns the list of (site, layer) hooks that the run needs; [] if it keeps only tokens and events.

        The list has S, T and C of every layer, because the self-check compares them.
        """
        if not self.config.keeps_states:
            return []
        entering = [("pre", layer) for layer in sorted({0, *self.model.injected_layers})]
        states = [(site, layer) for layer in range(self.model.n_layers) for site in SITES]
        return entering + states + captured_places(self.model, self.config, self.layers)

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of what the next call of `take` returns."""
        readings = 0 if self.reader is None else self.reader.num_held * (_READING_BYTES + 12 * self.config.top_k)
        thoughts = sum(thought.state.nbytes + thought.first_logits.nbytes for thought in self.thoughts)
        row_bytes = _ROW_BYTES + (0 if self.features is None else self.features.row_bytes)
        return self.kept.num_bytes + readings + thoughts + len(self.rows) * row_bytes

    def so_far(self) -> JsonDict:
        """Returns what a line of the journal says of the whole run so far. Its lists are copies."""
        checks = [asdict(check) for check in (self.residual_check, self.lens_check) if check.num_rows]
        return {
            "num_rows": self.num_taken,
            "num_states": self.kept.num_rows,
            "preemptions": list(self.preemptions),
            "self_checks": {"compared": self.num_compared, "differences": list(self.differences)},
            "checks": checks,
        }

    def take(self) -> Part:
        """Returns what was recorded since the last call, and forgets it. Call it after `on_step` and before the next
        pass, so that no row is unconfirmed; or after `on_finish` of the last request."""
        assert not self._unconfirmed.rows, "a pass is not confirmed yet"
        self._apply_statuses()
        rows, self.rows = self.rows, []
        labelled = [row for row in self._late if row.role]
        self._late = [row for row in (*self._late, *rows) if not row.role]
        self.num_taken += len(rows)
        columns = self.reader.take() if self.reader is not None else {}
        found = None if self.features is None else self.features.table(rows)
        part = Part(rows, labelled, self.kept.take(), columns, self.steps, self.ledger, self.thoughts, found)
        self.steps, self.ledger, self.thoughts = [], [], []
        return part

    # -- one pass

    def before_forward(self, step: int, phase: str, rows: Sequence[RowSlot], shape: tuple[int, int]) -> None:
        """Chooses which rows of the coming pass to keep, to read through the lens and to self-check, and allocates the
        tensors for their states."""
        device, width = self.model.device, self.model.d_model
        lengths = [len(self.prompts[row.request_id]) for row in rows]
        kept = [is_kept(self.config, row, step, phase, length) for row, length in zip(rows, lengths, strict=True)]
        reads = [
            wanted and self.config.reads_row(row.position, length)
            for row, wanted, length in zip(rows, kept, lengths, strict=True)
        ]
        now = self._now = PassCapture(rows, shape[1], kept, reads, self.kept.layer_index, device)
        now.pack = self._pack
        now.feature_place = self.features.place if self.features is not None and any(kept) else None
        if any(kept):
            positions = torch.tensor([row.position for row, wanted in zip(rows, kept, strict=True) if wanted])
            now.states = self.kept.open(now.keep_index, positions, width)
        if any(reads):
            size = (len(self.layers), len(now.lens_index), width)
            now.lens_block = torch.empty(size, dtype=self.model.dtype, device=device)
        if self.config.keeps_states and (phase not in self._seen_phases or step % CHECK_EVERY == 0):
            now.watched = {}
        self._seen_phases.add(phase)

    def on_state(self, site: str, layer: int, value: Tensor) -> None:
        """Copies a hook's tensor into the PassCapture; without one, ignores it."""
        if self._now is not None:
            self._now.take(site, layer, value)

    def after_forward(self, record: ForwardRecord) -> None:
        """Adds a RowRecord for each row of the pass (pads have none), collects states for the lens, and self-checks
        some passes.

        Rows fed a draft token get no role and status yet. Raises: CaptureError if the self-check fails.
        """
        ran = self.model.n_layers if record.num_layers is None else record.num_layers
        now, self._now = self._now, None
        assert now is not None
        layers = torch.tensor([layer for layer in self.layers if layer < ran], dtype=torch.long)
        rows, lens_column = [], 0
        for slot, is_read in zip(record.rows, now.lens_rows, strict=True):
            row = RowRecord(slot.request_id, record.step, record.phase, slot.position, slot.token_id, ran)
            if slot.is_draft:
                self._undecided[slot.request_id].append(row)
            else:
                self._label_row(row, self._roles[slot.request_id][slot.position], status_of(slot))
            if is_read:
                assert now.lens_block is not None
                row.reading = self._queued(row, now.lens_block[:, lens_column], layers)
                lens_column += 1
            rows.append(row)
        kept_rows = [row for row, wanted in zip(rows, now.kept, strict=True) if wanted]
        if now.states is not None:
            now.states.finish(kept_rows)
            self._unconfirmed.states.append(now.states)
        if self.features is not None and now.feature_states is not None:
            self.features.find(kept_rows, now.feature_states)
        self._unconfirmed.rows += rows
        if now.watched is not None:
            self._check(record, now, now.watched, ran)

    def _queued(self, row: RowRecord, states: Tensor, layers: Tensor) -> Queued:
        """Returns what the lens is to read of a row, from its states [layers, m] of the kept layers. layers: those of
        them that ran, the first ones."""
        kept = states[: len(layers)].clone()
        return Queued(-1, row.position, kept, layers, request_id=row.request_id, step=row.step)

    def _queue_reading(self, queued: Queued) -> None:
        """Passes a confirmed row to the lens reader, with the prompt's next token, if there is one, as the target."""
        assert self.reader is not None
        prompt = self.prompts[queued.request_id]
        if queued.position + 1 < len(prompt):
            queued.target = prompt[queued.position + 1]
            self.reader.queue_resolved(queued)
        else:
            self.reader.queue(queued.request_id, queued)

    def _check(
        self, record: ForwardRecord, now: PassCapture, watched: Mapping[tuple[str, int], Tensor], ran: int
    ) -> None:
        """Checks in some rows that S = input + T + C, and that the last S gives the logits, if the pass computed all of
        them. Raises: CaptureError if a difference is larger than rounding errors."""
        checked = range(0, len(record.rows), now.check_step)
        unchanged = {
            layer: [i for i, row in enumerate(checked) if row not in rows] for layer, rows in record.rewritten.items()
        }
        forms = [block_sum(self.model, layer) for layer in range(ran)]
        found = [(self.residual_check, checks.block_errors(self.residual_check, watched, forms, unchanged))]
        chosen = slice(_LENS_ROWS) if (kept := unchanged.get(self.model.n_layers)) is None else kept[:_LENS_ROWS]
        if record.logits is not None and ran == self.model.n_layers and chosen != []:
            logits = self.model.read_out(watched["S", ran - 1][chosen])
            errors = checks.lens_errors(self.lens_check, logits, record.logits.flatten(0, 1)[now.checked_index[chosen]])
            found.append((self.lens_check, errors))
        checks.add_errors(found, record.step)

    def confirm(self) -> None:
        """Moves what was recorded since the last confirmation into the run's lists: rows, states, features, readings,
        thoughts. `on_failure` can no longer discard it."""
        confirmed, self._unconfirmed = self._unconfirmed, Unconfirmed()
        for number, row in enumerate(confirmed.rows, self.num_taken + len(self.rows)):
            row.row = number
            if row.reading is not None:
                row.reading.row = number
                self._unread.append(row)
            if row.role == "prompt" and row.status == "committed":
                self._prompt_rows.setdefault(row.request_id, []).append(row)
        self.rows += confirmed.rows
        for states in confirmed.states:
            self.kept.add(states)
        for thought in confirmed.thoughts:
            if thought.end < len(self.prompts[thought.request_id]):
                self._prompt_thoughts.setdefault(thought.request_id, []).append(thought)
        self.thoughts += confirmed.thoughts
        self.answer_mass |= confirmed.masses
        self._apply_statuses()

    def _apply_statuses(self) -> None:
        """Drops the states of rows whose status is known now and not one to keep; queues the others for the lens."""
        self.kept.apply_statuses()
        unread, self._unread = self._unread, []
        for row in unread:
            if not row.role and self.config.statuses is not None:
                self._unread.append(row)
                continue
            if row.reading is not None and self.config.keeps_status(row.status):
                self._queue_reading(row.reading)
            if row.role != "prompt":  # else a request with the same prompt may need it
                row.reading = None

    def on_failure(self, step: int) -> None:
        """Discards the rows, thoughts and states of all unconfirmed passes, because their step failed."""
        lost = {id(row) for row in self._unconfirmed.rows}
        for request_id in {row.request_id for row in self._unconfirmed.rows}:
            self._undecided[request_id] = [row for row in self._undecided[request_id] if id(row) not in lost]
        self._unconfirmed, self._now = Unconfirmed(), None

    def on_shared_prompt(self, request_id: int, step: int, source_id: int) -> None:
        """Adds copies of the prompt rows and thoughts of request `source_id`, which has the same prompt.

        The copied rows refer to the source's stored vectors; the lens reads these vectors again for this request.
        """
        for row in self._prompt_rows.get(source_id, ()):
            reading = None if row.reading is None else replace(row.reading, target=-1, request_id=request_id)
            self._unconfirmed.rows.append(replace(row, request_id=request_id, reading=reading))
        for thought in self._prompt_thoughts.get(source_id, ()):
            self._unconfirmed.thoughts.append(replace(thought, request_id=request_id))

    def on_thought(self, thought: Thought) -> None:
        """Keeps a thought."""
        self._unconfirmed.thoughts.append(thought)

    def on_compared(self, step: int, difference: str | None) -> None:
        """Counts a pass in which one request was computed twice. Appends the difference, if any, to `differences`."""
        self.num_compared += 1
        if difference is not None:
            self.differences.append(f"step {step}: {difference}")

    def on_preempt(self, request_id: int, step: int) -> None:
        """Appends (request_id, step) to `preemptions`."""
        self.preemptions.append((request_id, step))

    # -- roles and status

    def on_rollback(self, request_id: int, step: int, start: int, end: int) -> None:
        """Labels rolled_back: rows fed the rejected draft token or one after it, at positions start..end-1."""
        self._label_drafts(request_id, start, end, "rolled_back")

    def on_abandon(self, request_id: int, step: int, start: int, end: int) -> None:
        """Labels abandoned: rows fed draft tokens without a verdict, at positions start..end-1."""
        self._label_drafts(request_id, start, end, "abandoned")

    def committed_roles(self, request_id: int, start: int, roles: Sequence[str]) -> None:
        """Keeps the roles of committed tokens at positions start, start + 1, ..., for the rows that are fed them."""
        self._roles[request_id].update(zip(range(start, start + len(roles)), roles, strict=True))

    @staticmethod
    def _label_row(row: RowRecord, role: str, status: str) -> None:
        """Sets a row's role and status: committed, superseded, rolled_back or abandoned."""
        row.role, row.status = role, status

    def _label_drafts(self, request_id: int, start: int, end: int, status: str) -> None:
        """Sets role and status of the rows fed a draft token at positions start..end-1 to `status`, if not yet set."""
        for row in self._undecided[request_id]:
            if not row.role and start <= row.position < end:
                self._label_row(row, status, status)

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        """Labels the rows that were fed the accepted draft tokens: the verifier's committed, the drafter's superseded.

        Must come after `on_rollback` of the same verdict, since it labels every row that has no status yet.
        Also confirms the rows so far, and gives the lens reader the committed tokens as targets.
        """
        self.confirm()
        self.committed_roles(request_id, start, roles)
        for row in self._undecided[request_id]:
            if not row.role:
                status = "committed" if row.phase == "verify" else "superseded"
                self._label_row(row, self._roles[request_id][row.position], status)
        self._undecided[request_id] = []
        self._apply_statuses()
        if self.reader is not None:
            self.reader.resolve(request_id, start, tuple(token_ids))

    def on_choice(self, request_id: int, step: int, position: int, token_id: int, logits: Tensor) -> None:
        """Keeps the probability of the first token of each task answer, if `position` is the first after the prompt."""
        answers = self.answers.get(request_id)
        if answers and position == len(self.prompts[request_id]) and request_id not in self.answer_mass:
            probs = logits.cpu().float().softmax(-1)  # a GPU's bits would depend on where the logits are
            self._unconfirmed.masses[request_id] = tuple(float(probs[token]) for token in answers)

    def on_ledger(self, request_id: int, step: int, start: int, end: int, provenance: str) -> None:
        """Appends a LedgerChange: slots start..end-1 of the request's cache row take this provenance."""
        self.ledger.append(LedgerChange(request_id, step, start, end, provenance))

    def on_step(self, record: StepRecord) -> None:
        """Confirms the step's rows (`on_failure` no longer discards them), and appends its record to `steps`."""
        self.confirm()
        self.steps.append(record)

    def on_finish(self, finished: Finished) -> None:
        """Stores how a request ended, and queues its waiting rows for the lens; these rows get no target."""
        self.finished[finished.request_id] = finished
        self._apply_statuses()
        if self.reader is not None:
            end = len(self.prompts[finished.request_id]) + len(finished.committed)
            self.reader.resolve(finished.request_id, end, (), is_over=True)
