"""Draws a whole run at a glance: agreement by layer, prediction depths, acceptance of drafts by place and by request,
and the most surprising tokens."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from cacheprobe.trace.tables.draft_verdicts import NOT_DRAFTED
from cacheprobe.trace.tables.token_table import RunTokens, tokens_of
from cacheprobe.views.diagrams.frame import Markup, legend
from cacheprobe.views.diagrams.timeline import timeline_finding
from cacheprobe.views.overview.chart import Bar, Curve, Style, bar_chart, curve_chart, curve_keys
from cacheprobe.views.text import counted, markup, plain, shorten, token_label

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

MOST_REQUESTS = 400
"""Largest number of bars of requests; of more, those with the lowest acceptance are drawn."""
MOST_SURPRISING = 8
_AROUND, _WIDTH = 8, 28
"""Tokens before a surprising one, and the largest width of their text, in columns of a monospaced font."""
_CURVES = (
    ("accepted", "committed_first", "draft accepted: the committed token", Style("green", "circle")),
    ("rejected", "committed_first", "draft rejected: the committed token", Style("red", "square", "6 4")),
    ("rejected", "drafted_first", "draft rejected: the draft token", Style("yellow", "cross", "2 4")),
    (NOT_DRAFTED, "committed_first", "nothing drafted", Style("grey", "diamond", "9 3 2 3")),
)
"""Verdict, column of `RunTokens.layers`, name and style of each curve by layer."""
_DEPTHS = {
    "accepted": ("draft accepted", Style("green", "circle")),
    "rejected": ("draft rejected: the committed token", Style("red", "square", "6 4")),
    NOT_DRAFTED: ("nothing drafted", Style("grey", "diamond", "9 3 2 3")),
}
NO_READINGS = 'This run has no lens readings; run it with capture="Z" to see layers.'


NO_DRAFTS = (
    "Name a drafter to record some. If one is named, its drafts cost more than they save here: give draft_length a "
    "number (--draft-length 15), so that it drafts all the same."
)


class Links(NamedTuple):
    """Says what a press on a token or a request does: functions that put HTML or SVG inside of an element that can be
    pressed. The defaults put it in none."""

    token: Callable[[int, int, int, str], str] = lambda request, step, position, inside: inside
    """(request, step, position of the token, HTML) -> HTML."""
    request: Callable[[int, str], str] = lambda request, inside: inside
    """(request, HTML) -> HTML."""
    bar: Callable[[int, str], str] = lambda request, inside: inside
    """(request, SVG of its bar) -> SVG."""


def run_overview(trace: "Trace") -> Markup:
    """Returns HTML of a whole run at a glance: the share of tokens that each layer has first, prediction depths, the
    acceptance of draft tokens by place in the draft and by request, and the most surprising tokens.

    A run without lens readings, or without drafts, says so in place of a figure.
    """
    tokens = tokens_of(trace)
    found = overview_picture(tokens, trace.event_table)
    made = Markup.of(found.finding, found.body, found.note)
    made.data = {"tokens": tokens.lines, "layers": tokens.layers, "events": trace.events()}
    return made


def overview_picture(tokens: RunTokens, events: pd.DataFrame, links: Links | None = None) -> Markup:
    """Returns the picture of `run_overview`. events: as in `Trace.events`.  links: what a press on a token or a request
    does."""
    links = Links() if links is None else links
    pictures = [
        layers_figure(tokens), depths_figure(tokens.lines), draft_steps_figure(events), requests_figure(events, links)
    ]  # fmt: skip
    figures = "".join(
        f"<figure><h3>{markup(one.finding)}</h3>{one.body}{one.legend}<figcaption>{one.note}</figcaption></figure>"
        for one in pictures
    )
    body = f"<div class='two glance'>{figures}</div>{surprising_tokens(tokens.lines, links)}"
    requests, lines = events.request_id.nunique(), tokens.lines
    count = int((lines.verdict != "rejected").sum())
    note = f"{counted(requests, 'request')}, {count:,} committed tokens, {len(lines) - count:,} rejected drafts."
    return Markup.of(timeline_finding(events), body, note)


def layers_figure(tokens: RunTokens) -> Markup:
    """Returns SVG of curves by layer: the share of tokens whose first choice there is the committed token, by the
    verdict on the draft token; and for rejected drafts the share whose first choice is the draft token."""
    curves = []
    for verdict, column, name, style in _CURVES:
        own = tokens.layers[tokens.layers.verdict == verdict]
        points = [
            (layer, share, f"{name}, layer {layer}: first choice of {share:.1%} of {rows:,} tokens")
            for layer, share, rows in zip(own.layer.tolist(), own[column].tolist(), own.rows.tolist(), strict=True)
        ]
        curves += [Curve(f"{name} ({own.rows.max():,} tokens)", style, points)] if points else []
    if not curves:
        return _without("Which layers have the committed token first?")
    ends = tokens.lines.drafter_layer.dropna()
    layer = int(ends.mode().iloc[0]) if len(ends) else None
    marked = None if layer is None else (layer, f"drafts end at layer {layer}")
    body = curve_chart(curves, "layer", "share of tokens that each layer has first", marked)
    note = "Share of tokens that are the layer’s first choice, in the rows that decided them. "
    note += "" if layer is None else f"At layer {layer}, where drafts end, the draft token is first by construction."
    return Markup.of(_layers_finding(tokens.layers), body, note, legend(curve_keys(curves)))


def _layers_finding(layers: pd.DataFrame) -> str:
    """Returns a sentence: from which layer on most committed tokens are the first choice, by verdict."""
    parts = []
    for verdict, words in (("accepted", "accepted tokens"), ("rejected", "tokens after a rejected draft"),
                           (NOT_DRAFTED, "tokens without a draft")):  # fmt: skip
        own = layers[layers.verdict == verdict].sort_values("layer")
        stays = (own.committed_first >= 0.5)[::-1].cummin()[::-1]
        if stays.any():
            parts.append(f"{words} from layer {own.layer[stays].iloc[0]} on")
    return f"Mostly first: {', '.join(parts)}" if parts else "No layer has most committed tokens first"


def depths_figure(lines: pd.DataFrame) -> Markup:
    """Returns SVG of curves by layer: the share of tokens whose first choice no longer changes from that layer on, by
    the verdict on the draft token. lines: as from `cp.analysis.token_table`."""
    known = lines[lines.prediction_depth.notna() & (lines.verdict != "rejected")]
    if known.empty:
        return _without("At which layers is the prediction made?")
    depths = known.prediction_depth.to_numpy(dtype=np.int64)
    verdict = known.verdict.to_numpy(dtype=object)
    group = np.select([verdict == "accepted", verdict == "recovered"], ["accepted", "rejected"], NOT_DRAFTED)
    curves, medians, span = [], [], range(int(depths.min()), int(depths.max()) + 1)
    for key, (name, style) in _DEPTHS.items():
        own = depths[group == key]
        if not len(own):
            continue
        share = [float((own <= layer).mean()) for layer in span]
        points = [
            (layer, part, f"{name}: {part:.1%} have a prediction depth of layer {layer} or lower")
            for layer, part in zip(span, share, strict=True)
        ]
        curves.append(Curve(f"{name} ({len(own):,} tokens)", style, points))
        medians.append(f"{name.partition(':')[0]} {np.median(own):g}")
    body = curve_chart(curves, "layer", "share of tokens whose first choice stays from a layer on")
    note = "Prediction depth: the layer from which the first choice stays that of the last layer read."
    return Markup.of(f"Median prediction depth, by layer: {', '.join(medians)}", body, note, legend(curve_keys(curves)))


def draft_steps_figure(events: pd.DataFrame) -> Markup:
    """Returns SVG of bars: the share of draft tokens that was accepted, by place in the draft, the first one first.
    events: as in `Trace.events`."""
    judged = events[events.num_accepted.notna()]
    drafted, accepted = judged.draft_token_ids.map(len).to_numpy(), judged.num_accepted.to_numpy(dtype=np.int64)
    deepest = int(drafted.max()) if len(drafted) else 0
    if not deepest:
        return Markup.of("No draft token was verified", "", NO_DRAFTS)
    bars = []
    for step in range(1, deepest + 1):
        count, kept = int((drafted >= step).sum()), int((accepted >= step).sum())
        label = str(step) if deepest <= 24 or step % 5 == 0 else ""
        bars.append(Bar(label, kept / count, "green", f"draft token {step}: {kept:,} of {count:,} accepted"))
    finding = f"The first draft token is accepted in {bars[0].share:.0%}"
    finding += f", the last, number {deepest}, in {bars[-1].share:.0%}" if deepest > 1 else ""
    body = bar_chart(bars, "place in the draft", "share of draft tokens accepted, by place in the draft")
    return Markup.of(
        finding, body, "Share accepted of all drafts that were as long. A token behind a rejected one counts."
    )


def requests_figure(events: pd.DataFrame, links: Links | None = None) -> Markup:
    """Returns SVG of bars: the share of draft tokens that was accepted, by request, and the three lowest and highest by
    name. events: as in `Trace.events`.  links: what a press on a request does."""
    table, links = acceptance_by_request(events), Links() if links is None else links
    known = table[table.drafted > 0]
    if known.empty:
        return Markup.of("No request has a verified draft", "", NO_DRAFTS)
    drawn = table if len(table) <= MOST_REQUESTS else known.nsmallest(MOST_REQUESTS, "share").sort_index()
    every, bars = max(len(drawn) // 10, 1), []
    for line in drawn.itertuples():
        says = f"{line.accepted:,} of {line.drafted:,} draft tokens accepted" if line.drafted else "no verified draft"
        label, share = "" if len(bars) % every else str(line.Index), line.share if line.drafted else None
        bars.append(Bar(label, share, "green", f"request {line.Index}: {says}"))
    ids = drawn.index.tolist()
    label = "share of draft tokens accepted, by request"
    body = bar_chart(bars, "request", label, lambda i, bar: links.bar(ids[i], bar))
    ranked = known.sort_values("share", kind="stable")
    ends = {"Lowest": ranked.head(3), "Highest": ranked.iloc[3:].tail(3)[::-1]}
    named = " ".join(
        f"{word}: {', '.join(links.request(int(r), f'request {r} ({share:.0%})') for r, share in some.share.items())}."
        for word, some in ends.items() if len(some)
    )  # fmt: skip
    left = f" The {len(drawn)} lowest of {len(table):,} requests are drawn." if len(drawn) < len(table) else ""
    low, high = ranked.share.iloc[0], ranked.share.iloc[-1]
    finding = f"Requests have {low:.0%} to {high:.0%} of their draft tokens accepted"
    if len(known) == 1:
        finding = f"Request {known.index[0]} has {low:.0%} of its draft tokens accepted"
    return Markup.of(finding, body, f"{named}{left}")


def acceptance_by_request(events: pd.DataFrame) -> pd.DataFrame:
    """Returns a DataFrame with one line for each request (index): tokens that it committed; drafted and accepted, its
    draft tokens that were verified and those of them that were accepted; share, accepted by drafted, null without."""
    counts = pd.DataFrame({
        "request_id": events.request_id,
        "tokens": events.committed_token_ids.map(len),
        "drafted": events.draft_token_ids.map(len),
        "accepted": events.num_accepted.fillna(0).astype("int64"),
    }).groupby("request_id").sum()  # fmt: skip
    return counts.assign(share=counts.accepted / counts.drafted.where(counts.drafted > 0))


def surprising_tokens(lines: pd.DataFrame, links: Links | None = None) -> str:
    """Returns an HTML section: the committed tokens with the lowest log-probabilities, each with the text before it.
    lines: as from `cp.analysis.token_table`.  links: what a press on a token does."""
    head, press = "<h3>Most surprising tokens</h3>", (Links() if links is None else links).token
    known = lines[lines.logprob_nats.notna() & (lines.verdict != "rejected")]
    if known.empty:
        return f"{head}<p class='note'>This run recorded no log-probabilities.</p>"
    items = []
    for line in known.nsmallest(MOST_SURPRISING, "logprob_nats").itertuples():
        own = lines[(lines.request_id == line.request_id) & (lines.verdict != "rejected")]
        before = own[(own.position < line.position) & (own.position >= line.position - _AROUND)].committed_token
        text = shorten(plain("".join(before))[::-1], _WIDTH)[::-1] if len(before) else ""
        token = markup(token_label(line.committed_token, _WIDTH))
        place = f"request {line.request_id}, position {line.position}"
        about = f"<small>{_chance(line.logprob_nats)}, {place}</small>"
        inside = f"<span class='before'>{markup(text)}</span><mark>{token}</mark> {about}"
        items.append(f"<li>{press(line.request_id, line.step, line.position, inside)}</li>")
    note = "The committed tokens to which the model gave least probability, by its unprocessed logits."
    return f"{head}<p class='note'>{note}</p><ol class='surprising'>{''.join(items)}</ol>"


def _chance(nats: float) -> str:
    """Returns a probability with the log-probability that it is of, such as "0.3 % (−5.8 nats)"."""
    percent = 100 * np.exp(nats)
    return f"{f'{percent:.2g}' if percent >= 0.01 else 'under 0.01'} % ({nats:.1f} nats)"


def _without(question: str) -> Markup:
    return Markup.of(question, "", markup(NO_READINGS))
