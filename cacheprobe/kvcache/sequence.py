"""The changing state of one request: its committed tokens, which only grow, and its open draft."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.status import ALLOWED, ENDED, FIELDS, OF_FINISH, Status, StatusError
from cacheprobe.kvcache.surgery import KVSnapshot, take_snapshot
from cacheprobe.ops.acceptance import StopRule


@dataclass(eq=False)
class SequenceState:
    """One request during a run: committed tokens, an open draft, and its cache row.

    prompt + committed tokens                  | draft
    0 ................ last_committed_position | last_committed_position + 1 ...
    Keys and values are cached up to last_committed_position - 1; the newest committed token is pending until a pass has
    fed it. `status` says what the request does, `check` which values of the other fields fit it.
    """

    request: Request
    is_verified: bool
    """Whether every token of this request passes the verifier."""
    sampling: SamplingParams
    """Sampling settings, with every None replaced by its default."""
    decode: Callable[[Sequence[int]], str] = str
    """Converts token ids to text, for stop strings."""
    status: Status = Status.WAITING
    """What the request does now; only `become` changes it."""
    cache_row: int = -1
    """Cache row; -1 while the request has none."""
    cache: KVCache | None = field(default=None, repr=False)
    """The cache that holds the row."""
    kept_rows: KVSnapshot | None = field(default=None, repr=False)
    """Snapshot of the cache row, copied at the end of a request with keep_kv."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt and committed tokens."""
    draft: list[int] = field(default_factory=list)
    draft_is_closed: bool = False
    """True if the drafter adds no more tokens before the next verification."""
    draft_cap: int | None = None
    """Number of draft tokens that the adaptive length allows; None for as many as the window takes."""
    draft_probs: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    """For rejection sampling, keyed by absolute position: the draft token and the distribution [v] it was sampled
    from."""
    num_prefilled: int = 0
    """Prompt tokens whose keys and values are cached."""
    prompt_logits: Tensor | None = None
    """Logits [v] of the last prompt token, kept for other requests with the same prompt."""
    admitted_at: int = -1
    """Order of admission; if cache rows run out, the newest request is preempted first."""
    is_edited: bool = False
    """True if interventions act on this request; its cache row is then not shared, even with the same prompt."""
    is_cancel_requested: bool = False
    """True if the caller wants the request to end; the loop cancels it at the next round."""
    finish: str | None = None
    """Reason of the end: "stop", "length", "cancelled" or "error"."""
    error: str | None = None
    """Message of the error that a failed request ended with."""

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or list(self.request.prompt_token_ids)
        assert self.sampling.stop_token_ids is not None and self.sampling.stop is not None
        self.stop_rule = StopRule(
            frozenset(cast("tuple[int, ...]", self.sampling.stop_token_ids)),
            cast("tuple[str, ...]", self.sampling.stop),
            self.decode,
        )

    def __repr__(self) -> str:
        counts = f"{self.num_generated} committed, {len(self.draft)} drafted"
        return f"SequenceState(request {self.request_id}, {counts}, {self.finish or self.status.value})"

    @property
    def request_id(self) -> int:
        """The request's number in the run."""
        assert self.request.request_id is not None
        return self.request.request_id

    @property
    def generated(self) -> list[int]:
        """Committed token ids without the prompt."""
        return self.token_ids[self.request.num_prompt_tokens :]

    @property
    def num_generated(self) -> int:
        """Number of committed tokens without the prompt."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Number of tokens that may still be committed."""
        assert self.sampling.max_new_tokens is not None
        return self.sampling.max_new_tokens - self.num_generated

    @property
    def last_committed_position(self) -> int:
        """Absolute position of the newest committed token, which is pending: its keys and values are not final."""
        return len(self.token_ids) - 1

    @property
    def newest(self) -> tuple[int, int]:
        """(token id, absolute position) of the newest token, drafts included."""
        return (self.draft or self.token_ids)[-1], self.last_committed_position + len(self.draft)

    @property
    def is_ended(self) -> bool:
        """Whether the request has finished, failed or was cancelled."""
        return self.status in ENDED

    def draft_limit(self, window: int) -> int:
        """Returns how many draft tokens one pass could still commit: the minimum of W - 1, the tokens left minus one,
        and the adaptive length."""
        limit = min(window - 1, self.num_left - 1)
        return limit if self.draft_cap is None else min(limit, self.draft_cap)

    def draft_ends(self) -> bool:
        """Returns whether the newest draft token would end the request; a token after it could never be committed."""
        return bool(self.draft) and self.stop_rule.ends([*self.generated, *self.draft])

    def is_ready(self, window: int) -> bool:
        """Returns whether the draft has its full length and waits for the verifier."""
        if not self.is_verified or self.status is not Status.RUNNING:
            return False
        return self.draft_is_closed or len(self.draft) >= self.draft_limit(window) or self.draft_ends()

    # -- from status to status

    def become(self, status: Status) -> None:
        """Changes the status. Raises: StatusError for a transition that is not allowed."""
        if status not in ALLOWED[self.status]:
            allowed = ", ".join(sorted(one.value for one in ALLOWED[self.status])) or "nothing"
            raise StatusError(
                f"request {self.request_id} cannot go from {self.status.value} to {status.value}; from "
                f"{self.status.value} it goes to {allowed}"
            )
        self.status = status

    def admit(self, cache: KVCache, order: int = 0) -> None:
        """Gives the request a free row of the cache. order: of its admission among those of the run."""
        self.become(Status.PREFILLING)
        self.cache_row, self.cache, self.admitted_at = cache.allocate(), cache, order

    def commit(self, token_ids: tuple[int, ...]) -> None:
        """Appends tokens that can no longer change, and drops the draft. The first ones end the prefill."""
        self.token_ids.extend(token_ids)
        self.drop_draft()
        if self.status is Status.PREFILLING:
            self.become(Status.RUNNING)

    def preempt(self) -> None:
        """Takes the row away; the caller releases it. The committed tokens stay, and the row is rebuilt from them."""
        self.become(Status.PREEMPTED)
        self.cache_row, self.cache, self.num_prefilled, self.prompt_logits = -1, None, 0, None

    def end(self, reason: str, error: str | None = None) -> None:
        """Ends the request for this reason; with an error if the reason is "error"."""
        self.become(OF_FINISH.get(reason, Status.FINISHED))
        self.finish, self.error = reason, error

    def check(self) -> None:
        """Checks that the fields fit the status (FIELDS), and that the cache holds what was committed and drafted.

        A running request has at least every committed token but the newest in the cache, and at most the whole draft.
        Raises: StatusError that names the request and what is wrong.
        """
        status, last = self.status, self.last_committed_position
        held = {
            "cache_row": self.cache_row >= 0,
            "cache": self.cache is not None,
            "prompt_logits": self.prompt_logits is not None,
            "num_prefilled": self.num_prefilled > 0,
            "draft": bool(self.draft),
            "draft_probs": bool(self.draft_probs),
            "num_generated": self.num_generated > 0,
            "finish": self.finish is not None,
            "error": self.error is not None,
            "kept_rows": self.kept_rows is not None,
        }
        for name, is_set in held.items():
            must, may = FIELDS[name]
            if (status in must and not is_set) or (is_set and status not in may):
                value = "not set" if not is_set else f"{getattr(self, name)!r:.40}"
                raise StatusError(f"request {self.request_id} is {status.value}, but its {name} is {value}")
        if self.finish is not None and OF_FINISH.get(self.finish, Status.FINISHED) is not status:
            raise StatusError(f"request {self.request_id} is {status.value}, but its finish is {self.finish!r}")
        if status is Status.RUNNING and self.num_prefilled != self.request.num_prompt_tokens:
            raise StatusError(f"request {self.request_id} is running, but its prompt is read to {self.num_prefilled}")
        num_cached = 0 if self.cache is None else int(self.cache.lengths[self.cache_row])
        if not (last if status is Status.RUNNING else 0) <= num_cached <= len(self.token_ids) + len(self.draft):
            raise StatusError(
                f"request {self.request_id} is {status.value} and has {num_cached} tokens in the cache, "
                f"{len(self.token_ids)} committed and {len(self.draft)} drafted"
            )

    def snapshot(self) -> KVSnapshot:
        """Returns a copy of the request's cached keys and values: of every committed token but the newest, which is not
        cached yet.

        Raises: ValueError if the request holds no complete cache row: it waits, was preempted, has failed or has ended.
        """
        held = 0 if self.cache is None or self.status is Status.FAILED else int(self.cache.lengths[self.cache_row])
        if self.cache is None or not 1 <= self.last_committed_position <= held:
            raise ValueError(
                f"request {self.request_id} holds {held} cache rows now, of {self.last_committed_position}: {self!r}"
            )
        return take_snapshot(self.cache, self.cache_row, self.token_ids[: self.last_committed_position])

    def leave_row(self) -> None:
        """Gives up the cache row at the end of the request, after a snapshot if the request has keep_kv."""
        if self.request.keep_kv and self.cache_row >= 0 and self.status is not Status.FAILED and self.num_generated:
            self.kept_rows = self.snapshot()
        self.cache_row, self.cache, self.prompt_logits = -1, None, None

    def drop_draft(self) -> None:
        """Drops the draft tokens without verification."""
        self.draft.clear()
        self.draft_probs.clear()
        self.draft_is_closed = False
