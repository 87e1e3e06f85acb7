"""Pictures of the dashboard: what they show, read from their markup; and what the run_list and the command refuse."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.analysis.comparison import RequestDifference
from cacheprobe.analysis.windows import find_windows
from cacheprobe.core.records import fingerprint_differences
from cacheprobe.trace.tables.token_history import standing_at, token_history
from cacheprobe.views.dashboard.questions import CannotShow, answered, span, whole
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.tabs import compare, replay
from cacheprobe.views.diagrams.cache import cache_passes, cache_strip, memory_sentence
from cacheprobe.views.diagrams.decode_grid import SIGNS, decode_picture
from cacheprobe.views.diagrams.timeline import TIMELINE_LEGEND, timeline_finding, timeline_picture
from cacheprobe.views.report.page import table
from cacheprobe.views.report.run_comparison import comparison_title, fingerprint_block, token_columns
from cacheprobe.views.style import DIAGRAM_CSS
from tests.plots.test_views import HOSTILE
from tests.tiny import PROMPTS, SMALL, loaded


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1), deterministic=[1])


def test_the_timeline_fills_its_place_and_says_where_steps_stand(trace: cp.Trace) -> None:
    narrow, broad = (
        timeline_picture(trace.events(), [0], range(20), 5, "", marked=(0, 5), fit=(w, 18, 30)) for w in (0, 640)
    )
    assert 'data-pitch="18"' in narrow and 'data-pitch="27"' in broad
    assert f'class="cursor" x="{86 + 27 * 5 - 2}"' in broad


def test_the_timeline_names_who_lost_most_where_one_did() -> None:
    """It named the first of several that had lost as much."""
    one = dict(phase="verify", draft_token_ids=[1, 2, 3])
    lost = [dict(request_id=n, num_rolled_back=count, **one) for n, count in enumerate([1, 2, 2, 0])]
    assert (
        timeline_finding(pd.DataFrame(lost))
        == "58 % of 12 draft tokens were accepted; 2 requests had most tokens rolled back, 2 each"
    )
    assert timeline_finding(pd.DataFrame(lost[:2])).endswith("; request 1 had most tokens rolled back, 2")


def test_a_column_of_numbers_stands_to_the_right_with_its_head() -> None:
    """Heads stood to the left of it, and single numbers were torn from a column of words."""
    shown = table(["name", "n", "value"], [["a", 1, 2000], ["b", "—", "<i>"]])
    assert shown.count("<th>") == 2 and '<th class="number">n</th>' in shown
    assert '<td>a</td><td class="number">1</td><td>2,000</td>' in shown and "<td>&lt;i&gt;</td>" in shown
    assert "<th>name</th></tr>" in table(["name"], [])


def test_states_can_be_told_apart_without_their_colours(trace: cp.Trace) -> None:
    """prefill, accepted and decoded were three plain fills, and a pending token lost its hatching to its margin."""
    events, textures = trace.events(), [texture for _, texture, _ in TIMELINE_LEGEND]
    shown, passes = timeline_picture(events, [0, 2], range(4, 14), 5, "").body, events[events.step.between(4, 13)]
    passes = passes[passes.request_id.isin([0, 2])]
    assert shown.count("url(#cp-rolled-back)") == (passes.num_rolled_back.fillna(0) > 0).sum() > 0
    assert shown.count("url(#cp-provisional)") == (passes.proposed_token_ids.map(len) > 0).sum()
    assert len(set(textures)) == len(textures)
    assert len(set(SIGNS.values())) == len(SIGNS)
    step = int(trace.events().query("phase == 'decode'").step.iloc[3])
    standing = standing_at(token_history(trace.events()), step)
    history, verified = token_history(trace.events()), dict.fromkeys(range(5), True)
    picture = decode_picture(history, range(5), range(6), step, {}, verified=verified).body
    for state, sign in SIGNS.items():
        shown = (standing.state == state) & (standing.place < 6)
        assert not sign or picture.count(f">{sign}</text>") == shown.sum(), state
    assert "◇" in picture and "○" in picture
    assert 'class="mark ' in picture and 'class="sign' not in picture  # whose letters would have no fill


def test_the_decode_grid_says_what_was_read_and_predicted_at_each_place(trace: cp.Trace) -> None:
    history, verified = token_history(trace.events()), dict.fromkeys(range(5), True)
    picture = decode_picture(history, range(5), range(9, 12), 6, {}, verified=verified).body
    drawn = [text for text in ElementTree.fromstring(picture).iter() if text.tag.endswith("text")]
    read, predicted = ([t.text for t in drawn if t.get("y") == y] for y in ("12", "27"))
    assert read == ["read", "+9", "+10", "+11"] and predicted == ["→ predicts", "→ +10", "→ +11", "→ +12"]


def test_the_decode_grid_shows_tokens_and_margins(trace: cp.Trace) -> None:
    events = trace.events()
    step = int(events[events.num_rolled_back.fillna(0) > 0].step.iloc[0])
    history = token_history(events)
    standing, verified = standing_at(history, step), dict.fromkeys(range(5), True)
    picture = decode_picture(history, range(5), range(6), step, {}, verified=verified, chosen=(0, 1)).body
    assert picture.count("data-place=") == len(standing[standing.place < 6])
    assert picture.count("url(#cp-rolled-back)") == (standing.state == "rolled_back").sum() > 0
    assert picture.count('class="cursor"') == 1 and 'class="pick new"' in picture
    grey = decode_picture(history, range(5), range(6), step, {}, verified=dict.fromkeys(range(5), False)).body
    assert 'class="box yellow"' not in grey and 'class="box grey"' in grey


def test_every_texture_is_defined() -> None:
    from cacheprobe.views.diagrams.svg import TEXTURES

    for name in ("provisional", "pending", "verified", "rolled-back", "crossed-green", "dotted-green"):
        assert f'id="cp-{name}"' in TEXTURES
    assert ".cp .red-stroke" in DIAGRAM_CSS


def test_slots_that_were_written_now_are_marked_and_an_unknown_size_is_said(trace: cp.Trace) -> None:
    ledger = trace.ledger(2)
    assert 'class="written"' in cache_strip(ledger, step=int(ledger.step.max()), per_line=16)
    assert "does not say" in memory_sentence(12, 64, 3, 96, None)


def test_the_passes_are_those_of_the_tables(trace: cp.Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: the ledger for what was written, the statuses of rows for what was removed again."""
    monkeypatch.setattr("cacheprobe.views.diagrams.cache._MOST_PASSES", 99)
    rows, windows = trace.row_table, find_windows(trace.events(), 2)
    gone = rows[(rows.request_id == 2) & (rows.phase == "verify") & (rows.status == "rolled_back")]
    last = max(window.step for window in windows)
    for step in (windows[0].step, last):
        ledger = trace.ledger(2, step)
        lines = re.findall(r'data-step="(\d+)">(.*?)</tr>', cache_passes(ledger, windows, step))
        written, removed = {}, {}
        for at, cells in lines:
            kind, *positions = re.findall(r"<td[^>]*>([^<]*)</td>", cells)[1:]
            for into, text in zip((written, removed), positions, strict=True):
                for a, b in re.findall(r"(\d+)(?: to (\d+))?", text):
                    into |= dict.fromkeys(((position, int(at)) for position in range(int(a), int(b or a) + 1)), kind)
        assert set(written) == set(zip(ledger.position, ledger.step, strict=True))
        until_now = gone[gone.step <= step]
        assert removed == dict.fromkeys(zip(until_now.position, until_now.step, strict=True), "verify")
    assert removed and set(written.values()) >= {"prefill", "verify"}


