"""Computes the AUROC of scores for two classes, with intervals from resampling whole groups."""

from collections.abc import Sequence

import numpy as np


def auroc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Returns the AUROC of scores [n] for labels [n] (0 or 1), a number from 0 to 1; NaN if a class has no example.

    It is the probability that an example of class 1 scores higher than one of class 0; ties count half.
    Source: Hanley and McNeil 1982.  Twin: tests.twins.probes_slowly.auroc_slowly (every pair), ==.
    """
    _, index, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[index]  # ties share their mean rank
    positive = int(labels.sum())
    pairs = positive * (len(labels) - positive)
    if not pairs:
        return float("nan")
    return float((ranks[labels == 1].sum() - positive * (positive + 1) / 2) / pairs)


def resampled_auroc(
    scores: Sequence[np.ndarray], labels: np.ndarray, groups: np.ndarray, number: int, seed: int
) -> np.ndarray:
    """Returns the AUROC of each score on `number` bootstrap samples of whole groups, as an array [number, len(scores)].

    scores: arrays [n], one for each classifier; all use the same samples. Groups are drawn with replacement.
    Source: bootstrap over clusters, Field and Welsh 2007.
    """
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    draw = np.random.default_rng(seed)
    out = np.empty((number, len(scores)))
    for i in range(number):
        index = np.concatenate([members[j] for j in draw.integers(0, len(members), len(members))])
        out[i] = [auroc(score[index], labels[index]) for score in scores]
    return out
