"""The three phases, one function each: prefill, decode, verify. Commit and roll back are here and nowhere else."""

from collections.abc import Sequence

from torch import Tensor

from cacheprobe.cache.sequence import SequenceState
from cacheprobe.config import EngineConfig
from cacheprobe.drafters.base import Drafter
from cacheprobe.engine.passes import EngineError, Entry, PassRunner
from cacheprobe.ops.acceptance import clip_draft, find_ending, num_accepted
from cacheprobe.ops.sampling import sample_token, top_two_margin_nats
from cacheprobe.records import Finished, StepRecord, Verdict

FREE_PREFILL_WIDTH = 128
"""Token slots at most in the prefill of requests that are never verified; others use the fixed chunk."""


class Stepper:
    """The engine's hands: runs passes, chooses tokens, commits and rolls back. Also the drafters' DraftContext."""

    def __init__(self, passes: PassRunner, config: EngineConfig) -> None:
        self.passes, self.config = passes, config
        self.model, self.cache, self.observer = passes.model, passes.cache, passes.observer
        self._margins: list[tuple[int, float]] = []

    # -- prefill

    def prefill(self, states: Sequence[SequenceState]) -> None:
        """Read the prompts and commit each request's first token.

        Verified requests in fixed chunks of G x prefill_chunk, a schedule that depends on each prompt alone (D1); the
        others together, in whatever shape they have.
        """
        size = self.config.group
        verified = [state for state in states if state.is_verified]
        for i in range(0, len(verified), size):
            self._prefill_group(verified[i : i + size], self.config.prefill_chunk, batch=size)
        if others := [state for state in states if not state.is_verified]:
            self._prefill_group(others, FREE_PREFILL_WIDTH, batch=None)

    def _prefill_group(self, states: Sequence[SequenceState], chunk: int, batch: int | None) -> None:
        while unread := [s for s in states if s.num_prefilled < s.request.num_prompt_tokens]:
            entries = [
                Entry(s, s.request.prompt_token_ids[s.num_prefilled : s.num_prefilled + chunk], s.num_prefilled, True)
                for s in unread
            ]
            width = chunk if batch else max(len(entry.token_ids) for entry in entries)
            last = {
                e.state.request_id: len(e.token_ids) - 1 for e in entries if e.end == e.state.request.num_prompt_tokens
            }
            # logits of every slot where the shape is fixed, so that the unembedding's shape is fixed too
            slots = None if batch and last else sorted(set(last.values())) or [width - 1]
            logits = self.passes.run("prefill", entries, width, batch=batch, logit_slots=slots)
            # every choice before any commit, as in verify
            chosen = {}
            for b, entry in enumerate(entries):
                if (slot := last.get(entry.state.request_id)) is not None:
                    row = logits[b, slot if slots is None else slots.index(slot)]
                    chosen[b] = self._choose_at(entry.state, row, entry.state.frontier + 1)
            committed = []
            for b, entry in enumerate(entries):
                self._write_ledger(entry.state, entry.start, entry.end, "prefill")
                entry.state.num_prefilled = entry.end
                if b in chosen:
                    committed.append((entry.state.request_id, self._commit_plain(entry.state, chosen[b])))
            self._report("prefill", entries, committed=tuple(committed))

    # -- decode

    def decode(self, drafter: Drafter, states: Sequence[SequenceState]) -> None:
        """Grow every draft by the drafter's next candidates; requests that are never verified commit at once."""
        before = self.passes.step
        proposals = drafter.extend(self, states)
        if len(proposals) != len(states):
            raise EngineError(f"drafter {drafter.name} gave {len(proposals)} proposals for {len(states)} requests")
        committed, proposed = [], []
        for state, token_ids in zip(states, proposals, strict=True):
            if not state.is_verified:
                committed.append((state.request_id, self._commit_plain(state, token_ids[0])))
                continue
            limit = state.draft_limit(self.config.window) - len(state.draft)
            kept = clip_draft(token_ids, state.stop_token_ids, limit)
            if bad := [t for t in kept if not 0 <= t < self.model.d_vocab]:
                raise EngineError(
                    f"request {state.request_id}: drafter {drafter.name} proposed token {bad[0]}, outside the "
                    f"vocabulary of {self.model.d_vocab}; use a drafter that shares the model's tokenizer"
                )
            state.draft.extend(kept)
            state.draft_is_closed = not kept
            proposed.append((state.request_id, kept))
        if self.passes.step == before:  # a drafter that runs no model: the record of its proposals is a pass of no rows
            self.passes.step += 1
            self.passes.shape, self.passes.seconds = (0, 0), 0.0
        entries = [Entry(s, (), 0, False) for s in states]
        self._report("decode", entries, committed=tuple(committed), proposed=tuple(proposed))

    def feed_newest(self, states: Sequence[SequenceState], num_layers: int | None = None) -> Tensor:
        """See DraftContext.feed_newest."""
        entries = []
        for state in states:
            token_id, position = state.newest
            entries.append(Entry(state, (token_id,), position, not state.is_verified, 1 if state.draft else 0))
        out = self.passes.run("decode", entries, 1, num_layers=num_layers)
        for entry in entries:
            self._write_ledger(
                entry.state, entry.start, entry.end, "provisional" if entry.state.is_verified else "decoded"
            )
        return out[:, 0]

    def choose(self, state: SequenceState, logits: Tensor) -> int:
        """See DraftContext.choose."""
        return self._choose_at(state, logits, state.newest[1] + 1)

    # -- verify

    def verify(self, states: Sequence[SequenceState]) -> None:
        """One pass of exactly G x W rows: accept the longest matching prefix, add the verifier's own next token.

        Fed: the newest committed token, then the candidates; a drafted stop token is compared and never fed. The
        verifier's keys and values have overwritten the fast path's; those of rejected rows are truncated.
        """
        entries = []
        for state in states:
            drafted = [t for t in state.draft if t not in state.stop_token_ids]
            entries.append(Entry(state, (state.token_ids[-1], *drafted), state.frontier, True, len(drafted)))
        logits = self.passes.run("verify", entries, self.config.window, batch=self.config.group)
        # every choice before any commit: an error here leaves all requests as they were
        verdicts = [self._judge(entry, logits[b]) for b, entry in enumerate(entries)]
        for entry, verdict in zip(entries, verdicts, strict=True):
            self._settle(entry.state, verdict)
        self._report("verify", entries, verdicts=tuple(verdicts))

    def _judge(self, entry: Entry, logits: Tensor) -> Verdict:
        state, draft = entry.state, tuple(entry.state.draft)
        targets = tuple(self._choose_at(state, logits[t], entry.start + t + 1) for t in range(len(entry.token_ids)))
        n = num_accepted(draft, targets)
        ending = find_ending(draft[:n] + targets[n : n + 1], state.stop_token_ids, state.num_left)
        return Verdict(
            state.request_id, self.passes.step, entry.start + 1, draft, targets, n, ending.num_kept, ending.finish
        )

    def _settle(self, state: SequenceState, verdict: Verdict) -> None:
        start, committed = verdict.start, verdict.committed
        frontier = state.frontier
        self._truncate(state, frontier)
        self._write_ledger(state, frontier, frontier + len(committed), "verified")
        if verdict.is_rollback:
            end = start + len(verdict.draft_token_ids)
            self.observer.on_rollback(state.request_id, verdict.step, start + verdict.num_accepted, end)
        own = "recovered" if verdict.is_rollback else "bonus"
        roles = ["accepted"] * verdict.num_accepted + [own]
        state.commit(committed)
        self.observer.on_commit(state.request_id, verdict.step, start, committed, roles[: len(committed)])
        self._end(state, verdict.finish)

    # -- shared

    def _choose_at(self, state: SequenceState, logits: Tensor, position: int) -> int:
        try:
            token_id = sample_token(logits, state.temperature, state.seed, position)
        except ValueError as error:
            raise EngineError(
                f"request {state.request_id} step {self.passes.step}: {error}; nothing of this step was committed; "
                f"load {self.model.name} in float32 or check its weights"
            ) from error
        self._margins.append((state.request_id, top_two_margin_nats(logits)))
        self.observer.on_choice(state.request_id, self.passes.step, position, token_id, logits)
        return token_id

    def _commit_plain(self, state: SequenceState, token_id: int) -> tuple[int, ...]:
        position = state.frontier + 1
        ending = find_ending((token_id,), state.stop_token_ids, state.num_left)
        state.commit((token_id,))
        self.observer.on_commit(state.request_id, self.passes.step, position, (token_id,), ("committed",))
        self._end(state, ending.finish)
        return (token_id,)

    def _end(self, state: SequenceState, reason: str | None) -> None:
        if reason is not None:
            state.finish = reason
            generated = tuple(state.token_ids[state.request.num_prompt_tokens :])
            self.observer.on_finish(Finished(state.request_id, self.passes.step, reason, generated))

    def _write_ledger(self, state: SequenceState, start: int, end: int, provenance: str) -> None:
        self.cache.extend(state.row, start, end, provenance)
        self.observer.on_ledger(state.request_id, self.passes.step, start, end, provenance)

    def _truncate(self, state: SequenceState, length: int) -> None:
        held = int(self.cache.lengths[state.row])
        if held > length:
            self.cache.truncate(state.row, length)
            self.observer.on_ledger(state.request_id, self.passes.step, length, held, "free")

    def _report(self, phase: str, entries: Sequence[Entry], **outcome: tuple) -> None:
        request_ids = tuple(entry.state.request_id for entry in entries)
        passes, margins = self.passes, tuple(self._margins)
        self._margins = []
        self.observer.on_step(
            StepRecord(passes.step, phase, passes.shape, request_ids, passes.seconds, margins=margins, **outcome)
        )
