"""Attention drift of draft heads: planted drift is found and planted noise is not; shares, KL and lens by hand."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import cacheprobe as cp
from cacheprobe.lenses.probes.ridge import group_folds
from cacheprobe.ops.equality import close
from cacheprobe_analyses.findings import attention_drift, future_lens
from cacheprobe_analyses.findings.attention_drift import DRIFT, KNOWN, STEPS, AttentionDrift, drift, told_apart
from cacheprobe_analyses.findings.draft_heads import drafted_traces
from cacheprobe_analyses.findings.draft_records import JUDGED, SHARES, draft_rows
from cacheprobe_analyses.findings.future_lens import PENALTY, future_states, lens_ranks


@cache
def trace() -> cp.Trace:
    """A run of a tiny model with a tiny head."""
    return next(drafted_traces(AttentionDrift.presets["tiny"], 0, STEPS))


@cache
def drafts() -> pd.DataFrame:
    return draft_rows(trace())


def planted(weight: float, seed: int = 0) -> pd.DataFrame:
    """Drafts of 60 prompts that are accepted by margin, and by the weight on own rows, times `weight`."""
    draw, number = np.random.default_rng(seed), 1600
    columns = {name: draw.normal(size=number) for name in [*KNOWN, *DRIFT, "sink_0", "own_0"]}
    table = pd.DataFrame(columns).assign(kl=draw.exponential(size=number), group=draw.integers(0, 60, number))
    odds = 1.5 * table.margin + weight * table.own
    is_accepted = draw.random(number) < 1 / (1 + np.exp(-odds))
    verdict = np.where(is_accepted, "accepted", "rejected")
    return table.assign(verdict=verdict, chain_step=draw.integers(1, STEPS + 1, number), own_0=table.own)


def test_planted_drift_is_a_gain_and_its_control_is_none() -> None:
    """Beyond the margin, at every step, by means and by attention head."""
    told = told_apart(planted(1.5), 0)
    for k in range(1, STEPS + 1):
        assert told[f"gain_low_{k}"] > 0.02 < told[f"gain_{k}"] and told[f"gain_heads_{k}"] > 0.02
        assert told[f"gain_kl_{k}"] > 0.02 < told[f"drift_{k}"] - 0.5 and told[f"both_{k}"] > told[f"known_{k}"]
        assert told[f"accepted_{k}"] + told[f"rejected_{k}"] == (planted(1.5).chain_step == k).sum()


def test_planted_noise_is_no_gain(monkeypatch) -> None:
    """Most 95 % intervals hold 0, and their mean is 0: what useless columns cost is in the control too."""
    monkeypatch.setattr(attention_drift, "RESAMPLES", 100)
    told = [told_apart(planted(0.0, seed), seed) for seed in range(5)]
    steps = [(one, k) for one in told for k in range(1, STEPS + 1)]
    assert sum(one[f"gain_low_{k}"] < 0 < one[f"gain_high_{k}"] for one, k in steps) >= 17
    assert abs(np.mean([one[f"gain_{k}"] for one, k in steps])) < 0.003
    assert abs(np.mean([one[f"drift_{k}"] for one, k in steps]) - 0.5) < 0.05
    assert all(one[f"known_{k}"] > 0.7 for one, k in steps)


def test_a_bend_of_the_margin_is_no_gain() -> None:
    """Drafts are accepted by the square of the margin, and drift is that square: products of what is known hold it."""
    table = planted(0.0)
    is_accepted = np.random.default_rng(1).random(len(table)) < 1 / (1 + np.exp(2 - 2 * table.margin**2))
    bent = table.assign(own=table.margin**2, verdict=np.where(is_accepted, "accepted", "rejected"))
    assert all(abs(told_apart(bent, 0)[f"gain_{k}"]) < 0.02 for k in range(1, STEPS + 1))


def test_unverified_drafts_do_not_count_and_few_are_not_judged() -> None:
    table = planted(1.5)
    more = pd.concat([table, table.assign(verdict="unverified", own=100.0)], ignore_index=True)
    assert told_apart(more, 0) == told_apart(table, 0)
    few = table[(table.chain_step > 1) | (table.verdict == "accepted")]
    assert np.isnan(told_apart(few, 0)["gain_1"]) and told_apart(few, 0)["rejected_1"] == 0


def test_held_out_logits_are_scikit_learns() -> None:
    table = planted(1.0)
    features, labels = table[[*KNOWN, *DRIFT]].to_numpy(), (table.verdict == "accepted").to_numpy(int)
    folds = group_folds(table.group, 5, 0)
    own = attention_drift.held_out_logits(features, labels, folds)
    for fold in range(5):
        rest = folds != fold
        mean, scale = features[rest].mean(0), features[rest].std(0)
        fitted = LogisticRegression(tol=1e-8).fit((features[rest] - mean) / scale, labels[rest])
        wanted = fitted.decision_function((features[~rest] - mean) / scale)
        assert close(torch.tensor(own[~rest]), torch.tensor(wanted), rtol=1e-4, because="two solvers")


def test_shares_are_those_of_one_chain_by_hand() -> None:
    """Twin: each weight of each row goes to the part that the head's own table of rows names."""
    head = trace().head
    whole = drafts()[drafts().chain_step == STEPS].iloc[3]
    chain = drafts()[(drafts().request_id == whole.request_id) & (drafts().row <= whole.row)].tail(STEPS)
    assert chain.chain_step.tolist() == [1, 2, 3, 4]
    rows = head.rows().set_index("row").loc[chain.row]
    step, prompt = rows.step.iloc[0], trace().requests[whole.request_id].num_prompt_tokens
    for line, row in zip(chain.itertuples(), rows.itertuples(), strict=True):
        slow = dict.fromkeys(SHARES, 0.0)
        own = head.rows()[(head.rows().request_id == whole.request_id) & (head.rows().step == step)]
        made_by_head = set(own[own.chain_step > 1].position)  # the first row of a chain is of a committed token
        (pattern,) = head.pattern_rows(0, [line.row])
        assert row.step == step and pattern.shape[1] == row.position + 1 and float(pattern[:, 0].sum()) == 0
        for position in range(1, row.position + 1):
            is_prompt = "sink" if position == 1 else "prompt" if position < prompt else "generated"
            part = "own" if position in made_by_head else is_prompt
            slow[part] += float(pattern[:, position].mean())
        assert close(torch.tensor([getattr(line, name) for name in SHARES]), torch.tensor([*slow.values()]), rtol=1e-5,
                     because="sums in another order")  # fmt: skip
        assert abs(sum(slow.values()) - 1) < 1e-5
    newest = head.pattern_rows(0, [chain.row.iloc[0]])[0][:, -3:].sum(1).mean()
    assert abs(chain.newest_3.iloc[0] - float(newest)) < 1e-6 and chain.newest_3.iloc[1:].isna().all()


