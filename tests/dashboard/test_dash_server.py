"""The dashboard's server without a browser: who is answered, at which address, and what of a question is refused."""

import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from cacheprobe.views.dashboard.app import Answers, listen
from cacheprobe.views.dashboard.questions import CannotShow, PageQuestion
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe_benchmarks.shared.large_run import save_large_run
from tests.dash_page import asked, served


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with served(RunList.of([runs])) as url:
        yield url


def test_answers_to_this_machine_alone(address: str) -> None:
    with urllib.request.urlopen(address) as answer:
        assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
        assert b"https://" not in answer.read()
    stranger = urllib.request.Request(address, headers={"Host": "elsewhere.example:80"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(stranger)


def test_a_port_that_is_taken_is_named_with_the_remedy(address: str, runs: Path) -> None:
    """Werkzeug printed advice of its own, which names no flag of ours, and ended the program."""
    port = int(address.rsplit(":", 1)[1].strip("/"))
    with pytest.raises(OSError, match=f"127.0.0.1, port {port}: another program listens there; give another --port, 0"):
        listen(RunList.of([runs / "a-one"]), port=port)
    with pytest.raises(OSError, match="cannot listen at 192.0.2.1, port 0: .*; give another --port"):
        listen(RunList.of([runs / "a-one"]), host="192.0.2.1", port=0)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_two_colons_are_every_address_of_both_kinds(runs: Path) -> None:
    """It was those of IPv6 alone, and the page of 127.0.0.1 stayed empty."""
    with listen(RunList.of([runs / "a-one"]), host="::", port=0) as server:
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family) as one:
                one.settimeout(300)
                one.connect((host, server.port))


def test_the_command_says_what_it_opened_and_where(runs: Path) -> None:
    command = [sys.executable, "-m", "cacheprobe", "dash", str(runs), "--port"]
    with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            said: list[str] = []
            for line in running.stdout:
                said.append(line.strip())
                if line.startswith("listening"):
                    break
            assert [line.split(":")[0] for line in said[:-1]] == sorted(path.name for path in runs.iterdir())
            assert any(line.startswith("e-broken: cannot be opened, ") for line in said)
            found = re.fullmatch(r"listening at (http://127\.0\.0\.1:(\d+)/) \(Ctrl-C ends it\)", said[-1])
            assert found is not None
            with urllib.request.urlopen(found[1]) as answer:
                assert b"cacheprobe" in answer.read()
            second = subprocess.run([*command, found[2]], capture_output=True, text=True, check=False)
            assert second.returncode == 2 and second.stdout == ""
            assert "another program listens there" in second.stderr and "Traceback" not in second.stderr
        finally:
            running.terminate()  # an interrupt is ignored by what was started in a shell's background


def test_the_first_line_of_an_answer_does_not_wait_for_the_last(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent in a chunk of its own, and the connection closed after the last."""
    let_go = Event()

    def slow(*_: object) -> str:
        assert let_go.wait(300)
        return "slow"

    monkeypatch.setattr("cacheprobe.views.dashboard.tabs.replay.Timeline.draw", slow)
    body = json.dumps({"facts": {"run": 0}, "timeline": {"run": 0}}).encode()
    with served(RunList.of([runs / "a-one"])) as url:
        sent = urllib.request.Request(f"{url}ask", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(sent, timeout=300) as answer:
            assert answer.headers["Transfer-Encoding"] == "chunked" and answer.headers["Connection"] == "close"
            assert json.loads(answer.readline())["view"] == "facts"
            let_go.set()
            assert json.loads(answer.readline()) == {"view": "timeline", "html": "slow"}


def test_wrong_questions_are_refused(address: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="413"):
        asked(address, {"facts": {"x": "y" * 20_000}})
    form = urllib.request.Request(f"{address}ask", b'{"facts": {"run": 0}}', {"Content-Type": "text/plain"})
    with pytest.raises(urllib.error.HTTPError, match="415"):
        urllib.request.urlopen(form)


def test_an_answer_is_kept_unless_it_can_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a finished run it is computed once. Errors, and answers of a run that grows, are computed each time."""
    run_list = RunList.of([save_large_run(tmp_path / "run", requests=2, tokens=6, layers=2)])
    computed: list[PageQuestion] = []

    def view(question: PageQuestion) -> str:
        computed.append(question)
        if question["step"] == 3:
            raise CannotShow("no such step")
        return f"<p>{question['step']}</p>"

    answers = Answers(run_list, {"cache": view, "flip": view})
    lines = [answers.line("cache", {"run": 0, "step": 2}) for _ in range(3)]
    assert len(computed) == 1 and {json.loads(line)["html"] for line in lines} == {"<p>2</p>"}
    assert [answers.line("cache", {"run": 0, "step": step}) for step in (3, 3)][1].count("no such step") == 2
    for _ in range(2):
        answers.line("flip", {"run": 0, "step": 2})
    assert len(computed) == 1 + 2 + 2
    monkeypatch.setattr(RunList, "follower", lambda self, number: object())
    for _ in range(2):
        answers.line("cache", {"run": 0, "step": 2})
    assert len(computed) == 5 + 2
