"""The regression of belief geometry: no prefix is both fitted and tested; what is computed from its readings."""

import numpy as np
import torch
from sklearn.linear_model import LinearRegression

import cacheprobe as cp
from cacheprobe.lenses.probes.ridge import group_folds
from cacheprobe.ops.equality import close
from cacheprobe_analyses.findings.belief_geometry import BeliefGeometry, _distance_r2, _fitted_to_all, prefix_groups
from cacheprobe_analyses.findings.processes import rrxor


def share_also_fitted(tokens: np.ndarray, groups: np.ndarray) -> float:
    """Returns the share of prefixes in a fold that are in another fold too, by plain sets."""
    folds = group_folds(groups.tolist(), 5, 0)
    prefixes = [tuple(row[:end]) for row in tokens.tolist() for end in range(1, tokens.shape[1] + 1)]
    inside = [{p for p, f in zip(prefixes, folds, strict=True) if f == fold} for fold in range(5)]
    others = [{p for p, f in zip(prefixes, folds, strict=True) if f != fold} for fold in range(5)]
    return sum(len(a & b) for a, b in zip(inside, others, strict=True)) / sum(map(len, inside))


def test_no_prefix_is_both_fitted_and_tested() -> None:
    """A split by sequence, on the other hand, tests mostly prefixes that were fitted."""
    tokens = rrxor().sample(600, 8, np.random.default_rng(0))
    assert share_also_fitted(tokens, prefix_groups(tokens)) == 0
    assert share_also_fitted(tokens, np.repeat(np.arange(len(tokens)), tokens.shape[1])) > 0.5


def test_the_measurement_splits_by_prefix(monkeypatch) -> None:
    """In each call of the regression, equal states of the trained model are in one group."""
    seen, regress = [], cp.probes.regress

    def watched(states, targets, groups, **more):
        seen.append(len(set(groups)))
        rows = np.unique(np.asarray(targets).round(9), axis=0)
        assert len(rows) <= len(set(groups)) < len(groups) / 2, "groups are not prefixes"
        for name, own in states.items():
            distinct = len(np.unique(own.numpy().round(3), axis=0))
            assert distinct <= len(set(groups)), f"{name}: {distinct} states in {len(set(groups))} groups"
        return regress(states, targets, groups, **more)

    monkeypatch.setattr(cp.probes, "regress", watched)
    finding = BeliefGeometry()
    finding.measure(finding.presets["tiny"], 0, lambda steps: None)
    assert len(seen) == 4


def test_distances_are_of_distinct_beliefs() -> None:
    """Planted: the readings of a belief average to a moved, turned and doubled belief, so distances correlate fully;
    then one belief's readings are moved, against a plain loop over pairs."""
    corners = np.array([[1.0, 0, 0], [0, 1.0, 0], [0.2, 0.2, 0.6]])
    beliefs = corners[[0, 1, 2, 0, 1, 2, 0]]
    read = 2 * beliefs[:, [2, 0, 1]] + 5
    read[0] += 0.3
    read[[3, 6]] -= 0.15
    assert abs(_distance_r2(beliefs, read) - 1) < 1e-12
    read[1] += [0, 4.0, 0]
    means = [read[[0, 3, 6]].mean(0), read[[1, 4]].mean(0), read[[2, 5]].mean(0)]
    pairs = [(0, 1), (0, 2), (1, 2)]
    slow = (
        np.corrcoef(
            [np.linalg.norm(corners[a] - corners[b]) for a, b in pairs],
            [np.linalg.norm(means[a] - means[b]) for a, b in pairs],
        )[0, 1]
        ** 2
    )
    assert slow < 0.9 and abs(_distance_r2(beliefs, read) - slow) < 1e-12
    assert abs(_distance_r2(beliefs[None], read[None]) - slow) < 1e-12  # as sequences, too


def test_a_fit_to_all_is_scikit_learns() -> None:
    draw = np.random.default_rng(0)
    states, targets = draw.normal(size=(50, 6)) + 3, draw.normal(size=(50, 2))
    slow = LinearRegression().fit(states, targets).predict(states)
    assert close(torch.tensor(_fitted_to_all(states, targets)), torch.tensor(slow), 1e-6, because="another solver")
