"""Finds the verdict on every draft token, and adds it to the lens readings that predict the draft token's position."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from cacheprobe.core.records import DISCARDED_DRAFT, MANY, DraftCosts
from cacheprobe.core.values import JsonDict, TableLine
from cacheprobe.trace.tables.schema import token_text, typed
from cacheprobe.trace.tables.token_history import COMMITTED, token_history

NOT_DRAFTED = "not_drafted"
"""Group of the readings whose pass had no draft token for the predicted position."""


def drafts_table(events: pd.DataFrame) -> pd.DataFrame:
    """Returns a DataFrame with one line for each draft token: when it was drafted, and the verdict on it.

    Columns: request_id, place (0 is the first generated token), drafted_token_id; chain_step, its number in its draft,
    from 1; born, the step that drafted the
    token; judged, the step of the verify pass that judged its draft, null if none did; verdict: "accepted"; "rejected",
    the first of its draft that the verifier did not choose; "unverified", if it followed a rejected token or its
    draft was not judged.
    events: as in `Trace.events`.
    """
    history = token_history(events)
    outcome = history.outcome.astype(object)
    drafts = history[outcome.isna() | outcome.isin(["accepted", "rolled_back", "abandoned"])]
    rejected = drafts[drafts.outcome == "rolled_back"].groupby(["request_id", "decided_step"]).place.idxmin()
    verdict = pd.Series("unverified", index=drafts.index, dtype="object")
    verdict[(drafts.outcome == "accepted").fillna(False)] = "accepted"
    verdict[rejected.to_numpy()] = "rejected"
    of_draft = [drafts.request_id, drafts.decided_step, drafts.outcome == "abandoned"]
    first = drafts.groupby(of_draft, dropna=False).place.transform("min")
    judged = drafts.decided_step.where(drafts.outcome.isin(["accepted", "rolled_back"]).fillna(False))
    return pd.DataFrame(
        {
            "request_id": drafts.request_id,
            "place": drafts.place,
            "drafted_token_id": drafts.token_id,
            "chain_step": (drafts.place - first + 1).astype("Int64"),
            "born": drafts.born,
            "judged": judged.astype("Int64"),
            "verdict": verdict.astype("string"),
        }
    ).reset_index(drop=True)


class VerifiedDrafts(NamedTuple):
    """Counts the draft tokens that verify passes read: all, accepted ones, those rejected (the first of a draft that
    the verifier did not choose), and those rolled back (rejected, or after a rejected one)."""

    drafted: int
    accepted: int
    rejected: int
    rolled_back: int


def verified_drafts(events: pd.DataFrame) -> VerifiedDrafts:
    """Returns what became of the draft tokens in an events table, or in some of its lines."""
    drafted, rolled_back = events.draft_token_ids.map(len), events.num_rolled_back.fillna(0)
    accepted, rejected = events.num_accepted.fillna(0), rolled_back > 0
    return VerifiedDrafts(*(int(column.sum()) for column in (drafted, accepted, rejected, rolled_back)))


def draft_line(meta: JsonDict, events: pd.DataFrame, rows: pd.DataFrame, deterministic: Collection[int] = ()) -> str:
    """Returns text such as "drafts: 23 % accepted, 40 tokens rolled back, 1.4 times the time of no drafts"; "" for a
    run without drafts and costs.

    meta: of the run.  events, rows: as in `Trace.events` and `Trace.rows`.  deterministic: ids of such requests.
    Both times are sums of measured costs over the steps after the prefill. They are left out if no costs were measured,
    as without a drafter. If the run stopped drafting, the text says so.
    """
    found, record = verified_drafts(events), meta.get("draft_costs")
    text = "drafts: none"
    if found.drafted:
        accepted = 100 * (found.drafted - found.rolled_back) / found.drafted
        text = f"drafts: {accepted:.0f} % accepted, {found.rolled_back} tokens rolled back"
    if record is None:
        return text if found.drafted else ""
    costs, group, steps = DraftCosts.from_record(record), meta["config"]["group"], _steps(events, rows)
    is_decided = meta["config"]["determinism"] == "verify"
    share = len({*deterministic} & {*events.request_id}) * is_decided / max(events.request_id.nunique(), 1)
    seconds = sum(_seconds(step, costs) for step in steps.itertuples())
    undrafted = sum(costs.undrafted(s.tokens, s.num_running, s.tokens * share, group) for s in steps.itertuples())
    if found.drafted and undrafted:
        text += f", {seconds / undrafted:.1f} times the time of no drafts"
    num_drafted = int((steps.drafted > 0).sum())
    if steps.is_plain[steps.drafted[::-1].cumsum()[::-1] == 0].any():  # decode passes after the last draft
        of_draft, of_pass = costs.draft[1] / costs.plain[1], min(costs.verify.values()) / costs.plain[1]
        text += f", stopped after {num_drafted} verify passes" if found.drafted else ""
        text += f" (a draft token of {MANY} requests takes {of_draft:.2f} of their decode pass, a verify pass of "
        text += f"{min(group, MANY)} takes {of_pass:.2f})"
    return text


def _steps(events: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Returns a line for each step after the prefill, in order: phase, width, requests, tokens (committed), drafted
    (draft tokens that it verified), proposed (the most of a request), is_whole (whether all layers ran), is_plain (a
    decode pass that commits), num_running (requests between their first and last step)."""
    counts = pd.DataFrame(
        {
            "step": events.step,
            "phase": events.phase,
            "width": events.batch_slots.fillna(0).astype(int),
            "requests": 1,
            "tokens": events.committed_token_ids.map(len),
            "drafted": events.draft_token_ids.map(len),
            "proposed": events.proposed_token_ids.map(len),
        }
    )
    how = dict.fromkeys(("phase", "width"), "first") | dict.fromkeys(("requests", "tokens", "drafted"), "sum")
    steps = counts.groupby("step").agg({**how, "proposed": "max"})
    layers = rows.groupby("step").num_layers.max().reindex(steps.index)
    spans = events.groupby("request_id").step.agg(["min", "max"])
    started = np.searchsorted(np.sort(spans["min"]), steps.index, side="right")
    ended = np.searchsorted(np.sort(spans["max"]), steps.index, side="left")
    is_plain = (steps.phase == "decode") & (steps.tokens > 0)
    steps = steps.assign(is_whole=layers == layers.max(), num_running=started - ended, is_plain=is_plain)
    return steps[steps.phase != "prefill"]


