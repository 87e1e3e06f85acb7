"""Notes on the page: written in a real browser and kept beside the run, and whose notes the server takes."""

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

import cacheprobe as cp
from cacheprobe.trace.notes import read_notes
from cacheprobe.views.dashboard.app import listen
from cacheprobe.views.dashboard.run_list import RunList
from tests.dash_page import EARLY, answered, asked, at, opened, served, until
from tests.plots.test_views import HOSTILE
from tests.tiny import PROMPTS, SMALL, loaded


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = cp.run(loaded(), PROMPTS, **SMALL, **EARLY)
    return trace.save(tmp_path_factory.mktemp("noted") / "a-one")


@pytest.fixture
def run(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "run"))


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    with served(RunList.of([run])) as url:
        yield url


def test_a_note_is_written_listed_marked_and_leads_to_its_place(browser: Browser, address: str, run: Path) -> None:
    trace = cp.load_trace(run)
    with opened(browser, f"{address}?run=0&request=1&tab=replay") as page:
        answered(page, "text", request=1)
        assert "None yet" in answered(page, "notes", run=0)
        place = at(page)
        page.keyboard.press("m")
        page.keyboard.type("m, n and / are letters here")
        page.keyboard.press("Control+Enter")
        until(page, "!document.getElementById('note').open")
        (note,) = read_notes(run)
        assert (note.request_id, note.position) == (1, place["position"] + 1)
        assert note.text == "m, n and / are letters here" and at(page)["request"] == 1
        until(page, "document.querySelectorAll('#text-view .noted').length === 1")
        marked = page.locator("#text-view .noted")
        assert marked.get_attribute("data-position") == str(place["position"])
        marked.hover()
        until(page, "document.getElementById('tip').textContent.includes('note: m, n and / are letters here')")
        page.locator("#text-view span[data-position]").nth(7).click()
        until(page, f"JSON.parse(document.getElementById('page').dataset.at).position !== {place['position']}")
        page.click("#note-open")
        page.check("#note input[value=request]")
        page.fill("#note-text", HOSTILE)
        page.click("#note-save")
        until(page, "document.querySelectorAll('#notes-view li').length === 2")
        assert page.evaluate("window.hacked") is None and HOSTILE.strip() in page.inner_text("#notes-view")
        page.get_by_role("button", name=f"request 1, position {note.position}").click()
        until(page, f"JSON.parse(document.getElementById('page').dataset.at).position === {place['position']}")
        events = (
            trace.events().query("request_id == 1").explode("committed_token_ids").dropna(subset="committed_token_ids")
        )
        index = note.position - len(trace.requests[1].prompt_token_ids)
        assert at(page)["step"] == events.step.tolist()[index]
        page.keyboard.press("m")
        assert page.input_value("#note-text") == note.text
        page.keyboard.press("Escape")
        page.locator("#notes-view [data-remove]").last.click()
        until(page, "document.querySelectorAll('#notes-view li').length === 1")
        assert [one.position for one in read_notes(run)] == [None]
        until(page, "document.querySelectorAll('#text-view .noted').length === 0")


def test_a_note_is_written_in_the_overview_too(browser: Browser, address: str, run: Path) -> None:
    with opened(browser, f"{address}?run=0&tab=overview&request=2") as page:
        answered(page, "tokens", run=0)
        answered(page, "notes", run=0)
        until(page, "Number.isInteger(JSON.parse(document.getElementById('page').dataset.at).position)")
        page.keyboard.press("m")
        page.keyboard.type("from the table")
        page.keyboard.press("Control+Enter")
        until(page, "!document.getElementById('note').open")
        assert [(note.request_id, note.text) for note in read_notes(run)] == [(2, "from the table")]


def test_two_pages_lose_nothing_of_each_other(browser: Browser, address: str, run: Path) -> None:
    with opened(browser, f"{address}?run=0&request=0&tab=replay") as one, opened(browser, f"{address}?run=0") as other:
        for page, request in ((one, 0), (other, 2)):
            page.goto(f"{address}?run=0&request={request}&tab=replay")
            answered(page, "text", request=request)
            answered(page, "notes", run=0)
        for page in (one, other):
            page.keyboard.press("m")
            page.click("#note-save")
            until(page, "!document.getElementById('note').open")
    assert [note.request_id for note in read_notes(run)] == [0, 2]


