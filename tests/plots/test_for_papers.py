"""Figures for papers: zero is neutral, a label belongs to one token, axes have units, what holds by construction is
marked, each figure is a file, and a table of another kind is refused with what was expected."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import plotly.graph_objects as go
import pytest
from plotly.colors import sample_colorscale, unlabel_rgb

import cacheprobe as cp
from cacheprobe import views as plots
from cacheprobe.trace.tables.draft_verdicts import drafter_layers
from cacheprobe.views.given import TABLES_OF
from tests.core.test_images import png_size
from tests.plots import test_figure_contract as figures
from tests.plots import test_picture_contract as pictures
from tests.tiny import PROMPTS, SMALL, loaded


def colour_at(heat_map: go.Heatmap, value: float) -> tuple[int, ...]:
    """(red, green, blue) of a number in a heat map, worked out by plotly from its own settings."""
    share = (value - heat_map.zmin) / (heat_map.zmax - heat_map.zmin)
    scale = [list(step) for step in heat_map.colorscale]
    return tuple(round(part) for part in unlabel_rgb(sample_colorscale(scale, [share])[0]))


def grid(**columns: float) -> pd.DataFrame:
    """A patching grid of one layer, with a value at each of three positions."""
    return pd.DataFrame(
        [dict(layer=0, position=p, token="the", nld=nld) for p, nld in enumerate((-0.2, 0.0, 0.8))]
    ).assign(**columns)


HEAT_MAPS: dict[str, Callable[[], go.Figure]] = {
    "patching_grid": lambda: plots.patching_grid(grid()),
    "attribution_patching_grid": lambda: plots.attribution_patching_grid(grid(estimated_nld=0.5)),
    "flip_grid": lambda: plots.flip_grid(figures.edited().assign(change_nats=[-0.3, 1.5, 1.2])),
    "attribution": lambda: plots.attribution(
        cp.analysis.attribution(cp.run(loaded(), PROMPTS[:1], **SMALL, capture=ALL_HEADS), 0, 7)
    ),
    "state_algorithm_figure": lambda: plots.state_algorithm_figure(*figures.algorithm()),
}
ALL_HEADS = cp.CaptureConfig("STC", heads=("z",))


@pytest.mark.parametrize("name", HEAT_MAPS)
def test_zero_is_neutral(name: str) -> None:
    """Zero was a violet of the sequential scale wherever a patch made the answer worse."""
    maps = [one for one in HEAT_MAPS[name]().data if one.type == "heatmap"]
    assert maps
    for one in maps:
        red, green, blue = colour_at(one, 0.0)
        assert red == green == blue > 240, (red, green, blue)
        numbers = [value for line in one.z for value in line if value == value]
        assert one.zmin <= min(numbers) and max(numbers) <= one.zmax
        limit = max(-one.zmin, one.zmax)
        for value in (one.zmin, one.zmax):  # equally far from zero, equally strong
            strongest = colour_at(one, limit if limit == one.zmax else -limit)
            assert (colour_at(one, value) == strongest) == (abs(value) == limit)


def test_opposite_numbers_have_other_colours() -> None:
    (one,) = plots.patching_grid(grid()).data
    (red, _, blue), (other_red, _, other_blue) = colour_at(one, -0.2), colour_at(one, 0.2)
    assert red > blue and other_red < other_blue and (one.zmin, one.zmax) == (-0.2, 0.8)
    assert sum(colour_at(one, -0.2)) > sum(colour_at(one, 0.8))  # a quarter as far, so paler


def test_the_same_token_twice_has_two_places() -> None:
    """plotly's category axis would draw both in one column."""
    figure = plots.patching_grid(grid())
    (one,) = figure.data
    assert list(one.x) == [0, 1, 2] and list(figure.layout.xaxis.ticktext) == ["0<br>the", "1<br>the", "2<br>the"]
    table = figures.routed().assign(token=" a")
    routing = plots.routing_figure(table)
    assert [len(line) for line in routing.data[0].z] == [2] * len(routing.data[0].z)


UNITS = {"attribution": "(logits)", "forcing_figure": "(nats)", "carried_figure": "(0 as it was, 1 the other's)"}


