"""Commits, rolls back, preempts and ends requests: the only module that changes their tokens and cache contents."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.noise import DRAFT_STREAM, gumbel_noise
from cacheprobe.core.records import Finished, StepRecord, Verdict
from cacheprobe.engine.choosing import JUDGES, Choice, choose_next, describe
from cacheprobe.engine.model_runner import EngineError, Entry, ModelRunner
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import is_checking
from cacheprobe.ops.acceptance import find_ending
from cacheprobe.ops.processors import target_probs
from cacheprobe.ops.sampling import lowest_argmax


class Committer:
    """Commits, rolls back, preempts and finishes requests after a pass; tells the observer of every change."""

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        self.runner, self.config = runner, config
        self.cache, self.observer = runner.cache, runner.observer
        self._choices: dict[tuple[int, int], Choice] = {}
        """By request and position, since the last report."""
        self._logprobs: list[tuple[int, tuple[float, ...]]] = []

    # -- choosing

    def choose(self, state: SequenceState, logits: Tensor, drafted: Sequence[int], position: int) -> int:
        """Returns the token that this request chooses for `position` from logits [v], after the tokens `drafted`."""
        with self._naming(state):
            token_id = choose_next(state, logits, drafted, position)
        self._note(state, position, token_id, logits)
        return token_id

    def draw_candidate(self, state: SequenceState, logits: Tensor, drafted: Sequence[int], position: int) -> int:
        """Draws a candidate for rejection sampling with noise of its own, and keeps its distribution for the
        verdict."""
        assert state.sampling.seed is not None
        with self._naming(state):
            probs = target_probs(logits, state.sampling, [*state.token_ids, *drafted])
            noise = gumbel_noise(state.sampling.seed, position, len(probs), stream=DRAFT_STREAM)
            token_id = lowest_argmax(probs.log() + torch.from_numpy(noise))
        state.draft_probs[position] = (token_id, probs)
        self._note(state, position, token_id, logits)
        return token_id

    def verify_draft(self, entry: Entry, logits: Tensor) -> Verdict:
        """Returns the verdict on a draft from the logits [t, v] of its tokens."""
        state, draft, start = entry.state, tuple(entry.state.draft), entry.start + 1
        logits = logits[: len(entry.token_ids)]
        by = "equality" if state.request.is_deterministic else self.config.acceptance
        with self._naming(state):
            targets, n = JUDGES[by](state, logits, start)
        for t, (token_id, row) in enumerate(zip(targets, logits, strict=True)):
            self._note(state, start + t, token_id, row)
        ending = find_ending(state.generated, draft[:n] + targets[n : n + 1], state.stop_rule, state.num_left)
        return Verdict(state.request_id, self.runner.step, start, draft, targets, n, ending.num_kept, ending.finish)

    def _note(self, state: SequenceState, position: int, token_id: int, logits: Tensor) -> None:
        self._choices[state.request_id, position] = describe(token_id, logits)
        self.observer.on_choice(state.request_id, self.runner.step, position, token_id, logits)

    def _naming(self, state: SequenceState) -> "_Naming":
        return _Naming(f"request {state.request_id} step {self.runner.step}", self.runner.model.name)

    # -- committing

    def apply_verdict(self, state: SequenceState, verdict: Verdict) -> None:
        """Commits the tokens that a verdict accepts, and truncates the cache behind them."""
        last_committed_position, committed = state.last_committed_position, verdict.committed
        self._truncate(state, last_committed_position)
        self.write_ledger(state, last_committed_position, last_committed_position + len(committed), "verified")
        if verdict.is_rollback:
            start = verdict.start + verdict.num_accepted
            self.observer.on_rollback(state.request_id, verdict.step, start, verdict.start + len(state.draft))
        self._keep_logprobs(state, verdict.start, len(committed))
        own = "recovered" if verdict.is_rollback else "bonus"
        roles = ["accepted"] * verdict.num_accepted + [own]
        self._adapt(state, verdict)
        state.commit(committed)
        self.observer.on_commit(state.request_id, verdict.step, verdict.start, committed, roles[: len(committed)])
        self._end(state, verdict.finish)

    def commit_plain(self, state: SequenceState, token_id: int) -> tuple[int, ...]:
        """Commits one token that needs no verdict: after a prefill, or of a request that is never verified."""
        position = state.last_committed_position + 1
        self._keep_logprobs(state, position, 1)
        ending = find_ending(state.generated, (token_id,), state.stop_rule, state.num_left)
        state.commit((token_id,))
        self.observer.on_commit(state.request_id, self.runner.step, position, (token_id,), ("committed",))
        self._end(state, ending.finish)
        return (token_id,)

    def _keep_logprobs(self, state: SequenceState, start: int, count: int) -> None:
        nats = tuple(self._choices[state.request_id, start + t].logprob_nats for t in range(count))
        self._logprobs.append((state.request_id, nats))

    def _adapt(self, state: SequenceState, verdict: Verdict) -> None:
        """Lengthens the draft limit by two after a full match, and shortens it by one after a mismatch.

        Source: the "heuristic" schedule of transformers' assisted generation.
        """
        if state.draft_cap is None or self.config.draft_length != "adaptive" or not verdict.draft_token_ids:
            return
        longest = max(self.config.window - 1, 1)
        state.draft_cap = max(state.draft_cap - 1, 1) if verdict.is_rollback else min(state.draft_cap + 2, longest)

    def _end(self, state: SequenceState, reason: str | None, error: str | None = None) -> None:
        if reason is not None:
            state.end(reason, error)
            finished = Finished(state.request_id, self.runner.step, reason, tuple(state.generated))
            self.observer.on_finish(finished)

    # -- leaving early

    def stop(self, state: SequenceState, reason: str, error: str | None = None) -> None:
        """Ends a request: its open draft is discarded, its committed tokens stay."""
        if error is None:
            self._give_up_draft(state)
        else:
            self.clear_draft(state)
            # NaN may have come with an earlier pass than the one that failed of it
            self.cache.scrub(state.cache_row, 0)
        self._end(state, reason, error)

    def clear_draft(self, state: SequenceState) -> None:
        """Removes a request's draft and its uncommitted cache contents after a failed pass."""
        self._give_up_draft(state)
        self._truncate(state, min(state.last_committed_position, int(self.cache.lengths[state.cache_row])))
        self.scrub(state)

    def scrub(self, state: SequenceState) -> None:
        """Zeroes the cache behind a request's last token after a failed pass, pads included."""
        self.cache.scrub(state.cache_row, int(self.cache.lengths[state.cache_row]))

    def preempt(self, state: SequenceState) -> None:
        """Preempts a request: frees its place in the cache, which is later rebuilt by the same schedule."""
        self._give_up_draft(state)
        self._truncate(state, 0)
        self.cache.release(state.cache_row)
        state.preempt()
        self.observer.on_preempt(state.request_id, self.runner.step)

    def _give_up_draft(self, state: SequenceState) -> None:
        if state.draft:
            start = state.last_committed_position + 1
            self.observer.on_give_up(state.request_id, self.runner.step, start, start + len(state.draft))
        state.drop_draft()

    # -- the ledger and the record

    def write_ledger(self, state: SequenceState, start: int, end: int, provenance: str) -> None:
        """Records in the ledger that cache slots start..end-1 of the request hold real tokens."""
        self.cache.extend(state.cache_row, start, end, provenance)
        self.observer.on_ledger(state.request_id, self.runner.step, start, end, provenance)

    def _truncate(self, state: SequenceState, length: int) -> None:
        held = int(self.cache.lengths[state.cache_row])
        if held > length:
            self.cache.truncate(state.cache_row, length)
            self.observer.on_ledger(state.request_id, self.runner.step, length, held, "free")

    def report(self, phase: str, states: Sequence[SequenceState], **outcome: tuple) -> None:
        """Reports a step to the observer, with the choices made since the last report."""
        runner = self.runner
        self.observer.on_step(
            StepRecord(
                runner.step,
                phase,
                runner.shape,
                tuple(state.request_id for state in states),
                runner.seconds,
                logprobs=tuple(self._logprobs),
                margins=tuple((r, choice.margin_nats) for (r, _), choice in self._choices.items()),
                **outcome,
            )
        )
        self.forget_choices()
        if is_checking():
            for state in states:
                state.check()

    def forget_choices(self) -> None:
        """Drops the choices of a failed step, so that they are not reported."""
        self._choices, self._logprobs = {}, []


class _Naming:
    """Turns a ValueError raised inside the `with` into an EngineError that names the request and the step."""

    def __init__(self, where: str, model_name: str) -> None:
        self.where, self.model_name = where, model_name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            raise EngineError(
                f"{self.where}: {error}; nothing of this step was committed; "
                f"load {self.model_name} in float32 or check its weights"
            ) from error
