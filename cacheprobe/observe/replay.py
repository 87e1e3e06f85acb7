"""Comparing a run with the oracle, bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from cacheprobe.config import CaptureConfig, EngineConfig
from cacheprobe.engine.fingerprint import require_same, schedule_fingerprint
from cacheprobe.models.base import CachedLM
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
    num_skipped: int
    """Requests that were never verified: nothing is promised about them."""
    first_difference: str | None

    @property
    def is_equal(self) -> bool:
        return self.first_difference is None


def replay(trace: Trace, model: CachedLM, oracle: Callable[..., Trace], progress: bool) -> Replay:
    """Run the oracle on the trace's verified requests; compare tokens, and deterministic requests' states.

    Raises: FingerprintMismatch, ValueError where no request was verified.
    """
    config = EngineConfig(**trace.meta["config"])
    require_same(trace.fingerprint, schedule_fingerprint(model, config, LENS_TILE), "the run and this machine")
    has_drafter = trace.meta["drafter"] is not None or trace.meta["kind"] == "reference"
    asked = [r for r in trace.requests if has_drafter or r.is_deterministic]
    if not asked:
        raise ValueError("no request of this run was verified: it had no drafter and none was deterministic")
    # with no states to compare, one layer is kept, since a run keeps something
    sites, layers = "".join(trace.store.sites) or "S", trace.store.layers or (0,)
    again = oracle(
        model,
        [replace(r, prompt=r.prompt_token_ids, example=None) for r in asked],
        window=config.window,
        group=config.group,
        capacity=config.capacity,
        prefill_chunk=config.prefill_chunk,
        capture=CaptureConfig(sites=sites, layers=layers, dtype=trace.meta["capture"]["dtype"]),
        progress=progress,
    )
    num_tokens = num_states = 0
    difference = None
    for number, request in enumerate(asked):
        difference = difference or _first_token_difference(trace, again, request, number)
        num_tokens += len(trace.tokens[request.request_id])
        if request.is_deterministic and difference is None:
            difference, compared = _first_state_difference(trace, again, request, number)
            num_states += compared
    return Replay(len(asked), num_tokens, num_states, len(trace.requests) - len(asked), difference)


def _first_token_difference(trace: Trace, again: Trace, request: Request, number: int) -> str | None:
    ours, theirs = trace.committed(request.request_id), again.committed(number)
    if ours == theirs:
        return None
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
        for site in trace.store.sites:
            a, b = trace.vectors(site, layer, rows), again.vectors(site, layer, theirs)
            for i, position in enumerate(rows.position):
                if not bitwise(a[i], b[i]):
                    return (
                        f"request {request.request_id} position {position}: site {site} of layer {layer} differs",
                        compared,
                    )
                compared += 1
    return None, compared
