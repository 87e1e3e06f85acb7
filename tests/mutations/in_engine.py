"""Bugs of the loop: verdicts, windows, shapes, prefill, preemption, failures."""

import copy
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.mutations.mutate import Mutation, bug, instead, under, without

COMMITTER, ENGINE = "cacheprobe.engine.committer:Committer", "cacheprobe.engine.step:Engine"
PREFILL, SCHEDULER = "cacheprobe.engine.prefill:Prefill", "cacheprobe.engine.scheduler:Scheduler"
RUN, STATE = "cacheprobe.engine.model_runner:ModelRunner.run", "cacheprobe.kvcache.sequence:SequenceState"
STEP, PASS = "cacheprobe.engine.step", "cacheprobe.engine.passes:Pass"
ACCEPTED, PREPARE = "cacheprobe.ops.acceptance:num_accepted", "cacheprobe.engine.execution:prepare"


def _verified_if(chosen: Any) -> Any:
    """Requests are verified if `chosen(state, drafter, is_reference)`."""

    def make(real: Any) -> Any:
        def prepare(plan: Any, is_reference: bool = False) -> Any:
            made = real(plan, is_reference)
            for state in made.states:
                state.is_verified = chosen(state, plan.drafter, is_reference)
            return made

        return prepare

    return make


def _verify_pass(change: Any) -> Any:
    """Verify passes, except those of a rebuilt cache, run with width and batch from `change(entries, width, batch)`."""

    def make(real: Any) -> Any:
        def new_pass(
            cache: Any, step: int, phase: str, entries: Any, width: int, batch: Any = None, **more: Any
        ) -> Any:
            if phase == "verify":
                width, batch = change(entries, width, batch)
            return real(cache, step, phase, entries, width, batch, **more)

        return new_pass

    return make


def _where_taken_is_free(cache: Any) -> Any:
    other = copy.copy(cache)
    other.is_free = lambda row: not cache.is_free(row)
    return other


def _without_bonus(real: Any) -> Any:
    def verify_draft(self: Any, entry: Any, *given: Any) -> Any:
        verdict = real(self, entry, *given)
        drafted = len(verdict.draft_token_ids)
        if not 0 < drafted == verdict.num_accepted < verdict.num_committed:
            return verdict
        return replace(verdict, num_committed=drafted, finish=None)

    return verify_draft


def _first_for_all(real: Any) -> Any:
    def run(self: Any, a_pass: Any) -> Any:
        out = real(self, a_pass)
        if a_pass.phase == "verify":
            a_pass.batch_index = a_pass.batch_index[:1] * len(a_pass.entries)
        return out

    return run


def _commits_adaptive(real: Any) -> Any:
    def take(self: Any, states: Any, proposals: Any) -> None:
        with ExitStack() as stack:
            for state in states if self.config.draft_length == "adaptive" else ():
                stack.enter_context(patch.object(state, "is_verified", False))
            real(self, states, proposals)

    return take


def _without_the_committed(real: Any) -> Any:
    def verify_entry(state: Any) -> Any:
        entry = real(state)
        return replace(entry, token_ids=entry.token_ids[1:], start=entry.start + 1) if entry.token_ids[1:] else entry

    return verify_entry


def _over_what_is_in_use(real: Any) -> Any:
    def attention(self: Any, attends_by_request: bool) -> Any:
        made = real(self, attends_by_request)
        return made if made.spans else made._replace(num_slots=max(self.starts) + self.width)

    return attention


def _in_another_shape(real: Any) -> Any:
    def post_init(self: Any) -> None:
        self.batch = self.batch and max(len(self.entries), self.batch)
        self.width = max(self.width, *(len(entry.token_ids) for entry in self.entries))
        real(self)

    return post_init


def _free_shape_of_prefill(real: Any) -> Any:
    def new_pass(cache: Any, step: int, phase: str, entries: Any, width: int, batch: Any, **more: Any) -> Any:
        is_first_time = phase == "prefill" and not more.get("is_rebuild")
        return real(cache, step, phase, entries, width, None if is_first_time else batch, **more)

    return new_pass


def _rebuilt_as_plain(real: Any) -> Any:
    def rebuild(self: Any, states: Any) -> None:
        with patch.multiple(states[0], is_verified=False, reads_freely=True):
            real(self, states)

    return rebuild


