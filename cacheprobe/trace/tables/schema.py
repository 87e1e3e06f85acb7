"""Declares the columns of every table and their dtypes. Tables in memory, Parquet files and exports have these types,
whatever a run holds: a column without values holds nulls of its dtype."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa

_LISTS = {
    "list<int64>": pa.list_(pa.int64()),
    "list<float32>": pa.list_(pa.float32()),
    "list<float64>": pa.list_(pa.float64()),
    "list<str>": pa.list_(pa.string()),
}
"""Arrow types of columns whose cells are arrays of numbers, or lists of texts. Their pandas dtype is object."""
_DTYPES = {
    "int64": "row request_id step position token_id num_layers state_index layer last_layer place born thought chunk "
    "start end first_token_id span first_position end_position num_tokens feature expert drafted_step num_flips window",
    "Int64": "batch_rows batch_slots draft_start num_accepted num_rolled_back recovered_token_id bonus_token_id "
    "read_token_id committed_token_id rank drafted_token_id prediction_depth decided_step drafter_layer flip_layer "
    "depth head commitment_layer commitment_token_id chain_step",
    "float32": "logprob_nats entropy_nats committed_logprob_nats activation weight entropy logprob",
    "float64": "seconds first_logprob_nats state_norm other_logprob_nats difference_nats logit temperature passes "
    "undrafted drafted accepted committed tokens_per_pass acceptance_rate probability verify_seconds "
    "undrafted_seconds draft_seconds plain_seconds",
    "Float64": "margin_nats margin_at_least_nats",
    "bool": "has_ended is_closed",
    "boolean": "agrees stays is_accepted_draft",
    "str": "phase role status token provenance read_token site lens committed_token drafted_token text said state "
    "text_before commitment_token path final_token drafter settings kind",
    "string": "finish verdict outcome true_state",
    "list<int64>": "missed proposed_token_ids draft_token_ids target_token_ids committed_token_ids top_token_ids "
    "token_ids",
    "list<float32>": "top_logprob_nats",
    "list<float64>": "committed_logprobs_nats logprobs_nats",
    "list<str>": "top_tokens tokens",
}
"""Names of columns by dtype. A table in which a column has another dtype writes it as NAME:DTYPE."""
_DTYPE_OF = {name: dtype for dtype, names in _DTYPES.items() for name in names.split()}
_ROW = "row request_id step phase position status token_id token"
_KEYS = "drafter settings layer:Int64 lens window temperature kind"
_THOUGHT = (
    "chunk start end token_ids tokens text has_ended said logprobs_nats first_token_id first_logprob_nats "
    "entropy_nats:float64"
)
_TABLES = {
    # as stored, by the first part of a file's name
    "rows": "row request_id step phase position token_id num_layers token state_index role status",
    "events": "step phase batch_rows batch_slots request_id seconds proposed_token_ids draft_start draft_token_ids "
    "target_token_ids num_accepted num_rolled_back committed_token_ids committed_logprobs_nats recovered_token_id "
    "bonus_token_id finish margin_nats",
    "ledger": "request_id step start end provenance",
    "tokens": "token_id token",
    "hypotheses": "row request_id step phase role status position layer site lens token_id token logprob_nats "
    "entropy_nats committed_token_id committed_token rank committed_logprob_nats agrees top_token_ids top_logprob_nats",
    "features": "row rank:int64 feature activation",
    "readings": "row request_id layer target:int64 target_rank:int64 target_logprob_nats:float32 entropy_nats "
    "top_token_ids top_logprob_nats",
    "thoughts": f"thought request_id step phase role status row {_THOUGHT} committed_token_id rank "
    "committed_logprob_nats:float64 true_state agrees state_norm",
    "thoughts of a part": f"request_id step phase {_THOUGHT} true_state agrees state_norm",
    # as returned
    "Trace.hypotheses": "row request_id step phase role status position read_token_id read_token layer site lens "
    "token_id token logprob_nats entropy_nats committed_token_id committed_token rank committed_logprob_nats agrees "
    "drafted_token_id drafted_token chain_step verdict prediction_depth top_token_ids top_tokens top_logprob_nats",
    "Trace.features": f"{_ROW} layer site rank:int64 feature activation",
    "Trace.edits": "name:str request_id site layer:int64 head committed:int64 superseded:int64 rolled_back:int64 "
    "abandoned:int64 missed",
    "Trace.ledger": "position provenance step",
    "Trace.rejected": "request_id step position drafted_token_id:int64 drafted_token committed_token_id "
    "committed_token num_rolled_back:int64 drafted_step drafter_layer flip_layer margin_nats margin_at_least_nats "
    "text_before",
    "token history": "request_id place token_id margin_nats born decided_step outcome",
    "acceptance by request": f"request_id {_KEYS} passes undrafted drafted accepted committed:int64 tokens_per_pass "
    "acceptance_rate",
    "acceptance by pass": f"request_id {_KEYS} position probability drafted accepted",
    "acceptance by place": f"{_KEYS} place drafted accepted acceptance_rate",
    "answer_logprobs": "prompt:int64 answer:str token_ids logprob_nats:float64 share:float64 is_right:boolean",
    "attribution": "request_id row position status token_id token layer:Int64 site head logit",
    "commitment": "request_id row step phase status position commitment_layer commitment_token_id commitment_token "
    "stays agrees",
    "draft_costs": "drafter settings layer:Int64 lens window verify_seconds undrafted_seconds draft_seconds "
    "plain_seconds",
    "engine_differences": "request_id position token_id token logprob_nats:float64 other_logprob_nats "
    "difference_nats rank is_accepted_draft",
    "generated_tokens": "place token_id outcome born decided_step position depth layer:Int64 entropy logprob token",
    "prediction_depth": "request_id row step phase status position verdict prediction_depth:int64 last_layer "
    "num_flips path final_token committed_token drafted_token agrees",
    "reasoning_spans": "request_id span first_position end_position num_tokens is_closed",
    "routing": f"{_ROW} layer rank:int64 expert weight",
    "states": "row request_id step phase status position token_id token site layer",
    "token_table": "request_id step position verdict times:int64 committed_token_id committed_token drafted_token_id "
    "drafted_token chain_step drafter_layer first_at_drafter_layer:boolean prediction_depth first_at_layer:Int64 "
    "disagreement:float64 disagreement_layer:Int64 disagreement_token:str entropy_nats margin_nats logprob_nats",
    "layers of tokens": "layer verdict rows:int64 committed_first:float64 drafted_first:float64",
    "tokens_at": "request_id place token_id margin_nats born decided_step outcome state token",
}
TABLES: dict[str, dict[str, str]] = {
    table: {name: dtype or _DTYPE_OF[name] for name, _, dtype in (one.partition(":") for one in columns.split())}
    for table, columns in _TABLES.items()
}
"""Dtype of each column, in order, of each table."""


def typed(table: "pd.DataFrame | Sequence[Any]", name: str) -> pd.DataFrame:
    """Returns the columns of TABLES[name] of a DataFrame, each with its dtype, with the same index. A column that the
    DataFrame lacks holds nulls.

    table: or a list of lines: dicts by column, or tuples with a value for each column.
    """
    if not isinstance(table, pd.DataFrame):
        table = pd.DataFrame(table, columns=list(TABLES[name]))
    nothing = pd.Series(None, table.index, dtype=object)
    columns = {
        column: (_cells if dtype in _LISTS else pd.Series.astype)(table.get(column, nothing), dtype)
        for column, dtype in TABLES[name].items()
    }
    return pd.DataFrame(columns, table.index)


def token_text(token_texts: Mapping[int, str], token_id: int) -> str:
    """Returns the text of a token id, or "<id>" if it is unknown."""
    try:
        return token_texts[token_id]
    except KeyError:
        return f"<{token_id}>"


def _cells(column: pd.Series, dtype: str) -> pd.Series:
    """Returns a column of lists with each cell as an array of numbers or a list of texts; None for a null."""
    kind = dtype.removeprefix("list<").removesuffix(">")
    if kind != "str" and all(type(cell) is np.ndarray and cell.dtype == kind for cell in column.to_numpy()):
        return column  # as a file has it
    made = list if kind == "str" else partial(np.asarray, dtype=np.dtype(kind))
    cells = [None if is_null else made(cell) for cell, is_null in zip(column, column.isna(), strict=True)]
    return pd.Series(cells, column.index, dtype=object)


@cache
def arrow_schema(name: str) -> pa.Schema:
    """Returns the Arrow schema of a table of TABLES."""
    columns = pa.Schema.from_pandas(typed([], name), preserve_index=False)
    dtypes = TABLES[name]
    return pa.schema([field.with_type(_LISTS.get(dtypes[field.name], field.type)) for field in columns])


def arrow_table(table: pd.DataFrame, name: str) -> pa.Table:
    """Returns a DataFrame that `typed` made as an Arrow table."""
    return cast("pa.Table", pa.Table.from_pandas(table, arrow_schema(name), preserve_index=False))
