"""The changing state of one request: its committed tokens, which only grow, and its open draft."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.surgery import KVSnapshot, take_rows
from cacheprobe.ops.acceptance import StopRule


@dataclass(eq=False)
class SequenceState:
    """One request during a run: committed tokens, an open draft, and its cache row.

    prompt + committed tokens                  | draft
    0 ................ last_committed_position | last_committed_position + 1 ...
    Keys and values are cached up to last_committed_position - 1; the newest committed token is pending until a pass has
    fed it.
    """

    request: Request
    is_verified: bool
    """Whether every token of this request passes the verifier."""
    sampling: SamplingParams
    """Sampling settings, with every None replaced by its default."""
    decode: Callable[[Sequence[int]], str] = str
    """Converts token ids to text, for stop strings."""
    row: int = -1
    """Cache row; -1 while the request waits."""
    cache: KVCache | None = field(default=None, repr=False)
    """The cache that holds the row."""
    kept_rows: KVSnapshot | None = field(default=None, repr=False)
    """Snapshot of the cache row, copied at the end of a request with keep_rows."""
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
    num_rebuilt: int = 0
    """After a preemption: number of positions whose keys and values have been recomputed."""
    prompt_logits: Tensor | None = None
    """Logits [v] of the last prompt token, kept for other requests with the same prompt."""
    admitted_at: int = -1
    """Order of admission; if cache rows run out, the newest request is preempted first."""
    is_edited: bool = False
    """True if interventions act on this request; its cache row is then not shared, even with the same prompt."""
    is_cancelled: bool = False
    finish: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or list(self.request.prompt_token_ids)
        assert self.sampling.stop_token_ids is not None and self.sampling.stop is not None
        self.stop_rule = StopRule(
            frozenset(cast("tuple[int, ...]", self.sampling.stop_token_ids)),
            cast("tuple[str, ...]", self.sampling.stop),
            self.decode,
        )

    def __repr__(self) -> str:
        state = self.finish or ("waiting" if self.row < 0 else "running")
        counts = f"{self.num_generated} committed, {len(self.draft)} drafted"
        return f"SequenceState(request {self.request_id}, {counts}, {state})"

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
    def is_prompt_read(self) -> bool:
        """Whether the whole prompt is cached and a first token is committed."""
        return self.num_prefilled >= self.request.num_prompt_tokens and self.num_generated > 0

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
        if not self.is_verified or self.finish or not self.is_prompt_read:
            return False
        return self.draft_is_closed or len(self.draft) >= self.draft_limit(window) or self.draft_ends()

    def commit(self, token_ids: tuple[int, ...]) -> None:
        """Appends tokens that can no longer change, and drops the draft."""
        self.token_ids.extend(token_ids)
        self.drop_draft()

    def snapshot(self) -> KVSnapshot:
        """Returns a copy of the request's cached keys and values: of every committed token but the newest, which is not
        cached yet.

        Raises: ValueError if the request holds no complete cache row: it waits, was preempted, has failed or has ended.
        """
        held = 0 if self.cache is None or self.row < 0 or self.error else int(self.cache.lengths[self.row])
        if self.cache is None or not 1 <= self.last_committed_position <= held:
            raise ValueError(
                f"request {self.request_id} holds {held} cache rows now, of {self.last_committed_position}: {self!r}"
            )
        return take_rows(self.cache, self.row, self.token_ids[: self.last_committed_position])

    def leave_row(self) -> None:
        """Gives up the cache row at the end of the request, after a snapshot if the request has keep_rows."""
        if self.request.keep_rows and self.row >= 0 and not self.error and self.last_committed_position:
            self.kept_rows = self.snapshot()
        self.row, self.cache, self.prompt_logits = -1, None, None

    def drop_draft(self) -> None:
        """Drops the draft tokens without verification."""
        self.draft.clear()
        self.draft_probs.clear()
        self.draft_is_closed = False
