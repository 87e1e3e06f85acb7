"""The report of a run: which requests it draws, how large it gets, its notes, and what of this machine it says."""

import html as html_module
import re
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser

import cacheprobe as cp
from cacheprobe.cli.app import report as report_command
from cacheprobe.trace.notes import NoteError
from cacheprobe.views.report import report as report_module
from cacheprobe.views.report.choice import RequestChoice, dashboard_of, drawn_within, without_paths
from cacheprobe.views.report.report import report_html
from cacheprobe_benchmarks.shared.large_run import save_large_run
from tests.plots.test_views import HOSTILE
from tests.tiny import SMALL, loaded, perturbed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 12 requests that lost other numbers of tokens."""
    prompts = [[3 + i, 5 + 2 * i, 7 + 3 * i % 50] for i in range(12)]
    drafter = cp.drafters.DraftModel(perturbed(loaded(), 0.01))
    settings = {**SMALL, "sampling": cp.SamplingParams(temperature=1.0, seed=7)}
    return cp.run(loaded(), prompts, **settings, drafter=drafter).save(tmp_path_factory.mktemp("private") / "my-run")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 40 requests, which together have no room in 4 MB."""
    return save_large_run(tmp_path_factory.mktemp("large") / "run", requests=40, tokens=48, layers=16)


def drawn(html: str) -> list[int]:
    """The requests that are drawn in full, in order."""
    return [int(number) for number in re.findall(r'<h2 id="request-(\d+)">', html)]


def listed(html: str) -> list[int]:
    """The requests in the table of all, in order."""
    table = html.split('<h2 id="requests">')[1].split("</table>")[0]
    return [int(number) for number in re.findall(r"<tr><td[^>]*>(?:<a [^>]*>)?(\d+)", table)]


def lost(trace: cp.Trace) -> dict[int, int]:
    """Rolled-back draft tokens by request, counted from the events."""
    judged = trace.events().dropna(subset="num_accepted")
    counts = (judged.draft_token_ids.map(len) - judged.num_accepted.astype(int)).groupby(judged.request_id).sum()
    return {request_id: int(counts.get(request_id, 0)) for request_id in trace.tokens}


def test_up_to_eight_requests_are_drawn_and_every_request_is_listed(run: Path) -> None:
    trace = cp.load_trace(run)
    html = report_html(trace)
    assert listed(html) == list(range(12)) and len(drawn(html)) == 8
    judged = trace.events().dropna(subset="num_accepted")
    partly = (judged.num_accepted > 0) & (judged.draft_token_ids.map(len) > judged.num_accepted)
    ranked = sorted(trace.tokens, key=lambda request_id: (-lost(trace)[request_id], request_id))
    expected = list(dict.fromkeys([int(judged[partly].request_id.iloc[0]), *ranked]))[:8]
    assert drawn(html) == sorted(expected)
    named = ", ".join(map(str, sorted(expected)))
    assert f"8 of 12 requests can be read below in full: {named} (those with notes, then" in html
    links = set(re.findall(r'href="#request-(\d+)"', html))
    assert links == set(map(str, expected))  # none leads to a part that is not there


@pytest.mark.parametrize(("asked", "expected"), [(3, [3]), ([5, 1, 5], [1, 5]), ((2,), [2]), ("all", list(range(12)))])
def test_the_named_requests_are_drawn(run: Path, asked: object, expected: list[int]) -> None:
    html = report_html(cp.load_trace(run), asked)
    assert drawn(html) == expected and listed(html) == list(range(12)) and "those with notes" not in html


@pytest.mark.parametrize(
    ("asked", "says"),
    [(12, "no request 12"), ([0, 99], "no request 99"), ("some", "or \"all\", got 'some'"), ([], "names no request")],
)
def test_other_requests_are_refused(run: Path, asked: object, says: str) -> None:
    with pytest.raises((KeyError, ValueError), match=says):
        report_html(cp.load_trace(run), asked)


def test_a_large_run_stays_below_four_megabytes(large: Path, tmp_path: Path) -> None:
    trace = cp.load_trace(large)
    path = cp.plots.write_report(trace, tmp_path / "report.html", "all")
    html = path.read_text()
    count = len(drawn(html))
    assert 2_500_000 < path.stat().st_size <= 4_000_000 and 4 < count < 40
    assert f"{count} of 40 requests can be read below" in html
    assert f"{40 - count} chosen requests would make the file larger than 4 MB" in html
    assert listed(html) == list(range(40))
    assert set(re.findall(r'href="#request-(\d+)"', html)) == set(map(str, drawn(html)))


def test_a_request_that_is_too_large_makes_room_for_others() -> None:
    sizes, drawn = {3: 50, 1: 900, 2: 40, 0: 20}, list[int]()

    def draw(request: int) -> str:
        drawn.append(request)
        return "x" * sizes[request]

    assert list(drawn_within(RequestChoice((3, 1, 2, 0), ""), draw, 100)) == [2, 3]
    assert drawn == [3, 1, 2, 0]


def test_no_room_for_a_request_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "MOST_BYTES", 10_000)
    html = report_html(cp.load_trace(run), 3)
    assert drawn(html) == [] and "1 chosen request would make the file larger" in html