def _seconds(step: TableLine, costs: DraftCosts) -> float:
    """Returns the seconds of one line of `_steps`."""
    if step.phase == "verify":
        return costs.verifying(step.width, 1, step.drafted + step.requests)
    return costs.decoding(step.requests) if step.is_whole else step.proposed * costs.drafting(step.requests)


def draft_counts(events: pd.DataFrame) -> dict[str, int]:
    """Returns what a run did, by words: committed tokens, passes of each kind, and draft tokens that verify passes
    read, accepted, and rejected or rolled back after a rejected one.

    events: as in `Trace.events`.
    """
    found = verified_drafts(events)
    passes = events.drop_duplicates("step").phase.value_counts()
    return {
        "committed tokens": int(events.committed_token_ids.map(len).sum()),
        **{f"{phase} passes": int(passes.get(phase, 0)) for phase in ("prefill", "decode", "verify")},
        "draft tokens in verify passes": found.drafted,
        "of these accepted": found.accepted,
        "of these rejected": found.rejected,
        "rolled back: these and what followed them": found.rolled_back,
    }


def rejected_by_place(drafts: pd.DataFrame) -> Mapping[int, list[tuple[int, int]]]:
    """Returns by index of a generated token the (token id, step) of each draft that was rejected there. drafts: of one
    request, as from `drafts_table`."""
    found: dict[int, list[tuple[int, int]]] = {}
    for draft in drafts[drafts.verdict == "rejected"].itertuples():
        found.setdefault(int(draft.place), []).append((int(draft.drafted_token_id), int(draft.judged)))
    return found


def with_verdicts(
    readings: pd.DataFrame,
    rows: pd.DataFrame,
    events: pd.DataFrame,
    prompt_lengths: Mapping[int, int],
    token_texts: Mapping[int, str],
) -> pd.DataFrame:
    """Returns the lens readings with eight more columns, among them the draft token for the position that the row
    predicts, and its verdict: the columns of `Trace.hypotheses`.

    Columns: drafted_token_id, drafted_token, chain_step (its number in its draft), verdict, prediction_depth (as in
    `prediction_depths`); top_tokens, the texts of top_token_ids; and those of `with_read_tokens`.
    A row at position p predicts position p + 1. Its draft token is the one at p + 1 in the row's own pass: the pass
    that drafted the token, or the verify pass that judged it. If the pass had no draft token at p + 1, the draft token
    its chain_step and the verdict are null.
    readings: one lens and site, as in `trace.tables.build.hypotheses_table`.  rows: as in `rows_table` there.
    prompt_lengths: tokens by request.  token_texts: by token id; a missing token gets the text "<id>".
    """
    matched = drafts_of_rows(readings, events, prompt_lengths)
    drafted = matched.drafted_token_id.dropna().astype("int64").unique().tolist()
    texts = {token: token_text(token_texts, token) for token in drafted}
    tops = [
        None if ids is None else [token_text(token_texts, i) for i in ids.tolist()] for ids in readings.top_token_ids
    ]
    table = with_read_tokens(readings, rows).assign(
        drafted_token_id=matched.drafted_token_id.array,
        drafted_token=matched.drafted_token_id.map(texts).array,
        chain_step=matched.chain_step.array,
        verdict=matched.verdict.array,
        prediction_depth=prediction_depths(readings),
        top_tokens=tops,
    )
    return typed(table, "Trace.hypotheses")


