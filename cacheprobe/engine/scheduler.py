"""Schedules requests: arrival, admission, drafting, verification and preemption.

Reads no tensors, but for the places of the cache.
"""

from collections import deque
from collections.abc import Sequence

from cacheprobe.core.config import EngineConfig
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import Status

WATCHED_EVERY = 16
"""Of so many full passes, one leaves a place free, in which the pass is compared with itself; a request waits for the
next pass."""


class Scheduler:
    """Admits requests in the order of arrival, at most `max_running` at once. Each takes the lowest free cache row."""

    def __init__(self, states: Sequence[SequenceState], cache: KVCache, config: EngineConfig, max_running: int) -> None:
        self.waiting = deque(sorted(states, key=lambda state: state.request.arrival_step))
        self.max_running = max_running
        self.running: list[SequenceState] = []
        self.cache, self.config = cache, config
        self._num_admitted = self._num_full = 0

    @property
    def is_done(self) -> bool:
        """Whether every request has ended."""
        return not self.waiting and not self.running

    # -- coming and going

    def admit(self, step: int) -> list[SequenceState]:
        """Gives free cache rows to requests that have arrived; returns the admitted requests.

        If no request is running, the next one is admitted before its arrival step.
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
        # in the order of their rows, so that a full batch is one contiguous view of the cache
        self.running.sort(key=lambda state: state.cache_row)
        return admitted

    def to_preempt(self) -> list[SequenceState]:
        """Takes out the newest requests until the others fit into max_kv_tokens; they are next in line."""
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
        """Returns the requests cancelled since the last round; those not yet admitted leave the queue."""
        for state in [s for s in self.waiting if s.is_cancel_requested]:
            self.waiting.remove(state)
            self.running.append(state)
        return [s for s in self.running if s.is_cancel_requested and not s.is_ended]

    def retire(self) -> list[SequenceState]:
        """Frees the cache places of finished requests, and returns these requests."""
        finished = [state for state in self.running if state.is_ended]
        for state in finished:
            self.running.remove(state)
            cache_row = state.cache_row
            state.leave_row()
            if cache_row >= 0:
                self.cache.release(cache_row)
        return finished

    def _fits(self, state: SequenceState) -> bool:
        return self.config.max_kv_tokens is None or self._demand() + self._rows_of(state) <= self.config.max_kv_tokens

    def _demand(self) -> int:
        return sum(self._rows_of(state) for state in self.running)

    def _rows_of(self, state: SequenceState) -> int:
        """Returns the number of cache slots that a request may hold until its next commit."""
        return len(state.token_ids) + (self.config.window if state.is_verified else 1)

    # -- who does what in this round

    def drafting(self) -> list[SequenceState]:
        """Returns the requests of the next decode: all but those that wait for the verifier."""
        return [
            state for state in self.running if state.status is Status.RUNNING and not state.is_ready(self.config.window)
        ]

    def piggybacked(self) -> list[SequenceState]:
        """Returns unverified requests that fill the empty batch places of a verify pass; [] if the window is longer
        than 1.

        With a window of 1 a verify pass is a decode of a fixed number of requests: a token in an empty place costs no
        more.
        """
        if self.config.window > 1:
            return []
        num_ready = sum(state.is_ready(1) for state in self.running)
        return [state for state in self.drafting() if not state.is_verified][: -num_ready % self.config.group]

    def ready_groups(self, piggybacked: Sequence[SequenceState] = ()) -> list[list[SequenceState]]:
        """Returns full groups for the verifier; a group with dummies only if no verified request is still drafting."""
        ready = [state for state in self.running if state.is_ready(self.config.window)] + list(piggybacked)
        ready.sort(key=lambda state: state.cache_row)
        size = self.config.group
        groups = [ready[i : i + size] for i in range(0, len(ready), size)]
        others_coming = any(state.is_verified for state in self.drafting())
        chosen = [group for group in groups if len(group) == size or not others_coming]
        return [self._leaving_a_place(group) for group in chosen]

    def _leaving_a_place(self, group: list[SequenceState]) -> list[SequenceState]:
        """Returns the group, without its last request if it is this full pass's turn to be compared with a copy."""
        if len(group) < self.config.group or len(group) == 1:
            return group
        self._num_full += 1
        return group[:-1] if self._num_full % WATCHED_EVERY == 0 else group
