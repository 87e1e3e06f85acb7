"""The commands that look: what they say is what the run holds, and nothing in a run can act on the terminal."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.cli import look as cli_look
from cacheprobe.core import export, terminal
from cacheprobe.core.export import write_table
from cacheprobe.core.terminal import Listing
from cacheprobe.views.rejected import rejections_listing
from cacheprobe.views.report.listings import request_listings, run_listings
from tests.tiny import PROMPTS, SMALL, loaded


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1), deterministic=[1])


@pytest.fixture(scope="module")
def stored(trace: cp.Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trace.save(tmp_path_factory.mktemp("run"))


def named(listings: list[Listing]) -> dict[str, Listing]:
    return {listing.title: listing for listing in listings}


def test_show_says_what_the_run_has_none_of(trace: cp.Trace, stored: Path) -> None:
    bare = cp.run(loaded(), PROMPTS[:1], **SMALL, capture="S")
    assert "read no lens" in named(run_listings(bare))["first choice = committed token, by layer"].note
    assert named(run_listings(bare))["verdicts"].note == "nothing was drafted"
    detail = named(request_listings(bare, 0))
    assert detail["windows"].note == "it was never verified" and not detail["windows"].rows
    assert rejections_listing(bare).note == "no draft was rejected"
    [of_one] = {line[0] for line in rejections_listing(trace, int(trace.rejected().request_id[0])).rows}
    assert of_one == str(trace.rejected().request_id[0])
    with pytest.raises(KeyError, match="no request 99"):
        rejections_listing(trace, 99)
    with pytest.raises(KeyError, match="no request 9"):
        cli_look.show(stored, request=9)


def test_thoughts_are_shown() -> None:
    thinker = cp.load_model("coinflip-thinking")
    asked = cp.tasks.CoinFlip(people=2).examples(n=1, seed=3)
    run = cp.run(thinker, asked, window=4, deterministic=True, capacity=128, max_new_tokens=2, progress=False)
    rows = named(request_listings(run, 0))["thoughts"].rows
    committed = run.thoughts().query("status == 'committed'")
    assert len(rows) == len(run.thoughts()) and sum(row[-1] == "committed" for row in rows) == len(committed)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_run_cannot_act_on_the_terminal(trace: cp.Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control characters would clear the screen or hide lines, and rich reads [red] as a colour."""
    attack = "\x1b[2Jhidden[bold red]\r\nnext"
    bad = replace(
        trace,
        texts=dict.fromkeys(trace.texts, attack),
        requests=tuple(replace(r, prompt=attack) for r in trace.requests),
        meta={**trace.meta, "weights_note": attack, "drafter": attack, "errors": {"0": attack}},
        row_table=trace.row_table.assign(token=attack),
    )
    listings = [*run_listings(bad), *request_listings(bad, 0)]
    cells = [cell for listing in listings for row in listing.rows for cell in row]
    assert sum("<U+001B>[2J" in cell for cell in cells) > 5
    assert not any(sign in cell for cell in cells for sign in "\x1b\r\n")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "300")
    terminal.show([Listing("[red]title", ("[red]name",), [("[red]cell",)], "[red]note")])
    assert [screen.getvalue().count(f"[red]{word}") for word in ("title", "name", "cell", "note")] == [1, 1, 1, 1]


def test_tables_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listing = Listing("requests", ("request", "text"), [("0", "heads"), ("12", "t")], "two")
    terminal.show([listing, Listing("none", ("a",), [], "there is none")])
    plain = capsys.readouterr().out
    assert plain == "requests\n  request  text\n  0        heads\n  12       t\n  two\n\nnone\n  there is none\n\n"
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    terminal.show([listing])
    assert "┃" in screen.getvalue() and "heads" in screen.getvalue()


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_hypotheses_are_written_as_they_are(trace: cp.Trace, stored: Path, tmp_path: Path, ending: str) -> None:
    out = tmp_path / "new" / f"readings{ending}"
    cli_look.hypotheses(stored, out=out, request=(1, 3), layer=(0, 2), status=("rolled_back",))
    ours = trace.hypotheses(include_rolled_back=True).query(
        "request_id in (1, 3) and layer in (0, 2) and status == 'rolled_back'"
    )
    theirs = pd.read_csv(out) if ending == ".csv" else pd.read_parquet(out)
    assert len(theirs) == len(ours) > 0 and list(theirs.columns) == list(ours.columns)
    for column in ("row", "layer", "token_id", "logprob_nats"):
        assert theirs[column].tolist() == pytest.approx(ours[column].tolist(), rel=1e-6)
    first = json.loads(theirs.top_token_ids[0]) if ending == ".csv" else list(theirs.top_token_ids[0])
    assert first == list(ours.top_token_ids.iloc[0])
    cli_look.hypotheses(stored, out=out)
    whole = pd.read_csv(out) if ending == ".csv" else pd.read_parquet(out)
    assert len(whole) == len(trace.hypotheses()) and [p.name for p in out.parent.iterdir()] == [out.name]


def test_thoughts_among_the_readings_are_written(tmp_path: Path) -> None:
    """They name their own words, and no five first tokens: a null in a column of lists."""
    model = cp.load_model("coinflip-thinking", progress=False)
    example = cp.tasks.CoinFlip(people=2).example(0)
    run = cp.run(model, example, max_new_tokens=2, window=4, capacity=96, capture="Z", progress=False)
    cli_look.hypotheses(run.save(tmp_path / "run"), out=tmp_path / "x.csv")
    written = pd.read_csv(tmp_path / "x.csv")
    thoughts = written[written.site == "thought"]
    assert (
        len(thoughts)
        and thoughts.top_token_ids.isna().all()
        and written[written.site == "S"].top_token_ids.notna().all()
    )


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (dict(out="x.txt"), r"x.txt ends in .txt; a table is written as .csv or .parquet"),
        (dict(request=(9,)), "no reading of request 9; this run has 0, 1, 2, 3, 4"),
        (dict(site=("T",)), "no reading of site 'T'; this run has S"),
        (dict(status=("superseded",), layer=(2,)), "no reading fits layer 2, status superseded all at once"),
    ],
)
def test_hypotheses_that_cannot_be_written_are_refused(
    stored: Path, tmp_path: Path, wanted: dict, message: str
) -> None:
    out = tmp_path / wanted.pop("out", "x.csv")
    with pytest.raises(ValueError, match=message):
        cli_look.hypotheses(stored, out=out, **wanted)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_table(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "readings.csv"
    out.write_text("old")

    def full(table: pd.DataFrame, path: Path) -> None:
        path.write_text("half")
        raise OSError("no space left on device")

    monkeypatch.setattr(export, "write_csv", full)
    with pytest.raises(OSError, match="no space"):
        cli_look.hypotheses(stored, out=out)
    assert out.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["readings.csv"]


def test_lists_of_texts_are_written_as_they_are(tmp_path: Path) -> None:
    """numpy's arrays of texts drop NUL characters at the end, and a token may be one."""
    texts = ["a", "\x00", "b\x00"]
    path = write_table(pd.DataFrame({"top_tokens": [texts, np.array([1, 2])]}), tmp_path / "x.csv")
    read = pd.read_csv(path).top_tokens
    assert [json.loads(value) for value in read] == [texts, [1, 2]]
