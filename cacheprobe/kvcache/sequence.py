"""Defines the changing state of one request: committed tokens, to which a run only adds, and a draft."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from torch import Tensor

from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.status import ALLOWED, ENDED, STATUS_OF_REASON, Status, StatusError
from cacheprobe.kvcache.surgery import KVSnapshot, take_snapshot
from cacheprobe.ops.acceptance import StopRule
from cacheprobe.ops.sampling import Choice


@dataclass(eq=False)
class SequenceState:
    """Holds one request during a run: its committed tokens, its draft (tokens not yet verified), its cache row and its
    status.

    prompt + committed tokens                  | draft
    0 ................ last_committed_position | last_committed_position + 1 ...
    Keys and values are cached up to last_committed_position - 1; the newest committed token is pending until a pass has
    fed it. `status` says what the request does.
    """

    request: Request
    is_verified: bool
    """Whether the verifier decides the next token of this request. With a drafter it changes with `is_drafted`."""
    sampling: SamplingParams
    """Sampling settings, with every None replaced by its default."""
    decode: Callable[..., str] = str
    """Converts token ids to text, for stop strings: `CachedLM.decode`."""
    is_invariant: bool = False
    """Whether passes of any number of requests decide its tokens (determinism="invariant"), with a drafter or without
    one. Without one it is not verified: a decode pass commits its token."""
    reads_freely: bool = False
    """Whether the prompt is read as without a drafter, though the verifier decides the tokens."""
    status: Status = Status.WAITING
    """What the request does now; only `become` changes the field."""
    cache_row: int = -1
    """Number of the request's cache row; -1 while the request has none."""
    cache: KVCache | None = field(default=None, repr=False)
    """The cache of the request's cache row; None while the request has none."""
    kept_rows: KVSnapshot | None = field(default=None, repr=False)
    """Snapshot of the request's keys and values, copied at the end of a request with keep_kv; else None."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt and committed tokens."""
    draft: list[int] = field(default_factory=list)
    draft_is_closed: bool = False
    """True if the drafter adds no more tokens before the next verification."""
    is_drafted: bool = False
    """Whether the drafter makes the request's next draft; if not, the request goes on as without a drafter."""
    draft_cap: int | None = None
    """Number of draft tokens that draft_length allows; None for as many as the window takes."""
    draft_probs: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    """For rejection sampling, keyed by absolute position: the draft token and the distribution [v] it was sampled
    from."""
    num_prefilled: int = 0
    """Number of prompt tokens whose keys and values are cached."""
    prompt_logits: Tensor | None = None
    """Logits [v] of the last prompt token, kept for other requests with the same prompt."""
    prompt_choice: Choice | None = None
    """The Choice of the most likely token of `prompt_logits`, if it was read with them."""
    admitted_at: int = -1
    """Order of admission. If the running requests need more than max_kv_tokens slots, the newest request is preempted
    first."""
    is_edited: bool = False
    """True if interventions act on this request; its keys and values are then not shared, even with the same prompt."""
    cancel_inbox: list[int] = field(default_factory=list, repr=False)
    """The scheduler's list of requests to cancel, to which `is_cancel_requested = True` adds this request's id."""
    finish: str | None = None
    """Reason of the end: "stop", "length", "cancelled" or "error"; None before."""
    error: str | None = None
    """Message of the error that a failed request ended with; else None."""

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or list(self.request.prompt_token_ids)
        self._is_decided = self.is_verified or self.is_invariant
        assert self.sampling.stop_token_ids is not None and self.sampling.stop is not None
        self.stop_rule = StopRule(
            frozenset(cast("tuple[int, ...]", self.sampling.stop_token_ids)),
            cast("tuple[str, ...]", self.sampling.stop),
            partial(self.decode, after=self.request.prompt_token_ids),
        )

        self._is_cancel_requested = False

    @property
    def reads_in_chunks(self) -> bool:
        """Whether the request's prompt is read in passes whose bits depend on that prompt alone."""
        return self._is_decided and not self.reads_freely

    @property
    def is_cancel_requested(self) -> bool:
        """True if the caller wants the request to end; the engine cancels the request at the next round."""
        return self._is_cancel_requested

    @is_cancel_requested.setter
    def is_cancel_requested(self, is_requested: bool) -> None:
        self._is_cancel_requested = is_requested
        if is_requested:
            self.cancel_inbox.append(self.request_id)

    def __repr__(self) -> str:
        counts = f"{self.num_generated} committed, {len(self.draft)} drafted"
        return f"SequenceState(request {self.request_id}, {counts}, {self.finish or self.status.value})"

    @property
    def request_id(self) -> int:
        """The request's number in the run, from 0 on."""
        assert self.request.request_id is not None
        return self.request.request_id

    @property
    def generated(self) -> list[int]:
        """Committed token ids without the prompt, as a new list."""
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
        """Absolute position of the newest committed token (at first, of the prompt's last token)."""
        return len(self.token_ids) - 1

    @property
    def newest(self) -> tuple[int, int]:
        """(token id, absolute position) of the newest draft token, or without a draft, of the newest committed
        token."""
        return (self.draft or self.token_ids)[-1], self.last_committed_position + len(self.draft)

    @property
    def is_ended(self) -> bool:
        """Whether the request has finished, failed or was cancelled."""
        return self.status in ENDED

    def draft_limit(self, window: int) -> int:
        """Returns the largest number of draft tokens that one verify pass could commit: the minimum of window - 1, the
        tokens left minus one, and `draft_cap`."""
        limit = min(window - 1, self.num_left - 1)
        return limit if self.draft_cap is None else min(limit, self.draft_cap)

    def draft_ends(self) -> bool:
        """Returns whether the newest draft token would end the request; False without a draft. A token after it could
        never be committed."""
        return bool(self.draft) and self.stop_rule.ends([*self.generated, *self.draft])

    def is_ready(self, window: int) -> bool:
        """Returns whether this request waits for the verifier: it is running and verified, and its draft was ended by
        the drafter, is full for a pass of `window` tokens, or would end the request."""
        if not self.is_verified or self.status is not Status.RUNNING:
            return False
        return self.draft_is_closed or len(self.draft) >= self.draft_limit(window) or self.draft_ends()

    # -- from status to status

    def become(self, status: Status) -> None:
        """Changes the status to `status`. Raises: StatusError for a transition that is not allowed."""
        if status not in ALLOWED[self.status]:
            allowed = ", ".join(sorted(one.value for one in ALLOWED[self.status])) or "nothing"
            raise StatusError(
                f"request {self.request_id} cannot go from {self.status.value} to {status.value}; from "
                f"{self.status.value} it goes to {allowed}"
            )
        self.status = status

    def admit(self, cache: KVCache, order: int = 0) -> None:
        """Gives a waiting or preempted request a free cache row and the status prefilling. order: number of this
        admission in the run. Raises: StatusError for another status; CacheIntegrityError if no cache row is free."""
        self.become(Status.PREFILLING)
        self.cache_row, self.cache, self.admitted_at = cache.allocate(), cache, order

    def commit(self, token_ids: tuple[int, ...]) -> None:
        """Appends tokens to the committed ones, and drops the draft. A request that was prefilling becomes running."""
        self.token_ids.extend(token_ids)
        self.drop_draft()
        if self.status is Status.PREFILLING:
            self.become(Status.RUNNING)

    def preempt(self) -> None:
        """Sets the status to preempted and forgets the cache row, which the caller must release before this call.
        Committed tokens stay; `Prefill.rebuild` later fills a new row from them."""
        self.become(Status.PREEMPTED)
        self.cache_row, self.cache, self.num_prefilled, self.prompt_logits = -1, None, 0, None

    def end(self, reason: str, error: str | None = None) -> None:
        """Ends the request: sets finish to `reason`, and the status that follows from the reason. error: the message if
        the reason is "error"."""
        self.become(STATUS_OF_REASON.get(reason, Status.FINISHED))
        self.finish, self.error = reason, error

    def snapshot(self) -> KVSnapshot:
        """Returns a copy of the request's keys and values as a KVSnapshot: of the prompt and all committed tokens but
        the newest.

        Raises: ValueError if not all of these tokens are cached (as for a request that waits, was preempted, has failed
        or has left its cache row), if there is none, or if the cache holds more than keys and values.
        """
        num_cached = (
            0 if self.cache is None or self.status is Status.FAILED else int(self.cache.lengths[self.cache_row])
        )
        if self.cache is None or not 1 <= self.last_committed_position <= num_cached:
            raise ValueError(
                f"request {self.request_id} holds {num_cached} cache slots now, of {self.last_committed_position}: "
                f"{self!r}"
            )
        return take_snapshot(self.cache, self.cache_row, self.token_ids[: self.last_committed_position])

    def leave_row(self) -> None:
        """Forgets the cache row at the end of the request; before that, stores a snapshot in `kept_rows` if the request
        has keep_kv, a generated token, and no error. The caller releases the row."""
        if self.request.keep_kv and self.cache_row >= 0 and self.status is not Status.FAILED and self.num_generated:
            self.kept_rows = self.snapshot()
        self.cache_row, self.cache, self.prompt_logits = -1, None, None

    def drop_draft(self) -> None:
        """Empties the draft: its tokens and their distributions. The drafter may then add tokens again."""
        self.draft.clear()
        self.draft_probs.clear()
        self.draft_is_closed = False