def test_nothing_of_this_machine_is_said_unless_asked(run: Path) -> None:
    trace = cp.load_trace(run)
    place = "/home/annabel b/models/" + "small-model"
    secret = {**trace.fingerprint, "model": place, "adapter": "~/private/adapter", "weights": "C:\\Users\\annabel\\w"}
    meta = {**trace.meta, "fingerprint": secret, "weights_note": f"from {place}", "drafter": f"DraftModel({place})"}
    meta["errors"] = {"3": f"cannot read {run}/x"}
    html = html_module.unescape(report_html(replace(trace, meta=meta)))
    for told in (
        str(run),
        str(run.parent),
        str(Path.home()),
        "private/adapter",
        "Users",
        "annabel",
        "127.0.0.1",
        "localhost",
    ):
        assert told not in html, told
    assert "/home" not in html and "small-model" in html and "…/x" in html


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/a/b/c", "…/c"),
        ("from /home/ann b/models/c (int8)", "from …/c (int8)"),
        ("see /a/b, and ~/x/y.", "see …/b, and …/y."),
        ("org/model and/or 1/2", "org/model and/or 1/2"),
        ("https://huggingface.co/org/model", "https://huggingface.co/org/model"),
        ("Model(path='/a/b')", "Model(path='…/b')"),
        ("a / b", "a / b"),
        (r"D:\models\x", "…/x"),
    ],
)
def test_paths_are_cut(text: str, expected: str) -> None:
    assert without_paths(text) == expected


def test_places_lead_to_a_dashboard_that_is_named(run: Path) -> None:
    trace = cp.load_trace(run)
    html = report_html(trace, 3, dashboard="http://127.0.0.1:8050/?run=2")
    table = trace.events().explode("committed_token_ids").dropna(subset="committed_token_ids")
    found = re.findall(
        r'href="http://127\.0\.0\.1:8050/\?run=2&amp;request=(\d+)&amp;step=(\d+)&amp;position=(\d+)', html
    )
    assert len(found) > 50
    for request, step, position in {tuple(map(int, place)) for place in found}:
        own = table[table.request_id == request]
        index = position + 1 - len(trace.requests[request].prompt_token_ids)
        rejected = trace.rejected().query("request_id == @request and step == @step and position == @position + 1")
        assert own.step.tolist()[index] == step or len(rejected) == 1
    assert "127.0.0.1" not in report_html(trace, 3)


@pytest.mark.parametrize(
    "address", ["javascript:alert(1)", "127.0.0.1:8050", "http://", "http://x:y/", "http://x/?run=a"]
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="the address that `cacheprobe dash` prints"):
        dashboard_of(address)


def test_an_address_is_completed() -> None:
    assert dashboard_of("http://127.0.0.1:8050") == "http://127.0.0.1:8050/?run=0"
    assert dashboard_of("http://[::1]:80/?run=3&request=2") == "http://[::1]:80/?run=3"


def test_notes_are_shown_first_and_at_their_places(run: Path, browser: Browser, tmp_path: Path) -> None:
    trace = cp.load_trace(run)
    least = min(lost(trace), key=lambda request_id: (lost(trace)[request_id], -request_id))
    position = len(trace.requests[least].prompt_token_ids) + 2
    kept = [trace.notes.add(least, HOSTILE, position=position), trace.notes.add(least, "the whole of it")]
    path = cp.plots.write_report(trace, tmp_path / "report.html")
    for note in kept:
        trace.notes.remove(note.note_id)
    html = path.read_text()
    assert least in drawn(html) and '<h2 id="notes">' in html
    complaints: list[str] = []
    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    assert page.evaluate("window.hacked") is None and complaints == []
    listed_notes = page.locator("ul.notes li")
    assert listed_notes.count() == 2 and "the whole of it" in listed_notes.first.inner_text()
    assert HOSTILE.split()[0] in listed_notes.last.inner_text()
    marked = page.locator(".prose .noted")
    assert marked.count() == 1 and marked.get_attribute("data-position") == str(position - 1)
    title = marked.get_attribute("title") or ""
    assert f"\nnote: {HOSTILE}" in title
    listed_notes.first.get_by_role("link").click()
    assert page.evaluate("location.hash") == f"#request-{least}"
    shown = page.locator(f"#request-{least}").bounding_box()
    assert shown is not None and -1 <= shown["y"] < 900
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


def test_a_broken_file_of_notes_is_said(run: Path, tmp_path: Path) -> None:
    (run / "notes.json").write_text("{")
    try:
        with pytest.raises(NoteError, match="mend the file, or move it away"):
            cp.plots.write_report(cp.load_trace(run), tmp_path / "report.html")
        assert not (tmp_path / "report.html").exists()
    finally:
        (run / "notes.json").unlink()


def test_the_command_takes_several_requests(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    report_command(run, request=("3", "5"), out=out, progress=False)
    assert drawn(out.read_text()) == [3, 5] and capsys.readouterr().out == f"{out}\n"
    report_command(run, request=("all",), out=out, dashboard="http://127.0.0.1:8050/", progress=False)
    assert len(drawn(out.read_text())) == 12 and "127.0.0.1:8050" in out.read_text()
    for wrong, says in ((("x",), "takes numbers of requests"), (("all", "1"), "takes numbers")):
        with pytest.raises(ValueError, match=says):
            report_command(run, request=wrong, out=out, progress=False)
    for several in (("1", "2"), ("all",)):
        with pytest.raises(ValueError, match="draws one request"):
            report_command(run, request=several, figures=tmp_path, progress=False)
