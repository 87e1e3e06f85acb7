"""The lens grid: its cells are those of the table, and what it says of them."""

from html import escape
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.views.diagrams.lens_grid import LABEL_WIDTH, WIDEST, grid_of
from cacheprobe.views.style import SHADES, THEME_CSS
from tests.tiny import PROMPTS, SMALL, loaded


def parsed(picture: str, kind: str) -> list[ElementTree.Element]:
    """Elements of a class, in order."""
    drawn = ElementTree.fromstring(f"<div>{picture}</div>")
    return [one for one in drawn.iter() if kind in one.get("class", "").split()]


def drawn(readings: pd.DataFrame, **given: Any) -> str:
    """The grid of request 0 as the dashboard's page holds it."""
    return grid_of(readings, given.pop("request_id", 0), has_tips=False, **given).html


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1), deterministic=[1])


@pytest.fixture(scope="module")
def readings(trace: cp.Trace) -> pd.DataFrame:
    return trace.hypotheses(include_rolled_back=True)


def share_of_the_scale(reading: Any, colour: str, readings: pd.DataFrame) -> float:
    """Where on the scale a reading lies, 1 is darkest; NaN for a row that no committed token can be compared with."""
    if colour == "entropy":
        return 1 - reading.entropy_nats / readings.entropy_nats.max()
    if reading.status in ("rolled_back", "abandoned"):
        return np.nan
    return 1 + reading.committed_logprob_nats / 12 if colour == "logprob" else 1 - np.log10(reading.rank + 1) / 4


@pytest.mark.parametrize("include", ["committed", "all"])
@pytest.mark.parametrize("colour", ["logprob", "entropy", "rank"])
def test_cells_are_those_of_the_table(readings: pd.DataFrame, colour: str, include: str) -> None:
    first = int(readings[readings.request_id == 0].position.min())
    own = readings[(readings.request_id == 0) & readings.position.between(first + 2, first + 8)]
    own = own if include == "all" else own[own.status == "committed"]
    picture = drawn(readings, colour=colour, include=include, positions=range(first + 2, first + 9))
    lines = own.drop_duplicates("row").assign(order=lambda t: t.status.map({"committed": 0, "superseded": 1}).fillna(2))
    lines = lines.sort_values(["position", "order", "step", "row"])
    columns = parsed(picture, "column")
    for name in ("row", "position", "step"):
        assert [int(column.get(f"data-{name.replace('step', 'born')}", -1)) for column in columns] == [*lines[name]]
    tones = set()
    for column in columns:
        cells = {int(cell.get("data-layer", -1)): cell for cell in column if cell.get("data-layer")}
        held = {reading.layer: reading for reading in own[own.row == int(column.get("data-row", -1))].itertuples()}
        assert set(cells) == set(held)  # none for a layer that a drafter did not run
        for layer, reading in held.items():
            share = share_of_the_scale(reading, colour, own)
            shade = -1 if np.isnan(share) else min(int(np.clip(share, 0, 1) * SHADES), SHADES - 1)
            assert cells[layer].get("class") == f"pick v{shade}"
            assert "".join(cells[layer].itertext()) == f"<{reading.token_id}>"
            tones.add(shade)
    assert len(tones) > 3 and (-1 in tones) == (include == "all" and colour != "entropy")
    assert {f".v{i} rect" in THEME_CSS for i in range(SHADES)} == {True}


@pytest.mark.parametrize(
    ("colour", "title", "ticks"),
    [
        ("logprob", "log p of the committed token (nats)", ["≤ −12", "−9", "−6", "−3", "0"]),
        ("rank", "rank of the committed token", ["9999", "999", "99", "9", "0"]),
        ("entropy", "entropy (nats)", ["3", "1.5", "0"]),
    ],
)
def test_axes_and_scale_are_named(readings: pd.DataFrame, colour: str, title: str, ticks: list[str]) -> None:
    """Beside the columns in order: the lines' names. In the legend and in a file: the shades with their values."""
    grid = grid_of(readings, 0, colour=colour)
    (strokes,), (bar,), (legend,) = (parsed(grid.html, kind) for kind in ("readings", "shades", "legend"))
    names = ["layer", "0", "▸1", "2", "position", "read", "→ next"]
    assert [name.text for name in strokes if name.tag.endswith("text")] == names
    named = [(float(tick.get("x", -1)), tick.text) for tick in bar if tick.tag.endswith("text")]
    assert [name for _, name in sorted(named)] == ticks
    assert max(named)[0] == 10 * SHADES and min(named)[0] == (0 if colour != "entropy" else pytest.approx(46.5, abs=1))
    said = "".join(legend.itertext())
    assert title in said and "first choice = committed token" in said
    for wanted in (*ticks, title, "position", "first choice = committed token", grid.finding):
        assert f">{escape(wanted)}</text>" in grid.draw().markup


