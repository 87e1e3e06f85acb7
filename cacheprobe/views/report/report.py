"""Writes the report: a run on one HTML page that needs no other file. First the whole run, then requests one by one."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cacheprobe.core.files import write_whole
from cacheprobe.core.terminal import Listing, Progress
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.manifest import UNREAD
from cacheprobe.trace.tables.token_table import RunTokens, group_rejections, tokens_of
from cacheprobe.views.overview.figures import Links, overview_picture
from cacheprobe.views.overview.table import token_list
from cacheprobe.views.rejected import rejections_section
from cacheprobe.views.report.choice import (
    choice_sentence,
    choose_requests,
    dashboard_of,
    drawn_within,
    without_paths,
)
from cacheprobe.views.report.insight import drafts_sentence, first_insight
from cacheprobe.views.report.listings import requests_listing
from cacheprobe.views.report.page import Link, link, page, table, with_contents
from cacheprobe.views.report.request_section import RunContent, request_section, section_id
from cacheprobe.views.text import counted, markup, visible
from cacheprobe.views.thoughts.columns import finding as thoughts_finding
from cacheprobe.views.thoughts.columns import story_of

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

MOST_BYTES = 4_000_000
"""Largest size of a report."""
MOST_TOKENS, MOST_REQUESTS = 50, 1000
"""Largest numbers of lines of the report's tables of tokens and of requests."""


def write_report(
    trace: "Trace",
    path: "str | Path",
    requests: "int | Sequence[int] | str | None" = None,
    *,
    dashboard: str = "",
    progress: bool = False,
) -> Path:
    """Writes the report of a run as an HTML page of at most 4 MB to `path`, and returns the path. After an error the
    file is unchanged.

    requests: ids of the requests to draw in full, one or several, as far as there is room; "all"; None for up to 8,
    which the page names: first those with notes, then that of the first partly accepted draft, then those that lost
    most draft tokens.
    dashboard: address of a dashboard that shows the run, such as "http://127.0.0.1:8050/"; tokens and requests then
    lead there. Without it the page has no address and no path of this machine.
    progress: show the progress on stderr.
    Raises: KeyError for a request that the trace does not have; ValueError for text that is no address; NoteError if
    the run's notes cannot be read.
    """
    path = Path(path)
    html = report_html(trace, requests, dashboard=dashboard, progress=progress)
    return write_whole(path, lambda beside: beside.write_text(html, encoding="utf-8", errors="replace"))


def report_html(
    trace: "Trace",
    requests: "int | Sequence[int] | str | None" = None,
    *,
    dashboard: str = "",
    progress: bool = False,
) -> str:
    """Returns the report of a run as one HTML document that needs no network. Arguments and errors: of
    `write_report`."""
    content = RunContent.of(trace, dashboard_of(dashboard) if dashboard else "")
    choice = choose_requests(trace, content.notes, requests)
    whole = _Whole(tokens_of(trace), requests_listing(trace), rejections_section(trace))
    with Progress(len(choice.request_ids) + 1, "drawing", "sections", enabled=progress) as bar:

        def drawn(request_id: int) -> str:
            """Returns HTML of one request, and advances the bar."""
            bar.advance()
            return request_section(content, request_id)

        largest = _page(content, whole, dict.fromkeys(choice.request_ids, "<h2></h2>"), "")  # with all links
        parts = drawn_within(choice, drawn, MOST_BYTES - _RESERVE - len(largest.encode("utf-8", "replace")))
        bar.advance()
        return _page(content, whole, parts, choice_sentence(choice, list(parts), len(trace.requests)))


_RESERVE = 100_000
"""Bytes for the sentence on the chosen requests, their headings in the list of contents, and links of the others."""


class _Whole(NamedTuple):
    """Holds the tables of the whole run that a report shows."""

    tokens: RunTokens
    requests: Listing
    rejections: str
    """HTML of the rejected drafts."""


def _page(content: RunContent, whole: _Whole, parts: dict[int, str], choice: str) -> str:
    """Returns the whole document. parts: HTML of the drawn requests by id.  choice: plain text on these."""
    trace, links = content.trace, _links(content, parts)
    sections = [
        ("notes", _notes(content, parts)),
        ("overview", _overview(content, whole.tokens, links)),
        ("tokens", _tokens(whole.tokens, links)),
        ("requests", _requests(content, whole.requests, parts)),
        *((section_id(request_id), html) for request_id, html in parts.items()),
        ("rejected", whole.rejections),
        ("controls", _controls(trace)),
    ]
    body = with_contents(_head(content, list(parts), choice), [(name, html) for name, html in sections if html])
    count = counted(len(trace.requests), "request")
    return page(f"cacheprobe: {count} of {without_paths(str(trace.fingerprint['model']))}", body)


