"""Keeps what the engine computes: every row's states, its role and status, and the queue of lens readings.

A row whose input is a draft token has no role until the verdict; all others are labelled as they come.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cacheprobe.config import CaptureConfig
from cacheprobe.lenses.base import Lens
from cacheprobe.models.base import CachedLM
from cacheprobe.names import HEAD_SITES
from cacheprobe.observe import checks
from cacheprobe.observe.head_blocks import HeadBlocks
from cacheprobe.observe.lens_reader import LensReader, Queued
from cacheprobe.observe.store import Blocks, MemoryStore
from cacheprobe.records import Finished, ForwardRecord, RowSlot, StepRecord, Thought

CHECK_EVERY = 16
"""Passes between self-checks, beside the first of each phase."""
_CHECKED_ROWS, _LENS_CHECK_ROWS = 64, 16
"""Rows of a pass that are checked at most: every so-manieth of them."""


@dataclass(slots=True)
class RowRecord:
    """One row of one pass: a token, where it stood, and what became of it."""

    request_id: int
    step: int
    phase: str
    position: int
    token_id: int
    num_layers: int
    state_index: int
    """Place among the stored vectors, -1 where a filter dropped it."""
    role: str = ""
    status: str = ""


@dataclass(frozen=True, slots=True)
class LedgerChange:
    """Cache rows start..end-1 of a request took this provenance in this step."""

    request_id: int
    step: int
    start: int
    end: int
    provenance: str


@dataclass
class Recorder:
    """The Observer that becomes a Trace."""

    model: CachedLM
    config: CaptureConfig
    layers: tuple[int, ...]
    lens: Lens
    prompts: Mapping[int, Sequence[int]]
    """Prompt token ids by request."""
    answers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """First token ids of the answers that a request's task allows."""
    answer_mass: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Probability of each answer as the first generated token."""
    rows: list[RowRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    ledger: list[LedgerChange] = field(default_factory=list)
    finished: dict[int, Finished] = field(default_factory=dict)
    thoughts: list[Thought] = field(default_factory=list)
    preemptions: list[tuple[int, int]] = field(default_factory=list)
    """(request_id, step) of every eviction."""

    def __post_init__(self) -> None:
        dtype = getattr(torch, self.config.dtype) if self.config.dtype else self.model.dtype
        self.blocks = Blocks(self.config.state_sites, self.layers, dtype)
        self.head_blocks = HeadBlocks(self.config.heads, self.layers, dtype) if self.config.heads else None
        self.reader = LensReader(self.model, self.lens, self.config.top_k) if self.config.reads_lens else None
        self.residual_check = checks.residual_check(self.model.dtype)
        self.lens_check = checks.lens_check(self.model.dtype)
        self._roles: dict[int, dict[int, str]] = {
            r: dict.fromkeys(range(len(p)), "prompt") for r, p in self.prompts.items()
        }
        self._undecided: dict[int, list[RowRecord]] = {request_id: [] for request_id in self.prompts}
        # of passes whose step is not reported yet, and may still fail
        self._num_settled = self._num_settled_thoughts = self._num_open_blocks = 0
        self._pending_reads: list[tuple[RowRecord, Queued]] = []
        self._prompt_rows: dict[int, list[RowRecord]] = {}
        self._prompt_reads: dict[int, list[Queued]] = {}
        self._seen_phases: set[str] = set()
        self._open: dict[str, Tensor] = {}
        self._watched: dict[tuple[str, int], Tensor] | None = None
        self._keep_flat = self._lens_flat = self._checked_flat = torch.empty(0, dtype=torch.long)
        self._check_step = 1
        self._lens_block: Tensor | None = None
        self._layers_below = _LayersBelow(self.layers)
        self._kept: list[bool] = []
        self._lens_rows: list[bool] = []

    def wanted(self) -> list[tuple[str, int]]:
        """(site, layer) pairs to listen to: the self-check needs all of them, whatever is kept."""
        if not self.config.keeps_rows:
            return []
        entering = [("pre", layer) for layer in sorted({0, *self.model.injected_layers})]
        states = [(site, layer) for layer in range(self.model.n_layers) for site in "STC"]
        return entering + states + [(site, layer) for layer in self.layers for site in self.config.heads]

    def store(self) -> MemoryStore:
        """All that was kept. To be asked for once, at the end."""
        heads = self.head_blocks.joined() if self.head_blocks is not None else {}
        return MemoryStore({**self.blocks.joined(), **heads})

    # -- one pass

    def before_forward(self, step: int, phase: str, rows: Sequence[RowSlot], shape: tuple[int, int]) -> None:
        """Choose the rows to keep and open their blocks."""
        device, width = self.model.device, shape[1]
        flat = torch.tensor([row.batch_index * width + row.slot for row in rows])
        self._kept = [self._keeps(phase, row.position) for row in rows]
        self._lens_rows = [
            self.reader is not None and self._reads(row) and kept for row, kept in zip(rows, self._kept, strict=True)
        ]
        self._keep_flat = flat[torch.tensor(self._kept)].to(device)
        self._lens_flat = flat[torch.tensor(self._lens_rows)].to(device)
        self._check_step = -(-len(rows) // _CHECKED_ROWS)
        self._checked_flat = flat[:: self._check_step].to(device)
        self._open = {}
        if any(self._kept):
            self._open = self.blocks.open(len(self._keep_flat), self.model.d_model)
            self._num_open_blocks += 1
            if self.head_blocks is not None:
                positions = [row.position for row, kept in zip(rows, self._kept, strict=True) if kept]
                self.head_blocks.open(self._keep_flat, positions)
        self._lens_block = (
            torch.empty(
                len(self.layers), len(self._lens_flat), self.model.d_model, dtype=self.model.dtype, device=device
            )
            if any(self._lens_rows)
            else None
        )
        is_checked = self.config.keeps_rows and (phase not in self._seen_phases or step % CHECK_EVERY == 0)
        self._watched = {} if is_checked else None
        self._seen_phases.add(phase)

    def on_state(self, site: str, layer: int, value: Tensor) -> None:
        """The model's hook: copy the wanted rows of [b, t, m], never keep the tensor itself."""
        if site in HEAD_SITES:
            if self.head_blocks is not None and any(self._kept):
                self.head_blocks.keep(site, layer, value)
            return
        flat = value.reshape(-1, value.shape[-1]).to(self.model.device)  # layers may be on several
        if self._watched is not None:
            self._watched[site, layer] = flat[self._checked_flat]
        index = self.blocks.layer_index.get(layer)
        if index is None or site == "pre":
            return
        if site in self._open:
            _take(flat, self._keep_flat, self._open[site][index])
        if site == "S" and self._lens_block is not None:
            _take(flat, self._lens_flat, self._lens_block[index])

    def after_forward(self, record: ForwardRecord) -> None:
        """Label the pass's rows, queue their lens readings, and check the capture."""
        ran = self.model.n_layers if record.num_layers is None else record.num_layers
        next_index = self.blocks.num_rows - sum(self._kept)
        lens_column = 0
        for slot, is_kept, is_read in zip(record.rows, self._kept, self._lens_rows, strict=True):
            row = RowRecord(
                slot.request_id,
                record.step,
                record.phase,
                slot.position,
                slot.token_id,
                ran,
                next_index if is_kept else -1,
            )
            next_index += is_kept
            if slot.is_draft:
                self._undecided[slot.request_id].append(row)
            else:
                row.role = self._roles[slot.request_id][slot.position]
                row.status = "committed" if slot.is_canonical else "candidate"
            self.rows.append(row)
            if is_read:
                self._queue(row, lens_column, ran)
                lens_column += 1
        if self._watched is not None:
            self._check(record, self._watched, ran)
            self._watched = None
        self._open, self._lens_block = {}, None

    def _keeps(self, phase: str, position: int) -> bool:
        phases, positions = self.config.phases, self.config.positions
        return (
            self.config.keeps_rows
            and (phases is None or phase in phases)
            and (positions is None or position in positions)
        )

    def _reads(self, row: RowSlot) -> bool:
        return self.config.prompt_hypotheses or row.position >= len(self.prompts[row.request_id]) - 1

    def _queue(self, row: RowRecord, column: int, ran: int) -> None:
        assert self.reader is not None and self._lens_block is not None
        layers = self._layers_below[ran]
        states = self._lens_block[: len(layers), column].clone()
        queued = Queued(len(self.rows) - 1, row.position, states, layers, request_id=row.request_id, step=row.step)
        self._pending_reads.append((row, queued))

    def _pass_on(self, row: RowRecord, queued: Queued) -> None:
        assert self.reader is not None
        prompt = self.prompts[row.request_id]
        if row.position + 1 < len(prompt):
            queued.target = prompt[row.position + 1]
            self.reader.queue_resolved(queued)
        else:
            self.reader.queue(row.request_id, queued)

    def _check(self, record: ForwardRecord, watched: Mapping[tuple[str, int], Tensor], ran: int) -> None:
        for layer in range(ran):
            pre = watched["pre", layer] if ("pre", layer) in watched else watched["S", layer - 1]
            sites = [watched[site, layer] for site in "TCS"]
            if rewritten := record.rewritten.get(layer):
                own = [i for i, row in enumerate(range(0, len(record.rows), self._check_step)) if row not in rewritten]
                pre, *sites = (value[own] for value in (pre, *sites))
            checks.check_residual(self.residual_check, pre, *sites, step=record.step)
        if record.logits is not None and ran == self.model.n_layers:
            rows = self._checked_flat[:_LENS_CHECK_ROWS]
            logits = self.model.read_out(watched["S", ran - 1][:_LENS_CHECK_ROWS])
            checks.check_lens(self.lens_check, logits, record.logits.flatten(0, 1)[rows], record.step)

    def _settle(self) -> None:
        """What was seen since the last report stands: nothing is committed before every choice of a step was made."""
        for row in self.rows[self._num_settled :]:
            if row.role == "prompt" and row.status == "committed":
                self._prompt_rows.setdefault(row.request_id, []).append(row)
        for row, queued in self._pending_reads:
            if row.role == "prompt":
                self._prompt_reads.setdefault(row.request_id, []).append(replace(queued))
            self._pass_on(row, queued)
        self._num_settled, self._num_settled_thoughts, self._num_open_blocks = len(self.rows), len(self.thoughts), 0
        self._pending_reads.clear()

    def on_failure(self, step: int) -> None:
        """See Observer. The step's earlier passes go with it: they will be run again."""
        for _ in range(self._num_open_blocks):
            self.blocks.drop_last()
            if self.head_blocks is not None:
                self.head_blocks.drop_last()
        lost = {id(row) for row in self.rows[self._num_settled :]}
        for request_id, rows in self._undecided.items():
            self._undecided[request_id] = [row for row in rows if id(row) not in lost]
        del self.rows[self._num_settled :], self.thoughts[self._num_settled_thoughts :]
        self._num_open_blocks = 0
        self._pending_reads.clear()
        self._open, self._lens_block, self._watched = {}, None, None

    def on_shared_prompt(self, request_id: int, step: int, source_id: int) -> None:
        """See Observer. The rows are the source's, vectors included; only what followed them differs."""
        reads = {queued.row: queued for queued in self._prompt_reads.get(source_id, ())}
        numbers = {id(row): number for number, row in enumerate(self.rows)} if reads else {}
        for row in list(self._prompt_rows.get(source_id, ())):
            mine = replace(row, request_id=request_id)
            self.rows.append(mine)
            if (queued := reads.get(numbers.get(id(row), -1))) is not None:
                own = replace(queued, row=len(self.rows) - 1, target=-1, request_id=request_id)
                self._pending_reads.append((mine, own))
        prompt = len(self.prompts[source_id])
        for thought in [t for t in self.thoughts if t.request_id == source_id and t.end < prompt]:
            self.thoughts.append(replace(thought, request_id=request_id))

    def on_thought(self, thought: Thought) -> None:
        """See Observer."""
        self.thoughts.append(thought)

    def on_preempt(self, request_id: int, step: int) -> None:
        """See Observer."""
        self.preemptions.append((request_id, step))

    # -- what became of it

    def on_rollback(self, request_id: int, step: int, start: int, end: int) -> None:
        """See Observer."""
        for row in self._undecided[request_id]:
            if start <= row.position < end:
                row.role = row.status = "rolled_back"

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        """See Observer. Rows of accepted drafts: the verifier's are canonical, the drafter's are candidates."""
        self._settle()
        self._roles[request_id].update(zip(range(start, start + len(roles)), roles, strict=True))
        for row in self._undecided[request_id]:
            if not row.role:
                row.role = self._roles[request_id][row.position]
                row.status = "committed" if row.phase == "verify" else "candidate"
        self._undecided[request_id] = []
        if self.reader is not None:
            self.reader.resolve(request_id, start, tuple(token_ids))

    def on_choice(self, request_id: int, step: int, position: int, token_id: int, logits: Tensor) -> None:
        """See Observer. The first generated token of a task's prompt tells how much of the mass its answers got."""
        answers = self.answers.get(request_id)
        if answers and position == len(self.prompts[request_id]) and request_id not in self.answer_mass:
            probs = logits.float().softmax(-1)
            self.answer_mass[request_id] = tuple(float(probs[token]) for token in answers)

    def on_ledger(self, request_id: int, step: int, start: int, end: int, provenance: str) -> None:
        """See Observer."""
        self.ledger.append(LedgerChange(request_id, step, start, end, provenance))

    def on_step(self, record: StepRecord) -> None:
        """See Observer."""
        self._settle()
        self.steps.append(record)

    def on_finish(self, finished: Finished) -> None:
        """See Observer."""
        self.finished[finished.request_id] = finished
        if self.reader is not None:
            end = len(self.prompts[finished.request_id]) + len(finished.committed)
            self.reader.resolve(finished.request_id, end, (), is_over=True)


class _LayersBelow(dict[int, Tensor]):
    """The kept layers among the first so many, made once for each number."""

    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__()
        self._all = layers

    def __missing__(self, ran: int) -> Tensor:
        self[ran] = torch.tensor([layer for layer in self._all if layer < ran], dtype=torch.long)
        return self[ran]


def _take(flat: Tensor, index: Tensor, out: Tensor) -> None:
    """flat[index] into `out`, without a copy in between where type and device are the same."""
    if flat.dtype == out.dtype and flat.device == out.device:
        torch.index_select(flat.detach(), 0, index, out=out)
    else:
        out.copy_(flat[index])
