"""Says which drafts would have been accepted in a stored run: by drafter, layer, window and temperature."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from cacheprobe.analysis.draft_replay.plan import ReplayPlan, committed_readings
from cacheprobe.analysis.draft_replay.tables import TABLES, DraftReplay
from cacheprobe.core.terminal import Progress
from cacheprobe.core.values import hint, whole_number
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.drafters.early_exit import EarlyExit

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


def acceptance(
    trace: "Trace",
    drafters: Drafter | Iterable[Drafter] | None = None,
    *,
    windows: "int | Sequence[int]" = (2, 4, 8, 16),
    temperature: float | None = None,
    draft_length: "int | str | None" = None,
    rule: str = "equality",
    readings: pd.DataFrame | None = None,
    by: str = "request",
    progress: bool = True,
) -> pd.DataFrame:
    """Computes from one stored trace which draft tokens would have been accepted. Does not run the model.

    drafters: EarlyExit objects, whose draft tokens are the first tokens of the lens readings at their layer; and
        drafters that need only tokens (NGram, Scripted) or a model of their own (DraftModel), which draft again. By
        default an EarlyExit at each layer that was read but the model's last.
    windows: tokens of a verify pass.  draft_length, rule: as draft_length and acceptance of `cp.run`.
    temperature: None for that of each request. Another one is an estimate, along the stored text.
    readings: from `cp.analysis.read_states`, for another lens than the run's.
    by: "request": a line for each request, drafter and window. "pass": a line for each verify pass. "place": for each
        place in a draft, over all requests.

    Columns of all: drafter (its name); layer and lens of an EarlyExit, null for others; settings (the repr of others,
    null for EarlyExit); window, temperature, kind.
    by="request": request_id, passes, undrafted (passes without a draft token), drafted, accepted and committed (tokens;
    the first one comes from the prefill and is not counted), tokens_per_pass, acceptance_rate.
    by="pass": request_id, position (of the newest committed token), probability (that a pass begins there), drafted,
    accepted.
    by="place": place (1 for a draft's first token), drafted and accepted (passes), acceptance_rate.

    kind is "exact" for greedy requests, and for the other drafters at the run's own temperature. The counts are then
    those of `cp.run` with the drafter, if its logits choose the same tokens: they are computed in passes of another
    shape, so rounding can turn a near tie. Replayed and imported requests count as greedy: their counts are those of
    `cp.replay` with the drafter. One count may differ: a draft of EarlyExit goes on after its first
    wrong token, and a stop token among these unknown ones would make `drafted` smaller. Requests are replayed alone,
    without preemption.
    kind is "estimated" for EarlyExit at other temperatures than 0: only the recorded top tokens count (`top_k` of
    CaptureConfig). At the run's own temperature they are drawn with the run's own noise; at another one, counts are
    expected numbers.
    Raises: ValueError without readings that an EarlyExit needs, for a lens that did not read them, for a drafter that
    runs the verified model, for sampling settings other than temperature that change the choice, and for a run with
    interventions or with thoughts.
    Source: number of accepted tokens, Leviathan et al. 2023 (arXiv 2211.17192), section 3.1, counted on one text.
    Twin: tests.twins.measures_slowly.draft_agreement_slowly, == for greedy requests; and the events of a run with the
    drafter.
    """
    if by not in TABLES:
        raise ValueError(f"unknown by={by!r:.60}; tables are by {', '.join(TABLES)}{hint(by, TABLES)}")
    sizes = [windows] if isinstance(windows, int) else list(windows)
    if not sizes or min(whole_number("window", window) for window in sizes) < 1:
        raise ValueError(f"windows must hold numbers of tokens of at least 1, got {windows!r:.60}")
    if isinstance(drafters, Iterable):
        drafters = list(drafters)
    plan = ReplayPlan(trace, temperature, draft_length, rule)
    table = None if readings is None and _has_no_exit(drafters) else committed_readings(trace, readings)
    listed = plan.drafters(drafters, table)
    replayed: list[DraftReplay] = []
    with Progress(len(plan.texts) * len(listed), "replaying", "texts", enabled=progress) as bar:
        for text in plan.texts:
            own = None if table is None else table[table.request_id == text.request_id]
            for drafter in listed:
                lens = str(own.lens.iloc[0]) if isinstance(drafter, EarlyExit) and own is not None else None
                for window, passes in plan.replays(text, drafter, own, sizes):
                    replayed.append(DraftReplay(text, drafter, lens, window, plan.sampled(text), passes))
                bar.advance()
    return TABLES[by](replayed)


def _has_no_exit(drafters: Drafter | Sequence[Drafter] | None) -> bool:
    """Returns whether drafters were given of which none is an EarlyExit."""
    listed = drafters if isinstance(drafters, Sequence) else [drafters]
    return drafters is not None and not any(isinstance(one, EarlyExit) for one in listed)
