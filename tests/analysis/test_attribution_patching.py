"""Attribution patching: its estimates are derivatives, and what is known of them beside the real patching grid."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.edits.patching.grid import PatchingGrid
from cacheprobe.ops.statistics import cell_correlations
from cacheprobe.views.dashboard.tabs.results import figures_of
from tests.tiny import hf_model, loaded
from tests.twins.gradients_slowly import attribution_slowly, logits_slowly, states_slowly

CLEAN, CORRUPT = [5, 17, 3, 44, 9], [5, 17, 80, 44, 61]
ANSWER = (7, 11)
QUICK: dict[str, Any] = dict(answer=ANSWER, progress=False)
stats: Any = scipy.stats
FAMILIES = ("llama", "gpt2", pytest.param("gemma2", marks=pytest.mark.slow))


def apart(logits: Tensor) -> float:
    return float(logits[-1, ANSWER[0]] - logits[-1, ANSWER[1]])


def about(grid: PatchingGrid) -> dict[str, Any]:
    return dict(grid.meta)


def by_index(grid: PatchingGrid, column: str = "estimated_difference") -> dict[tuple[int, ...], float]:
    axes = [name for name in ("layer", "position", "head") if name in grid.table.columns]
    return dict(zip(grid.table[axes].itertuples(index=False, name=None), grid.table[column], strict=True))


def assert_close(found: dict[tuple[int, ...], float], slow: Any) -> None:
    """To 1e-6 of the largest: central differences of step 1e-5 in float64 are exact to about 1e-9."""
    assert found.keys() == slow.keys()
    largest = max(map(abs, slow.values()))
    assert largest > 1e-2 and max(abs(found[index] - slow[index]) for index in slow) <= 1e-6 * largest


@pytest.mark.parametrize(("family", "site"), [("llama", "pre"), ("llama", "S"), ("gpt2", "T"), ("gpt2", "C")])
def test_every_estimate_is_a_central_difference(family: str, site: str) -> None:
    grid = cp.patching.attribution(loaded(family, torch.float64), CLEAN, CORRUPT, site=site, real=False, **QUICK)
    assert_close(by_index(grid), attribution_slowly(hf_model(family, torch.float64), CLEAN, CORRUPT, site, apart))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_head_is_a_central_difference(family: str) -> None:
    model, plain = loaded(family, torch.float64), hf_model(family, torch.float64)
    grid = cp.patching.attribution(model, CLEAN, CORRUPT, site="T", heads=True, real=False, **QUICK)
    assert_close(by_index(grid), attribution_slowly(plain, CLEAN, CORRUPT, "heads", apart, heads=4))


@pytest.mark.parametrize("site", ["S", "T"])
def test_every_integrated_estimate_is_a_mean_of_central_differences(site: str) -> None:
    """At the midpoints of the steps."""
    model, plain = loaded("llama", torch.float64), hf_model("llama", torch.float64)
    grid = cp.patching.attribution(model, CLEAN, CORRUPT, site=site, steps=2, real=False, **QUICK)
    assert_close(by_index(grid), attribution_slowly(plain, CLEAN, CORRUPT, site, apart, shares=(0.25, 0.75)))


@pytest.mark.parametrize(("family", "site"), [("llama", "S"), ("gpt2", "C")])
def test_integrated_estimates_of_a_layer_sum_to_the_effect_of_all_its_positions(family: str, site: str) -> None:
    """Completeness. The midpoint rule's error falls with the square of the number of steps."""
    plain, model = hf_model(family, torch.float64), loaded(family, torch.float64)
    base = apart(logits_slowly(plain, CORRUPT, (site, 0), lambda value: value))
    real = []
    for layer in range(3):
        states = states_slowly(plain, CLEAN, (site, layer))
        real.append(apart(logits_slowly(plain, CORRUPT, (site, layer), lambda _, states=states: states)) - base)
    errors = []
    for steps in (16, 128):
        grid = cp.patching.attribution(model, CLEAN, CORRUPT, site=site, steps=steps, real=False, **QUICK)
        sums = grid.table.groupby("layer").estimated_difference.sum()
        errors.append(max(abs(a - b) for a, b in zip(sums, real, strict=True)))
        if site == "S":
            assert real[0] == pytest.approx(about(grid)["clean_logit_difference"] - base, rel=1e-9)
    assert errors[1] < 2e-3 * max(map(abs, real)) and errors[1] < errors[0] / 4


def test_many_steps_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cp.patching.attribution(loaded("llama", torch.float64), CLEAN, CORRUPT, steps=5, real=False, **QUICK)
    monkeypatch.setattr(import_module("cacheprobe.edits.patching.attribution"), "MOST_ROWS", 2 * len(CLEAN))
    parts = cp.patching.attribution(loaded("llama", torch.float64), CLEAN, CORRUPT, steps=5, real=False, **QUICK)
    assert by_index(parts) == pytest.approx(by_index(whole), rel=1e-9)