def test_a_long_list_of_passes_is_cut() -> None:
    ledger = pd.DataFrame({"position": range(40), "step": range(40), "provenance": "verified"})
    table = cache_passes(ledger)
    assert re.findall(r'data-step="(\d+)"', table) == ["0", *map(str, range(29, 40))] and "… 28 passes" in table


def test_a_comparison_says_what_differs() -> None:
    assert "All 2 requests" in comparison_title([RequestDifference(i, "equal") for i in range(2)])
    found = [RequestDifference(0, "equal"), RequestDifference(1, "tokens", 2), RequestDifference(2, "missing")]
    assert comparison_title(found) == "Of 3 requests 1 are in one run alone, 1 committed other tokens; 1 equal"
    columns = token_columns(RequestDifference(0, "tokens", 2), [[1, 2, 3], [1, 2]], 5, ("a<b", "b"), [{3: HOSTILE}, {}])
    assert "<script" not in columns and "a&lt;b" in columns and columns.count("ends here") == 1
    assert columns.count('class="pick tok first"') == 1
    pair = ({"model": "a", "window": 4, "x": 1}, {"model": "b", "window": 8, "x": 1})
    assert fingerprint_differences(*pair) == [("window", 4, 8)] and "<td" in fingerprint_block(pair, ("a", "b"))


