"""Builds pandas tables from the recorder's records. Each function documents the columns of its table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

import numpy as np
import pandas as pd
import pyarrow as pa

from cacheprobe.core.records import StepRecord, Thought
from cacheprobe.core.tokens import visible
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.tables.schema import TABLES, arrow_table, typed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Queued:
    """Holds one row's states at all captured layers that ran, and the token committed next, until a lens reads them."""

    row: int
    position: int
    states: "Tensor"
    """[layers, m], in the model's dtype."""
    layers: "Tensor"
    """[layers]: the layer after which each state was taken."""
    target: int = -1
    """Token committed at the next position; -1 for none."""
    request_id: int = -1
    step: int = -1


@dataclass(slots=True)
class RowRecord:
    """Holds one row of a trace: one token of one pass. Role and status are filled in later."""

    request_id: int
    step: int
    phase: str
    position: int
    token_id: int
    num_layers: int
    state_index: int = -1
    """Index among the stored vectors; -1 if a capture filter dropped the row, or may still drop it."""
    role: str = ""
    status: str = ""
    row: int = -1
    """Its number in the rows table; -1 before its step has ended."""
    reading: Queued | None = None
    """What a lens is to read of it."""
    features: "tuple[Tensor, Tensor] | None" = None
    """Its largest features [k] of a dictionary, and their activations [k]; None if they are not recorded."""


class LedgerChange(NamedTuple):
    """Holds one change in a request's cache row, a line of the ledger table: in one step, slots start..end-1 got this
    provenance, such as "verified".
    """

    request_id: int
    step: int
    start: int
    end: int
    provenance: str


TokenTexts = Callable[[Sequence[int]], list[str]]


@dataclass
class Part:
    """Holds what a recorder collected between two calls of `Recorder.take`."""

    rows: list[RowRecord]
    """Rows; those fed a draft token without a verdict so far have no role and no status."""
    labelled: list[RowRecord]
    """Rows of earlier parts that got their role and status since."""
    states: "dict[tuple[str, int], Tensor]"
    """By (site, layer): the states [n, m] of the kept rows; heads as from `KeptStates.take`."""
    columns: "dict[str, Tensor]"
    """Lens readings, as from `LensReader.take`."""
    steps: list[StepRecord]
    ledger: list[LedgerChange]
    thoughts: list[Thought]
    features: pd.DataFrame | None = None
    """Features of a dictionary, as from `FeatureRecorder.table`; None for a run without one."""


def part_tables(part: Part, tokens: Mapping[int, Sequence[int]], token_texts: TokenTexts) -> dict[str, pd.DataFrame]:
    """Returns the tables of a part that are built from its records alone: rows, events, ledger and tokens.

    tokens: committed ids by request.  token_texts: as in `rows_table`.
    """
    rows, events = rows_table(part.rows, token_texts), events_table(part.steps)
    tokens_of_part = tokens_table(rows, tokens, events, part.columns, token_texts)
    return {"rows": rows, "events": events, "ledger": typed(part.ledger, "ledger"), "tokens": tokens_of_part}


def rows_table(rows: Sequence[RowRecord], token_texts: TokenTexts) -> pd.DataFrame:
    """Returns the rows table: a DataFrame with one line for every token of every pass.

    Columns: row, request_id, step, phase, role, status, position, token_id, token (text; ␣ is a space), num_layers
    (that ran), state_index (index among the stored vectors; -1 if a capture filter dropped the row).
    token_texts: function from a list of token ids to their texts.
    """
    names = [name for name in TABLES["rows"] if name != "token"]
    table = pd.DataFrame([attrgetter(*names)(row) for row in rows], columns=names)
    return typed(table.assign(token=texts_of(table.token_id.to_numpy(), token_texts)), "rows")


