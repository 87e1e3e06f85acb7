"""Fits ridge classifiers for many layers and many sets of labels at once, each tested on held-out folds of groups."""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.core.live import require_usable_process


def joined_groups(members: Iterable[Hashable], shared: Iterable[Hashable]) -> np.ndarray:
    """Returns a group number for each of n examples, [n]. A train-test split must keep each group together.

    Examples with the same member are in one group, and so are members that share a text.
    members, shared: two keys of each example, such as its prompt and the text read up to its place. A causal model's
    state is a function of that text, so two prompts with the same beginning have the same state at that place.
    """
    members, parent = list(members), {}

    def root(key: Hashable) -> Hashable:
        """Returns the representative key of a key's group (union-find)."""
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for member, text in zip(members, shared, strict=True):
        parent[root(("member", member))] = root(("shared", text))
    roots = [root(("member", member)) for member in members]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(roots))}
    return np.array([numbers[key] for key in roots])


def group_folds(groups: Iterable[Hashable], num_folds: int, seed: int = 0) -> np.ndarray:
    """Returns a fold number for each of n examples, [n]; all examples of a group are in one fold.

    Groups are shuffled, then assigned, largest first, to the fold that is smallest so far.
    Raises: ValueError for fewer groups than folds.
    Source: the greedy rule of scikit-learn's GroupKFold, over shuffled groups.
    """
    keys, inverse, sizes = np.unique(np.array(list(groups)), return_inverse=True, return_counts=True)
    if len(keys) < num_folds:
        raise ValueError(f"{len(keys)} groups cannot be split into {num_folds} folds; give more prompts or fewer folds")
    shuffled = np.random.default_rng(seed).permutation(len(keys))
    fold_sizes = np.zeros(num_folds, dtype=int)
    fold_of = np.zeros(len(keys), dtype=int)
    for group in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        fold_of[group] = int(fold_sizes.argmin())
        fold_sizes[fold_of[group]] += sizes[group]
    return fold_of[inverse]


def effective_number(groups: Iterable[Hashable]) -> float:
    """Returns the effective number of examples if all examples of a group are equal: (sum of sizes)^2 / sum of sizes^2.

    Source: Kish 1965, "Survey Sampling", section 8.2, for a correlation of one within clusters.
    """
    sizes = np.unique(np.array(list(groups)), return_counts=True)[1].astype(float)
    return float(sizes.sum() ** 2 / (sizes**2).sum())


def control_labels(words: Iterable[Hashable], labels: np.ndarray, number: int, seed: int) -> np.ndarray:
    """Returns random labels [number, n] for control tasks: in each task, every distinct word has one random label.

    The random labels are drawn from the true ones.
    Source: Hewitt and Liang 2019 (arXiv 1909.03368), section 2.
    """
    words = list(words)
    distinct = sorted(set(words), key=str)
    column = {kind: i for i, kind in enumerate(distinct)}
    drawn = np.random.default_rng(seed).choice(labels, size=(number, len(distinct)))
    return drawn[:, [column[word] for word in words]]


STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)
"""Penalties to try, in units of the number of features."""
_NUMBERS_AT_ONCE = 20_000_000
"""Limit on the state values (layers x examples x features) of one batch of layers, for memory."""


class HeldOut(NamedTuple):
    """Holds cross-validated scores: every example is scored by a probe that was fitted without the example's fold."""

    scores: Tensor
    """[l, n, q]: for each layer and example, one score for each target column."""
    strengths: Tensor
    """[f, l]: the penalty of each fold and layer, chosen for the first set of labels."""


