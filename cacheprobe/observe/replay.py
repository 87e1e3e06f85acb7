"""Comparing a run with the oracle, bit for bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cacheprobe.config import CaptureConfig, EngineConfig
from cacheprobe.engine.fingerprint import require_same, schedule_fingerprint
from cacheprobe.interventions.base import Intervention
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import PATHS, choose_path
from cacheprobe.observe.comparison import first_reading_difference
from cacheprobe.observe.lens_reader import LENS_TILE
from cacheprobe.observe.trace import Trace
from cacheprobe.ops.equality import bitwise
from cacheprobe.records import Request


@dataclass(frozen=True)
class Replay:
    """What a replay compared, and the first difference it met, if any."""

    num_requests: int
    num_tokens: int
    num_states: int
    """State vectors compared bit for bit."""
    num_readings: int
    """Lens readings (Z) compared bit for bit."""
    num_skipped: int
    """Requests that were never verified: nothing is promised about them."""
    first_difference: str | None

    @property
    def is_equal(self) -> bool:
        return self.first_difference is None


def replay(
    trace: Trace,
    model: CachedLM,
    oracle: Callable[..., Trace],
    progress: bool,
    interventions: Sequence[Intervention] = (),
) -> Replay:
    """Run the oracle on the trace's verified requests; compare tokens, and deterministic requests' states.

    Raises: FingerprintMismatch, ValueError where no request was verified.
    """
    require_run(trace)
    config = EngineConfig(**trace.meta["config"])
    path = str(trace.fingerprint["path"])
    path = path if path in PATHS else "auto"
    here, _ = choose_path(model, path)
    if trace.meta.get("interventions") and not interventions:
        raise ValueError(
            "this run was changed by interventions, which are not saved with it; make them again and pass them, "
            "cp.verify(trace, model, interventions=[...])"
        )
    if "cached" in trace.fingerprint and all(request.cached is None for request in trace.requests):
        raise ValueError("this run went on from cache rows, which are not saved with it; replay it before it is saved")
    schedule = schedule_fingerprint(here, config, LENS_TILE, interventions, trace.requests)
    require_same(trace.fingerprint, schedule, "the run and this machine")
    is_all_verified = trace.meta["drafter"] is not None or trace.meta["kind"] == "reference"
    is_by_equality = is_all_verified and config.acceptance == "equality"
    asked = [r for r in trace.requests if is_by_equality or r.is_deterministic]
    asked = [r for r in asked if str(r.request_id) not in trace.meta["errors"] and trace.tokens[r.request_id]]
    by_step = {one.request_id for one in interventions if one.steps is not None}  # the oracle's steps are others
    asked = [r for r in asked if r.request_id not in by_step]
    if not asked:
        raise ValueError("no request of this run was verified: it had no drafter and none was deterministic")
    has_readings = trace.hypothesis_table is not None and trace.meta["lens"] == LogitLens.name
    sites = "".join(trace.store.sites) + ("Z" if has_readings else "")
    capture = trace.meta["capture"]
    again = oracle(
        model,
        [_as_asked(trace, request) for request in asked],
        window=config.window,
        group=config.group,
        capacity=config.capacity,
        prefill_chunk=config.prefill_chunk,
        prefill_group=config.prefill_group,
        pad_prefill=config.pad_prefill,
        # states are kept by layer; readings of a tile depend on no other layer
        capture=CaptureConfig(
            sites=sites or None,
            heads=trace.store.heads,
            layers=tuple(capture["layers"]) if sites or trace.store.heads else None,
            dtype=capture["dtype"],
            top_k=capture["top_k"],
            prompt_hypotheses=capture["prompt_hypotheses"],
        ),
        path=path,
        interventions=[
            replace(one, request_id=number)
            for number, request in enumerate(asked)
            for one in interventions
            if one.request_id == request.request_id
        ],
        progress=progress,
    )
    num_tokens = num_states = num_readings = 0
    difference = None
    for number, request in enumerate(asked):
        difference = difference or _first_token_difference(trace, again, request, number)
        num_tokens += len(trace.tokens[request.request_id])
        if request.is_deterministic and difference is None:
            difference, compared = _first_state_difference(trace, again, request, number)
            num_states += compared
            difference = difference or _first_thought_difference(trace, again, request, number)
        if request.is_deterministic and difference is None and has_readings:
            difference, compared = _first_reading_difference(trace, again, request, number)
            num_readings += compared
    return Replay(len(asked), num_tokens, num_states, num_readings, len(trace.requests) - len(asked), difference)


def require_run(trace: Trace) -> None:
    """Raises: ValueError for an import, which followed no schedule of ours."""
    if trace.meta["kind"] == "import":
        raise ValueError(f"this trace was {trace.meta['path_reason']}: it followed no schedule that could be replayed")


def _as_asked(trace: Trace, request: Request) -> Request:
    """The request again; one that was cancelled is asked for the tokens that it had committed."""
    sampling = request.sampling
    if trace.meta["finish"][str(request.request_id)] == "cancelled" and sampling is not None:
        sampling = replace(sampling, max_new_tokens=len(trace.tokens[request.request_id]))
    return replace(request, prompt=request.prompt_token_ids, example=None, sampling=sampling, sample_of=None)


def _first_token_difference(trace: Trace, again: Trace, request: Request, number: int) -> str | None:
    ours, theirs = trace.committed(request.request_id), again.committed(number)
    if ours == theirs:
        if not request.is_deterministic or trace.logprobs(request.request_id) == again.logprobs(number):
            return None
        return f"request {request.request_id}: the log-probabilities of its committed tokens differ"
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    position = request.num_prompt_tokens + at
    said = f"the run committed {ours[at : at + 1]}, the oracle {theirs[at : at + 1]}"
    return f"request {request.request_id} position {position}: {said}"


def _first_state_difference(trace: Trace, again: Trace, request: Request, number: int) -> tuple[str | None, int]:
    compared = 0
    rows = trace.rows(request.request_id, "committed").sort_values("position")
    rows = rows[rows.state_index >= 0]
    theirs = again.rows(number, "committed").set_index("position").loc[rows.position.to_numpy()].reset_index()
    for layer in trace.store.layers:
        for site in (*trace.store.sites, *trace.store.heads):
            a, b = (run.kept(site, layer, which) for run, which in ((trace, rows), (again, theirs)))
            for i, position in enumerate(rows.position):
                if not bitwise(a[i], b[i]):
                    return (
                        f"request {request.request_id} position {position}: site {site} of layer {layer} differs",
                        compared,
                    )
                compared += 1
    return None, compared


def _first_thought_difference(trace: Trace, again: Trace, request: Request, number: int) -> str | None:
    if trace.thought_table is None:
        return None
    ours, theirs = trace.thoughts_said(request.request_id), again.thoughts_said(number)
    if ours == theirs:
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return (
        f"request {request.request_id}: thought {at} is {ours[at : at + 1]} here, {theirs[at : at + 1]} by the oracle"
    )


def _first_reading_difference(trace: Trace, again: Trace, request: Request, number: int) -> tuple[str | None, int]:
    """Z by position and layer: first choices, log-probabilities, entropies, ranks."""
    assert trace.hypothesis_table is not None and again.hypothesis_table is not None
    ours = trace.hypothesis_table[trace.hypothesis_table.request_id == request.request_id]
    theirs = again.hypothesis_table[again.hypothesis_table.request_id == number]
    where = first_reading_difference(ours, theirs)
    if where is None:
        return None, int((ours.status == "committed").sum())
    position, layer = where
    return f"request {request.request_id} position {position}: the reading of layer {layer} differs", 0
