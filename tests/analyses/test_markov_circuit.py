"""Recovered states and their forcing: k-means as scikit-learn's, and an edit that is in the prediction."""

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans

import cacheprobe as cp
from cacheprobe.ops.equality import close
from cacheprobe_analyses.findings import markov_circuit
from cacheprobe_analyses.findings.markov_circuit import (
    EMISSION,
    STATES,
    Settings,
    _force,
    _predictions,
    recovered_centroids,
)
from cacheprobe_analyses.small_models import Architecture, random_model


@pytest.mark.parametrize("seed", [0, 1])
def test_clusters_are_scikit_learns_in_the_order_of_the_states(seed: int) -> None:
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, STATES, 400)
    points = (4 * draw.normal(size=(STATES, 6)))[labels] + draw.normal(size=(400, 6))
    labels = np.where(draw.random(400) < 0.2, draw.integers(0, STATES, 400), labels)  # some are wrong
    slow = KMeans(STATES, n_init=10, random_state=0).fit(points)
    counts = np.array([[((slow.labels_ == k) & (labels == s)).sum() for s in range(STATES)] for k in range(STATES)])
    clusters, states = linear_sum_assignment(-counts)
    wanted = slow.cluster_centers_[clusters[np.argsort(states)]]
    found = recovered_centroids(points, labels, seed)
    assert close(torch.tensor(found), torch.tensor(wanted), 1e-3, because="both stop before the last digits")


def test_a_forced_state_is_what_the_prediction_is_made_of() -> None:
    """Twin: the norm and the unembedding of transformers' own model, applied to the vector alone; unforced, its own
    forward."""
    live = random_model(Architecture(7, 16, 2, 16, 2, 32, "gelu", torch_weights=True), 0)
    model = cp.load_model(random_model(Architecture(7, 16, 2, 16, 2, 32, "gelu", torch_weights=True), 0))
    draw = np.random.default_rng(0)
    prompts, vector = draw.integers(0, 7, (5, 6)), draw.normal(size=16).astype(np.float32)
    with torch.no_grad():
        forced = live.lm_head(live.transformer.ln_f(torch.from_numpy(vector))).softmax(-1).expand(5, -1)
        free = live(torch.from_numpy(prompts)).logits[:, -1].softmax(-1)
    because = "other kernels and shapes"
    assert close(torch.tensor(_predictions(model, prompts, vector)), forced, 1e-5, because=because)
    assert close(torch.tensor(_predictions(model, prompts, None)), free, 1e-5, because=because)
    assert not close(free, forced, 1e-2, because=because)


def test_forcing_compares_each_state_with_its_own_emissions(monkeypatch) -> None:
    """Planted: the model predicts, after a state's centroid, that state's emissions; unforced, all tokens alike. So a
    recovered state has no divergence, another's has that of the next state's emissions, by a plain sum."""
    draw = np.random.default_rng(0)
    hidden = draw.integers(0, STATES, (50, 6))
    centers = 10 * np.eye(STATES, 5, dtype=np.float32)
    states = centers[hidden] + 0.01 * draw.normal(size=(50, 6, 5))
    beliefs = np.eye(STATES)[hidden]
    given, seen = np.arange(300).reshape(50, 6), []

    def planted(model: object, prompts: np.ndarray, vector: "np.ndarray | None") -> np.ndarray:
        seen.append(prompts)
        row = np.full(6, 1 / 6) if vector is None else EMISSION[np.square(centers - vector).sum(1).argmin()]
        return np.tile(np.append(row, 0.0), (len(prompts), 1))

    monkeypatch.setattr(markov_circuit, "_predictions", planted)
    points = _force(None, given, states, beliefs, Settings(position=3), 0)
    assert all((one == given[40:, :4]).all() for one in seen) and len(seen) == len(points) == 12
    for point in points:
        own, after = EMISSION[point["state"]], EMISSION[(point["state"] + 1) % STATES]
        read = {"recovered": own, "wrong": after, "unpatched": np.full(6, 1 / 6)}[point["patch"]]
        slow = sum(p * np.log(p / q) for p, q in zip(own, read, strict=True))
        assert abs(point["kl"] - slow) < 1e-5  # rounded to five decimals
