"""Linear regressions from states to vectors equal scikit-learn's, and refuse what cannot be fitted."""

import numpy as np
import pytest
import torch

import cacheprobe as cp
from cacheprobe.lenses.probes.linear import REGRESSION_STRENGTHS
from cacheprobe.lenses.probes.ridge import group_folds
from cacheprobe.ops.equality import close
from tests.twins.probes_slowly import held_out_slowly, r2_slowly


def examples(noise: float) -> tuple[dict[str, torch.Tensor], np.ndarray, np.ndarray]:
    """States of two widths that hold three targets, the second with noise; groups of four."""
    draw = np.random.default_rng(0)
    targets = draw.normal(size=(160, 3)) * [1.0, 2.0, 0.1]
    exact = torch.from_numpy(targets @ draw.normal(size=(3, 8))).float()
    noisy = torch.from_numpy(targets @ draw.normal(size=(3, 5)) + noise * draw.normal(size=(160, 5))).float()
    return {"exact": exact, "noisy": noisy}, targets, np.repeat(np.arange(40), 4)


@pytest.mark.parametrize("noise", [0.3, 3.0])
def test_it_equals_scikit_learn(noise: float) -> None:
    states, targets, groups = examples(noise)
    found = cp.probes.regress(states, targets, groups, seed=3)
    folds = group_folds(groups, 5, 3)
    because = "another factorisation of the same equations"
    for line in found.table.itertuples():
        own = states[line.name].numpy()
        slow = held_out_slowly(own.astype(float), targets, folds, list(REGRESSION_STRENGTHS))
        assert close(torch.tensor(found.predictions[line.name]), torch.tensor(slow), 1e-6, because=because)
        r2 = r2_slowly(own, targets, folds, list(REGRESSION_STRENGTHS))
        assert close(torch.tensor(line.r2), torch.tensor(r2), 1e-6, because=because)
    assert found.table.features.tolist() == [8, 5] and found.table.groups.tolist() == [40, 40]
    exact, noisy = found.table.r2
    assert exact > 0.999 > noisy


def test_states_of_other_examples_predict_nothing() -> None:
    states, targets, groups = examples(0.3)
    shuffled = np.random.default_rng(1).permutation(len(targets))
    assert cp.probes.regress({"exact": states["exact"][shuffled]}, targets, groups).table.r2[0] < 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(groups=[0] * 160), "1 groups cannot fill 5 folds; give more groups, or fewer folds"),
        (dict(groups=[0, 1]), r"there are 160 targets, but {'groups': 2}; give one row for each target"),
        (dict(states={"a": torch.zeros(3, 2)}), r"there are 160 targets, but {'a': 3}"),
        (dict(targets=np.ones((160, 2))), "the targets are all the same"),
    ],
)
def test_what_cannot_be_fitted_is_refused(change: dict, message: str) -> None:
    states, targets, groups = examples(0.3)
    with pytest.raises(cp.probes.ProbeError, match=message):
        cp.probes.regress(**{"states": states, "targets": targets, "groups": groups, **change})
