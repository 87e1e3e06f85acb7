"""The fields of a trace, and the look-ups that tables, files and analyses share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEAD_SITES, PATTERN
from cacheprobe.core.records import STATUSES, Request
from cacheprobe.interventions.base import Intervention
from cacheprobe.kvcache.surgery import KVSnapshot
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.head_blocks import ragged_starts
from cacheprobe.trace.state_store import StateStore, layer_number
from cacheprobe.trace.tables.build import token_texts_of

SITE_NAMES = {"S": "residual stream", "T": "attention output", "C": "MLP output"}


@dataclass
class TraceData:
    """What a run computed, as fields. `Trace` is what a user holds."""

    requests: tuple[Request, ...]
    tokens: Mapping[int, Sequence[int]]
    """Committed token ids by request, the prompt not included."""
    texts: Mapping[int, str]
    row_table: pd.DataFrame = field(repr=False)
    hypothesis_table: pd.DataFrame | None = field(repr=False)
    event_table: pd.DataFrame = field(repr=False)
    ledger_table: pd.DataFrame = field(repr=False)
    store: StateStore = field(repr=False)
    meta: dict[str, Any] = field(repr=False)
    """fingerprint, config, capture, checks, behaviour, drafter, lens, finish reasons, model source."""
    model: CachedLM | None = field(default=None, repr=False)
    thought_table: pd.DataFrame | None = field(default=None, repr=False)
    thought_states: Tensor | None = field(default=None, repr=False)
    """[n, c, m]: what each thought added to the next chunk, by its number in `thoughts()`."""
    interventions: Sequence[Intervention] = field(default=(), repr=False)
    """What changed the run. Their vectors are not saved: a loaded trace has a record of them in its meta alone."""
    kept_rows: Mapping[int, KVSnapshot] = field(default_factory=dict, repr=False)
    """By request, of those that asked for it; they are not saved."""
    token_table: pd.DataFrame | None = field(default=None, repr=False)
    """Columns token_id and token, of every token that the run names; None where an older version stored the run."""
    reading_of_import: "Callable[[TraceData], pd.DataFrame] | None" = field(default=None, repr=False, compare=False)
    """Reads the kept states by the logit lens, for an import without lens readings, if its model is there."""
    judged_readings: pd.DataFrame | None = field(default=None, init=False, repr=False, compare=False)
    """The readings with their verdicts, made when they are first asked for."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The schedule that the bits of this run depend on."""
        return self.meta["fingerprint"]

    @property
    def num_drafted(self) -> int:
        """Candidates that reached the verifier."""
        return int(self.event_table.draft_token_ids.map(len).sum())

    @property
    def num_rolled_back(self) -> int:
        return int(self.event_table.num_rolled_back.sum())

    @property
    def missing(self) -> dict[str, str]:
        """What this trace does not have, and why: of an import, or of a run that an older version stored."""
        return dict(self.meta.get("missing", {}))

    @property
    def token_texts(self) -> Mapping[int, str]:
        """The visible form of every token that the run names, by token id."""
        if self.token_table is None:
            self.token_table = token_texts_of(self.row_table, self.hypothesis_table)
        return dict(zip(self.token_table.token_id.tolist(), self.token_table.token.tolist(), strict=True))

    def rows(self, request_id: SupportsIndex | None = None, status: str | None = None) -> pd.DataFrame:
        """A copy of a request's rows, or of all: of every status, or of one, such as committed or rolled_back."""
        table = self.row_table
        if request_id is not None:
            self._require(request_id)
            table = table[table.request_id == request_id]
        if status is not None and status not in STATUSES:
            raise ValueError(f"unknown status {status!r}; statuses are {', '.join(STATUSES)}")
        return table[table.status == status].copy() if status else table.copy()

    def thoughts(self) -> pd.DataFrame:
        """Thoughts of a Thinking States model, one row for each chunk; as in `trace.tables.thoughts.thoughts_table`."""
        if self.thought_table is None:
            name = self.fingerprint["model"]
            raise ValueError(f"{name} wrote no thoughts; only a Thinking States model does, after whole chunks")
        return self.thought_table.copy()

    def vectors(self, site: str, layer: SupportsIndex, rows: "pd.DataFrame | Sequence[int]") -> Tensor:
        """States [n, m] of the given rows (a table from `rows()`, or row numbers) at one site and layer.

        layer: -1 is the last. At q, k, v and z [n, h, d]. Patterns differ in length from row to row: `pattern_rows`.
        """
        if site == PATTERN:
            raise ValueError("patterns differ in length from row to row; ask for them with pattern_rows(layer, rows)")
        held, places = self._stored(site, layer, rows)
        return held[places]

    def _stored(self, site: str, layer: SupportsIndex, rows: "pd.DataFrame | Sequence[int]") -> tuple[Tensor, Tensor]:
        """All that is stored of a site and layer, and the place [n] of each given row in it. Raises: ValueError."""
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
        """Attention weights of the given rows, whatever their status: [h, p + 1] over positions 0 to p for each.

        What a rolled-back row gave to a position that was rolled back too, it gave to the candidate that stood there.
        """
        flat, places = self._stored(PATTERN, layer, rows)
        stored = self.row_table[self.row_table.state_index >= 0]  # a shared prompt's rows share their states
        positions = stored.drop_duplicates("state_index").sort_values("state_index").position
        starts, heads = ragged_starts(torch.tensor(positions.to_numpy()), flat.numel())
        return [flat[starts[i] : starts[i + 1]].view(heads, -1) for i in places.tolist()]

    def kept(self, site: str, layer: SupportsIndex, rows: pd.DataFrame) -> "Tensor | list[Tensor]":
        """One tensor for each row, of whatever was captured."""
        return self.pattern_rows(layer, rows) if site == PATTERN else self.vectors(site, layer, rows)

    def thoughts_said(self, request_id: SupportsIndex) -> list[tuple]:
        """(chunk, token ids, log-probabilities) of the request's committed thoughts, in order."""
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
        if reason := self.missing.get(what):
            raise ValueError(f"this trace has no {what}: {reason}")