def test_where_the_rest_is_linear_the_estimate_is_the_real_patch() -> None:
    """After the last MLP only the norm is not linear. With an epsilon far above the squares of the states its scale is
    constant, to 1e-9; the answer's gap is scaled with it."""
    live = hf_model("llama", torch.float64)
    live.model.norm.variance_epsilon = 1e12
    live.lm_head.weight.data *= 1e6
    model = cp.load_model(live)
    for site in ("S", "C"):
        grid = cp.patching.attribution(model, CLEAN, CORRUPT, site=site, steps=3, path="bridge", **QUICK)
        last = grid.table[(grid.table.layer == 2) & (grid.table.position == 4)]
        real = last.logit_difference - about(grid)["corrupt_logit_difference"]
        assert abs(real.item()) > 1e-3
        assert last.estimated_difference.item() == pytest.approx(real.item(), rel=1e-6)
        others = grid.table[(grid.table.layer == 0) & (grid.table.position == 4)]
        assert others.estimated_nld.item() != pytest.approx(others.nld.item(), rel=1e-2)  # the control


def test_both_grids_and_their_correlation() -> None:
    model = loaded("gpt2", torch.float64)
    grid = cp.patching.attribution(model, CLEAN, CORRUPT, site="C", **QUICK)
    real = cp.patching.activation(model, CLEAN, CORRUPT, site="C", **QUICK)
    for column in ("token", "logit_difference", "nld", "flip", "logprob_nats"):
        assert grid.table[column].tolist() == real.table[column].tolist()
    gap = about(grid)["clean_logit_difference"] - about(grid)["corrupt_logit_difference"]
    assert (grid.table.estimated_nld * gap).tolist() == pytest.approx(grid.table.estimated_difference.tolist())
    free = grid.table.position < 2
    assert (grid.table.estimated_difference[free] == 0).all() and (grid.table.nld[free] == 0).all()
    differing = grid.table[~free]
    pearson = stats.pearsonr(differing.estimated_nld, differing.nld).statistic
    spearman = stats.spearmanr(differing.estimated_nld, differing.nld).statistic
    assert about(grid)["pearson"] == pytest.approx(pearson, rel=1e-9) and abs(pearson) < 0.9999
    assert about(grid)["spearman"] == pytest.approx(spearman, rel=1e-9)
    assert f"correlation with the real grid: Pearson {pearson:.3f}, Spearman {spearman:.3f})" in repr(grid)


def test_correlations_are_those_of_scipy_and_none_without_a_spread() -> None:
    first, second = [0.1, 0.4, 0.4, -1.0, 0.4], [2.0, 2.0, 5.0, -3.0, 0.0]
    found = cell_correlations(range(5), first, second)
    wanted = (stats.pearsonr(first, second).statistic, stats.spearmanr(first, second).statistic)
    assert found == pytest.approx(wanted, rel=1e-12)
    assert cell_correlations([9, *range(5), 9], [0, *first, 0], [0, *second, 0]) == pytest.approx(found, rel=1e-12)
    assert cell_correlations([0, 1], [1.0, 1.0], [2.0, 3.0]) == cell_correlations([0], [0.0], [0.0]) == (None, None)


def test_a_part_is_the_part_of_the_whole_and_is_stored(tmp_path: Path) -> None:
    model, steps = loaded("llama", torch.float64), 2
    whole = by_index(cp.patching.attribution(model, CLEAN, CORRUPT, steps=steps, real=False, **QUICK))
    store = tmp_path / "cells"
    part = cp.patching.attribution(
        model, CLEAN, CORRUPT, steps=steps, layers=[2, 0], positions=[4, 2], store=store, **QUICK
    )
    assert list(by_index(part)) == [(layer, position) for layer in (0, 2) for position in (2, 4)]
    assert by_index(part) == pytest.approx({index: whole[index] for index in by_index(part)}, rel=1e-9)
    assert any(store.iterdir())
    part.save(tmp_path / "grid.json")
    again = PatchingGrid.load(tmp_path / "grid.json")
    assert repr(again) == repr(part) and again.table.equals(part.table)
    assert again.matrix().shape == (2, 2) and about(again)["steps"] == steps


def test_without_the_real_grid_there_is_no_correlation() -> None:
    grid = cp.patching.attribution(loaded("llama", torch.float64), CLEAN, CORRUPT, real=False, **QUICK)
    assert "nld" not in grid.table.columns and about(grid)["pearson"] is None and "correlation" not in repr(grid)
    with pytest.raises(ValueError, match=r"no column nld; make the grid with .*real=True"):
        cp.plots.attribution_patching_grid(grid)


def test_the_dashboard_draws_both_grids(tmp_path: Path) -> None:
    grid = cp.patching.attribution(loaded("llama", torch.float64), CLEAN, CORRUPT, site="T", heads=True, **QUICK)
    grid.save(tmp_path / "grid.json")
    (figure,), note = figures_of(tmp_path / "grid.json", json.loads((tmp_path / "grid.json").read_text()))
    maps = [drawn for drawn in figure.data if drawn.type == "heatmap"]
    for drawn, column in zip(maps, ("estimated_nld", "nld"), strict=True):
        assert (abs(drawn.z - grid.matrix(column).to_numpy()) < 1e-12).all()
    assert maps[0].zmin == maps[1].zmin and maps[0].zmax == maps[1].zmax
    assert f"Pearson {about(grid)['pearson']:.2f}" in figure.layout.title.text and "correlation" in note


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(steps=-1), "steps must be a whole number of at least 0"),
        (dict(site="Z"), "unknown site 'Z'"),
        (dict(heads=True), "site S has no heads"),
        (dict(layers=[3]), "layer 3 lies outside the model"),
        (dict(positions=[]), "there is no position"),
        (dict(answer=("a",)), "answer must be two answers"),
    ],
)
def test_what_cannot_be_computed_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cp.patching.attribution(loaded("llama", torch.float64), CLEAN, CORRUPT, **{**QUICK, **options})