def test_the_shelf_lists_what_it_is_given(trace: cp.Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "runs" / "one")
    cut = trace.save(tmp_path / "runs" / "two")
    rows = next(cut.glob("rows-*.parquet"))
    rows.write_bytes(rows.read_bytes()[:-1])
    (tmp_path / "runs" / "found.json").write_text("{}")
    run_list = RunList.of([tmp_path / "runs", tmp_path / "none"])
    assert [(e.name, e.tables is not None) for e in run_list.entries] == [
        ("one", True),
        ("two", False),
        ("none", False),
    ]
    assert "bytes instead of" in run_list.entries[1].reason and "not a directory" in run_list.entries[2].reason
    assert [path.name for path in run_list.results] == ["found.json"] and run_list.first == 0
    for asked, said in (
        (1, "cannot be opened"),
        (3, "there is no run 3"),
        ("one", "there is no run"),
        (True, "no run"),
    ):
        with pytest.raises(CannotShow, match=said):
            run_list.tables(asked)
    for wrong in ([0, 99], [3, 3], [1], ["a", 2], None, [True, 4]):
        with pytest.raises(CannotShow):
            span(wrong, "steps", 80)
    assert whole(2, "run", 3) == 2


def test_what_is_wrong_with_one_view_is_refused_there(caplog: pytest.LogCaptureFixture) -> None:
    """Also what nobody expected: that is logged besides."""

    def broken(ask: dict) -> str:
        raise ask["error"]

    told = answered(broken, {"error": CannotShow("no <b>")})
    assert told == {"html": '<p class="refused">no &lt;b&gt;</p>', "error": "no <b>"} and not caplog.records
    told = answered(broken, {"error": AttributeError("held is a list")})
    assert told["error"] == "this cannot be shown: AttributeError: held is a list" and "refused" in told["html"]
    assert "no answer to" in caplog.text


def test_compared_readings_are_those_that_both_runs_have(trace: cp.Trace, tmp_path: Path) -> None:
    """Whichever run is named first."""
    fewer = cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1), deterministic=[1],
                   capture=cp.CaptureConfig(sites="Z", layers=(0, 2)))  # fmt: skip
    run_list = RunList.of([trace.save(tmp_path / "whole"), fewer.save(tmp_path / "fewer")])
    shared = 2 * len(cp.analysis.lens_readings(fewer).query("request_id == 1 and status == 'committed' and layer == 0"))
    for run, against in ((0, 1), (1, 0)):
        said = compare.Comparison(run_list, {"run": run, "against": against, "request": 1}).draw()["html"]
        assert f"Every lens reading of the {shared} that both runs recorded is the same, bit for bit" in said
    assert (
        "Every lens reading is the same"
        in compare.Comparison(run_list, {"run": 0, "against": 0, "request": 1}).draw()["html"]
    )


