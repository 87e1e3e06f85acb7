"""Patching grids against one plain uncached forward for each cell."""

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.noise import derive_seed
from cacheprobe.edits.patching.cells import PatchingCell, read, run_cells
from cacheprobe.edits.patching.grid import difference
from cacheprobe.edits.patching.pairs import run_pair
from tests.tiny import hf_model, loaded
from tests.twins.patching_slowly import naive_grid, plain_run

CLEAN, CORRUPT = [5, 17, 3, 44, 9, 60, 21], [5, 17, 80, 44, 9, 61, 21]
APART = [1, *CORRUPT[1:]]
"""Differs from CLEAN at the first token on, so that no cell is free."""
ANSWER = (7, 11)
WIDE_APART = {"llama": (59, 58), "gemma2": (5, 46)}
"""The tokens whose difference CLEAN and CORRUPT change most."""
TOLERANCE = 1e-5
"""Of logits of sd 1 to 5: our cells are rows of a batch, whose sums are taken in another order."""
QUICK = dict(answer=ANSWER, progress=False)


def differences(logits: dict) -> dict:
    return {index: float(row[ANSWER[0]] - row[ANSWER[1]]) for index, row in logits.items()}


def by_index(grid: cp.patching.PatchingGrid, column: str) -> dict:
    axes = [name for name in ("layer", "position", "head") if name in grid.table.columns]
    return dict(zip(grid.table[axes].itertuples(index=False, name=None), grid.table[column], strict=True))


def assert_equal(grid: cp.patching.PatchingGrid, naive: dict, because: str = "sums in another order") -> None:
    found, wanted = by_index(grid, "logit_difference"), differences(naive)
    assert found.keys() == wanted.keys() and because
    far = max(abs(found[index] - wanted[index]) for index in wanted)
    assert far <= TOLERANCE * max(1, *map(abs, wanted.values()))
    assert max(wanted.values()) - min(wanted.values()) > 0.1  # the control: cells differ
    logprob = by_index(grid, "logprob_nats")
    assert all(abs(logprob[i] - float(naive[i].log_softmax(-1)[ANSWER[0]])) < 1e-4 for i in naive)


@pytest.mark.parametrize(("family", "site"), [("llama", "S"), ("llama", "pre"), ("gpt2", "T"), ("gemma2", "C")])
def test_every_cell_is_the_naive_run(family: str, site: str) -> None:
    grid = cp.patching.activation(loaded(family), CLEAN, APART, site=site, **QUICK)
    assert_equal(grid, naive_grid(hf_model(family), CLEAN, APART, site))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_head_is_the_naive_run(family: str) -> None:
    grid = cp.patching.activation(loaded(family), CLEAN, APART, site="T", heads=True, **QUICK)
    assert len(grid.table) == 3 * 7 * 4
    assert_equal(grid, naive_grid(hf_model(family), CLEAN, APART, "heads", heads=4))


@pytest.mark.parametrize(("family", "site"), [("llama", "S"), ("gemma2", "pre")])
def test_every_prefix_is_the_naive_run(family: str, site: str) -> None:
    grid = cp.patching.prefix(loaded(family), CLEAN, CORRUPT, site=site, **QUICK)
    assert_equal(grid, naive_grid(hf_model(family), CLEAN, CORRUPT, site, is_prefix=True))


def test_positions_that_the_texts_share_are_the_unpatched_run() -> None:
    grid = cp.patching.activation(loaded(), CLEAN, CORRUPT, **QUICK)
    assert_equal(grid, naive_grid(hf_model(), CLEAN, CORRUPT, "S"))
    free = grid.table.position < 2
    assert (grid.table.nld[free] == 0).all() and not grid.table.flip[free].any()
    assert grid.table.nld[~free].abs().max() > 0.1


@pytest.mark.parametrize("family", WIDE_APART)
def test_everything_is_one_and_nothing_is_zero(family: str) -> None:
    """Computed, and not said: from every layer on, all positions again. Of answers that
    the texts put far apart: NLD divides by that, and a logit of 5 has steps of 5e-7."""
    grid = cp.patching.prefix(loaded(family), CLEAN, CORRUPT, answer=WIDE_APART[family], progress=False)
    table, answer = grid.table, WIDE_APART[family]
    assert abs(grid.meta["clean_logit_difference"] - grid.meta["corrupt_logit_difference"]) > 2
    assert (table.nld[table.position == 6] - 1).abs().max() < 1e-6
    assert table.nld[table.position == 1].abs().max() < 1e-6
    assert ((table.nld > 0.01) & (table.nld < 0.99)).any()
    runs = run_pair(loaded(family), tuple(CLEAN), tuple(CORRUPT), ())
    high, low = (difference(read(run.logits[None], answer)[0]) for run in runs)
    untouched = [PatchingCell((), 2, ("S", layer)) for layer in range(3)]
    for run, expected in zip(runs, (1, 0), strict=True):
        for said in read(run_cells(loaded(family), run, untouched), answer):
            assert abs((difference(said) - low) / (high - low) - expected) < 1e-6


