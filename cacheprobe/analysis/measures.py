"""Computes measures of a row's lens readings from layer to layer, for rows of every status.

All take a trace, or a table of lens readings (`trace.hypotheses()` or `cp.analysis.read_states(trace, lens)`), whose
columns `rank` and `committed_logprob_nats` describe the committed token at each layer, and `entropy_nats` the reading
itself.
Rolled-back rows have the same measures; `cp.analysis.rejected_tokens` describes their draft tokens.
"""

from typing import TYPE_CHECKING, SupportsIndex, TypeAlias

import numpy as np
import pandas as pd

from cacheprobe.core.hook_names import PATTERN
from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.trace.tables.draft_verdicts import by_verdict, prediction_depths, token_measures
from cacheprobe.trace.tables.schema import typed
from cacheprobe.trace.tables.token_history import standing_at, token_history, tokens_with_texts

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

Readings: TypeAlias = "Trace | pd.DataFrame"
"""A trace, whose own lens readings are taken, or a table of lens readings."""

ROW = ["request_id", "row", "step", "phase", "status", "position"]


def lens_readings(trace: "Trace", include_rolled_back: bool = False) -> pd.DataFrame:
    """Returns the lens readings of `trace.hypotheses(include_rolled_back)` as a DataFrame, without thoughts."""
    table = trace.hypotheses(include_rolled_back)
    return table[table.site != "thought"].reset_index(drop=True) if trace.thought_table is not None else table


def by_layer(readings: Readings) -> pd.DataFrame:
    """Returns a DataFrame with one line for each layer and status: how well the readings predict the committed token.

    Columns: layer, status, rows (their number); over rows with a committed next token, rank_median and
    logprob_nats_mean of that token, and agrees_mean, the share of readings whose first choice it is; entropy_nats_mean,
    over all rows.
    Source: the statistics of a prediction trajectory in Belrose et al. 2023 (arXiv 2303.08112), section 4.
    Twin: tests.twins.measures_slowly.by_layer_slowly, close(1e-9).
    """
    table = _checked(readings)
    numbers = table.assign(
        rank=table["rank"].astype(float).where(table["rank"].notna()),
        agrees=table.agrees.astype("Float64").astype(float),
    )
    grouped = numbers.groupby(["layer", "status"], as_index=False, observed=True)
    return grouped.agg(
        rows=("row", "size"),
        rank_median=("rank", "median"),
        logprob_nats_mean=("committed_logprob_nats", "mean"),
        agrees_mean=("agrees", "mean"),
        entropy_nats_mean=("entropy_nats", "mean"),
    )


def commitment(readings: Readings, margin: float = 0.5) -> pd.DataFrame:
    """Returns a DataFrame with one line for each row: the first layer that is confident of its first choice.

    commitment_layer: first layer read at which the probability of the first choice exceeds that of the second by at
    least `margin`; null if there is none.  commitment_token: its first choice.  stays: whether that is the last layer's
    first choice.  agrees: whether it is the committed token, null if there is no such layer or no committed token.
    Source: the softmax response of confident early exit, Schuster et al. 2022 (CALM, arXiv 2207.07061), section 3.5.
    Twin: tests.twins.measures_slowly.commitment_slowly, ==.
    """
    if not 0 <= margin <= 1:
        raise ValueError(f"margin is a difference of probabilities, from 0 to 1, got {margin}")
    table = _checked(readings, choices=2).sort_values(["row", "layer"])
    best = np.exp(np.stack(table.top_logprob_nats.to_numpy())[:, :2].astype(np.float64))
    confident = table[best[:, 0] - best[:, 1] >= margin].groupby("row").head(1).set_index("row")
    ends = table.groupby("row").tail(1)
    layer = ends.row.map(confident.layer).astype("Int64")
    token = ends.row.map(confident.token_id).astype("Int64")
    agrees = (token == ends.committed_token_id).astype("boolean")
    table = ends[ROW].assign(
        commitment_layer=layer,
        commitment_token_id=token,
        commitment_token=ends.row.map(confident.token),
        stays=token == ends.token_id,
        agrees=agrees.where((token.notna() & ends.committed_token_id.notna()).to_numpy(dtype=bool)),
    )
    return typed(table.reset_index(drop=True), "commitment")


