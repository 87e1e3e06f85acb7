"""Defines `Trace`: requests, states, lens readings, events and cache changes of a run, in memory or on disk."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex, overload

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEAD_SITES, site_advice
from cacheprobe.core.values import folder, hint
from cacheprobe.lenses.dictionaries import Dictionary
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.data import TraceData
from cacheprobe.trace.manifest import TraceError
from cacheprobe.trace.notes import Notes
from cacheprobe.trace.one_request import RequestTrace, chosen_requests
from cacheprobe.trace.self_checks import computed_by, self_checks_text
from cacheprobe.trace.state_store import ShardStore, read_tensors
from cacheprobe.trace.storage import TABLES, request_from_record, save_trace
from cacheprobe.trace.stored import StoredRun, duckdb, open_run
from cacheprobe.trace.tables.build import ledger_at
from cacheprobe.trace.tables.edits import edits_of
from cacheprobe.trace.tables.features import features_of, recorded_features
from cacheprobe.trace.tables.hypotheses import hypotheses_of
from cacheprobe.trace.tables.rejected import rejected_of
from cacheprobe.trace.tables.schema import arrow_table

if TYPE_CHECKING:
    from duckdb import DuckDBPyRelation

_INTERNAL = frozenset(
    "event_table feature_table hypothesis_table is_unread judged_readings kept ledger_table lookup "
    "reading_later reading_of_states recorded_readings require_head require_there row_table state_indices store "
    "stored_readings table_files texts thought_table thoughts_said token_table".split()
)
"""Fields and methods that other modules of the package use, and that `dir` leaves out."""


@dataclass(repr=False)
class Trace(TraceData):
    """Holds the tables and states of one run: committed tokens, lens readings, drafts and cache events.

    A row is one token of one pass, at that token's absolute position p. Its state and lens reading predict the token at
    p + 1. Every token of the prompt and of the generated text, but the newest, has one canonical row, of status
    `committed`: prompt + generated - 1 rows. A request that starts from a KVSnapshot has none at the cached positions.
    len(trace) counts requests; trace[2], trace[-1], trace[1:3] and a loop over the trace give each as a `RequestTrace`.
    """

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[RequestTrace]:
        return iter(self[:])

    @overload
    def __getitem__(self, index: SupportsIndex) -> RequestTrace: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestTrace]: ...
    def __getitem__(self, index: "SupportsIndex | slice") -> "RequestTrace | list[RequestTrace]":
        """Returns one request by its number, or a list of a slice. Raises: IndexError for an unknown request."""
        return chosen_requests(self, index)

    def __dir__(self) -> list[str]:
        """Returns the names that users need, for dir() and completion."""
        return [name for name in super().__dir__() if not name.startswith("_") and name not in _INTERNAL]

    def __repr__(self) -> str:
        steps = self.event_table.drop_duplicates("step").phase.value_counts()
        phases = ", ".join(f"{steps.get(phase, 0)} {phase}" for phase in ("prefill", "decode", "verify"))
        text = f"Trace({len(self.requests)} requests, {steps.sum()} steps: {phases}"
        text += f"; {computed_by(self.fingerprint)}"
        text += f"; {line}" if (line := self.draft_line) else ""
        if self.meta.get("interventions"):
            committed = self.edits().committed
            text += f"; interventions: {len(committed)}, committed rows changed: {committed.sum()}"
            text += f" ({(committed == 0).sum()} changed none)" if (committed == 0).any() else ""
        capture = self.meta.get("capture", {})
        if capture.get("dictionary") is not None and not capture.get("include_special", True):
            text += "; features without first and special tokens"
        growing = "; not finished" if "growing" in self.meta else ""
        unchecked = f"; {self.missing['comparison']}" if "comparison" in self.missing else ""
        return text + self_checks_text(self.meta) + unchecked + growing + ")"

    def committed(self, request_id: SupportsIndex) -> list[int]:
        """Returns the token ids that a request generated (its committed tokens), without its prompt."""
        self._require_request(request_id)
        return list(self.tokens[int(request_id)])

    def text(self, request_id: SupportsIndex) -> str:
        """Returns the text that a request generated (its committed tokens, decoded), without its prompt."""
        self._require_request(request_id)
        return self.texts[int(request_id)]

    def logprobs(self, request_id: SupportsIndex) -> list[float]:
        """Returns the log-probability, in nats, of each committed token of a request, in order, as a list.

        The log-probabilities are those of the unprocessed logits from which the token was chosen.
        Raises: ValueError if they were not recorded; KeyError for an unknown request.
        """
        self._require_request(request_id)
        self.require_there("log-probabilities")
        events = self.lookup["events"].lines_of(self.event_table, request_id)
        return [float(nats) for step in events.committed_logprobs_nats for nats in step]

    def events(self) -> pd.DataFrame:
        """Returns a copy of the events table: a DataFrame with one line for each request in each step (mostly a pass).

        Columns: as in `trace.tables.build.events_table`.
        """
        return self.event_table.copy()

    def ledger(self, request_id: SupportsIndex, step: SupportsIndex | None = None) -> pd.DataFrame:
        """Returns the cached slots of a request after `step` as a DataFrame: position, provenance, step of the last
        write.

        provenance: the kind of pass that wrote the slot, such as "verified".  step: None for the end of the run.
        Raises: KeyError for an unknown request; ValueError for an unknown step, and for a trace without a ledger.
        """
        self._require_request(request_id)
        self.require_there("ledger")
        steps = self.event_table.step
        if step is not None and not (len(steps) and 0 <= int(step) <= steps.max()):
            raise ValueError(f"no step {step} in this trace; it has {f'0 to {steps.max()}' if len(steps) else 'none'}")
        return ledger_at(self.lookup["ledger"].lines_of(self.ledger_table, request_id), step)

    def hypotheses(self, include_rolled_back: bool = False, include_head: bool = False) -> pd.DataFrame:
        """Returns the lens readings as a DataFrame, one line for each layer of a row. A line also has the draft token
        for the position that the row predicts, and the verdict on this draft token.

        include_rolled_back: also rows fed a rejected, later or abandoned draft token. They follow a text that was never
        committed, so their prediction cannot be compared with committed tokens.
        include_head: also the rows of the drafter's head (`trace.head`), of phase "draft". Their layers are numbered on
        from the model's last, and their row numbers from the model's last row.
        Columns: those of `trace.tables.build.hypotheses_table`; `drafted_token`, `chain_step` (its number in its
        draft), `verdict` and `prediction_depth` of `trace.tables.draft_verdicts.with_verdicts`; `read_token`, the row's
        input token; top_tokens, the texts of top_token_ids. A Thinking States model's thoughts are included, at site
        "thought". If the run kept S without Z, or has lens="later", the first call reads S through the logit lens.
        Raises: ValueError if the run has neither lens readings nor thoughts and they cannot be read now, because it
        kept no S or the trace was loaded without its model; with `include_head` also if the run recorded no head.
        """
        return hypotheses_of(self, include_rolled_back, include_head)

    def rejected(self) -> pd.DataFrame:
        """Returns a DataFrame with one line for each rejected draft, by request and step. Needs no model,
        unless Z is not read yet.

        A draft is rejected at its first token that the verifier did not choose. Columns: request_id; step, of the
        verify pass; position, drafted_token_id and drafted_token of that token; committed_token_id and committed_token,
        null if the request ended before; num_rolled_back, this and the later tokens of the draft; drafted_step;
        drafter_layer, the last layer of the pass that drafted it, null if that pass ran all layers or there was none;
        flip_layer, the layer from which the committed token stays the lens's first choice, null if it is not the last
        layer's; margin_nats, by how much the last layer read gives the committed token a larger log-probability, null
        if the draft token is not among the top tokens read; margin_at_least_nats, the same or, then, the margin to
        the last of the top tokens; text_before, of the 8 tokens before. Without lens readings, flip_layer and the
        margins are null.
        """
        return rejected_of(self)

    def edits(self) -> pd.DataFrame:
        """Returns a DataFrame with one line for each intervention of the run: how many rows it acted on, also
        where it left all numbers as they were.

        Columns: name, request_id, site, layer, head; the number of these rows of each status: committed (the states
        that later tokens follow), superseded (draft tokens that were then verified), rolled_back and abandoned; missed,
        the positions that the intervention names and at which it acted on no committed row. Rows whose states a later
        intervention at the same place replaced are not counted.
        """
        return edits_of(self)

    @property
    def notes(self) -> Notes:
        """Notes on requests and tokens, kept beside a saved run: `trace.notes.table()`, and its `add` and `remove`."""
        directory = self.store.files.directory if isinstance(self.store, ShardStore) else None
        pairs = [(r.prompt_token_ids, self.tokens[int(r.request_id or 0)]) for r in self.requests]
        requests = [{"prompt_token_ids": list(prompt), "committed_token_ids": list(made)} for prompt, made in pairs]
        return Notes(directory, requests, self.token_texts)

    def table(self, name: str) -> "DuckDBPyRelation":
        """Returns a table as a DuckDB relation: `trace.table("hypotheses").filter("layer = 12 and rank = 0").df()`.

        Of a saved run, a query reads the columns and lines that it needs, so the table may be larger than the memory.
        name: rows, hypotheses, events, ledger, thoughts or tokens, with the stored columns: `hypotheses()` adds the
        drafts' verdicts. Raises: ValueError for another name, for a table that the run does not have, and if duckdb is
        not installed; TraceError for a damaged file.
        """
        if name not in TABLES:
            raise ValueError(f"unknown table {name!r}; tables are {', '.join(TABLES)}{hint(name, TABLES)}")
        database, file = duckdb().connect(), self.table_files.get(name)
        if file is not None and isinstance(self.store, ShardStore):
            files = self.store.files
            if fault := files.fault(file):
                raise TraceError(f"{files.directory}: {fault}; run it again or restore the file")
            return database.read_parquet(str(files.directory / file))
        table = getattr(self, "hypothesis_table" if name == "hypotheses" else TABLES[name])
        if table is None:
            raise ValueError(f"this run has no table of {name}")
        return database.from_arrow(arrow_table(table, name))

    def states(self, site: str, layer: SupportsIndex, request_id: SupportsIndex) -> Tensor:
        """Returns the states [n, m] of a request at one site and layer, one for each of its n rows of status
        "committed", by position.

        n is prompt + generated - 1, less the positions that came from a KVSnapshot. The newest token was not computed
        yet. Raises: ValueError if one of these states was not captured.
        """
        return self.vectors(site, layer, self._canonical_rows(request_id))

    def heads(self, site: str, layer: SupportsIndex, request_id: SupportsIndex) -> Tensor:
        """Returns q, k, v or z of every attention head for a request, [position, h, d]: one row for each computed
        position.

        q and k are taken right after their projection: before any q/k norm and before the rotation. k and v have as
        many heads as the cache. z enters the output projection; its projected sum over heads, with the bias, is T if no
        norm follows.
        At site router: [position, k, 2], the id and the weight of each of the k experts; NaN in a dense layer. At site
        recurrent: the state after the row's token, h by the state's first axis; NaN in another layer.
        Raises: ValueError for another site, or one that was not captured.
        """
        if site not in HEAD_SITES:
            raise ValueError(f"unknown site {site!r} of heads; they are {', '.join(HEAD_SITES)}{site_advice(site)}")
        return self.vectors(site, layer, self._canonical_rows(request_id))

    def pattern(self, layer: SupportsIndex, request_id: SupportsIndex) -> Tensor:
        """Returns the attention weights [h, t, t] of one request and layer: query position by attended position.

        Weights are zero above the diagonal, and for positions hidden by a sliding window or a mask.
        Raises: ValueError if a position was not captured, or not computed because the request began from a KVSnapshot;
        see `pattern_rows`.
        """
        rows = self._canonical_rows(request_id)
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

    def features(
        self,
        dictionary: Dictionary | None = None,
        *,
        top: int = 8,
        rows: "pd.DataFrame | None" = None,
        site: str | None = None,
        layer: SupportsIndex | None = None,
        include_special: bool = False,
    ) -> pd.DataFrame:
        """Returns the largest feature activations of each row as a DataFrame, one line for each row and active feature,
        of rolled-back rows too. They are computed from captured states, or, without a dictionary, those recorded during
        the run with `CaptureConfig(dictionary=...)`: the same numbers if the states are kept in the model's dtype.

        Columns: row, request_id, step, phase, position, status, token_id and token of the row's input; layer; site;
        rank, 0 for the largest; feature; activation. A row without an active feature has no line.
        dictionary: from `cp.lenses.Dictionary.load`.  top: how many features of a row, at most.
        rows: from `rows(...)`; by default all whose states were kept.
        site, layer: by default those that the dictionary was trained on.
        include_special: also rows of special tokens and of the first position (`is_special`), which are left out by
        default, as in the training.
        Raises: DictionaryError if the dictionary was made for states of another width, or for a hook point that a trace
        does not keep; ValueError for states that were not captured, and if there is no row.
        """
        if dictionary is None:
            return recorded_features(self, top, rows, site, layer, include_special)
        return features_of(self, dictionary, top, rows, site, layer, include_special)

    def digest(self, request_id: SupportsIndex) -> str:
        """Returns the SHA-256, as hex text, of a request's results: tokens, log-probabilities, thoughts, states of
        canonical rows.
        """
        rows = self._canonical_rows(request_id)
        results: tuple = (self.committed(request_id), self.logprobs(request_id))
        if self.thought_table is not None:
            results += (self.thoughts_said(request_id),)
        digest = hashlib.sha256(repr(results).encode())
        for site, layer in self.store.places:
            digest.update(f"{site}.{layer}".encode())
            kept = self.kept(site, layer, rows)
            for states in [kept] if isinstance(kept, Tensor) else kept:
                digest.update(states.contiguous().view(torch.uint8).numpy().data.cast("B"))
        return digest.hexdigest()

    def save(self, directory: "str | Path", *, overwrite: bool = False) -> Path:
        """Writes the trace into `directory` and returns the path. Replaces a complete run in the directory only if
        `overwrite` is True.

        If Z of a run with lens="later" is not read yet, it is saved as unread: `load_trace` with the model reads it
        when it is first needed. To save the readings, call `hypotheses` first. Notes are copied.
        If writing fails, an earlier run in the directory stays complete.
        Raises: TraceError as `cacheprobe.trace.storage.save_trace`.
        """
        path = save_trace(self, folder("directory", directory), overwrite=overwrite)
        self.notes.copy_to(path)
        return path


def load_trace(directory: "str | Path", model: CachedLM | None = None) -> Trace:
    """Opens a saved run and returns its Trace. Reads the tables now, and the states at their first use.

    Of a run that is being recorded, or was not finished, returns what its journal has.

    model: needed only to compute more from the states; it is not checked here.
    Raises: TraceError for a directory without a readable manifest, for an unknown version, and for a file that is
    missing or has another size.
    """
    return trace_of(open_run(directory), model)


def trace_of(run: StoredRun, model: CachedLM | None) -> Trace:
    """Returns the Trace of a run on the disk, finished or not. Reads the tables now; states and lens readings are read
    at their first use. Its `head` has no model. Raises: TraceError for a damaged file."""
    names = run.files.names("thoughts", "safetensors")
    thoughts = [read_tensors(run.files, name, ["states"])["states"] for name in names]
    return Trace(
        requests=tuple(request_from_record(item) for item in run.requests),
        tokens={item["request_id"]: item["committed_token_ids"] for item in run.requests},
        texts={item["request_id"]: item["text"] for item in run.requests},
        store=ShardStore(run.files, run.shards, run.sites, run.layers, run.heads, run.modules),
        meta=run.meta,
        model=model,
        thought_states=torch.cat(thoughts) if thoughts else None,
        row_table=run.rows,
        event_table=run.events,
        token_table=run.token_table,
        ledger_table=run.ledger,
        thought_table=run.thoughts,
        feature_table=run.feature_table,
        stored_readings=run.all_readings,
        table_files=run.table_files,
        head=None if run.head is None else trace_of(run.head, None),
    )