def test_flips_and_nld_are_those_of_the_logits() -> None:
    grid = cp.patching.activation(loaded(), CLEAN, APART, progress=False)
    naive = naive_grid(hf_model(), CLEAN, APART, "S")
    clean, corrupt = (plain_run(hf_model(), ids, [])[0] for ids in (CLEAN, APART))
    first, second = int(clean.argmax()), int(corrupt.argmax())
    assert grid.meta["answer_ids"] == [first, second]
    low, high = (float(logits[first] - logits[second]) for logits in (corrupt, clean))
    assert low < 0 < high
    for row in grid.table.itertuples():
        apart = float(naive[row.layer, row.position][first] - naive[row.layer, row.position][second])
        assert row.nld == pytest.approx((apart - low) / (high - low), abs=1e-5)
        assert row.flip == (apart > 0)
    assert grid.table.flip.any() and not grid.table.flip.all()
    assert grid.table.nld[(grid.table.layer == 2) & (grid.table.position == 6)].item() == pytest.approx(1, abs=1e-5)


def test_the_bridge_gives_the_same_grid() -> None:
    """Its own attention, and its own hooks."""
    naive = naive_grid(hf_model("gpt2"), CLEAN, APART, "T")
    assert_equal(cp.patching.activation(loaded("gpt2"), CLEAN, APART, site="T", path="bridge", **QUICK), naive)


def test_a_sliding_window_is_kept() -> None:
    model = hf_model("mistral", window=3)
    grid = cp.patching.activation(loaded("mistral", window=3), CLEAN, APART, **QUICK)
    assert_equal(grid, naive_grid(model, CLEAN, APART, "S"))


def test_a_chosen_part_is_the_part_of_the_whole_also_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = by_index(cp.patching.activation(loaded(), CLEAN, APART, **QUICK), "nld")
    monkeypatch.setattr("cacheprobe.edits.patching.cells.MOST_ROWS", 12)
    part = cp.patching.activation(loaded(), CLEAN, APART, layers=[2, 0, 1], positions=[4, 1], **QUICK)
    found = by_index(part, "nld")
    assert list(found) == [(layer, position) for layer in (0, 1, 2) for position in (1, 4)]
    assert all(abs(found[index] - whole[index]) < 1e-5 for index in found)


@pytest.mark.parametrize(("site", "window"), [("S", 1), ("T", 2), ("C", 3)])
def test_tracing_is_the_naive_run_with_the_same_noise(site: str, window: int) -> None:
    subject = [2, 3]
    grid = cp.patching.causal_tracing(loaded(), CLEAN, subject, site=site, window=window, samples=2, progress=False)
    model = hf_model()
    logits, states = plain_run(model, CLEAN, [site, "pre"])
    top = int(logits.argmax())
    scale = 3.0 * float(states["pre", 0].std())
    assert grid.meta["noise_standard_deviation"] == pytest.approx(scale, rel=1e-6)
    assert grid.meta["clean_probability"] == pytest.approx(float(logits.softmax(-1)[top]), abs=1e-6)
    for sample in range(2):
        drawn = torch.Generator().manual_seed(derive_seed(0, sample) % 2**63)
        noisy = states["pre", 0][subject] + scale * torch.randn(2, 32, generator=drawn)
        drown = ("pre", 0, subject, None, noisy)
        base = float(plain_run(model, CLEAN, [], [drown])[0].softmax(-1)[top])
        rows = grid.table[grid.table["sample"] == sample]
        for row in rows.itertuples():
            low = row.layer - (window - 1) // 2
            layers = [layer for layer in range(low, low + window) if 0 <= layer < 3]
            at = [(site, layer, [row.position], None, states[site, layer][[row.position]]) for layer in layers]
            restored = plain_run(model, CLEAN, [], [drown, *at])[0]
            assert row.probability == pytest.approx(float(restored.softmax(-1)[top]), abs=1e-5)
            assert row.effect == pytest.approx(row.probability - base, abs=1e-5)
            assert row.is_top == (int(restored.argmax()) == top)
        assert rows.effect.abs().max() > 0.001
    seeds = grid.table.pivot_table(index="sample", columns=["layer", "position"], values="probability")
    assert (seeds.loc[0] != seeds.loc[1]).any()
