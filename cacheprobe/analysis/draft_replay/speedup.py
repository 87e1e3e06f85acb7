"""Turns counts of `acceptance` into expected times, with costs measured on a machine."""

import pandas as pd

from cacheprobe.analysis.draft_replay.tables import DRAFTER

COSTS = ["verify_seconds", "undrafted_seconds", "draft_seconds", "plain_seconds"]

_COUNTS = ["passes", "undrafted", "drafted", "committed"]


def expected_speedup(acceptance: pd.DataFrame, costs: pd.DataFrame) -> pd.DataFrame:
    """Returns the table with the expected time of each line, drafted and undrafted. Runs no model.

    acceptance: from `cp.analysis.acceptance(..., by="request")`.  costs: from `cp.draft_costs`.
    Added columns: seconds (passes with a draft * verify_seconds + others * undrafted_seconds + drafted tokens *
    draft_seconds), plain_seconds (committed tokens times the cost of one without a drafter), seconds_per_token, speedup
    (plain_seconds / seconds). The prefill is not counted. Requests run one at a time.
    Raises: ValueError for a table without these columns, and for a drafter and window without a cost.
    Source: expected time of speculative decoding, Leviathan et al. 2023 (arXiv 2211.17192), section 3.3, with counts
    and costs in place of their formulas.
    """
    keys = [*DRAFTER, "window"]
    for table, columns, origin in (
        (acceptance, [*keys, *_COUNTS], "cp.analysis.acceptance(..., by='request')"),
        (costs, [*keys, *COSTS], "cp.draft_costs"),
    ):
        if lacking := [name for name in columns if name not in table.columns]:
            raise ValueError(f"the table has no column {lacking[0]}; give one from {origin}")
    joined = acceptance.merge(costs[[*keys, *COSTS]], on=keys, how="left", validate="many_to_one")
    if (unknown := joined[joined.verify_seconds.isna()]).shape[0]:
        line = unknown.iloc[0]
        place = "" if pd.isna(line.layer) else f" at layer {line.layer} with the {line.lens} lens"
        raise ValueError(
            f"no cost of drafter {line.drafter}{place} and window {line.window}; measure it with "
            "cp.draft_costs(model, prompts, drafters, windows=...)"
        )
    if (unmeasured := joined[(joined.drafted > 0) & joined.draft_seconds.isna()]).shape[0]:
        raise ValueError(
            f"no draft token of drafter {unmeasured.iloc[0].drafter} was measured; give cp.draft_costs more new "
            "tokens, or prompts for which it drafts"
        )
    drafting = (joined.drafted * joined.draft_seconds).fillna(0.0)
    without = joined.undrafted_seconds.fillna(joined.verify_seconds)  # none was measured
    seconds = (joined.passes - joined.undrafted) * joined.verify_seconds + joined.undrafted * without + drafting
    plain = joined.committed * joined.plain_seconds
    return joined.drop(columns=COSTS).assign(
        seconds=seconds, plain_seconds=plain, seconds_per_token=seconds / joined.committed, speedup=plain / seconds
    )
