"""The benchmark of patching grids in small: TransformerLens' own sweep says the same of every cell."""

import pytest
import torch

from cacheprobe.edits.patching import cells
from cacheprobe_benchmarks.states import patching
from cacheprobe_benchmarks.states.patching import compare
from cacheprobe_benchmarks.states.patching_precision import farthest_apart, precision, sanity
from tests.planted_costs import HOUR, Clock
from tests.tiny import loaded

CLEAN, CORRUPT, ANSWER = [5, 17, 3, 44, 9, 60, 21], [5, 17, 80, 44, 9, 61, 21], (59, 58)


def test_both_sweeps_give_the_same_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as planted:
        clock = Clock(planted)
        clock.plant(patching.SWEEPS, "ours", 2)
        clock.plant(patching.SWEEPS, "transformerlens", 5)
        told, _ = compare(loaded(), CLEAN, CORRUPT, ANSWER, rounds=1)
    assert told["largest_difference"] < 1e-5 < 1 < told["spread"]
    assert told["seconds_median"] == pytest.approx({"ours": 2 * HOUR, "transformerlens": 5 * HOUR}, rel=0.01)
    assert told["speedup"] == pytest.approx(2.5, abs=0.02)
    real = cells.run_cells  # the control: the numbers of the cells in another order
    monkeypatch.setattr("cacheprobe.edits.patching.sweep.run_cells", lambda *args: real(*args).flip(0))
    assert compare(loaded(), CLEAN, CORRUPT, ANSWER, rounds=1).told["largest_difference"] > 0.1


def test_in_float64_both_sweeps_tell_the_truth() -> None:
    """To a billionth of what float32 leaves: the cells themselves add no error."""
    models = loaded(), loaded("llama", torch.float64)
    far = precision(*models, CLEAN, CORRUPT, ANSWER, compare(models[0], CLEAN, CORRUPT, ANSWER, rounds=1).found)
    assert far["in_float64"] < 1e-13
    distances = [value for name, value in far.items() if "from" in name]
    assert len(distances) == 5 and all(1e-9 < value < 1e-5 for value in distances)
    assert far["last_bit_of_the_largest_logit"] <= far["largest_logit"] * 2**-23


@pytest.mark.parametrize(("dtype", "at_most"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
def test_the_sanity_of_prefixes_is_measured(dtype: torch.dtype, at_most: float) -> None:
    model = loaded("llama", dtype)
    assert farthest_apart(model, CLEAN, CORRUPT) == ANSWER
    told = sanity(model, CLEAN, CORRUPT, ANSWER)
    assert told["apart"] > 2 and told["one_step"] < at_most
    assert told["everything_is_off_one_by"] < at_most and told["nothing_is_off_zero_by"] < at_most
