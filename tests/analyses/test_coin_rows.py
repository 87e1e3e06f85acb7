"""The analysis of cache rows that carry the coin: its changes are what they say, on a model that is quick."""

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe_analyses.coin import coin_rows
from cacheprobe_benchmarks.shared.tiny import tiny_model
from tests.lora import tokenizer


@cache
def model():
    return cp.load_model(tiny_model(), tokenizer())


@cache
def pair() -> tuple[coin_rows.Read, ...]:
    return coin_rows.read_pair(model(), people=2, index=0, seed=1)


@cache
def effects() -> pd.DataFrame:
    heads, tails, other_heads, _ = pair()
    return pd.DataFrame(coin_rows.effects_of(model(), heads, tails, other_heads, seed=1))


def nld(unit: str, where: str, treatment: str) -> list[float]:
    rows = effects()
    return rows[(rows.unit == unit) & (rows["where"] == where) & (rows.treatment == treatment)].nld.tolist()


def test_a_pair_differs_in_the_coin_alone() -> None:
    heads, tails, other_heads, other_tails = pair()
    apart = [a != b for a, b in zip(heads.token_ids, tails.token_ids, strict=True)]
    assert sum(apart) == 1 and heads.question.states == tuple(
        cp.tasks.coin_flip.turned(s) for s in tails.question.states
    )
    assert other_heads.question.states == heads.question.states and other_tails.question.states == tails.question.states
    assert not {n for n, _ in heads.question.events} & {n for n, _ in other_heads.question.events}


def test_every_token_has_its_part() -> None:
    heads = pair()[0]
    texts = [text.strip() for text in model().token_texts(heads.token_ids)]
    parts = coin_rows.parts_of(model(), heads.question)
    named = dict(zip(enumerate(texts), parts, strict=True))
    assert named[texts.index("heads"), "heads"] == ("heads or tails",) * 2
    assert named[0, "A"] == ("before the word",) * 2
    ends = [i for i, (_, row) in enumerate(parts) if row.endswith("words, their end")]
    assert len(ends) == 2 and all(texts[i] in ("flip", "flips") for i in ends)
    assert [span for span, _ in parts][-7:] == ["question"] * 7


def test_the_own_rows_change_nothing_and_all_of_the_others_everything() -> None:
    """The last token is the same in both questions, so with all rows swapped the one is the other."""
    again = effects()[effects().treatment == "own again"]
    assert len(again) > 20 and again.nld.abs().max() < 1e-6 and not again.flip.any()
    assert nld("span", "all rows", "swapped") == pytest.approx([1], abs=1e-5)
    (noise,), (masked,) = nld("span", "all rows", "noise"), nld("span", "all rows", "masked")
    assert abs(noise) > 0.01 and abs(noise - 1) > 0.01 and abs(masked) > 0.01
    before = effects()[(effects()["where"] == "before the word") & effects().treatment.isin(["swapped", "noise"])]
    assert before.nld.abs().max() < 1e-6  # both questions begin alike


def test_noise_is_as_long_as_the_swap() -> None:
    heads, tails, *_ = pair()
    noisy = coin_rows._noisy(heads.rows, tails.rows, seed=3)
    for part in ("keys", "values"):
        for mine, theirs, moved in zip(*(getattr(rows, part) for rows in (heads.rows, tails.rows, noisy)), strict=True):
            torch.testing.assert_close((moved - mine).norm(dim=-1), (theirs - mine).norm(dim=-1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(noisy.values[1][:, 7], tails.rows.values[1][:, 7])


def test_a_model_at_chance_is_refused() -> None:
    config = coin_rows.Config(model="a tiny model", people=(1, 2), texts=3)
    with pytest.raises(ValueError, match=r"a tiny model answers \d+ of 12 questions rightly, no more than chance"):
        coin_rows.measure(model(), config)


def test_questions_count_and_their_effects_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coin_rows.Read, "is_right", property(lambda self: True))
    result = coin_rows.measure(model(), coin_rows.Config(people=(1,), texts=3))
    assert result.right == result.questions == {"1": 6}
    whole = next(e for e in result.effects if (e["where"], e["treatment"]) == ("all rows", "swapped"))
    assert whole["n"] == 6 and whole["nld"] == pytest.approx(1, abs=1e-4)
    assert "span all rows, swapped: nld 1.000" in result.table()
    assert json.loads(json.dumps(asdict(result)))["effects"] == result.effects
    figure = result.figure()
    bars = {bar.name: dict(zip(bar.x, bar.y, strict=True)) for bar in figure.data}
    assert bars["swapped"]["all rows"] == pytest.approx(1, abs=1e-4) and set(bars) == set(coin_rows.TREATMENTS)
    assert "The slot whose swap" in cp.plots.coin_rows_figure(result.frame(), unit="row").layout.title.text
    with pytest.raises(ValueError, match="no effects of unit 'span' and 2 people"):
        cp.plots.coin_rows_figure(result.frame(), people=2)


def test_the_pages_numbers_are_those_that_were_stored() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "analyses-states.md").read_text(encoding="utf-8")
    stored = pd.DataFrame(json.loads((root / "analyses/results/coin-rows.json").read_text())["effects"])
    summed = stored.groupby(["unit", "where", "treatment"])[["n", "total", "flips"]].sum()
    places = {
        "the word heads or tails": ("span", "heads or tails"),
        "where the last person's words end, one row": ("row", "last person's words, their end"),
        "where an earlier person's words end, one row": ("row", "earlier person's words, their end"),
        "the last person's words": ("span", "last person's words"),
        "all earlier people's words": ("span", "earlier person's words"),
        'punctuation and "then" between them': ("span", "between"),
        "the question after them": ("span", "question"),
        "all rows": ("span", "all rows"),
    }
    for name, place in places.items():
        told = [summed.loc[(*place, treatment)] for treatment in ("swapped", "masked", "noise")]
        *cells, noise = [f"{row.total / row.n:.3f}, {int(row.flips)} of {int(row.n)}" for row in told]
        assert noise.partition(", ")[2].startswith("0 of")  # the column says that none flips
        cells.append(noise.partition(", ")[0])
        assert f"| {name} | {' | '.join(cells)} |" in page
    controls = summed.loc[(slice(None), slice(None), ["own again", "other names"]), :]
    assert not controls.flips.any() and (controls.total / controls.n).abs().max() < 0.0055