@pytest.mark.parametrize("name", UNITS)
def test_axes_have_units(name: str) -> None:
    figure, _ = figures.made(name)
    titles = [axis.title.text or "" for axis in figure.select_yaxes()]
    assert any(UNITS[name] in title for title in titles), titles
    change = figures.made("flip_grid")[0].data[0].colorbar.title.text
    assert change == "change<br>(nats)"
    table = pd.DataFrame(dict(layer=[0, 1], margin_nats=[0.5, 1.0]))
    assert plots.column_figure(table, "margin_nats").layout.yaxis.title.text == "margin (nats)"


@pytest.fixture(scope="module")
def drafted() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1))


def test_what_holds_by_construction_is_marked(drafted: cp.Trace) -> None:
    """At the layer where it is drafted, each draft token is first; at the last layer, each committed one."""
    readings = drafted.hypotheses()
    rows = drafted.rows().set_index("row")
    at_one = readings[(readings.layer == 1) & (readings.phase == "decode") & readings.drafted_token_id.notna()]
    assert (rows.num_layers[at_one.row] == 2).all() and (at_one.token_id == at_one.drafted_token_id).all()
    assert drafter_layers(readings) == [1]
    marks = {line.name: (list(line.x), line.line.dash) for line in plots.draft_verdicts(readings).data[-2:]}
    assert marks == {
        "drafter's layer: the draft token is first by construction": ([1, 1], "dot"),
        "last layer: the committed token is first by construction": ([2, 2], "dashdot"),
    }
    depths = plots.prediction_depth_figure(cp.analysis.prediction_depth(drafted)).layout
    assert [(line.x0, note.text) for line, note in zip(depths.shapes, depths.annotations, strict=True)] == [
        (1, "layer 1, where draft passes end")
    ]
    grid = plots.lens_grid(readings, 0)
    assert ">▸1</text>" in grid and "▸ The drafter’s layer: the draft token is first" in grid.note
    assert "▸ The drafter’s layer" in (grid.drawing() or pytest.fail("no drawing")).markup


def test_nothing_is_marked_where_drafts_run_every_layer() -> None:
    whole = cp.run(loaded(), PROMPTS[:2], **SMALL, drafter=cp.drafters.NGram())
    assert drafter_layers(whole.hypotheses()) == []
    assert not any("drafter's" in str(line.name) for line in plots.draft_verdicts(whole.hypotheses()).data)
    assert "▸" not in plots.lens_grid(whole.hypotheses(), 0)


def test_the_last_layer_agrees_with_itself_by_construction() -> None:
    table = figures.by_layer(kind="answer", chance=0.1, rows=9)
    assert len(plots.final_choice_figure(table).data) == 2
    whole = plots.final_choice_figure(table.assign(share=[0.3, 1.0], low=[0.2, 1.0], high=[0.4, 1.0]))
    assert whole.data[-1].name == "last layer: 100 % by construction" and list(whole.data[-1].x) == [1, 1]


def test_an_early_exits_states_are_the_verifiers_by_construction() -> None:
    moved = figures.edited().assign(edit="drafter", layer=[0, 1, 2], from_layer=[0, 1, 1])
    line = plots.flip_grid(moved).data[-1]
    assert line.name == "drafter's last layer: up to it, no change by construction" and set(line.y) == {1.5}


# -- files


