"""Lists a run, or one of its requests, as tables for a terminal."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from cacheprobe.analysis.measures import agreement, lens_readings
from cacheprobe.analysis.windows import Window, find_windows, verified_requests
from cacheprobe.core.hook_names import site_label
from cacheprobe.core.terminal import Listing
from cacheprobe.trace.manifest import UNREAD
from cacheprobe.trace.tables.draft_verdicts import verified_drafts
from cacheprobe.views.text import columns_of, plain, shorten, text_of, token_texts, visible
from cacheprobe.views.thoughts.columns import story_of
from cacheprobe.views.thoughts.picture import THOUGHT_COLUMNS, thought_lines

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

_WIDTH = 44
"""Largest width of a prompt or text in the list of requests, in columns of a monospaced font."""
_PHASES = ("prefill", "decode", "verify")


def run_listings(trace: "Trace") -> list[Listing]:
    """Returns a list of `Listing` (tables for a terminal) on a run: settings, fingerprint, requests, verdicts, and
    agreement by layer."""
    listings = [Listing("run", (), _about(trace))]
    if command := trace.meta.get("command"):
        origin = f", settings from {command['config']}" if command["config"] else ""
        listings.append(Listing(f"cacheprobe {command['name']}{origin}", (), _pairs(command["settings"])))
    if trace.meta.get("interventions"):
        edits = trace.edits()
        lines = [tuple("-" if pd.isna(value) else str(value) for value in line) for line in edits.iloc[:, :-1].values]
        listings.append(Listing("interventions, and the rows that each changed", tuple(edits.columns[:-1]), lines))
    return [
        *listings,
        Listing("fingerprint", (), _pairs(trace.fingerprint)),
        requests_listing(trace),
        Listing("verdicts", (), _verdicts(trace.events()), "" if trace.num_drafted else "nothing was drafted"),
        _agreement(trace, None),
    ]


def request_listings(trace: "Trace", request_id: int) -> list[Listing]:
    """Returns a list of `Listing` (tables for a terminal) on one request: prompt, verify windows, verdicts, rows,
    cache, agreement by layer, and thoughts if there are any.

    Raises: KeyError for a request that the trace does not have.
    """
    text = trace.text(request_id)
    request, events = trace.requests[request_id], trace.events()
    events_of_request = events[events.request_id == request_id]
    texts = token_texts(trace.row_table, trace.hypothesis_table)
    stopped_by = trace.meta.get("stopped_by", {}).get(str(request_id))
    about = [
        ("prompt", _prompt(trace, request_id, texts)),
        ("text", plain(text)),
        ("tokens", f"{request.num_prompt_tokens} of the prompt, {len(trace.committed(request_id))} committed"),
        ("deterministic", "yes" if request.is_deterministic else "no"),
        ("finish", _finish(trace, request_id) + (f", by {plain(stopped_by)}" if stopped_by else "")),
        ("arrived", f"at step {request.arrival_step}"),
    ]
    if request.example is not None:
        about.append(("right answer", plain(request.example.answer.strip())))
    sampling = request.sampling
    if sampling is not None:
        fields = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}
        about += _pairs({f"sampling: {name}": value for name, value in fields.items() if value not in (None, ())})
    windows = () if events_of_request.empty else find_windows(events, request_id)
    counts = trace.rows(request_id).groupby(["phase", "status"]).size()
    of_windows = ("step", "first position", "fed", "the verifier's own", "accepted", "verdict")
    lines, never = [_window_line(window, texts) for window in windows], "" if windows else "it was never verified"
    listings = [
        Listing(f"request {request_id}", (), about),
        Listing("windows", of_windows, lines, never),
        Listing("verdicts", (), _verdicts(events_of_request)),
        Listing("rows", ("pass", "status", "rows"), [(*map(str, key), str(n)) for key, n in counts.items()]),
        _cache(trace, request_id),
        _agreement(trace, request_id),
    ]
    if trace.thought_table is not None and (trace.thought_table.request_id == request_id).any():
        lines = thought_lines(story_of(trace.thought_table, trace.row_table, events, request_id, texts))
        rows = [tuple(_as_text(value) for value in line) for line in lines]
        listings.append(Listing("thoughts", tuple(THOUGHT_COLUMNS), rows))
    return listings


def _cache(trace: "Trace", request_id: int) -> Listing:
    """Returns a `Listing` with the number of a request's cache slots at its end, by provenance (who wrote a slot)."""
    if "ledger" in trace.missing:
        return Listing("cache at its end", (), [], plain(trace.missing["ledger"]))
    return Listing("cache at its end", (), _pairs(trace.ledger(request_id).provenance.value_counts().to_dict()))


