"""Prediction depth of wrong and right predictions: planted tables, and a control that confidence alone explains."""

import numpy as np
import torch

import cacheprobe as cp
from cacheprobe_analyses.findings.depth import TINY, _difference, _drawn, _load, _mean_difference, _of_texts


def test_a_difference_is_of_two_means_or_undefined() -> None:
    values, chosen = np.array([1.0, 2.0, 9.0]), np.array([True, False, True])
    assert _difference(values, chosen) == 3.0 and _difference(values, ~chosen) == -3.0
    assert np.isnan(_difference(values, np.ones(3, bool))) and np.isnan(_difference(values, np.zeros(3, bool)))
    columns = np.stack([chosen, ~chosen, chosen, np.zeros(3, bool)], 1)
    assert _mean_difference(values, columns) == 1.0  # the fourth is not defined
    assert np.isnan(_mean_difference(values, np.zeros((3, 2), bool)))


def test_drawn_tokens_have_the_models_probabilities() -> None:
    """Twin: softmax of transformers' own logits; over all draws, within five standard errors."""
    model = _load(TINY)
    texts = np.random.default_rng(0).integers(0, 97, (40, 8))
    trace = cp.run(model, [row.tolist() for row in texts], max_new_tokens=1, capture="S", progress=False)
    table = trace.row_table[trace.row_table.role == "prompt"].sort_values(["request_id", "position"])
    drawn = _drawn(model, trace, table.row.tolist(), 0)
    from cacheprobe_analyses.small_models import Architecture, random_model

    with torch.no_grad():
        exact = random_model(Architecture(97, 64, 3, 16, 2, 32), 0)(torch.from_numpy(texts)).logits.softmax(-1)
    expected = exact.reshape(-1, 97).sum(0).numpy() * drawn.shape[1]
    found = np.bincount(drawn.ravel(), minlength=97)
    assert (np.abs(found - expected) < 5 * np.sqrt(expected)).all() and drawn.shape == (320, 100)


def test_next_tokens_from_the_model_itself_have_no_excess() -> None:
    """Texts that are all drawn from the model: what is wrong is due to chance, so the difference in depth is the
    control's, to within four of its standard errors over the seeds."""
    model, excess = _load(TINY), []
    for seed in range(6):
        texts = sampled(model, 30, 10, seed)
        values, _ = _of_texts(model, texts, [10] * 30, {"logit": cp.lenses.LogitLens(), "tuned": cp.lenses.LogitLens()},
                              np.zeros(97), seed)  # fmt: skip
        excess.append(values["wrong_excess"])
        assert values["wrong_excess"] == values["wrong_deeper"] - values["wrong_drawn"] == values["wrong_excess_tuned"]
    assert abs(np.mean(excess)) < 4 * np.std(excess, ddof=1) / len(excess) ** 0.5


def sampled(model, number: int, length: int, seed: int) -> np.ndarray:
    """Returns texts that the model writes at temperature 1 after one random token each."""
    from cacheprobe.training.tuned_lens import write_texts

    return write_texts(model, number, length, seed, "held-out").numpy()