def hypotheses_table(
    columns: "Mapping[str, Tensor] | Mapping[str, np.ndarray]",
    rows: pd.DataFrame,
    lens: str,
    token_texts: TokenTexts,
    site: str = "S",
) -> pd.DataFrame:
    """Returns the table of lens readings: a DataFrame with one line for each layer of each row that the lens read.

    A row at position p has the token at p as input and predicts the token at p + 1. token_id, token, logprob_nats: the
    layer's most likely token; top_token_ids, top_logprob_nats: its top_k most likely tokens; entropy_nats.
    committed_token_id, committed_token: the token committed at p + 1, null if there is none; rank,
    committed_logprob_nats: that token's rank (0 is the most likely) and log-probability in this reading; agrees:
    whether the committed token is the most likely one.
    columns: from `LensReader.take`.  rows: as from `rows_table`.
    """
    columns = {name: np.asarray(column) for name, column in columns.items()}
    about = rows.set_index("row").loc[columns["row"]]
    target, top = columns["target"], columns["top_token_ids"]
    has_target = target >= 0
    table = pd.DataFrame(
        {
            "row": columns["row"],
            **{key: about[key].to_numpy() for key in ("request_id", "step", "phase", "role", "status", "position")},
            "layer": columns["layer"],
            "site": site,
            "lens": lens,
            "token_id": top[:, 0],
            "token": texts_of(top[:, 0], token_texts),
            "logprob_nats": columns["top_logprob_nats"][:, 0],
            "entropy_nats": columns["entropy_nats"],
            "committed_token_id": target,
            "committed_token": texts_of(np.where(has_target, target, top[:, 0]), token_texts),  # of known tokens alone
            "rank": columns["target_rank"],
            "committed_logprob_nats": columns["target_logprob_nats"],
            "agrees": top[:, 0] == target,
            "top_token_ids": list(top),
            "top_logprob_nats": list(columns["top_logprob_nats"]),
        }
    )
    table = typed(table, "hypotheses")
    table.loc[~has_target, ["committed_token_id", "committed_token", "rank", "agrees"]] = pd.NA
    return table.sort_values(["request_id", "step", "row", "layer"], ignore_index=True)


def readings_table(columns: "Mapping[str, Tensor]") -> pa.Table:
    """Returns the columns of `LensReader.take` as an Arrow table, sorted by request: what a part of a run stores."""
    order = np.argsort(np.asarray(columns["request_id"]), kind="stable")
    table = pd.DataFrame({name: list(np.asarray(columns[name])[order]) for name in TABLES["readings"]})
    return arrow_table(typed(table, "readings"), "readings")


def reading_columns(table: pa.Table) -> dict[str, np.ndarray]:
    """Returns the columns of an Arrow table of `readings_table`, as `hypotheses_table` takes them."""
    columns = {name: table[name].to_pandas().to_numpy() for name in TABLES["readings"]}
    is_list = {name for name, column in columns.items() if column.dtype == object}
    width = -1 if len(table) else 1
    return columns | {name: np.array([*columns[name]]).reshape(len(table), width) for name in is_list}


def active_features(row_numbers: np.ndarray, features: "Tensor", activations: "Tensor") -> pd.DataFrame:
    """Returns a DataFrame with one line for each active feature of n rows: row, rank, feature and activation.

    features, activations: [n, k], as from `Dictionary.top`.
    """
    line, rank = np.nonzero(features.numpy() >= 0)
    columns = {"row": row_numbers[line], "rank": rank, "feature": features.numpy()[line, rank]}
    return typed(pd.DataFrame({**columns, "activation": activations.numpy()[line, rank]}), "features")


def feature_table(features: pd.DataFrame, rows: pd.DataFrame, statuses: "Sequence[str] | None") -> pd.DataFrame:
    """Returns recorded features as a DataFrame with the columns row, rank, feature and activation: one line for each
    active feature of a row.

    features: from `FeatureRecorder.table`, of the whole run.  rows: the rows table.  statuses: of the rows whose
    features are kept; None for all.
    """
    if statuses is not None:
        features = features[features.row.isin(rows.row[rows.status.isin(statuses)])]
    return features.sort_values(["row", "rank"], ignore_index=True)


def events_table(steps: Sequence[StepRecord]) -> pd.DataFrame:
    """Returns the events table: a DataFrame with one line for every request in every step (mostly a pass).

    Columns: step, phase, batch_rows, batch_slots (batch size and token slots of the pass), request_id, seconds;
    draft_start, draft_token_ids, target_token_ids, num_accepted, num_rolled_back, finish (of a verify pass);
    proposed_token_ids (draft tokens that this step added); committed_token_ids and their committed_logprobs_nats under
    the model's unprocessed logits; recovered_token_id, bonus_token_id; margin_nats (the smallest of the step's
    choices). A cell of several numbers is an array, which may be empty.
    """
    records = []
    for step in steps:
        committed, proposed = dict(step.committed), dict(step.proposed)
        logprobs = dict(step.logprobs)
        verdicts = {verdict.request_id: verdict for verdict in step.verdicts}
        smallest_margin: dict[int, float] = {}
        for request_id, margin in step.margins:
            smallest_margin[request_id] = min(margin, smallest_margin.get(request_id, margin))
        for request_id in step.request_ids:
            verdict = verdicts.get(request_id)
            records.append(
                {
                    "step": step.step,
                    "phase": step.phase,
                    "batch_rows": step.batch_shape[0] if step.batch_shape else None,
                    "batch_slots": step.batch_shape[1] if step.batch_shape else None,
                    "request_id": request_id,
                    "seconds": step.seconds,
                    "proposed_token_ids": proposed.get(request_id, ()),
                    "draft_start": verdict.start if verdict else None,
                    "draft_token_ids": verdict.draft_token_ids if verdict else (),
                    "target_token_ids": verdict.target_token_ids if verdict else (),
                    "num_accepted": verdict.num_accepted if verdict else None,
                    "num_rolled_back": len(verdict.rolled_back) if verdict else None,
                    "committed_token_ids": verdict.committed if verdict else committed.get(request_id, ()),
                    "committed_logprobs_nats": logprobs.get(request_id, ()),
                    "recovered_token_id": verdict.recovered if verdict else None,
                    "bonus_token_id": verdict.bonus if verdict else None,
                    "finish": verdict.finish if verdict else None,
                    "margin_nats": smallest_margin.get(request_id),
                }
            )
    return typed(records, "events")


