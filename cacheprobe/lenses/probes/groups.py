"""Computes groups of examples that a split keeps together, folds of groups, and the effective number of examples."""

from collections.abc import Hashable, Iterable

import numpy as np


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
