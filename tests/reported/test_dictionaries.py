"""Dictionaries leave out special tokens and the first position, whose states are hundreds of times as long as others,
in training, reconstruction, features and edits of features; include_special brings them back. The right numbers come
from transformers with hooks, and from the formulas of a topk dictionary in numpy."""

import copy
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.cli.look import show
from cacheprobe.cli.train import dictionary as train_command
from cacheprobe.lenses import Dictionary
from cacheprobe.training.dictionary import train_dictionary
from cacheprobe.training.settings import DictionarySettings
from tests.by_hand import changed, forward, generated
from tests.dictionaries.planted import random_dictionary
from tests.reported.small_tokenizers import llama_like
from tests.tiny import hf_model

BOS, EOS, SPECIAL, LAYER = 1, 2, [0, 1, 2], 1
PROMPTS = [[BOS, *[(5 * i + 7 * j) % 90 + 3 for j in range(9)]] for i in range(12)]
PROMPTS[0][4:4] = [EOS, BOS]  # two conversations, joined
QUICK = dict(window=4, group=2, capacity=64, max_new_tokens=8, progress=False)
DRAFTED = dict(**QUICK, drafter=cp.drafters.EarlyExit(layer=LAYER))
SETTINGS = dict(site="S", layer=LAYER, features=64, k=8, steps=150, batch=64)


def live() -> torch.nn.Module:
    """A model whose start and end tokens enter with states that are far longer than others."""
    model = copy.deepcopy(hf_model())
    with torch.no_grad():
        model.model.embed_tokens.weight[[BOS, EOS]] *= 3000
    return model


@cache
def model() -> object:
    return cp.load_model(live(), tokenizer=llama_like())


@cache
def recorded() -> cp.Trace:
    return cp.run(model(), PROMPTS, capture="S", **DRAFTED)


@cache
def trained(include_special: bool = False) -> Dictionary:
    settings = {**SETTINGS, **({"include_special": True} if include_special else {})}
    return train_dictionary(recorded(), DictionarySettings(**settings), progress=False)


def is_special(rows: pd.DataFrame) -> np.ndarray:
    return ((rows.position == 0) | rows.token_id.isin(SPECIAL)).to_numpy()


def reconstructed(dictionary: Dictionary, states: np.ndarray) -> np.ndarray:
    """What the k largest activations of each state stand for, in float64."""
    enc, dec, b_enc, b_dec = (dictionary.tensors[n].double().numpy() for n in ("W_enc", "W_dec", "b_enc", "b_dec"))
    products = (states - b_dec) @ enc + b_enc
    lowest = np.sort(products, axis=1)[:, [-SETTINGS["k"]]]
    return np.where(products >= lowest, np.maximum(products, 0), 0) @ dec + b_dec


def explained(dictionary: Dictionary, states: np.ndarray) -> float:
    errors = np.square(states - reconstructed(dictionary, states)).sum()
    return 1 - errors / np.square(states - states.mean(0)).sum()


def test_special_states_are_far_longer() -> None:
    rows = recorded().rows()
    norms = recorded().vectors("S", LAYER, rows).norm(dim=-1).numpy()
    assert norms[rows.token_id.isin([BOS, EOS])].min() > 100 * np.median(norms)


def test_training_leaves_them_out_and_says_so() -> None:
    rows = recorded().rows().drop_duplicates("state_index")
    about = trained().config.about
    assert about["num_states"] == (~is_special(rows)).sum()
    assert about["num_left_out"] == is_special(rows).sum() > 12
    assert about["training"]["include_special"] is False
    ordinary = recorded().vectors("S", LAYER, rows[~is_special(rows)]).double().numpy()
    assert explained(trained(), ordinary) > 0.4
    assert about["variance_explained"] == pytest.approx(explained(trained(), ordinary), abs=0.25)  # held-out states


