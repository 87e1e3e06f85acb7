"""Everything about one request that changes while it runs: committed tokens, which only grow, and an open draft."""

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
    """One request on its way: committed tokens, an open draft, and its cache row.

    prompt + committed tokens        | draft
    0 ................ last_committed_position      | last_committed_position + 1 ...
    cached up to last_committed_position - 1; the newest committed token is pending until its row is written
    """

    request: Request
    is_verified: bool
    """Whether every token of this request passes the verifier."""
    sampling: SamplingParams
    """With no field left at None."""
    decode: Callable[[Sequence[int]], str] = str
    """Token ids to text, for stop strings."""
    row: int = -1
    """Cache row, -1 while waiting."""
    cache: KVCache | None = field(default=None, repr=False)
    """Where that row is."""
    kept_rows: KVSnapshot | None = field(default=None, repr=False)
    """Copied when the request ended, where it asks for that."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt and committed tokens."""
    draft: list[int] = field(default_factory=list)
    draft_is_closed: bool = False
    """The drafter has nothing to add before the next verification."""
    draft_cap: int | None = None
    """Candidates that the adaptive length allows; None for as many as the window takes."""
    draft_probs: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    """By absolute position: the candidate and the distribution [v] it was drawn from; for rejection sampling."""
    num_prefilled: int = 0
    num_rebuilt: int = 0
    """After an eviction: positions whose cache rows stand again."""
    prompt_logits: Tensor | None = None
    """[v] logits of the last prompt token, kept for other requests of the same prompt."""
    admitted_at: int = -1
    """Order of admission: the newest gives way first where cache rows run out."""
    is_edited: bool = False
    """Interventions act on it: its rows are no other request's, even of the same prompt."""
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
        assert self.request.request_id is not None
        return self.request.request_id

    @property
    def generated(self) -> list[int]:
        """Committed token ids without the prompt."""
        return self.token_ids[self.request.num_prompt_tokens :]

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_left(self) -> int:
        assert self.sampling.max_new_tokens is not None
        return self.sampling.max_new_tokens - self.num_generated

    @property
    def last_committed_position(self) -> int:
        """Absolute position of the newest committed token: it is pending, its cache row is not final."""
        return len(self.token_ids) - 1

    @property
    def newest(self) -> tuple[int, int]:
        """(token id, absolute position) of the newest token, drafts included."""
        return (self.draft or self.token_ids)[-1], self.last_committed_position + len(self.draft)

    @property
    def is_prompt_read(self) -> bool:
        return self.num_prefilled >= self.request.num_prompt_tokens and self.num_generated > 0

    def draft_limit(self, window: int) -> int:
        """Candidates that one pass could still commit: W - 1, one less than the tokens left, the adaptive length."""
        limit = min(window - 1, self.num_left - 1)
        return limit if self.draft_cap is None else min(limit, self.draft_cap)

    def draft_ends(self) -> bool:
        """Whether the newest candidate would end the request: nothing after it could be committed."""
        return bool(self.draft) and self.stop_rule.ends([*self.generated, *self.draft])

    def is_ready(self, window: int) -> bool:
        """Whether the draft is as long as it can be and waits for the verifier."""
        if not self.is_verified or self.finish or not self.is_prompt_read:
            return False
        return self.draft_is_closed or len(self.draft) >= self.draft_limit(window) or self.draft_ends()

    def commit(self, token_ids: tuple[int, ...]) -> None:
        """These tokens can no longer change; whatever was drafted is settled by them, accepted or not."""
        self.token_ids.extend(token_ids)
        self.drop_draft()

    def snapshot(self) -> KVSnapshot:
        """A copy of its cache rows: of every committed token but the newest, which has none yet.

        Raises: ValueError where it holds no whole rows: it waits, was evicted, has failed or has ended.
        """
        held = 0 if self.cache is None or self.row < 0 or self.error else int(self.cache.lengths[self.row])
        if self.cache is None or not 1 <= self.last_committed_position <= held:
            raise ValueError(
                f"request {self.request_id} holds {held} cache rows now, of {self.last_committed_position}: {self!r}"
            )
        return take_rows(self.cache, self.row, self.token_ids[: self.last_committed_position])

    def leave_row(self) -> None:
        """It has ended: its rows are copied where it asks for that, and are no longer its own."""
        if self.request.keep_rows and self.row >= 0 and not self.error and self.last_committed_position:
            self.kept_rows = self.snapshot()
        self.row, self.cache, self.prompt_logits = -1, None, None

    def drop_draft(self) -> None:
        """Forget the candidates, unverified."""
        self.draft.clear()
        self.draft_probs.clear()
        self.draft_is_closed = False