def test_the_decode_view_counts_every_token_that_was_lost(trace: cp.Trace, tmp_path: Path) -> None:
    run_list = RunList.of([trace.save(tmp_path / "run")])
    events = trace.events()
    for event in events[events.num_rolled_back.fillna(0) > 0].head(6).itertuples():
        ask = dict(run=0, request=event.request_id, requests=[0, 5], places=[0, 20], place=0, step=event.step)
        assert f"{event.num_rolled_back} rolled back now</h2>" in replay.TokenGrid(run_list, ask).draw()


def test_only_a_committed_token_is_called_pending(trace: cp.Trace, tmp_path: Path) -> None:
    run_list = RunList.of([trace.save(tmp_path / "run")])
    own = trace.events()[trace.events().request_id == 2]
    prompt, last = len(PROMPTS[2]), int(own.step.max())
    for step in own.step[own.step < last]:
        picture = replay.CacheSlots(run_list, dict(run=0, request=2, step=int(step))).draw()
        committed = int(own[own.step <= step].committed_token_ids.map(len).sum())
        newest = prompt + committed - 1
        told = re.findall(r"slot (\d+): pending", picture)
        assert told == ([] if not committed or newest in set(trace.ledger(2, int(step)).position) else [str(newest)])
        assert "slots of this request are in use" in picture
    drafts = own[own.proposed_token_ids.map(len) > 0]
    assert (
        len(drafts)
        and "pending" not in replay.CacheSlots(run_list, dict(run=0, request=2, step=int(drafts.step.iloc[0]))).draw()
    )
    end = int(trace.events().step.max())
    for step in (last, end):
        picture = replay.CacheSlots(run_list, dict(run=0, request=2, step=step)).draw()
        assert f"Request 2 has ended and freed its {len(trace.ledger(2))} cache slots: " in picture
        assert "pending" not in picture
    assert last < end


def test_pages_of_the_lens_grid_cover_every_position(trace: cp.Trace, tmp_path: Path) -> None:
    tables = RunList.of([trace.save(tmp_path / "run")]).tables(0)
    for include, columns in (("committed", 5), ("all", 7)):
        rows = tables.predicting_rows(0)
        rows = rows[rows.status == "committed"] if include == "committed" else rows
        pages = {tables.page(0, int(position), include, columns) for position in rows.position}
        covered = sorted(position for page in pages for position in page)
        assert covered == sorted(set(rows.position))
        counts = [int(rows.position.isin(page).sum()) for page in pages]
        assert all(count <= columns or len(page) == 1 for count, page in zip(counts, pages, strict=True))


def test_the_command_is_quick_and_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheprobe.cli import look as cli_dash

    with pytest.raises(ValueError, match="at least one saved run"):
        cli_dash.open_runs()
    for port in (-1, 99999):
        with pytest.raises(ValueError, match=f"--port is a number from 0 to 65535, got {port}"):
            cli_dash.open_runs(Path("runs"), port=port)
    with pytest.raises(ValueError, match="nowhere holds no tuned lens"):
        cli_dash.open_runs(Path("runs"), lens=(Path("nowhere"),))
    monkeypatch.setattr(cli_dash, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'cacheprobe\[dash\]'"):
        cli_dash.open_runs(Path("runs"))
    program = (
        "import sys\nfrom cacheprobe.cli import look\nprint({'dash', 'torch', 'pandas', 'plotly'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_dashboard_starts_without_torch() -> None:
    program = "import sys\nimport cacheprobe.views.dashboard.app\nprint({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_an_empty_history() -> None:
    assert standing_at(token_history(pd.DataFrame(columns=_EVENTS)), 3).empty


_EVENTS = ["request_id", "step", "phase", "proposed_token_ids", "draft_token_ids", "num_accepted",
           "committed_token_ids", "margin_nats"]  # fmt: skip
