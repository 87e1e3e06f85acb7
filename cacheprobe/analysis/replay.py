"""Compares a run, bit for bit, with the slow reference (`cp.reference`): each request alone, without a drafter.

Error messages call the reference the oracle.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from cacheprobe.analysis.audit import audit
from cacheprobe.analysis.comparison import first_difference, first_reading_difference
from cacheprobe.core.config import CaptureConfig, EngineConfig
from cacheprobe.core.records import Request
from cacheprobe.edits.interventions.base import Intervention
from cacheprobe.engine.drafters.early_exit import FastPath
from cacheprobe.engine.fingerprint import require_same, schedule_fingerprint
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import PATHS, choose_path
from cacheprobe.ops.equality import bitwise
from cacheprobe.ops.state_codec import INT8
from cacheprobe.trace.manifest import damaged_files
from cacheprobe.trace.parts.shards import ShardStore
from cacheprobe.trace.recording.lens_reader import LENS_TILE
from cacheprobe.trace.recording.stored_states import read_now
from cacheprobe.trace.trace import Trace

_SHAPES = ("window", "group", "capacity", "prefill_chunk", "prefill_group", "pad_prefill", "determinism")
"""Settings of the run that the reference takes over."""


@dataclass(frozen=True)
class Replay:
    """Holds the result of `replay`: the numbers of compared tokens, states and readings, and the first difference, if
    any.
    """

    num_requests: int
    num_tokens: int
    num_states: int
    """Number of vectors of states and heads compared bit for bit."""
    num_readings: int
    """Number of lens readings (Z) compared bit for bit."""
    num_skipped: int
    """Number of requests that were not compared: never verified, ended with an error or without a token, or changed by
    interventions at single steps."""
    first_difference: str | None
    num_logprobs: int = 0
    """Number of log-probabilities compared bit for bit."""
    num_files: int = 0
    """Number of files compared with the checksums in the run's manifest."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Number of lines of each table checked against the other tables and the committed tokens."""
    not_compared: tuple[str, ...] = ()
    """One sentence for each part of the run that was not compared, with the reason."""

    @property
    def is_equal(self) -> bool:
        """True if the comparison found no difference."""
        return self.first_difference is None

    def __repr__(self) -> str:
        return f"Replay({self})"

    def __str__(self) -> str:
        """Returns the result of the comparison as text, one fact a line."""
        result = (
            f"equal to the oracle: {self.num_tokens} tokens of {self.num_requests} requests, and {self.num_logprobs} "
            f"log-probabilities, {self.num_states} states and {self.num_readings} readings of the deterministic ones "
            "bit for bit"
        )
        if self.first_difference is not None:
            result = f"differs from the oracle or from itself: {self.first_difference}"
        lines = [result]
        if self.lines:
            tables = ", ".join(f"{count} of {name}" for name, count in self.lines.items())
            lines.append(f"checked against each other and the tokens: the tables' lines ({tables})")
        if self.num_files:
            lines.append(f"compared with their checksums: {self.num_files} files")
        return "\n".join([*lines, *(f"not compared: {reason}" for reason in self.not_compared)])