def _takes_a_token_back(real: Any) -> Any:
    def preempt(self: Any, state: Any) -> None:
        real(self, state)
        del state.token_ids[max(state.last_committed_position, state.request.num_prompt_tokens + 1) :]

    return preempt


def _settles_at_once(real: Any) -> Any:
    def verify(self: Any, states: Any) -> None:
        verify_draft, apply_verdict = self.committer.verify_draft, self.committer.apply_verdict

        def judge_and_settle(entry: Any, *given: Any) -> Any:
            verdict = verify_draft(entry, *given)
            apply_verdict(entry.state, verdict)
            return verdict

        with patch.multiple(self.committer, verify_draft=judge_and_settle, apply_verdict=lambda state, verdict: None):
            real(self, states)

    return verify


def _abandoned_whole(real: Any) -> Any:
    def retries(self: Any, states: Any, error: Any) -> Any:
        groups = real(self, states, error)
        if len(states) == 1:
            return groups
        for state in [state for state in states if not state.error]:
            self.committer.stop(state, "error", error=str(error))
        return []

    return retries


MUTATIONS = [
    # -- what a verdict commits
    bug(
        "one candidate too many is accepted",
        ("03", "11"),
        ACCEPTED,
        lambda real: lambda draft, targets: min(real(draft, targets) + 1, len(draft)),
    ),
    bug(
        "a mismatch in the last row is overlooked",
        ("03_candidate_independence_with", "11"),
        ACCEPTED,
        lambda real: lambda draft, targets: (n := real(draft, targets)) + (n == len(draft) - 1),
    ),
    bug(
        "one candidate too few is accepted",
        ("11",),
        ACCEPTED,
        lambda real: lambda draft, targets: max(real(draft, targets) - 1, 0),
    ),
    bug("a full match commits no bonus token", ("11",), f"{COMMITTER}.verify_draft", _without_bonus),
    bug(
        "rejected candidates stay in the draft",
        ("11",),
        f"{STATE}.commit",
        instead(lambda self, ids: (self.token_ids.extend(ids), self.draft.__delitem__(slice(len(ids))))),
    ),
    bug(
        "the verdict is read one row off",
        ("02", "11"),
        f"{COMMITTER}.verify_draft",
        lambda real: lambda self, entry, logits, best: real(self, entry, logits.roll(1, 0), [best[-1], *best[:-1]]),
    ),
    bug("the verdict of the first request goes to all", ("05", "16"), RUN, _first_for_all),
    # -- who is verified, and when
    bug(
        "deterministic requests are not verified",
        ("01", "02"),
        PREPARE,
        _verified_if(lambda state, drafter, is_all: is_all or drafter is not None),
    ),
    bug("all requests are verified", ("24",), PREPARE, _verified_if(lambda *given: True)),
    bug("an adaptive draft is committed as it comes", ("01",), f"{ENGINE}._take", _commits_adaptive),
    bug(
        "a group with dummies waits for ever",
        ("10",),
        f"{SCHEDULER}.ready_groups",
        lambda real: lambda self, *args: [g for g in real(self, *args) if len(g) == self.config.group],
    ),
    bug(
        "a drafter with nothing to say is asked for ever",
        ("10",),
        f"{STATE}.is_ready",
        lambda real: lambda self, window: setattr(self, "draft_is_closed", False) or real(self, window),
    ),
    bug(
        "fill-ins come in any number",
        ("24_selectivity_riders_fill",),
        f"{SCHEDULER}.fill_ins",
        instead(lambda self: [s for s in self.drafting() if not s.is_verified] if self.config.window == 1 else []),
    ),
    # -- windows and shapes
    bug("the committed token is not fed again", ("12",), "cacheprobe.engine.step:verify_entry", _without_the_committed),
    bug(
        "a decode is fed the token before the newest",
        ("12",),
        f"{STATE}.newest",
        lambda real: lambda self: ([*self.token_ids, *self.draft][-2:][0], real(self)[1]),
    ),
    bug(
        "verify is as wide as its longest draft",
        ("01", "09_fixed_shape"),
        f"{STEP}:Pass",
        _verify_pass(lambda entries, width, batch: (max(len(entry.token_ids) for entry in entries), batch)),
    ),
    bug(
        "a width is used wherever a trial finds no difference",
        ("03_candidate_independence_where_attention",),
        "cacheprobe.engine.shapes:_independent_width",
        instead(lambda model: 64),
    ),
    bug(
        "verify has no dummies",
        ("01", "05_neighbour_independence_in_random_batches", "09_fixed_shape"),
        f"{STEP}:Pass",
        _verify_pass(lambda entries, width, batch: (width, None)),
    ),
    bug(
        "a fixed pass attends to no more than is in use",
        ("07_window_offset_independence_of_the_bridge",),
        f"{PASS}.attention",
        _over_what_is_in_use,
    ),
    bug(
        "a pass that does not fit is run in another shape",
        ("09_fixed_shape_or",),
        f"{PASS}.__post_init__",
        _in_another_shape,
    ),
    bug(
        "dummies are put into rows that are taken",
        ("05",),
        "cacheprobe.engine.passes:free_row",
        lambda real: lambda cache: real(_where_taken_is_free(cache)),
    ),
    # -- prefill
    bug(
        "verified prompts are read in their own width",
        ("01", "21"),
        f"{PREFILL}.read",
        under(lambda *given: {"pad_prefill": False}),
    ),
    bug(
        "a preempted request's prompt is padded where it was not",
        ("21_prefill_determinism_without_pads",),
        f"{PREFILL}.rebuild",
        under(lambda *given: {"pad_prefill": True}),
    ),
    Mutation(
        "verified prompts are read together",
        ("01", "21"),
        {
            f"{PREFILL}.read": under(lambda self, states: {"prefill_group": len(states)}),
            "cacheprobe.engine.prefill:Pass": _free_shape_of_prefill,
        },
    ),
    bug(
        "chunks are shorter in a batch",
        ("01", "21"),
        f"{PREFILL}.read",
        under(
            lambda self, *given: {"prefill_chunk": self.config.prefill_chunk - (self.runner.cache.num_free_rows < 5)}
        ),
    ),
    bug(
        "logits of a prefill group depend on where the others end",
        ("21_prefill_determinism_of_groups",),
        f"{PREFILL}._logit_slots",
        lambda real: (
            lambda self, last, width, is_fixed: real(self, last, width, is_fixed and len({*last} - {None}) > 1)
        ),
    ),
    bug(
        "rows are shared with a request that is not verified",
        ("22",),
        "cacheprobe.engine.prefill:_prompt_key",
        instead(lambda state: (state.request.prompt_token_ids, True, -1)),
    ),
    # -- preemption
    bug("a preempted request is read back in one piece", ("23",), f"{PREFILL}.rebuild", _rebuilt_as_plain),
    bug(
        "a preempted request is not read back",
        ("23",),
        f"{PREFILL}.rebuild",
        instead(lambda self, states: self._begin(states[0])),
    ),
    bug("a preempted request keeps its draft", ("23",), f"{COMMITTER}.preempt", without("_abandon_draft")),
    bug(
        "a preemption takes back a committed token",
        ("17_monotone_release",),
        f"{COMMITTER}.preempt",
        _takes_a_token_back,
    ),
    # -- failures
    bug(
        "a failed step stays in the capture",
        ("25",),
        "cacheprobe.trace.recording.recorder:Recorder.on_failure",
        instead(lambda self, step: None),
    ),
    bug(
        "NaN is seen by the capture first",
        ("25",),
        "cacheprobe.engine.model_runner:ModelRunner._require_numbers",
        instead(lambda self, *given: None),
    ),
    bug("requests are committed while others are judged", ("25",), f"{ENGINE}.verify", _settles_at_once),
    bug(
        "a failed row is not scrubbed",
        ("25_exception_safety_in_a_run", "25_exception_safety_of_who_comes_next"),
        "cacheprobe.kvcache.cache:KVCache.scrub",
        instead(lambda self, row, start: None),
    ),
    bug("a group that fails is abandoned whole", ("25",), f"{ENGINE}._retries", _abandoned_whole),
    # -- the negative control
    Mutation(
        "the fast path decodes and reads one request at a time",
        ("27",),
        {
            f"{PREFILL}.read": lambda real: (
                lambda self, states: [
                    real(self, some) for some in ([states] if states[0].is_verified else [[s] for s in states])
                ]
            ),
            f"{ENGINE}.decode": lambda real: lambda self, states: [real(self, [state]) for state in states],
        },
    ),
]
