"""Commits tokens, rolls back drafts, preempts and ends requests. Reports each change to the observer.

The observer capture/recorder.py labels the recorded rows of a draft token as committed, rolled back or given up.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.noise import DRAFT_STREAM, gumbel_noise
from cacheprobe.core.records import Finished, StepRecord, Verdict
from cacheprobe.engine.choosing import JUDGES, Choice, choose_next, describe, likeliest_choices
from cacheprobe.engine.model_runner import EngineError, Entry, ModelRunner, is_out_of_memory
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import is_checking
from cacheprobe.ops.acceptance import find_ending
from cacheprobe.ops.sampling import lowest_argmax, target_probs


class Committer:
    """Chooses tokens after a pass; commits, rolls back, preempts and ends requests; reports this to the observer."""

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        self.runner, self.config = runner, config
        self.cache, self.observer = runner.cache, runner.observer
        self._choices: dict[tuple[int, int], Choice] = {}
        """By (request id, position): the choices since the last report."""
        self._logprobs: list[tuple[int, tuple[float, ...]]] = []
        """(request id, log-probabilities in nats) of the tokens committed since the last report."""

    # -- choosing

    def choose(
        self,
        state: SequenceState,
        logits: Tensor,
        drafted: Sequence[int],
        position: int,
        likeliest: Choice | None = None,
        is_draft: bool = False,
    ) -> int:
        """Returns the token id that a request chooses for `position` from logits [v], after the draft tokens `drafted`.

        likeliest: of these logits, if `likeliest_choices` read them already.  is_draft: the token is a draft token.
        Raises: EngineError if the logits hold NaN or +infinity, if none is finite, or if memory runs out.
        """
        with self._naming(state):
            token_id = choose_next(state, logits, drafted, position, likeliest, is_draft)
        self._note(state, position, token_id, logits, likeliest)
        return token_id

    def draw_draft_token(self, state: SequenceState, logits: Tensor, drafted: Sequence[int], position: int) -> int:
        """Returns a draft token id drawn from logits [v], for acceptance="rejection".

        The noise differs from the verifier's. Keeps the distribution in state.draft_probs.
        """
        assert state.sampling.seed is not None
        with self._naming(state):
            probs = target_probs(logits, state.sampling, [*state.token_ids, *drafted])
            noise = gumbel_noise(state.sampling.seed, position, len(probs), stream=DRAFT_STREAM)
            token_id = lowest_argmax(probs.log() + torch.from_numpy(noise))
        state.draft_probs[position] = (token_id, probs)
        self._note(state, position, token_id, logits)
        return token_id

    def verify_draft(self, entry: Entry, logits: Tensor, likeliest: Sequence[Choice | None]) -> Verdict:
        """Returns the Verdict on a request's draft, from the verify pass's logits [t, v]. Commits no token. likeliest:
        for each token that the request fed."""
        state, draft, start = entry.state, tuple(entry.state.draft), entry.start + 1
        logits = logits[: len(entry.token_ids)]
        acceptance = "equality" if state.request.is_deterministic else self.config.acceptance
        with self._naming(state):
            targets, n = JUDGES[acceptance](state, logits, start, likeliest)
        for t, (token_id, row, best) in enumerate(zip(targets, logits, likeliest, strict=True)):
            self._note(state, start + t, token_id, row, best)
        ending = find_ending(state.generated, draft[:n] + targets[n : n + 1], state.stop_rule, state.num_left)
        return Verdict(state.request_id, self.runner.step, start, draft, targets, n, ending.num_kept, ending.finish)

    def _note(
        self, state: SequenceState, position: int, token_id: int, logits: Tensor, likeliest: Choice | None = None
    ) -> None:
        """Keeps the Choice of a token for the next report, and reports the choice to the observer."""
        with self._naming(state, ()):
            likeliest = likeliest or likeliest_choices(self.runner.model, logits[None])[0]
            self._choices[state.request_id, position] = describe(token_id, logits, likeliest)
            self.observer.on_choice(state.request_id, self.runner.step, position, token_id, logits)

    @contextmanager
    def _naming(self, state: SequenceState, others: "tuple[type[Exception], ...]" = (ValueError,)) -> Iterator[None]:
        """Turns an out-of-memory error, or one of the types `others`, inside the `with` into an EngineError."""
        try:
            yield
        except Exception as error:
            if not (is_out_of_memory(error) or isinstance(error, others)):
                raise
            where = f"request {state.request_id} step {self.runner.step}"
            if is_out_of_memory(error):
                said = f"choosing a token failed with {type(error).__name__}: {error!s:.200}"
                raise EngineError(f"{where}: {said}; nothing of this step was committed") from error
            raise EngineError(
                f"{where}: {error}; nothing of this step was committed; "
                f"load {self.runner.model.name} in float32 or check its weights"
            ) from error

    # -- committing

    def apply_verdict(self, state: SequenceState, verdict: Verdict) -> None:
        """Commits the accepted draft tokens and, unless the request ends before it, the verifier's own next token.

        Reports the draft tokens from the first rejected one on as rolled back, and frees their slots. Ends the request
        if the verdict says so.
        """
        last_committed_position, committed = state.last_committed_position, verdict.committed
        self._truncate(state, last_committed_position)
        self.write_ledger(state, last_committed_position, last_committed_position + len(committed), "verified")
        if verdict.is_rollback:
            start = verdict.start + verdict.num_accepted
            self.observer.on_rollback(state.request_id, verdict.step, start, verdict.start + len(state.draft))
        self._keep_logprobs(state, verdict.start, len(committed))
        last_role = "recovered" if verdict.is_rollback else "bonus"  # of the verifier's own token
        roles = ["accepted"] * verdict.num_accepted + [last_role]
        self._adapt(state, verdict)
        state.commit(committed)
        self.observer.on_commit(state.request_id, verdict.step, verdict.start, committed, roles[: len(committed)])
        self._end(state, verdict.finish)

    def commit_plain(self, state: SequenceState, token_id: int) -> tuple[int, ...]:
        """Commits one token without a verdict: the first one after a prompt, or one of a never verified request.

        Ends the request if the token is a stop token, completes a stop text, or is the last one allowed. Returns
        (token_id,).
        """
        position = state.last_committed_position + 1
        self._keep_logprobs(state, position, 1)
        ending = find_ending(state.generated, (token_id,), state.stop_rule, state.num_left)
        state.commit((token_id,))
        self.observer.on_commit(state.request_id, self.runner.step, position, (token_id,), ("committed",))
        self._end(state, ending.finish)
        return (token_id,)

    def _keep_logprobs(self, state: SequenceState, start: int, count: int) -> None:
        """Keeps, for the next report, the log-probabilities of `count` committed tokens from position `start` on."""
        nats = tuple(self._choices[state.request_id, start + t].logprob_nats for t in range(count))
        self._logprobs.append((state.request_id, nats))

    def _adapt(self, state: SequenceState, verdict: Verdict) -> None:
        """If draft_length is "adaptive", lets the next draft be 2 tokens longer after a full match, 1 shorter after a
        mismatch.

        Source: the "heuristic" schedule of transformers' assisted generation.
        """
        if state.draft_cap is None or self.config.draft_length != "adaptive" or not verdict.draft_token_ids:
            return
        longest = max(self.config.window - 1, 1)
        state.draft_cap = max(state.draft_cap - 1, 1) if verdict.is_rollback else min(state.draft_cap + 2, longest)

    def _end(self, state: SequenceState, reason: str | None, error: str | None = None) -> None:
        """Ends a request and reports its end; does nothing if `reason` is None."""
        if reason is not None:
            state.end(reason, error)
            finished = Finished(state.request_id, self.runner.step, reason, tuple(state.generated))
            self.observer.on_finish(finished)

    # -- leaving early

    def stop(self, state: SequenceState, reason: str, error: str | None = None) -> None:
        """Ends a request outside a pass: its draft is given up, its committed tokens stay.

        reason: "cancelled", or "error" with the message `error`; a failed request's cache row is zeroed.
        """
        if error is None:
            self._give_up_draft(state)
        else:
            self.clear_draft(state)
            # an earlier pass may have written the NaN that made this one fail
            self.cache.scrub(state.cache_row, 0)
        self._end(state, reason, error)

    def clear_draft(self, state: SequenceState) -> None:
        """Gives up a request's draft after a failed pass, and frees and zeroes its cache slots from that of the newest
        committed token on."""
        self._give_up_draft(state)
        self._truncate(state, min(state.last_committed_position, int(self.cache.lengths[state.cache_row])))
        self.scrub(state)

    def scrub(self, state: SequenceState) -> None:
        """Zeroes the slots of a request's cache row after the last slot in use: a failed pass may leave NaN in them."""
        self.cache.scrub(state.cache_row, int(self.cache.lengths[state.cache_row]))

    def preempt(self, state: SequenceState) -> None:
        """Preempts a request: gives up its draft and frees its cache row. Its committed tokens stay.

        `Prefill.rebuild` fills a new row when the request is admitted again.
        """
        self._give_up_draft(state)
        self._truncate(state, 0)
        self.cache.release(state.cache_row)
        state.preempt()
        self.observer.on_preempt(state.request_id, self.runner.step)

    def _give_up_draft(self, state: SequenceState) -> None:
        """Drops a request's draft without a verdict, and reports its positions to the observer."""
        if state.draft:
            start = state.last_committed_position + 1
            self.observer.on_give_up(state.request_id, self.runner.step, start, start + len(state.draft))
        state.drop_draft()

    # -- the ledger and the record

    def write_ledger(self, state: SequenceState, start: int, end: int, provenance: str) -> None:
        """Marks slots start..end-1 of a request's cache row as in use, with this provenance, and reports it."""
        self.cache.extend(state.cache_row, start, end, provenance)
        self.observer.on_ledger(state.request_id, self.runner.step, start, end, provenance)

    def _truncate(self, state: SequenceState, length: int) -> None:
        """Frees the used slots of a request's cache row from slot `length` on, and reports it."""
        num_used = int(self.cache.lengths[state.cache_row])
        if num_used > length:
            self.cache.truncate(state.cache_row, length)
            self.observer.on_ledger(state.request_id, self.runner.step, length, num_used, "free")

    def report(self, phase: str, states: Sequence[SequenceState], **outcome: tuple) -> None:
        """Reports a step to the observer as a StepRecord, with the choices made since the last report.

        outcome: the fields committed, proposed and verdicts of StepRecord.
        """
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
        """Drops the choices since the last report, so that choices of a failed step are never reported."""
        self._choices, self._logprobs = {}, []
