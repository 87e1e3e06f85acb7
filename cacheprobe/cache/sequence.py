"""Everything about one request that changes while it runs: committed tokens, which only grow, and an open draft."""

from dataclasses import dataclass, field

from cacheprobe.records import Request


@dataclass
class SequenceState:
    """One request on its way: committed tokens, an open draft, and its cache row.

    prompt + committed tokens        | draft
    0 ................ frontier      | frontier + 1 ...
    cached up to frontier - 1; the newest committed token is pending until its row is written
    """

    request: Request
    is_verified: bool
    """Whether every token of this request passes the verifier."""
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    seed: int
    row: int = -1
    """Cache row, -1 while waiting."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt and committed tokens."""
    draft: list[int] = field(default_factory=list)
    draft_is_closed: bool = False
    """The drafter has nothing to add before the next verification."""
    num_prefilled: int = 0
    finish: str | None = None

    def __repr__(self) -> str:
        state = self.finish or ("waiting" if self.row < 0 else "running")
        counts = f"{self.num_generated} committed, {len(self.draft)} drafted"
        return f"SequenceState(request {self.request_id}, {counts}, {state})"

    @property
    def request_id(self) -> int:
        assert self.request.request_id is not None
        return self.request.request_id

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_left(self) -> int:
        return self.max_new_tokens - self.num_generated

    @property
    def frontier(self) -> int:
        """Absolute position of the newest committed token: it is pending, its cache row is not final."""
        return len(self.token_ids) - 1

    @property
    def newest(self) -> tuple[int, int]:
        """(token id, absolute position) of the newest token, drafts included."""
        return (self.draft or self.token_ids)[-1], self.frontier + len(self.draft)

    def draft_limit(self, window: int) -> int:
        """Candidates that one pass could still commit: W - 1, and one less than the tokens left."""
        return min(window - 1, self.num_left - 1)

    def is_ready(self, window: int) -> bool:
        """Whether the draft is as long as it can be and waits for the verifier."""
        if not self.is_verified or self.finish or self.num_prefilled < self.request.num_prompt_tokens:
            return False
        stopped = bool(self.draft) and self.draft[-1] in self.stop_token_ids
        return self.draft_is_closed or stopped or len(self.draft) >= self.draft_limit(window)

    def commit(self, token_ids: tuple[int, ...]) -> None:
        """These tokens can no longer change; whatever was drafted is settled by them, accepted or not."""
        self.token_ids.extend(token_ids)
        self.draft.clear()
        self.draft_is_closed = False
