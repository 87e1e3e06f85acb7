"""Measures of readings by layer: each against a slow twin, on a run with rollbacks, and on tables made by hand."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.analysis import measures
from cacheprobe.core.config import CaptureConfig
from tests.tiny import PROMPTS, SMALL, loaded
from tests.twins.measures_slowly import (
    by_layer_slowly,
    commitment_slowly,
    divergences_slowly,
    draft_agreement_slowly,
    rejected_tokens_slowly,
    saturation_slowly,
)


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS[:3], **SMALL, drafter=cp.drafters.EarlyExit(layer=1))


def none(value: object) -> object:
    return None if value is pd.NA or (isinstance(value, float) and math.isnan(value)) else value


def test_by_layer(trace: cp.Trace) -> None:
    readings = cp.analysis.lens_readings(trace, include_rolled_back=True)
    table, slowly = measures.by_layer(readings), by_layer_slowly(readings)
    assert {"committed", "superseded", "rolled_back"} <= set(table.status) and len(table) == len(slowly)
    for line in table.itertuples():
        mine = (line.rows, line.rank_median, line.logprob_nats_mean, line.agrees_mean, line.entropy_nats_mean)
        assert mine == pytest.approx(slowly[line.layer, line.status], rel=1e-6)  # float32 columns, summed in two orders


@pytest.mark.parametrize("margin", [0.05, 0.4])
def test_commitment(trace: cp.Trace, margin: float) -> None:
    table = cp.analysis.commitment(trace, margin)
    mine = {
        r.row: (none(r.commitment_layer), none(r.commitment_token_id), none(r.stays), none(r.agrees))
        for r in table.itertuples()
    }
    assert mine == commitment_slowly(cp.analysis.lens_readings(trace), margin)
    assert table.commitment_layer.notna().any()


@pytest.mark.parametrize("top", [1, 5])
def test_saturation(trace: cp.Trace, top: int) -> None:
    table = cp.analysis.saturation(trace, top)
    columns = [f"saturation_layer_{k + 1}" for k in range(top)]
    mine = {line["row"]: (*(line[c] for c in columns), line["is_in_order"]) for line in table.to_dict("records")}
    assert mine == saturation_slowly(cp.analysis.lens_readings(trace), top)
    settled = cp.analysis.prediction_depth(trace).set_index("row").prediction_depth
    assert table.set_index("row").saturation_layer_1.to_dict() == settled.to_dict()
    if top > 1:
        assert not table.is_in_order.all() and table.is_in_order.any()


@pytest.mark.parametrize("window", [2, 9])
def test_draft_agreement(trace: cp.Trace, window: int) -> None:
    table = cp.analysis.draft_agreement(trace, window)
    mine = {line.layer: (line.passes, line.drafted, line.accepted) for line in table.itertuples()}
    assert mine == draft_agreement_slowly(cp.analysis.lens_readings(trace), window)
    assert table.acceptance.iloc[-1] == 1  # the last layer drafts what is committed
    assert table.tokens_per_pass.iloc[-1] <= window


def test_draft_agreement_foretells_the_drafter(trace: cp.Trace) -> None:
    """Passes, and accepted tokens, of a run that this layer drafts: its own run, and one that another layer drafted."""
    capture = CaptureConfig(prompt_hypotheses=True)
    lower = cp.run(loaded(), PROMPTS[:3], **SMALL, drafter=cp.drafters.EarlyExit(layer=0), capture=capture)
    foretold = cp.analysis.draft_agreement(trace, 4).set_index("layer")
    for layer, run in ((0, lower), (1, trace)):
        verify = run.events().query("phase == 'verify'")
        assert (len(verify), verify.num_accepted.sum()) == tuple(foretold.loc[layer, ["passes", "accepted"]])
    assert foretold.accepted[0] != foretold.accepted[1] and foretold.accepted[1] > 0
    pd.testing.assert_frame_equal(cp.analysis.draft_agreement(lower, 4), cp.analysis.draft_agreement(trace, 4))


def test_divergences(trace: cp.Trace) -> None:
    table = cp.analysis.divergences(trace, cp.lenses.LogitLens())
    assert set(table.status) == {"committed", "superseded"}
    model, counted = loaded(), 0
    for row, mine in list(table.groupby("row"))[::5]:
        logits = [model.read_out(trace.vectors("S", layer, [row]))[0].double().tolist() for layer in mine.layer]
        for line, slow in zip(mine.itertuples(), divergences_slowly(logits), strict=True):
            assert line.entropy_nats == pytest.approx(slow[0], abs=1e-4)  # float32 sums
            if len(logits) < 3:
                assert math.isnan(line.kl_output_nats)
            else:
                assert line.kl_output_nats == pytest.approx(slow[1], abs=1e-4)
            assert none(line.js_next_nats) == (None if slow[2] is None else pytest.approx(slow[2], abs=1e-4))
            counted += 1
    assert counted > 30 and (table.js_next_nats.dropna() <= math.log(2) + 1e-5).all()
    few = cp.analysis.divergences(trace, cp.lenses.LogitLens(), layers=[0])
    assert set(few.layer) == {0} and few.js_next_nats.isna().all()
    whole = table[table.layer == 0].reset_index(drop=True)
    assert np.allclose(few.kl_output_nats, whole.kl_output_nats, atol=1e-4, equal_nan=True)  # products of other heights


def test_rejected_tokens(trace: cp.Trace) -> None:
    table = cp.analysis.rejected_tokens(trace, cp.lenses.LogitLens())
    slowly = rejected_tokens_slowly(trace)
    assert len(table) == len(slowly) > 0
    for line in table.itertuples():
        token, rank, logprob = slowly[line.request_id, line.step, line.layer]
        assert (line.rejected_token_id, line.rejected_rank) == (token, rank)
        assert line.rejected_logprob_nats == pytest.approx(logprob, abs=1e-4)  # float32 sums
    last = table[table.layer == 2]
    assert (last["rank"] == 0).all() and (last.rejected_rank > 0).all()
    drafter = table[table.layer == 1]
    assert (drafter.rejected_rank == 0).all() and (drafter["rank"] > 0).all()


def test_what_cannot_be_measured_is_refused(trace: cp.Trace) -> None:
    table = cp.analysis.lens_readings(trace)
    with pytest.raises(ValueError, match="hold 5 choices, 6 are needed"):
        measures.saturation(table, top=6)
    with pytest.raises(ValueError, match="from 0 to 1, got 2"):
        measures.commitment(table, margin=2)
    with pytest.raises(ValueError, match="verifies no draft"):
        measures.draft_agreement(table, window=1)
    with pytest.raises(ValueError, match="one lens and one site"):
        measures.by_layer(pd.concat([table, cp.analysis.read_states(trace, cp.lenses.LogitLens(), "T")]))
    with pytest.raises(ValueError, match="there are no hypotheses"):
        measures.saturation(table.iloc[:0])
    alone = cp.run(loaded(), PROMPTS[:1], **SMALL)
    with pytest.raises(ValueError, match="no draft of this run was rejected"):
        cp.analysis.rejected_tokens(alone, cp.lenses.LogitLens())
    assert torch.is_tensor(alone.states("S", 0, 0))
