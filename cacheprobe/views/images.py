"""Turns figures and SVG files into PNG, SVG or PDF with kaleido, whose Chromium browser starts once and runs until the
program ends."""

import asyncio
import os
import textwrap
from base64 import b64decode
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import plotly.graph_objects as go

from cacheprobe.core.values import JsonDict

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


def kind_of(path: "str | Path", kind: str | None = None) -> str:
    """Returns the format of a picture's file: `kind`, or if it is None, the ending of the path. Raises: ValueError for
    another than png, svg and pdf."""
    found = (kind or Path(path).suffix.removeprefix(".")).lower()
    if found not in FORMATS:
        raise ValueError(f"unknown format {found!r} of a picture; choose one of {', '.join(FORMATS)}")
    return found


def image(figure: go.Figure, kind: str, *, width: int | None = None) -> bytes:
    """Returns a plotly figure as the bytes of a file. kind: "png", "svg" or "pdf".

    width: pixels; by default the figure's own width, or 900.
    Raises: ImageError if the figure cannot be drawn; ValueError for another kind.
    """
    kind_of("", kind)
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
    head = '<!doctype html><meta charset="utf-8"><style>body{margin:0}svg{display:block}</style>'
    return page_image(f"{head}<body>{markup}</body>", kind, (width, height))


def page_image(page: str, kind: str, size: tuple[int, int | None] = (1000, None)) -> bytes:
    """Returns a page of HTML that needs nothing else, given as text, as the bytes of a PNG, or of a PDF of one page, on
    a white ground.

    size: width and height in pixels; without a height, that of the content.  kind: "png" or "pdf".
    Raises: ImageError if the page cannot be drawn.
    """
    require_browser()
    return _within(SECONDS, lambda: asyncio.run(_page_image(page, kind, *size)))


async def _page_image(page: str, kind: str, width: int, height: int | None) -> bytes:
    """Opens a page in a browser of its own, and returns it as bytes of a PNG or PDF."""
    from choreographer import Browser

    with TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        async with Browser(headless=True) as browser:
            tab = await browser.create_tab()

            async def ask(command: str, **settings: object) -> JsonDict:
                """Sends a command of Chromium's protocol to the page and returns its result."""
                return (await tab.send_command(command, settings))["result"]

            shown = dict(width=width, height=height or 10, deviceScaleFactor=SCALE, mobile=False)
            await ask("Emulation.setDeviceMetricsOverride", **shown)
            light = [dict(name="prefers-color-scheme", value="light")]
            await ask("Emulation.setEmulatedMedia", media="screen", features=light)
            await ask("Page.enable")
            loaded = tab.subscribe_once("Page.loadEventFired")
            await ask("Page.navigate", url=file.as_uri())
            await loaded
            script = "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
            found = await ask("Runtime.evaluate", expression=script, returnByValue=True)
            across, down = (width, height) if height else found["result"]["value"]
            if kind == "png":
                clip = dict(x=0, y=0, width=across, height=down, scale=1)
                made = await ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
            else:
                inches = dict(paperWidth=across / 96, paperHeight=down / 96 + 0.02)
                margins = dict.fromkeys(("marginTop", "marginBottom", "marginLeft", "marginRight"), 0)
                made = await ask("Page.printToPDF", printBackground=True, **inches, **margins)
            return b64decode(made["data"])


def _for_paper(figure: go.Figure, width: int) -> go.Figure:
    """Returns a copy of the figure on a white ground, `width` pixels wide. A long title is wrapped, and the copy is
    higher by the added lines."""
    copy = go.Figure(figure)
    copy.update_layout(width=width, paper_bgcolor="white", plot_bgcolor="white")
    title = copy.layout.title.text
    if title:
        columns = max(int((width - 24) / _TITLE_COLUMN), 20)
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
