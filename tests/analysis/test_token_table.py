"""The table of all tokens, against a walk through events and readings, and against pandas by hand."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import cacheprobe as cp
from cacheprobe.trace.stored import open_run
from cacheprobe.trace.tables import token_readings
from cacheprobe.trace.tables.token_table import group_rejections, tokens_of, tokens_of_run
from tests.dashboard.growing_run import begun, go_on, part_each_round
from tests.tiny import PROMPTS, SMALL, loaded
from tests.twins.tokens_slowly import tokens_slowly

EARLY = cp.drafters.EarlyExit(layer=1)
RUNS: dict[str, dict[str, Any]] = {
    "early exit": dict(drafter=EARLY),
    "n-gram": dict(drafter=cp.drafters.NGram()),
    "sampled": dict(drafter=EARLY, sampling=cp.SamplingParams(temperature=1.5, max_new_tokens=24)),
    "preempted": dict(drafter=EARLY, max_kv_tokens=96),
    "one choice": dict(drafter=EARLY, capture=cp.CaptureConfig("Z", top_k=1)),
    "unread": dict(drafter=EARLY, capture="T"),
    "undrafted": dict(deterministic=False),
}


@cache
def run(name: str) -> cp.Trace:
    settings = {**SMALL, "capture": "SZ", "deterministic": True, "max_new_tokens": 24, **RUNS[name]}
    if "sampling" in settings:
        del settings["max_new_tokens"]
    return cp.run(loaded("llama"), PROMPTS, **settings)


def plain(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{k: None if pd.isna(v) else v for k, v in line.items()} for line in table.to_dict("records")]


def is_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Fractions are computed in float64 there, and in the dtype of the readings here."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert {k: v if isinstance(v, float) else (v, type(v) is bool) for k, v in one.items()} == {
            k: pytest.approx(v, rel=1e-5, abs=1e-6) if isinstance(one[k], float) else (v, type(v) is bool)
            for k, v in other.items()
        }


@pytest.mark.parametrize("name", [name for name in RUNS if name != "one choice"])
def test_the_table_is_that_of_the_events_and_readings(name: str) -> None:
    trace = run(name)
    table = cp.analysis.token_table(trace)
    is_same(plain(table), tokens_slowly(trace))
    assert (table.verdict != "rejected").sum() == sum(len(trace.committed(r.request_id)) for r in trace.requests)
    assert ({*table.verdict} == {"committed"}) == (name == "undrafted")
    if name == "sampled":  # what others do not have
        assert table.first_at_layer.isna().any() and (table.margin_nats < 0).any()
    if name == "early exit":
        accepted = table[table.verdict == "accepted"]
        assert accepted.first_at_drafter_layer.all() and {*accepted.drafter_layer} == {1}
        assert not table[table.verdict == "rejected"].first_at_drafter_layer.any()


def test_the_walk_would_notice_readings_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = token_readings._Readings.of.__func__

    def shifted(cls: type, table: pa.Table, width: int) -> token_readings._Readings:
        read = whole(cls, table, width)
        return read._replace(keys=read.keys + 1)

    monkeypatch.setattr(token_readings._Readings, "of", classmethod(shifted))
    with pytest.raises(AssertionError):
        test_the_table_is_that_of_the_events_and_readings("early exit")


def test_with_one_choice_kept_no_margin_is_known_of_a_first_choice() -> None:
    table = cp.analysis.token_table(run("one choice"))
    assert table.margin_nats.isna().all() and table.entropy_nats.notna().all()  # greedy: the committed one is first


def test_states_that_no_lens_read_are_read_now() -> None:
    settings = {**SMALL, "deterministic": True, "max_new_tokens": 24, "drafter": EARLY}
    table = cp.analysis.token_table(cp.run(loaded("llama"), PROMPTS, **settings, capture="S"))
    is_same(plain(table), plain(cp.analysis.token_table(run("early exit"))))


@pytest.mark.parametrize("name", ["early exit", "unread"])
def test_a_stored_run_has_the_same(name: str, tmp_path: Path) -> None:
    trace = run(name)
    trace.save(tmp_path / "run")
    for one, other in zip(tokens_of(trace), tokens_of_run(open_run(tmp_path / "run")), strict=True):
        pd.testing.assert_frame_equal(one, other)
    pd.testing.assert_frame_equal(tokens_of(trace).lines, tokens_of(cp.load_trace(tmp_path / "run")).lines)


def test_a_run_that_is_recorded_has_what_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part_each_round(monkeypatch)
    stream = begun(tmp_path / "run")
    go_on(stream, tmp_path / "run", 3)
    growing = open_run(tmp_path / "run")
    found, trace = tokens_of_run(growing), cp.load_trace(tmp_path / "run")
    pd.testing.assert_frame_equal(found.lines, tokens_of(trace).lines)
    pd.testing.assert_frame_equal(found.layers, tokens_of(trace).layers)
    assert 0 < len(found.lines) and found.lines.entropy_nats.notna().any()
    list(stream)
    assert len(tokens_of_run(open_run(tmp_path / "run")).lines) > len(found.lines)


def test_equal_rejections_share_a_line() -> None:
    whole = cp.analysis.token_table(run("early exit"))
    table, rejected = cp.analysis.token_table(run("early exit"), grouped=True), whole[whole.verdict == "rejected"]
    pairs = list(zip(rejected.drafted_token_id, rejected.committed_token_id.fillna(-1), strict=True))
    counts = {pair: pairs.count(pair) for pair in pairs}
    shared = table[table.verdict == "rejected"]
    found = dict(
        zip(zip(shared.drafted_token_id, shared.committed_token_id.fillna(-1), strict=True), shared.times, strict=True)
    )
    assert found == counts and max(counts.values()) > 1
    firsts = [pairs.index(pair) for pair in counts]
    assert shared.position.tolist() == rejected.position.iloc[sorted(firsts)].tolist()
    pd.testing.assert_frame_equal(group_rejections(table), table)  # once more changes nothing
    kept = table[table.verdict != "rejected"].reset_index(drop=True)
    pd.testing.assert_frame_equal(kept, whole[whole.verdict != "rejected"].reset_index(drop=True))


def test_shares_by_layer_are_counted_by_hand() -> None:
    trace = run("early exit")
    readings, layers = trace.hypotheses(), tokens_of(trace).layers
    own = readings[(readings.status == "committed") & readings.committed_token_id.notna()]
    lines = cp.analysis.token_table(trace)
    for verdict, words in (
        ("accepted", ["accepted"]),
        ("rejected", ["recovered"]),
        ("not_drafted", ["bonus", "committed"]),
    ):
        of_verdict = lines[lines.verdict.isin(words)].set_index(["request_id", "position"])
        for layer, group in own.groupby("layer"):
            at = list(zip(group.request_id, group.position + 1, strict=True))
            mine = group[[place in of_verdict.index for place in at]]
            [line] = layers[(layers.layer == layer) & (layers.verdict == verdict)].to_dict("records")
            assert line["rows"] == len(mine) == len(of_verdict)
            assert line["committed_first"] == pytest.approx((mine.token_id == mine.committed_token_id).mean())
            drafted = of_verdict.drafted_token_id.loc[list(zip(mine.request_id, mine.position + 1, strict=True))]
            first = float((mine.token_id.to_numpy() == drafted.to_numpy(dtype=float, na_value=-1)).mean())
            assert (
                np.isnan(line["drafted_first"])
                if verdict != "rejected"
                else line["drafted_first"] == pytest.approx(first)
            )


def test_a_text_is_found_in_outputs_prompts_and_drafts() -> None:
    trace = run("early exit")
    texts, table = trace.token_texts, cp.analysis.token_table(trace)
    tokens = trace.committed(1)
    wanted = texts[tokens[4]] + texts[tokens[5]][:2]  # the whole of one token, and the beginning of the next
    found = cp.analysis.tokens_with_text(trace, table, wanted.upper().replace("␣", " "))
    at = trace.requests[1].num_prompt_tokens
    assert {at + 4, at + 5} <= set(found.position[found.request_id == 1])
    for line in found.itertuples():  # each has an occurrence around it, begins after one, or was drafted so
        ids = [*trace.requests[line.request_id].prompt_token_ids, *trace.committed(line.request_id)]
        near = "".join(texts[i] for i in ids[max(line.position - 8, 0) : line.position + 9])
        prompt = "".join(texts[i] for i in trace.requests[line.request_id].prompt_token_ids)
        assert wanted in near or wanted in prompt or wanted in line.drafted_token
    of_prompt = "".join(texts[i] for i in PROMPTS[4][:3])
    first = cp.analysis.tokens_with_text(trace, table, of_prompt).query("request_id == 4")
    assert first.position.tolist()[:1] == [len(PROMPTS[4])]
    drafted = table[table.verdict == "rejected"].drafted_token.iloc[0]
    assert (cp.analysis.tokens_with_text(trace, table, drafted).drafted_token == drafted).any()
    assert cp.analysis.tokens_with_text(trace, table, "no such text").empty
    with pytest.raises(ValueError, match="it is empty"):
        cp.analysis.tokens_with_text(trace, table, "")
