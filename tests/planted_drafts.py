"""Planted costs of drafts, in decode passes of one request, in place of those that a run measures."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from cacheprobe.core.records import DraftCosts
from cacheprobe.engine import execution
from cacheprobe.engine.checker import RecomputeChecker
from cacheprobe.engine.drafters.base import always_drafts
from cacheprobe.engine.plan import RunPlan


@contextmanager
def planted(
    draft: float, verify: "float | Mapping[int, float]", plain: tuple[float, float] = (1.0, 1.0), row: float = 0.0
) -> Iterator[None]:
    """Inside the `with`, runs of drafters that do not always draft have these costs: of a draft token, and of a verify
    pass of every width or of each. plain: a decode pass of one request, and of eight."""

    def costs_of(plan: RunPlan, checker: RecomputeChecker) -> DraftCosts | None:
        """Returns the planted costs."""
        if plan.drafter is None or always_drafts(plan.drafter):
            return None
        widths = (*checker.narrow_widths, plan.config.window)
        by_width = dict(verify) if isinstance(verify, Mapping) else dict.fromkeys(widths, verify)
        return DraftCosts(plain, (draft, draft), by_width, row, 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution, "costs_of", costs_of)
        yield