def test_what_goes_wrong_is_said_and_the_text_stays(browser: Browser, address: str, run: Path) -> None:
    with opened(browser, f"{address}?run=0&request=0&tab=replay") as page:
        answered(page, "text", request=0)
        answered(page, "notes", run=0)
        (run / "notes.json").write_text("{")
        page.keyboard.press("m")
        page.keyboard.type("kept")
        page.click("#note-save")
        until(page, "document.getElementById('note-error').textContent.includes('not readable as JSON')")
        assert page.is_visible("#note") and page.input_value("#note-text") == "kept"
        assert (run / "notes.json").read_text() == "{"
        page.reload()
        assert "mend the file, or move it away" in answered(page, "notes", run=0)


NOTE = {"note": {"run": 0, "request": 0, "position": None, "text": "x"}}


def sent(address: str, body: Any, path: str = "note", **headers: str) -> Any:
    """What the server answers to a note."""
    about = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    posted = urllib.request.Request(f"{address}{path}", json.dumps(body).encode(), about)
    with urllib.request.urlopen(posted) as answer:
        return json.load(answer)


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (NOTE, {"Origin": "https://example.org"}, 403),
        (NOTE, {"Origin": "null"}, 403),
        (NOTE, {"Host": "example.org"}, 403),
        (NOTE, {"Content_Type": "text/plain"}, 415),
        ({"note": {**NOTE["note"], "text": "x" * 20_000}}, {}, 413),
        ({"other": {}}, {}, 400),
        ([], {}, 400),
    ],
)
def test_only_the_page_itself_writes(address: str, run: Path, body: Any, headers: dict[str, str], code: int) -> None:
    with pytest.raises(urllib.error.HTTPError, match=str(code)):
        sent(address, body, **headers)
    assert not (run / "notes.json").exists()
    assert "error" not in sent(address, NOTE, Origin=address.rstrip("/")) and len(read_notes(run)) == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"run": 1}, "there is no run 1"),
        ({"run": "../run"}, "there is no run"),
        ({"request": 99}, "there is no request 99"),
        ({"text": 3}, "text is a text"),
        ({"text": "x" * 2001}, "at most 2,000 letters"),
        ({"position": 10**8}, "has no token at position"),
        ({"position": "4"}, "position is a whole number"),
        ({"remove": "x"}, "there is no note"),
    ],
)
def test_a_wrong_note_is_refused(address: str, run: Path, wrong: dict[str, Any], says: str) -> None:
    assert says in sent(address, {"note": {**NOTE["note"], **wrong}})["error"]
    assert not (run / "notes.json").exists()


def test_a_server_that_others_can_reach_takes_no_notes(run: Path) -> None:
    server = listen(RunList.of([run]), "0.0.0.0", 0)
    client = server.app.test_client()  # ty: ignore
    reply = client.post("/note", json=NOTE)
    assert reply.status_code == 403 and b"takes no notes" in reply.data and not (run / "notes.json").exists()
    assert client.post("/ask", json={"notes": {"run": 0}}).status_code == 200
    server.server_close()


def test_notes_of_another_run_in_the_directory_are_said(run: Path) -> None:
    trace = cp.load_trace(run)
    trace.notes.add(1, "of the first", position=len(trace.requests[1].prompt_token_ids) + 1)
    path = run / "notes.json"
    path.write_text(path.read_text().replace('"token_id": ', '"token_id": 1'))
    with served(RunList.of([run])) as url:
        (answer,) = asked(url, {"notes": {"run": 0}})
        assert "of an earlier run in this directory" in answer["html"] and "data-noted" not in answer["html"]
        (code,) = asked(url, {"export": {"view": "notes", "way": "code", "question": {"run": 0}}})
        made: dict[str, Any] = {}
        exec(code["code"], made)
        assert made["table"].is_of_run.tolist() == [False]
