"""Compares two runs as HTML: which requests differ and from which token on, and how the runs' schedules differ."""

from collections.abc import Mapping, Sequence

import pandas as pd

from cacheprobe.analysis.comparison import RequestDifference, compare_requests, in_words
from cacheprobe.core.records import fingerprint_differences
from cacheprobe.core.values import JsonDict
from cacheprobe.views.diagrams.frame import Markup, TitledPicture
from cacheprobe.views.report.page import table
from cacheprobe.views.text import markup, shorten, text_of, visible
from cacheprobe.views.text import token_texts as known_texts

_AROUND = 24
"""Number of tokens shown before and after the first difference."""

_VALUE = 400
"""Most columns of a setting's value."""

UNCOMPARED = "log-probabilities are not compared: a run recorded none"

Pair = tuple[pd.DataFrame, pd.DataFrame]


def comparison(
    rows: Pair,
    events: Pair,
    request_id: int | None = None,
    *,
    names: tuple[str, str] = ("ours", "theirs"),
    fingerprints: tuple[Mapping[str, object], Mapping[str, object]] | None = None,
    token_texts: tuple[Mapping[int, str], Mapping[int, str]] = ({}, {}),
) -> Markup:
    """Returns HTML that compares two runs: how each request differs, and at most 48 tokens that both runs generated for
    one request, with a frame around the first that differs. Requests are compared by prompt, committed tokens and
    log-probabilities.

    rows, events: (ours, theirs), as trace.row_table and trace.events().  request_id: by default the first that differs
    or is not compared whole, else 0; no tokens are shown if its prompts differ.
    fingerprints: trace.fingerprint of both runs, to list how the schedules differ. token_texts: from `token_texts`, for
    tokens that rows do not name, such as the last one committed.
    Raises: ValueError for a request that neither run has, and for empty tables.
    """
    pair = [_requests(r, e) for r, e in zip(rows, events, strict=True)]
    differences = compare_requests(pair[0], pair[1], *events)
    if not differences:
        raise ValueError("the tables are empty: no request to compare; trace.row_table and trace.events() fill them")
    if request_id is None:
        request_id = next((d.request_id for d in differences if d.what != "equal"), 0)
    if not 0 <= request_id < len(differences):
        raise ValueError(f"there is no request {request_id} in either run; they have 0 to {len(differences) - 1}")
    one = differences[request_id]
    parts = [request_list(differences, request_id, tag="span"), f"<h4>{about_request(one)}</h4>"]
    if one.what not in ("prompt", "missing"):
        place = one.place if one.what == "tokens" else None
        texts = [{**known_texts(r), **more} for r, more in zip(rows, token_texts, strict=True)]
        answers = [requests[request_id]["committed_token_ids"] for requests in pair]
        start = len(pair[0][request_id]["prompt_token_ids"])
        parts.append(token_columns(answers, place, names, texts, f"request {request_id}", start))
    if fingerprints is not None:
        parts.append(
            f"<h4>Schedule fingerprints</h4>{fingerprint_block(fingerprint_differences(*fingerprints), names)}"
        )
    return TitledPicture(comparison_title(differences), "", "".join(parts)).alone


def _requests(rows: pd.DataFrame, events: pd.DataFrame) -> list[JsonDict]:
    """Returns a list with a dict for each request id from 0: prompt_token_ids and committed_token_ids, read from the
    rows table and the events table."""
    prompts = rows[rows.role == "prompt"].drop_duplicates(["request_id", "position"], keep="last")
    prompt_ids = prompts.sort_values("position").groupby("request_id").token_id.agg(list)
    committed_ids = events.sort_values("step").groupby("request_id").committed_token_ids.agg(
        lambda many: [int(token) for ids in many for token in ids]
    )  # fmt: skip
    count = 1 + max((int(index.max()) for index in (prompt_ids.index, committed_ids.index) if len(index)), default=-1)
    return [
        {"prompt_token_ids": prompt_ids.get(r, []), "committed_token_ids": committed_ids.get(r, [])}
        for r in range(count)
    ]


def about_request(one: RequestDifference) -> str:
    """Returns a sentence as plain text on how one request differs between two runs."""
    if one.what == "equal":
        return f"Request {one.request_id} is the same in both, log-probabilities included"
    if one.what == "tokens equal":
        return f"Request {one.request_id} committed the same tokens in both; {UNCOMPARED}"
    if one.what == "prompt":
        return f"Request {one.request_id} was asked another prompt in each run"
    if one.what == "missing" or one.place is None:
        return f"Request {one.request_id} is in one run alone"
    return f"Request {one.request_id}: {one.what} differ from generated token {one.place + 1} on"


def comparison_title(differences: Sequence[RequestDifference]) -> str:
    """Returns a sentence as plain text: how many requests differ between two runs, and in what. differences: from
    `analysis.comparison.compare_requests`."""
    count, differing = len(differences), [d for d in differences if d.what != "equal"]
    if not differing:
        return f"All {count} requests committed the same tokens, with the same log-probabilities bit for bit"
    if all(d.what == "tokens equal" for d in differences):
        return f"All {count} requests committed the same tokens; {UNCOMPARED}"
    words = {"prompt": "have other prompts", "missing": "are in one run alone", "tokens": "committed other tokens",
             "log-probabilities": "committed the same tokens with other log-probabilities",
             "tokens equal": "committed the same tokens, log-probabilities not compared"}  # fmt: skip
    parts = [f"{n} {text}" for what, text in words.items() if (n := sum(d.what == what for d in differing))]
    return f"Of {count} requests {', '.join(parts)}; {count - len(differing)} equal" if len(differing) < count else (
        f"Of {count} requests {', '.join(parts)}"
    )  # fmt: skip


