"""What the comparison of two runs says: settings, drafts, tokens and the difference of lens readings."""

import math
import re
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.analysis.comparison import setting_differences
from cacheprobe.trace.stored import StoredRun
from cacheprobe.trace.tables.draft_verdicts import draft_counts, drafts_table, rejected_by_place
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.tabs import compare
from cacheprobe.views.report.run_comparison import lens_difference
from tests.tiny import PROMPTS, SMALL, loaded


@cache
def pair() -> tuple[cp.Trace, cp.Trace]:
    """Two drafters; request 1 is sampled in the second run alone, and goes another way after some tokens."""
    warm = cp.SamplingParams(temperature=0.3, seed=1, stop_token_ids=())
    plain = cp.SamplingParams(stop_token_ids=())
    requests = [[cp.Request(p, sampling, is_deterministic=True) for p, sampling in zip(PROMPTS, of, strict=False)]
                for of in ([plain] * 3, [plain, warm, plain])]  # fmt: skip
    early, n_gram = cp.drafters.EarlyExit(layer=1), cp.drafters.NGram()
    return cp.run(loaded(), requests[0], drafter=early, **SMALL), cp.run(loaded(), requests[1], drafter=n_gram, **SMALL)


def parted(request_id: int) -> int | None:
    """Index of the first generated token that differs."""
    committed = [trace.committed(request_id) for trace in pair()]
    return next((i for i, (a, b) in enumerate(zip(*committed, strict=True)) if a != b), None)


def test_settings_that_differ_are_named(tmp_path: Path) -> None:
    stored = [StoredRun(trace.save(tmp_path / str(i))) for i, trace in enumerate(pair())]
    found = setting_differences(stored[0].meta, stored[1].meta, stored[0].requests, stored[1].requests)
    seeds = [", ".join(str(request["sampling"]["seed"]) for request in run.requests) for run in stored]
    assert {name: values for name, *values in found} == {
        "drafter": ["EarlyExit(layer=1, lens=LogitLens())", "NGram(max_ngram=8, min_ngram=1, length=8)"],
        "temperature": ["0.0", "0.0, 0.3, 0.0"],
        "seed": seeds,
    }
    assert not setting_differences(stored[0].meta, stored[0].meta, stored[0].requests, stored[0].requests)


@pytest.mark.parametrize(
    ("setting", "ours", "theirs"),
    [
        ("draft_length", 1, 3),
        ("acceptance", "equality", "rejection"),
        ("max_batch", 2, 3),
        ("capture", cp.CaptureConfig("S", every=2), cp.CaptureConfig("S", every=3)),
        ("capture", cp.CaptureConfig("S", positions=[1]), cp.CaptureConfig("S", positions=[2])),
    ],
)
def test_no_setting_is_forgotten(setting: str, ours: object, theirs: object, tmp_path: Path) -> None:
    stored = []
    for i, value in enumerate((ours, theirs)):
        settings = {**SMALL, "drafter": cp.drafters.NGram(), "capture": None, "max_new_tokens": 2, setting: value}
        stored.append(StoredRun(cp.run(loaded(), PROMPTS[:2], **settings).save(tmp_path / str(i))))
    assert len(setting_differences(stored[0].meta, stored[1].meta, stored[0].requests, stored[1].requests)) == 1


def test_settings_of_another_engine_are_not_known() -> None:
    imported = {"fingerprint": {"path": "imported from vLLM"}, "kind": "import", "config": {"capacity": 64}}
    found = {name: values for name, *values in setting_differences(imported, {}, [], [])}
    assert found["window"][0] == found["max batch"][0] == "not known" and found["capacity"][0] == "64"


def test_of_a_long_list_the_part_that_differs_is_named() -> None:
    requests = [[{"sampling": {"seed": seed}} for seed in (*range(40), last)] for last in (50, 60)]
    [(name, *values)] = setting_differences({}, {}, *requests)
    assert (name, values) == ("seed", ["from request 40 on: 50", "from request 40 on: 60"])


def test_runs_that_part_at_the_first_token_are_not_the_same() -> None:
    requests = [[cp.Request(PROMPTS[0], cp.SamplingParams(temperature=2.0, seed=seed))] for seed in (1, 2)]
    traces = [cp.run(loaded(), of, **SMALL) for of in requests]
    assert traces[0].committed(0)[0] != traces[1].committed(0)[0]
    title = lens_difference(*[trace.hypotheses() for trace in traces]).layout.title.text
    assert "go on with other tokens" in title