def drafts_of_rows(rows: pd.DataFrame, events: pd.DataFrame, prompt_lengths: Mapping[int, int]) -> pd.DataFrame:
    """Returns the draft token that each row predicts in its own pass: a DataFrame with the lines of `rows` and the
    columns drafted_token_id, chain_step and verdict of `drafts_table`, null if the pass had none.

    rows: with request_id, step and position.  events, prompt_lengths: as for `with_verdicts`.
    """
    drafts, keys = drafts_table(events), ["request_id", "step", "position"]
    position = drafts.request_id.map(prompt_lengths) + drafts.place - 1  # of the row that predicts the draft token
    known = drafts.assign(position=position)
    born, judged = known.assign(step=drafts.born), known.assign(step=drafts.judged)[drafts.judged.notna()]
    of_passes = pd.concat([born, judged.astype({"step": born.step.dtype})]).drop_duplicates(keys)
    of_passes = of_passes[[*keys, "drafted_token_id", "chain_step", "verdict"]]
    return rows[keys].merge(of_passes, on=keys, how="left", validate="many_to_one")


def with_read_tokens(readings: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the lens readings with two more columns, read_token_id and read_token: the input token of the reading's
    row.

    rows: as in `trace.tables.build.rows_table`.
    """
    own_rows = rows[rows.row.isin(readings.row.unique())]
    input_tokens = own_rows.set_index("row")[["token_id", "token"]].reindex(readings.row)
    return readings.assign(read_token_id=input_tokens.token_id.array, read_token=input_tokens.token.array)


def prediction_depths(readings: pd.DataFrame) -> pd.Series:
    """Returns the prediction depth of each lens reading's row, as a Series with one value for each reading.

    The depth is the first layer from which the row's most likely token stays that of the last layer read.
    Source: prediction depth, Baldock et al. 2021 (arXiv 2106.09647), with layers for their k-NN probes.
    Twin: tests.twins.measures_slowly.prediction_depth_slowly, ==.
    """
    if readings.empty:
        return pd.Series(dtype="Int64", index=readings.index)
    columns = [readings[name].to_numpy() for name in ("row", "layer", "token_id")]
    order = np.lexsort((columns[1], columns[0]))
    row, layer, token = (column[order] for column in columns)
    is_first = np.append(True, row[1:] != row[:-1])
    is_change = is_first | np.append(True, token[1:] != token[:-1])
    last_change = np.maximum.accumulate(np.where(is_change, np.arange(len(row)), 0))
    starts = np.append(np.flatnonzero(is_first), len(row))
    depths = np.empty(len(row), dtype=np.int64)
    depths[order] = np.repeat(layer[last_change[starts[1:] - 1]], np.diff(starts))
    return pd.Series(depths, readings.index, dtype="Int64")


def by_verdict(readings: pd.DataFrame) -> pd.DataFrame:
    """Returns the lens readings that can be compared with a committed token; a missing verdict becomes "not_drafted",
    and `agrees` becomes 0.0 or 1.0.

    Leaves out rows without a committed next token, and rows whose input was a rejected, later or abandoned draft token:
    they follow a text that was never committed.
    Raises: ValueError if no reading remains.
    """
    comparable = readings[readings.agrees.notna() & ~readings.status.isin(DISCARDED_DRAFT)]
    if comparable.empty:
        raise ValueError("no hypothesis has a committed token to agree with; capture must include Z")
    return comparable.assign(agrees=comparable.agrees.astype(float), verdict=comparable.verdict.fillna(NOT_DRAFTED))


def shares_by_verdict(readings: pd.DataFrame) -> pd.DataFrame:
    """Returns a DataFrame with one line for each layer and verdict: how often the layer's first choice is the committed
    token, and how often the draft token.

    Columns: layer, verdict (accepted, rejected, unverified, not_drafted), rows (their number); committed_first and
    drafted_first, the shares of rows whose most likely token is the committed or the draft token (drafted_first is null
    without a draft token).
    Twin: tests.twins.measures_slowly.shares_by_verdict_slowly, close(1e-9).
    """
    comparable = by_verdict(readings)
    is_drafted = comparable.drafted_token_id.notna()
    drafted = (comparable.token_id == comparable.drafted_token_id).fillna(False).astype(float).where(is_drafted)
    grouped = comparable.assign(drafted=drafted).groupby(["layer", "verdict"], as_index=False)
    return grouped.agg(rows=("row", "size"), committed_first=("agrees", "mean"), drafted_first=("drafted", "mean"))


def drafter_layers(readings: pd.DataFrame) -> list[int]:
    """Returns the layers at which draft passes ended, in order, if every draft token is the lens's first choice there:
    at an early-exit drafter's layer it is so by construction. [] if each draft pass ran all layers, or there was none.

    readings: as in `Trace.hypotheses`.
    """
    if not {"phase", "drafted_token_id"} <= set(readings.columns):
        return []
    of_drafts = readings[readings.drafted_token_id.notna() & (readings.phase == "decode")]
    ends = of_drafts.sort_values("layer").drop_duplicates("row", keep="last")
    ends = ends[ends.layer < readings.layer.max()]
    is_first = (ends.token_id == ends.drafted_token_id).groupby(ends.layer).all()
    return [int(layer) for layer in is_first.index[is_first.astype(bool)]]


def parting(shares: pd.DataFrame) -> str:
    """Returns one sentence: from which layer on the committed token is a lens's first choice more often than the
    rejected draft token, or that there is no such layer.

    shares: from `shares_by_verdict`. Without a rejected draft token, the sentence names the layer from which on the
    committed token is the first choice in at least half of the readings.
    """
    rejected = shares[shares.verdict == "rejected"].set_index("layer")
    if len(rejected):
        is_committed_ahead = rejected.committed_first > rejected.drafted_first
        if not is_committed_ahead.iloc[-1]:
            return "Where a draft was rejected, the draft leads up to the last layer read"
        since = is_committed_ahead.index[is_committed_ahead[::-1].cummin()[::-1]][0]
        return f"Where a draft was rejected, the committed token leads from layer {since} on"
    kind = next(kind for kind in ("accepted", NOT_DRAFTED, "unverified") if (shares.verdict == kind).any())
    share = shares[shares.verdict == kind].set_index("layer").committed_first
    stays_first = (share >= 0.5)[::-1].cummin()[::-1]
    condition = {"accepted": "Where a draft was accepted", "unverified": "Where a draft was never judged"}.get(kind)
    beginning = f"{condition}, the" if condition else "The"
    if not stays_first.any():
        return f"{beginning} committed token is first in half of the readings at no last layer"
    since = stays_first.index[stays_first][0]
    return f"{beginning} committed token is first in at least half of the readings from layer {since} on"


def token_measures(events: pd.DataFrame, readings: pd.DataFrame | None, num_prompt_tokens: int) -> pd.DataFrame:
    """Returns a DataFrame with one line for each generated token of a request.

    Columns: place (0 is the first), position (absolute, of the row that predicts the token), token_id, outcome (as in
    `token_history`), born and decided_step; of the committed row's readings of S: depth (prediction depth, a layer),
    layer (the last one read), entropy and logprob of the committed token (nats), null if they were not read.
    events, readings: of one request.  Twin: tests.twins.measures_slowly.token_measures_slowly, ==.
    """
    history = token_history(events)
    tokens = history[history.outcome.isin(COMMITTED).fillna(False)].sort_values("place", kind="stable")
    tokens = tokens.drop_duplicates("place", keep="last")[["place", "token_id", "outcome", "born", "decided_step"]]
    tokens = tokens.assign(position=tokens.place + num_prompt_tokens - 1)
    if readings is None:
        readings = typed([], "hypotheses")
    read = readings[(readings.status == "committed") & (readings.site != "thought")]
    read = read.assign(depth=prediction_depths(read)).sort_values("layer", kind="stable")
    last = read.drop_duplicates("position", keep="last")[
        ["position", "depth", "layer", "entropy_nats", "committed_logprob_nats"]
    ]
    names = ["position", "depth", "layer", "entropy", "logprob"]
    measures = tokens.merge(last.set_axis(names, axis=1), on="position", how="left")
    return typed(measures, "generated_tokens").drop(columns="token")
