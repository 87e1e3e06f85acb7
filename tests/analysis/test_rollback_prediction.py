"""Prediction of rollbacks: the right row of each draft, controls that can win, and what cannot be told."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import cacheprobe as cp
from cacheprobe.lenses.probes.ridge import group_folds
from cacheprobe.lenses.probes.rollback_prediction import _scores, auroc, margins, resampled_auroc
from cacheprobe.trace.state_store import MemoryStore
from tests.tiny import VOCAB, loaded
from tests.twins.probes_slowly import auroc_slowly

RUN = dict(window=4, group=4, capacity=64, max_new_tokens=20, progress=False, capture="S")
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (30, 6)).tolist()


@pytest.fixture(scope="module")
def early() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, drafter=cp.drafters.EarlyExit(layer=1), **RUN)


@pytest.fixture(scope="module")
def ngram() -> cp.Trace:
    prompts = [prompt * 3 for prompt in PROMPTS[:8]]
    return cp.run(loaded(), prompts, drafter=cp.drafters.NGram(length=3), **RUN)


def planted(trace: cp.Trace, signal: float, unit: str = "draft", seed: int = 0) -> cp.Trace:
    """The run with states that are noise, and as much of the outcome as `signal`."""
    about = cp.probes.drafted(trace, unit)
    lost = np.zeros(len(trace.row_table))
    lost[about.row] = about.is_rolled_back
    draw = torch.Generator().manual_seed(seed)
    states = {}
    for layer in range(3):
        vectors = torch.randn(trace.store.all_of("S", layer).shape, generator=draw)
        vectors[:, 0] += signal * torch.tensor(lost[trace.row_table.state_index.argsort()]).float()
        states["S", layer] = vectors
    return replace(trace, store=MemoryStore(states))


def test_auroc_counts_pairs() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        scores, labels = draw.integers(0, 6, 30) / 3, draw.integers(0, 2, 30)
        assert auroc(scores, labels) == pytest.approx(auroc_slowly(scores, labels), rel=1e-12)
    assert np.isnan(auroc(scores, np.ones(30)))


def test_groups_are_drawn_whole() -> None:
    """A score that is the group's own number, within groups of one class each: few distinct draws, wide intervals."""
    groups = np.repeat(range(8), 25)
    labels = groups % 2
    scores = [groups + 0.0, np.random.default_rng(0).normal(size=200) + labels]
    drawn = resampled_auroc(scores, labels, groups, 200, seed=0)
    drawn = drawn[~np.isnan(drawn).any(1)]
    assert drawn[:, 0].std() > 4 * drawn[:, 1].std()
    again = resampled_auroc(scores[:1], labels, np.arange(200), 200, seed=0)
    assert again.std() < drawn[:, 0].std() / 2


@pytest.mark.parametrize("unit", ["draft", "candidate"])
def test_an_early_exits_row_is_the_one_that_proposed(early: cp.Trace, unit: str) -> None:
    table = cp.probes.drafted(early, unit)
    events = early.events().query("phase == 'verify'").set_index(["request_id", "step"])
    rows = early.row_table.set_index("row")
    read = cp.analysis.read_states(
        early, cp.lenses.LogitLens(), layers=[1], rows=early.row_table.query("phase == 'decode'")
    )
    proposed = read.set_index("row").token_id
    assert table.is_rolled_back.nunique() == 2
    for line in table.itertuples():
        event = events.loc[(line.request_id, line.step)]
        draft, row = event.draft_token_ids, rows.loc[line.row]
        assert (row.phase, row.position, row.num_layers) == ("decode", line.position + line.index - 1, 2)
        assert proposed[line.row] == draft[line.index] and row.step < line.step and line.length == len(draft)
        committed = event.target_token_ids[line.index]
        assert line.is_rolled_back == (event.num_rolled_back > 0 if unit == "draft" else draft[line.index] != committed)
    drafts = early.events().draft_token_ids.map(len).gt(0).sum()
    assert len(table) == drafts if unit == "draft" else len(table) > drafts
    assert table.is_rolled_back.sum() == early.events().num_rolled_back.gt(0).sum()


def test_an_ngrams_row_chose_the_newest_token(ngram: cp.Trace) -> None:
    table = cp.probes.drafted(ngram)
    rows = ngram.row_table.set_index("row")
    assert len(table) > 10 and set(rows.phase[table.row]) <= {"prefill", "verify"}
    assert (rows.position[table.row].to_numpy() == table.position - 2).all()
    rows = ngram.row_table[ngram.row_table.row.isin(table.row)]
    read = cp.analysis.read_states(ngram, cp.lenses.LogitLens(), layers=[2], rows=rows)
    said = read.set_index("row").token_id
    for line in table.itertuples():
        text = [*ngram.requests[line.request_id].prompt_token_ids, *ngram.committed(line.request_id)]
        assert said[line.row] == text[line.position - 1] and rows.status[line.row] == "committed"