def texts_of(token_ids: np.ndarray, token_texts: TokenTexts) -> np.ndarray:
    """Returns the text of each token id, as an array [n] of str, with signs such as ␣ for white space. Decodes every
    distinct id once."""
    distinct, inverse = np.unique(token_ids, return_inverse=True)
    return np.array([visible(text) for text in token_texts(distinct.tolist())], dtype=object)[inverse]


def tokens_table(
    rows: pd.DataFrame,
    tokens: Mapping[int, Sequence[int]],
    events: pd.DataFrame,
    columns: "Mapping[str, Tensor]",
    token_texts: TokenTexts,
) -> pd.DataFrame:
    """Returns a DataFrame with one line for every token of a run's rows, events and readings.

    Columns: token_id, token (its text, with signs such as ␣ for white space).
    tokens: committed ids by request.  columns: from `LensReader.take`, {} without a lens.
    """
    listed = [*tokens.values(), *(ids for name in _EVENT_IDS for ids in events[name])]
    parts = [rows.token_id.to_numpy(), *(np.asarray(ids, dtype=np.int64) for ids in listed)]
    if columns:
        target = columns["target"].numpy()
        parts += [columns["top_token_ids"].numpy().ravel(), target[target >= 0]]
    distinct = np.unique(np.concatenate(parts).astype(np.int64))
    return typed(pd.DataFrame({"token_id": distinct, "token": texts_of(distinct, token_texts)}), "tokens")


_EVENT_IDS = ("proposed_token_ids", "draft_token_ids", "target_token_ids")


FEATURE_COLUMNS = tuple(TABLES["Trace.features"])
ROW_COLUMNS = FEATURE_COLUMNS[: FEATURE_COLUMNS.index("layer")]


def recorded_lines(rows: pd.DataFrame, found: pd.DataFrame, about: JsonDict) -> pd.DataFrame:
    """Returns features of rows with the columns FEATURE_COLUMNS. found: row, rank, feature and activation.  about: the
    site and layer, such as the capture settings' description of the dictionary."""
    merged = rows[list(ROW_COLUMNS)].merge(found, on="row")
    return typed(merged.assign(layer=about["layer"], site=about["site"]), "Trace.features")


def ledger_at(changes: pd.DataFrame, step: SupportsIndex | None) -> pd.DataFrame:
    """Returns the slots of one request's cache row that are in use after `step`, as a DataFrame.

    Columns: position, provenance (such as "verified"), step of the last write.
    changes: the ledger's lines of this request, in order of step.  step: None for the end.
    """
    slots: dict[int, tuple[str, int]] = {}
    for change in changes.itertuples():
        if step is not None and change.step > step:
            break
        for position in range(change.start, change.end):
            if change.provenance == "free":
                slots.pop(position, None)
            else:
                slots[position] = (change.provenance, change.step)
    lines = [(position, *slots[position]) for position in sorted(slots)]
    return typed(lines, "Trace.ledger")


def rows_in_use(changes: pd.DataFrame) -> pd.DataFrame:
    """Returns the number of cached slots of each request after every step in which the ledger has a change of the
    request, as a DataFrame.

    Columns: request_id, step, rows (the number of slots; 0 if the request freed its cache row in this step).
    changes: the ledger table of a run.
    Twin: `ledger_at` of each request and step, ==.
    """
    records = []
    for request_id, of_request in changes.groupby("request_id", sort=True):
        in_use, num_in_use = bytearray(int(of_request.end.max())), 0
        counts: dict[int, int] = {}
        columns = (of_request[name].tolist() for name in ("step", "start", "end", "provenance"))
        for step, start, end, provenance in zip(*columns, strict=True):
            is_used = provenance != "free"
            num_in_use += is_used * (end - start) - in_use.count(1, start, end)
            in_use[start:end] = (b"\1" if is_used else b"\0") * (end - start)
            counts[step] = num_in_use
        records += [(int(request_id), step, count) for step, count in counts.items()]
    return pd.DataFrame(records, columns=["request_id", "step", "rows"])
