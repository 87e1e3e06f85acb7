"""A dashboard in this process and a page of it in a real browser, for tests."""

import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request

import cacheprobe as cp
from cacheprobe.views.dashboard.app import listen
from cacheprobe.views.dashboard.run_list import RunList
from tests.chromium import PATIENCE
from tests.plots.test_views import hostile
from tests.tiny import PROMPTS, SMALL, loaded, perturbed

EMPTY = "about:blank"
EARLY = dict(drafter=cp.drafters.EarlyExit(layer=1), deterministic=[1])


def save_runs(folder: Path) -> Path:
    """a-one: of a random model; b-other: of its neighbour; c-thinking: of the shipped tiny model; d-hostile: a-one with
    an attack in place of every text; e-broken: half written."""
    shapes = {**SMALL, "prefill_chunk": 32, "pad_prefill": True}
    one = cp.run(loaded(), PROMPTS, **shapes, **EARLY)
    one.save(folder / "a-one")
    cp.run(perturbed(loaded(), 0.02), PROMPTS, **shapes, **EARLY).save(folder / "b-other")
    save_thinking(folder / "c-thinking")
    hostile(one).save(folder / "d-hostile")
    shutil.copytree(folder / "a-one", folder / "e-broken")
    (folder / "e-broken" / "manifest.json").unlink()
    return folder


def save_thinking(folder: Path) -> cp.Trace:
    examples = cp.tasks.CoinFlip(people=3).examples(2, seed=3)
    thinker = cp.load_model("coinflip-thinking")
    quick = dict(window=4, capacity=128, max_new_tokens=4, progress=False)
    trace = cp.run(thinker, examples, deterministic=True, **quick)
    trace.save(folder)
    return trace


@contextmanager
def served(run_list: RunList) -> Iterator[str]:
    """Address of a dashboard over the run_list."""
    server = listen(run_list, port=0)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def watched(browser: Browser, address: str, **settings: Any) -> Iterator[Page]:
    """An empty page that is to open the address. Fails at its end on any complaint, and on anything asked elsewhere.

    settings: width, color_scheme. A page of an earlier test is taken again, since it has the scripts compiled.
    """
    page = next((one for context in browser.contexts for one in context.pages if one.url == EMPTY), None)
    page = browser.new_page() if page is None else page
    page.set_default_timeout(PATIENCE)
    page.set_viewport_size({"width": settings.get("width", 1280), "height": 900})
    page.emulate_media(color_scheme=settings.get("color_scheme", "light"))
    complaints: list[str] = []
    host = address.split("?")[0]

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(_said(message))

    def fail(error: Error) -> None:
        complaints.append(error.stack or str(error))

    def ask(request: Request) -> None:
        if not request.url.startswith((host, "data:", "blob:")):
            complaints.append(request.url)

    heard = (("console", hear), ("pageerror", fail), ("request", ask))
    for event, listener in heard:
        page.on(event, listener)
    try:
        yield page
        assert complaints == [], complaints
    except BaseException:
        page.close()
        raise
    for event, listener in heard:
        page.remove_listener(event, listener)
    page.unroute_all()
    page.evaluate("localStorage.clear()")
    page.goto(EMPTY)


@contextmanager
def requests_of(page: Page) -> Iterator[list[dict[str, Any]]]:
    """What the page asks of the server meanwhile: of each request its questions, {view: {...}}."""
    asked: list[dict[str, Any]] = []

    def ask(request: Request) -> None:
        if request.method == "POST":
            asked.append(json.loads(request.post_data or "{}"))

    page.on("request", ask)
    yield asked
    page.remove_listener("request", ask)


def _said(message: ConsoleMessage) -> str:
    """With the address that it speaks of, which a resource that was not loaded does not name."""
    return f"{message.text} ({message.location['url']})"


@contextmanager
def opened(browser: Browser, address: str, **settings: Any) -> Iterator[Page]:
    """A watched page of the address, drawn."""
    with watched(browser, address, **settings) as page:
        page.goto(address)
        page.wait_for_selector("#page[data-at]", state="attached")
        yield page


def at(page: Page) -> dict[str, Any]:
    """The page's state."""
    return json.loads(page.get_attribute("#page", "data-at") or "{}")


def answered(page: Page, name: str, /, **asked: Any) -> str:
    """Wait until a view has answered a question with these parts; its text."""
    parts = json.dumps(asked)
    until(
        page,
        f"""(() => {{
            const view = document.getElementById('{name}-view'), said = view && view.dataset.answer;
            const wanted = {parts}, question = said ? JSON.parse(said) : null;
            return question && Object.keys(wanted).every(key => question[key] === wanted[key]);
        }})()""",
    )
    return page.inner_text(f"#{name}-view")


def until(page: Page, expression: str) -> None:
    """Wait until it holds; an error in it, on a page that is not there yet, does not end the waiting. Playwright's own
    way makes code of a text inside the page, whose policy forbids that."""
    page.evaluate(
        f"""new Promise((yes, no) => {{
            const end = performance.now() + {PATIENCE};
            const holds = () => {{ try {{ return {expression}; }} catch {{ return false; }} }};
            const look = () => {{
                if (holds()) yes(true);
                else if (performance.now() > end) no(new Error("never came true"));
                else setTimeout(look, 15);
            }};
            look();
        }})"""
    )


def heard(page: Page, is_so: Callable[[], bool]) -> None:
    """Wait until it is so of what the page's listeners were told."""
    end = time.monotonic() + PATIENCE / 1000
    while not is_so():
        assert time.monotonic() < end, "never came true"
        page.wait_for_timeout(15)


def asked(address: str, body: object) -> list[dict[str, Any]]:
    """What the server answers to questions, {view: {...}}, without a browser. Raises: HTTPError where it refuses."""
    sent = urllib.request.Request(f"{address}ask", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(sent) as answer:
        return [json.loads(line) for line in answer]


def choose(page: Page, menu: str, label: str) -> None:
    """Pick an option of one of the page's menus."""
    page.click(f"#{menu}")
    page.get_by_role("option", name=label).first.click()
