"""Decides how many tokens the drafter may draft next: none while drafts cost more than they save.

Every decision follows from the costs that were measured before the run and from the tokens of the run so far, and not
from the clock, so that the same run on the same machine is recorded the same way twice.
"""

import math
from collections.abc import Iterable, Sequence

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import MANY, DraftCosts
from cacheprobe.engine.drafters.base import Drafter, always_drafts
from cacheprobe.kvcache.sequence import SequenceState

TRIAL_SHARE = 0.03
"""Part of the undrafted time that drafts may waste before only those that surely pay are allowed."""
_MOST_PLANNED = 64
"""Tokens; of a longer run, no more are counted before they were generated."""
_ASK_SHARE = 0.05
"""A drafter that runs no layer of the model is asked in every round if its draft takes less of a decode pass."""
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0
"""Share of draft tokens that is expected to be accepted at first, and how many judged ones it stands for."""
_MEMORY = 0.98
"""Factor by which earlier verdicts count less after each draft that is judged."""


def drafts_may_stop(config: EngineConfig, drafter: Drafter) -> bool:
    """Returns True if a run leaves out drafts that cost more time than they save."""
    return config.draft_length == "adaptive" and not always_drafts(drafter)


class DraftLengths:
    """Sets before each draft of a request how long it may be. A length of 0 lets the request go on as without a
    drafter, until the drafter's tokens are expected to pay.

    A length of k pays if k draft tokens and the verify pass take less time than a run without a drafter takes for the
    tokens that they are expected to commit. A drafter that runs no model is asked all the same, and its first token is
    compared with the committed one. Another one is tried again now and then; TRIAL_SHARE limits what trials waste. If
    draft_length is a number, every draft may have that many tokens; if the drafter always drafts, all that the window
    takes.
    """

    def __init__(self, config: EngineConfig, drafter: Drafter, costs: DraftCosts | None = None) -> None:
        """costs: None lets every draft be as long as the window takes, unless draft_length is a number."""
        self._config, self._length = config, getattr(drafter, "length", config.window)
        self.costs = costs if drafts_may_stop(config, drafter) else None
        self._is_asked = getattr(drafter, "drafted_layers", None) == 0 and self.costs is not None
        if self._is_asked and costs is not None:
            most = min(self._length, config.window - 1)
            self._is_asked = most * costs.drafting(MANY) <= _ASK_SHARE * costs.decoding(MANY)
        self._asked: dict[SequenceState, tuple[int, int | None]] = {}
        """By request that decodes: its number of tokens when the drafter was asked, and the first token proposed."""
        self._accepted = self._judged = 0.0
        self._longest = 1
        """One more than the most tokens of a draft that were accepted: a trial counts on no more of a draft."""
        self._wasted = self._spent = self._planned = 0.0
        """Seconds: lost by drafts, of the undrafted time so far, and of that of the whole run."""
        self._num_running = 1

    def choose(self, states: Sequence[SequenceState], num_running: int) -> None:
        """Sets `is_drafted`, `is_verified` and `draft_cap` of those of the requests that begin a draft. num_running:
        requests that a decode pass would have."""
        fresh = [state for state in states if not state.draft and not state.draft_is_closed and self._is_due(state)]
        if not fresh:
            return
        if self.costs is None:
            length = self._config.draft_length
            for state in fresh:
                self._set(state, self._config.window - 1 if isinstance(length, str) else length)
            return
        for state in fresh:
            planned = min(state.num_generated + state.num_left, _MOST_PLANNED) * self.costs.decoding(num_running)
            self._planned = max(self._planned, planned)
        self._num_running = num_running
        most = [max(min(self._config.window - 1, state.num_left - 1, self._length), 0) for state in fresh]
        if self._is_asked:
            for state, room in zip(fresh, most, strict=True):
                self._set(state, self._config.window - 1 if room else self._best([state], [0]))
            return
        best = self._best(fresh, most)
        for state in fresh:
            self._set(state, best)

    def keep(self, states: Sequence[SequenceState], proposals: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Returns the part of new drafts that pays; of requests that had no draft before. If none does, returns [], and
        these requests decode next."""
        if not self._is_asked or any(state.draft for state in states):
            return list(proposals)
        best = self._best(states, [len(proposal) for proposal in proposals])
        if best is not None:
            return [proposal[:best] for proposal in proposals]
        for state, proposal in zip(states, proposals, strict=True):
            self._asked[state] = len(state.token_ids), next(iter(proposal), None)
            self._set(state, None)
        return []

    def note_drafts(self, num_requests: int, num_tokens: int) -> None:
        """Counts the time of a step that drafted, at most, this many tokens of each of these requests."""
        if self.costs is not None and not self._is_asked:
            self._wasted += num_tokens * self.costs.drafting(num_requests)

    def note_verdicts(self, width: int, drafts: Iterable[tuple[SequenceState, int, int]]) -> None:
        """Counts the time of a verify pass, and its verdicts: (request, its draft tokens, how many were accepted)."""
        drafted = [one for one in drafts if one[0].is_drafted]
        if self.costs is None or not drafted:
            return
        num_rows = sum(length + 1 for _, length, _ in drafted)
        of_token = self._of_token([state for state, _, _ in drafted]) / len(drafted)
        undrafted = of_token * sum(accepted + 1 for _, _, accepted in drafted)
        self._spent += undrafted
        self._wasted = max(self._wasted + self.costs.verifying(width, 1, num_rows) - undrafted, 0.0)
        for state, length, accepted in drafted:
            self._judge(accepted, min(accepted + 1, length))
            self._longest = max(self._longest, accepted + 1)
            state.draft_cap = None  # until the next choice

    def note_decoded(self, states: Sequence[SequenceState]) -> None:
        """Counts the time of a decode pass, after which earlier verdicts count less unless the drafter is asked."""
        if self.costs is not None:
            self._spent += self._of_token(states)
            if not self._is_asked:
                self._judge(0, 0)

    def _is_due(self, state: SequenceState) -> bool:
        """Returns False for a request that decodes its next token first, because what the drafter proposed did not
        pay. If that token is committed, compares it with the first proposed one."""
        if state not in self._asked:
            return True
        num_tokens, token_id = self._asked[state]
        if len(state.token_ids) == num_tokens:
            return False
        del self._asked[state]
        if token_id is not None:
            self._judge(state.token_ids[num_tokens] == token_id, 1)
        return True

    def _judge(self, num_accepted: int, num_judged: int) -> None:
        """Adds draft tokens to the counts, in which earlier ones count less."""
        self._accepted, self._judged = self._accepted * _MEMORY + num_accepted, self._judged * _MEMORY + num_judged

    def _set(self, state: SequenceState, length: int | None) -> None:
        """Lets a request's next draft have at most `length` tokens; None: it goes on as without a drafter."""
        state.is_drafted, state.draft_cap = length is not None, length
        state.is_verified = state.is_drafted or _needs_verifier(state)

    def _best(self, states: Sequence[SequenceState], most: Sequence[int]) -> int | None:
        """Returns the draft length with the least time of a token; None if none pays. most: of each request, the number
        of tokens that its draft may have, or has if the drafter was asked."""
        assert self.costs is not None
        undrafted, best, least = self._of_token(states), None, 1.0
        prior = _PRIOR * _PRIOR_WEIGHT
        likely, low = ((self._accepted + add) / (self._judged + _PRIOR_WEIGHT) for add in (prior, 0.0))
        num_passes = math.ceil(len(states) / self._config.group)
        allowed = TRIAL_SHARE * max(self._spent, self._planned) - self._wasted
        for length in range(max(most, default=-1) + 1):
            drafts = [min(length, one) for one in most]
            seconds = self.costs.verifying(length + 1, num_passes, sum(drafts) + len(drafts))
            seconds += 0.0 if self._is_asked else length * self.costs.drafting(len(states))
            tokens = 1 + sum(_expected(likely, one) for one in drafts) / len(drafts)
            fewest = 1 + sum(min(_expected(low, one), self._longest) for one in drafts) / len(drafts)
            if seconds <= least * undrafted * tokens and seconds - undrafted * fewest <= allowed:
                best, least = length, seconds / (undrafted * tokens)
        return best if least < 1 else None

    def _of_token(self, states: Sequence[SequenceState]) -> float:
        """Returns the seconds in which a run without a drafter generates one token of each of these requests."""
        assert self.costs is not None
        num_verified = sum(_needs_verifier(state) for state in states)
        num_running = max(self._num_running, len(states))
        return self.costs.undrafted(len(states), num_running, num_verified, self._config.group)


def split(
    states: Sequence[SequenceState], lengths: DraftLengths | None, window: int
) -> list[tuple[bool, list[SequenceState]]]:
    """Returns the requests of a round's drafter call with True, and those of its decode pass with False; no empty
    group. lengths: chooses the lengths of drafts that begin; None without a drafter."""
    if lengths is not None:
        lengths.choose(states, len(states))
    drafted = [state for state in states if state.is_drafted and not state.is_ready(window)]
    decoded = [state for state in states if not state.is_drafted]
    return [(is_drafted, group) for is_drafted, group in ((True, drafted), (False, decoded)) if group]


def _needs_verifier(state: SequenceState) -> bool:
    """Returns True if the verifier decides the request's tokens in a run without a drafter, too."""
    return state.request.is_deterministic and not state.is_invariant


def _expected(share: float, length: int) -> float:
    """Returns how many tokens of a draft are accepted, if each is with probability `share` after the one before it.
    Source: Leviathan et al. 2023 (arXiv 2211.17192), section 3.1."""
    return float(length) if share >= 1 else share * (1 - share**length) / (1 - share)
