"""Figures as files: every figure of the report, whole, in the format that was asked for, or refused by name."""

import re
import struct
import threading
from pathlib import Path
from xml.etree import ElementTree

import plotly.graph_objects as go
import pytest

import cacheprobe as cp
from cacheprobe.analysis.windows import pick_request
from cacheprobe.views import images
from cacheprobe.views.images import ImageError, image, svg_image
from cacheprobe.views.report.figures import report_drawings, report_figures
from tests.plots.test_views import HOSTILE, hostile
from tests.tiny import PROMPTS, SMALL, loaded, perturbed

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.DraftModel(perturbed(loaded(), 0.01)))


def png_size(content: bytes) -> tuple[int, int]:
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.rstrip().endswith(b"IEND\xaeB`\x82")
    return struct.unpack(">II", content[16:24])


def test_every_figure_of_the_report_is_a_file(trace: cp.Trace, tmp_path: Path) -> None:
    paths = cp.plots.write_figures(trace, tmp_path / "new", "svg", progress=False)
    names = ("accepted-whole", "rolled-back", "lens-grid", "lens-grid-all", "drafts", "prediction_depth")
    assert [path.name for path in paths] == [f"{name}.svg" for name in names]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in paths)
    for path in paths:
        content = path.read_text()
        assert ElementTree.fromstring(content).tag == f"{SVG}svg"
        assert "http" not in content.replace("http://www.w3.org/", "")


def test_figures_and_diagrams_as_pixels_and_on_paper(trace: cp.Trace) -> None:
    figure = report_figures(trace)["drafts"]
    drawn = report_drawings(trace, pick_request(trace.events()))
    drawings = {name: drawn[name] for name in ("rolled-back", "lens-grid")}
    assert png_size(image(figure, "png")) == (1800, 880)
    pixels = [svg_image(*drawing, "png") for drawing in drawings.values()]
    assert [png_size(one) for one in pixels] == [(2 * d.width, 2 * d.height) for d in drawings.values()]
    assert len(set(pixels)) == len(pixels)  # a diagram that was not there yet would leave a white page
    for printed in (image(figure, "pdf"), svg_image(*drawings["lens-grid"], "pdf")):
        assert printed.startswith(b"%PDF-") and b"%%EOF" in printed[-64:]
        assert b"/Font" in printed and printed.count(b"/Type /Page\n") == 1  # letters, on one page


def test_diagrams_stand_alone(trace: cp.Trace) -> None:
    drawings = report_drawings(hostile(trace), pick_request(trace.events()))
    assert set(drawings) == {"accepted-whole", "rolled-back", "lens-grid", "lens-grid-all"}
    for name, drawing in drawings.items():
        root = ElementTree.fromstring(drawing.markup)
        assert float(root.get("width")) == pytest.approx(drawing.width, abs=1)
        assert float(root.get("height")) == pytest.approx(drawing.height, abs=1)
        used = set(re.findall(r"url\(#([\w-]+)\)", drawing.markup))
        assert (used or "lens" in name) and used <= {pattern.get("id") for pattern in root.iter(f"{SVG}pattern")}
        # what not every program reads: names of colours, pages inside the picture
        assert "var(" not in drawing.markup and "foreignObject" not in drawing.markup and "@media" not in drawing.markup
        assert "<script" not in drawing.markup and HOSTILE[:9] not in drawing.markup
        said = [text.text for text in root.iter(f"{SVG}text")]
        loop = ("Prefill", "Decode", "Verify", "pending: committed, slot not written yet")
        for word in ("layer", "position", "log p of the committed token (nats)") if "lens" in name else loop:
            assert word in said
        classes = {name for node in root.iter() for name in (node.get("class") or "").split()}
        css = next(root.iter(f"{SVG}style")).text
        styled = ("box", "texture", "arrow", "strong", "muted", "green", "agrees", "v-1", "v9", "column", "computed")
        assert all(f".{kind}" in css for kind in styled if kind in classes)
    assert "Rollback" in drawings["rolled-back"].markup and "No rollback" in drawings["accepted-whole"].markup


def test_a_request_that_was_never_verified_and_thoughts_have_diagrams() -> None:
    plain = cp.run(loaded(), PROMPTS[:1], **SMALL, capture=None)
    assert set(report_drawings(plain, 0)) == {"decoded"} and report_figures(plain) == {}
    thinker = cp.load_model("coinflip-thinking")
    asked = cp.tasks.CoinFlip(people=3).examples(n=1, seed=3)
    run = cp.run(thinker, asked, window=4, deterministic=True, capacity=128, max_new_tokens=2, progress=False)
    drawing = report_drawings(run, 0)["thoughts"]
    root = ElementTree.fromstring(drawing.markup)
    said = " ".join(text.text or "" for text in root.iter(f"{SVG}text"))
    assert "The thought changes its mind" in said and "S₁ is zero." in said and "var(" not in drawing.markup
    used = set(re.findall(r"url\(#([\w-]+)\)", drawing.markup))
    assert used <= {pattern.get("id") for pattern in root.iter(f"{SVG}pattern")}


def test_what_is_missing_is_named_before_anything_is_written(
    trace: cp.Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "browser_path", lambda: None)
    with pytest.raises(ImageError, match="chromium, and there is none; as root apt-get install chromium"):
        cp.plots.write_figures(trace, tmp_path / "new", "pdf", progress=False)
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with pytest.raises(ImageError, match="kaleido, which is not here: pip install"):
        cp.plots.write_figures(trace, tmp_path / "new", progress=False)
    with pytest.raises(ValueError, match="unknown format 'gif' of figures; choose one of png, svg, pdf"):
        cp.plots.write_figures(trace, tmp_path / "new", "gif", progress=False)
    with pytest.raises(KeyError, match="no request 9"):
        cp.plots.write_figures(trace, tmp_path / "new", request_id=9, progress=False)
    assert not (tmp_path / "new").exists()
    bare = cp.run(loaded(), PROMPTS, **SMALL, capture=None, deterministic=True)
    written = cp.plots.write_figures(bare, tmp_path / "new", "svg", progress=False)  # diagrams need no browser
    assert written and all(path.suffix == ".svg" for path in written)


def test_a_browser_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    with pytest.raises(ImageError, match="drew nothing within 0 s"):
        images._within(0.05, lambda: over.wait() and b"")
    over.set()

    def broken() -> bytes:
        raise OSError("no such file")

    with pytest.raises(ImageError, match="could not draw the picture: no such file"):
        images._within(600, broken)
    monkeypatch.setenv("BROWSER_PATH", "/nowhere/chromium")
    assert images.browser_path() is None


def test_a_long_title_is_seen_whole_on_white() -> None:
    figure = go.Figure(go.Scatter(x=[1, 2], y=[1, 2]))
    figure.update_layout(title="a finding of many words " * 10 + "<br>and more", height=300, margin=dict(t=60))
    shown = images._for_paper(figure, 600)
    lines = shown.layout.title.text.split("<br>")
    assert lines[-1] == "and more" and len(lines) >= 4 and all(len(line) * 8.2 <= 600 for line in lines)
    assert shown.layout.height - 300 == shown.layout.margin.t - 60 == 22 * (len(lines) - 2)
    assert shown.layout.paper_bgcolor == "white" and figure.layout.paper_bgcolor is None
    assert png_size(image(figure, "png", width=600)) == (1200, 2 * shown.layout.height)