def replay(
    trace: Trace,
    model: CachedLM,
    oracle: Callable[..., Trace],
    progress: bool,
    interventions: Sequence[Intervention] = (),
) -> Replay:
    """Compares a run with the slow reference (`cp.reference`), its tables with each other, and its files with their
    checksums; returns a Replay.

    For verified requests, the tokens and the end are compared; for deterministic ones also log-probabilities, states,
    heads, thoughts and readings. `Replay.not_compared` lists the rest.
    Z of a run with lens="later" is read first, if it was not.
    oracle: the function `cp.reference`.
    Raises: FingerprintMismatch if the schedule or platform differs; ValueError if no request can be compared, and for a
    run that cannot be made again: an import, or one whose interventions or snapshots are missing.
    """
    require_run(trace)
    config, path = _schedule(trace, model, interventions)
    read_now(trace, model)
    verified = _verified_requests(trace, config, interventions)
    has_readings = trace.hypothesis_table is not None and trace.meta["lens"] == LogitLens.name
    reference = oracle(
        model,
        [_reference_request(trace, request) for request in verified],
        # a drafted run is compared with verify passes; which drafter it had does not matter
        drafter=None if trace.meta["drafter"] is None else FastPath(),
        **{name: getattr(config, name) for name in _SHAPES},
        capture=_capture(trace, has_readings),
        path=path,
        interventions=_renumbered(interventions, verified),
        progress=progress,
    )
    num_files, faults = _files(trace)
    checked = audit(trace, model.token_texts)
    comparison = _Comparison(next(iter((*faults, *checked.faults)), None))
    for number, request in enumerate(verified):
        _compare_request(comparison, trace, reference, model, request, number, has_readings)
    return Replay(
        len(verified),
        comparison.num_tokens,
        comparison.num_states,
        comparison.num_readings,
        len(trace.requests) - len(verified),
        comparison.difference,
        comparison.num_logprobs,
        num_files,
        checked.lines,
        tuple(_not_compared(trace, verified, has_readings)),
    )


def _schedule(trace: Trace, model: CachedLM, interventions: Sequence[Intervention]) -> tuple[EngineConfig, str]:
    """Returns (EngineConfig of the run; its path, or "auto" if the path is not in PATHS). Raises: FingerprintMismatch
    if the schedule differs on this machine."""
    config, path = EngineConfig(**trace.meta["config"]), str(trace.fingerprint["path"])
    path = path if path in PATHS else "auto"
    chosen_model, _ = choose_path(model, path)
    if trace.meta.get("interventions") and not interventions:
        raise ValueError(
            "this run was changed by interventions, which are not saved with it; make them again and pass them, "
            "cp.verify(trace, model, interventions=[...])"
        )
    if "cached" in trace.fingerprint and all(request.cached is None for request in trace.requests):
        raise ValueError(
            "this run went on from cached keys and values, which are not saved with it; replay it before it is saved"
        )
    schedule = schedule_fingerprint(chosen_model, config, LENS_TILE, interventions, trace.requests)
    require_same(trace.fingerprint, schedule, "the run and this machine")
    return config, path


def _verified_requests(trace: Trace, config: EngineConfig, interventions: Sequence[Intervention]) -> list[Request]:
    """Returns a list of the requests whose tokens the reference must commit too. Raises: ValueError if it is empty."""
    is_all_verified = trace.meta["drafter"] is not None or trace.meta["kind"] == "reference"
    is_by_equality = is_all_verified and config.acceptance == "equality"
    by_step = {one.request_id for one in interventions if one.steps is not None}
    verified = [
        request
        for request in trace.requests
        if (is_by_equality or request.is_deterministic)
        and str(request.request_id) not in trace.meta["errors"]
        and trace.tokens[request.request_id]
        and request.request_id not in by_step
    ]
    if not verified:
        raise ValueError("no request of this run was verified: it had no drafter and none was deterministic")
    return verified


def _capture(trace: Trace, has_readings: bool) -> CaptureConfig:
    """Returns the CaptureConfig of the reference run: the sites, layers and readings that the run itself kept."""
    capture, sites = trace.meta["capture"], "".join(trace.store.sites) + ("Z" if has_readings else "")
    return CaptureConfig(
        sites=sites or None,
        heads=trace.store.heads,
        layers=tuple(capture["layers"]) if sites or trace.store.heads else None,
        dtype=capture["dtype"],
        top_k=capture["top_k"],
        prompt_hypotheses=capture["prompt_hypotheses"],
    )


def _renumbered(interventions: Sequence[Intervention], requests: Sequence[Request]) -> list[Intervention]:
    """Returns copies of the interventions on the compared requests, with the request numbers of the reference run."""
    return [
        replace(one, request_id=number)
        for number, request in enumerate(requests)
        for one in interventions
        if one.request_id == request.request_id
    ]


@dataclass
class _Comparison:
    """Counts the compared tokens, states and readings, and holds the first difference from the reference as text."""

    difference: str | None
    num_tokens: int = 0
    num_states: int = 0
    num_readings: int = 0
    num_logprobs: int = 0


