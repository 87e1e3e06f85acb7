"""The analyses of the coin's state, of settling and of rollbacks: run small, refused where they must be."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

import cacheprobe as cp
from cacheprobe.analysis.measures import prediction_depth
from cacheprobe.engine.drafters import EarlyExit, NGram
from cacheprobe_analyses.coin import coin_state_probe as coin
from cacheprobe_analyses.drafts import prediction_depths as settles
from cacheprobe_analyses.drafts import rollback_prediction

THINKING = "coinflip-thinking"


def test_the_coin_is_found_where_the_model_has_it() -> None:
    result = coin.run(coin.Config(people=1, prompts=16, least=3))
    frame = result.frame.set_index(["place", "site", "layer"])
    assert result.behaviour["accuracy"] == 1.0 and len(frame) == 2 * 3 * 4
    assert frame.accuracy[(coin.END, "S", 3)] == 1.0 and frame.untrained[(coin.END, "S", 3)] < 1.0
    assert "at the prompt's last token: 16 prompts" in result.table()
    assert len(result.figure().layout.annotations) == 2
    assert json.loads(json.dumps(asdict(result)))["lines"] == result.lines


def test_a_model_at_chance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = cp.probes.untrained(cp.load_model(THINKING))
    monkeypatch.setattr(cp, "load_model", lambda *args, **settings: bare)
    with pytest.raises(cp.probes.ProbeError, match="use a model that does it"):
        coin.run(coin.Config(people=1, prompts=4))


SMALL = rollback_prediction.Config(
    THINKING,
    "float32",
    (EarlyExit(1), NGram(length=4)),
    (4, 4),
    people=1,
    new_tokens=8,
    layers=(0, 1, 3),
    least=4,
    batch=2,
)


def test_drafts_are_run_until_there_are_enough_rollbacks() -> None:
    heard: list[str] = []
    result = rollback_prediction.run(SMALL, heard.append)
    found = {(one["drafter"], one["unit"]): one for one in result.found}
    assert set(found) == {(d, u) for d in ("early_exit", "ngram") for u in rollback_prediction.UNITS}
    assert found["early_exit", "draft"]["rollbacks"] == found["early_exit", "candidate"]["rollbacks"] >= 4
    assert heard[0].startswith("early_exit: 2 prompts") and all(one["reason"] for one in result.found)
    assert json.loads(json.dumps(asdict(result)))["found"] == result.found
    never = rollback_prediction.run(
        replace(SMALL, drafters=(NGram(length=4),), most_prompts=(2,), least=500), heard.append
    )
    assert [one["answer"] for one in never.found] == ["cannot tell"] * 2 and "500 are needed" in never.table()


def test_settling_and_disagreement_agree_with_the_run() -> None:
    config = settles.Config(
        THINKING, "float32", (EarlyExit(0),), prompts=4, people=1, shots=0, new_tokens=8, capacity=128
    )
    result = settles.run(config)
    ends = [line for line in result.final if line["layer"] == 3]
    assert {line["kind"] for line in ends} <= set(settles.KINDS) and ends[0]["rows"] == 4
    assert all(line["share"] == line["settled"] == 1 for line in ends)
    assert all(line["settled"] <= line["share"] for line in result.final)
    by = {line["layer"]: line for line in result.disagreement}
    assert by[0]["share"] == 1.0 and by[3]["share"] == 0.0  # layer 0 drafted it, the last layer rejected it
    assert by[3]["nats"] > 0 > by[0]["nats"] and "| early_exit | 3 |" in result.table()
    assert len(result.figures()) == 2


def test_readings_are_the_runs_own() -> None:
    """Settled for good is `Trace.settling`; the rejected tokens of the control are ranked as `Trace.rejected` does."""
    model, examples = cp.load_model(THINKING), cp.tasks.CoinFlip(people=1).examples(6)
    wrong = cp.drafters.Scripted(lambda state: [5, 6, 7])
    sampling = cp.SamplingParams(max_new_tokens=8, stop_token_ids=())
    trace = cp.run(model, examples, drafter=wrong, window=4, capacity=64, sampling=sampling, progress=False)
    final = settles._final_choices(trace, 0).set_index(["kind", "layer"]).settled
    depth = prediction_depth(cp.analysis.lens_readings(trace, include_rolled_back=True)).query("phase != 'decode'")
    starts = depth.request_id.map({r.request_id: r.num_prompt_tokens - 1 for r in trace.requests})
    kinds = np.where(
        depth.position == starts, "answer", np.where(depth.status == "rolled_back", settles.KINDS[2], "later tokens")
    )
    assert set(kinds) == set(settles.KINDS)
    for (kind, layer), settled in final.items():
        assert settled == pytest.approx((depth.prediction_depth[kinds == kind] <= layer).mean())
    rejected = cp.analysis.rejected_tokens(trace, cp.lenses.LogitLens()).query("layer == 1")
    found = settles._logprobs(trace, rejected.row.tolist(), 1, rejected.rejected_token_id.to_numpy(dtype=int))
    np.testing.assert_allclose(found, rejected.rejected_logprob_nats, atol=1e-5)  # float32 sums


def test_intervals_draw_whole_requests() -> None:
    groups = np.repeat(range(10), 20)
    together, apart = (groups % 2 == 0)[:, None], (np.arange(200) % 2 == 0)[:, None]
    wide, narrow = (settles._interval(holds, groups, 0) for holds in (together, apart))
    assert wide[1] - wide[0] > 0.5 and narrow[1] - narrow[0] == 0
