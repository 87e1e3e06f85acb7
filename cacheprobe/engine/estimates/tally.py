"""Defines RunTally, an observer that counts what a run computes and records."""

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from cacheprobe.core.records import ForwardRecord, Observer, Request, RowSlot, StepRecord
from cacheprobe.engine.plan import RunPlan
from cacheprobe.trace.recording.features import FeatureRecorder
from cacheprobe.trace.recording.kept_states import status_of


@dataclass(frozen=True)
class PassShape:
    """Holds what decides how long a pass takes, apart from positions."""

    phase: str
    num_entries: int
    width: int
    batch: int | None
    """Fixed number of batch indices; None for one for each entry."""
    num_layers: int | None
    num_logits: int
    """Token slots whose logits are computed."""
    is_without_pads: bool = False
    """Whether attention runs over the tokens of each entry as in a pass by itself."""

    @property
    def size(self) -> int:
        """Number of batch indices of the pass."""
        return self.num_entries if self.batch is None else self.batch


@dataclass
class PassSums:
    """Holds sums over the passes of one shape."""

    count: int = 0
    rows: int = 0
    """Real tokens, without pads and dummies."""
    start: float = 0.0
    """Sum of the first positions: of the mean over the entries in a pass of fixed size, else of the largest."""


@dataclass
class RunTally(Observer):
    """Counts what a run records: rows, kept states, readings, lines of tables."""

    plan: RunPlan
    passes: dict[PassShape, PassSums] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    """Passes by phase."""
    rows: int = 0
    kept_rows: int = 0
    """Rows whose states are kept."""
    pattern_weights: int = 0
    """Weights of kept attention patterns, for one head of one layer."""
    readings: int = 0
    feature_rows: int = 0
    """Rows whose features are recorded."""
    choices: int = 0
    """Tokens that were chosen from logits, those of drafts and verdicts included."""
    event_lines: int = 0
    ledger_lines: int = 0
    draft_tokens: int = 0
    draft_calls: Counter[int] = field(default_factory=Counter)
    """Draft tokens of a request that one call of the drafter makes one after another, by number of requests."""
    seconds: float = 0.0
    """Time that the loop itself took."""
    _prompt_rows: Counter[int] = field(default_factory=Counter)
    _prompt_readings: Counter[int] = field(default_factory=Counter)
    _prompt_features: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._features = FeatureRecorder.of(self.plan.capture, self.plan.model)
        self._lengths = {r.request_id: r.num_prompt_tokens for r in self.plan.requests}

    def after_forward(self, record: ForwardRecord) -> None:
        """Counts the rows of a pass, and what the recorder keeps of them."""
        capture = self.plan.capture
        ran = self.plan.model.n_layers if record.num_layers is None else record.num_layers
        num_layers = sum(layer < ran for layer in self.plan.layers)
        self.rows += len(record.rows)
        for row in record.rows:
            length = self._lengths[row.request_id]
            is_kept = capture.keeps_row(record.phase, row.position)
            is_kept = is_kept and (row.is_draft or capture.keeps_status(status_of(row)))
            readings = num_layers if is_kept and capture.reads_row(row.position, length) else 0
            self.kept_rows += is_kept
            self.pattern_weights += (row.position + 1) if is_kept and "pattern" in capture.heads else 0
            self.readings += readings
            has_features = is_kept and self._records_features(row, ran)
            self.feature_rows += has_features
            if row.position < length and record.phase == "prefill":
                self._prompt_rows[row.request_id] += 1
                self._prompt_readings[row.request_id] += readings
                self._prompt_features[row.request_id] += has_features

    def _records_features(self, row: RowSlot, ran: int) -> bool:
        """Returns whether features are recorded of a kept row whose pass ran `ran` layers."""
        recorder = self._features
        return recorder is not None and recorder.place[1] < ran and recorder.records(row.position, row.token_id)

    def on_shared_prompt(self, request_id: int, step: int, source_id: int) -> None:
        """Counts the copied rows of a prompt, which are read again."""
        for counts in (self._prompt_rows, self._prompt_readings, self._prompt_features):
            counts[request_id] = counts[source_id]
        self.rows += self._prompt_rows[source_id]
        self.readings += self._prompt_readings[source_id]
        self.feature_rows += self._prompt_features[source_id]

    def on_choice(self, request_id: int, step: int, position: int, token_id: int, logits: Tensor) -> None:
        """Counts a chosen token."""
        self.choices += 1

    def on_ledger(self, request_id: int, step: int, start: int, end: int, provenance: str) -> None:
        """Counts a line of the ledger."""
        self.ledger_lines += 1

    def on_step(self, record: StepRecord) -> None:
        """Counts the lines of the events table, and draft tokens."""
        self.event_lines += len(record.request_ids)
        self.draft_tokens += sum(len(token_ids) for _, token_ids in record.proposed)


def new_tokens(request: Request) -> int:
    """Returns the largest number of new tokens of a plan's request."""
    assert request.sampling is not None and request.sampling.max_new_tokens is not None
    return request.sampling.max_new_tokens
