"""The benchmark of patching grids in small: TransformerLens' own sweep says the same of every cell."""

import pytest

from cacheprobe.patching import cells
from cacheprobe_benchmarks.patching import compare, farthest_apart, sanity
from tests.tiny import loaded

CLEAN, CORRUPT, ANSWER = [5, 17, 3, 44, 9, 60, 21], [5, 17, 80, 44, 9, 61, 21], (59, 58)


def test_both_sweeps_give_the_same_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(loaded(), CLEAN, CORRUPT, ANSWER, rounds=1)
    assert found["largest_difference"] < 1e-5 < 1 < found["spread"]
    assert found["speedup"] > 0 and set(found["seconds_median"]) == {"ours", "transformerlens"}
    real = cells.run_cells  # the control: the numbers of the cells in another order
    monkeypatch.setattr("cacheprobe.patching.sweep.run_cells", lambda *args: real(*args).flip(0))
    assert compare(loaded(), CLEAN, CORRUPT, ANSWER, rounds=1)["largest_difference"] > 0.1


def test_the_sanity_of_prefixes_is_measured() -> None:
    assert farthest_apart(loaded(), CLEAN, CORRUPT) == ANSWER
    told = sanity(loaded(), CLEAN, CORRUPT, ANSWER)
    assert told["apart"] > 2 and told["one_step"] < 1e-6
    assert told["everything_is_off_one_by"] < 1e-6 and told["nothing_is_off_zero_by"] < 1e-6