def test_a_file_shows_what_the_page_shows(readings: pd.DataFrame) -> None:
    """A file has its own rules: colours written out, for everything that is drawn."""
    grid = grid_of(readings, 0, include="all")
    file, page = (
        [[(part.tag.rpartition("}")[2], part.attrib, part.text) for part in column.iter()] for column in columns]
        for columns in (parsed(grid.draw().markup, "column"), parsed(grid.html, "column"))
    )
    assert file == page and len(page) > 20
    css = grid.draw().markup.split("<style>")[1].split("</style>")[0]
    assert "var(" not in css and "color-mix" not in css and "@media" not in css
    for rule in (
        ".v0 rect{fill:rgb(243, 240, 249)}",
        ".v-1 rect{fill:#caced2}",
        ".v19 text{fill:#ffffff}",
        ".agrees{fill:none",
    ):
        assert f".cp {rule}" in css
    narrow = grid_of(readings, 0, positions=range(int(readings[readings.request_id == 0].position.min()) + 1)).draw()
    assert narrow.width >= 480  # of which the colour scale and its name take most


def test_agreeing_cells_are_framed_and_lost_columns_marked(readings: pd.DataFrame) -> None:
    picture = drawn(readings, include="all")
    own = readings[readings.request_id == 0]
    heights = [int(frame.get("height", 0)) for frame in parsed(picture, "agrees") if frame.get("x") == "1.5"]
    assert (
        sum((height + 1) // 19 for height in heights) == own[own.status != "rolled_back"].agrees.fillna(False).sum() > 0
    )
    rows = own.drop_duplicates("row").status.value_counts()
    assert picture.count('<path class="red-stroke"') == rows["rolled_back"] + 1 > 1  # and once in the legend
    assert picture.count('<path class="yellow-stroke"') == rows["superseded"] + 1 > 1
    assert "not compared with a committed token" in picture
    assert "not compared with a committed token" not in drawn(readings, include="all", colour="entropy")
    assert "✗ fed a rejected token or one after it" in picture and "fed a rejected token" not in drawn(readings)


def test_only_cards_of_compared_rows_explain_the_green_frame(trace: cp.Trace, readings: pd.DataFrame) -> None:
    for status in ("committed", "rolled_back"):
        line = readings[(readings.status == status) & readings.committed_token_id.notna()].iloc[0]
        place = int(line.request_id), int(line.position)
        card = cp.plots.token_card(readings, trace.row_table, trace.events(), *place, row=int(line.row))
        assert ("Framed in green" in card) == (status == "committed") and "Most likely tokens by layer" in card
        assert ("This row was fed a rejected token, or one after it" in card) == (status == "rolled_back")


def test_columns_say_what_the_row_read_and_what_it_is_to_predict(trace: cp.Trace, readings: pd.DataFrame) -> None:
    columns = parsed(drawn(readings, include="all"), "column")
    about = trace.row_table.set_index("row")
    seen = set()
    for column in columns:
        row = about.loc[int(column.get("data-row", -1))]
        lines = ["".join(text.itertext()) for text in column if text.tag.endswith("text")]
        position, read, following = lines
        assert position.endswith(str(row.position)) and read == row.token and following[0] == "→"
        is_lost = row.status == "rolled_back"
        committed = readings[(readings.row == row.name)].committed_token.iloc[0]
        assert following == ("→ —" if is_lost else f"→ {committed}")
        words = (
            f"read {row.token}, a rejected token or one after it"
            if is_lost
            else f"read {row.token} → predicts {committed}"
        )
        assert column.get("data-says", "").startswith(f"{words} request 0")
        seen.add(row.status)
    assert seen == {"committed", "superseded", "rolled_back"}


def test_it_fills_its_place(readings: pd.DataFrame) -> None:
    first = int(readings[readings.request_id == 0].position.min())
    for width, pitch in ((0, 50), (LABEL_WIDTH + 4 + 60 * 8, 60), (4000, WIDEST)):
        columns = parsed(drawn(readings, positions=range(first, first + 8), width=width), "column")
        assert [int(column.get("data-x", -1)) for column in columns] == [LABEL_WIDTH + pitch * i for i in range(8)]


@pytest.mark.parametrize("colour", ["logprob", "rank"])
def test_where_nothing_was_committed(readings: pd.DataFrame, colour: str) -> None:
    own = readings[(readings.request_id == 0) & (readings.status != "rolled_back")].copy()
    last = own.position == own.position.max()
    own.loc[last, ["committed_token_id", "committed_token", "rank", "agrees"]] = pd.NA
    column = parsed(drawn(own, colour=colour, include="all"), "column")[-1]
    cells = [cell for cell in column if cell.get("data-layer")]
    assert cells and all(cell.get("class") == "pick v-1" for cell in cells)
    assert all("nothing was committed there" in cell.get("data-says", "") for cell in cells)
    assert "".join(column.itertext()).endswith("→ —")