def test_counts_are_those_of_the_verdicts() -> None:
    for trace in pair():
        counts = draft_counts(trace.events())
        lines = trace.events().to_dict("records")
        judged = [line for line in lines if line["phase"] == "verify" and len(line["draft_token_ids"])]
        assert counts["draft tokens in verify passes"] == sum(len(line["draft_token_ids"]) for line in judged)
        assert counts["of these accepted"] == sum(line["num_accepted"] for line in judged)
        lost = [line for line in judged if line["num_accepted"] < len(line["draft_token_ids"])]
        assert counts["of these rejected"] == len(lost) > 0
        assert counts["rolled back: these and what followed them"] == sum(
            len(x["draft_token_ids"]) - x["num_accepted"] for x in lost
        )
        assert counts["committed tokens"] == sum(len(trace.committed(i)) for i in range(3))
        for phase in ("prefill", "decode", "verify"):
            assert counts[f"{phase} passes"] == len({line["step"] for line in lines if line["phase"] == phase})


def test_rejected_drafts_are_those_of_the_list() -> None:
    trace = pair()[0]
    for i in range(3):
        own = trace.rejected().query(f"request_id == {i}")
        listed = zip(own.position - len(PROMPTS[i]), own.drafted_token_id, own.step, strict=True)
        found = rejected_by_place(drafts_table(trace.events().query(f"request_id == {i}")))
        assert sorted((at, *one) for at, many in found.items() for one in many) == sorted(listed)


def test_the_difference_is_that_of_the_readings() -> None:
    place = parted(1)
    assert parted(0) is None and place
    for i, last, shift in ((0, None, 0.0), (0, None, 0.25), (1, len(PROMPTS[1]) - 1 + place, 0.25)):
        tables = [trace.hypotheses().query(f"request_id == {i}") for trace in pair()]
        tables[1] = tables[1].assign(committed_logprob_nats=tables[1].committed_logprob_nats + shift)
        figure = lens_difference(*tables, ("<a>", "b"))
        ours, theirs = ({(x.position, x.layer): x for x in table[table.status == "committed"].itertuples()}
                        for table in tables)  # fmt: skip
        positions = sorted({at for at, _ in ours} & {at for at, _ in theirs})
        positions = [at for at in positions if last is None or at <= last]
        grids = [trace.z for trace in figure.data]
        assert grids[0].shape == (loaded().n_layers, len(positions)) and "<a>" not in figure.to_json()
        assert len(grids) == (3 if shift else 2)  # no picture of a difference that is 0 everywhere
        for column, at in enumerate(positions):
            for layer in range(loaded().n_layers):
                a, b = ours[at, layer], theirs[at, layer]
                shown = [float(grid[layer][column]) for grid in grids]
                nats = [a.committed_logprob_nats, b.committed_logprob_nats]
                assert [x for x in shown[:2] if not math.isnan(x)] == [x for x in nats if not pd.isna(x)]
                if not shift:
                    continue
                if at == last or pd.isna(a.committed_token_id):
                    assert math.isnan(shown[2])
                else:
                    assert shown[2] == a.committed_logprob_nats - b.committed_logprob_nats
    with pytest.raises(ValueError, match="no place in common"):
        lens_difference(tables[0], tables[1].iloc[:0])


def test_the_page_shows_settings_first_and_drafts_above_their_place(tmp_path: Path) -> None:
    for name, trace in zip(("one", "other"), pair(), strict=True):
        trace.save(tmp_path / name)
    run_list = RunList.of([tmp_path / "one", tmp_path / "other"])
    for i in range(3):
        said = compare.Comparison(run_list, {"run": 0, "against": 1, "request": i, "theme": "dark"}).draw()
        assert isinstance(said, dict) and [one["props"] for one in said["graphs"]]
        headings = re.findall(r"<h3>(.*?)</h3>", said["html"])
        assert headings[:2] == ["Settings that differ", "What was drafted"]
        num_lost = [len(trace.rejected().query(f"request_id == {i}")) for trace in pair()]
        assert said["html"].count("<del ") == sum(num_lost)
        for line, num in zip(re.findall(r"<tr><th>o.*?</tr>", said["html"]), num_lost, strict=True):
            assert line.count("<del ") == num
    alone = pair()[1].save(tmp_path / "more")
    (same,) = [
        compare.Comparison(RunList.of([tmp_path / "other", alone]), {"run": 0, "against": 1, "request": 1}).draw()
    ]
    assert isinstance(same, dict) and "Both runs have the same settings." in same["html"]
    assert "the same in both" in same["html"]