def saturation(readings: Readings, top: int = 3) -> pd.DataFrame:
    """Returns a DataFrame with one line for each row: the layer from which each of the last layer's top choices keeps
    its rank.

    saturation_layer_1..top: first layer from which the k-th choice stays the last layer's k-th; the first equals the
    prediction depth.  is_in_order: whether they saturate in the order of their ranks, ties allowed.
    Source: top-1 saturation of Geva et al. 2022 (arXiv 2203.14680), for further ranks as in Lioubashevski et al. 2024
    (arXiv 2410.20210), section 3.
    Twin: tests.twins.measures_slowly.saturation_slowly, ==.
    """
    table = _checked(readings, choices=top).sort_values(["row", "layer"])
    choices = np.stack(table.top_token_ids.to_numpy())[:, :top]
    row, layer = table.row.to_numpy(), table.layer.to_numpy()
    is_last = np.append(row[1:] != row[:-1], True)
    group = np.cumsum(np.append(0, is_last[:-1]))  # number of the row's group
    differs = choices != choices[is_last][group]
    is_first = np.append(True, is_last[:-1])
    start = np.flatnonzero(is_first)
    index = np.arange(len(row))[:, None]
    latest = np.maximum.reduceat(np.where(differs, index, -1), start, axis=0)
    saturation_layers = layer[np.where(latest < 0, start[:, None], latest + 1)]
    columns = {f"saturation_layer_{k + 1}": saturation_layers[:, k] for k in range(top)}
    in_order = (np.diff(saturation_layers, axis=1) >= 0).all(axis=1)
    return table.loc[is_last, ROW].assign(**columns, is_in_order=in_order).reset_index(drop=True)


def draft_agreement(readings: Readings, window: int) -> pd.DataFrame:
    """Simulates, for each layer, drafting by the layer's first choices. Returns a DataFrame with one line for each
    layer: how many draft tokens would be accepted.

    Simulates verify passes of `window` tokens over the committed text: the newest token, and window - 1 draft tokens
    that are the layer's first choices; the first generated token comes from prefill. As long as they equal the text,
    the layer has read the same text as in the table. So for greedy requests the count equals that of
    `EarlyExit(layer)`, up to rounding. Every pass ends with a token chosen by the verifier, so the text's last token is
    never drafted.
    Columns: layer, passes, drafted, accepted, acceptance (accepted / drafted), tokens_per_pass (committed in them).
    Source: number of accepted tokens, Leviathan et al. 2023 (arXiv 2211.17192), section 3.1, counted instead of
    expected.
    Twin: tests.twins.measures_slowly.draft_agreement_slowly, ==; and the verdicts of a run with that drafter.
    """
    if window < 2:
        raise ValueError(f"a window of {window} rows verifies no draft; give at least 2")
    known = _checked(readings)[lambda t: (t.status == "committed") & (t.role != "prompt") & t.agrees.notna()]
    if known.empty:
        raise ValueError("no canonical reading has a committed token to agree with")
    lines = []
    for (layer, _), table in known.sort_values("position").groupby(["layer", "request_id"]):
        agrees = table.agrees.to_numpy(dtype=bool)
        passes, drafted, accepted, at = 0, 0, 0, 0
        while at < len(agrees):
            candidates = agrees[at : min(at + window, len(agrees)) - 1]
            count = len(candidates) if candidates.all() else int(np.argmin(candidates))
            passes, drafted, accepted = passes + 1, drafted + len(candidates), accepted + count
            at += count + 1
        lines.append((int(layer), passes, drafted, accepted, len(agrees)))
    counts = pd.DataFrame(lines, columns=["layer", "passes", "drafted", "accepted", "tokens"])
    table = counts.groupby("layer", as_index=False).sum()
    rates = dict(acceptance=table.accepted / table.drafted, tokens_per_pass=table.tokens / table.passes)
    return table.drop(columns="tokens").assign(**rates)


def agreement(readings: Readings) -> pd.DataFrame:
    """Returns a DataFrame of shares, layer (index) by verdict (columns): how often a reading's first choice is the
    committed token.

    Columns: accepted, rejected, unverified, for positions with a draft token of this verdict; not_drafted, for
    positions for which the row's pass had no draft token. `draft_verdicts.by_verdict` defines which rows count.
    Source: "accuracy of the hidden predictions" of the logit lens.
    """
    return by_verdict(_table(readings)).groupby(["layer", "verdict"]).agrees.mean().unstack()


def prediction_depth(readings: Readings) -> pd.DataFrame:
    """Returns a DataFrame with one line for each row: its prediction depth, and the first choices of its layers in
    order.

    prediction_depth: first layer from which the first choice stays that of the last layer read (Baldock et al. 2021),
    which is last_layer: a drafter's pass may end early.
    num_flips: changes of first choice between adjacent layers.  path: the first choices in order, as one text; a choice
    that the next layer keeps is written once.
    final_token: the last layer's first choice.  agrees: whether `final_token` is the committed token; null if none was
    committed.
    Raises: ValueError if there are none.
    Source: as for `draft_verdicts.prediction_depths`, which computes the depth.
    Twin: tests.twins.measures_slowly.prediction_depth_slowly, ==.
    """
    # the other columns are equal in all readings of a row
    table = _table(readings).sort_values(["request_id", "row", "layer"], ignore_index=True)
    is_change = (table.row != table.row.shift()) | (table.token_id != table.token_id.shift())
    changes = table[is_change].groupby("row", sort=False).token
    ends = table[~table.row.duplicated(keep="last")].rename(columns={"token": "final_token"})
    ends = ends.assign(
        prediction_depth=prediction_depths(table),
        last_layer=ends.layer,
        num_flips=changes.size().to_numpy() - 1,
        path=changes.agg(" → ".join).to_numpy(),
    )
    return typed(ends.reset_index(drop=True), "prediction_depth")


