"""Defines the fields of a trace, and the look-ups that tables, files and analyses share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEAD_SITES, PATTERN
from cacheprobe.core.records import STATUSES, Request
from cacheprobe.core.values import JsonDict, hint
from cacheprobe.interventions.base import Intervention
from cacheprobe.kvcache.surgery import KVSnapshot
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.head_blocks import ragged_starts
from cacheprobe.trace.state_store import StateStore, layer_number
from cacheprobe.trace.tables.token_history import token_texts_of

SITE_NAMES = {"S": "residual stream", "T": "attention output", "C": "MLP output"}


@dataclass
class TraceData:
    """Fields of a run's results. Users hold a `Trace`, which adds the methods."""

    requests: tuple[Request, ...]
    tokens: Mapping[int, Sequence[int]]
    """Committed token ids by request, without the prompt."""
    texts: Mapping[int, str]
    row_table: pd.DataFrame = field(repr=False)
    hypothesis_table: pd.DataFrame | None = field(repr=False)
    event_table: pd.DataFrame = field(repr=False)
    ledger_table: pd.DataFrame = field(repr=False)
    store: StateStore = field(repr=False)
    meta: JsonDict = field(repr=False)
    """fingerprint, config, capture, checks, behaviour, drafter, lens, finish reasons, model source."""
    model: CachedLM | None = field(default=None, repr=False)
    thought_table: pd.DataFrame | None = field(default=None, repr=False)
    thought_states: Tensor | None = field(default=None, repr=False)
    """[n, c, m]: states that each thought added to the next chunk, by its number in `thoughts()`."""
    interventions: Sequence[Intervention] = field(default=(), repr=False)
    """Interventions of the run. Their vectors are not saved: a loaded trace has only their description in `meta`."""
    kept_rows: Mapping[int, KVSnapshot] = field(default_factory=dict, repr=False)
    """KVSnapshot by request, for requests with keep_kv=True; not saved."""
    token_table: pd.DataFrame | None = field(default=None, repr=False)
    """Columns token_id and token, one line for every token that the run names; None if an older version stored
    the run."""
    reading_of_import: "Callable[[TraceData], pd.DataFrame] | None" = field(default=None, repr=False, compare=False)
    """Reads the kept states by the logit lens, for an import without lens readings whose model is loaded."""
    judged_readings: pd.DataFrame | None = field(default=None, init=False, repr=False, compare=False)
    """Readings with the verdicts of drafts, computed at the first call of `hypotheses`."""

    @property
    def fingerprint(self) -> JsonDict:
        """Everything that the run's bits depend on: model, dtype, device, shapes of passes, settings."""
        return self.meta["fingerprint"]

    @property
    def num_drafted(self) -> int:
        """Number of drafted tokens that reached the verifier."""
        return int(self.event_table.draft_token_ids.map(len).sum())

    @property
    def num_rolled_back(self) -> int:
        """Number of draft tokens that the verifier did not accept."""
        return int(self.event_table.num_rolled_back.sum())

    @property
    def missing(self) -> dict[str, str]:
        """Data that this trace lacks, each with the reason: in an import, or in a run that an older version stored."""
        return dict(self.meta.get("missing", {}))

    @property
    def token_texts(self) -> Mapping[int, str]:
        """Visible form of every token that the run names, by token id."""
        if self.token_table is None:
            self.token_table = token_texts_of(self.row_table, self.hypothesis_table)
        return dict(zip(self.token_table.token_id.tolist(), self.token_table.token.tolist(), strict=True))

    def rows(self, request_id: SupportsIndex | None = None, status: str | None = None) -> pd.DataFrame:
        """Returns a copy of the rows table, of one request or of all, with every status or with one.

        Raises: KeyError for an unknown request, ValueError for an unknown status.
        """
        table = self.row_table
        if request_id is not None:
            self._require(request_id)
            table = table[table.request_id == request_id]
        if status is not None and status not in STATUSES:
            raise ValueError(f"unknown status {status!r}; statuses are {', '.join(STATUSES)}{hint(status, STATUSES)}")
        return table[table.status == status].copy() if status else table.copy()

    def thoughts(self) -> pd.DataFrame:
        """Returns the thoughts of a Thinking States model, one line for each chunk; columns as in
        `tables.thoughts.thoughts_table`.

        Raises: ValueError for another kind of model.
        """
        if self.thought_table is None:
            name = self.fingerprint["model"]
            raise ValueError(f"{name} wrote no thoughts; only a Thinking States model does, after whole chunks")
        return self.thought_table.copy()

    def vectors(self, site: str, layer: SupportsIndex, rows: "pd.DataFrame | Sequence[int]") -> Tensor:
        """Returns states [n, m] of the given rows at one site and layer; [n, h, d] at q, k, v and z.

        layer: negative numbers count from the last.  rows: a table from `rows()`, or row numbers.
        Raises: ValueError for states that were not kept, and for patterns, whose length differs between rows: see
        `pattern_rows`.
        """
        if site == PATTERN:
            raise ValueError("patterns differ in length from row to row; ask for them with pattern_rows(layer, rows)")
        held, places = self._stored(site, layer, rows)
        return held[places]

    def _stored(self, site: str, layer: SupportsIndex, rows: "pd.DataFrame | Sequence[int]") -> tuple[Tensor, Tensor]:
        """Returns all stored states of a site and layer, and the index [n] of each given row in them.

        Raises: ValueError if a row has no state there, KeyError for an unknown row.
        """
        layer = layer_number(layer, self.row_table)
        self._require_site(site, layer)
        numbers = rows["row"].tolist() if isinstance(rows, pd.DataFrame) else [int(row) for row in rows]
        about = self.row_table.set_index("row")
        if unknown := [row for row in numbers if row not in about.index]:
            raise KeyError(f"no row {unknown[0]} in this trace; it has rows 0 to {len(about) - 1}")
        about = about.loc[numbers]
        if (about.state_index < 0).any():
            row = about[about.state_index < 0].iloc[0]
            raise ValueError(
                f"request {row.request_id}: the state at position {row.position} ({row.phase}) was not kept; capture "
                f"filters were positions={self.meta['capture']['positions']}, phases={self.meta['capture']['phases']}"
            )
        if (about.num_layers <= layer).any():
            row = about[about.num_layers <= layer].iloc[0]
            raise ValueError(
                f"request {row.request_id} step {row.step}: the drafter stopped after layer {row.num_layers - 1}, so "
                f"there is no state at layer {layer}"
            )
        return self.store.all_of(site, layer), torch.tensor(about.state_index.to_numpy())

    def pattern_rows(self, layer: SupportsIndex, rows: "pd.DataFrame | Sequence[int]") -> list[Tensor]:
        """Returns attention weights [h, p + 1] over positions 0 to p, one tensor for each given row, of any status.

        A rolled-back row attended to the candidates that stood before it at that time, not to the committed tokens.
        """
        flat, places = self._stored(PATTERN, layer, rows)
        stored = self.row_table[self.row_table.state_index >= 0]  # a shared prompt's rows share their states
        positions = stored.drop_duplicates("state_index").sort_values("state_index").position
        starts, heads = ragged_starts(torch.tensor(positions.to_numpy()), flat.numel())
        return [flat[starts[i] : starts[i + 1]].view(heads, -1) for i in places.tolist()]

    def kept(self, site: str, layer: SupportsIndex, rows: pd.DataFrame) -> "Tensor | list[Tensor]":
        """Returns one tensor for each row, from `vectors` or, at site "pattern", from `pattern_rows`."""
        return self.pattern_rows(layer, rows) if site == PATTERN else self.vectors(site, layer, rows)

    def thoughts_said(self, request_id: SupportsIndex) -> list[tuple[int, list[int], list[float]]]:
        """Returns (chunk, token ids, log-probabilities) of the request's committed thoughts, in order."""
        assert self.thought_table is not None
        table = self.thought_table
        mine = table[(table.request_id == request_id) & (table.status == "committed")].sort_values("end")
        return [
            (int(t.chunk), [int(i) for i in t.token_ids], [float(x) for x in t.logprobs_nats])
            for t in mine.itertuples()
        ]

    def _canonical(self, request_id: SupportsIndex) -> pd.DataFrame:
        return self.rows(request_id, "committed").sort_values("position")

    def _require(self, request_id: SupportsIndex) -> None:
        if request_id not in self.tokens:
            raise KeyError(f"no request {request_id} in this trace; it has 0 to {len(self.requests) - 1}")

    def _require_site(self, site: str, layer: SupportsIndex) -> None:
        if site not in SITE_NAMES and site not in HEAD_SITES:
            raise ValueError(
                f"unknown site {site!r}; states are kept at S, T and C, and heads at {', '.join(HEAD_SITES)}"
            )
        held = (*self.store.sites, *self.store.heads)
        self.require_there(site)
        if site not in held:
            remedy = f"; run it with CaptureConfig(heads=({site!r},))" if site in HEAD_SITES else ""
            raise ValueError(f"site {site} was not captured; this run kept {', '.join(held) or 'no states'}{remedy}")
        self.require_there(f"{site} of layer {int(layer)}")
        if layer not in self.store.layers:
            raise ValueError(f"layer {layer} was not captured; this run kept layers {list(self.store.layers)}")

    def require_there(self, what: str) -> None:
        """Checks that the trace has this data. Raises: ValueError with the recorded reason if it does not."""
        if reason := self.missing.get(what):
            raise ValueError(f"this trace has no {what}: {reason}")
