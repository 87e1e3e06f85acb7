"""Probes: equal to scikit-learn's, blind where there is nothing, split by prompt, and beside their baselines."""

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

import cacheprobe as cp
from cacheprobe.lenses.probes.examples import embeddings
from cacheprobe.lenses.probes.ridge import (
    STRENGTHS,
    control_labels,
    effective_number,
    group_folds,
    held_out_scores,
    joined_groups,
)
from cacheprobe.ops.statistics import wilson
from cacheprobe.tasks import CoinFlip
from cacheprobe.tasks.base import Accuracy
from tests.tiny import loaded
from tests.twins.probes_slowly import accuracy_slowly, held_out_slowly

RUN = dict(capture="STC", max_new_tokens=4, capacity=64, progress=False)


def drawn(n: int, m: int, strength: float = 1.0, seed: int = 0, k: int = 2) -> tuple[torch.Tensor, np.ndarray]:
    """States [n, m] that lean to one of k directions, and which."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, k, n)
    return torch.tensor(draw.normal(size=(n, m)) + strength * draw.normal(size=(k, m))[labels]).float(), labels


@pytest.fixture(scope="module")
def model() -> cp.Trace:
    return cp.load_model("coinflip-thinking")


@pytest.fixture(scope="module")
def trace(model) -> cp.Trace:
    return cp.run(model, CoinFlip(people=2).examples(n=40), **RUN)


@pytest.mark.parametrize("shape", [(40, 12), (30, 50)], ids=["fewer features", "fewer examples"])
def test_scores_are_scikit_learns(shape: tuple[int, int]) -> None:
    """Three layers and two sets of labels at once, against one at a time; a feature that never varies among them."""
    n, m = shape
    layers = [drawn(n, m, strength, seed=layer)[0] for layer, strength in enumerate((0.0, 0.3, 2.0))]
    layers[1][:, 3] = 5.0
    one, other = np.eye(2)[drawn(n, m)[1]], np.eye(3)[drawn(n, m, seed=9, k=3)[1]]
    folds = group_folds(np.arange(n) // 2, 5, seed=1)
    targets = torch.tensor(np.concatenate([one, other], 1))
    found = held_out_scores(torch.stack(layers), targets, torch.tensor(folds), [2, 3])
    for layer, states in enumerate(layers):
        slowly = [held_out_slowly(states.double().numpy(), t, folds, list(STRENGTHS)) for t in (one, other)]
        # products of float64 in another order
        np.testing.assert_allclose(found.scores[layer].numpy(), np.concatenate(slowly, 1), rtol=1e-6, atol=1e-8)
    assert found.strengths.unique().numel() > 1


def test_accuracies_are_scikit_learns() -> None:
    states, labels = drawn(90, 20, 0.4, k=3)
    result = cp.probes.fit({("S", 2): states}, labels, np.arange(90) // 2, least=5)
    slowly = accuracy_slowly(states.numpy(), labels, group_folds(np.arange(90) // 2, 5), list(STRENGTHS))
    line = result.table.iloc[0]
    assert line.accuracy == slowly and 0.4 < line.accuracy < 0.95
    assert (line.examples, line.groups, line.classes) == (90, 45, 3)
    assert (line.low, line.high) == pytest.approx(wilson(slowly, 45), abs=1e-12)
    alone = cp.probes.fit({("S", 2): states}, labels, range(90), least=5).table.iloc[0]  # each in a group of its own
    slowly = accuracy_slowly(states.numpy(), labels, group_folds(range(90), 5), list(STRENGTHS))
    scipys = binomtest(round(90 * slowly), 90).proportion_ci(0.95, method="wilson")
    assert alone.accuracy == slowly
    assert (alone.low, alone.high) == pytest.approx((scipys.low, scipys.high), abs=1e-12)
    assert line[["control", "selectivity", "untrained", "embedding"]].isna().all()


def test_a_probe_finds_what_is_there_and_nothing_else() -> None:
    states, labels = drawn(200, 30, 2.0)
    noise = torch.randn(40, 200, 30, generator=torch.Generator().manual_seed(0))
    table = cp.probes.fit({("S", 0): states, **{("T", i): n for i, n in enumerate(noise)}}, labels, range(200)).table
    assert table.accuracy[0] > 0.95 and table.is_above[0]
    blind = table[table.site == "T"]
    assert (
        blind.accuracy.mean() < blind.majority.iloc[0] + 0.01 and blind.is_above.sum() <= 3
    )  # one in forty is expected


def test_what_stands_in_one_group_is_never_split() -> None:
    """Each group repeats one random vector under one random label: split by examples, it is remembered."""
    draw = np.random.default_rng(0)
    vectors, labels = draw.normal(size=(60, 80)), draw.integers(0, 2, 60)
    states = {("S", 0): torch.tensor(np.repeat(vectors, 4, 0)).float()}
    split = cp.probes.fit(states, np.repeat(labels, 4), range(240)).table.iloc[0]
    together = cp.probes.fit(states, np.repeat(labels, 4), np.repeat(range(60), 4)).table.iloc[0]
    assert split.accuracy == 1.0 and together.low < 0.5 < together.high
    assert together.high - together.low > 0.2  # of 60 prompts; of 240 examples it would be half of that


def test_folds_hold_whole_groups_evenly() -> None:
    groups = np.array([0] * 7 + [1] * 5 + [2, 3, 4, 5, 6, 7, 8, 9])
    folds = group_folds(groups, 4, seed=3)
    assert all(len(set(folds[groups == g])) == 1 for g in set(groups))
    assert sorted(np.bincount(folds)) == [4, 4, 5, 7]
    assert not np.array_equal(folds, group_folds(groups, 4, seed=4))
    with pytest.raises(ValueError, match="2 groups cannot be split into 4 folds"):
        group_folds([1, 1, 2], 4)


def test_groups_join_prompts_that_begin_alike() -> None:
    members, shared = "aabbccdd", [1, 2, 3, 2, 4, 5, 6, 4]
    assert joined_groups(members, shared).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert effective_number([0] * 4 + [1] * 4) == 2 and effective_number([0, 0, 0, 1]) == pytest.approx(1.6)


@pytest.mark.parametrize(("right", "number"), [(0, 40), (3, 40), (20, 40), (40, 40), (1, 1), (517, 1000)])
def test_wilson_is_scipys(right: int, number: int) -> None:
    """The interval of probes and of tasks is one function."""
    scipys = binomtest(right, number).proportion_ci(0.95, method="wilson")
    assert wilson(right / number, number) == pytest.approx((scipys.low, scipys.high), abs=1e-12)
    assert Accuracy(number, right, 0, 0.5).interval == wilson(right / number, number)


def test_control_tasks_give_a_word_one_label() -> None:
    words = ["a", "b", "a", "c"] * 30
    drawn_labels = control_labels(words, np.array([0, 1, 1, 1] * 30), 400, seed=0)
    for word in "abc":
        mine = drawn_labels[:, [w == word for w in words]]
        assert (mine == mine[:, :1]).all() and 0.65 < mine.mean() < 0.85  # three of four labels are 1


def test_selectivity_is_low_where_a_probe_remembers_words() -> None:
    """States that are nothing but the word: the control task is learnt, the labels are not."""
    draw = np.random.default_rng(0)
    words = draw.integers(0, 8, 300)
    states = torch.tensor(draw.normal(size=(8, 30))[words]).float()
    line = cp.probes.fit({("S", 0): states}, draw.integers(0, 2, 300), range(300), words=words).table.iloc[0]
    assert line.control > 0.9 and line.selectivity < -0.3


def test_places_are_the_tokens_that_complete_the_words(trace: cp.Trace) -> None:
    table = cp.probes.labelled(trace)
    assert table.place.tolist() == [1, 2] * 40
    rows = trace.row_table.set_index("row")
    for line in table.itertuples():
        example = trace.requests[line.request_id].example
        name, flips = example.events[line.place - 1]
        assert line.label == example.states[line.place] and line.word.startswith(name)
        assert rows.token[line.row].strip() == ("flips" if flips else "flip")
        assert (rows.request_id[line.row], rows.position[line.row]) == (line.request_id, line.position)
    first = table[table.place == 1].assign(state=lambda t: [trace.requests[r].example.states[0] for r in t.request_id])
    assert (first.groupby(["state", "word"]).group.nunique() == 1).all()
    last = cp.probes.labelled(trace, at=[-1, -2])
    assert (last.label == [e for r in trace.requests for e in [r.example.answer.strip()] * 2]).all()
    assert (rows.token[last.row[last.place == -1]].str.strip() == ":").all()


def test_a_model_that_tracks_the_coin_against_its_baselines(model) -> None:
    few = CoinFlip(people=1).examples(n=22)
    trace, bare = (cp.run(lm, few, **RUN) for lm in (model, cp.probes.untrained(model, seed=3)))
    result = cp.probes.fit(trace, at=[-1], untrained=bare, least=8)
    table = result.table.set_index(["site", "layer"])
    assert table.accuracy["S", 3] == 1.0 and table.is_above["S", 3] and table.low["S", 3] > 0.8
    assert (table.embedding < 0.75).all() and table.untrained["S", 3] < 0.75
    assert table.majority.unique().tolist() == [0.5] and (table["at"] == "position").all()
    assert "3 sites x 4 layers x 1 places" in repr(result)
    assert trace.fingerprint["weights_sha256"] != bare.fingerprint["weights_sha256"]
    for others in (few[:-1], CoinFlip(people=1).examples(n=22, seed=1)):
        with pytest.raises(cp.probes.ProbeError, match="of other prompts"):
            cp.probes.fit(cp.run(model, others, **RUN), at=[-1], untrained=bare)
    with pytest.raises(cp.probes.ProbeError, match="chance is 50%.*use a model that does it"):
        cp.probes.require_above_chance(bare)


def test_places_apart_and_pooled(trace: cp.Trace) -> None:
    apart = cp.probes.fit(trace, sites="S", layers=[3], least=8).table
    pooled = cp.probes.fit(trace, sites="S", layers=[3], pooled=True, least=8).table
    assert apart.place.tolist() == [1, 2] and apart.examples.tolist() == [40, 40]
    assert pooled.place.tolist() == ["all"] and pooled.examples.tolist() == [80]
    assert (apart.groups == pooled.groups[0]).all() and apart.control.notna().all()


def test_embeddings_are_of_the_words_alone(trace: cp.Trace, model) -> None:
    table = cp.probes.labelled(trace, at=[-1])
    read = embeddings(trace, table)
    weight = model.model.embed.weight
    for vector, request in zip(read, trace.requests, strict=True):
        rows = weight[list(request.prompt_token_ids)]
        torch.testing.assert_close(vector, torch.cat([rows[-1], rows.mean(0)]), rtol=1e-4, atol=1e-5)


def test_untrained_is_the_same_shape_and_says_so() -> None:
    model = loaded()
    one, again, other = (cp.probes.untrained(model, seed) for seed in (5, 5, 6))
    shas = [m.fingerprint()["weights_sha256"] for m in (model, one, again, other)]
    assert shas[1] == shas[2] and len(set(shas)) == 3
    assert (one.n_layers, one.d_model, one.dtype) == (model.n_layers, model.d_model, model.dtype)
    assert one.name.endswith("untrained") and "seed 5" in one.weights_note
    with pytest.raises(ValueError, match="cannot be made anew"):
        cp.probes.untrained(object())


def test_what_cannot_be_probed_is_refused(trace: cp.Trace) -> None:
    fit, error = cp.probes.fit, cp.probes.ProbeError
    with pytest.raises(error, match="no layer 4 to probe; there are \\[0, 1, 2, 3\\]"):
        fit(trace, layers=[4])
    with pytest.raises(error, match="no site 'Q' to probe; there are S, T, C"):
        fit(trace, sites="Q")
    with pytest.raises(error, match="nothing to probe"):
        fit(trace, layers=[])
    with pytest.raises(error, match="groups of prompts, 20 are needed"):
        fit(trace)
    with pytest.raises(error, match="brings its own labels"):
        fit(trace, ["heads"])
    states, labels = drawn(60, 5)
    with pytest.raises(error, match="vectors need labels, and groups"):
        fit({("S", 0): states}, labels)
    with pytest.raises(error, match="there are 60 labels, 59 groups; give one of each for every vector"):
        fit({("S", 0): states}, labels, range(59))
    with pytest.raises(error, match="there are 60 labels, 60 groups, 3 places, 2 words"):
        fit({("S", 0): states}, labels, range(60), places=range(3), words=range(2))
    with pytest.raises(error, match=r"are \[60, 5\]; 59 labels"):
        fit({("S", 0): states}, labels[:-1], range(59))
    with pytest.raises(error, match="3 examples of 3 classes; class '0' has 1 groups of prompts, 20 are needed"):
        fit({("S", 0): states[:3]}, [0, 1, 2], range(3))
    with pytest.raises(error, match="every example of class '2' is in one fold of groups; give more groups of it"):
        fit({("S", 0): states[:5]}, [0, 0, 1, 1, 2], range(5), least=1)
    with pytest.raises(error, match="class '1' has 3 groups of prompts, 20 are needed"):
        fit({("S", 0): states}, [1] * 6 + [0] * 54, [0, 0, 1, 1, 2, 2, *range(3, 57)])
    with pytest.raises(error, match="all 60 examples are of class 'x'"):
        fit({("S", 0): states}, ["x"] * 60, range(60))
    with pytest.raises(ValueError, match="2 folds leave none"):
        fit({("S", 0): states}, labels, range(60), folds=2)
    with pytest.raises(error, match="no S of layer 1 for every example"):
        fit({("S", 1): states}, labels, range(60), untrained={("S", 0): states})


def test_what_has_no_place_is_refused(trace: cp.Trace, model) -> None:
    labelled = cp.probes.labelled
    with pytest.raises(ValueError, match="no position 99: its text has"):
        labelled(trace, at=[99])
    with pytest.raises(ValueError, match="no state holds yet at position 0"):
        labelled(trace, at=[0])
    with pytest.raises(ValueError, match="unknown places at='word'"):
        labelled(trace, at="word")
    with pytest.raises(ValueError, match="request 0 comes from no task"):
        labelled(cp.run(loaded(), [[1, 2, 3]], **RUN))
    initial = cp.probes.labelled(trace, at=[4])
    assert initial.group.nunique() == 2  # all prompts that state it alike
    with pytest.raises(cp.probes.ProbeError, match="has 1 groups of prompts"):
        cp.probes.fit(trace, at=[4])


def test_a_model_is_asked_for_its_state_where_it_does_the_task(trace: cp.Trace) -> None:
    assert cp.probes.require_above_chance(trace)["accuracy"] == 1.0
    with pytest.raises(cp.probes.ProbeError, match="has no accuracy"):
        cp.probes.require_above_chance(cp.run(loaded(), [[1, 2, 3]], **RUN))