def test_one_option_trains_on_them() -> None:
    """Their variance is nearly all there is, so the share that is explained says nothing of ordinary states."""
    rows = recorded().rows().drop_duplicates("state_index")
    about, ordinary = trained(True).config.about, recorded().vectors("S", LAYER, rows[~is_special(rows)])
    assert about["num_states"] == len(rows) and about["num_left_out"] == 0
    ours, theirs = (explained(one, ordinary.double().numpy()) for one in (trained(True), trained()))
    assert ours < theirs and ours < about["variance_explained"] - 0.3


def test_the_command_has_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded().save(tmp_path / "run")
    few = {**SETTINGS, "steps": 2}
    train_command(run, out=tmp_path / "a", progress=False, **few)
    assert "of special tokens and first positions" in capsys.readouterr().out
    train_command(run, out=tmp_path / "b", progress=False, include_special=True, **few)
    numbers = [Dictionary.load(tmp_path / name).config.about["num_states"] for name in "ab"]
    assert numbers == [(trained().config.about["num_states"]), trained(True).config.about["num_states"]]


@pytest.mark.parametrize("include_special", [False, True])
def test_reconstruction_replaces_ordinary_states_alone(include_special: bool) -> None:
    trace, mine, plain = recorded(), trained(), live()
    option = {"include_special": True} if include_special else {}
    table = cp.analysis.reconstruction(trace, mine, **option)
    for request_id in (0, 5):
        text = [*PROMPTS[request_id], *trace.committed(request_id)]
        fed = pd.DataFrame({"position": range(len(text) - 1), "token_id": text[:-1]})
        is_read = np.ones(len(fed), bool) if include_special else ~is_special(fed)
        seen = forward(plain, text[:-1])[1][LAYER].double().numpy()
        whole = reconstructed(mine, seen)

        def replace(states: Tensor, is_read=is_read, whole=whole) -> None:
            states[0, is_read] = torch.from_numpy(whole[is_read]).float()

        with changed(plain.model.layers[LAYER], replace):
            nats = forward(plain, text[:-1])[0].double().log_softmax(-1)
        own = table[table.request_id == request_id]
        n = len(PROMPTS[request_id])
        places = [at for at in range(n - 1, len(text) - 1) if is_read[at]]
        assert own.position.tolist() == places
        wanted = [float(nats[at, text[at + 1]]) for at in places]
        assert own.reconstructed_logprob_nats.tolist() == pytest.approx(wanted, abs=1e-3)
        assert own.token_id.tolist() == [text[at + 1] for at in places]
        logprobs = trace.logprobs(request_id)
        assert own.logprob_nats.tolist() == pytest.approx([logprobs[at - n + 1] for at in places], abs=1e-4)
        apart, errors = np.square(seen - seen[is_read].mean(0)).sum(1), np.square(seen - whole).sum(1)
        assert own.squared_distance.tolist() == pytest.approx(apart[places].tolist(), rel=1e-3)
        assert own.squared_error.tolist() == pytest.approx(errors[places].tolist(), rel=1e-3)
    assert (table.change_nats == table.reconstructed_logprob_nats - table.logprob_nats).all()


def test_features_leave_them_out(tmp_path: Path) -> None:
    trace, mine = recorded(), random_dictionary("standard")
    rows = trace.rows()
    left = trace.features(mine, top=4)
    assert set(left.row) == set(rows.row[~is_special(rows)])
    assert set(trace.features(mine, top=4, include_special=True).row) == set(rows.row)
    assert set(trace.features(mine, rows=trace.rows(0)).row) == set(
        rows.row[(rows.request_id == 0) & ~is_special(rows)]
    )
    again = cp.load_trace(trace.save(tmp_path / "run"))  # without the model, and so without a tokenizer
    assert again.features(mine, top=4).equals(left)
    assert again.meta["special_token_ids"] == SPECIAL
    assert again.is_special(again.rows()).tolist() == is_special(rows).tolist()
    with pytest.raises(ValueError, match="no row has states .* not of a first or special token; see include_special="):
        trace.features(mine, rows=rows[rows.position == 0])


