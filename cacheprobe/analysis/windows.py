"""Finds verify windows in the events table: the draft, the verifier's tokens, and the steps that computed them."""

from dataclasses import dataclass

import pandas as pd

from cacheprobe.core.values import TableLine


@dataclass(frozen=True, slots=True)
class Window:
    """Holds one verify pass of one request: the draft, the verifier's tokens, and the steps that led to the pass."""

    request_id: int
    step: int
    start: int
    """Absolute position of T1', the first draft token. T0 is at the position before."""
    newest_token_id: int
    """T0, the last token committed before this window; the window's pass writes the cache slot of T0."""
    draft_token_ids: tuple[int, ...]
    """Draft tokens T1', T2', ..."""
    target_token_ids: tuple[int, ...]
    """T1, T2, ...: the verifier's own tokens, one for each of its input tokens."""
    committed_token_ids: tuple[int, ...]
    num_accepted: int
    finish: str | None
    batch_shape: tuple[int, int]
    """Requests and token slots of the verify pass, dummies and pads included."""
    prefill_steps: tuple[int, ...]
    """Steps that computed the request's prompt; after a preemption, those that computed it again."""
    decode_steps: tuple[int, ...]
    """For each draft token, the step that drafted it."""

    def __post_init__(self) -> None:
        n, drafted, committed = self.num_accepted, len(self.draft_token_ids), len(self.committed_token_ids)
        if not (0 <= n <= drafted == len(self.decode_steps) and 1 <= committed <= len(self.target_token_ids)):
            raise ValueError(
                f"request {self.request_id} step {self.step}: accepted {n} of {drafted} drafted tokens, "
                f"{len(self.decode_steps)} proposed, committed {committed} of {len(self.target_token_ids)} targets"
            )

    @property
    def is_full_match(self) -> bool:
        """True if the window has a draft and the verifier accepted all of it."""
        return 0 < len(self.draft_token_ids) == self.num_accepted

    @property
    def is_rollback(self) -> bool:
        """True if at least one draft token was not accepted."""
        return self.num_accepted < len(self.draft_token_ids)

    @property
    def outcomes(self) -> tuple[str, ...]:
        """Tuple with one word for each of the verifier's own tokens (not the verdicts of draft tokens): "accepted" if
        the token equals an accepted draft token; then once "recovered" (after a mismatch) or "bonus" (after a full
        match), if committed; "not used" if the token was not committed."""
        own = "recovered" if self.is_rollback else "bonus"
        committed = len(self.committed_token_ids)
        return tuple(
            "accepted" if i < self.num_accepted else own if i < committed else "not used"
            for i in range(len(self.target_token_ids))
        )

    @property
    def num_truncated(self) -> int:
        """Number of cache slots that the pass wrote and that were removed again."""
        return len(self.target_token_ids) - len(self.committed_token_ids)

    @property
    def truncated_positions(self) -> range:
        """Positions of the cache slots that the pass wrote and that were removed again."""
        end = self.start - 1 + len(self.target_token_ids)
        return range(end - self.num_truncated, end)

    @property
    def ledger_steps(self) -> tuple[int, int, int]:
        """Steps after which diagrams draw the cache: (last prefill step, step before the verify pass, step of the
        verify pass)."""
        return self.prefill_steps[-1], self.step - 1, self.step


def verified_requests(events: pd.DataFrame) -> set[int]:
    """Returns the set of ids of the requests with at least one verdict in the events table. A never verified request
    that filled an unused batch index of a verify pass has none."""
    return set(events.request_id[events.num_accepted.notna()].tolist())


def find_windows(events: pd.DataFrame, request_id: int) -> tuple[Window, ...]:
    """Returns a tuple with a `Window` for each verify pass of a request, in order, except passes without a verdict on
    this request (it only rebuilt cache slots, or is never verified and filled an unused batch index); () if the request
    was never verified.

    events: as in `Trace.events`.  Raises: ValueError for a request without events.
    """
    of_request = events[events.request_id == request_id].sort_values("step")
    if of_request.empty:
        known = ", ".join(str(number) for number in sorted(events.request_id.unique()))
        raise ValueError(f"no events of request {request_id}; the table has {known or 'none'}")
    windows: list[Window] = []
    prefill_steps: list[int] = []
    is_prefill = True
    draft_steps: list[int] = []
    newest_token_id = -1
    for event in of_request.itertuples():
        was_prefill, is_prefill = is_prefill, event.phase == "prefill"
        if is_prefill:
            prefill_steps = [*prefill_steps, int(event.step)] if was_prefill else [int(event.step)]
            draft_steps = []  # a preempted request is computed again, and drafts anew
        elif event.phase == "decode":
            draft_steps += [int(event.step)] * len(event.proposed_token_ids)
        elif pd.notna(event.num_accepted):  # null without a verdict: rebuilt slots, or a never verified request
            # a draft of a failed pass was abandoned; its tokens come before those of the judged draft
            abandoned = len(draft_steps) - len(event.draft_token_ids)
            windows.append(_window(event, newest_token_id, tuple(prefill_steps), tuple(draft_steps[abandoned:])))
            draft_steps = []
        if len(event.committed_token_ids):
            newest_token_id = int(event.committed_token_ids[-1])
    return tuple(windows)


def _window(event: TableLine, newest: int, prefill_steps: tuple[int, ...], decode_steps: tuple[int, ...]) -> Window:
    return Window(
        request_id=int(event.request_id),
        step=int(event.step),
        start=int(event.draft_start),
        newest_token_id=newest,
        draft_token_ids=tuple(int(token_id) for token_id in event.draft_token_ids),
        target_token_ids=tuple(int(token_id) for token_id in event.target_token_ids),
        committed_token_ids=tuple(int(token_id) for token_id in event.committed_token_ids),
        num_accepted=int(event.num_accepted),
        finish=None if pd.isna(event.finish) else str(event.finish),
        batch_shape=(int(event.batch_rows), int(event.batch_slots)),
        prefill_steps=prefill_steps,
        decode_steps=decode_steps,
    )


def accepted_whole(windows: tuple[Window, ...]) -> Window | None:
    """Returns the window with the longest draft that was accepted whole, and of equally long ones the first; None if no
    draft was accepted whole."""
    return max((w for w in windows if w.is_full_match), key=lambda w: (len(w.draft_token_ids), -w.step), default=None)


def rolled_back(windows: tuple[Window, ...]) -> Window | None:
    """Returns the best example of a window with a rollback: a partly accepted draft if there is one, then the longest
    draft, then the first; None without a rollback."""
    return max(
        (w for w in windows if w.is_rollback),
        key=lambda w: (w.num_accepted > 0, len(w.draft_token_ids), -w.step),
        default=None,
    )


def pick_request(events: pd.DataFrame) -> int:
    """Returns the id of the request that shows most in a report: if possible, one with a draft accepted whole and a
    rollback; then the longest draft accepted whole, a partly accepted draft, any verify window, the lowest id."""

    def score(request_id: int) -> tuple[bool, int, bool, bool, int]:
        """Returns the sort key of a request; the request with the largest key is picked."""
        windows = find_windows(events, request_id)
        full, rollback = accepted_whole(windows), rolled_back(windows)
        drafted = len(full.draft_token_ids) if full else 0
        partial = rollback is not None and rollback.num_accepted > 0
        return full is not None and rollback is not None, drafted, partial, bool(windows), -request_id

    return max((int(request_id) for request_id in events.request_id.unique()), key=score)