def fingerprint_block(differences: Sequence[tuple[str, object, object]], names: tuple[str, str]) -> str:
    """Returns HTML: a table of the settings in which the schedules of two runs differ, or a note that they are
    equal."""
    if not differences:
        return "<p class='note'>Both ran under one schedule fingerprint: their bits can be compared.</p>"
    count = len(differences)
    lines: list[list[object]] = [
        [name, *("—" if v is None else in_words(v) for v in pair)] for name, *pair in differences
    ]
    shown = table(["setting", *names], lines)
    return (
        f"<p class='note'>The schedules differ in {count} setting{'s' * (count != 1)}, so equal bits are not promised."
        f"</p>{shown}"
    )


def request_list(differences: Sequence[RequestDifference], chosen: int, *, tag: str = "button") -> str:
    """Returns HTML: a button for each request, which says whether two runs differ in the request and from which token
    on. Buttons carry data-request.

    tag: "span" on a page without click handlers.
    """
    items = []
    for d in differences:
        css_class, sign = ("kept", "=") if d.what in ("equal", "tokens equal") else ("lost", "≠")
        place = f" at +{d.place + 1}" if d.place is not None else ""
        difference = d.what if d.what == "equal" else f"{d.what}{place}"
        chosen_class = " chosen" if d.request_id == chosen else ""
        items.append(
            f'<{tag} class="pick verdict {css_class}{chosen_class}" data-request="{d.request_id}">'
            f"<b>{sign}</b> request {d.request_id} <small>{difference}</small></{tag}>"
        )
    return f'<div class="verdicts">{"".join(items)}</div>'


def settings_block(differences: Sequence[tuple[str, str, str]], names: tuple[str, str]) -> str:
    """Returns HTML: a table of the chosen settings in which two runs differ, or a note that there is none.
    differences: from `analysis.comparison.setting_differences`."""
    if not differences:
        return "<p class='note'>Both runs have the same settings.</p>"
    lines: list[list[object]] = [[name, *(shorten(value, _VALUE) for value in pair)] for name, *pair in differences]
    return f"<div class='scroll'>{table(['setting', *names], lines)}</div>"


def counts_block(counts: tuple[Mapping[str, int], Mapping[str, int]], names: tuple[str, str]) -> str:
    """Returns HTML: a table of what two runs drafted and committed. counts: from `draft_verdicts.draft_counts`."""
    lines: list[list[object]] = [
        [words, *(f"{of[words]:,}{_share(of, words)}" for of in counts)] for words in counts[0]
    ]
    return f"<div class='scroll'>{table(['', *names], lines)}</div>"


def _share(counts: Mapping[str, int], words: str) -> str:
    """Returns text such as " (75%)" for the accepted ones of the draft tokens that verify passes read, else ""."""
    read = counts["draft tokens in verify passes"]
    return f" ({counts[words] / read:.0%})" if words == "of these accepted" and read else ""


def token_columns(
    pair: Sequence[Sequence[int]],
    place: int | None,
    names: tuple[str, str],
    token_texts: Sequence[Mapping[int, str]],
    whose: str,
    start: int,
    rejected: Sequence[Mapping[int, Sequence[tuple[int, int]]]] = ({}, {}),
) -> str:
    """Returns HTML of the tokens that two runs generated for one request, a column for each place: at most 48, from 24
    before the first differing token on, which is framed. Rejected drafts stand above the token that was committed in
    their place. Tokens carry data-place, the index of the generated token.

    place: index of the first token that differs, or None.  whose: the request's name, for the hover texts.
    start: position of the first generated token.  rejected: for each run, from `draft_verdicts.rejected_by_place`.
    """
    longest = max(len(ids) for ids in pair)
    first = max(0, (place or 0) - _AROUND)
    last = min(longest, first + 2 * _AROUND)
    lines = []
    for ids, name, texts, drafts in zip(pair, names, token_texts, rejected, strict=True):
        cells = []
        for i in range(first, last):
            css_class = "" if place is None or i < place else " first" if i == place else " after"
            tip = f"{whose}, generated token {i + 1}, position {start + i}"
            tokens = [
                f'<del class="pick tok" data-place="{i}" title="{tip}: rejected at step {step}">'
                f"{markup(visible(text_of(texts, token)))}</del>"
                for token, step in drafts.get(i, ())
            ]
            if i < len(ids):
                text = markup(visible(text_of(texts, ids[i])))
                tokens.append(f'<span class="pick tok{css_class}" data-place="{i}" title="{tip}">{text}</span>')
            elif i in (place, len(ids)):
                tokens.append(f'<span class="tok{css_class}">∅ ends here</span>')
            cells.append(f"<td>{''.join(tokens)}</td>")
        lines.append(f"<tr><th>{markup(name)}</th>{''.join(cells)}</tr>")
    which_tokens = f"Tokens {first + 1} to {last} of {longest}. " if last - first < longest else ""
    legend = "" if place is None else "Framed: the first that differs; paler: what followed it. "
    is_struck = any(first <= i < last for drafts in rejected for i in drafts)
    struck = "Struck out: rejected drafts, above what was committed." if is_struck else ""
    return (
        f'<div class="scroll"><table class="aligned">{"".join(lines)}</table></div>'
        f'<p class="note">{which_tokens}{legend}{struck}</p>'
    )