@pytest.mark.parametrize("name", ["lens_grid", "timeline", "window_diagram", "token_card"])
def test_a_diagram_is_a_file_of_each_kind(name: str, tmp_path: Path) -> None:
    args, beside = pictures.SAMPLES[name](pictures.drafted(), pictures.thinking())[0]
    picture = pictures.PICTURES[name](*args, **beside)
    page = picture.write_html(tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and str(picture) in page and 'charset="utf-8"' in page
    png = picture.write_image(tmp_path / "picture.png").read_bytes()
    assert min(png_size(png)) > 300
    pdf = picture.write_image(str(tmp_path / "paper"), "pdf").read_bytes()
    assert pdf.startswith(b"%PDF-") and b"/Font" in pdf and pdf.count(b"/Type /Page\n") == 1
    if name == "token_card":
        with pytest.raises(ValueError, match=r"is HTML, and no SVG; write \.png, \.pdf"):
            picture.write_image(tmp_path / "picture.svg")
    else:
        drawn = ElementTree.fromstring(picture.write_image(tmp_path / "picture.svg").read_text(encoding="utf-8"))
        assert "".join(drawn.itertext()).count(picture.finding.split()[0]) >= 1
        assert "fill:none" in re.sub(r"\s", "", ElementTree.tostring(drawn, "unicode"))
    with pytest.raises(ValueError, match="unknown format 'gif' of a picture; choose one of png, svg, pdf"):
        picture.write_image(tmp_path / "picture.gif")
    table = next(iter(picture.data.values()))
    assert isinstance(table, pd.DataFrame) and any(table is one for one in (*args, *beside.values()))


def test_a_plotly_figure_is_a_file_on_white(tmp_path: Path) -> None:
    figure, _ = figures.made("prediction_depth_figure")
    assert png_size(figure.write_image(tmp_path / "depth.png").read_bytes())[0] == 1800
    drawn = figure.write_image(tmp_path / "depth", "svg", width=500).read_text(encoding="utf-8")
    assert 'width="500"' in drawn and "rgb(255, 255, 255)" in drawn
    lines = re.findall(r'class="gtitle".*?</text>', drawn, re.DOTALL)[0].count("<tspan")
    assert lines >= 2  # a title that was longer than the figure was cut off
    figure.write_html(tmp_path / "depth.html")
    assert figure.data[0].x == tuple(figures.made("prediction_depth_figure")[0].data[0].x)


def test_every_figure_has_the_three(drafted: cp.Trace) -> None:
    for name in {*figures.FIGURES, *pictures.PICTURES} & {*figures.SAMPLES, *pictures.SAMPLES}:
        made = figures.made(name)[0] if name in figures.SAMPLES else pictures.drawn(name)
        assert callable(made.write_html) and callable(made.write_image) and made.data


# -- tables


def test_plots_lists_figures_alone() -> None:
    beside = {"Markup", "write_figures", "write_report"}
    assert {*plots.__all__} == {*figures.FIGURES, *pictures.PICTURES, *beside}
    for name in ("find_windows", "accepted_whole", "rolled_back", "Window"):
        assert hasattr(cp.analysis, name) and not hasattr(plots, name)


def test_every_figure_says_which_table_it_draws() -> None:
    assert {*TABLES_OF} == {*figures.FIGURES, *pictures.PICTURES} - {"run_overview"}
    for name, drawn in TABLES_OF.items():
        assert {*drawn} <= {*inspect.signature(getattr(plots, name)).parameters}, name


@pytest.mark.parametrize("name", sorted({*figures.SAMPLES} - {"column_figure"}))
def test_another_table_is_refused_with_what_was_expected(name: str, drafted: cp.Trace) -> None:
    _, _, beside = figures.SAMPLES[name]()
    argument, wanted = next(iter(TABLES_OF[name].items()))
    given = drafted.ledger(0)
    with pytest.raises(ValueError, match=re.escape(f"{name}: {argument} has no column")) as raised:
        getattr(plots, name)(given, **beside)
    assert str(raised.value).endswith(f"(it is trace.ledger(request_id, step)); give {wanted.code}")
    with pytest.raises(TypeError, match=re.escape(f"must be a table, got a Trace; give {wanted.code}")):
        getattr(plots, name)(drafted, **beside)


def test_rows_where_readings_are_needed(drafted: cp.Trace) -> None:
    for draw in (plots.draft_verdicts, lambda table: plots.lens_grid(table, 0)):
        with pytest.raises(ValueError, match=r"\(it is trace\.rows\(\)\); give trace\.hypotheses\(\)"):
            draw(drafted.rows())
    with pytest.raises(ValueError, match=r"timeline: events .*\(it is trace\.hypotheses\(\)\); give trace\.events\(\)"):
        plots.timeline(drafted.hypotheses())
    with pytest.raises(TypeError, match=r"must be a table, got a list; give any table"):
        plots.column_figure([1, 2], "share")
    with pytest.raises(TypeError, match=r"comparison: rows must be a table, got a Trace; give trace\.rows\(\)"):
        plots.comparison((drafted, drafted), (drafted.events(), drafted.events()))
