"""The table of Thinking States: what is stored is printed at once, and only what is asked for is trained."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cacheprobe.training.loop import LoopSettings
from cacheprobe.training.thinking.presets import PRESETS, preset_of
from cacheprobe_analyses.thinking import thinking_states_table as table
from cacheprobe_analyses.thinking.accuracy_tables import Result
from tests.training.test_thinking_training import SMALL


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    sys.argv = ["thinking_states_table", *arguments]
    table.main()
    return capsys.readouterr().out


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> table.Config:
    """Two lines of models that are trained in a second; the first of two seeds."""
    coin = preset_of("coin-flip", "tiny")
    loop = LoopSettings(steps=3, batch=4)
    monkeypatch.setitem(
        PRESETS["coin-flip"], "quick", replace(coin, operations=(1, 2), pool=40, model=SMALL, loop=loop, arms={})
    )
    rows = tuple(
        table.Row("coin-flip", arm, (2,), preset="quick", num_seeds=seeds)
        for arm, seeds in (("plain", 1), ("thinking", 2))
    )
    return table.Config(tmp_path / "models", 4, rows, tmp_path / "cells.json")


def test_what_is_stored_is_printed_and_nothing_is_trained(capsys, monkeypatch) -> None:
    for name in ("trained_arm", "train_thinking"):
        monkeypatch.setattr(table, name, None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    out = printed(capsys)
    assert "| coin-flip | Thinking States | `attention-crowding` | 98.37 |" in out
    lines = [line for line in out.splitlines() if line.startswith("| s3 tiny")]
    assert len(lines) == 3 and printed(capsys, "--only", "s3 tiny").count("| s3 tiny") == 3
    monkeypatch.setattr(table, "AGAIN", Path("nowhere.json"))
    with pytest.raises(SystemExit):
        printed(capsys, "--again")
    assert "nowhere.json holds none of these lines; --fill finds them" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        printed(capsys, "--only", "no such line")


def test_what_lacks_is_filled_once_and_in_the_order_of_lines(quick: table.Config) -> None:
    assert not table.stored(quick).cells and len(table.lacking(quick)) == 3
    (plain, thinking) = quick.rows
    table.run(replace(quick, rows=(thinking,)))
    assert [(row.arm, seed) for row, seed in table.lacking(quick)] == [("plain", 0)]
    assert [(row.arm, seed) for row, seed in table.lacking(replace(quick, texts=5))] == [
        ("plain", 0),
        ("thinking", 0),
        ("thinking", 1),
    ]
    result = table.run(quick)
    assert list(result.cells) == [plain.name, thinking.name] and table.lacking(quick) == []
    assert [cell["seed"] for cell in result.cells[thinking.name]] == [0, 1]
    assert "coin-flip quick plain seed 0" in result.models


def cell(seed: int, right: int) -> dict[str, int]:
    return dict(seed=seed, texts=200, right=right, thoughts_right=right, unparsed=0)


def test_the_main_table_has_the_mean_and_the_worst_of_seeds_and_flip_probabilities() -> None:
    cells = {
        "coin-flip attention-crowding thinking: 256 operations, flip_probability 0.1": [cell(s, 200) for s in range(3)],
        "coin-flip attention-crowding thinking: 256 operations, flip_probability 0.9": [
            cell(s, r) for s, r in enumerate((200, 150, 190))
        ],
        "coin-flip attention-crowding thinking: 2560 operations": [cell(0, 0)],
        "variables tiny plain: [10, 100] operations": [cell(0, 20)],
    }
    result = Result(cells, {})
    lines = result.main_table().splitlines()
    assert "| coin-flip | Thinking States | `attention-crowding` | 98.37 |  |  |  | 95.00 (75.0) |  |" in lines
    assert "| variables | no chain of thought | `tiny` | 2.15 |  |  | 10.00 (10.0) * |  |  |" in lines
    assert "| variables tiny plain: [10, 100] operations | 1 | 10.00 | 10.00 | 6.6 to 14.9 | - | 0 |" in result.table()