def _compare_request(
    result: _Comparison,
    trace: Trace,
    reference: Trace,
    model: CachedLM,
    request: Request,
    number: int,
    has_readings: bool,
) -> None:
    """Compares one request with number `number` of the reference run; adds counts and first difference to `result`."""
    result.difference = result.difference or _first_token_difference(trace, reference, request, number)
    result.num_tokens += len(trace.tokens[request.request_id])
    result.difference = result.difference or _end_difference(trace, reference, model, request, number)
    if result.difference is not None or not request.is_deterministic:
        return
    if "log-probabilities" not in trace.missing:
        result.num_logprobs += len(trace.tokens[request.request_id])
    result.difference, compared = _first_state_difference(trace, reference, request, number)
    result.num_states += compared
    result.difference = result.difference or _first_thought_difference(trace, reference, request, number)
    if result.difference is None and has_readings:
        result.difference, compared = _first_reading_difference(trace, reference, request, number)
        result.num_readings += compared


def _files(trace: Trace) -> tuple[int, list[str]]:
    """Compares the files of a saved run with their checksums; returns (number of files compared, error texts)."""
    return damaged_files(trace.store.files.directory) if isinstance(trace.store, ShardStore) else (0, [])


def _not_compared(trace: Trace, requests: Sequence[Request], has_readings: bool) -> Iterator[str]:
    """Yields a sentence for each part of the run that was not compared with the reference, with the reason."""
    compared = {request.request_id for request in requests}
    if left_out := [r.request_id for r in trace.requests if r.request_id not in compared]:
        names = ", ".join(map(str, left_out[:8]))
        yield (
            f"tokens of {len(left_out)} requests ({names}{', ...' if len(left_out) > 8 else ''}): they "
            "were never verified, ended without a token or with an error, or interventions changed them by step"
        )
    if not_deterministic := [r.request_id for r in requests if not r.is_deterministic]:
        yield f"log-probabilities, states and readings of {len(not_deterministic)} requests that are not deterministic"
    rows = trace.row_table
    deterministic = [r.request_id for r in requests if r.is_deterministic]
    others = int(((rows.status != "committed") & rows.request_id.isin(deterministic)).sum())
    if others:
        yield f"states and readings of {others} rows that are not committed: the fast path or a drafter computed them"
    if trace.meta["capture"]["dtype"] == INT8 and (trace.store.sites or trace.store.heads):
        yield "states before they were rounded to int8: the reference's states are rounded likewise, then compared"
    if trace.hypothesis_table is not None and not has_readings:
        yield f"readings of the lens {trace.meta['lens']}: the oracle reads with the logit lens alone"
    if not trace.store.sites and not trace.store.heads:
        yield "states: the run kept none"
    if trace.hypothesis_table is None:
        yield "readings: the run kept none"
    yield "seconds and margins of the events: nothing determines them"


def _end_difference(trace: Trace, reference: Trace, model: CachedLM, request: Request, number: int) -> str | None:
    """Returns an error text if a request that was not cancelled ended for another reason than in the reference, or if
    a request's stored text is not the text of its tokens; else None."""
    ours, theirs = trace.meta["finish"][str(request.request_id)], reference.meta["finish"][str(number)]
    if ours != theirs and ours != "cancelled":
        return f"request {request.request_id}: ended by {ours}, the oracle by {theirs}"
    said = model.decode(trace.committed(request.request_id), after=request.prompt_token_ids)
    if trace.texts[request.request_id] != said:
        return f"request {request.request_id}: its stored text is not that of its tokens"
    return None


def require_run(trace: Trace) -> None:
    """Checks that the trace is a run of the engine. Raises: ValueError for an import, which cannot be replayed."""
    if trace.meta["kind"] == "import":
        raise ValueError(f"this trace was {trace.meta['path_reason']}: it followed no schedule that could be replayed")


