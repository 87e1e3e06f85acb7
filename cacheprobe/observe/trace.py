"""The trace: one run's requests, states, hypotheses, events and ledger, in memory or read from disk."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.cache.surgery import CacheRows
from cacheprobe.interventions.base import Intervention
from cacheprobe.lenses.base import Lens
from cacheprobe.models.base import CachedLM
from cacheprobe.names import HEAD_SITES, PATTERN
from cacheprobe.observe import hypotheses as measures
from cacheprobe.observe import measures as by_row
from cacheprobe.observe.checks import self_checks_text
from cacheprobe.observe.head_blocks import ragged_starts
from cacheprobe.observe.ledgers import ledger_at
from cacheprobe.observe.store import StateStore, layer_number
from cacheprobe.observe.tables import token_texts_of
from cacheprobe.records import STATUSES, Request

SITE_NAMES = {"S": "residual stream", "T": "attention output", "C": "MLP output"}


@dataclass
class Trace:
    """What a run computed, believed, committed and threw away.

    A row is one token of one pass, at the absolute position of that token; a reading of it speaks of the next one.
    Every position has one canonical row, of status `committed`: prompt + generated - 1 of them for each request, since
    the newest token has none yet.
    """

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
    kept_rows: Mapping[int, CacheRows] = field(default_factory=dict, repr=False)
    """By request, of those that asked for it; they are not saved."""
    token_table: pd.DataFrame | None = field(default=None, repr=False)
    """Columns token_id and token, of every token that the run names; None where an older version stored the run."""
    judged_readings: pd.DataFrame | None = field(default=None, init=False, repr=False, compare=False)
    """The readings with their verdicts, made when they are first asked for."""

    def __repr__(self) -> str:
        steps = self.event_table.drop_duplicates("step").phase.value_counts()
        phases = ", ".join(f"{steps.get(phase, 0)} {phase}" for phase in ("prefill", "decode", "verify"))
        text = f"Trace({len(self.requests)} requests, {steps.sum()} steps: {phases}"
        if drafted := self.num_drafted:
            accepted = 100 * (drafted - self.num_rolled_back) / drafted
            text += f"; accepted {accepted:.0f} %, rolled back {self.num_rolled_back} tokens"
        return text + self_checks_text(self.meta) + ")"

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

    # -- what was said

    def committed(self, request_id: SupportsIndex) -> list[int]:
        """The request's committed token ids, without its prompt."""
        self._require(request_id)
        return list(self.tokens[int(request_id)])

    def text(self, request_id: SupportsIndex) -> str:
        """The committed tokens as text."""
        self._require(request_id)
        return self.texts[int(request_id)]

    def logprobs(self, request_id: SupportsIndex) -> list[float]:
        """Log-probability, in nats, of each committed token under the logits that chose it, before any processor."""
        self._require(request_id)
        self.require_there("log-probabilities")
        events = self.event_table[self.event_table.request_id == request_id]
        return [float(nats) for step in events.committed_logprobs_nats for nats in step]

    # -- tables

    def events(self) -> pd.DataFrame:
        """One row for every request in every step; columns as in `observe.tables.events_table`."""
        return self.event_table.copy()

    def ledger(self, request_id: SupportsIndex, step: SupportsIndex | None = None) -> pd.DataFrame:
        """Cache rows of a request after `step` (default: its last): position, provenance, step of the last write."""
        self._require(request_id)
        self.require_there("ledger")
        steps = self.event_table.step
        if step is not None and not (len(steps) and 0 <= int(step) <= steps.max()):
            raise ValueError(f"no step {step} in this trace; it has {f'0 to {steps.max()}' if len(steps) else 'none'}")
        return ledger_at(self.ledger_table[self.ledger_table.request_id == request_id], step)

    def hypotheses(self, include_rolled_back: bool = False) -> pd.DataFrame:
        """Every lens reading, one row for each layer x position x step, beside the draft that was judged there.

        Columns: those of `observe.tables.hypotheses_table`; `drafted_token`, `verdict` and `prediction_depth` of
        `observe.draft_verdicts.with_verdicts`; `read_token`, which the row was fed; top_tokens, the texts of
        top_token_ids. Thoughts stand among them, at site "thought". The logit lens reads an import without readings.
        include_rolled_back: also rows that were fed a rejected draft token, or one that was given up. They follow a
            text that was never committed, so nothing committed can be compared with their prediction.
        """
        from cacheprobe.observe.beliefs import hypotheses_of

        return hypotheses_of(self, include_rolled_back)

    def readings(self, include_rolled_back: bool = False) -> pd.DataFrame:
        """The lens readings alone, without thoughts: what the measures by layer are taken over."""
        table = self.hypotheses(include_rolled_back)
        return table[table.site != "thought"].reset_index(drop=True) if self.thought_table is not None else table

    @property
    def token_texts(self) -> Mapping[int, str]:
        """The visible form of every token that the run names, by token id."""
        if self.token_table is None:
            self.token_table = token_texts_of(self.row_table, self.hypothesis_table)
        return dict(zip(self.token_table.token_id.tolist(), self.token_table.token.tolist(), strict=True))

    def read(
        self,
        lens: Lens,
        site: str = "S",
        *,
        layers: Iterable[int] | None = None,
        rows: pd.DataFrame | None = None,
        model: CachedLM | None = None,
    ) -> pd.DataFrame:
        """The kept states through any lens at S, T or C, as a hypotheses table; as in `observe.reading.read_states`."""
        from cacheprobe.observe.reading import read_states

        return read_states(self, lens, site, layers, rows, model)

    def agreement(self) -> pd.DataFrame:
        """Share of first choices that equal the committed token, by layer and verdict; see `agreement_by_layer`."""
        return measures.agreement_by_layer(self.readings())

    def settling(self) -> pd.DataFrame:
        """For every row: the layer at which its prediction settles, the flips on the way, and their path."""
        return measures.settling(self.readings())

    def commitment(self, margin: float = 0.5) -> pd.DataFrame:
        """For every row: the first layer that is sure by `margin`; as in `observe.measures.commitment`."""
        return by_row.commitment(self.readings(), margin)

    def saturation(self, top: int = 3) -> pd.DataFrame:
        """For every row: when each of the last layer's choices settles; as in `observe.measures.saturation`."""
        return by_row.saturation(self.readings(), top)

    def draft_agreement(self, window: int) -> pd.DataFrame:
        """What would have been accepted of each layer's drafts; as in `observe.measures.draft_agreement`."""
        return by_row.draft_agreement(self.readings(), window)

    def divergences(self, lens: Lens, **which: Any) -> pd.DataFrame:
        """KL to the output and Jensen-Shannon between layers; as in `observe.distributions.divergences`."""
        from cacheprobe.observe.distributions import divergences

        return divergences(self, lens, **which)

    def rejected(self, lens: Lens, model: CachedLM | None = None) -> pd.DataFrame:
        """Rejected draft tokens by layer, beside what was committed; as in `observe.distributions.rejected_tokens`."""
        from cacheprobe.observe.distributions import rejected_tokens

        return rejected_tokens(self, lens, model)

    def attribution(
        self, request_id: SupportsIndex, position: SupportsIndex | None = None, **which: Any
    ) -> pd.DataFrame:
        """One row's logit of a token by layer, site and head; as in `observe.attribution.attribution`."""
        from cacheprobe.observe.attribution import attribution

        return attribution(self, request_id, position, **which)

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
        """Thoughts of a Thinking States model, one row for each chunk; as in `observe.thoughts.thoughts_table`."""
        if self.thought_table is None:
            name = self.fingerprint["model"]
            raise ValueError(f"{name} wrote no thoughts; only a Thinking States model does, after whole chunks")
        return self.thought_table.copy()

    def thought_readings(self, layers: Iterable[int] | None = None, model: CachedLM | None = None) -> pd.DataFrame:
        """What T would have thought at other layers; as in `observe.thought_readings.read_thoughts`."""
        from cacheprobe.observe.thought_readings import read_thoughts

        return read_thoughts(self, layers, model)

    def thought_insides(self, thought: SupportsIndex, model: CachedLM | None = None) -> dict[str, Tensor]:
        """T's and C's activations at a thought; as in `observe.thought_insides.thought_insides`."""
        from cacheprobe.observe.thought_insides import thought_insides

        return thought_insides(self, int(thought), model)

    # -- tensors

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

    def states(self, site: str, layer: SupportsIndex, request_id: SupportsIndex) -> Tensor:
        """The canonical states of a request, [position, m]: prompt + generated - 1 rows in order of position."""
        return self.vectors(site, layer, self._canonical(request_id))

    def heads(self, site: str, layer: SupportsIndex, request_id: SupportsIndex) -> Tensor:
        """q, k, v or z of every head at a request's canonical rows, [position, h, d], in order of position.

        q and k: as they leave the projection, before any norm of theirs and before the rotation; k and v have as many
        heads as the cache. z is what enters the output projection, whose sum over heads, with its bias, is T where no
        norm follows. Raises: ValueError for a site that is none of these, or that was not kept.
        """
        if site not in HEAD_SITES:
            raise ValueError(f"unknown site {site!r} of heads; they are {', '.join(HEAD_SITES)}")
        return self.vectors(site, layer, self._canonical(request_id))

    def pattern_rows(self, layer: SupportsIndex, rows: "pd.DataFrame | Sequence[int]") -> list[Tensor]:
        """Attention weights of the given rows, whatever their status: [h, p + 1] over positions 0 to p for each.

        What a rolled-back row gave to a position that was rolled back too, it gave to the candidate that stood there.
        """
        flat, places = self._stored(PATTERN, layer, rows)
        stored = self.row_table[self.row_table.state_index >= 0]  # a shared prompt's rows share their states
        positions = stored.drop_duplicates("state_index").sort_values("state_index").position
        starts, heads = ragged_starts(torch.tensor(positions.to_numpy()), flat.numel())
        return [flat[starts[i] : starts[i + 1]].view(heads, -1) for i in places.tolist()]

    def pattern(self, layer: SupportsIndex, request_id: SupportsIndex) -> Tensor:
        """Attention weights of a request's canonical rows, [h, t, t]: query position by position attended to.

        Zero above the diagonal, and where a sliding window or a mask hides. Raises: ValueError where a position was not
        computed (cached rows that the request went on from) or not kept; see `pattern_rows`.
        """
        rows = self._canonical(request_id)
        kept = self.pattern_rows(layer, rows)
        if rows.position.tolist() != list(range(len(rows))):
            raise ValueError(
                f"request {request_id} has rows at positions {rows.position.min()} to {rows.position.max()} alone, so "
                "its pattern is no square; use pattern_rows(layer, trace.rows(...))"
            )
        square = torch.zeros(kept[0].shape[0], len(rows), len(rows), dtype=kept[0].dtype)
        for position, weights in enumerate(kept):
            square[:, position, : position + 1] = weights
        return square

    def kept(self, site: str, layer: SupportsIndex, rows: pd.DataFrame) -> "Tensor | list[Tensor]":
        """One tensor for each row, of whatever was captured."""
        return self.pattern_rows(layer, rows) if site == PATTERN else self.vectors(site, layer, rows)

    def cache_rows(self, request_id: SupportsIndex, length: int | None = None) -> CacheRows:
        """The request's cache rows as it left them, or its first `length`; as in `observe.forks.rows_of`."""
        from cacheprobe.observe.forks import rows_of

        return rows_of(self, request_id, length)

    def fork(self, request_id: SupportsIndex, length: int, rows: CacheRows | None = None) -> Request:
        """A Request that goes on from the first `length` cache rows; as in `observe.forks.fork`."""
        from cacheprobe.observe.forks import fork

        return fork(self, request_id, length, rows)

    def digest(self, request_id: SupportsIndex) -> str:
        """SHA-256 over the committed tokens, their log-probabilities, thoughts, and what was kept of canonical rows."""
        rows = self._canonical(request_id)
        spoken: tuple = (self.committed(request_id), self.logprobs(request_id))
        if self.thought_table is not None:
            spoken += (self.thoughts_said(request_id),)
        digest = hashlib.sha256(repr(spoken).encode())
        for site in (*self.store.sites, *self.store.heads):
            for layer in self.store.layers:
                digest.update(f"{site}.{layer}".encode())
                kept = self.kept(site, layer, rows)
                for states in [kept] if isinstance(kept, Tensor) else kept:
                    digest.update(states.contiguous().view(torch.uint8).numpy().data.cast("B"))
        return digest.hexdigest()

    def to_activation_cache(self, request_id: SupportsIndex) -> Any:
        """TransformerLens' ActivationCache of the request's canonical states, [1, position, m] by hook name.

        Of heads [1, position, h, d], and patterns [1, h, position, position].
        """
        if self.model is None:
            raise ValueError("this trace was loaded without its model; use cp.load_trace(dir, model=...)")
        if not self.store.layers:
            raise ValueError("this run kept no states; run it with S, T or C in capture=")
        rows = self._canonical(request_id)
        pairs = [(site, layer) for layer in self.store.layers for site in (*self.store.sites, *self.store.heads)]
        held = {p: self.pattern(p[1], request_id) if p[0] == PATTERN else self.vectors(*p, rows) for p in pairs}
        return self.model.to_activation_cache(held)

    # -- on disk

    def save(self, directory: "str | Path", *, overwrite: bool = False) -> Path:
        """Write the trace whole, or leave the directory as it was; a run there is replaced only with `overwrite`."""
        from cacheprobe.observe.storage import save_trace

        return save_trace(self, Path(directory), overwrite=overwrite)

    # -- shared

    def _canonical(self, request_id: SupportsIndex) -> pd.DataFrame:
        return self.rows(request_id, "committed").sort_values("position")

    def thoughts_said(self, request_id: SupportsIndex) -> list[tuple]:
        """(chunk, token ids, log-probabilities) of the request's committed thoughts, in order."""
        assert self.thought_table is not None
        table = self.thought_table
        mine = table[(table.request_id == request_id) & (table.status == "committed")].sort_values("end")
        return [
            (int(t.chunk), [int(i) for i in t.token_ids], [float(x) for x in t.logprobs_nats])
            for t in mine.itertuples()
        ]

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
