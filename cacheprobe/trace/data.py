"""Defines `TraceData`, the fields of a `Trace`: requests, tokens, tables and states, with methods that look up rows and
states."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEAD_SITES, PATTERN, SITE_NAMES, module_name, site_advice, site_label
from cacheprobe.core.live import require_usable_process
from cacheprobe.core.records import STATUSES, Request
from cacheprobe.core.tokens import special_token_ids
from cacheprobe.core.values import JsonDict, hint
from cacheprobe.edits.interventions.base import Intervention
from cacheprobe.kvcache.surgery import KVSnapshot
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.state_store import StateStore, layer_number, ragged_starts
from cacheprobe.trace.tables.draft_verdicts import draft_line, drafts_of_rows

_NO_LINES = np.empty(0, dtype=np.int64)
_LOOKED_UP = ("rows", "events", "ledger", "readings", "recorded readings")


class Lookup:
    """Holds indices of one table, each built at its first use and kept until another table takes its place. A table
    must not be changed in place.

    So reading every request of a run takes time in proportion to the run's lines, not to lines times requests.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[pd.DataFrame, Any]] = {}

    def lines_of(self, table: pd.DataFrame, request_id: SupportsIndex) -> pd.DataFrame:
        """Returns a copy of the table's lines of one request, in the table's order; no line for an unknown request."""
        by_request = self._index(table, "request", lambda: table.groupby("request_id").indices)
        return table.iloc[by_request.get(request_id, _NO_LINES)]

    def places_of(self, rows: pd.DataFrame, row_numbers: Sequence[int]) -> np.ndarray:
        """Returns the place in the rows table of each row number, as an array. Raises: KeyError for an unknown row
        number."""
        places = self._index(rows, "row", lambda: pd.Series(np.arange(len(rows)), index=rows.row))
        if unknown := [row for row in row_numbers if row not in places.index]:
            raise KeyError(f"no row {unknown[0]} in this trace; it has rows 0 to {len(rows) - 1}")
        return places.loc[row_numbers].to_numpy()

    def pattern_starts(self, rows: pd.DataFrame, numel: int) -> tuple[torch.Tensor, int]:
        """Returns `ragged_starts` of a flat tensor of `numel` attention weights, whose rows are those of the rows table
        that have stored vectors. Counts a vector once that several rows share, of a shared prompt."""

        def starts() -> tuple[torch.Tensor, int]:
            kept = rows[rows.state_index >= 0].drop_duplicates("state_index").sort_values("state_index")
            return ragged_starts(torch.tensor(kept.position.to_numpy()), numel)

        return self._index(rows, ("starts", numel), starts)

    def _index(self, table: pd.DataFrame, name: Hashable, build: Callable[[], Any]) -> Any:
        """Returns build(), or what it returned before for the same table."""
        before, index = self._known.get(name, (None, None))
        if before is not table:
            index = build()
            self._known[name] = table, index
        return index


