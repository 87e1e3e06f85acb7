"""Compares a run, bit for bit, with the slow reference (`cp.reference`): each request alone, without a drafter.

Error messages call the reference the oracle.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

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
from cacheprobe.trace.recording.lens_reader import LENS_TILE
from cacheprobe.trace.recording.stored_states import read_now
from cacheprobe.trace.state_store import ShardStore
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
            result = f"differs from the oracle: {self.first_difference}"
        lines = [result]
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
    """Compares a run with the slow reference (`cp.reference`), and its files with their checksums; returns a Replay.

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
        interventions=[  # with the numbers of its own requests
            replace(one, request_id=number)
            for number, request in enumerate(verified)
            for one in interventions
            if one.request == request.request_id
        ],
        progress=progress,
    )
    num_files, faults = 0, []
    if isinstance(trace.store, ShardStore):
        num_files, faults = damaged_files(trace.store.files.directory)
    found = _Comparison(trace, reference, model, has_readings, next(iter(faults), None))
    for number, request in enumerate(verified):
        found.compare(request, number)
    return Replay(
        num_requests=len(verified),
        num_skipped=len(trace.requests) - len(verified),
        first_difference=found.difference,
        num_files=num_files,
        not_compared=tuple(_not_compared(trace, verified, has_readings)),
        **{name: found.counts[name] for name in ("num_tokens", "num_states", "num_readings", "num_logprobs")},
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
    events = trace.event_table[trace.event_table.phase != "prefill"]
    is_decoded = events.num_accepted.isna() & (events.committed_token_ids.map(len) > 0)
    decoded = {*events.request_id[is_decoded]} if trace.meta["drafter"] else set()  # while drafts did not pay
    decoded |= {*trace.meta.get("read_freely", ())}
    by_step = {one.request for one in interventions if one.steps is not None}
    verified = [
        request
        for request in trace.requests
        if ((is_by_equality and request.request_id not in decoded) or request.is_deterministic)
        and str(request.request_id) not in trace.meta["errors"]
        and trace.tokens[request.request_id]
        and request.request_id not in by_step
    ]
    if not verified:
        raise ValueError(
            "no request of this run can be compared: none was deterministic, and it had no drafter, or drafts stopped "
            "where they did not pay; set deterministic=True, or draft_length to a number"
        )
    return verified


def _capture(trace: Trace, has_readings: bool) -> CaptureConfig:
    """Returns the CaptureConfig of the reference run: the sites, layers and readings that the run itself kept."""
    capture, sites = trace.meta["capture"], "".join(trace.store.sites) + ("Z" if has_readings else "")
    return CaptureConfig(
        sites=sites or None,
        heads=trace.store.heads,
        modules=tuple(trace.store.modules),
        layers=tuple(capture["layers"]) if sites or trace.store.heads else None,
        dtype=capture["dtype"],
        top_k=capture["top_k"],
        prompt_hypotheses=capture["prompt_hypotheses"],
    )


@dataclass
class _Comparison:
    """Compares requests of a run with the reference; counts what was compared, and holds the first difference as
    text."""

    trace: Trace
    reference: Trace
    model: CachedLM
    has_readings: bool
    difference: str | None
    counts: Counter[str] = field(default_factory=Counter)
    """Numbers of what was compared, by the names of the fields of Replay."""

    def compare(self, request: Request, number: int) -> None:
        """Compares one request with number `number` of the reference, until the first difference."""
        self.counts["num_tokens"] += len(self.trace.tokens[request.request_id])
        checks = [self._tokens, self._end]
        if request.is_deterministic:
            checks += [self._logprobs, self._states, self._thoughts, *([self._readings] if self.has_readings else [])]
        for check in checks:
            if self.difference is None and (found := check(request.request_id, number)) is not None:
                self.difference = f"request {request.request_id}{found}"

    def _tokens(self, r: int, number: int) -> str | None:
        """Returns an error text on the first token that differs from the reference; else None."""
        ours, theirs = self.trace.committed(r), self.reference.committed(number)
        if (at := first_difference(ours, theirs)) is None:
            return None
        position = self.trace.requests[r].num_prompt_tokens + at
        return f" position {position}: the run committed {ours[at : at + 1]}, the oracle {theirs[at : at + 1]}"

    def _end(self, r: int, number: int) -> str | None:
        """Returns an error text if a request that was not cancelled ended for another reason than in the reference, or
        if its stored text is not the text of its tokens; else None."""
        trace = self.trace
        ours, theirs = trace.meta["finish"][str(r)], self.reference.meta["finish"][str(number)]
        if ours not in (theirs, "cancelled"):
            return f": ended by {ours}, the oracle by {theirs}"
        said = self.model.decode(trace.committed(r), after=trace.requests[r].prompt_token_ids)
        return None if trace.texts[r] == said else ": its stored text is not that of its tokens"

    def _logprobs(self, r: int, number: int) -> str | None:
        """Returns an error text if log-probabilities differ from the reference; else None."""
        if "log-probabilities" in self.trace.missing:
            return None
        if self.trace.logprobs(r) != self.reference.logprobs(number):
            return ": the log-probabilities of its committed tokens differ"
        self.counts["num_logprobs"] += len(self.trace.tokens[r])
        return None

    def _states(self, r: int, number: int) -> str | None:
        """Returns an error text on the first state that differs from the reference; else None."""
        rows = self.trace.rows(r, "committed").sort_values("position")
        rows = rows[rows.state_index >= 0]
        theirs = self.reference.rows(number, "committed").set_index("position")
        if unknown := sorted({*rows.position} - {*theirs.index}):
            return f" position {unknown[0]}: the oracle has no row there"
        theirs = theirs.loc[rows.position.to_numpy()].reset_index()
        store = self.trace.store
        for site, layer in sorted(store.places, key=itemgetter(1)):
            pairs = zip(self.trace.kept(site, layer, rows), self.reference.kept(site, layer, theirs), strict=True)
            for position, (a, b) in zip(rows.position, pairs, strict=True):
                if not bitwise(a, b):
                    return f" position {position}: site {site} of layer {layer} differs"
                self.counts["num_states"] += 1
        return None

    def _thoughts(self, r: int, number: int) -> str | None:
        """Returns an error text on the first thought that differs from the reference's; None if all are equal."""
        if self.trace.thought_table is None:
            return None
        ours, theirs = self.trace.thoughts_said(r), self.reference.thoughts_said(number)
        if (at := first_difference(ours, theirs)) is None:
            return None
        return f": thought {at} is {ours[at : at + 1]} here, {theirs[at : at + 1]} by the oracle"

    def _readings(self, r: int, number: int) -> str | None:
        """Returns an error text on the first lens reading that differs from the reference; else None."""
        mine, other = self.trace.hypothesis_table, self.reference.hypothesis_table
        assert mine is not None and other is not None
        ours, theirs = mine[mine.request_id == r], other[other.request_id == number]
        difference = first_reading_difference(ours, theirs)
        if difference is not None:
            return f" position {difference[0]}: the reading of layer {difference[1]} differs"
        self.counts["num_readings"] += int((ours.status == "committed").sum())
        return None


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
    if trace.meta["capture"]["dtype"] == INT8 and trace.store.places:
        yield "states before they were rounded to int8: the reference's states are rounded likewise, then compared"
    if trace.hypothesis_table is not None and not has_readings:
        yield f"readings of the lens {trace.meta['lens']}: the oracle reads with the logit lens alone"
    if not trace.store.places:
        yield "states: the run kept none"
    if trace.hypothesis_table is None:
        yield "readings: the run kept none"
    yield "drafts, verdicts, the ledger, seconds and margins: the oracle has another schedule, without drafts"


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