def test_drift_is_of_whole_chains() -> None:
    """By hand, from the rows of drafts that reached the last step."""
    values, lines = drift(drafts())
    table = drafts().assign(start=drafts().position - drafts().chain_step)
    whole = [own for _, own in table.groupby(["request_id", "start"]) if len(own) == STEPS]
    for k in (1, STEPS):
        by_hand = np.mean([own.norm[own.chain_step == k].item() for own in whole])
        assert values[f"norm_{k}"] == pytest.approx(by_hand) == lines[k - 1]["norm"]
    newest = np.mean([own.newest_3.dropna().item() for own in whole])
    own = values[f"own_{STEPS}"]
    assert values["own_excess"] == pytest.approx(own - newest) and values["own_1"] == 0
    assert values["own_grows"] == own - values["own_2"] and values["sink_falls"] == values["sink_1"] - values["sink_4"]
    judged = drafts()[drafts().verdict.isin(JUDGED)]
    assert values["accepted"] == (judged.verdict == "accepted").mean() and len(whole) > 20


def test_readings_are_of_the_heads_and_the_models_own_logits() -> None:
    """Twin: transformers' logits over the whole committed text, and the head's logits at its row."""
    head, judged = trace().head, drafts()[drafts().verdict.isin(JUDGED)]
    for line in judged.iloc[:: len(judged) // 12].itertuples():
        text = [*trace().requests[line.request_id].prompt_token_ids, *trace().committed(line.request_id)]
        with torch.no_grad():
            target = trace().model.live(torch.tensor([text])).logits[0, line.position].log_softmax(-1)
        own = head.model.read_out(head.vectors("S", 0, [line.row]))[0].log_softmax(-1)
        kl = float(sum(p.exp() * (p - q) for p, q in zip(own, target, strict=True) if p.isfinite()))
        order = own.argsort(descending=True)
        token = text[line.position + 1]
        assert line.kl == pytest.approx(kl, rel=1e-3, abs=1e-5) and line.token_id == token == int(target.argmax())
        assert line.margin == pytest.approx(float(own[order[0]] - own[order[1]]), abs=1e-5)
        assert line.rank == int((order == token).nonzero()) and (line.rank == 0) == (line.verdict == "accepted")


def test_the_future_lens_is_ridge_regression() -> None:
    """Twin: least squares with the penalty as further rows, on features that are scaled by hand."""
    draw = torch.Generator().manual_seed(0)
    states, read = torch.randn(200, 12, generator=draw), torch.randn(9, 12, generator=draw)
    later = states @ torch.randn(12, 6, generator=draw) + torch.randn(200, 6, generator=draw)
    mean, scale = states.mean(0), states.std(0, correction=0)
    rows = torch.cat([(states - mean) / scale, (PENALTY * 12) ** 0.5 * torch.eye(12)])
    wanted = torch.cat([later - later.mean(0), torch.zeros(12, 6)])
    slow = (read - mean) / scale @ torch.linalg.lstsq(rows, wanted).solution + later.mean(0)
    assert close(future_states(states, later, read), slow, rtol=1e-3, because="another solver")


def oracle(run: cp.Trace, request_ids: pd.Index) -> tuple[dict, dict]:
    """States that hold the model's next states, side by side, as a planted future."""
    _, final = texts(run, request_ids)
    zeros = {i: own.new_zeros(STEPS, own.shape[1]) for i, own in final.items()}
    padded = {i: torch.cat([own, zeros[i]]) for i, own in final.items()}
    ahead = [{i: own[k : len(own) - STEPS + k] for i, own in padded.items()} for k in range(1, STEPS + 1)]
    return {i: torch.cat([one[i] for one in ahead], dim=1) for i in final}, final


texts = future_lens._texts


def test_a_planted_future_is_read_and_its_control_is_not(monkeypatch) -> None:
    """Where the given states hold the later ones, the committed token is first; where they are noise, it is not."""
    judged = drafts()[drafts().verdict.isin(JUDGED)]
    monkeypatch.setattr(future_lens, "_texts", oracle)
    monkeypatch.setattr(future_lens, "PENALTY", 1e-3)
    found = lens_ranks(trace(), judged, STEPS, 3, 0)
    assert (found.given == 0).mean() > 0.95 and (found.shuffled == 0).mean() < 0.5
    draw = torch.Generator().manual_seed(1)
    held, _ = oracle(trace(), judged.request_id.unique())
    noise = {i: torch.randn(own.shape, generator=draw) for i, own in held.items()}
    monkeypatch.setattr(future_lens, "_texts", lambda run, ids: (noise, texts(run, ids)[1]))
    assert (lens_ranks(trace(), judged, STEPS, 3, 0).given == 0).mean() < 0.5


def test_frequent_tokens_are_counted_in_other_texts_only() -> None:
    """By hand, for the drafts of one fold."""
    judged = drafts()[drafts().verdict.isin(JUDGED)]
    found = lens_ranks(trace(), judged, STEPS, 3, 0)
    groups = judged[["request_id", "group"]].drop_duplicates()
    fold_of = dict(zip(groups.request_id, group_folds(groups.group, 3, 0), strict=True))
    for line in judged.iloc[::20].itertuples():
        others = [t for i in fold_of if fold_of[i] != fold_of[line.request_id] for t in trace().committed(i)]
        more = [token for token in set(others) if others.count(token) > others.count(int(line.token_id))]
        assert found.frequency[line.Index] == len(more)
