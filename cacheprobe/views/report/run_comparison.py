"""Compares two runs as HTML: which requests differ and from which token on, and how the runs' schedules differ; and
draws the lens readings of one request in both, and their difference, as heat maps under one cursor."""

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.analysis.comparison import RequestDifference, compare_requests, in_words
from cacheprobe.core.records import fingerprint_differences
from cacheprobe.core.values import JsonDict
from cacheprobe.views.diagrams.frame import Markup
from cacheprobe.views.diagrams.lens_grid import FLOOR_NATS, reads_and_predicts
from cacheprobe.views.report.page import table
from cacheprobe.views.style import layout_template, panels
from cacheprobe.views.text import counted, markup, shorten, text_of, token_label, visible
from cacheprobe.views.text import token_texts as known_texts

_AROUND = 24
"""Number of tokens shown before and after the first difference."""

_VALUE = 400
"""Most columns of a setting's value."""

UNCOMPARED = "log-probabilities are not compared: a run recorded none"

Pair = tuple[pd.DataFrame, pd.DataFrame]
RejectedByPlace = Mapping[int, Sequence[tuple[int, int]]]


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
    texts = [{**known_texts(r), **more} for r, more in zip(rows, token_texts, strict=True)]
    html = request_block(differences, request_id, pair, names, texts, tag="span")
    if fingerprints is not None:
        html += f"<h4>Schedule fingerprints</h4>{fingerprint_block(fingerprints, names)}"
    return Markup.of(comparison_title(differences), html)


def request_block(
    differences: Sequence[RequestDifference],
    request_id: int,
    requests: Sequence[Sequence[JsonDict]],
    names: tuple[str, str],
    token_texts: Sequence[Mapping[int, str]],
    rejected: Sequence[RejectedByPlace] = ({}, {}),
    *,
    tag: str = "button",
) -> str:
    """Returns HTML: the list of requests, how one of them differs between two runs, and the tokens of that one, unless
    its prompts differ.

    requests: of each run, dicts with prompt_token_ids and committed_token_ids.  rejected: for each run, from
    `draft_verdicts.rejected_by_place`.  tag: of the items of the list; "span" on a page without click handlers.
    """
    one = differences[request_id]
    html = f"{request_list(differences, request_id, tag=tag)}<h4>{about_request(one)}</h4>"
    if one.what in ("prompt", "missing"):
        return html
    ids = [of_run[request_id]["committed_token_ids"] for of_run in requests]
    start = len(requests[0][request_id]["prompt_token_ids"])
    return html + token_columns(one, ids, start, names, token_texts, rejected)


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
    equal = f"; {count - len(differing)} equal" if len(differing) < count else ""
    return f"Of {count} requests {', '.join(parts)}{equal}"


def fingerprint_block(fingerprints: tuple[Mapping[str, object], Mapping[str, object]], names: tuple[str, str]) -> str:
    """Returns HTML: a table of the settings in which the schedules of two runs differ, or a note that they are
    equal."""
    differences = fingerprint_differences(*fingerprints)
    if not differences:
        return "<p class='note'>Both ran under one schedule fingerprint: their bits can be compared.</p>"
    lines = [[name, *("—" if v is None else in_words(v) for v in pair)] for name, *pair in differences]
    settings = counted(len(lines), "setting")
    note = f"<p class='note'>The schedules differ in {settings}, so equal bits are not promised.</p>"
    return note + table(["setting", *names], lines)


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
    lines = [[name, *(shorten(value, _VALUE) for value in pair)] for name, *pair in differences]
    return table(["setting", *names], lines)


def counts_block(counts: tuple[Mapping[str, int], Mapping[str, int]], names: tuple[str, str]) -> str:
    """Returns HTML: a table of what two runs drafted and committed. counts: from `draft_verdicts.draft_counts`."""

    def cell(of: Mapping[str, int], words: str) -> str:
        """Returns the count; with the share of the draft tokens that verify passes read, if it is of accepted ones."""
        read = of["draft tokens in verify passes"]
        return f"{of[words]:,}" + (f" ({of[words] / read:.0%})" if words == "of these accepted" and read else "")

    return table(["", *names], [[words, *(cell(of, words) for of in counts)] for words in counts[0]])


def token_columns(
    one: RequestDifference,
    pair: Sequence[Sequence[int]],
    start: int,
    names: tuple[str, str],
    token_texts: Sequence[Mapping[int, str]],
    rejected: Sequence[RejectedByPlace] = ({}, {}),
) -> str:
    """Returns HTML of the tokens that two runs generated for one request, a column for each place: at most 48, from 24
    before the first differing token on, which is framed. Rejected drafts stand above the token that was committed in
    their place. Tokens carry data-place, the index of the generated token.

    one: how the request differs.  pair: token ids of both runs.  start: position of the first generated token.
    rejected: for each run, from `draft_verdicts.rejected_by_place`.
    """
    place = one.place if one.what == "tokens" else None
    longest = max(len(ids) for ids in pair)
    first = max(0, (place or 0) - _AROUND)
    last = min(longest, first + 2 * _AROUND)
    lines = []
    for ids, name, texts, drafts in zip(pair, names, token_texts, rejected, strict=True):
        cells = []
        for i in range(first, last):
            css_class = "" if place is None or i < place else " first" if i == place else " after"
            tip = f"request {one.request_id}, generated token {i + 1}, position {start + i}"
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


