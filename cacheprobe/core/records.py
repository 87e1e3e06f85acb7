"""Defines the records that all folders exchange, as frozen dataclasses, without torch.

Imports neither models nor tensors nor files. `Observer` is the interface through which the engine reports.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cacheprobe.core.config import PHASES as PHASES
from cacheprobe.core.config import STATUSES as STATUSES
from cacheprobe.core.settings import SamplingParams as SamplingParams
from cacheprobe.core.values import JsonDict, KnownKeywords, flag, require_encodable, whole_number

ROLES = ("prompt", "committed", "accepted", "recovered", "bonus", "rolled_back", "abandoned")
"""Roles of a row (one token of one pass): how its input token came to its position."""
DISCARDED_DRAFT = ("rolled_back", "abandoned")
"""Statuses of rows that were fed a draft token that was never committed. rolled_back: the rejected token or a later
one. abandoned: the draft got no verdict."""
HEAD_PHASE = "draft"
"""Phase of the rows of a draft head."""
PROVENANCES = ("free", "prefill", "decoded", "provisional", "verified", "edited")


@dataclass(frozen=True, slots=True)
class Request(KnownKeywords):
    """Holds one sequence to generate, as the user wrote it. `cacheprobe.run` makes a copy with request_id,
    prompt_token_ids and every sampling setting."""

    prompt: "str | Sequence[int]"
    """Text, or token ids."""
    sampling: SamplingParams | None = None
    is_deterministic: bool = False
    """Whether this request's tokens and states must not depend on other requests in the batch."""
    request_id: "int | Any" = None
    """Index of the request in the run, set by the run. None only before the run."""
    prompt_token_ids: tuple[int, ...] = ()
    example: Any = None
    """Task example that the prompt was made from, if any (`tasks.Example`)."""
    arrival_step: int = 0
    """The request joins at the first round that begins at this step or later. If no other request runs, it joins at
    once."""
    sample_of: int | None = None
    """request_id of the first of the samples (SamplingParams.n) that share this prompt, set by the run; None for a
    request that is no sample of several."""
    cached: Any = field(default=None, repr=False)
    """KVSnapshot of the prompt's first tokens. Generation continues from it, so those tokens are not computed again."""
    own_fingerprint: bool = False
    """Must be True for a deterministic request with `cached`. Such a request is comparable only with requests that
    start from the same snapshot."""
    forced_token_ids: tuple[int, ...] = ()
    """Tokens that the request commits one after the other, whatever the model would choose: the text of another program
    (`cp.replay`). It then samples nothing, and ends after them. () for a request that generates."""
    is_chat: bool = False
    """Whether the prompt's text has its special tokens, as that of a `cp.Chat` has, so that none are added."""
    turns: tuple[tuple[int, int], ...] = ()
    """Where the model's own turns stand in the prompt of a `cp.Chat`, set by the run: (first token, token after the
    last). The last one goes on with the generated text. () if they are not known."""
    keep_kv: bool = False
    """Whether to copy the request's keys and values when it ends, for `cp.analysis.kv_snapshot` and `fork`. The copy
    stays in memory with the trace."""

    def __post_init__(self) -> None:
        for name in ("is_deterministic", "own_fingerprint", "is_chat", "keep_kv"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        object.__setattr__(self, "arrival_step", whole_number("arrival_step", self.arrival_step, at_least=0))
        forced = tuple(whole_number("a forced token", token) for token in self.forced_token_ids)
        object.__setattr__(self, "forced_token_ids", forced)
        if forced and self.sampling is not None and self.request_id is None:
            raise ValueError("a request with forced_token_ids samples nothing; leave out sampling")
        if self.sampling is not None and not isinstance(self.sampling, SamplingParams):
            raise ValueError(f"sampling must be a cp.SamplingParams, got a {type(self.sampling).__name__}")
        if isinstance(self.prompt, bytes | bytearray | memoryview):
            raise ValueError(f"a prompt must be text or a list of token ids, got {self.prompt!r:.60}; decode it first")
        if isinstance(self.prompt, str):
            require_encodable("a prompt", self.prompt)

    @property
    def num_cached(self) -> int:
        """Number of the prompt's first tokens whose keys and values are given in `cached` (a KVSnapshot); 0 if `cached`
        is None."""
        return 0 if self.cached is None else len(self.cached)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens of the request; 0 until the run has tokenised the prompt."""
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Holds the verifier's decision about one draft: the draft tokens, the verifier's own tokens, and how many were
    accepted and committed.

    Source: decode-verify-rollback of LLM-42 (arXiv 2601.17768, section 4.2), the variant with a bonus token.
    """

    request_id: int
    step: int
    start: int
    """Absolute position of the first draft token."""
    draft_token_ids: tuple[int, ...]
    target_token_ids: tuple[int, ...]
    """Tokens that the verifier chose at each draft position, and one after the draft. After a draft stop token that one
    is absent: the stop token is compared but never fed."""
    num_accepted: int
    """Number of draft tokens that the verifier accepted, from the first on."""
    num_committed: int
    """Tokens that this pass committed: num_accepted + 1, or fewer if the request ended."""
    finish: str | None = None
    """"stop" or "length" if this pass ended the request."""

    def __post_init__(self) -> None:
        n, drafted, targets = self.num_accepted, len(self.draft_token_ids), len(self.target_token_ids)
        if not (0 <= n <= drafted <= targets <= drafted + 1 and 1 <= self.num_committed <= min(n + 1, targets)):
            raise ValueError(
                f"request {self.request_id} step {self.step}: accepted {n} of {drafted} drafted tokens, "
                f"committed {self.num_committed}, {targets} target tokens"
            )

    @property
    def committed(self) -> tuple[int, ...]:
        """Token ids that the verdict commits, as a tuple: the accepted draft tokens, then the recovered token (or the
        bonus token, if all were accepted). Shorter if the request ended."""
        n = self.num_accepted
        return (self.draft_token_ids[:n] + self.target_token_ids[n : n + 1])[: self.num_committed]

    @property
    def recovered(self) -> int | None:
        """Token id that the verifier committed at the first mismatch; None if all draft tokens were accepted or the
        request ended before it."""
        return self.committed[-1] if self.is_rollback and self.num_committed > self.num_accepted else None

    @property
    def bonus(self) -> int | None:
        """Token id that the verifier committed after a draft accepted in full (or empty); None after a mismatch or if
        the request ended before it."""
        return self.committed[-1] if not self.is_rollback and self.num_committed > self.num_accepted else None

    @property
    def is_rollback(self) -> bool:
        """Whether a draft token was rejected."""
        return self.num_accepted < len(self.draft_token_ids)

    @property
    def rolled_back(self) -> tuple[int, ...]:
        """Draft token ids from the first mismatch on, as a tuple: the rejected one and all after it; () if none was
        rejected."""
        return self.draft_token_ids[self.num_accepted :]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Holds one step of the engine: phase, shape, requests, seconds, and the resulting tokens and verdicts. A step is a
    forward pass, the copy of a shared prompt, or a call of a drafter that runs no pass. If one call of a drafter runs
    several passes, only the last has a StepRecord."""

    step: int
    phase: str
    batch_shape: tuple[int, int] | None
    """Batch size and token slots of the pass, dummies and pads included; None if unknown, of an import."""
    request_ids: tuple[int, ...]
    """Requests of the pass, without dummies."""
    seconds: float
    committed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(request_id, tokens) committed without a verdict: by a prefill, or by a decode that is never verified."""
    proposed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(request_id, tokens) added to drafts by this step."""
    verdicts: tuple[Verdict, ...] = ()
    logprobs: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(request_id, log-probability in nats of each token that this step committed), under the model's unprocessed
    logits."""
    margins: tuple[tuple[int, float], ...] = ()
    """(request_id, nats between the two best tokens) for each token that this step chose."""


@dataclass(frozen=True, slots=True)
class RowSlot:
    """Holds the request, batch index, position and token of one row (one token of one pass)."""

    request_id: int
    batch_index: int
    """Index b of the row's request in the pass."""
    slot: int
    """Index t of the token among the pass's new-token slots."""
    position: int
    """Absolute position of the row's input token."""
    token_id: int
    is_canonical: bool
    """True for rows of prefill, of verify, and of the decode of a never verified request. Their states are final,
    unless a verdict rejects the token."""
    is_draft: bool = False
    """Whether the input token is a draft token without a verdict so far."""


@dataclass(frozen=True, slots=True)
class ForwardRecord:
    """Holds the logits of one pass and the list of its tokens (`rows`), for observers. The tensors belong to the pass,
    so an observer must copy what it keeps."""

    step: int
    phase: str
    rows: tuple[RowSlot, ...]
    logits: Any = None
    """[b, t, v]; None if the pass stopped at an early layer, or computed the logits of chosen token slots only."""
    num_layers: int | None = None
    """Number of layers that ran; None for all."""
    rewritten: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Layer -> indices in `rows` of the rows whose residual stream an intervention replaced."""


@dataclass(frozen=True, slots=True)
class Thought:
    """Holds the thought of a Thinking States model after one chunk of c tokens: token ids, log-probabilities, and the
    chunk state [c, m] that is added to the next chunk.

    A thought is committed or rolled back together with its chunk's last token.
    Source: Thinking States (arXiv 2602.08332), Eq. 4 and 5.
    """

    request_id: int
    step: int
    phase: str
    chunk: int
    """Index, from 0, of the chunk that the thought was made from; the thought acts on the next chunk."""
    end: int
    """Absolute position of that chunk's last token."""
    token_ids: tuple[int, ...]
    has_ended: bool
    """False if the thought was cut at the model's limit."""
    logprobs: tuple[float, ...]
    """Log-probability of each token, in nats."""
    first_logits: Any = field(repr=False, default=None)
    """[v]: logits from which the first token was chosen."""
    state: Any = field(repr=False, default=None)
    """[c, m]: the chunk state, one vector for each token of the next chunk."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Holds how and at which step a request ended, and its generated tokens. reason: stop, length, cancelled or
    error."""

    request_id: int
    step: int
    reason: str
    committed: tuple[int, ...] = field(repr=False, default=())


CAPACITY_STEP = 64
"""Cache slots. Attention that runs request by request covers a multiple of this number of slots, so its bits are the
same for every capacity that is a multiple."""
ANY_CAPACITY = f"any multiple of {CAPACITY_STEP}"
"""Entry of a schedule fingerprint in place of the capacity, where bits do not depend on it."""


def fingerprint_differences(a: Mapping[str, object], b: Mapping[str, object]) -> list[tuple[str, object, object]]:
    """Returns (field, value in a, value in b) for every field in which two schedule fingerprints differ, sorted by
    field.

    A value is None if the fingerprint lacks the field. Names of model and adapter are not compared, because the weights
    are; nor is the lens, on which no token or state depends. A capacity in slots equals ANY_CAPACITY if it is such a
    multiple.
    """
    keys = sorted({*a, *b} - {"model", "adapter", "lens"})
    differing = [key for key in keys if a.get(key) != b.get(key) and not _fit_any_capacity(key, a, b)]
    return [(key, a.get(key), b.get(key)) for key in differing]


def _fit_any_capacity(key: str, a: Mapping[str, object], b: Mapping[str, object]) -> bool:
    """Returns True if one fingerprint holds for any multiple of CAPACITY_STEP slots and the other has such a number."""
    if key != "capacity" or ANY_CAPACITY not in (a.get(key), b.get(key)):
        return False
    (slots,) = {a.get(key), b.get(key)} - {ANY_CAPACITY}
    return isinstance(slots, int) and slots % CAPACITY_STEP == 0


class EngineError(RuntimeError):
    """Raised if a pass, a choice of a token or a drafter's call failed, or if a run cannot go on. A failed step commits
    no token."""


class ObserverError(RuntimeError):
    """Raised by an observer to end the run, such as after a failed self-check. No step is tried again."""


class Observer:
    """Receives the engine's events, in order, and ignores them; a subclass overrides the methods that it needs. An
    observer must not change the tensors."""

    def before_forward(self, step: int, phase: str, rows: Sequence[RowSlot], shape: tuple[int, int]) -> None:
        """Called before a pass, but not before a pass that rebuilds a preempted request. rows: the pass's real tokens.
        shape: batch size and token slots, pads and dummies included."""

    def after_forward(self, record: ForwardRecord) -> None:
        """Called after a pass that did not fail and rebuilds no request, with the pass's rows and logits."""

    def on_thought(self, thought: Thought) -> None:
        """Called after `after_forward`, once for each thought of a Thinking States model whose chunk ends in a real
        token of that pass."""

    def on_choice(self, request_id: int, step: int, position: int, token_id: int, logits: Any) -> None:
        """Called when the engine chooses a token for `position` from logits [v]: a draft token, the verifier's token at
        a draft position, or a request's next token. The token may never be committed."""

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        """Called when `token_ids` are committed at positions start, start + 1, ...; `roles` has one role for each
        token. If the same verdict rejected a draft token, `on_rollback` was called before."""

    def on_rollback(self, request_id: int, step: int, start: int, end: int) -> None:
        """Called when a verdict drops the draft tokens at positions start..end-1: the rejected one at `start`, and all
        after it. `on_commit` of the same verdict follows."""

    def on_abandon(self, request_id: int, step: int, start: int, end: int) -> None:
        """Called when the draft tokens at positions start..end-1 are dropped without a verdict."""

    def on_shared_prompt(self, request_id: int, step: int, source_id: int) -> None:
        """Called when a request copies the keys and values of its prompt from request `source_id`, which has the same
        prompt."""

    def on_preempt(self, request_id: int, step: int) -> None:
        """Called when a request that has not ended loses its cache row. When the request's keys and values are computed
        again later, `on_step`, `on_ledger` and perhaps `on_choice` are called, but not `before_forward`,
        `after_forward` and `on_thought`."""

    def on_compared(self, step: int, difference: str | None) -> None:
        """Called when the tokens of one request in a pass were computed twice. difference: text on where the bits
        differ; None if they are equal."""

    def on_failure(self, step: int) -> None:
        """Called when a step fails. The observer must discard the rows and thoughts of all passes since the last
        `on_step`."""

    def on_ledger(self, request_id: int, step: int, start: int, end: int, provenance: str) -> None:
        """Called when cache slots start..end-1 of a request's cache row take the given provenance."""

    def on_step(self, record: StepRecord) -> None:
        """Called at the end of a step that did not fail, with its record; after a drafter's call with several passes,
        once, for the last."""

    def on_finish(self, finished: Finished) -> None:
        """Called when a request ends."""


MANY = 8
"""Requests of the larger passes that are measured; costs of other numbers lie on the line through one and this many."""


@dataclass(frozen=True)
class DraftCosts:
    """Holds what the passes and draft tokens of a run cost on this machine, in seconds."""

    plain: tuple[float, float]
    """A decode pass of one request, and of MANY."""
    draft: tuple[float, float]
    """A draft token for each of one request, and of MANY."""
    verify: Mapping[int, float]
    """A verify pass of a whole group, by its width in tokens."""
    row: float = 0.0
    """Recording one row: its states in all layers, and their lens readings."""
    draft_rows: float = 0.0
    """Part of that which a draft token takes: the layers that the drafter runs, over those of the model."""

    def record(self) -> JsonDict:
        """Returns the costs as a dict for the run's metadata."""
        verify = {str(width): seconds for width, seconds in self.verify.items()}
        return {**asdict(self), "plain": [*self.plain], "draft": [*self.draft], "verify": verify}

    @classmethod
    def from_record(cls, record: JsonDict) -> "DraftCosts":
        """Returns the costs whose `record` this is."""
        pairs = {name: (float(record[name][0]), float(record[name][1])) for name in ("plain", "draft")}
        verify = {int(width): float(seconds) for width, seconds in record["verify"].items()}
        return cls(verify=verify, row=record["row"], draft_rows=record["draft_rows"], **pairs)

    def decoding(self, num_requests: int) -> float:
        """Returns the seconds of a decode pass of this many requests."""
        return _between(self.plain, num_requests) + num_requests * self.row

    def drafting(self, num_requests: int) -> float:
        """Returns the seconds in which this many requests draft one token each."""
        return _between(self.draft, num_requests) + num_requests * self.row * self.draft_rows

    def verifying(self, num_tokens: int, num_passes: int, num_rows: int) -> float:
        """Returns the seconds of verify passes of the first width that takes this many tokens of a request. num_rows:
        tokens that all of them feed, without pads."""
        width = min((width for width in self.verify if width >= num_tokens), default=max(self.verify))
        return num_passes * self.verify[width] + num_rows * self.row

    def undrafted(self, num_requests: int, num_running: int, num_verified: float, group: int) -> float:
        """Returns the seconds in which a run without a drafter generates one token of each of `num_requests`, which
        decode with the others of `num_running`, and of which the verifier verifies some."""
        of_verified = max(self.verify.values()) / (max(self.verify) * group) + self.row
        return self.decoding(num_running) * num_requests / num_running + num_verified * of_verified


def _between(costs: tuple[float, float], num_requests: int) -> float:
    """Returns the cost of this many requests, on the line through those of one and of MANY."""
    return costs[0] + max(costs[1] - costs[0], 0.0) * (num_requests - 1) / (MANY - 1)