def test_margins_are_of_the_reading(early: cp.Trace) -> None:
    rows = cp.probes.drafted(early).row[:10].tolist()
    found = margins(early, rows, 1)
    for row in rows:
        best = early.model.read_out(early.vectors("S", 1, [row]))[0].topk(2).values
        assert found[row] == pytest.approx(float(best[0] - best[1]), abs=1e-4)  # float32 sums


def test_what_is_in_the_states_is_seen(early: cp.Trace) -> None:
    found = cp.probes.rollback_prediction(planted(early, 4.0), least=30)
    assert found.answer == "yes" and found.table.auroc.min() > 0.95
    assert found.table.layer.tolist() == [0, 1] and found.table.gain_low.min() > 0
    assert abs(found.table.shuffled.mean() - 0.5) < 0.15  # few drafts were accepted
    assert f"AUROC of {found.table.auroc.iloc[-1]:.3f}" in found.reason
    assert found.rollbacks == cp.probes.drafted(early).is_rolled_back.sum() and found.requests == len(PROMPTS)


def test_what_is_not_in_the_states_is_not_seen(early: cp.Trace) -> None:
    found = cp.probes.rollback_prediction(planted(early, 0.0, "candidate"), unit="candidate", least=30)
    assert found.answer == "no more than the controls" and found.table.low.max() < 0.55


def test_position_can_win(early: cp.Trace) -> None:
    """A request's drafts are rolled back in its first half alone: its states of noise have nothing to add."""
    trace = planted(early, 0.0)
    events = trace.events()
    half = events.draft_start < 6 + 10
    events["num_accepted"] = events.num_accepted.where(
        half | events.num_accepted.isna(), events.draft_token_ids.map(len)
    )
    events.loc[half & (events.num_accepted == events.draft_token_ids.map(len)), "num_accepted"] -= 1
    found = cp.probes.rollback_prediction(replace(trace, event_table=events), least=20)
    assert found.table.position.iloc[-1] > 0.95 and found.answer == "no more than the controls"


def test_too_few_rollbacks_cannot_be_told(early: cp.Trace) -> None:
    found = cp.probes.rollback_prediction(early)
    assert found.answer == "cannot tell" and found.table.empty and found.unit == "draft"
    assert found.reason == f"{found.rollbacks} rollbacks, 500 are needed; run more prompts" and found.drafts > 50
    right = cp.run(loaded(), PROMPTS[:3], drafter=cp.drafters.FastPath(), **RUN)
    assert cp.probes.rollback_prediction(right).rollbacks == 0
    assert "fewer than 5 requests" in cp.probes.rollback_prediction(right, least=0).reason
    events = early.events().assign(num_accepted=early.events().num_accepted.where(lambda n: n.isna(), 0))
    all_lost = cp.probes.rollback_prediction(replace(early, event_table=events), least=20)
    assert all_lost.answer == "cannot tell" and "were rolled back" in all_lost.reason


def test_a_prompt_is_one_group_and_runs_are_joined(early: cp.Trace) -> None:
    trace = planted(early, 1.0)
    once, twice = (cp.probes.rollback_prediction(traces, least=20, layers=[1]) for traces in (trace, [trace, trace]))
    assert twice.requests == once.requests and twice.rollbacks == 2 * once.rollbacks
    width = [float((t.table.high - t.table.low).iloc[0]) for t in (once, twice)]
    assert width[1] > 0.8 * width[0]  # the same prompts again are no new evidence


def test_what_cannot_be_asked_is_refused(early: cp.Trace, ngram: cp.Trace) -> None:
    rollback_prediction, error = cp.probes.rollback_prediction, cp.probes.ProbeError
    with pytest.raises(error, match="one drafter at a time: .*EarlyExit.*NGram"):
        rollback_prediction([early, ngram])
    with pytest.raises(error, match=r"no layer 2 of these drafts; kept, and run by the drafter, were \[0, 1\]"):
        rollback_prediction(early, layers=[2], least=20)
    with pytest.raises(error, match="site 'C' was not kept"):
        rollback_prediction(early, site="C", least=20)
    with pytest.raises(ValueError, match="unknown unit 'token'"):
        rollback_prediction(early, unit="token")
    with pytest.raises(error, match="no draft with a kept state"):
        rollback_prediction(cp.run(loaded(), PROMPTS[:2], **RUN))


def test_what_has_learned_nothing_stays_below_a_half_over_folds_and_at_a_half_within_them() -> None:
    """Random vectors and labels, nine in ten of one class: a score carries the share of its training folds, which is
    high where that of the fold held out is low. So labels in random order are no 0.5 over all folds together."""
    pooled, within = [], []
    for seed in range(6):
        draws = np.random.default_rng(seed)
        labels, groups = (draws.random(560) < 0.9).astype(int), draws.integers(0, 16, 560)
        fold = group_folds(groups, 5, seed)
        (scores,), _ = _scores(torch.from_numpy(draws.standard_normal((1, 560, 32))), labels, fold)
        pooled.append(auroc(scores, labels))
        within += [auroc(scores[fold == f], labels[fold == f]) for f in range(5)]
    assert np.mean(pooled) < 0.48 and abs(np.mean(within) - 0.5) < 0.03
