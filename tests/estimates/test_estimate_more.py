"""cp.estimate of runs with a dictionary and of requests with forced tokens, against the runs themselves."""

from pathlib import Path
from typing import Any

import pytest

import cacheprobe as cp
from cacheprobe.engine.drafters.replayed import Replayed
from tests.dictionaries.planted import random_dictionary
from tests.estimates.test_estimate import SETTINGS, disk_bytes, is_close, passes_of, phases, table_bytes
from tests.tiny import PROMPTS, loaded

TWINS = [*PROMPTS[:3], PROMPTS[2]]


@pytest.mark.parametrize("architecture", ["topk", "jumprelu"])
@pytest.mark.parametrize("capture", [None, "S"])
def test_features_are_counted(architecture: str, capture: "str | None", tmp_path: Path) -> None:
    """Of every row, those of a shared prompt too; a topk dictionary has fewer than are asked for."""
    mine = random_dictionary(architecture)
    settings: dict[str, Any] = {**SETTINGS, "capture": capture, "dictionary": mine, "deterministic": [0]}
    trace = cp.run(loaded(), TWINS, progress=False, **settings)
    estimate = cp.estimate(loaded(), TWINS, **settings)
    features = trace.feature_table
    assert features is not None and len(features) > 300
    held = table_bytes(trace) + int(features.memory_usage(deep=True).sum())
    assert is_close(estimate.table_bytes.likely, held)
    assert is_close(estimate.disk_bytes.likely, disk_bytes(trace, tmp_path))
    without = cp.estimate(loaded(), TWINS, **{**settings, "dictionary": None})
    assert estimate.table_bytes.likely - without.table_bytes.likely == pytest.approx(28 * len(features), rel=0.02)
    assert estimate.peak_bytes.likely > without.peak_bytes.likely
    assert any("active features" in one for one in estimate.assumptions)


@pytest.mark.parametrize("drafter", [None, Replayed(), cp.drafters.EarlyExit(layer=1)], ids=str)
def test_forced_tokens_are_counted(drafter: Any) -> None:
    """Without drafts exactly; else between the bounds."""
    settings = {name: value for name, value in SETTINGS.items() if name not in ("max_new_tokens", "sampling")}
    lengths = (9, 14, 5, 20)
    requests = [cp.Request(ids, forced_token_ids=tuple(range(3, 3 + n))) for ids, n in zip(TWINS, lengths, strict=True)]
    estimate = cp.estimate(loaded(), requests, **settings, capture="S", drafter=drafter)
    trace = cp.run(loaded(), requests, **settings, capture="S", drafter=drafter, progress=False)
    assert estimate.new_tokens == 48 == sum(len(trace.committed(i)) for i in range(4))
    found = phases(trace)
    for phase, bounds in passes_of(estimate).items():
        assert bounds.least <= found[phase] <= bounds.most
        if drafter is None:
            assert bounds.likely == found[phase]
