"""Runs prefill, decode and verify passes. A pass that fails is tried again for each request alone, then without draft.

A request that fails even so ends with an error. A failed pass has committed no token, because all choices of a pass are
made before the first commit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, runtime_checkable

from torch import Tensor

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import DraftCosts, RowSlot
from cacheprobe.engine.committer import Committer
from cacheprobe.engine.drafters.base import Drafter, head_of, propose, release
from cacheprobe.engine.drafts.lengths import DraftLengths, split
from cacheprobe.engine.drafts.target_states import TargetStates
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.passes import BatchedPromptFault, EngineError, Entry, Pass, ShapeFault
from cacheprobe.engine.prefill import Prefill
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import Status
from cacheprobe.ops.acceptance import clip_draft
from cacheprobe.ops.sampling import Choice

StepOf = Callable[[Sequence[SequenceState]], None]
"""Runs a step of these requests."""


@runtime_checkable
class RecordsHead(Protocol):
    """Describes what records the passes of a drafter's head."""

    def around(self, step: int, rows: Sequence[RowSlot], shape: tuple[int, int]) -> AbstractContextManager[None]:
        """Returns a context manager, inside which a pass of these rows runs. step: number of the draft's step."""
        ...

    def abandon(self, states: Sequence[SequenceState]) -> None:
        """Labels the rows of drafts that are not kept."""
        ...


