"""Who runs when: admission, who still drafts, who waits for the verifier. Knows no tensors but the cache's rows."""

from collections import deque
from collections.abc import Sequence

from cacheprobe.cache.kv import KVCache
from cacheprobe.cache.sequence import SequenceState
from cacheprobe.config import EngineConfig


class Scheduler:
    """First come, first served; at most `max_running` requests hold a cache row, and always one of the lowest."""

    def __init__(self, states: Sequence[SequenceState], cache: KVCache, config: EngineConfig, max_running: int) -> None:
        self.waiting = deque(states)
        self.max_running = max_running
        self.running: list[SequenceState] = []
        self.cache, self.config = cache, config

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self.running

    def admit(self) -> list[SequenceState]:
        """Give waiting requests the free cache rows; returns the newcomers."""
        newcomers = []
        while self.waiting and len(self.running) < self.max_running:
            state = self.waiting.popleft()
            state.row = self.cache.allocate()
            self.running.append(state)
            newcomers.append(state)
        # in the order of their rows, so that a full batch is one contiguous view of the cache
        self.running.sort(key=lambda state: state.row)
        return newcomers

    def growing(self) -> list[SequenceState]:
        """Requests that take part in the next decode: all but those that wait for the verifier."""
        return [state for state in self.running if not state.finish and not state.is_ready(self.config.window)]

    def ready_groups(self) -> list[list[SequenceState]]:
        """Full groups for the verifier; a group with dummies only when no verified request is still drafting."""
        ready = [state for state in self.running if state.is_ready(self.config.window)]
        size = self.config.group
        groups = [ready[i : i + size] for i in range(0, len(ready), size)]
        others_coming = any(state.is_verified for state in self.growing())
        return [group for group in groups if len(group) == size or not others_coming]

    def retire(self) -> list[SequenceState]:
        """Release the rows of finished requests; returns them."""
        finished = [state for state in self.running if state.finish]
        for state in finished:
            self.running.remove(state)
            self.cache.release(state.row)
            state.row = -1
        return finished
