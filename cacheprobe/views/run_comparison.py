"""Two runs side by side: which requests differ, where first, and what differs between their schedules."""

from collections.abc import Mapping, Sequence
from typing import Any

from cacheprobe.views.page import table
from cacheprobe.views.text import markup, text_of, visible

_AROUND = 24
"""Tokens shown before and after the first difference."""


UNCOMPARED = "log-probabilities are not compared: a run recorded none"


def comparison_title(differences: Sequence[Any]) -> str:
    """What the comparison found, as a sentence. differences: as from `observe.comparison.compare_requests`."""
    count, apart = len(differences), [d for d in differences if d.what != "equal"]
    if not apart:
        return f"All {count} requests committed the same tokens, with the same log-probabilities bit for bit"
    if all(d.what == "tokens alone" for d in differences):
        return f"All {count} requests committed the same tokens; {UNCOMPARED}"
    words = {"prompt": "have other prompts", "missing": "are in one run alone", "tokens": "committed other tokens",
             "log-probabilities": "committed the same tokens with other log-probabilities",
             "tokens alone": "committed the same tokens, log-probabilities not compared"}  # fmt: skip
    said = [f"{n} {text}" for what, text in words.items() if (n := sum(d.what == what for d in apart))]
    return f"Of {count} requests {', '.join(said)}; {count - len(apart)} equal" if len(apart) < count else (
        f"Of {count} requests {', '.join(said)}"
    )  # fmt: skip


def fingerprint_block(differences: Sequence[tuple[str, Any, Any]], names: tuple[str, str]) -> str:
    """The fields in which two schedules differ, as a table, or that they are equal. Markup."""
    if not differences:
        return "<p class='note'>Both ran under one schedule fingerprint: their bits can be compared.</p>"
    count = len(differences)
    shown = table(["setting", *names], [[name, *("—" if v is None else str(v) for v in pair)]
                                        for name, *pair in differences])  # fmt: skip
    return (
        f"<p class='note'>The schedules differ in {count} setting{'s' * (count != 1)}, so equal bits are not promised."
        f"</p>{shown}"
    )


def request_list(differences: Sequence[Any], chosen: int) -> str:
    """A button for each request, with how it compares; they carry data-request. Markup."""
    items = []
    for d in differences:
        tint, sign = ("kept", "=") if d.what in ("equal", "tokens alone") else ("lost", "≠")
        place = f" at +{d.place + 1}" if d.place is not None else ""
        said = d.what if d.what == "equal" else f"{d.what}{place}"
        mine = " chosen" if d.request_id == chosen else ""
        items.append(
            f'<button class="pick verdict {tint}{mine}" data-request="{d.request_id}">'
            f"<b>{sign}</b> request {d.request_id} <small>{said}</small></button>"
        )
    return f'<div class="verdicts">{"".join(items)}</div>'


def token_columns(
    pair: Sequence[Sequence[int]], place: int | None, names: tuple[str, str], token_texts: Sequence[Mapping[int, str]]
) -> str:
    """Both answers, token by token, around the first difference, which is marked. Markup; tokens carry data-place."""
    longest = max(len(ids) for ids in pair)
    first = max(0, (place or 0) - _AROUND)
    last = min(longest, first + 2 * _AROUND)
    columns = []
    for ids, name, texts in zip(pair, names, token_texts, strict=True):
        tokens = []
        for i in range(first, min(last, len(ids))):
            tint = "" if place is None or i < place else " first" if i == place else " after"
            text = markup(visible(text_of(texts, ids[i])))
            tokens.append(f'<span class="pick tok{tint}" data-place="{i}" title="token {i + 1}">{text}</span>')
        if place is not None and len(ids) <= place:
            tokens.append('<span class="tok first">∅ ends here</span>')
        columns.append(f"<section><h4>{markup(name)}</h4><p class='tokens'>{''.join(tokens)}</p></section>")
    cut = f"Tokens {first + 1} to {last} of {longest}. " if last - first < longest else ""
    legend = "" if place is None else "Framed: the first that differs; paler: what followed it."
    return f'<div class="two">{"".join(columns)}</div><p class="note">{cut}{legend}</p>'
