"""Fits linear regressions from states to vectors, such as beliefs, and tests them on held-out groups."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cacheprobe.lenses.probes.examples import ProbeError
from cacheprobe.lenses.probes.ridge import group_folds, held_out_scores

K = TypeVar("K", bound=Hashable)
STRENGTHS = (1e-6, 1e-4, 1e-2, 1.0)
"""Penalties to try, in units of the number of features; smaller than a classifier's, since the targets have no
noise."""


@dataclass(frozen=True)
class Regression:
    """Holds linear regressions from states to vectors."""

    table: pd.DataFrame
    """A line for each set of states: name, examples, groups, features, r2 (on held-out examples)."""
    predictions: Mapping[Hashable, np.ndarray]
    """The name of a set of states -> held-out predictions [n, q]."""


def regress(
    states: Mapping[K, Tensor],
    targets: np.ndarray,
    groups: Sequence[Hashable] | np.ndarray,
    *,
    folds: int = 5,
    seed: int = 0,
) -> Regression:
    """Fits a ridge regression from each set of states to the targets, and returns a Regression with held-out R2.

    states: a name, such as a layer -> [n, m] states; widths may differ.  targets: [n, q] vectors.  groups: what each
    example comes from, such as its sequence; the examples of a group are all in one fold.
    R2 is one minus the squared error over the squared distance from the mean target, both summed over examples and
    columns; it is below 0 where the mean predicts better.
    Raises: ProbeError for lengths that differ, fewer groups than folds, or targets that are all the same.
    Source: linear regression from the residual stream to beliefs, Shai et al. 2024 (arXiv 2405.15943).
    Twin: tests.twins.probes_slowly.r2_slowly (scikit-learn), close(1e-6).
    """
    wanted = torch.as_tensor(np.asarray(targets, dtype=np.float64))
    lengths = {str(name): len(one) for name, one in states.items()} | {"groups": len(groups)}
    if wrong := {name: length for name, length in lengths.items() if length != len(wanted)}:
        raise ProbeError(f"there are {len(wanted)} targets, but {wrong}; give one row for each target")
    if (number := len(np.unique(np.asarray(groups)))) < folds:
        raise ProbeError(f"{number} groups cannot fill {folds} folds; give more groups, or fewer folds")
    spread = float((wanted - wanted.mean(0)).square().sum())
    if not spread:
        raise ProbeError("the targets are all the same, so there is nothing to predict; give other examples")
    of_fold = torch.from_numpy(group_folds(np.asarray(groups), folds, seed))
    lines, predictions = [], {}
    for name, own in states.items():
        scores = held_out_scores(own[None], wanted, of_fold, [wanted.shape[1]], STRENGTHS).scores[0]
        predictions[name] = scores.numpy()
        r2 = 1 - float((scores - wanted).square().sum()) / spread
        lines.append(dict(name=name, examples=len(own), groups=number, features=own.shape[1], r2=r2))
    return Regression(pd.DataFrame(lines), predictions)
