"""Where a replay is looked at: the text coloured by the difference from the other program, in figures and dashboard."""

import re
from pathlib import Path

import pytest

import cacheprobe as cp
from cacheprobe.views.dashboard import app
from cacheprobe.views.dashboard.questions import CannotShow, answered
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.view import csv_text
from tests.tiny import PROMPTS, loaded

IDS = [9, 41, 7, 3, 22, 22]
SHADE = re.compile(
    r'class="pick(?: shade" style="--p:([\d.]+))?" data-step="\d+" data-position="(\d+)" [^=]*="([^"]*)"'
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a: a replay whose third token differs by one nat, and whose second request has no log-probabilities; b: a run."""
    folder = tmp_path_factory.mktemp("runs")
    settings = dict(window=4, group=2, capacity=64, progress=False)
    plain = cp.replay(loaded(), [IDS, IDS[:3]], prompts=PROMPTS[:2], **settings)
    nats = plain.logprobs(0)
    nats[2] += 1.0 if nats[2] < -1 else -1.0
    first = {"prompt_token_ids": PROMPTS[0], "token_ids": IDS, "logprobs": nats}
    second = {"prompt_token_ids": PROMPTS[1], "token_ids": IDS[:3]}
    cp.replay(loaded(), [first, second], **settings).save(folder / "a")
    cp.run(loaded(), PROMPTS[:1], **settings, max_new_tokens=4).save(folder / "b")
    return folder


def question(run: int = 0, request: int = 0) -> dict:
    return {"run": run, "request": request, "measure": "difference", "place": 0}


def test_the_text_is_coloured_by_the_difference(runs: Path) -> None:
    trace = cp.load_trace(runs / "a")
    table = cp.analysis.engine_differences(trace)
    html = cp.plots.request_text(
        trace.rows(), trace.events(), 0, measure="difference", texts=trace.token_texts, values=table
    )
    run_list = RunList.of([runs / "a", runs / "b"])
    page = answered(app.views_of(run_list)["text"], question())["html"]
    for drawn in (str(html), page):
        found = {int(position): (float(share or 0), says) for share, position, says in SHADE.findall(drawn)}
        first = len(PROMPTS[0]) - 1
        assert sorted(found) == list(range(first, first + len(IDS)))
        assert [round(found[first + i][0]) for i in range(len(IDS))] == [0, 0, 1, 0, 0, 0]
        assert "difference from the other program: 1.0000 nats" in found[first + 2][1]


def test_what_cannot_be_coloured_says_so(runs: Path) -> None:
    run_list = RunList.of([runs / "a", runs / "b"])
    view = app.views_of(run_list)["text"]
    for asked in (question(request=1), question(run=1)):
        assert "no log-probabilities of another program" in answered(view, asked)["error"]


def test_its_code_makes_the_table_of_the_csv(runs: Path) -> None:
    run_list = RunList.of([runs / "a", runs / "b"])
    code, table = (
        app.export(run_list, {"view": "text", "way": way, "question": question()})[way] for way in ("code", "csv")
    )
    scope: dict = {}
    exec(code, scope)
    assert csv_text(scope["table"]) == table and len(scope["table"]) == len(IDS)
    with pytest.raises(CannotShow, match="no replay"):
        app.export(run_list, {"view": "text", "way": "code", "question": question(run=1)})
