"""The list of rejected drafts, against a walk through the events, for drafters that fail in different ways."""

from functools import cache
from typing import Any

import pandas as pd
import pytest

import cacheprobe as cp
from tests.tiny import PROMPTS, SMALL, loaded
from tests.twins.rejected_slowly import rejected_slowly

DRAFTERS: dict[str, dict[str, Any]] = {
    "early exit": dict(drafter=cp.drafters.EarlyExit(layer=1)),
    "n-gram": dict(drafter=cp.drafters.NGram()),
    "preempted": dict(drafter=cp.drafters.EarlyExit(layer=1), max_kv_tokens=96),
    "unread": dict(drafter=cp.drafters.EarlyExit(layer=1), capture="S"),
}


@cache
def run(name: str) -> cp.Trace:
    settings = {**SMALL, "capture": "SZ", "deterministic": True, "max_new_tokens": 24, **DRAFTERS[name]}
    return cp.run(loaded("llama"), PROMPTS, **settings)


def lines(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{k: None if pd.isna(v) else v for k, v in line.items()} for line in table.to_dict("records")]


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_list_is_that_of_the_events(name: str) -> None:
    trace = run(name)
    found = lines(trace.rejected())
    assert found == rejected_slowly(trace)
    assert len(found) > 3 and bool(trace.meta["preemptions"]) == (name == "preempted")
    if name == "early exit":
        assert {line["drafter_layer"] for line in found} == {1}
        assert any(line["margin_nats"] is not None for line in found)
        assert all(line["drafted_token_id"] != line["committed_token_id"] for line in found)
        assert {line["flip_layer"] for line in found} == {2}  # the last one: the drafter stops before it


def test_a_run_without_rejected_drafts_has_an_empty_list() -> None:
    trace = cp.run(loaded("llama"), PROMPTS, **SMALL, capture="SZ")
    table = trace.rejected()
    assert table.empty and table.dtypes.to_dict() == run("early exit").rejected().dtypes.to_dict()