def _reference_request(trace: Trace, request: Request) -> Request:
    """Returns a copy of a request for the slow reference (`cp.reference`), with its prompt as token ids, without a task
    example."""
    sampling = request.sampling
    if trace.meta["finish"][str(request.request_id)] == "cancelled" and sampling is not None:
        sampling = replace(sampling, max_new_tokens=len(trace.tokens[request.request_id]))
    return replace(request, prompt=request.prompt_token_ids, example=None, sampling=sampling, sample_of=None)


def _first_token_difference(trace: Trace, reference: Trace, request: Request, number: int) -> str | None:
    """Returns an error text on the first token, or on log-probabilities, that differ from the reference; else None."""
    ours, theirs = trace.committed(request.request_id), reference.committed(number)
    if ours == theirs:
        has_logprobs = request.is_deterministic and "log-probabilities" not in trace.missing
        if not has_logprobs or trace.logprobs(request.request_id) == reference.logprobs(number):
            return None
        return f"request {request.request_id}: the log-probabilities of its committed tokens differ"
    at = first_difference(ours, theirs) or 0
    position = request.num_prompt_tokens + at
    difference = f"the run committed {ours[at : at + 1]}, the oracle {theirs[at : at + 1]}"
    return f"request {request.request_id} position {position}: {difference}"


def _first_state_difference(trace: Trace, reference: Trace, request: Request, number: int) -> tuple[str | None, int]:
    """Returns (an error text on the first state that differs from the reference, or None; the number of equal states
    before)."""
    compared = 0
    rows = trace.rows(request.request_id, "committed").sort_values("position")
    rows = rows[rows.state_index >= 0]
    theirs = reference.rows(number, "committed").set_index("position").loc[rows.position.to_numpy()].reset_index()
    for layer in trace.store.layers:
        for site in (*trace.store.sites, *trace.store.heads):
            a, b = (run.kept(site, layer, of_run) for run, of_run in ((trace, rows), (reference, theirs)))
            for i, position in enumerate(rows.position):
                if not bitwise(a[i], b[i]):
                    where = f"request {request.request_id} position {position}"
                    return f"{where}: site {site} of layer {layer} differs", compared
                compared += 1
    return None, compared


def _first_thought_difference(trace: Trace, reference: Trace, request: Request, number: int) -> str | None:
    """Returns a sentence about the first thought that differs from the reference's; None if all are equal."""
    if trace.thought_table is None:
        return None
    ours, theirs = trace.thoughts_said(request.request_id), reference.thoughts_said(number)
    if (at := first_difference(ours, theirs)) is None:
        return None
    return (
        f"request {request.request_id}: thought {at} is {ours[at : at + 1]} here, {theirs[at : at + 1]} by the oracle"
    )


def _first_reading_difference(trace: Trace, reference: Trace, request: Request, number: int) -> tuple[str | None, int]:
    """Returns (error text on the first lens reading that differs from the reference, 0); (None, number of readings
    compared) if all are equal."""
    assert trace.hypothesis_table is not None and reference.hypothesis_table is not None
    ours = trace.hypothesis_table[trace.hypothesis_table.request_id == request.request_id]
    theirs = reference.hypothesis_table[reference.hypothesis_table.request_id == number]
    difference = first_reading_difference(ours, theirs) or _first_choice_difference(ours, theirs)
    if difference is None:
        return None, int((ours.status == "committed").sum())
    position, layer = difference
    return f"request {request.request_id} position {position}: the reading of layer {layer} differs", 0


def _first_choice_difference(ours: pd.DataFrame, theirs: pd.DataFrame) -> tuple[int, int] | None:
    """Returns (position, layer) of the first lens reading whose top choices, or their log-probabilities, differ; else
    None."""
    a, b = (
        table[table.status == "committed"].set_index(["position", "layer"])[["top_token_ids", "top_logprob_nats"]]
        for table in (ours, theirs)
    )
    for position, layer in a.index:
        if (position, layer) not in b.index:
            return int(position), int(layer)
        pairs = zip(a.loc[(position, layer)], b.loc[(position, layer)], strict=True)
        if any(list(x) != list(y) for x, y in pairs):
            return int(position), int(layer)
    return None