def with_groups(depths: pd.DataFrame) -> pd.DataFrame:
    """Returns the lines of `prediction_depth` with a column group: the verdict on the draft token and the kind of
    pass, such as "draft rejected, verify pass", or "nothing drafted".

    A drafter may stop at an early layer, which limits the depth, so rows of draft passes have groups of their own. Left
    out are draft tokens without a verdict, and rows that were fed a draft token that was never committed.
    """
    is_known = ~depths.status.isin(DISCARDED_DRAFT) & (depths.verdict != "unverified").fillna(True)
    known = depths[is_known]
    groups = [
        "nothing drafted" if pd.isna(verdict) else f"draft {verdict}, {'draft' if phase == 'decode' else 'verify'} pass"
        for verdict, phase in zip(known.verdict, known.phase, strict=True)
    ]
    return known.assign(group=pd.Series(groups, index=known.index, dtype=object))


def prediction_depth_by_verdict(depths: pd.DataFrame) -> pd.DataFrame:
    """Returns a DataFrame with one line for each group of `with_groups` (index): rows, prediction depth, changes of
    first choice.

    Columns: rows (their number), prediction_depth_median, prediction_depth_mean, flips_mean. depths: as from
    `prediction_depth`.
    """
    return (
        with_groups(depths)
        .groupby("group")
        .agg(
            rows=("row", "size"),
            prediction_depth_median=("prediction_depth", "median"),
            prediction_depth_mean=("prediction_depth", "mean"),
            flips_mean=("num_flips", "mean"),
        )
    )


def _table(readings: Readings) -> pd.DataFrame:
    """Returns a table of lens readings. Raises: ValueError if it is empty."""
    table = readings if isinstance(readings, pd.DataFrame) else lens_readings(readings)
    if table.empty:
        raise ValueError("there are no hypotheses; capture must include Z")
    return table


def _checked(readings: Readings, choices: int = 1) -> pd.DataFrame:
    """Returns a table of lens readings, after a check that it has one reading per row and layer, each with at least
    `choices` top tokens."""
    table = _table(readings)
    if table.duplicated(["row", "layer"]).any():
        raise ValueError("a layer of a row has more than one reading; measure one lens and one site at a time")
    num_choices = table.top_token_ids.map(len).min()
    if num_choices < choices:
        raise ValueError(
            f"the readings hold {num_choices} choices, {choices} are needed; run with CaptureConfig(top_k={choices})"
        )
    return table


def tokens_at(trace: "Trace", step: SupportsIndex) -> pd.DataFrame:
    """Returns the generated tokens as they stand after a step: a DataFrame with one line for each request and place (0
    is the first generated token).

    Columns: request_id, place, token_id, margin_nats, born, decided_step, outcome and state, as in
    `trace.tables.token_history.standing_at`; token, its text.
    """
    standing = standing_at(token_history(trace.event_table), int(step))
    return typed(tokens_with_texts(standing, trace.token_texts), "tokens_at")


def generated_tokens(trace: "Trace", request_id: SupportsIndex) -> pd.DataFrame:
    """Returns a DataFrame with one line for each generated token of a request: the outcome of its draft, and what the
    recorded lens readings that predict it say.

    Columns: as in `trace.tables.token_measures.token_measures`; token, its text. Raises: KeyError for a request that
    the trace does not have.
    """
    number, events, hypotheses = int(request_id), trace.event_table, trace.hypothesis_table
    trace.committed(number)
    readings = None if hypotheses is None else hypotheses[hypotheses.request_id == number]
    num_prompt_tokens = len(trace.requests[number].prompt_token_ids)
    table = token_measures(events[events.request_id == number], readings, num_prompt_tokens)
    return typed(tokens_with_texts(table, trace.token_texts), "generated_tokens")


def to_activation_cache(trace: "Trace", request_id: SupportsIndex) -> object:
    """Returns a request's captured states as a TransformerLens ActivationCache, [1, position, m] by hook name.

    The states are those of status "committed", one for each position. Heads are [1, position, h, d], patterns [1, h,
    position, position].
    Raises: ValueError if the trace has no model or no states, or if a position was not captured.
    """
    if trace.model is None:
        raise ValueError("this trace was loaded without its model; use cp.load_trace(dir, model=...)")
    if not trace.store.layers:
        raise ValueError("this run kept no states; run it with S, T or C in capture=")
    rows = trace.rows(request_id, "committed").sort_values("position")
    pairs = [(site, layer) for layer in trace.store.layers for site in (*trace.store.sites, *trace.store.heads)]
    states = {p: trace.pattern(p[1], request_id) if p[0] == PATTERN else trace.vectors(*p, rows) for p in pairs}
    return trace.model.to_activation_cache(states)
