"""Runs prefill, decode and verify passes. If a pass fails, each of its requests gets a pass alone, then one without its
draft, before it is given up. A failed pass has committed nothing: every choice is made before the first commit.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType

from torch import Tensor

from cacheprobe.core.config import EngineConfig
from cacheprobe.drafters.base import Drafter
from cacheprobe.engine.committer import Committer
from cacheprobe.engine.drafting import DrafterCalls
from cacheprobe.engine.model_runner import EngineError, Entry, ModelRunner, ShapeFault
from cacheprobe.engine.prefill import Prefill
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import Status
from cacheprobe.ops.acceptance import clip_draft


class Attempt:
    """Holds one try of a pass: `with attempt as states:` runs it, and keeps the EngineError that it ends with."""

    def __init__(self, states: Sequence[SequenceState]) -> None:
        self.states = states
        self.error: EngineError | None = None

    def __enter__(self) -> Sequence[SequenceState]:
        return self.states

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error if isinstance(error, EngineError) else None
        return self.error is not None


class Engine:
    """Runs prefill, decode and verify passes, and isolates requests whose pass fails; the drafters' DraftContext."""

    def __init__(self, runner: ModelRunner, config: EngineConfig, drafter: Drafter | None = None) -> None:
        self.runner, self.config = runner, config
        self.model, self.cache = runner.model, runner.cache
        self.committer = Committer(runner, config)
        self.prefill = Prefill(runner, self.committer)
        self.drafter_calls = DrafterCalls(drafter)

    # -- prefill

    def prefills(
        self, states: Sequence[SequenceState], running: Sequence[SequenceState]
    ) -> Iterator[tuple[Callable[[Sequence[SequenceState]], None], Sequence[SequenceState]]]:
        """Yields the prefills of admitted requests, up to the first token of each: a function, and its requests.

        Preempted requests are rebuilt. Of requests with one prompt the first reads it and the others copy its keys and
        values; if the first one failed or has left, the next one reads the prompt.
        """
        for state in [s for s in states if s.num_generated]:
            yield self.prefill.rebuild, [state]
        fresh = [s for s in states if not s.num_generated]
        leaders = [
            s
            for i, s in enumerate(fresh)
            if _with_same_prompt(s, running) is None and _same_prompt(s, fresh[:i]) is None
        ]
        for is_verified in (True, False):
            if group := [s for s in leaders if s.is_verified == is_verified]:
                yield self.prefill.read, group
        for state in [s for s in fresh if s not in leaders]:
            source = _with_same_prompt(state, running)
            yield self.prefill.read if source is None else partial(self.prefill.share, source), [state]

    # -- decode

    def decode(self, states: Sequence[SequenceState]) -> None:
        """Runs a decode pass without a drafter: every request takes the token that it chooses.

        A request that is never verified commits the token; for the others it is the next candidate of their draft.
        Source: LLM-42 (arXiv 2601.17768), section 4.2: the decode of a deterministic request is its draft.
        """
        entries = _newest_entries(states)
        out = self.runner.run("decode", entries, 1).out
        self._write_newest(entries)
        self._take(states, [[self.choose(state, row)] for state, row in zip(states, out[:, 0], strict=True)])

    def draft(self, states: Sequence[SequenceState]) -> None:
        """Appends the drafter's next candidates to every draft."""
        before = self.runner.step
        proposals = self.drafter_calls.extend(self, states, before, self.config.window)
        if self.runner.step == before:  # a drafter that runs no model
            self.runner.skip()
        self._take(states, proposals)

    def _take(self, states: Sequence[SequenceState], proposals: Sequence[Sequence[int]]) -> None:
        kept = [self._clip(state, token_ids) for state, token_ids in zip(states, proposals, strict=True)]
        committed, proposed = [], []
        for state, token_ids in zip(states, kept, strict=True):
            if not state.is_verified:
                committed.append((state.request_id, self.committer.commit_plain(state, token_ids[0])))
                continue
            state.draft.extend(token_ids)
            state.draft_is_closed = not token_ids
            proposed.append((state.request_id, token_ids))
        self.committer.report("decode", states, committed=tuple(committed), proposed=tuple(proposed))

    def _clip(self, state: SequenceState, token_ids: Sequence[int]) -> tuple[int, ...]:
        if not state.is_verified:
            return tuple(token_ids)
        limit = state.draft_limit(self.config.window) - len(state.draft)
        kept = clip_draft([*state.generated, *state.draft], token_ids, state.stop_rule, limit)
        if bad := [t for t in kept if not 0 <= t < self.model.d_vocab]:
            raise EngineError(
                f"request {state.request_id} step {self.runner.step}: drafter {self.drafter_calls.name} proposed token "
                f"{bad[0]}, outside the vocabulary of {self.model.d_vocab}; use a drafter that shares the model's "
                "tokenizer"
            )
        return kept

    def feed_newest(self, states: Sequence[SequenceState], num_layers: int | None = None) -> Tensor:
        """See DraftContext.feed_newest."""
        entries = _newest_entries(states)
        out = self.runner.run("decode", entries, 1, num_layers=num_layers).out
        self._write_newest(entries)
        return out[:, 0]

    def _write_newest(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            provenance = "provisional" if entry.state.is_verified else "decoded"
            self.committer.write_ledger(entry.state, entry.start, entry.end, provenance)

    def choose(self, state: SequenceState, logits: Tensor, drafted: Sequence[int] = ()) -> int:
        """See DraftContext.choose."""
        drafted = [*state.draft, *drafted]
        position = state.last_committed_position + len(drafted) + 1
        is_drawn = self.config.acceptance == "rejection" and state.is_verified and not state.request.is_deterministic
        if is_drawn and not state.sampling.is_greedy:
            return self.committer.draw_candidate(state, logits, drafted, position)
        return self.committer.choose(state, logits, drafted, position)

    # -- verify

    def verify(self, states: Sequence[SequenceState]) -> None:
        """Runs one pass of exactly G x W tokens: accepts the longest matching prefix, adds the verifier's own next
        token.

        The verifier's keys and values have overwritten the fast path's; those of rejected rows are truncated. Requests
        that are never verified may ride along in a window of one row: a dummy's place costs nothing.
        """
        entries = [verify_entry(state) for state in states]
        result = self.runner.run("verify", entries, self.config.window, batch=self.config.group)
        verdicts, piggybacked = [], []
        for entry, b in zip(entries, result.batch_index, strict=True):
            if entry.state.is_verified:
                verdicts.append((entry.state, self.committer.verify_draft(entry, result.out[b])))
            else:
                token_id = self.committer.choose(entry.state, result.out[b, 0], (), entry.start + 1)
                piggybacked.append((entry.state, token_id))
        for state, verdict in verdicts:
            self.committer.apply_verdict(state, verdict)
        committed = []
        for state, token_id in piggybacked:
            self.committer.write_ledger(
                state, state.last_committed_position, state.last_committed_position + 1, "decoded"
            )
            committed.append((state.request_id, self.committer.commit_plain(state, token_id)))
        self.committer.report(
            "verify",
            states,
            verdicts=tuple(verdict for _, verdict in verdicts),
            committed=tuple(committed),
        )

    # -- where a pass fails

    def attempts(self, states: Sequence[SequenceState]) -> Iterator[Attempt]:
        """Yields the attempts of a pass: all requests together; if that fails, each alone; then the failing ones
        without their draft.

        A request that fails without a draft ends with the error. A bad draft costs one pass and ends no request.
        """
        waiting = [states]
        while waiting:
            attempt = Attempt(waiting.pop(0))
            yield attempt
            if attempt.error is not None:
                waiting[:0] = self._retries(attempt.states, attempt.error)

    def _retries(self, states: Sequence[SequenceState], error: EngineError) -> list[Sequence[SequenceState]]:
        """Removes what a failed pass left, and returns the groups to try again."""
        self.runner.observer.on_failure(self.runner.step)
        self.committer.forget_choices()
        for state in states:
            self.committer.scrub(state)
        if isinstance(error, ShapeFault):
            for state in [s for s in states if s.request.is_deterministic]:  # what they committed is in doubt
                self.committer.stop(state, "error", error=str(error))
        if len(states) > 1:
            return [[state] for state in states if not state.error]
        (state,) = states
        if state.error:
            return []
        if state.draft:
            self.committer.clear_draft(state)
            return [states]
        self.committer.stop(state, "error", error=str(error))
        return []


def _newest_entries(states: Sequence[SequenceState]) -> list[Entry]:
    """Returns what requests feed to a decode pass: the newest token of each, committed or drafted."""
    return [
        Entry(state, state.newest[:1], state.newest[1], not state.is_verified, 1 if state.draft else 0)
        for state in states
    ]


def verify_entry(state: SequenceState) -> Entry:
    """Returns what a request feeds to a verify pass: its newest committed token, then its candidates.

    A candidate that would end the request is compared and never fed.
    """
    fed = state.draft[:-1] if state.draft_ends() else state.draft
    return Entry(state, (state.token_ids[-1], *fed), state.last_committed_position, True, len(fed))


def _same_prompt(state: SequenceState, others: Sequence[SequenceState]) -> SequenceState | None:
    if state.is_edited:
        return None
    wanted = (state.request.prompt_token_ids, state.is_verified)
    plain = [o for o in others if not o.is_edited]
    return next((o for o in plain if (o.request.prompt_token_ids, o.is_verified) == wanted), None)


def _with_same_prompt(state: SequenceState, running: Sequence[SequenceState]) -> SequenceState | None:
    """Returns a running request whose cache holds the same prompt, computed by the same schedule; None if there is
    none."""
    return _same_prompt(
        state, [s for s in running if s.prompt_logits is not None and s.status is not Status.FAILED and s is not state]
    )