def _links(content: RunContent, parts: dict[int, str]) -> Links:
    """Returns the links of the overview: into the dashboard if the report has one, else to the request's part."""

    def to_token(request_id: int, step: int, position: int, inside: str) -> str:
        """Returns HTML of a token as a link."""
        return _wrapped(content.place(request_id, step, position) or _to_request(request_id, parts), inside)

    def to_request(request_id: int, inside: str) -> str:
        """Returns HTML or SVG of a request as a link."""
        return _wrapped(_to_request(request_id, parts) or content.place(request_id), inside)

    return Links(to_token, to_request)


def _to_request(request_id: int, parts: dict[int, str]) -> Link | None:
    """Returns a link to a request's part of the report; None if it is not drawn."""
    return Link(str(request_id), f"#{section_id(request_id)}") if request_id in parts else None


def _wrapped(to: Link | None, inside: str) -> str:
    """Returns HTML inside of a link."""
    return inside if to is None else link(to._replace(text="")).replace("></a>", f">{inside}</a>")


def _head(content: RunContent, drawn: list[int], choice: str) -> str:
    trace = content.trace
    lead = [run_sentence(trace), *behaviour_sentences(trace.meta["behaviour"]), markup(choice)]
    if drawn and (to_see := _first_thing_to_see(content, drawn)):
        lead.insert(-1, f"<strong>One thing to see:</strong> {markup(to_see)}{'' if to_see.endswith('…') else '.'}")
    paragraphs = "".join(f"<p class='lead'>{sentence}</p>" for sentence in lead if sentence)
    note = "In the dashboard every token can be chosen: <code>cacheprobe dash RUN</code>."
    if content.dashboard:
        note = f"Tokens lead to the dashboard at {link(Link(content.dashboard, content.dashboard))}."
    return f"<h1>What the model believed before it committed</h1>{paragraphs}<p class='note'>{note}</p>"


def _first_thing_to_see(content: RunContent, drawn: list[int]) -> str:
    """Returns a sentence as plain text on the thoughts of a drawn request, or else on a token of one of the verify
    passes; "" without either."""
    trace, events = content.trace, content.events
    if trace.thought_table is not None:
        thinking = set(trace.thought_table.request_id)
        for request_id in filter(thinking.__contains__, drawn):
            return thoughts_finding(story_of(trace.thoughts(), trace.row_table, events, request_id, content.texts))
    of_drawn = events[events.request_id.isin(drawn)]
    return first_insight(content.readings, trace.row_table, of_drawn, content.texts)


def _notes(content: RunContent, parts: dict[int, str]) -> str:
    """Returns HTML of the notes, each with a link to its request; "" if there are none."""
    lines = []
    for note in content.notes.itertuples():
        request_id, words = int(note.request_id), f"request {note.request_id}"
        is_on_token = note.position is not None and note.token != ""
        words += f", position {note.position}: {visible(note.token)}" if is_on_token else ""
        to = _to_request(request_id, parts) or content.place(request_id)
        place = markup(words) if to is None else link(to._replace(text=words))
        lines.append(f"<li>{place} <span class='written'>{markup(note.text or 'pinned')}</span></li>")
    return f"<h2>Notes</h2><ul class='notes'>{''.join(lines)}</ul>" if lines else ""


def _overview(content: RunContent, tokens: RunTokens, links: Links) -> str:
    picture = overview_picture(tokens, content.events, links)
    unread = f" {markup(f'{UNREAD}.')}" if content.trace.is_unread and content.readings is None else ""
    lead = f"<p class='lead'>{markup(picture.finding)}.</p><p class='note'>{picture.note}{unread}</p>"
    return f"<h2>The whole run</h2>{lead}{picture.body}"


def _tokens(tokens: RunTokens, links: Links) -> str:
    """Returns HTML of the lines of the token table that are of most interest."""
    lines = group_rejections(tokens.lines)
    by, words = "disagreement", "largest disagreement between early and late layers"
    if lines.disagreement.isna().all():
        by, words = "logprob_nats", "lowest log-probability"
    lines = lines.sort_values(by, ascending=by == "logprob_nats", kind="stable", na_position="last")
    note = f"Those with the {words} first. In Python: <code>cp.analysis.token_table(trace)</code>."
    return f"<h2>The most interesting tokens</h2><p class='note'>{note}</p>{token_list(lines, MOST_TOKENS, links)}"