def test_recorded_features_leave_them_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = random_dictionary("standard")
    stored = recorded().features(mine)
    trace = cp.run(model(), PROMPTS, capture=None, dictionary=mine, out=tmp_path / "run", **DRAFTED)
    assert trace.features().equals(stored)
    assert "features without first and special tokens" in repr(trace)
    assert trace.meta["capture"]["include_special"] is False
    show(tmp_path / "run")
    assert "without first and special tokens" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"CaptureConfig\(dictionary=..., include_special=True\)"):
        trace.features(include_special=True)
    capture = cp.CaptureConfig(None, dictionary=mine, include_special=True)
    whole = cp.run(model(), PROMPTS, capture=capture, **DRAFTED)
    assert whole.features(include_special=True).equals(recorded().features(mine, include_special=True))
    assert whole.features().equals(stored)


def test_exported_features_leave_them_out() -> None:
    mine = random_dictionary("standard")
    (one,) = cp.analysis.to_neuronpedia(recorded(), mine, [7], most_texts=99)
    (whole,) = cp.analysis.to_neuronpedia(recorded(), mine, [7], most_texts=99, include_special=True)
    rows = recorded().rows(status="committed")
    states = recorded().vectors("S", LAYER, rows)
    values = (states - mine.tensors["b_dec"]) @ mine.tensors["W_enc"][:, 7] + mine.tensors["b_enc"][7]
    for found, is_read in ((one, ~is_special(rows)), (whole, np.ones(len(rows), bool))):
        assert found["frac_nonzero"] == pytest.approx(float((values[is_read] > 0).double().mean()))
        assert found["maxActApprox"] == pytest.approx(float(values[is_read].max()), rel=1e-4)


@pytest.mark.parametrize(("kind", "include_special"), [("ablate", False), ("steer", True)])
def test_edits_of_features_leave_them_out(kind: str, include_special: bool) -> None:
    mine, prompt, option = (
        random_dictionary("standard"),
        PROMPTS[0],
        {"include_special": True} if include_special else {},
    )
    weights = {name: tensor.double() for name, tensor in mine.tensors.items()}
    if kind == "steer":
        change = cp.interventions.steer_feature(mine, 7, 4.0, request_id=0, **option)
    else:
        change = cp.interventions.ablate_feature(mine, 7, request_id=0, **option)
    trace = cp.run(model(), [prompt], interventions=change, capture="S", **DRAFTED)
    text, plain = [*prompt, *trace.committed(0)], live()

    def edit(states: Tensor) -> None:
        for at, state in enumerate(states[0].double()):
            if include_special or not (at == 0 or text[at] in SPECIAL):
                size = ((state - weights["b_dec"]) @ weights["W_enc"][:, 7] + weights["b_enc"][7]).relu()
                states[0, at] += ((4.0 if kind == "steer" else -size) * weights["W_dec"][7]).float()

    with changed(plain.model.layers[LAYER], edit):
        assert trace.committed(0) == generated(plain, prompt, QUICK["max_new_tokens"])
        theirs = forward(plain, text[:-1])[1][LAYER]
    ours = trace.states("S", LAYER, 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)  # sums of numbers that differ 300-fold
    fed = pd.DataFrame({"position": range(len(text) - 1), "token_id": text[:-1]})
    wanted = len(fed) if include_special else (~is_special(fed)).sum()
    assert trace.edits().committed.tolist() == [wanted]


def test_an_edit_of_the_first_position_names_the_option() -> None:
    change = cp.interventions.steer_feature(random_dictionary(), 7, 4.0, request_id=0, positions=0)
    with pytest.warns(RuntimeWarning, match="first and special tokens are left out: use include_special=True"):
        trace = cp.run(model(), PROMPTS[:1], interventions=change, **DRAFTED)
    assert [*map(list, trace.edits().missed)] == [[0]]


def test_without_a_tokenizer_the_first_position_is_left_out() -> None:
    trace = cp.run(cp.load_model(live()), PROMPTS[:1], capture="S", **QUICK)
    rows = trace.rows()
    features = trace.features(random_dictionary("standard"))
    assert set(features.row) == set(rows.row[rows.position > 0]) and trace.meta["special_token_ids"] == []