def _about(trace: "Trace") -> list[tuple[str, str]]:
    meta, finger = trace.meta, trace.fingerprint
    steps = trace.event_table.drop_duplicates("step").phase.value_counts()
    capture = ", ".join((*map(site_label, trace.store.sites), *trace.store.heads, *trace.store.modules)) or "no states"
    about = [
        ("model", plain(str(finger["model"]))),
        ("weights", plain(meta["weights_note"] or "as they were loaded")),
        ("kind", meta["kind"]),
        ("drafter", plain(meta["drafter"]) if meta["drafter"] else "the fast path, for deterministic requests"),
        ("lens", _lens(trace)),
        ("states", f"{capture} of {len(trace.store.layers)} layers"),
        ("steps", ", ".join(f"{int(steps.get(phase, 0))} {phase}" for phase in _PHASES)),
        ("rows", _counts(trace.row_table.status)),
        ("readings", f"{0 if trace.hypothesis_table is None else len(trace.hypothesis_table):,}"),
        ("task", _task(trace)),
    ]
    if trace.thought_table is not None:
        about.append(("thoughts", f"{len(trace.thought_table):,}"))
    if "comparison" in trace.missing:
        about.append(("comparison", plain(trace.missing["comparison"])))
    if trace.feature_table is not None:
        left_out = "" if meta["capture"].get("include_special", True) else ", without first and special tokens"
        about.append(("features", f"{len(trace.feature_table):,}{left_out}"))
    if behaviour := meta["behaviour"]:
        share, low, high = (behaviour[name] for name in ("accuracy", "accuracy_low", "accuracy_high"))
        answers = f"{share:.0%} of {behaviour['num_examples']} right, 95 % interval {low:.0%} to {high:.0%}"
        about.append(("answers", f"{answers}, chance {behaviour['chance']:.0%}"))
    return about


def _lens(trace: "Trace") -> str:
    """Returns the name of the lens that read the run, or text that says that none did, or that Z is not read yet."""
    if trace.hypothesis_table is not None:
        return plain(trace.meta["lens"])
    return f"{plain(trace.meta['lens'])}, not read yet" if trace.is_unread else "none was read"


def _task(trace: "Trace") -> str:
    examples = [r.example for r in trace.requests if r.example is not None]
    if not examples:
        return "none: prompts of their own"
    answers = sorted({answer.strip() for example in examples for answer in example.answers})
    return f"{len(examples)} questions; answers: {shorten(plain(', '.join(answers)), 2 * _WIDTH)}"


def requests_listing(trace: "Trace") -> Listing:
    """Returns a `Listing` with one line for each request of a run: its texts, counts of tokens, and how it ended."""
    columns = ("request", "kind", "prompt", "text", "tokens", "drafted", "accepted", "rolled back", "finish")
    texts = token_texts(trace.row_table, trace.hypothesis_table)
    events = trace.events()
    with_verdict = verified_requests(events)
    rows = []
    for request in trace.requests:
        request_id = int(request.request_id or 0)
        events_of_request = events[events.request_id == request_id]
        drafted, accepted, _, rolled_back = map(str, verified_drafts(events_of_request))
        is_verified = request_id in with_verdict
        kind = "deterministic" if request.is_deterministic else "verified" if is_verified else "not verified"
        texts_shown = _end_of(_prompt(trace, request_id, texts)), shorten(plain(trace.text(request_id)), _WIDTH)
        counts = (drafted, accepted, rolled_back) if is_verified else ("-", "-", "-")
        count = str(len(trace.committed(request_id)))
        rows.append((str(request_id), kind, *texts_shown, count, *counts, _finish(trace, request_id)))
    return Listing("requests", columns, rows)


