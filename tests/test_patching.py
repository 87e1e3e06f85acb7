"""Patching grids against one plain uncached forward for each cell."""

import pytest

import cacheprobe as cp
from tests.patching_slowly import naive_grid
from tests.tiny import hf_model, loaded

CLEAN, CORRUPT = [5, 17, 3, 44, 9, 60, 21], [5, 17, 80, 44, 9, 61, 21]
APART = [1, *CORRUPT[1:]]
"""Differs from CLEAN at the first token on, so that no cell is free."""
ANSWER = (7, 11)
TOLERANCE = 1e-5
"""Of logits of sd 1 to 5: our cells are rows of a batch, whose sums are taken in another order."""
QUICK = dict(answer=ANSWER, progress=False)


def differences(logits: dict) -> dict:
    return {index: float(row[ANSWER[0]] - row[ANSWER[1]]) for index, row in logits.items()}


def by_index(grid: cp.patching.Grid, column: str) -> dict:
    axes = [name for name in ("layer", "position", "head") if name in grid.table.columns]
    return dict(zip(grid.table[axes].itertuples(index=False, name=None), grid.table[column], strict=True))


def assert_equal(grid: cp.patching.Grid, naive: dict, because: str = "sums in another order") -> None:
    found, wanted = by_index(grid, "logit_difference"), differences(naive)
    assert found.keys() == wanted.keys() and because
    far = max(abs(found[index] - wanted[index]) for index in wanted)
    assert far <= TOLERANCE * max(1, *map(abs, wanted.values()))
    assert max(wanted.values()) - min(wanted.values()) > 0.1  # the control: cells differ
    logprob = by_index(grid, "logprob_nats")
    assert all(abs(logprob[i] - float(naive[i].log_softmax(-1)[ANSWER[0]])) < 1e-4 for i in naive)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("site", ["pre", "S", "T", "C"])
def test_every_cell_is_the_naive_run(family: str, site: str) -> None:
    grid = cp.patching.activation(loaded(family), CLEAN, APART, site=site, **QUICK)
    assert_equal(grid, naive_grid(hf_model(family), CLEAN, APART, site))
