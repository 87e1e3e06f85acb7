"""Reads prompts: in fixed chunks for verified requests, in any shape for the others, once for requests that share one.

Also rebuilds a preempted request: its committed tokens are computed again by the schedule that computed them first.
"""

from collections.abc import Sequence

from cacheprobe.engine.committer import Committer
from cacheprobe.engine.model_runner import EngineError, Entry, ModelRunner
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import Status
from cacheprobe.kvcache.surgery import put_snapshot

FREE_PREFILL_WIDTH = 128
"""Token slots at most in the prefill of requests that are never verified; others use the fixed chunk."""


class Prefill:
    """Writes prompts into cache rows, and commits each request's first token."""

    def __init__(self, runner: ModelRunner, committer: Committer) -> None:
        self.runner, self.committer, self.config = runner, committer, committer.config

    def read(self, states: Sequence[SequenceState]) -> None:
        """Reads these requests' prompts and commits the first token of each.

        Verified requests run in passes of prefill_group x prefill_chunk, so that their schedule depends on the prompt
        alone (D1). The last chunk is shorter if it is not padded. Unverified requests run together in any shape.
        """
        for state in states:
            self._begin(state)
        size = self.config.prefill_group if states[0].is_verified else len(states)
        for i in range(0, len(states), size):
            self._read_group(states[i : i + size], states[0].is_verified)

    def _begin(self, state: SequenceState) -> None:
        """Records the length of the prompt in its cache row, for models that read prompts differently from generated
        tokens.

        If the request continues a KVSnapshot, the snapshot is copied into the row, and the chunks begin after it.
        """
        request = state.request
        self.runner.cache.prompt_lengths[state.cache_row] = request.num_prompt_tokens
        if request.cached is None or state.num_prefilled:
            return
        put_snapshot(request.cached, self.runner.cache, state.cache_row)
        for position, provenance in enumerate(request.cached.provenance):
            self.committer.write_ledger(state, position, position + 1, provenance)
        state.num_prefilled = request.num_cached

    def _read_group(self, states: Sequence[SequenceState], is_fixed: bool) -> None:
        chunk = self.config.prefill_chunk if is_fixed else FREE_PREFILL_WIDTH
        batch = self.config.prefill_group if is_fixed else None
        while unread := [s for s in states if s.num_prefilled < s.request.num_prompt_tokens]:
            entries = [
                Entry(s, s.request.prompt_token_ids[s.num_prefilled : s.num_prefilled + chunk], s.num_prefilled, True)
                for s in unread
            ]
            is_padded = is_fixed and self.config.pad_prefill
            width = chunk if is_padded else max(len(entry.token_ids) for entry in entries)
            last = [len(e.token_ids) - 1 if e.end == e.state.request.num_prompt_tokens else None for e in entries]
            slots = self._logit_slots(last, width, is_fixed)
            result = self.runner.run("prefill", entries, width, batch=batch, logit_slots=slots)
            # every choice before any commit: an error here leaves all requests as they were
            chosen: list[int | None] = []
            for entry, b, slot in zip(entries, result.batch_index, last, strict=True):
                if slot is None:
                    chosen.append(None)
                    continue
                state = entry.state
                state.prompt_logits = result.out[b, slot if slots is None else slots.index(slot)].clone()
                chosen.append(self.committer.choose(state, state.prompt_logits, (), state.last_committed_position + 1))
            committed = []
            for entry, token_id in zip(entries, chosen, strict=True):
                self.committer.write_ledger(entry.state, entry.start, entry.end, "prefill")
                entry.state.num_prefilled = entry.end
                if token_id is not None:
                    committed.append((entry.state.request_id, self.committer.commit_plain(entry.state, token_id)))
            self.committer.report("prefill", [e.state for e in entries], committed=tuple(committed))

    def _logit_slots(self, last: Sequence[int | None], width: int, is_fixed: bool) -> list[int] | None:
        """Returns the slots whose logits are needed. None, for all slots, in a fixed pass of several prompts: how many
        rows are read out must not depend on where the others end.
        """
        needed = sorted({slot for slot in last if slot is not None})
        return None if needed and is_fixed and self.config.prefill_group > 1 else needed or [width - 1]

    def share(self, state: SequenceState, source: SequenceState) -> None:
        """Copies the prompt's keys and values from a request of the same prompt, computed by the same schedule."""
        assert source.prompt_logits is not None
        self.runner.skip()
        self._begin(state)
        length = state.request.num_prompt_tokens
        state.prompt_logits = source.prompt_logits
        token_id = self.committer.choose(state, state.prompt_logits, (), length)
        self.runner.cache.copy_row(source.cache_row, state.cache_row, length)
        self.committer.observer.on_shared_prompt(state.request_id, self.runner.step, source.request_id)
        self.committer.observer.on_ledger(state.request_id, self.runner.step, 0, length, "prefill")
        state.num_prefilled = length
        committed = ((state.request_id, self.committer.commit_plain(state, token_id)),)
        self.committer.report("prefill", [state], committed=committed)

    # -- after a preemption

    def rebuild(self, state: SequenceState) -> None:
        """Computes a preempted request's keys and values again; the observer gets no report, having seen these tokens
        before.

        A verified request goes through the same shapes as the first time, so every bit is the same: the prompt in its
        chunks, the committed tokens in windows of the verifier, whose choices must be those tokens again.
        """
        self._begin(state)
        prompt, first = state.request.prompt_token_ids, state.request.num_cached
        if not state.is_verified:
            for start in range(first, state.last_committed_position, FREE_PREFILL_WIDTH):
                ids = tuple(state.token_ids[start : min(start + FREE_PREFILL_WIDTH, state.last_committed_position)])
                self._rewrite("prefill", state, ids, start, len(ids), None)
            self._mark(state, first, len(prompt), "prefill")
            self._mark(state, len(prompt), state.last_committed_position, "decoded")
        else:
            chunk, window = self.config.prefill_chunk, self.config.window
            for start in range(first, len(prompt), chunk):
                ids = prompt[start : start + chunk]
                width = chunk if self.config.pad_prefill else len(ids)
                self._rewrite("prefill", state, ids, start, width, self.config.prefill_group)
            self._mark(state, first, len(prompt), "prefill")
            for start in range(len(prompt), state.last_committed_position, window):
                ids = tuple(state.token_ids[start : min(start + window, state.last_committed_position)])
                self._rewrite("verify", state, ids, start, window, self.config.group, is_checked=True)
            self._mark(state, len(prompt), state.last_committed_position, "verified")
        state.num_prefilled = len(prompt)
        state.become(Status.RUNNING)

    def _mark(self, state: SequenceState, start: int, end: int, provenance: str) -> None:
        if end > start:
            self.committer.write_ledger(state, start, end, provenance)

    def _rewrite(
        self,
        phase: str,
        state: SequenceState,
        token_ids: tuple[int, ...],
        start: int,
        width: int,
        batch: int | None,
        is_checked: bool = False,
    ) -> None:
        slots = None if is_checked else [len(token_ids) - 1]
        entry = Entry(state, token_ids, start, True)
        result = self.runner.run(phase, [entry], width, batch=batch, logit_slots=slots, is_hidden=True)
        if is_checked and (self.config.acceptance == "equality" or state.request.is_deterministic):
            for t in range(len(token_ids)):
                position = start + t + 1
                again = self.committer.choose(state, result.out[result.batch_index[0], t], (), position)
                if again != state.token_ids[position]:
                    raise EngineError(
                        f"request {state.request_id} step {self.runner.step}: rebuilding its cache rows, the verifier "
                        f"chose token {again} at position {position} where it had committed "
                        f"{state.token_ids[position]}; this model or machine is not deterministic at a fixed shape"
                    )
        self.committer.forget_choices()
        self.committer.report(phase, [state])