def _verdicts(events: pd.DataFrame) -> list[tuple[str, str]]:
    """Returns a list of (name, count as text) on the verify passes with a verdict in the events table, such as the
    tokens drafted, accepted and rolled back."""
    verify = events[events.num_accepted.notna()]
    drafted, accepted, rejected, rolled_back = verified_drafts(events)
    counts = {
        "verify passes of a request": len(verify),
        "accepted whole": int((verify.draft_token_ids.map(len) > 0).sum()) - rejected,
        "rolled back": rejected,
        "tokens drafted": drafted,
        "tokens accepted": accepted,
        "tokens rolled back": rolled_back,
        "tokens recovered": int(verify.recovered_token_id.notna().sum()),
        "tokens bonus": int(verify.bonus_token_id.notna().sum()),
    }
    return _pairs(counts)


def _agreement(trace: "Trace", request_id: int | None) -> Listing:
    """Returns a `Listing` by layer and verdict on the draft: the share of lens readings whose most likely token is the
    committed one. request_id: None for all requests."""
    title = "first choice = committed token, by layer"
    if trace.hypothesis_table is None:
        why = UNREAD if trace.is_unread else "this run read no lens; with Z among the captured sites it does"
        return Listing(title, (), [], why)
    readings = lens_readings(trace)
    if request_id is not None:
        readings = readings[readings.request_id == request_id]
    if readings.agrees.notna().sum() == 0:
        return Listing(title, (), [], "no reading has a committed token to compare with")
    table = agreement(readings)
    cells = table.map(lambda share: "-" if pd.isna(share) else f"{share:.2f}")
    rows = [(str(layer), *shares) for layer, *shares in cells.itertuples()]
    return Listing(title, ("layer", *(str(status).replace("_", " ") for status in table.columns)), rows)


def _window_line(window: Window, texts: dict[int, str]) -> tuple[str, ...]:
    """Returns one line of the list of verify windows as a tuple of texts: step, first position, tokens fed, the
    verifier's own tokens, number accepted, verdict."""
    fed, own = (
        " ".join(visible(text_of(texts, token_id)) for token_id in ids)
        for ids in ((window.newest_token_id, *window.draft_token_ids), window.target_token_ids)
    )
    verdict = "rolled back" if window.is_rollback else "accepted whole" if window.is_full_match else "nothing drafted"
    accepted = f"{window.num_accepted} of {len(window.draft_token_ids)}"
    return (str(window.step), str(window.start - 1), fed, own, accepted, verdict)


def _prompt(trace: "Trace", request_id: int, texts: dict[int, str]) -> str:
    request = trace.requests[request_id]
    if isinstance(request.prompt, str):
        return plain(request.prompt)
    return "".join(plain(text_of(texts, int(token_id))) for token_id in request.prompt_token_ids or ())


def _finish(trace: "Trace", request_id: int) -> str:
    error = trace.meta["errors"].get(str(request_id))
    return f"error: {plain(error)}" if error else str(trace.meta["finish"].get(str(request_id), "unknown"))


def _end_of(text: str) -> str:
    """Returns a text of at most 44 columns unchanged, and of a longer one "…" with the end."""
    return text if columns_of(text) <= _WIDTH else "…" + shorten(text[::-1], _WIDTH)[:-1][::-1]


def _counts(column: pd.Series) -> str:
    return ", ".join(f"{count:,} {str(name).replace('_', ' ')}" for name, count in column.value_counts().items())


def _pairs(values: Mapping[str, object]) -> list[tuple[str, str]]:
    return [(plain(str(name)), _as_text(value)) for name, value in values.items()]


def _as_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return plain(text) if text else '""'
