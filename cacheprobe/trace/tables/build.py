"""Builds pandas tables from the recorder's records. Each function documents the columns of its table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from cacheprobe.core.records import StepRecord
from cacheprobe.core.tokens import visible
from cacheprobe.trace.rows import LedgerChange, RowRecord
from cacheprobe.trace.tables.schema import TABLES, typed

TokenTexts = Callable[[Sequence[int]], list[str]]

EVENT_COLUMNS = list(TABLES["events"])
"""Columns of `events_table`, also for a run without steps, whose requests were all cancelled before they began."""


def rows_table(rows: Sequence[RowRecord], token_texts: TokenTexts) -> pd.DataFrame:
    """Returns the rows table: a DataFrame with one line for every token of every pass.

    Columns: row, request_id, step, phase, role, status, position, token_id, token (text; ␣ is a space), num_layers
    (that ran), state_index (index among the stored vectors; -1 if a capture filter dropped the row).
    token_texts: function from a list of token ids to their texts.
    """
    table = _table_of(rows, RowRecord)
    texts = texts_of(table.token_id.to_numpy(), token_texts)
    return typed(table.assign(row=np.arange(len(table)), token=texts), "rows")


def hypotheses_table(
    columns: Mapping[str, Tensor], rows: pd.DataFrame, lens: str, token_texts: TokenTexts, site: str = "S"
) -> pd.DataFrame:
    """Returns the table of lens readings: a DataFrame with one line for each layer of each row that the lens read.

    A row at position p has the token at p as input and predicts the token at p + 1. token_id, token, logprob_nats: the
    layer's most likely token; top_token_ids, top_logprob_nats: its top_k most likely tokens; entropy_nats.
    committed_token_id, committed_token: the token committed at p + 1, null if there is none; rank,
    committed_logprob_nats: that token's rank (0 is the most likely) and log-probability in this reading; agrees:
    whether the committed token is the most likely one.
    columns: from `LensReader.finish`.  rows: as from `rows_table`.
    """
    about = rows.set_index("row").loc[columns["row"].numpy()]
    target, top = columns["target"].numpy(), columns["top_token_ids"].numpy()
    has_target = target >= 0
    table = pd.DataFrame(
        {
            "row": columns["row"].numpy(),
            **{key: about[key].to_numpy() for key in ("request_id", "step", "phase", "role", "status", "position")},
            "layer": columns["layer"].numpy(),
            "site": site,
            "lens": lens,
            "token_id": top[:, 0],
            "token": texts_of(top[:, 0], token_texts),
            "logprob_nats": columns["top_logprob_nats"][:, 0].numpy(),
            "entropy_nats": columns["entropy_nats"].numpy(),
            "committed_token_id": target,
            "committed_token": texts_of(np.where(has_target, target, top[:, 0]), token_texts),  # of known tokens alone
            "rank": columns["target_rank"].numpy(),
            "committed_logprob_nats": columns["target_logprob_nats"].numpy(),
            "agrees": top[:, 0] == target,
            "top_token_ids": list(top),
            "top_logprob_nats": list(columns["top_logprob_nats"].numpy()),
        }
    )
    table = typed(table, "hypotheses")
    table.loc[~has_target, ["committed_token_id", "committed_token", "rank", "agrees"]] = pd.NA
    return table.sort_values(["request_id", "step", "row", "layer"], ignore_index=True)


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


def ledger_table(changes: Sequence[LedgerChange]) -> pd.DataFrame:
    """Returns the ledger: a DataFrame with one line for each change of a request's cached slots.

    Columns: request_id, step, start, end, provenance: in this step, slots start..end-1 got this provenance.
    """
    return typed(_table_of(changes, LedgerChange), "ledger")


def _table_of(records: Sequence[Any], kind: type) -> pd.DataFrame:
    """Returns a DataFrame with one line for each record, and one column for each field of the dataclass `kind`."""
    return pd.DataFrame({field.name: [getattr(record, field.name) for record in records] for field in fields(kind)})


def texts_of(token_ids: np.ndarray, token_texts: TokenTexts) -> np.ndarray:
    """Returns the text of each token id, as an array [n] of str, with signs such as ␣ for white space. Decodes every
    distinct id once."""
    distinct, inverse = np.unique(token_ids, return_inverse=True)
    return np.array([visible(text) for text in token_texts(distinct.tolist())], dtype=object)[inverse]


def tokens_table(
    rows: pd.DataFrame,
    tokens: Mapping[int, Sequence[int]],
    events: pd.DataFrame,
    columns: Mapping[str, Tensor],
    token_texts: TokenTexts,
) -> pd.DataFrame:
    """Returns a DataFrame with one line for every token of a run's rows, events and readings.

    Columns: token_id, token (its text, with signs such as ␣ for white space).
    tokens: committed ids by request.  columns: from `LensReader.finish`, {} without a lens.
    """
    listed = [*tokens.values(), *(ids for name in _EVENT_IDS for ids in events[name])]
    parts = [rows.token_id.to_numpy(), *(np.asarray(ids, dtype=np.int64) for ids in listed)]
    if columns:
        target = columns["target"].numpy()
        parts += [columns["top_token_ids"].numpy().ravel(), target[target >= 0]]
    distinct = np.unique(np.concatenate(parts).astype(np.int64))
    return typed(pd.DataFrame({"token_id": distinct, "token": texts_of(distinct, token_texts)}), "tokens")


_EVENT_IDS = ("proposed_token_ids", "draft_token_ids", "target_token_ids")