_MOST = 60
"""Largest number of positions that are drawn."""
_LABEL, _MOST_TICKS = 10, 30
_COLOURS = [(0, "#c2702b"), (0.5, "rgba(128,128,128,.12)"), (1, "#2b8cbe")]
"""Readable on light and dark paper."""
_READ = ["token", "logprob_nats", "committed_token", "committed_logprob_nats"]
_NATS = ["committed_logprob_nats", "committed_logprob_nats_theirs"]


class NothingToCompare(ValueError):
    """Raised if two runs have no lens reading of the same place."""


def lens_difference(ours: pd.DataFrame, theirs: pd.DataFrame, names: tuple[str, str] = ("ours", "theirs")) -> go.Figure:
    """Returns a plotly figure of three heat maps with one cursor: by layer and position, the log-probability in nats of
    the token that was committed next, in ours and in theirs, and ours minus theirs. Hover texts have both runs' first
    choices.

    Only positions before the first committed token that differs are drawn, at most the last 60 of these: after it the
    runs read other texts. A place whose next tokens differ is blank in the difference, which is left out if it is
    zero or blank everywhere.
    ours, theirs: readings of one request and site, as in `Trace.hypotheses`; only committed rows are used.
    Raises: NothingToCompare if no place was read in both runs before the first token that differs.
    """
    keys = ["position", "layer"]
    pair = [table[table.status == "committed"][[*keys, *_READ, "committed_token_id"]] for table in (ours, theirs)]
    both = pair[0].merge(pair[1], on=keys, suffixes=("", "_theirs")).sort_values(keys)
    is_other = (both.committed_token_id != both.committed_token_id_theirs).fillna(False)
    if is_other.any():
        both = both[both.position <= both.position[is_other].min()]
    if both.empty:
        raise NothingToCompare("the runs read no place in common before the first token that differs")
    both = both[both.position.isin(sorted(both.position.unique())[-_MOST:])]
    is_same = (both.committed_token_id == both.committed_token_id_theirs).fillna(False)
    difference = (both[_NATS[0]] - both[_NATS[1]]).where(is_same)
    return _figure(both.assign(difference=difference, hover=_hovers(both, names)), names)


def _figure(both: pd.DataFrame, names: tuple[str, str]) -> go.Figure:
    has_difference = bool(both.difference.fillna(0).any())
    positions, values = sorted(both.position.unique()), [*_NATS, *["difference"] * has_difference]
    titles = [*map(markup, names), f"{markup(names[0])} minus {markup(names[1])}"]
    figure = panels(titles[: len(values)], lines=len(values), shared_xaxes=True, vertical_spacing=0.06)
    hover = both.pivot(index="layer", columns="position", values="hover").to_numpy()
    for row, column in enumerate(values, start=1):
        grid = both.pivot(index="layer", columns="position", values=column)
        figure.add_heatmap(
            x=list(range(len(positions))), y=grid.index.tolist(), z=grid.to_numpy(dtype=float, na_value=float("nan")),
            text=hover, hovertemplate="%{text}<extra></extra>", xgap=1, ygap=1, row=row, col=1,
            coloraxis="coloraxis2" if row == 3 else "coloraxis",
        )  # fmt: skip
        figure.update_yaxes(title="layer", row=row, col=1)
    next_tokens = both.drop_duplicates("position").set_index("position").committed_token
    ticks = list(range(0, len(positions), -(-len(positions) // _MOST_TICKS)))
    labels = [f"{positions[i] + 1} {token_label(str(next_tokens[positions[i]]), _LABEL)}" for i in ticks]
    figure.update_xaxes(
        tickvals=ticks, ticktext=[markup(label) for label in labels], tickangle=-60,
        showspikes=True, spikemode="across", spikethickness=1, spikedash="dot", spikesnap="data",
    )  # fmt: skip
    figure.update_xaxes(title="position and text of the committed token", row=len(values), col=1)
    largest = float(both.difference.abs().fillna(0).max())
    apart = f"at most {largest:.2g} nats apart" if largest else "the same in both"
    if both.difference.isna().all():
        apart = "the runs go on with other tokens"
    figure.update_layout(
        title=f"Log-probability of the next committed token: {apart}",
        template=layout_template(), hovermode="closest", height=260 + len(values) * max(8 * both.layer.nunique(), 110),
        coloraxis=dict(cmin=max(both[_NATS].min().min(), FLOOR_NATS), cmax=0.0, colorbar=_bar("nats", 0.69, 0.6)),
    )  # fmt: skip
    if has_difference:
        bar = _bar("difference, nats", 0.13, 0.3)
        limits = dict(cmin=-(largest or 1), cmax=largest or 1)
        figure.update_layout(coloraxis2=dict(**limits, colorscale=_COLOURS, colorbar=bar))
    return figure


def _bar(title: str, y: float, length: float) -> dict[str, object]:
    return dict(title=dict(text=title, side="right", font=dict(size=12)), thickness=12, len=length, y=y, x=1.01)


def _hovers(both: pd.DataFrame, names: tuple[str, str]) -> list[str]:
    """Returns a text for each place: the first choice of both runs, and how likely the next token is in each."""
    texts = [f"{reads_and_predicts(at)}, layer {layer}" for at, layer in zip(both.position, both.layer, strict=True)]
    for name, end in zip(names, ("", "_theirs"), strict=True):
        columns = [both[f"{column}{end}"] for column in _READ]
        texts = [
            f"{text}<br>{markup(name)}: {_said(token, nats)}; next {_said(then, next_nats)}"
            for text, token, nats, then, next_nats in zip(texts, *columns, strict=True)
        ]
    return texts


def _said(token: object, nats: object) -> str:
    return "not known" if pd.isna(token) else f"{markup(visible(str(token)))} {nats:.2f} nats"
