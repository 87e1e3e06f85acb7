"""Counts the rows that each intervention of a run changed, by their status, and says which changed too few."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from cacheprobe.core.hook_names import RECURRENT, is_module
from cacheprobe.core.records import PHASES, STATUSES
from cacheprobe.core.values import JsonDict
from cacheprobe.edits.interventions.rejected import texts_of_rows
from cacheprobe.trace.tables.schema import typed

if TYPE_CHECKING:
    from cacheprobe.trace.data import TraceData

_MOST_POSITIONS = 8
"""Most positions that a warning lists."""


def edits_of(trace: "TraceData") -> pd.DataFrame:
    """Returns the table of `Trace.edits`."""
    edits: Sequence[JsonDict] = trace.meta.get("interventions") or ()
    first = None if trace.head is None else trace.head.meta["head"]["first_layer"]
    of_head = [edit if first is None else {**edit, "layer": edit["layer"] - first} for edit in edits]
    lines = []
    for number, edit in enumerate(edits):
        if trace.head is not None and of_head[number]["layer"] >= 0:
            rows = _carrying(trace.head, of_head, number)
        else:
            rows = _carrying(trace, edits, number)
        counts = rows.status.value_counts()
        changed = set(rows.position[rows.status == "committed"])
        about = {name: edit[name] for name in ("name", "request_id", "site", "layer", "head")}
        missed = [position for position in edit["positions"] or () if position not in changed]
        lines.append({**about, **{status: int(counts.get(status, 0)) for status in STATUSES}, "missed": missed})
    return typed(lines, "Trace.edits")


def changed_rows(trace: "TraceData", edit: JsonDict) -> pd.DataFrame:
    """Returns the rows that an intervention acted on, by its description in `meta`: as `Editor.aim` chose them."""
    rows, phases = _computed_rows(trace, edit)
    chosen = pd.Series(True, rows.index)
    if (drafts := edit.get("drafts")) is not None:
        texts = texts_of_rows(trace, edit["request_id"], set(rows.row))
        chosen &= rows.row.map(texts).isin(drafts)
    if edit["phases"] is not None:
        chosen &= phases.isin(edit["phases"])
    if edit["steps"] is not None:
        chosen &= rows.step.isin(edit["steps"])
    if not edit.get("include_special", True):
        chosen &= ~trace.is_special(rows)
    return rows[chosen]


def _computed_rows(trace: "TraceData", edit: JsonDict) -> tuple[pd.DataFrame, pd.Series]:
    """Returns (the rows of the edit's request, at the edit's positions, that were computed up to the edit's layer; the
    phase of each row's token: prefill of a prompt's, decode if the request is never verified, else the pass's)."""
    request = edit["request_id"]
    rows, events = trace.rows(request), trace.lookup["events"].lines_of(trace.event_table, request)
    rows = rows[rows.num_layers > edit["layer"]]
    if edit["positions"] is not None:
        rows = rows[rows.position.isin(edit["positions"])]
    phases = rows.phase if events.num_accepted.notna().any() else rows.phase.mask(rows.phase == "verify", "decode")
    return rows, phases.mask(rows.position < trace.requests[request].num_prompt_tokens, "prefill")


def _carrying(trace: "TraceData", edits: Sequence[JsonDict], number: int) -> pd.DataFrame:
    """Returns the rows that an edit changed, without those whose states a later edit at the same place replaced."""
    edit = edits[number]
    rows = changed_rows(trace, edit)
    for later in edits[number + 1 :]:
        is_same = all(edit[name] == later[name] for name in ("request_id", "site", "layer"))
        is_whole = later["head"] == edit["head"] or (edit["site"] == RECURRENT and later["head"] is None)
        if is_same and is_whole and later["action"] == "replace":
            rows = rows.drop(changed_rows(trace, later).index, errors="ignore")
    return rows


def edit_warnings(trace: "TraceData") -> list[str]:
    """Returns a sentence for each reason why interventions changed no committed row, or none at some of the positions
    that they name: about the first intervention that it concerns, with the number of the others. Leaves out failed
    requests."""
    found: dict[tuple[bool, str], list[str]] = {}
    for edit, line in zip(trace.meta.get("interventions") or (), edits_of(trace).to_dict("records"), strict=True):
        is_failed = str(edit["request_id"]) in trace.meta.get("errors", {})
        is_partly = bool(line["committed"])
        if is_failed or (trace.head is not None and edit["layer"] >= trace.head.meta["head"]["first_layer"]):
            continue
        if edit.get("drafts") is not None and (line["rolled_back"] or trace.meta["kind"] == "reference"):
            continue  # rejected drafts leave no committed row, and the reference has none
        if is_partly and (not len(line["missed"]) or edit["steps"] is not None):
            continue
        why = _why(trace, edit, line["missed"] if is_partly else None)
        found.setdefault((is_partly, why), []).append(f"{_missed(edit, line)}; {why}")
    more = " (so did {} more; trace.edits() lists the interventions)"
    return [texts[0] + (more.format(len(texts) - 1) if len(texts) > 1 else "") for texts in found.values()]


def _missed(edit: JsonDict, line: JsonDict) -> str:
    """Returns what an edit missed, as text. line: of `edits_of`."""
    head = "" if edit["head"] is None else f" head {edit['head']}"
    place = edit["site"] if is_module(edit["site"]) else f"site {edit['site']} of layer {edit['layer']}{head}"
    what = f"{edit['name']} of request {edit['request_id']} at {place}"
    if line["committed"]:
        missed = line["missed"]
        listed = ", ".join(map(str, missed[:_MOST_POSITIONS])) + ", ..." * (len(missed) > _MOST_POSITIONS)
        return f"{what} changed no committed row at {len(missed)} of its {len(edit['positions'])} positions: {listed}"
    counts = ", ".join(f"{line[status]} {status}" for status in STATUSES if line[status])
    return f"{what} changed no committed row, only others ({counts})" if counts else f"{what} changed no row"


def _why(trace: "TraceData", edit: JsonDict, missed: "list[int] | None") -> str:
    """Returns why committed rows do not carry an edit: those at the positions `missed`, or all at its positions."""
    if edit.get("drafts") is not None:
        return "no draft of this run begins as one that was rejected"
    rows, phases = _computed_rows(trace, edit)
    is_wanted = rows.status == "committed"
    if missed is not None:
        is_wanted &= rows.position.isin(missed)
    rows, phases = rows[is_wanted], phases[is_wanted]
    if rows.empty:
        return "no pass computed a committed token there"
    allowed = edit["phases"] or PHASES
    if not phases.isin(allowed).any():
        own = {*phases} - {"prefill"} or {*phases}  # who left out the prompt meant the generated tokens
        wanted = ", ".join(f'"{phase}"' for phase in PHASES if phase in {*allowed, *own})
        return f"committed rows are computed in phase {' and '.join(sorted(own))}: use phases=({wanted})"
    if not edit.get("include_special", True) and trace.is_special(rows).all():
        return "first and special tokens are left out: use include_special=True"
    if edit["steps"] is not None:
        return f"its steps {edit['steps']} computed none of them"
    return "a later intervention at the same place replaces these states"