def held_out_scores(
    states: Float[Tensor, "l n m"],
    targets: Float[Tensor, "n q"],
    folds: Int[Tensor, "n"],
    widths: Sequence[int],
    strengths: Sequence[float] = STRENGTHS,
) -> HeldOut:
    """Fits ridge regressions by cross-validation, one for each layer and fold. Returns HeldOut: held-out scores [l, n,
    q], and the penalties chosen for the first set of labels.

    targets: columns to regress on, such as one for each class.  widths: number of columns of each set of labels; every
    set has its own penalty.  folds: the fold of each example, 0, 1, ...; at least three.
    Features are centred and scaled, and columns centred, with statistics of the training examples. The chosen penalty
    has the smallest squared error on the next fold when fitted on the rest; among equal ones, the largest.
    Raises: ValueError for fewer than three folds.
    Source: ridge regression as a classifier, Hastie, Tibshirani and Friedman 2009, sections 3.4.1 and 4.2.
    Twin: tests.twins.probes_slowly.held_out_slowly (scikit-learn), close(1e-6).
    """
    require_usable_process(is_computing=True)
    num_folds = int(folds.max()) + 1
    if num_folds < 3:
        raise ValueError(f"{num_folds} folds leave none to choose the penalty on; give at least 3")
    at_once = max(_NUMBERS_AT_ONCE // (states.shape[1] * states.shape[2]), 1)
    parts = [_of_layers(layers, targets, folds, num_folds, widths, strengths) for layers in states.split(at_once)]
    return HeldOut(torch.cat([part.scores for part in parts]), torch.cat([part.strengths for part in parts], 1))


def _of_layers(
    states: Tensor, targets: Tensor, folds: Tensor, num_folds: int, widths: Sequence[int], strengths: Sequence[float]
) -> HeldOut:
    """Returns the HeldOut of a few layers. For each fold, the penalty of each layer and set of labels is the one that
    scores the next fold best; then probes with it are fitted outside the fold, and score the fold.

    states: [l, n, m].  targets: [n, q], sets of labels side by side, `widths` columns each.  strengths: s penalties.
    The penalties that are returned are those of the first set.
    """
    states, targets = states.double(), targets.double()
    penalties = torch.tensor(sorted(strengths, reverse=True), dtype=torch.float64)
    scores = states.new_zeros(*states.shape[:2], targets.shape[1])
    chosen = []
    for fold in range(num_folds):
        test, inner = folds == fold, folds == (fold + 1) % num_folds
        rest = ~test & ~inner
        inner_scores = ridge_scores(states[:, rest], targets[rest], states[:, inner], penalties)
        errors = (inner_scores - targets[inner]).square().sum(2)  # [s, l, q]
        best = [part.sum(-1).argmin(0) for part in errors.split(list(widths), dim=2)]  # each [l]
        column = torch.cat([index[:, None].expand(-1, width) for index, width in zip(best, widths, strict=True)], 1)
        test_scores = ridge_scores(states[:, ~test], targets[~test], states[:, test], penalties)
        scores[:, test] = test_scores.gather(0, column[None, :, None].expand(1, -1, test_scores.shape[2], -1))[0]
        chosen.append(penalties[best[0]])
    return HeldOut(scores, torch.stack(chosen))


def ridge_scores(
    train: Float[Tensor, "l a m"],
    targets: Float[Tensor, "a q"],
    test: Float[Tensor, "l b m"],
    penalties: Float[Tensor, "s"],
) -> Float[Tensor, "s l b q"]:
    """Fits ridge regressions on `train`, one for each layer and penalty; returns their scores [s, l, b, q] of
    `test`."""
    num_examples, num_features = train.shape[1:]
    mean, scale = train.mean(1, keepdim=True), train.std(1, correction=0, keepdim=True)
    scale = torch.where(scale > 1e-12, scale, 1.0)  # a feature that never varies gets weight 0
    train, test = (train - mean) / scale, (test - mean) / scale
    offset = targets.mean(0)
    centred = (targets - offset).expand(len(train), -1, -1)
    is_wide = num_examples <= num_features
    gram = (train @ train.mT if is_wide else train.mT @ train) / num_features
    right_side = centred if is_wide else train.mT @ centred / num_features
    test_side = test @ train.mT / num_features if is_wide else test
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype)
    factors = [torch.linalg.cholesky(gram + penalty * identity) for penalty in penalties]
    return torch.stack([test_side @ torch.cholesky_solve(right_side, factor) for factor in factors]) + offset
