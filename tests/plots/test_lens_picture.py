"""The lens grid without plotly: its cells are those of the figure, and what it says of them."""

from html import escape
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.plots.diagrams.lens_picture import readings_picture
from cacheprobe.plots.style import SHADES, THEME_CSS
from tests.plots.test_views import HOSTILE
from tests.tiny import PROMPTS, SMALL, loaded


def parsed(picture: str, kind: str) -> list[ElementTree.Element]:
    """Elements of a class, in order."""
    drawn = ElementTree.fromstring(f"<div>{picture}</div>")
    return [one for one in drawn.iter() if kind in one.get("class", "").split()]


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1), deterministic=[1])


@pytest.fixture(scope="module")
def readings(trace: cp.Trace) -> pd.DataFrame:
    return trace.hypotheses(include_rolled_back=True)


@pytest.mark.parametrize("include", ["committed", "all"])
@pytest.mark.parametrize("colour", ["logprob", "entropy", "rank"])
def test_cells_are_those_of_the_figure(readings: pd.DataFrame, colour: str, include: str) -> None:
    first = int(readings[readings.request_id == 0].position.min())
    positions = range(first + 2, first + 9)
    given = dict(colour=colour, include=include, positions=positions)
    figure, picture = cp.plots.lens_grid(readings, 0, **given), readings_picture(readings, 0, **given)
    heat, meta, columns = figure.data[0], figure.layout.meta, parsed(picture, "column")
    for name, wanted in (("data-row", meta["rows"]), ("data-position", meta["positions"])):
        assert [int(column.get(name, -1)) for column in columns] == wanted
    steps = readings.drop_duplicates("row").set_index("row").step
    assert [int(column.get("data-born", -1)) for column in columns] == steps[meta["rows"]].tolist()
    grey = [trace.text for trace in figure.data[1:] if trace.type == "heatmap"]
    texts = np.where(heat.text == "", grey[0], heat.text) if grey else heat.text
    share = (heat.z - heat.zmin) / (heat.zmax - heat.zmin)
    share = 1 - share if heat.reversescale else share
    for i, column in enumerate(columns):
        cells = {int(cell.get("data-layer", -1)): cell for cell in column if cell.get("data-layer")}
        for place, layer in enumerate(meta["layers"]):
            if texts[place][i] == "":
                assert layer not in cells
                continue
            value = share[place][i]
            shade = -1 if np.isnan(value) else min(int(np.clip(value, 0, 1) * SHADES), SHADES - 1)
            assert cells[layer].get("class") == f"pick v{shade}"
            assert escape("".join(cells[layer].itertext())) == texts[place][i]
    assert {f".v{i} rect" in THEME_CSS for i in range(SHADES)} == {True}


def test_agreeing_cells_are_framed_and_lost_columns_marked(readings: pd.DataFrame) -> None:
    picture = readings_picture(readings, 0, include="all")
    own = readings[readings.request_id == 0]
    heights = [int(frame.get("height", 0)) for frame in parsed(picture, "agrees") if frame.get("x") == "1.5"]
    assert (
        sum((height + 1) // 19 for height in heights) == own[own.status != "rolled_back"].agrees.fillna(False).sum() > 0
    )
    rows = own.drop_duplicates("row").status.value_counts()
    assert picture.count('<path class="red-stroke"') == rows["rolled_back"] > 0
    assert picture.count('<path class="yellow-stroke"') == rows["superseded"] > 0
    assert "✗ fed a rejected token" in picture and "fed a rejected token" not in readings_picture(readings, 0)


@pytest.mark.parametrize("colour", ["logprob", "entropy", "rank"])
def test_rows_fed_a_rejected_token_are_not_coloured_by_a_committed_one(readings: pd.DataFrame, colour: str) -> None:
    """They follow another text than the committed one. Their own entropy says something of them, and is shown."""
    own = readings[(readings.request_id == 0) & readings.committed_token_id.notna()]
    lost = set(own[own.status == "rolled_back"].row)
    columns = parsed(picture := readings_picture(own, 0, include="all", colour=colour), "column")
    for column in columns:
        is_grey = {cell.get("class") == "pick v-1" for cell in column if cell.get("data-layer")}
        assert is_grey == {int(column.get("data-row", -1)) in lost and colour != "entropy"}
    figure = cp.plots.lens_grid(own, 0, include="all", colour=colour)
    where = [place for place, row in enumerate(figure.layout.meta["rows"]) if row in lost]
    uncoloured = pd.isna(figure.data[0].z[:, where])
    assert uncoloured.all() if colour != "entropy" else not uncoloured.all()
    shown = [trace.name for trace in figure.data if trace.showlegend is not False]
    for legend in (picture, " ".join(name for name in shown if name)):
        assert ("not compared with a committed token" in legend) == (colour != "entropy")


def test_columns_say_what_the_row_read_and_what_it_is_to_predict(trace: cp.Trace, readings: pd.DataFrame) -> None:
    figure = cp.plots.lens_grid(readings, 0, include="all")
    columns = parsed(readings_picture(readings, 0, include="all"), "column")
    about = trace.row_table.set_index("row")
    seen = set()
    for column, tick in zip(columns, figure.layout.xaxis.ticktext, strict=True):
        row = about.loc[int(column.get("data-row", -1))]
        lines = ["".join(text.itertext()) for text in column if text.tag.endswith("text")]
        assert [escape(line) for line in lines] == tick.split("<br>")
        position, read, following = lines
        assert position.endswith(str(row.position)) and read == row.token and following[0] == "→"
        is_lost = row.status == "rolled_back"
        committed = readings[(readings.row == row.name)].committed_token.iloc[0]
        assert following == ("→ —" if is_lost else f"→ {committed}")
        words = f"read {row.token}, a rejected token" if is_lost else f"read {row.token} → predicts {committed}"
        assert column.get("data-says", "").startswith(f"{words} request 0")
        seen.add(row.status)
    assert seen == {"committed", "superseded", "rolled_back"}


def test_it_fills_its_place(readings: pd.DataFrame) -> None:
    first = int(readings[readings.request_id == 0].position.min())
    for width, pitch in ((0, 50), (34 + 60 * 8, 60), (4000, 76)):
        columns = parsed(readings_picture(readings, 0, positions=range(first, first + 8), width=width), "column")
        assert [int(column.get("data-x", -1)) for column in columns] == [30 + pitch * i for i in range(8)]


def test_a_token_cannot_mark_up_the_picture(readings: pd.DataFrame) -> None:
    readings = readings.assign(token=HOSTILE, committed_token=HOSTILE, read_token=HOSTILE, role='"><script>')
    picture = readings_picture(readings, 0, include="all")
    assert "<script" not in picture and "window.hacked" in picture
    last = readings.position == readings.position.max()
    readings.loc[last, ["committed_token_id", "committed_token", "rank", "agrees"]] = pd.NA
    assert "nothing was committed there" in readings_picture(
        readings, int(readings[last].request_id.iloc[0]), include="all"
    )
