"""Tries out a run's drafter for a short time, to see how many of its draft tokens are accepted."""

import time
from collections.abc import Sequence
from contextlib import closing

from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.estimates.assumed import WHOLE
from cacheprobe.engine.plan import RunPlan
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.settings import hold_model
from cacheprobe.ops.acceptance import StopRule
from cacheprobe.trace.recording.observers import StepLog

TRIAL_SECONDS, TRIAL_DRAFTS, TRIAL_REQUESTS = 1.5, 3, 16
"""A trial ends after this time, but not before this number of verdicts for each of its requests: the first drafts of a
text are accepted less often than later ones. It runs at most this number of requests, and no more than fit into a
batch: some texts are drafted far better than others."""


def try_out(plan: RunPlan, drafter: Drafter | None, states: Sequence[SequenceState]) -> list[tuple[int, int]]:
    """Runs some verified requests of a run with their drafter for a short time, without recording states. Returns
    (length, number of accepted tokens) of each draft, with WHOLE for a draft that was accepted in full; [] if none got
    a verdict.

    states: from `plan.states`; those that are run, evenly spaced, are changed.
    """
    log = StepLog()
    could = [state for state in states if state.is_verified and state.request.cached is None]
    num_tried = min(TRIAL_REQUESTS, plan.config.max_batch, len(could))
    tried = [could[i * len(could) // num_tried] for i in range(num_tried)]
    if not tried:
        return []
    for state in tried:
        state.stop_rule = StopRule(frozenset(), (), state.decode)
    until = time.perf_counter() + TRIAL_SECONDS
    steps = plan.bind_loop(drafter)(tried, log)
    with hold_model(plan.model), closing(steps):
        for _ in steps:
            num_verdicts = sum(len(step.verdicts) for step in log.steps)
            if time.perf_counter() > until and num_verdicts >= TRIAL_DRAFTS * len(tried):
                break
    for state in tried:
        if drafter is not None:
            drafter.release(state)
    verdicts = [verdict for step in log.steps for verdict in step.verdicts]
    return [(len(v.draft_token_ids), v.num_accepted if v.is_rollback else WHOLE) for v in verdicts]
