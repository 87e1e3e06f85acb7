"""Decides which requests are admitted, preempted and retired, and which ones draft or are verified next."""

from collections import deque
from collections.abc import Sequence

from cacheprobe.core.config import EngineConfig
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import Status


class Scheduler:
    """Admits requests, preempts and retires them, and chooses the requests of each pass.

    Requests are admitted in the order of arrival, preempted ones first, as `max_running` and max_kv_tokens allow.
    """

    def __init__(self, states: Sequence[SequenceState], cache: KVCache, config: EngineConfig) -> None:
        self.waiting = deque(sorted(states, key=lambda state: state.request.arrival_step))
        self.max_running = min(len(states), config.max_batch)
        self.running: list[SequenceState] = []
        self.cache, self.config = cache, config
        self._num_admitted = 0
        self._cancel_inbox = [state.request_id for state in states if state.is_cancel_requested]
        """Ids of requests to cancel. Only if there are any does a round look through the queue."""
        for state in states:
            state.cancel_inbox = self._cancel_inbox
            state.draft_cap = None if isinstance(config.draft_length, str) else config.draft_length

    @property
    def is_done(self) -> bool:
        """True if every request has ended and left its cache row."""
        return not self.waiting and not self.running

    # -- coming and going

    def admit(self, step: int) -> list[SequenceState]:
        """Gives the lowest free cache rows to requests that have arrived, and returns these requests.

        A request waits, with all after it in the queue, if `max_running` or max_kv_tokens would be exceeded. If no
        request is running, the next one is admitted even before its arrival step.
        """
        admitted = []
        while self.waiting and len(self.running) < self.max_running:
            state = self.waiting[0]
            has_arrived = state.request.arrival_step <= step or not self.running
            if not has_arrived or not self._fits(state):
                break
            self.waiting.popleft()
            state.admit(self.cache, self._num_admitted)
            self._num_admitted += 1
            self.running.append(state)
            admitted.append(state)
        # sorted by cache row, so that a full batch is one contiguous view of the cache
        self.running.sort(key=lambda state: state.cache_row)
        return admitted

    def to_preempt(self) -> list[SequenceState]:
        """Removes the last admitted requests until the others fit into max_kv_tokens slots; returns the removed ones.

        Removed requests wait at the front of the queue. One request keeps running. The caller frees the cache rows.
        """
        preempted = []
        while (
            self.config.max_kv_tokens is not None
            and self._demand() > self.config.max_kv_tokens
            and len(self.running) > 1
        ):
            state = max(self.running, key=lambda state: state.admitted_at)
            self.running.remove(state)
            self.waiting.appendleft(state)
            preempted.append(state)
        return preempted

    def cancelled(self) -> list[SequenceState]:
        """Returns the requests that the caller has cancelled and that have not ended yet.

        A waiting one moves to `running`, even beyond `max_running`, so that `retire` removes it.
        """
        if not self._cancel_inbox:
            return []
        self._cancel_inbox.clear()  # before the look at the queue: a Ctrl-C after this line counts for the next round
        self.running += [state for state in self.waiting if state.is_cancel_requested]
        moved = {*self.running}
        self.waiting = deque(state for state in self.waiting if state not in moved)
        return [s for s in self.running if s.is_cancel_requested and not s.is_ended]

    def retire(self) -> list[SequenceState]:
        """Removes ended requests, frees their cache rows, and returns these requests."""
        ended = [state for state in self.running if state.is_ended]
        self.running[:] = [state for state in self.running if not state.is_ended]
        for state in ended:
            cache_row = state.cache_row
            state.leave_row()
            if cache_row >= 0:
                self.cache.release(cache_row)
        return ended

    def _fits(self, state: SequenceState) -> bool:
        """Returns True if the request and the running ones need at most max_kv_tokens slots."""
        return self.config.max_kv_tokens is None or self._demand() + self._slots_of(state) <= self.config.max_kv_tokens

    def _demand(self) -> int:
        """Returns the number of cache slots that the running requests need together."""
        return sum(self._slots_of(state) for state in self.running)

    def _slots_of(self, state: SequenceState) -> int:
        """Returns the number of cache slots that a request may need until its next commit."""
        return len(state.token_ids) + (self.config.window if state.is_verified else 1)

    # -- who does what in this round

    def drafting(self) -> list[SequenceState]:
        """Returns the requests of the next decode pass or drafter call: the never verified ones, and the verified ones
        whose draft is not ready to be verified."""
        return [
            state for state in self.running if state.status is Status.RUNNING and not state.is_ready(self.config.window)
        ]

    def fill_ins(self) -> list[SequenceState]:
        """Returns the requests that are never verified and take the unused batch indices of the next verify pass; []
        if the window is longer than 1."""
        if self.config.window > 1:
            return []
        num_ready = sum(state.is_ready(1) for state in self.running)
        return [state for state in self.drafting() if not state.is_verified][: -num_ready % self.config.group]

    def ready_groups(self, fill_ins: Sequence[SequenceState] = ()) -> list[list[SequenceState]]:
        """Returns groups of requests, one for each verify pass of this round.

        A group that is not full must wait while a verified request is still drafting. Later, dummies fill it, unless
        determinism="invariant".
        """
        ready = [state for state in self.running if state.is_ready(self.config.window)] + list(fill_ins)
        ready.sort(key=lambda state: state.cache_row)
        size = self.config.group
        groups = [ready[i : i + size] for i in range(0, len(ready), size)]
        others_coming = any(state.is_verified for state in self.drafting())
        return [group for group in groups if len(group) == size or not others_coming]
