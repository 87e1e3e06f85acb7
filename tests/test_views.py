"""Figures and diagrams: what they show, read from their data and markup."""

from pathlib import Path

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.views.diagram import window_diagram
from cacheprobe.views.lens_grid import finding, grid_width
from cacheprobe.views.report import report_html
from cacheprobe.views.text import shorten, visible
from cacheprobe.views.windows import accepted_whole, find_windows, pick_request, rolled_back
from tests.tiny import PROMPTS, SMALL, loaded

HOSTILE = "</script><script>window.hacked=1</script><b>&\n"


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1), deterministic=[1])


def test_windows_are_the_verdicts(trace: cp.Trace) -> None:
    for i, prompt in enumerate(PROMPTS):
        windows = find_windows(trace.events(), i)
        first = trace.committed(i)[0]
        assert windows[0].newest_token_id == first
        assert [first, *(t for w in windows for t in w.committed_token_ids)] == trace.committed(i)
        assert all(
            w.start == len(prompt) + 1 + sum(len(v.committed_token_ids) for v in windows[:n])
            for n, w in enumerate(windows)
        )
        for w in windows:
            assert w.is_rollback == ("recovered" in w.verdicts) and w.verdicts.count("accepted") == w.num_accepted
    with pytest.raises(ValueError, match="no events of request 9"):
        find_windows(trace.events(), 9)


def test_the_picked_request_shows_most(trace: cp.Trace) -> None:
    windows = find_windows(trace.events(), pick_request(trace.events()))
    assert rolled_back(windows) is not None
    if any(accepted_whole(find_windows(trace.events(), i)) for i in range(5)):
        assert accepted_whole(windows) is not None


@pytest.mark.parametrize("kind", [accepted_whole, rolled_back])
def test_diagram_tells_the_window(trace: cp.Trace, kind) -> None:
    request_id = pick_request(trace.events())
    window = kind(find_windows(trace.events(), request_id))
    assert window is not None, "the run has no such window; choose another seed"
    ledgers = [trace.ledger(request_id, step) for step in window.ledger_steps]
    texts = cp.views.token_texts(trace.row_table, trace.hypotheses())
    html = window_diagram(window, trace.events(), ledgers, texts)
    for word in ("Prefill", "Decode", "Verify", "other requests", "Rollback" if window.is_rollback else "No rollback"):
        assert word in html
    prefill, verified = (ledgers[-1].provenance == name for name in ("prefill", "verified"))
    assert f"{prefill.sum()} prefill" in html and f"{verified.sum()} verified" in html
    panels = html.split("</style>")[1].split('class="legend"')[0]
    assert ("rejected" in panels) == (window.verdicts.count("rejected") > 0)
    assert ("recovered" in panels) == window.is_rollback and ("bonus" in panels) != window.is_rollback


def test_lens_grid_is_the_table(trace: cp.Trace) -> None:
    hypotheses = trace.hypotheses()
    figure = cp.views.lens_grid(hypotheses, request_id=0)
    heat = figure.data[0]
    own = hypotheses.query("request_id == 0 and status == 'committed'").sort_values(["layer", "position"])
    assert heat.z.shape == (3, 20) and heat.z.flatten() == pytest.approx(own.committed_logprob_nats.to_numpy())
    assert list(heat.text.flatten()) == [f"&lt;{t}&gt;" for t in own.token_id]
    assert "committed token is the first choice from layer" in figure.layout.title.text
    everything = cp.views.lens_grid(hypotheses, 0, include="all")
    assert len(everything.data[0].x) == hypotheses.query("request_id == 0").row.nunique() > 20
    assert "null" not in {str(t) for t in everything.data[0].text.flatten()} and grid_width(everything) > grid_width(
        figure
    )
    ranks = cp.views.lens_grid(hypotheses, 0, colour="rank")
    assert ranks.data[0].z[2].max() == 0  # the last layer's first choice is what was committed
    for bad in (dict(request_id=9), dict(request_id=0, positions=range(90, 95))):
        with pytest.raises(ValueError, match="no committed hypotheses"):
            cp.views.lens_grid(hypotheses, **bad)


def test_finding_is_computed() -> None:
    rows = [dict(row=r, layer=layer, status="committed", agrees=layer >= r) for r in (0, 2, 2.5) for layer in range(4)]
    assert "from layer 2 on" in finding(pd.DataFrame(rows), 0)
    never = pd.DataFrame([dict(row=0, layer=layer, status="committed", agrees=layer == 1) for layer in range(4)])
    assert "no layer settles" in finding(never, 0)


def test_curves_are_the_tables(trace: cp.Trace) -> None:
    agreement, settling = trace.agreement(), trace.settling()
    figure = cp.views.agreement_figure(agreement)
    for line, status in zip(figure.data, ("committed", "candidate", "rolled_back"), strict=True):
        assert list(line.y) == pytest.approx(agreement[status].dropna().tolist())
    boxes = cp.views.settling_figure(settling).data
    assert sum(len(box.x) for box in boxes) == len(settling)
    assert len({trace.line.dash for trace in figure.data}) == 3  # told apart without colour


def test_text_is_made_visible_and_cut() -> None:
    assert visible(" a\n\u202e") == "␣a⏎<U+202E>" and visible("") == "∅"
    assert shorten("abcdef", 4) == "abc…" and shorten("漢字漢字", 5) == "漢字…"


def hostile(trace: cp.Trace) -> cp.Trace:
    """The same run by a model whose every token, prompt and name is an attack."""
    from dataclasses import replace

    rows, hypotheses = trace.row_table.copy(), trace.hypotheses()
    rows["token"] = HOSTILE
    hypotheses[["token", "committed_token"]] = HOSTILE
    finger = {**trace.fingerprint, "model": HOSTILE}
    return replace(
        trace,
        row_table=rows,
        hypothesis_table=hypotheses,
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
    path = cp.views.write_report(trace, tmp_path / "new" / "report.html")
    html = path.read_text()
    assert path.stat().st_size < 8_000_000 and html.count("plotly.js v") == 1
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    assert '"showSendToCloud": false' in html
    own = html.split("</head>")[1]
    assert 'src="http' not in own and "@import" not in own and "<link" not in own
    with pytest.raises(KeyError, match="no request 9"):
        cp.views.write_report(trace, path, request_id=9)


def test_report_of_a_request_that_is_never_verified() -> None:
    mixed = cp.run(loaded(), PROMPTS, **SMALL, deterministic=[0])
    assert "never verified" in report_html(mixed, 1) and "Accepted whole" in report_html(mixed, 0)
    bare = cp.run(loaded(), PROMPTS[:1], **SMALL, capture="S", deterministic=True)
    assert "Every layer" not in report_html(bare, 0)
