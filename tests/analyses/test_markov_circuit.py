"""Recovered states and their forcing: k-means as scikit-learn's, and an edit that is in the prediction."""

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans

import cacheprobe as cp
from cacheprobe.ops.equality import close
from cacheprobe_analyses.findings.markov_circuit import STATES, _predictions, recovered_centroids
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
    model, draw = cp.load_model(random_model(Architecture(7, 16, 2, 16, 2, 32, "gelu", torch_weights=True), 0)), None
    draw = np.random.default_rng(0)
    prompts, vector = draw.integers(0, 7, (5, 6)), draw.normal(size=16).astype(np.float32)
    with torch.no_grad():
        forced = live.lm_head(live.transformer.ln_f(torch.from_numpy(vector))).softmax(-1).expand(5, -1)
        free = live(torch.from_numpy(prompts)).logits[:, -1].softmax(-1)
    because = "other kernels and shapes"
    assert close(torch.tensor(_predictions(model, prompts, vector)), forced, 1e-5, because=because)
    assert close(torch.tensor(_predictions(model, prompts, None)), free, 1e-5, because=because)
    assert not close(free, forced, 1e-2, because=because)