@dataclass
class TraceData:
    """Holds the results of one run: requests, tokens, tables and states. Users get the subclass `Trace`, which adds
    methods.
    """

    requests: tuple[Request, ...]
    tokens: Mapping[int, Sequence[int]]
    """Committed token ids by request id, without the prompt."""
    texts: Mapping[int, str]
    row_table: pd.DataFrame = field(repr=False)
    stored_readings: "pd.DataFrame | Callable[[], pd.DataFrame | None] | None" = field(repr=False)
    """Lens readings, without verdicts, or a function that reads them from the disk; None if the run has none, or if the
    lens has not read them yet (`is_unread`). Use `recorded_readings`."""
    event_table: pd.DataFrame = field(repr=False)
    ledger_table: pd.DataFrame = field(repr=False)
    token_table: pd.DataFrame = field(repr=False)
    """Columns token_id and token, one line for every token of the rows, events and readings."""
    store: StateStore = field(repr=False)
    meta: JsonDict = field(repr=False)
    """fingerprint, config, capture, checks, behaviour, drafter, lens, finish reasons, model source; is_lens_later
    (True) if Z of a run with lens="later" was not read yet."""
    model: CachedLM | None = field(default=None, repr=False)
    thought_table: pd.DataFrame | None = field(default=None, repr=False)
    thought_states: Tensor | None = field(default=None, repr=False)
    """[n, c, m]: the chunk state of each thought, added to the next chunk; in the order of `thoughts()`."""
    feature_table: pd.DataFrame | None = field(default=None, repr=False)
    """Features recorded during the run: row, rank, feature and activation. None if it had no dictionary."""
    interventions: Sequence[Intervention] = field(default=(), repr=False)
    """Interventions of the run. Their vectors are not saved: a loaded trace has only their description in `meta`."""
    kept_rows: Mapping[int, KVSnapshot] = field(default_factory=dict, repr=False)
    """KVSnapshot (keys and values) by request, for requests with keep_kv=True; not saved."""
    head: "TraceData | None" = field(default=None, repr=False, compare=False)
    """Rows, states and readings of the drafter's head, a Trace of its own whose model is the head; None if the run's
    drafter has no head. Without a model if it was loaded from the disk."""
    reading_of_states: "Callable[[TraceData], pd.DataFrame] | None" = field(default=None, repr=False, compare=False)
    """Function (trace) -> DataFrame that reads the captured states with the logit lens; set for traces that recorded no
    readings."""
    reading_later: "Callable[[TraceData], None] | None" = field(default=None, repr=False, compare=False)
    """Function (trace) that reads Z from the stored S and adds it to the trace; set for runs with lens="later" only."""
    table_files: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Names of the Parquet files of a saved run by table."""
    lookup: dict[str, Lookup] = field(
        default_factory=lambda: {name: Lookup() for name in _LOOKED_UP}, init=False, repr=False, compare=False
    )
    """Indices of the tables, for lines of one request."""
    judged_readings: pd.DataFrame | None = field(default=None, init=False, repr=False, compare=False)
    """Lens readings with the verdicts on draft tokens, computed at the first call of `hypotheses`."""

    @property
    def is_unread(self) -> bool:
        """True if the run was made with lens="later" and its Z was not read yet."""
        return bool(self.meta.get("is_lens_later"))

    @property
    def hypothesis_table(self) -> pd.DataFrame | None:
        """Lens readings, as a DataFrame with the columns of `trace.tables.build.hypotheses_table`; None if the run has
        none. If they were not read yet (`is_unread`), reads them now, or returns None if the trace has no model."""
        if self.is_unread and self.reading_later is not None and self.model is not None:
            self.reading_later(self)
        return self.recorded_readings

    @property
    def recorded_readings(self) -> pd.DataFrame | None:
        """Lens readings that were recorded, as a DataFrame; None if there are none. Of a saved run, reads them from the
        disk at the first use."""
        held = self.stored_readings
        if callable(held):
            held = self.stored_readings = held()
        return held

    @hypothesis_table.setter
    def hypothesis_table(self, readings: pd.DataFrame | None) -> None:
        """Replaces the lens readings; the run then counts as read."""
        self.stored_readings = readings
        self.table_files.pop("hypotheses", None)
        self.meta.pop("is_lens_later", None)

    @property
    def fingerprint(self) -> JsonDict:
        """Settings, as a dict, that the bits of the run's results depend on: model, weights, dtype, device, shapes of
        passes.
        """
        return self.meta["fingerprint"]

    @property
    def num_drafted(self) -> int:
        """Number of draft tokens, over all requests, in verify passes that gave a verdict: accepted ones, rejected
        ones, and those after a rejected one. Draft tokens that were abandoned are not counted."""
        return int(self.event_table.draft_token_ids.map(len).sum())

    @property
    def num_rolled_back(self) -> int:
        """Number of draft tokens, over all requests, that were discarded after a verify pass: rejected ones and those
        after them.
        """
        return int(self.event_table.num_rolled_back.sum())

    @property
    def draft_line(self) -> str:
        """Line on the drafts: how many tokens were accepted, and what they cost, see
        `trace.tables.draft_verdicts.draft_line`; "" if there is nothing to say."""
        deterministic = [request.request_id for request in self.requests if request.is_deterministic]
        return draft_line(self.meta, self.event_table, self.row_table, deterministic)

    def require_head(self) -> "TraceData":
        """Returns `head`. Raises: ValueError if the run recorded none."""
        if self.head is None:
            raise ValueError(
                "this run recorded no draft head; run it with a drafter that has one, such as cp.drafters.Eagle3"
            )
        return self.head

    @property
    def missing(self) -> dict[str, str]:
        """Data that this trace lacks, as a dict from the name of the data, such as "ledger", to the reason as text.
        Data that the capture settings leave out is not listed."""
        return dict(self.meta.get("missing", {}))

    @property
    def token_texts(self) -> Mapping[int, str]:
        """Dict from token id to text (signs such as ␣ for white space), for every token of `token_table`."""
        return dict(zip(self.token_table.token_id.tolist(), self.token_table.token.tolist(), strict=True))

    def rows(self, request_id: SupportsIndex | None = None, status: str | None = None) -> pd.DataFrame:
        """Returns a copy of the rows table, a DataFrame with one line for each row. A row is one token of one forward
        pass.

        request_id: only the rows of this request; None for all.  status: only rows with this status, such as
        "committed".
        Raises: KeyError for an unknown request, ValueError for an unknown status.
        """
        table = self.row_table
        if "head" in self.meta:
            lengths = {request.request_id: request.num_prompt_tokens for request in self.requests}
            table = table.assign(chain_step=drafts_of_rows(table, self.event_table, lengths).chain_step.array)
        if request_id is not None:
            self._require_request(request_id)
            table = self.lookup["rows"].lines_of(table, request_id)
        if status is not None and status not in STATUSES:
            raise ValueError(f"unknown status {status!r}; statuses are {', '.join(STATUSES)}{hint(status, STATUSES)}")
        return table[table.status == status].copy() if status else table.copy()

    def is_special(self, rows: pd.DataFrame) -> pd.Series:
        """Returns for each given row whether its token is the first of its text, or special for the tokenizer of the
        run's model. Dictionaries leave these rows out, unless include_special is set.

        rows: from `rows`. The ids are in meta["special_token_ids"]; for a run that lacks them, those of the trace's
        model, or none if it was loaded without.
        """
        known = self.meta.get("special_token_ids")
        return (rows.position == 0) | rows.token_id.isin(special_token_ids(self.model) if known is None else known)

    def thoughts(self) -> pd.DataFrame:
        """Returns a copy of the thoughts table, a DataFrame with one line for each thought of a Thinking States model.
        A thought is a short text that the model writes after a whole chunk of tokens.

        Columns: as in `trace.tables.thoughts.thoughts_table`.
        Raises: ValueError for a run without a thought: of another kind of model, or without a whole chunk.
        """
        if self.thought_table is None:
            name = self.fingerprint["model"]
            raise ValueError(f"{name} wrote no thoughts; only a Thinking States model does, after whole chunks")
        return self.thought_table.copy()

    def vectors(self, site: str, layer: SupportsIndex, rows: "pd.DataFrame | Sequence[int]") -> Tensor:
        """Returns the captured states [n, m] of n given rows at one site and layer; [n, h, d] at sites q, k, v and z.
        Of a run with the capture dtype int8, float32 (`ops.state_codec` says how exact).

        layer: negative numbers count from the last.  rows: a table from `rows()`, or row numbers.
        Raises: ValueError for states that were not captured or not computed, and for patterns, whose length differs
        between rows (see `pattern_rows`); KeyError for an unknown row number.
        """
        require_usable_process()
        if site == PATTERN:
            raise ValueError("patterns differ in length from row to row; ask for them with pattern_rows(layer, rows)")
        return self.store.some_of(site, *self.state_indices(site, layer, rows))

    def module(self, name: str, rows: "pd.DataFrame | Sequence[int]") -> Tensor:
        """Returns what a module of the model computed for n given rows, of any status: [n, ...].

        name: as in CaptureConfig(modules=...), with the layer in place of "*".  rows: from `rows(...)`, or row numbers.
        Raises: ValueError for a module that was not captured, and as `vectors`.
        """
        name, there = module_name(name), self.store.modules
        if name not in there:
            kept = f"this run kept {', '.join(there)}" if there else "this run kept none"
            raise ValueError(f"module {name} was not captured; {kept}; run it with CaptureConfig(modules=({name!r},))")
        return self.vectors(name, there[name], rows)

    def state_indices(
        self, site: str, layer: SupportsIndex, rows: "pd.DataFrame | Sequence[int]"
    ) -> tuple[int, Tensor]:
        """Returns (the layer counted from 0, the index [n] of the stored state of each of the n given rows). Reads no
        state. Raises: as `vectors`."""
        layer = layer_number(layer, self.row_table)
        self._require_site(site, layer)
        row_numbers = rows["row"].tolist() if isinstance(rows, pd.DataFrame) else [int(row) for row in rows]
        table = self.row_table
        places = self.lookup["rows"].places_of(table, row_numbers)
        state_index, num_layers = (table[name].to_numpy()[places] for name in ("state_index", "num_layers"))
        if (is_dropped := state_index < 0).any():
            row = table.iloc[places[is_dropped.argmax()]]
            raise ValueError(
                f"request {row.request_id}: the state at position {row.position} ({row.phase}) was not kept; capture "
                f"filters were {self._filters()}"
            )
        if (is_shallow := num_layers <= layer).any():
            row = table.iloc[places[is_shallow.argmax()]]
            raise ValueError(
                f"request {row.request_id} step {row.step}: the drafter stopped after layer {row.num_layers - 1}, so "
                f"there is no state at layer {layer}"
            )
        return layer, torch.tensor(state_index, dtype=torch.long)

    def _filters(self) -> str:
        """Returns the settings that chose the rows whose states were kept, as text."""
        capture = self.meta["capture"]
        others = {"statuses": None, "every": 1, "keep": None}
        set_ones = [f"{name}={capture[name]}" for name, unset in others.items() if capture.get(name, unset) != unset]
        return ", ".join([*(f"{name}={capture[name]}" for name in ("positions", "phases")), *set_ones])

    def pattern_rows(self, layer: SupportsIndex, rows: "pd.DataFrame | Sequence[int]") -> list[Tensor]:
        """Returns a list of attention patterns, one tensor [h, p + 1] for each given row at position p: weights on
        positions 0..p.

        Rows of any status are allowed. A rolled-back row attended to the tokens committed before its draft and to the
        draft, not to the tokens committed in the draft's place.
        """
        number, indices = self.state_indices(PATTERN, layer, rows)
        if not len(indices):
            return []
        flat = self.store.all_of(PATTERN, number)
        starts, heads = self.lookup["rows"].pattern_starts(self.row_table, flat.numel())
        return [flat[starts[i] : starts[i + 1]].view(heads, -1) for i in indices.tolist()]

    def kept(self, site: str, layer: SupportsIndex, rows: pd.DataFrame) -> "Tensor | list[Tensor]":
        """Returns the captured states of the given rows: a tensor as from `vectors`; at site "pattern", a list of
        tensors.
        """
        return self.pattern_rows(layer, rows) if site == PATTERN else self.vectors(site, layer, rows)

    def thoughts_said(self, request_id: SupportsIndex) -> list[tuple[int, list[int], list[float]]]:
        """Returns a list of a request's committed thoughts in order, each as (chunk number, token ids,
        log-probabilities in nats).

        Call only for a trace with thoughts.
        """
        assert self.thought_table is not None
        table = self.thought_table
        committed = table[(table.request_id == request_id) & (table.status == "committed")].sort_values("end")
        return [
            (int(t.chunk), [int(i) for i in t.token_ids], [float(x) for x in t.logprobs_nats])
            for t in committed.itertuples()
        ]

    def _canonical_rows(self, request_id: SupportsIndex) -> pd.DataFrame:
        """Returns a request's rows of status "committed" as a DataFrame, sorted by position."""
        return self.rows(request_id, "committed").sort_values("position")

    def _require_request(self, request_id: SupportsIndex) -> None:
        """Raises: KeyError if the trace has no request of this number."""
        if request_id not in self.tokens:
            raise KeyError(f"no request {request_id} in this trace; it has 0 to {len(self.requests) - 1}")

    def _require_site(self, site: str, layer: SupportsIndex) -> None:
        """Raises: ValueError if states of this site or this layer were not captured, with the reason."""
        if self.store.modules.get(site) == layer:
            return
        if site not in SITE_NAMES and site not in HEAD_SITES:
            raise ValueError(
                f"unknown site {site!r}{site_advice(site)}; states are kept at "
                f"{', '.join(map(site_label, SITE_NAMES))}, and heads at {', '.join(HEAD_SITES)}"
            )
        captured = (*self.store.sites, *self.store.heads)
        self.require_there(site)
        if site not in captured:
            remedy = f"; run it with CaptureConfig(heads=({site!r},))" if site in HEAD_SITES else ""
            raise ValueError(
                f"site {site} was not captured; this run kept {', '.join(captured) or 'no states'}{remedy}"
            )
        self.require_there(f"{site} of layer {int(layer)}")
        if layer not in self.store.layers:
            raise ValueError(f"layer {layer} was not captured; this run kept layers {list(self.store.layers)}")

    def require_there(self, what: str) -> None:
        """Raises a ValueError with the recorded reason if `missing` lists the named data, such as "ledger".

        Data that is absent for another reason, such as a capture filter, passes.
        """
        if reason := self.missing.get(what):
            raise ValueError(f"this trace has no {what}: {reason}")