class Engine:
    """Runs prefill, decode and verify passes, and isolates requests whose pass fails. Also is the DraftContext: the
    object whose functions a drafter may call."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        drafter: Drafter | None = None,
        costs: DraftCosts | None = None,
        head_passes: RecordsHead | None = None,
    ) -> None:
        """Prepares passes of `runner` in the shapes of `config`, and the narrower ones that its checker has found.
        costs: of drafts, if they were measured.  head_passes: records those of the drafter's head."""
        self.runner, self.config = runner, config
        self._widths = runner.checker.widths = (*runner.checker.narrow_widths, config.window)
        self.model, self.cache = runner.model, runner.cache
        self.committer = Committer(runner, config)
        self.prefill = Prefill(runner, self.committer)
        self._drafter, self._head_passes = drafter, head_passes
        if (head := head_of(drafter, self.model)) is not None:
            runner.targets = TargetStates(self.model, self.cache, head.target_sites)
        self._lengths = None if drafter is None else DraftLengths(config, drafter, costs)
        self._fed: tuple[Tensor | None, Tensor | None] = None, None
        """What `feed_newest` returned last, and its rows' `top_two`, if they are known."""
        self._error: EngineError | None = None
        """Of the last pass inside `isolating`; None if it did not fail."""

    # -- decode

    def decodes(self, states: Sequence[SequenceState]) -> Iterator[tuple[StepOf, Sequence[SequenceState]]]:
        """Yields (`draft` or `decode`, requests): first those whose next draft the drafter makes, then the others."""
        for is_drafted, group in split(states, self._lengths, self.config.window):
            yield self.draft if is_drafted else self.decode, group

    def decode(self, states: Sequence[SequenceState]) -> None:
        """Runs one decode pass, for requests without a drafter. Each request chooses its next token.

        A never verified request commits the token; the others add it to their draft. If any request is invariant, the
        pass has the narrowest width whose bits are those of a whole window, and attention runs request by request.
        Source: LLM-42 (arXiv 2601.17768), section 4.2: the decode of a deterministic request is its draft.
        """
        entries = newest_entries(states)
        is_invariant = any(state.is_invariant for state in states)
        width, batch = (self._widths[0], len(entries)) if is_invariant else (1, None)
        a_pass = Pass(self.cache, self.runner.next_step(), "decode", entries, width, batch)
        read = self.committer.read(a_pass, self.runner.run(a_pass))
        self._mark_newest(entries)
        of_states = zip(states, read, strict=True)
        chosen = [(self._choose(state, row, (), best),) for state, ((row,), (best,)) in of_states]
        self._take(states, [self._clip(state, token_ids) for state, token_ids in zip(states, chosen, strict=True)])
        if self._lengths is not None:
            self._lengths.note_decoded(states)

    def draft(self, states: Sequence[SequenceState]) -> None:
        """Calls the drafter once, and appends its draft tokens to the draft of each request, unless they do not pay.
        Raises: EngineError if a kept token is outside the vocabulary."""
        assert self._drafter is not None and self._lengths is not None
        before = self.runner.step
        proposals = propose(self._drafter, self, states, before, self.config.window)
        kept = [self._clip(state, token_ids) for state, token_ids in zip(states, proposals, strict=True)]
        for state, token_ids in zip(states, kept, strict=True):
            if bad := [t for t in token_ids if not 0 <= t < self.model.d_vocab]:
                raise EngineError(
                    f"request {state.request_id} step {self.runner.step}: drafter {self._drafter.name} proposed token "
                    f"{bad[0]}, outside the vocabulary of {self.model.d_vocab}; use a drafter that shares the model's "
                    "tokenizer"
                )
        self._lengths.note_drafts(len(states), max(map(len, kept)))
        if not (kept := self._lengths.keep(states, kept)):
            self.committer.forget_choices()
            if self._head_passes is not None:
                self._head_passes.abandon(states)
                self.runner.skip()  # the rows of these drafts have a step of their own
            return
        if self.runner.step == before:  # a drafter that runs no model
            self.runner.skip()
        self._take(states, kept)
        if self._head_passes is not None:
            self._head_passes.abandon(states)

    def _take(self, states: Sequence[SequenceState], kept: Sequence[tuple[int, ...]]) -> None:
        """Adds each request's new draft tokens to its draft, and reports the step. A never verified request commits its
        one token; a draft without a new token is closed."""
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
        """Returns the proposed tokens that fit a verified request's draft; those of a never verified request
        unchanged."""
        if not state.is_verified:
            return tuple(token_ids)
        limit = state.draft_limit(self.config.window) - len(state.draft)
        return clip_draft([*state.generated, *state.draft], token_ids, state.stop_rule, limit)

    def feed_newest(self, states: Sequence[SequenceState], num_layers: int | None = None) -> Tensor:
        """Runs a decode pass on each request's newest token. Returns logits [b, v], or states [b, m] after the first
        `num_layers` blocks if given."""
        entries = newest_entries(states)
        a_pass = Pass(self.cache, self.runner.next_step(), "decode", entries, width=1, num_layers=num_layers)
        fed = self.runner.run(a_pass)[:, 0]
        self._mark_newest(entries)
        self._fed = fed, a_pass.best
        return fed

    def target_states(self, state: SequenceState, start: int, end: int) -> Tensor:
        """Returns a request's states [p, l, m] at positions start..end-1, at the sites that the drafter's head
        reads."""
        assert self.runner.targets is not None
        return self.runner.targets.of(state, start, end)

    def recording(self, rows: Sequence[RowSlot], shape: tuple[int, int]) -> AbstractContextManager[None]:
        """Returns a context manager, inside which a pass of the drafter's head is recorded and edited."""
        passes = self._head_passes
        return nullcontext() if passes is None else passes.around(self.runner.step + 1, rows, shape)

    def _mark_newest(self, entries: Sequence[Entry]) -> None:
        """Marks the slots of a decode pass in the ledger: provisional for verified requests, else decoded."""
        for entry in entries:
            provenance = "provisional" if entry.state.is_verified else "decoded"
            self.committer.mark_slots(entry.state, entry.start, entry.end, provenance)

    def choose(
        self, states: Sequence[SequenceState], logits: Tensor, drafted: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """Returns the token id that each request chooses from its row of logits [b, v], after its draft and its
        sequence in `drafted`."""
        texts = [()] * len(states) if drafted is None else drafted
        fed, best = self._fed
        read = zip(
            states, *self.committer.read_rows(states, logits, best if logits is fed else None), texts, strict=True
        )
        return [self._choose(state, row, text, best) for state, row, best, text in read]

    def _choose(self, state: SequenceState, logits: Tensor, drafted: Sequence[int], top_choice: Choice | None) -> int:
        """Returns the token id that a request chooses from logits [v]. top_choice: of these logits, if known."""
        drafted = [*state.draft, *drafted]
        position = state.last_committed_position + len(drafted) + 1
        is_drawn = self.config.acceptance == "rejection" and state.is_verified and not state.request.is_deterministic
        if is_drawn and not state.sampling.is_greedy:
            return self.committer.draw_draft_token(state, logits, drafted, position)
        return self.committer.choose(state, logits, drafted, position, top_choice, state.is_verified)

    # -- verify

    def verify(self, states: Sequence[SequenceState]) -> None:
        """Runs one verify pass of exactly group x window tokens, then commits the accepted tokens of each draft. If all
        drafts are shorter, the pass has the first narrow width that holds them. With determinism="invariant" it has
        just these requests, and no dummies.

        Each request that does not end before also commits the verifier's own next token. The pass overwrites the
        drafter's keys and values; the slots of rejected tokens are freed. With a window of 1, never verified requests
        may take unused batch indices.
        """
        entries = [verify_entry(state) for state in states]
        longest = max(len(entry.token_ids) for entry in entries)
        width = next(width for width in self._widths if width >= longest)
        batch = len(entries) if self.config.is_invariant else self.config.group
        a_pass = Pass(self.cache, self.runner.next_step(), "verify", entries, width, batch)
        read = self.committer.read(a_pass, self.runner.run(a_pass))
        verdicts, fill_ins = [], []
        for entry, (logits, best) in zip(entries, read, strict=True):
            if entry.state.is_verified:
                verdicts.append((entry.state, self.committer.verify_draft(entry, logits, best)))
            else:
                token_id = self.committer.choose(entry.state, logits[0], (), entry.start + 1, best[0])
                fill_ins.append((entry.state, token_id))
        if self._lengths is not None:
            of_drafts = ((state, len(verdict.draft_token_ids), verdict.num_accepted) for state, verdict in verdicts)
            self._lengths.note_verdicts(width, of_drafts)
        for state, verdict in verdicts:
            self.committer.apply_verdict(state, verdict)
        committed = []
        for state, token_id in fill_ins:
            position = state.last_committed_position
            self.committer.mark_slots(state, position, position + 1, "decoded")
            committed.append((state.request_id, self.committer.commit_plain(state, token_id)))
        self.committer.report(
            "verify",
            states,
            verdicts=tuple(verdict for _, verdict in verdicts),
            committed=tuple(committed),
        )

    # -- if a pass fails

    def attempts(self, states: Sequence[SequenceState]) -> Iterator[Sequence[SequenceState]]:
        """Yields all requests of a pass, which the caller runs inside `with engine.isolating()`. If that fails, yields
        each request alone; if a verify pass fails then, that request without its draft.

        A request whose draft cannot grow is verified as it is, which commits a token. One that fails alone and without
        a draft ends with the error; so does a deterministic one after a ShapeFault (after a BatchedPromptFault, if its
        prompt was read with others before).
        """
        groups = [states]
        while groups:
            group, self._error = groups.pop(0), None
            yield group
            if self._error is not None:
                groups[:0] = self._retries(group, self._error)

    @contextmanager
    def isolating(self) -> Iterator[None]:
        """Keeps an EngineError of the pass inside the `with` for `attempts`. Any other error is raised."""
        try:
            yield
        except EngineError as error:
            self._error = error

    def _retries(self, states: Sequence[SequenceState], error: EngineError) -> list[Sequence[SequenceState]]:
        """Removes what a failed pass left in recorder and cache, and ends requests that cannot be tried again. Returns
        the groups of requests to try again. A request that failed alone while it drafted keeps its draft, which is
        closed; in a verify pass it abandons its draft before it is tried again."""
        self.runner.observer.on_failure(self.runner.step)
        self.committer.forget_choices()
        for state in states:
            self.committer.scrub(state)
            if self.runner.targets is not None:  # rows of this step are discarded: the head computes them again
                release(self._drafter, state)
        if isinstance(error, BatchedPromptFault):
            for state in self.runner.checker.forbid_batched_prompts(str(error)):
                if state.status in (Status.PREFILLING, Status.RUNNING):
                    self.committer.stop(state, "error", error=str(error))
        elif isinstance(error, ShapeFault):
            for state in [s for s in states if s.request.is_deterministic]:  # their committed tokens are in doubt
                self.committer.stop(state, "error", error=str(error))
        if len(states) > 1:
            return [[state] for state in states if not state.error]
        (state,) = states
        if state.error:
            return []
        if state.draft and not state.is_ready(self.config.window):  # drafting anew could fail there without end
            state.draft_is_closed = True
            return []
        if state.draft:
            self.committer.clear_draft(state)
            return [states]
        self.committer.stop(state, "error", error=str(error))
        return []


def newest_entries(states: Sequence[SequenceState]) -> list[Entry]:
    """Returns a list with an Entry for each request of a decode pass: its newest token, committed or drafted."""
    return [
        Entry(state, state.newest[:1], state.newest[1], not state.is_verified, 1 if state.draft else 0)
        for state in states
    ]


def verify_entry(state: SequenceState) -> Entry:
    """Returns a request's Entry for a verify pass: its newest committed token, then its draft tokens.

    A draft token that would end the request is compared but not fed.
    """
    fed = state.draft[:-1] if state.draft_ends() else state.draft
    return Entry(state, (state.token_ids[-1], *fed), state.last_committed_position, True, len(fed))
