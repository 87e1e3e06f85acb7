"""Builds the tables of `acceptance` from replayed passes, and turns their counts into expected times."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pandas as pd

from cacheprobe.analysis.draft_passes import CommittedText, ReplayedPass, Sampled
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.drafters.early_exit import EarlyExit
from cacheprobe.trace.tables.schema import typed

DRAFTER = ["drafter", "settings", "layer", "lens"]
"""Columns that name a drafter."""
KEYS = [*DRAFTER, "window", "temperature", "kind"]
"""Columns that say what was replayed."""


def names_of(drafter: Drafter) -> dict[str, object]:
    """Returns the values of the columns DRAFTER: settings is the drafter's repr, null for EarlyExit, which has a layer
    and a lens."""
    if isinstance(drafter, EarlyExit):
        return {"drafter": drafter.name, "settings": None, "layer": drafter.layer, "lens": drafter.lens.name}
    return {"drafter": drafter.name, "settings": repr(drafter), "layer": None, "lens": None}


class DraftReplay(NamedTuple):
    """Holds the replay of one request with one drafter and window."""

    text: CommittedText
    drafter: Drafter
    lens: str | None
    """Name of the lens whose readings are an EarlyExit's drafts; None for another drafter."""
    window: int
    sampled: Sampled
    passes: list[ReplayedPass]

    @property
    def keys(self) -> dict[str, object]:
        """Values of KEYS."""
        is_exact = self.sampled.is_own and not (self.sampled.temperature and self.lens)
        return {
            **names_of(self.drafter),
            "lens": self.lens,
            "window": self.window,
            "temperature": self.sampled.temperature,
            "kind": "exact" if is_exact else "estimated",
        }


def by_request(replayed: Sequence[DraftReplay]) -> pd.DataFrame:
    """Returns a line for each request, drafter and window."""
    lines = []
    for one in replayed:
        passes = sum(each.weight for each in one.passes)
        drafted = sum(each.weight * sum(each.drafted) for each in one.passes)
        accepted = sum(each.weight * sum(each.accepted) for each in one.passes)
        undrafted = sum(each.weight for each in one.passes if not sum(each.drafted))
        committed = one.text.last - one.text.first
        lines.append(
            {
                "request_id": one.text.request_id,
                **one.keys,
                "passes": passes,
                "undrafted": undrafted,
                "drafted": drafted,
                "accepted": accepted,
                "committed": committed,
                "tokens_per_pass": committed / passes if passes else None,
                "acceptance_rate": accepted / drafted if drafted else None,
            }
        )
    return typed(lines, "acceptance by request")


def by_pass(replayed: Sequence[DraftReplay]) -> pd.DataFrame:
    """Returns a line for each verify pass that has a probability above 0."""
    lines = [
        {
            "request_id": one.text.request_id,
            **one.keys,
            "position": each.position,
            "probability": each.weight,
            "drafted": sum(each.drafted),
            "accepted": sum(each.accepted),
        }
        for one in replayed
        for each in one.passes
    ]
    return typed(lines, "acceptance by pass")


def by_place(replayed: Sequence[DraftReplay]) -> pd.DataFrame:
    """Returns a line for each place in a draft, drafter and window, over all requests."""
    lines = [
        {**one.keys, "place": place, "drafted": each.weight * drafted, "accepted": each.weight * accepted}
        for one in replayed
        for each in one.passes
        for place, (drafted, accepted) in enumerate(_by_place_of(each), start=1)
    ]
    table = typed(lines, "acceptance by place")
    summed = table.groupby([*KEYS, "place"], dropna=False, sort=False, as_index=False)[["drafted", "accepted"]].sum()
    summed["acceptance_rate"] = summed.accepted / summed.drafted
    return typed(summed[summed.drafted > 0].reset_index(drop=True), "acceptance by place")


def _by_place_of(one: ReplayedPass) -> list[tuple[float, float]]:
    """Returns (drafted, accepted) of each place of a pass; nothing is accepted where the replay ends."""
    accepted = [*one.accepted, *[0.0] * (len(one.drafted) - len(one.accepted))]
    return list(zip(one.drafted, accepted, strict=True))


TABLES: dict[str, Callable[[Sequence[DraftReplay]], pd.DataFrame]] = {
    "request": by_request,
    "pass": by_pass,
    "place": by_place,
}
"""Tables of `acceptance` by the value of its argument `by`."""


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
