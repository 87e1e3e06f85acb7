"""What is kept of a patching grid, what is drawn of it, and what is refused."""

import json
from pathlib import Path

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.edits.patching import sweep
from cacheprobe.edits.patching.grid import PatchingGrid
from tests.tiny import loaded

CLEAN, CORRUPT = [5, 17, 3, 44, 9], [5, 17, 80, 44, 61]
QUICK = dict(answer=(7, 11), progress=False)


def made(**settings) -> PatchingGrid:
    return cp.patching.activation(loaded(), CLEAN, CORRUPT, **{**QUICK, **settings})


def run_counted(monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> list[str]:
    """Names of the groups that are run from here on; the one after `stop_after` is interrupted."""
    ran: list[str] = []
    real = sweep._run_group

    def counted(model, group, *given):
        if len(ran) == stop_after:
            raise KeyboardInterrupt
        ran.append(group.name)
        return real(model, group, *given)

    monkeypatch.setattr(sweep, "_run_group", counted)
    return ran


@pytest.mark.parametrize("kind", ["activation", "prefix", "causal_tracing"])
def test_an_interrupted_grid_goes_on_where_it_was(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(**more) -> PatchingGrid:
        if kind == "causal_tracing":
            return cp.patching.causal_tracing(loaded(), CLEAN, [1, 2], samples=1, progress=False, **more)
        return getattr(cp.patching, kind)(loaded(), CLEAN, CORRUPT, **QUICK, **more)

    whole = make()
    with monkeypatch.context() as patch:
        first = run_counted(patch, stop_after=2)
        with pytest.raises(KeyboardInterrupt):
            make(store=tmp_path / "cells")
    with monkeypatch.context() as patch:
        rest = run_counted(patch)
        resumed = make(store=tmp_path / "cells")
    assert len(first) == 2 and len(rest) == 3 and not set(first) & set(rest)
    pd.testing.assert_frame_equal(resumed.table, whole.table, check_exact=True)
    assert not list((tmp_path / "cells").glob("*.tmp"))
    with monkeypatch.context() as patch:
        assert run_counted(patch) == [] and make(store=tmp_path / "cells").table.equals(whole.table)


def test_cells_of_another_grid_are_refused(tmp_path: Path) -> None:
    made(store=tmp_path)
    with pytest.raises(ValueError, match="holds the cells of another grid: site is 'S' there and 'C' here"):
        made(store=tmp_path, site="C")
    with pytest.raises(ValueError, match="another grid: fingerprint"):
        cp.patching.activation(loaded("qwen2"), CLEAN, CORRUPT, store=tmp_path, **QUICK)
    (tmp_path / "cells-3.json").write_text("[[1.0, 2.0, 3")
    with pytest.raises(ValueError, match=r"cells-3.json is no file of a grid.*remove it"):
        made(store=tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match="is not empty and holds no cells"):
        made(store=other)


def test_a_grid_is_kept_with_every_digit(tmp_path: Path) -> None:
    grid = made(site="T", heads=True)
    grid.save(tmp_path / "grid.json")
    again = PatchingGrid.load(tmp_path / "grid.json")
    pd.testing.assert_frame_equal(again.table, grid.table, check_exact=True)
    assert again.meta == grid.meta and repr(again) == repr(grid)
    assert "3 layers x 5 positions x 4 heads" in repr(grid)
    stored = json.loads((tmp_path / "grid.json").read_text())
    for wrong, said in (
        ({"format": "x"}, "format 'x'"),
        ({**stored, "meta": {}}, "KeyError"),
        ({**stored, "table": {"layer": [1]}}, "KeyError"),
    ):
        (tmp_path / "other.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=f"is no patching grid.*{said}"):
            PatchingGrid.load(tmp_path / "other.json")


def test_a_matrix_is_the_mean_over_heads() -> None:
    grid = made(site="T", heads=True)
    expected = grid.table[(grid.table.layer == 1) & (grid.table.position == 2)].nld.mean()
    assert grid.matrix().loc[1, 2] == pytest.approx(expected) and grid.matrix().shape == (3, 5)
    with pytest.raises(ValueError, match="unknown column 'NLD'"):
        grid.matrix("NLD")


def test_the_picture_has_every_cell_and_marks_the_flips() -> None:
    grid = cp.patching.activation(loaded(), CLEAN, [6, 18, *CORRUPT[2:]], progress=False)
    figure = cp.plots.patching_grid(grid)
    heat, marks = figure.data
    assert heat.z.tolist() == grid.matrix().to_numpy().tolist()
    flipped = grid.table[grid.table.flip]
    assert len(flipped) and sorted(zip(marks.y, marks.x, strict=True)) == sorted(
        zip(flipped.layer, flipped.position, strict=True)
    )
    best = grid.table.loc[grid.table.nld.idxmax()]
    assert f"layer {best.layer}, position {best.position}" in figure.layout.title.text
    heads = made(site="T", heads=True)
    one = cp.plots.patching_grid(heads, head=3).data[0].z
    assert one[1, 2] == heads.table.set_index(["layer", "position", "head"]).nld[1, 2, 3]
    for wrong, message in ((dict(head=4), "no head 4"), (dict(value="token"), "unknown column 'token'")):
        with pytest.raises(ValueError, match=message):
            cp.plots.patching_grid(heads, **wrong)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: cp.patching.activation(loaded(), CLEAN, CORRUPT[:4]), "have 5 and 4 tokens.*one length"),
        (lambda: cp.patching.prefix(loaded(), CLEAN, CLEAN), "are the same, so nothing would be patched"),
        (lambda: cp.patching.activation(loaded(), [], CORRUPT), "the clean prompt is empty"),
        (lambda: cp.patching.activation(loaded(), CLEAN, [1, 2, 97, 3, 4]), "corrupted prompt: token id 97 is outside"),
        (lambda: cp.patching.activation(loaded("gpt2"), [1] * 129, [2] * 129), "129 tokens exceed.*context of 128"),
        (lambda: made(site="Q"), "unknown site 'Q'; choose one of pre, S, T, C"),
        (lambda: cp.patching.prefix(loaded(), CLEAN, CORRUPT, site="T"), "unknown site 'T'.*pre, S"),
        (lambda: made(heads=True), "site S has no heads"),
        (lambda: made(layers=[0, 3]), "layer 3 lies outside the model, which has layers 0 to 2"),
        (lambda: made(positions=[5]), "position 5 lies outside the prompt, which has positions 0 to 4"),
        (lambda: made(positions=[-1]), "position -1 lies outside"),
        (lambda: made(layers=[]), "there is no layer"),
        (lambda: made(answer=(7,)), "answer must be two answers"),
        (lambda: made(answer=(7, 97)), "answer: give text, or token ids below 97"),
        (lambda: made(answer=(7, 7)), "NLD has no scale"),
        (lambda: cp.patching.causal_tracing(loaded(), CLEAN, [5]), "position 5 lies outside the prompt"),
        (lambda: cp.patching.causal_tracing(loaded(), CLEAN, [1], samples=0), "at least one layer and one sample"),
        (lambda: cp.patching.causal_tracing(loaded(), CLEAN, [1], noise=0.0), "noise above zero"),
        (
            lambda: cp.patching.activation(cp.load_model("coinflip-thinking"), CLEAN, CORRUPT),
            "more than keys and values",
        ),
    ],
)
def test_bad_input_is_refused_by_name(ask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask()
