"""What is taken of a view as CSV and as code: the code runs, and its table is the one in the CSV."""

import csv
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.io
import pytest

import cacheprobe as cp
from cacheprobe.dashboard.away import views
from cacheprobe.dashboard.away.spreadsheet import csv_text
from cacheprobe.dashboard.away.taken import Sources
from cacheprobe.dashboard.flip_jobs import FlipJob, FlipJobs
from cacheprobe.dashboard.questions import CannotShow
from cacheprobe.dashboard.reader import RunReader
from cacheprobe.dashboard.shelf import Shelf
from cacheprobe.dashboard.shell import index
from tests.dash_page import save_thinking
from tests.sweeps.test_sweeps_dash import SETTINGS
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

ROOT = Path(__file__).parents[2]
ONE = {"run": 0, "request": 0, "step": 8, "position": 6, "row": None, "site": "S", "lens": "recorded"}
PAGE = {"requests": [0, 8], "steps": [4, 30], "places": [0, 12], "place": 1, "width": 900}
GRID = {**ONE, **PAGE, "colour": "rank", "rows": "all"}
RESULTS = ("coin-rows", "coin-state-probe", "grid", "prediction-depths", "training-cost")
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("timeline", {**ONE, **PAGE}),
    ("timeline", {"run": 0, "requests": [1, 2], "steps": [0, 3], "width": 0}),
    ("decode", {**ONE, **PAGE}),
    ("cache", ONE),
    ("cache", {**ONE, "request": 1, "step": 5}),
    ("window", ONE),
    ("window", {**ONE, "request": 1}),
    ("prompt", ONE),
    ("grid", GRID),
    ("grid", {**GRID, "rows": "committed"}),
    ("grid", {**GRID, "lens": "logit", "site": "T"}),
    ("card", ONE),
    ("card", {**ONE, "lens": "logit", "site": "C"}),
    ("gave", ONE),
    ("rejected", {"run": 0}),
    ("rejected", {"run": 0, "request": 0, "sort": "-margin"}),
    ("rejected", {"run": 0, "sort": "drafted"}),
    ("thoughts", {**ONE, "run": 2}),
    ("compare", {**ONE, "against": 1}),
    ("compare", {"run": 0, "request": 3, "against": 2}),
    ("result", {"result": 0}),
    ("result", {"result": 1, "table": 1, "filter": "S", "order": "-accuracy"}),
    ("result", {"result": 2, "order": "nld"}),
    ("result", {"result": 3, "table": 1, "filter": "EARLY", "order": "drafter"}),
    ("result", {"result": 3, "table": 2}),
    ("result", {"result": 4, "order": "seconds"}),
    ("result", {"result": 5, "order": "drafter", "facet": "seed.drafter"}),
]
"""View, and a question that it answers."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """0 and 1: runs of a model that is saved; 2: thoughts; then results of every kind."""
    folder = tmp_path_factory.mktemp("away")
    hf_model().save_pretrained(folder / "model")
    drafter = cp.drafters.EarlyExit(layer=1)
    for name, settings in (("one", {"deterministic": [0, 2]}), ("two", {})):
        cp.run(loaded(), PROMPTS, **SMALL, drafter=drafter, capture="STCZ", **settings).save(folder / "runs" / name)
    save_thinking(folder / "runs" / "x-thinking")
    clean, corrupt = [5, 17, 3, 44, 9], [5, 17, 80, 44, 61]
    (folder / "results").mkdir()
    grid = cp.patching.activation(loaded(), clean, corrupt, answer=(7, 11), progress=False)
    grid.save(folder / "results" / "grid.json")
    for name in RESULTS:
        if name != "grid":
            shutil.copy(ROOT / "analyses" / "results" / f"{name}.json", folder / "results")
    assert cp.sweep(SETTINGS, out=folder / "sweep", progress=False).is_complete
    shelf = Shelf.of([folder / "runs", folder / "results", folder / "sweep"], str(folder / "model"))
    assert [path.stem for path in shelf.results] == [*RESULTS, "sweep"]
    return Sources(shelf, RunReader(shelf), FlipJobs())


@pytest.fixture(autouse=True)
def quiet_figures() -> Iterator[None]:
    """A figure that code shows is drawn as JSON, and opens no browser."""
    before, plotly.io.renderers.default = plotly.io.renderers.default, "json"
    yield
    plotly.io.renderers.default = before


def taken(sources: Sources, view: str, question: dict[str, Any], way: str) -> str:
    return views.take(sources, {"view": view, "way": way, "question": question})[way]


@pytest.mark.parametrize(("view", "question"), QUESTIONS, ids=lambda part: part if isinstance(part, str) else "")
def test_the_code_makes_the_table_of_the_csv(sources: Sources, view: str, question: dict[str, Any]) -> None:
    code, found = (taken(sources, view, question, way) for way in ("code", "csv"))
    assert "cacheprobe.dashboard" not in code and "\nimport _" not in code  # the public functions alone
    scope: dict[str, Any] = {}
    exec(code, scope)
    table = scope["table"]
    assert len(table) and csv_text(table) == found
    lines = list(csv.reader(io.StringIO(found)))
    assert lines[0] == [str(name) for name in table.columns] and len(lines) == len(table) + 1


def test_every_view_is_taken_by_a_question_here() -> None:
    assert {view for view, _ in QUESTIONS} == set(views.AWAY) - {"flip"}


def test_code_that_makes_another_table_is_noticed(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = views.AWAY["cache"]

    def other(sources: Sources, question: dict[str, Any]) -> Any:
        made = kept(sources, question)
        return made._replace(table=lambda: made.table().iloc[1:])

    monkeypatch.setitem(views.AWAY, "cache", other)
    with pytest.raises(AssertionError):
        test_the_code_makes_the_table_of_the_csv(sources, "cache", ONE)


def test_a_search_of_rejected_drafts_is_in_the_code(sources: Sources) -> None:
    token = sources.shelf.book(0).rejections.drafts.drafted_token.iloc[0]
    asked = {"run": 0, "find": token, "sort": "-step"}
    test_the_code_makes_the_table_of_the_csv(sources, "rejected", asked)
    with pytest.raises(AssertionError):  # nothing is found, and the table is empty
        test_the_code_makes_the_table_of_the_csv(sources, "rejected", {"run": 0, "find": "no such token"})


def test_the_search_for_edits_is_taken_when_it_is_done(sources: Sources) -> None:
    trace = cp.load_trace(sources.shelf.book(0).run.directory)
    line = trace.rejected().query("request_id == 0").iloc[0]
    question = {"run": 0, "request": 0, "step": int(line.step)}
    with pytest.raises(CannotShow, match="no result of this search yet"):
        taken(sources, "flip", question, "csv")
    book = sources.shelf.book(0)
    job = FlipJob(question)
    sources.jobs._jobs[book.run.directory, book.run.run_id, 0, question["step"]] = job
    job.table = pd.DataFrame({"edit": ["zero"]})
    assert "cp.analysis.flip(trace, 0," in taken(sources, "flip", question, "code")
    assert taken(sources, "flip", question, "csv") == "edit\nzero\n"


def test_a_spreadsheet_computes_no_cell_and_lists_are_json() -> None:
    texts = ["=1+1", "+1", "-x", "@a", "\tb", "a=1", "␣=", None]
    table = pd.DataFrame({"token": texts, "ids": [[1, 2]] * 8, "tokens": [["é", '"']] * 8, "nats": [-1.5] * 8})
    lines = list(csv.DictReader(io.StringIO(csv_text(table))))
    assert [line["token"] for line in lines] == ["'=1+1", "'+1", "'-x", "'@a", "'\tb", "a=1", "␣=", ""]
    assert lines[0]["nats"] == "-1.5"  # a number is no formula
    assert json.loads(lines[0]["ids"]) == [1, 2] and json.loads(lines[0]["tokens"]) == ["é", '"']


def test_what_cannot_be_taken_is_said(sources: Sources) -> None:
    for asked, said in (
        ({"view": "none", "way": "csv", "question": {}}, "view is"),
        ({"view": "cache", "way": "pdf", "question": {}}, "way is csv or code"),
        ({"view": "cache", "way": "csv", "question": []}, "question is an object"),
        ({"view": "thoughts", "way": "csv", "question": ONE}, "request 0 of one wrote no thoughts"),
    ):
        with pytest.raises(CannotShow, match=said):
            views.take(sources, asked)


def test_the_page_names_the_sites_in_full(sources: Sources) -> None:
    for label in ("S (residual stream)", "T (attention output)", "C (MLP output)"):
        assert label in index(sources.shelf)