def _requests(content: RunContent, listing: Listing, parts: dict[int, str]) -> str:
    """Returns HTML of the table of all requests."""
    lines = []
    for request_id, *cells in listing.rows[:MOST_REQUESTS]:
        to = _to_request(int(request_id), parts) or content.place(int(request_id))
        first = request_id if to is None else to._replace(text=request_id)
        lines.append([first, *map(_cell, cells)])
    more = f"The first {MOST_REQUESTS:,} of {len(listing.rows):,}." if len(listing.rows) > MOST_REQUESTS else ""
    return f"<h2>All requests</h2><p class='note'>{more}</p>{table(listing.columns, lines)}"


def _cell(text: str) -> int | str:
    """Returns a cell of the table of requests: a number as an int, "—" for none, and text without paths."""
    return int(text) if text.isdecimal() else "—" if text == "-" else without_paths(text)


def _controls(trace: "Trace") -> str:
    names = ("name", "dtype", "tolerance", "num_rows")
    checks = [[*(check[name] for name in names), float(check["worst"])] for check in trace.meta["checks"]]
    columns = ["check", "dtype", "tolerance", "rows", "worst, as a share of the tolerance"]
    checks_table = table(columns, checks) if checks else "<p class='note'>This run made no checks.</p>"
    settings = [[name, without_paths(str(value))] for name, value in trace.fingerprint.items()]
    return (
        "<h2>Controls</h2><p class='note'>Identities that the captured states were held to while the run went on.</p>"
        f"{checks_table}<details><summary>Schedule fingerprint: what the bits of this run depend on</summary>"
        f"{table(['setting', 'value'], settings)}</details>"
    )


def run_sentence(trace: "Trace") -> str:
    """Returns sentences as HTML on a run: the model, the numbers of requests and steps, and the numbers of accepted and
    rolled-back draft tokens."""
    fingerprint, note = trace.fingerprint, trace.meta["weights_note"]
    phases = trace.event_table.drop_duplicates("step").phase.value_counts()
    steps = ", ".join(f"{int(phases.get(phase, 0))} {phase}" for phase in ("prefill", "decode", "verify"))
    sentences = f"<code>{_shown(fingerprint['model'])}</code>{f' ({_shown(note)})' if note else ''} "
    sentences += f"in {markup(fingerprint['dtype'])} answered {counted(len(trace.requests), 'request')} "
    sentences += f"in {int(phases.sum())} steps ({steps}). "
    drafter = trace.meta["drafter"]
    sentences += drafts_sentence(f"<code>{_shown(drafter)}</code>" if drafter else "", trace.event_table)
    return sentences + (f" In short, {trace.draft_line}." if trace.draft_line else "")


def _shown(text: str) -> str:
    """Returns a setting of the run as HTML, without the paths of a machine."""
    return markup(without_paths(str(text)))


def behaviour_sentences(behaviour: JsonDict | None) -> list[str]:
    """Returns a list of one or two texts as HTML: the model's accuracy in its task, and a warning unless the lower end
    of its 95 % interval is above chance; [] without a task. behaviour: meta["behaviour"] of the trace."""
    if not behaviour:
        return []
    b = behaviour
    accuracy_sentence = (
        f"Task: {_percent(b['accuracy'])} of {b['num_examples']} answers are right (95 % interval "
        f"{_percent(b['accuracy_low'])} to {_percent(b['accuracy_high'])}), chance is {_percent(b['chance'])}; "
        f"{b['num_unparsed']} gave no answer that can be read. The answer words hold {_percent(b['answer_mass'], 1)} "
        f"of the first token's probability; forced to choose between them, {_percent(b['forced_accuracy'])} are right."
    )
    warning = "Not above chance: this model does not solve the task, and nothing here is said about “its state”."
    low, chance = b["accuracy_low"], b["chance"]
    is_above_chance = low is not None and chance is not None and low > chance
    return [accuracy_sentence] if is_above_chance else [accuracy_sentence, f"<strong>{warning}</strong>"]


def _percent(share: float | None, digits: int = 0) -> str:
    return "unknown" if share is None else f"{share:.{digits}%}"
