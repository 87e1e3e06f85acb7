"""Turns figures and SVG files into PNG, SVG or PDF with kaleido, whose Chromium browser starts once and runs until the
program ends."""

import os
import textwrap
from base64 import b64encode
from collections.abc import Callable
from importlib.util import find_spec
from threading import Thread

import plotly.graph_objects as go

FORMATS = ("png", "svg", "pdf")
SCALE = 2
"""Pixels of a PNG for each pixel of the figure."""
SECONDS = 90
"""Longest time in seconds for one picture, the start of the browser included."""
_TITLE_COLUMN, _TITLE_LINE = 8.2, 22
"""Average width of a title's letter, and height of a title's line, in pixels."""


class ImageError(RuntimeError):
    """Raised if a picture cannot be drawn on this machine. The message names the cause."""


def browser_path() -> str | None:
    """Returns the path, as text, of the Chromium (or related browser) that kaleido would start. Returns None if no
    browser is found that can be executed, or if choreographer, the package with which kaleido starts browsers, is
    missing."""
    if find_spec("choreographer") is None:
        return None
    from choreographer.browsers.chromium import Chromium

    path = Chromium.find_browser(skip_local=False)
    return path if path and os.access(path, os.X_OK) else None


def require_browser() -> None:
    """Checks that kaleido and a Chromium browser are installed. Raises: ImageError, with the command that installs the
    missing one."""
    if find_spec("kaleido") is None:
        raise ImageError("pictures are drawn by kaleido, which is not here: pip install 'cacheprobe[dash]'")
    if browser_path() is None:
        raise ImageError(
            "pictures are drawn by a chromium, and there is none; as root apt-get install chromium, or name one in the "
            "environment variable BROWSER_PATH"
        )


def image(figure: go.Figure, kind: str, *, width: int | None = None) -> bytes:
    """Returns a plotly figure as the bytes of a file. kind: "png", "svg" or "pdf".

    width: pixels; by default the figure's own width, or 900.
    Raises: ImageError if the figure cannot be drawn; ValueError for another kind.
    """
    if kind not in FORMATS:
        raise ValueError(f"unknown format {kind!r} of a picture; choose one of {', '.join(FORMATS)}")
    require_browser()
    import kaleido

    on_paper = _for_paper(figure, width or figure.layout.width or 900)
    options = {"format": kind, "scale": SCALE if kind == "png" else 1}

    def draw() -> bytes:
        """Starts kaleido's browser if it does not run, and returns the drawn picture as bytes."""
        kaleido.start_sync_server(silence_warnings=True, mathjax=False, timeout=SECONDS)
        return kaleido.calc_fig_sync(on_paper.to_plotly_json(), opts=options)

    return _within(SECONDS + 10, draw)


def svg_image(markup: str, width: int, height: int, kind: str) -> bytes:
    """Returns an SVG file, given as text (`markup`), as the bytes of a PNG or a PDF. The PDF keeps lines and letters as
    vectors.

    width, height: of the SVG, in pixels.  kind: "png" or "pdf".
    Raises: ImageError if the file cannot be drawn.
    """
    source = "data:image/svg+xml;base64," + b64encode(markup.encode()).decode()
    whole = dict(xref="paper", yref="paper", x=0, y=1, sizex=1, sizey=1, sizing="stretch", source=source)
    bare = dict(margin=dict(t=0, b=0, l=0, r=0), xaxis_visible=False, yaxis_visible=False)
    return image(go.Figure(layout=go.Layout(images=[whole], width=width, height=height, **bare)), kind)


def _for_paper(figure: go.Figure, width: int) -> go.Figure:
    """Returns a copy of the figure on a white ground, `width` pixels wide. A long title is wrapped, and the copy is
    higher by the added lines."""
    copy = go.Figure(figure)
    copy.update_layout(width=width, paper_bgcolor="white", plot_bgcolor="white")
    title = copy.layout.title.text
    if title:
        columns = max(int(width / _TITLE_COLUMN), 20)
        lines = [
            line
            for part in title.split("<br>")
            for line in textwrap.wrap(part, columns, break_long_words=False, break_on_hyphens=False)
        ]
        more = _TITLE_LINE * (len(lines) - 1 - title.count("<br>"))
        top = copy.layout.margin.t if copy.layout.margin.t is not None else 100
        height = copy.layout.height or 450
        copy.update_layout(title_text="<br>".join(lines), margin_t=top + more, height=height + more)
    return copy


def _within(seconds: float, draw: Callable[[], bytes]) -> bytes:
    """Calls `draw` in a thread and returns the bytes of its picture. Raises: ImageError if `draw` fails or takes more
    than `seconds`."""
    results: list[bytes | BaseException] = []

    def draw_in_thread() -> None:
        """Calls `draw`, and appends its picture or its error to `results`."""
        try:
            results.append(draw())
        except BaseException as error:
            results.append(error)

    thread = Thread(target=draw_in_thread, daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise ImageError(f"{browser_path()} drew nothing within {seconds:.0f} s; does it start, with --headless?")
    if isinstance(results[0], BaseException):
        raise ImageError(f"{browser_path()} could not draw the picture: {results[0]}") from results[0]
    return results[0]
