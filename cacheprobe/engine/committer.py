"""Chooses tokens, judges drafts, commits and rolls back, preempts and ends requests; reports it to the observer.

The observer trace/recording/recorder.py labels the recorded rows of a draft token: committed, rolled back or abandoned.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.devices import Download, is_out_of_memory, upload
from cacheprobe.core.noise import DRAFT_STREAM, gumbel_noise
from cacheprobe.core.records import Finished, StepRecord, Verdict
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.passes import EngineError, Entry, Pass
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.acceptance import accept_or_recover, find_ending, num_accepted
from cacheprobe.ops.kernel_set import KernelSet
from cacheprobe.ops.sampling import (
    Choice,
    choices_in,
    choose_token,
    describe,
    lowest_argmax,
    sample_token,
    target_probs,
    top_two,
)


def choose_next(
    state: SequenceState,
    logits: Float[Tensor, "v"],
    drafted: Sequence[int],
    position: int,
    top_choice: Choice | None = None,
    is_draft: bool = False,
) -> int:
    """Returns the token id that a request chooses for `position`, from logits [v] and its sampling settings.

    drafted: draft tokens after the committed ones. Tokens at or after `position` are ignored: while a preempted request
    is rebuilt, they are known already.
    top_choice: of these logits, if `top_choices` read them already; a greedy request takes its token.
    is_draft: the token is a draft token. Any other of a request with forced tokens is the forced one.
    """
    if (forced := state.request.forced_token_ids) and not is_draft:
        return forced[position - state.request.num_prompt_tokens]
    sampling = state.sampling
    if top_choice is not None and sampling.is_plain and sampling.is_greedy:
        if not math.isfinite(top_choice.logprob_nats):
            raise ValueError(f"logits for position {position} hold NaN or infinity")
        return top_choice.token_id
    if sampling.is_plain:
        assert sampling.temperature is not None and sampling.seed is not None
        return sample_token(logits, sampling.temperature, sampling.seed, position)
    return choose_token(logits, sampling, [*state.token_ids, *drafted][:position], position)


def top_choices(model: CachedLM, logits: Float[Tensor, "n v"]) -> Sequence[Choice | None]:
    """Returns the Choice of the most likely token, of equal ones the lowest id, for each row of logits [n, v], in one
    pass over the vocabulary; Nones for logits on the CPU if the model has no compiled loops.

    The bits of a row depend on that row alone. The logits must be finite numbers.
    Twin: `describe` of the first token id of the largest logit; ids and margins ==, log-probabilities close(1e-5).
    """
    if logits.device.type != "cpu":
        return choices_in(top_two(logits).cpu())
    operations = getattr(model, "operations", None)  # only some kinds of model have compiled loops
    readout = operations.readout if operations else getattr(model, "logits_readout", None)
    if readout is None or isinstance(operations, KernelSet):  # given logits are read by torch
        return [None] * len(logits)
    found = readout.of_logits(logits, torch.full((len(logits),), -1), 2)
    largest = logits.gather(1, found.top_token_ids).double()
    margins = (largest[:, 0] - largest[:, 1]).tolist()
    ids, nats = found.top_token_ids[:, 0].tolist(), found.top_logprob_nats[:, 0].tolist()
    return [Choice(*parts) for parts in zip(ids, nats, margins, strict=True)]


def judge_by_equality(
    state: SequenceState, logits: Float[Tensor, "t v"], start: int, top_choice: Sequence[Choice | None]
) -> tuple[tuple[int, ...], int]:
    """Accepts the draft tokens before the first that differs from the verifier's choice. Returns (the verifier's own
    token ids at the draft positions and at one more, number of accepted draft tokens).

    If the last draft token ends the request, the verifier has no token after the draft.

    logits: [t, v]; logits[i] are for position start + i. The noise depends on seed and position alone, so the
    comparison works at any temperature.  top_choice: of each row of logits, see `choose_next`.
    """
    draft = state.draft
    rows = enumerate(zip(logits, top_choice, strict=True))
    targets = tuple(choose_next(state, row, draft[:t], start + t, best) for t, (row, best) in rows)
    return targets, num_accepted(draft, targets)


def judge_by_rejection(
    state: SequenceState, logits: Float[Tensor, "t v"], start: int, top_choice: Sequence[Choice | None]
) -> tuple[tuple[int, ...], int]:
    """Accepts each draft token with probability min(1, p / q), up to the first rejected one. Returns as
    `judge_by_equality`.

    p, q: the token's probability under the model and under the drafter; q is 1 for a token that the engine did not
    draw. A greedy request is judged by equality. logits, top_choice: as for `judge_by_equality`.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1.
    """
    draft, sampling = state.draft, state.sampling
    assert sampling.seed is not None
    if sampling.is_greedy:
        return judge_by_equality(state, logits, start, top_choice)
    targets: list[int] = []
    count = 0  # of accepted draft tokens
    for t, row in enumerate(logits):
        position = start + t
        if t < len(draft) and count == t:
            prefix = [*state.token_ids, *draft[:t]]
            drawn_id, probs = state.draft_probs.get(position, (-1, None))
            is_accepted, token_id = accept_or_recover(
                target_probs(row, sampling, prefix),
                probs if drawn_id == draft[t] else None,
                draft[t],
                sampling.seed,
                position,
            )
            count += is_accepted
        else:
            token_id = choose_next(state, row, draft[:t], position, top_choice[t])
        targets.append(token_id)
    return tuple(targets), count


JUDGES = {"equality": judge_by_equality, "rejection": judge_by_rejection}
"""Maps each value of EngineConfig.acceptance to the function that judges a draft."""


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

    def read(self, a_pass: Pass, out: Tensor) -> list[tuple[Tensor, list[Choice | None]]]:
        """Returns for each entry, of the tokens that it fed: their logits [t, v], for the functions that choose, and
        their `top_choices`. out: [b, t, v], of the pass just run.

        Raises: EngineError if memory runs out."""
        with self.runner.out_of_memory_named(a_pass, "read"):
            width, counts = out.shape[1], [len(entry.token_ids) for entry in a_pass.entries]
            fed = [b * width + t for b, count in zip(a_pass.batch_index, counts, strict=True) for t in range(count)]
            logits = out.flatten(0, 1)  # a view
            best = a_pass.best
            if fed != [*range(len(logits))]:
                index = torch.tensor(fed)
                logits = logits[upload(logits.device, [index])[0]]
                best = None if best is None else best[index]
            rows, choices = self.read_rows([entry.state for entry in a_pass.entries], logits, best)
        found = iter(choices)
        return [(own, list(islice(found, len(own)))) for own in rows.split(counts)]

    def read_rows(
        self, states: Sequence[SequenceState], logits: Tensor, best: Tensor | None = None
    ) -> tuple[Tensor, Sequence[Choice | None]]:
        """Returns (logits [n, v] of these requests, for the functions that choose; the `top_choices` of all). A GPU's
        logits are copied to the host if a request samples. best: `top_two` of them, if they are known."""
        is_read_by_best = all(
            state.sampling.is_plain and state.sampling.is_greedy and not state.request.forced_token_ids
            for state in states
        )
        if best is None and logits.device.type == "cpu":
            return logits, top_choices(self.runner.model, logits)
        wanted = [top_two(logits) if best is None else best, *([] if is_read_by_best else [logits])]
        best, *arrived = Download(wanted).tensors()
        return (arrived or [logits])[0], choices_in(best)

    def choose(
        self,
        state: SequenceState,
        logits: Tensor,
        drafted: Sequence[int],
        position: int,
        top_choice: Choice | None = None,
        is_draft: bool = False,
    ) -> int:
        """Returns the token id that a request chooses for `position` from logits [v], after the draft tokens `drafted`.

        top_choice: of these logits, if `top_choices` read them already.  is_draft: the token is a draft token.
        Raises: EngineError if the logits hold NaN or +infinity, if none is finite, or if memory runs out.
        """
        with self._naming(state):
            token_id = choose_next(state, logits, drafted, position, top_choice, is_draft)
        self._note(state, position, token_id, logits, top_choice)
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

    def verify_draft(self, entry: Entry, logits: Tensor, top_choice: Sequence[Choice | None]) -> Verdict:
        """Returns the Verdict on a request's draft, from the verify pass's logits [t, v]. Commits no token.
        top_choice: for each token that the request fed, the Choice of its largest logit; None if the model has no
        compiled loops."""
        state, draft, start = entry.state, tuple(entry.state.draft), entry.start + 1
        acceptance = "equality" if state.request.is_deterministic else self.config.acceptance
        with self._naming(state):
            targets, n = JUDGES[acceptance](state, logits, start, top_choice)
        for t, (token_id, row, best) in enumerate(zip(targets, logits, top_choice, strict=True)):
            self._note(state, start + t, token_id, row, best)
        ending = find_ending(state.generated, draft[:n] + targets[n : n + 1], state.stop_rule, state.num_left)
        return Verdict(state.request_id, self.runner.step, start, draft, targets, n, ending.num_kept, ending.finish)

    def _note(
        self, state: SequenceState, position: int, token_id: int, logits: Tensor, top_choice: Choice | None = None
    ) -> None:
        """Keeps the Choice of a token for the next report, and reports the choice to the observer."""
        with self._naming(state, ()):
            top_choice = top_choice or top_choices(self.runner.model, logits[None])[0]
            self._choices[state.request_id, position] = describe(token_id, logits, top_choice)
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
        self.mark_slots(state, last_committed_position, last_committed_position + len(committed), "verified")
        if verdict.is_rollback:
            start = verdict.start + verdict.num_accepted
            self.observer.on_rollback(state.request_id, verdict.step, start, verdict.start + len(state.draft))
        self._keep_logprobs(state, verdict.start, len(committed))
        last_role = "recovered" if verdict.is_rollback else "bonus"  # of the verifier's own token
        roles = ["accepted"] * verdict.num_accepted + [last_role]
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

    def _end(self, state: SequenceState, reason: str | None, error: str | None = None) -> None:
        """Ends a request and reports its end; does nothing if `reason` is None."""
        if reason is not None:
            state.end(reason, error)
            finished = Finished(state.request_id, self.runner.step, reason, tuple(state.generated))
            self.observer.on_finish(finished)

    # -- leaving early

    def stop(self, state: SequenceState, reason: str, error: str | None = None) -> None:
        """Ends a request outside a pass: its draft is abandoned, its committed tokens stay.

        reason: "cancelled", or "error" with the message `error`; a failed request's cache row is zeroed.
        """
        if error is None:
            self._abandon_draft(state)
        else:
            self.clear_draft(state)
            # an earlier pass may have written the NaN that made this one fail
            self.cache.scrub(state.cache_row, 0)
        self._end(state, reason, error)

    def clear_draft(self, state: SequenceState) -> None:
        """Abandons a request's draft after a failed pass, and frees and zeroes its cache slots from that of the newest
        committed token on."""
        self._abandon_draft(state)
        self._truncate(state, min(state.last_committed_position, int(self.cache.lengths[state.cache_row])))
        self.scrub(state)

    def scrub(self, state: SequenceState) -> None:
        """Zeroes the slots of a request's cache row after the last slot in use: a failed pass may leave NaN in them."""
        self.cache.scrub(state.cache_row, int(self.cache.lengths[state.cache_row]))

    def preempt(self, state: SequenceState) -> None:
        """Preempts a request: abandons its draft and frees its cache row. Its committed tokens stay.

        `Prefill.rebuild` fills a new row when the request is admitted again.
        """
        self._abandon_draft(state)
        self._truncate(state, 0)
        self.cache.release(state.cache_row)
        state.preempt()
        self.observer.on_preempt(state.request_id, self.runner.step)

    def _abandon_draft(self, state: SequenceState) -> None:
        """Drops a request's draft without a verdict, and reports its positions to the observer."""
        if state.draft:
            start = state.last_committed_position + 1
            self.observer.on_abandon(state.request_id, self.runner.step, start, start + len(state.draft))
        state.drop_draft()

    # -- the ledger and the record

    def mark_slots(self, state: SequenceState, start: int, end: int, provenance: str) -> None:
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

    def forget_choices(self) -> None:
        """Drops the choices since the last report, so that choices of a failed step are never reported."""
        self._choices, self._logprobs = {}, []
