"""Figures and diagrams: what they show, read from their data and markup."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.analysis.windows import accepted_whole, find_windows, pick_request, rolled_back
from cacheprobe.views.diagrams.cache import cache_counts, cylinder_strokes
from cacheprobe.views.diagrams.decode_grid import CONTESTED_NATS, SETTLED_NATS
from cacheprobe.views.diagrams.diagram import window_diagram
from cacheprobe.views.diagrams.panels import abridged, verify_panel
from cacheprobe.views.report.report import behaviour_sentences, report_html
from cacheprobe.views.text import shorten, visible
from tests.tiny import PROMPTS, SMALL, loaded

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\"'<b>&\n"


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1), deterministic=[1])


def test_windows_are_the_verdicts(trace: cp.Trace) -> None:
    for i, prompt in enumerate(PROMPTS):
        windows = find_windows(trace.events(), i)
        first = trace.committed(i)[0]
        assert windows[0].newest_token_id == first
        assert [w.newest_token_id for w in windows[1:]] == [w.committed_token_ids[-1] for w in windows[:-1]]
        assert [first, *(t for w in windows for t in w.committed_token_ids)] == trace.committed(i)
        assert all(
            w.start == len(prompt) + 1 + sum(len(v.committed_token_ids) for v in windows[:n])
            for n, w in enumerate(windows)
        )
        for w in windows:
            assert w.is_rollback == ("recovered" in w.outcomes) and w.outcomes.count("accepted") == w.num_accepted
    with pytest.raises(ValueError, match="no events of request 9"):
        find_windows(trace.events(), 9)


def test_the_picked_request_shows_most(trace: cp.Trace) -> None:
    windows = find_windows(trace.events(), pick_request(trace.events()))
    assert rolled_back(windows) is not None and accepted_whole(windows) is not None
    events = trace.events()
    for i in range(len(PROMPTS)):  # whichever is the only one with windows
        alone = events[(events.request_id == i) | (events.phase == "prefill")]
        assert pick_request(alone) == i


@pytest.mark.parametrize("kind", [accepted_whole, rolled_back])
def test_diagram_tells_the_window(trace: cp.Trace, kind) -> None:
    request_id = pick_request(trace.events())
    window = kind(find_windows(trace.events(), request_id))
    assert window is not None, "the run has no such window; choose another seed"
    ledgers = [trace.ledger(request_id, step) for step in window.ledger_steps]
    texts = trace.token_texts
    html = window_diagram(window, trace.events(), ledgers, texts)
    for word in ("Prefill", "Decode", "Verify", "other requests", "Rollback" if window.is_rollback else "No rollback"):
        assert word in html
    prefill, verified = (ledgers[-1].provenance == name for name in ("prefill", "verified"))
    assert f"{prefill.sum()} prefill" in html and f"{verified.sum()} verified" in html
    panels = html.split("</style>")[1].split('class="legend"')[0]
    assert ("not used" in panels) == (window.outcomes.count("not used") > 0)
    assert ("recovered" in panels) == window.is_rollback and ("bonus" in panels) != window.is_rollback
    # red where rejected; hatched where pending: the newest token, beside its verdict and in the sequence
    wrong = len(window.draft_token_ids) - window.num_accepted
    assert panels.count('class="box red"/></g>') + panels.count('class="box red"/><title>') == 3 * wrong
    assert panels.count("url(#cp-pending)") == 2
    fed = trace.rows(request_id).query(f"step == {window.step}")
    lost = int((fed.status == "rolled_back").sum())
    assert (f"{lost} rolled back</text>" in panels) == ("rolled back</text>" in panels) == (lost > 0)
    assert "4 other requests" in panels


def test_tips_tell_a_rejected_draft_token_from_those_after_it(trace: cp.Trace) -> None:
    windows = [w for i in range(len(PROMPTS)) for w in find_windows(trace.events(), i)]
    window = max((w for w in windows if w.num_accepted), key=lambda w: len(w.draft_token_ids) - w.num_accepted)
    accepted, lost = window.num_accepted, len(window.draft_token_ids) - window.num_accepted
    assert lost > 1, "the run has no such window; choose another seed"
    tips = re.findall(r"<title>(T[^<:]*′): [^<]*; ([^<;]*); request", verify_panel(window, {}).picture)
    kinds = ["draft token"] * accepted + ["rejected draft token"] + ["draft token after a rejected one"] * (lost - 1)
    assert [kind for _, kind in tips] == kinds


def test_decode_grid_is_shaded_by_margin(trace: cp.Trace) -> None:
    events, textures = trace.events(), []
    for margin in (SETTLED_NATS, (SETTLED_NATS + CONTESTED_NATS) / 2, 0.0):
        html = cp.plots.decode_grid(events.assign(margin_nats=margin), 9, {}).body
        textures.append([html.count(f"url(#cp-{name}-green)") for name in ("crossed", "dotted")])
    cells = textures[1][0]
    assert cells > 0 and textures == [[0, 0], [cells, 0], [0, cells]]


def test_long_drafts_are_cut_in_the_middle() -> None:
    assert abridged(4, 4) == [0, 1, 2, 3] and abridged(9, 4) == [0, 1, -6, 8]
    for count, limit, around in ((15, 9, 0), (15, 9, 7), (15, 9, 14), (64, 9, 30)):
        shown = abridged(count, limit, around)
        assert len(shown) <= limit and around in shown and {0, count - 1} <= set(shown)
        assert sum(1 if index >= 0 else -index for index in shown) == count
    long = cp.run(loaded(), PROMPTS[:1], **{**SMALL, "window": 16}, deterministic=True)
    window = accepted_whole(find_windows(long.events(), 0))
    assert window is not None and len(window.draft_token_ids) == 15
    ledgers = [long.ledger(0, step) for step in window.ledger_steps]
    html = window_diagram(window, long.events(), ledgers, {})
    assert "+ 8<" in html and "⋮  9 more  ⋮" in html and "no other request beside it" in html


def test_cache_is_counted_by_provenance() -> None:
    ledger = pd.DataFrame(dict(position=range(5), provenance=["prefill"] * 2 + ["decoded"] * 3, step=[0, 0, 1, 2, 3]))
    assert cache_counts(ledger) == {"prefill": 2, "decoded": 3}
    drawn = "".join(cylinder_strokes(["cache"], ledger))
    assert "5 slots" in drawn and "3 decoded" in drawn and 'class="box grey"' in drawn and "box yellow" not in drawn
    with pytest.raises(ValueError, match="unknown provenance 'borrowed'"):
        cache_counts(ledger.assign(provenance="borrowed"))


def test_curves_can_be_told_apart(trace: cp.Trace) -> None:
    figure = cp.plots.draft_verdicts(trace.hypotheses())
    drafted = figure.data[2]
    assert drafted.y[-1] == 0 < max(drafted.y)  # greedy: what the last layer has first is never rejected
    assert len({(line.line.dash, line.line.color) for line in figure.data}) == len(figure.data) >= 4


def test_text_is_made_visible_and_cut() -> None:
    assert visible(" a\n\u202e") == "␣a⏎<U+202E>" and visible("") == "∅"
    assert shorten("abcdef", 4) == "abc…" and shorten("漢字漢字", 5) == "漢字…"


def hostile(trace: cp.Trace) -> cp.Trace:
    """The same run by a model whose every token, prompt and name is an attack."""
    rows, hypotheses = trace.row_table.copy(), trace.hypotheses(include_rolled_back=True)
    assert trace.token_table is not None
    rows["token"] = HOSTILE
    hypotheses[["token", "committed_token"]] = HOSTILE
    finger = {**trace.fingerprint, "model": HOSTILE}
    return replace(
        trace,
        row_table=rows,
        stored_readings=hypotheses,
        token_table=trace.token_table.assign(token=HOSTILE),
        texts=dict.fromkeys(trace.texts, HOSTILE),
        requests=tuple(replace(r, prompt=HOSTILE) for r in trace.requests),
        meta={**trace.meta, "fingerprint": finger, "weights_note": HOSTILE, "drafter": HOSTILE},
    )


def test_report_escapes_everything(trace: cp.Trace) -> None:
    plain, attacked = report_html(trace, 0), report_html(hostile(trace), 0)
    assert "<script>window.hacked" not in attacked and "hacked" in attacked
    assert attacked.count("<script") == plain.count("<script")
    assert attacked.count("</script") == plain.count("</script")


def test_report_stands_alone_and_whole(trace: cp.Trace, tmp_path: Path) -> None:
    path = cp.plots.write_report(trace, tmp_path / "new" / "report.html")
    html = path.read_text()
    assert path.stat().st_size < 4_000_000 and "plotly" not in html.casefold()
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    assert not re.search(r"src=|@import|<link|https?:(?!//www\.w3\.org/)|127\.0\.0\.1|localhost", html)
    with pytest.raises(KeyError, match="no request 9"):
        cp.plots.write_report(trace, path, 9)


def test_report_of_a_request_that_is_never_verified() -> None:
    mixed = cp.run(loaded(), PROMPTS, **SMALL, deterministic=[0])
    assert "never verified" in report_html(mixed, 1) and "Accepted whole" in report_html(mixed, 0)
    bare = cp.run(loaded(), PROMPTS[:1], **SMALL, capture=None, deterministic=True)
    html = report_html(bare, 0)
    assert "lens-grid" not in html and "This run has no lens readings" in html


BEHAVIOUR = dict(
    num_examples=8, accuracy=0.9, accuracy_low=0.6, accuracy_high=0.98, num_unparsed=0, chance=0.5, answer_mass=0.8,
    forced_accuracy=0.9,
)  # fmt: skip


def test_nothing_is_said_of_a_state_that_the_model_does_not_track() -> None:
    refusal = "does not solve the task, and nothing here is said about “its state”"
    assert refusal not in " ".join(behaviour_sentences(BEHAVIOUR)) and "90%" in behaviour_sentences(BEHAVIOUR)[0]
    for lacking in (dict(accuracy_low=0.5), dict(accuracy_low=0.1), dict(chance=None)):
        assert refusal in " ".join(behaviour_sentences({**BEHAVIOUR, **lacking}))
    assert behaviour_sentences(None) == []


def test_report_says_what_the_run_has_none_of() -> None:
    whole = cp.run(loaded(), PROMPTS[:2], **SMALL, deterministic=True)  # float32: the fast path is always right
    html = report_html(whole, 0)
    assert "Accepted whole: Request 0, the window that ends in step" in html and "Rolled back:" not in html
    assert "No window of request 0 was rolled back." in html and "No draft of this run was rejected." in html


def test_failed_write_leaves_the_old_report(trace: cp.Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        cp.plots.write_report(trace, path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["report.html"]


def test_the_contents_name_every_section_once_and_lead_to_it(trace: cp.Trace) -> None:
    html = report_html(trace, 0)
    sections = re.findall(r'<h2 id="(.*?)">(.*?)</h2>', html)
    links = re.findall(r'<li><a href="#(.*?)">(.*?)</a></li>', html)
    links = [(name, title) for name, title in links if not name.startswith("request-") or "generated" in title]
    assert links == sections and html.count("<h2") == len(sections) == len({*sections}) >= 6
    assert "Every rejected draft" in dict(sections).values() and dict(sections)["request-0"].startswith("Request 0 ")
