"""Defines the functions that a notebook needs: run, estimate, stream, reference, verify, kv_snapshot and
load_trace; `imports.py` has import_generate and import_vllm."""

import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from cacheprobe.analysis.reading import readable
from cacheprobe.analysis.replay import Replay, replay
from cacheprobe.analysis.summary import behaviour_line
from cacheprobe.core.config import CaptureConfig, EngineOptions, TokenRow
from cacheprobe.core.hook_names import ALL_SITES
from cacheprobe.core.records import Observer, SamplingParams
from cacheprobe.core.terminal import announcing
from cacheprobe.core.values import JsonDict, folder
from cacheprobe.edits.interventions.base import Intervention
from cacheprobe.edits.interventions.checks import interventions_of
from cacheprobe.engine.continuation import REFERENCE, prepare_again, unfinished_run
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.drafters.replayed import Replayed
from cacheprobe.engine.estimates.run import Estimate, estimate_plan
from cacheprobe.engine.execution import Execution, prepare
from cacheprobe.engine.loop import prefill_snapshot
from cacheprobe.engine.plan import RunPlan, make_plan
from cacheprobe.kvcache.surgery import KVSnapshot
from cacheprobe.lenses.base import Lens
from cacheprobe.lenses.dictionaries import Dictionary
from cacheprobe.models.base import CachedLM
from cacheprobe.models.settings import hold_model
from cacheprobe.models.weights import hashing_once
from cacheprobe.trace.places import clean_finished
from cacheprobe.trace.recording.observers import Interrupted, ProgressBar, cancelling
from cacheprobe.trace.recording.stored_states import require_model
from cacheprobe.trace.recording.stream import Stream
from cacheprobe.trace.recording.to_disk import ImportOutput, OutputOptions, to_disk
from cacheprobe.trace.tables.edits import edit_warnings
from cacheprobe.trace.trace import Trace
from cacheprobe.trace.trace import load_trace as open_trace

__all__ = [
    "estimate", "kv_snapshot", "load_trace", "reference", "resume", "run", "stream", "verify",
]  # fmt: skip


_TRYING = "trying pass shapes: which give every token the same bits, once for this model, processor and versions"


class RunOptions(EngineOptions, OutputOptions, total=False):
    """Types the optional keyword arguments of `run` and `stream`."""

    dictionary: "Dictionary | None"


class RunSettings(EngineOptions, total=False):
    """Types the keyword arguments that `stream` and `reference` share with `run`; `run` says what each does."""

    drafter: Drafter | None
    deterministic: "bool | float | Iterable[Any]"
    capture: "str | CaptureConfig | None"
    dictionary: "Dictionary | None"
    lens: "Lens | str | None"
    sampling: SamplingParams | None
    max_new_tokens: int | None
    seed: int
    interventions: "Intervention | Iterable[object]"


class StreamSettings(RunSettings, OutputOptions, total=False):
    """Types the keyword arguments of `stream`."""


def run(
    model: CachedLM,
    prompts: Any,
    *,
    drafter: Drafter | None = None,
    deterministic: "bool | float | Iterable[Any]" = False,
    capture: "str | CaptureConfig | None" = ALL_SITES,
    lens: "Lens | str | None" = None,
    sampling: SamplingParams | None = None,
    max_new_tokens: int | None = None,
    seed: int = 0,
    interventions: "Intervention | Iterable[object]" = (),
    progress: bool = True,
    **options: Unpack[RunOptions],
) -> Trace:
    """Generates text with a model and returns a Trace: tokens, drafts (rejected ones included) and, by default, states.

    prompts: one prompt or a sequence of them; each is a string, a list of token ids, a task example or a Request.
    drafter: drafts tokens for every request; every request is then verified. Without a drafter only the deterministic
        requests are verified; if the window is above 1, ordinary decode passes draft for them.
    deterministic: which requests are: all (True), none, a fraction (evenly spaced), or a list of indices or flags.
    capture: sites to keep, of S, T, C and Z; or a CaptureConfig, with filters by layer, position and phase and with
        attention heads; or None for tokens and events only.
    lens: the lens that reads Z; the logit lens by default. "later": the run records S, and the logit lens reads Z from
        it when a table or view first needs it, with the same bits; see `cacheprobe.trace.recording.stored_states`.
    sampling, max_new_tokens, seed: for requests without settings of their own; seeds derive from (seed, index).
    interventions: changes of states by request, layer, site and absolute position; see `cp.interventions`.
        They act during this run, on the bridge and the fast path, and do not change the other requests' bits.
    progress: show a bar on a terminal; if the prompts come from a task, print the model's accuracy.
    options: window, group, capacity, prefill_chunk, prefill_group, pad_prefill, max_batch, max_kv_tokens,
        draft_length, acceptance, determinism, layers and path; `EngineConfig` and `EngineOptions` of
        cacheprobe/core/config.py say what each does. The defaults suit the model and the processor.
        dictionary, from `cp.lenses.Dictionary.load`, records the largest features of each row, as the field of
        CaptureConfig does; `trace.features()` gives them.
        out, overwrite and memory_budget record the run to disk while it goes on, so that it can be longer than memory,
        looked at and continued (`resume`); see `cacheprobe.trace.recording.to_disk.OutputOptions`.
    A request whose passes fail ends with an error and a warning; the others go on.
    In the main thread, Ctrl-C ends every request at the next round and raises `cp.Interrupted`, a KeyboardInterrupt
    whose `trace` holds the tokens and states so far; a finished run that `out` holds then stays, and the stopped one is
    in the directory out-stopped. A second Ctrl-C raises KeyboardInterrupt at once, without a trace.
    Raises, before the first pass: ValueError for settings that do not fit, TypeError for an unknown one. Later:
    EngineError if all requests failed.
    Source: decode-verify-rollback of LLM-42, arXiv 2601.17768.  Twin: `reference`.
    """
    to = _output_of(options)
    given = dict(
        drafter=drafter, capture=capture, deterministic=deterministic, lens=lens, sampling=sampling,
        max_new_tokens=max_new_tokens, seed=seed, interventions=interventions, **options,
    )  # fmt: skip
    with ExitStack() as stack:
        with hashing_once():
            with announcing(_TRYING, progress):
                prepared = prepare(make_plan(model, prompts, given, is_on_disk=to.get("out") is not None))
            plan, meta = prepared.plan, _meta_of(drafter, to)
            bar = stack.enter_context(_progress_bar(plan, progress))
            stop = stack.enter_context(cancelling(prepared.states, progress))
            disk = stack.enter_context(to_disk(**to, stop=stop))
            execution = Execution(prepared, [bar], disk, **meta)
        trace = execution.run()
    if stop.is_set():
        raise Interrupted(trace, disk.finished_in if disk else None)
    return _checked(plan, trace, progress)


def stream(model: CachedLM, prompts: Any, **settings: Unpack[StreamSettings]) -> Stream:
    """Generates text and returns a Stream: an iterator of `Piece`s, each with newly committed tokens of a request.

    Takes the settings of `run`, apart from `progress`; captures no states unless `capture=` is given. A piece's text
    ends with a whole character, unless the request ended inside one.
    `stream.cancel(request_id)` ends a request early; `stream.trace()` returns the run's Trace, after the last piece.
    """
    to = _output_of(settings)
    given: dict[str, Any] = {"capture": None, **settings}
    run = prepare(make_plan(model, prompts, given, is_on_disk=to.get("out") is not None))
    meta = _meta_of(run.plan.drafter, to)

    def begin(observer: Observer) -> Generator[int, None, Trace]:
        """Runs the requests, from the first `next` on; returns the Trace."""
        with to_disk(**to) as disk:
            trace = yield from Execution(run, [observer], disk, **meta).steps()
            _warn_of_edits(trace)
            return trace

    return Stream(run.states, run.plan.model.decode, begin)


def reference(model: CachedLM, prompts: Any, *, progress: bool = True, **settings: Unpack[StreamSettings]) -> Trace:
    """Generates with the slow reference and returns its Trace: each request runs alone, and each token after its first
    takes a pass of its own.

    `max_batch`, `max_kv_tokens`, `draft_length` and `acceptance` do not change the results; they are accepted so that
    `run` and `reference` take the same settings. A drafter changes only the default window, and with
    determinism="invariant" whether passes are called verify or decode passes. Tokens, states and readings
    of a deterministic request of `run` equal those of `reference`, bit for bit, if both runs have the same schedule
    fingerprint (D2 in docs/determinism.md).
    With out=, it is recorded to disk as by `run`. After a kill, `load_trace` reads what was written; `resume` refuses.
    """
    to = _output_of(settings)
    unused = ("max_batch", "max_kv_tokens", "draft_length")
    given = {name: value for name, value in settings.items() if name not in unused}
    plan = make_plan(model, prompts, given, max_in_flight=1, is_on_disk=to.get("out") is not None)
    run = prepare(plan, is_reference=True)
    meta: JsonDict = {**_meta_of(None, to), "kind": REFERENCE}
    with to_disk(**to) as disk, _progress_bar(plan, progress) as bar:
        trace = Execution(run, [bar], disk, **meta).run()
    return _checked(plan, trace, progress)


def resume(
    directory: "str | Path",
    model: CachedLM,
    *,
    drafter: Drafter | None = None,
    lens: Lens | None = None,
    interventions: "Intervention | Iterable[object]" = (),
    keep: "Callable[[TokenRow], bool] | None" = None,
    dictionary: Dictionary | None = None,
    memory_budget: "int | str | None" = None,
    progress: bool = True,
) -> Trace:
    """Continues a run that was recorded with `run(..., out=directory)` and was not finished, and returns its Trace.

    Begins after the last part that is whole. Each request goes on with its committed tokens; their keys and values are
    computed again. Tokens and states of deterministic requests have the bits of a run that was not interrupted.
    model, drafter, lens, interventions, keep and dictionary (of CaptureConfig): those of the run; the lens only if it
    is not the logit lens, and no drafter for a `cp.replay` without one. The other settings are stored with the run.
    Raises: TraceError without an unfinished run in the directory, and if another process records it; ValueError if
    drafter, lens, interventions, dictionary or the name of `keep` are not those of the run, and for requests that began
    from a KVSnapshot; FingerprintMismatch if this machine or model has another schedule fingerprint.
    """
    directory = folder("directory", directory)
    if clean_finished(directory):
        return load_trace(directory, model)
    journal = unfinished_run(directory)
    replay = journal.header["meta"].get("replay")
    if drafter is None and replay is not None and replay["is_replayed"]:
        drafter = Replayed.from_record(replay["drafts"])
    run = prepare_again(journal, model, drafter, lens, interventions, keep, dictionary)
    plan, states, stored, step = run.plan, run.states, journal.header["meta"], journal.last_step
    meta = {name: stored[name] for name in ("kind", "drafter", "command", "replay") if name in stored}
    with (
        _progress_bar(plan, progress, sum(state.num_generated for state in states)) as bar,
        cancelling([state for state in states if not state.is_ended], progress) as stop,
        to_disk(directory, memory_budget=memory_budget, journal=journal, stop=stop) as disk,
    ):
        trace = Execution(run, [bar], disk, step, **meta).run()
    if stop.is_set():
        raise Interrupted(trace, disk.finished_in if disk else None)
    return _checked(plan, trace, progress)


def estimate(model: CachedLM, prompts: Any, **settings: Unpack[RunSettings]) -> Estimate:
    """Returns the Estimate of `run` with the same arguments: tokens, passes, memory, disk space and seconds.

    Counts the run's passes exactly, runs a few of them on this machine, and multiplies. Every request is assumed to
    generate all its new tokens. With drafts, numbers are a range: from every draft token accepted to none.
    Nothing is recorded, and interventions and a user's own drafter are not called.
    Raises: as `run` before its first pass; ValueError, too, for a Thinking States model, and for a run that needs more
    memory than the machine has.
    """
    return estimate_plan(make_plan(model, prompts, settings))


def _output_of(options: Any) -> JsonDict:
    """Removes the fields of OutputOptions from the options of a call, and returns them. Raises: ValueError for an `out`
    that is no path."""
    to = {name: options.pop(name) for name in OutputOptions.__annotations__ if name in options}
    return to if to.get("out") is None else {**to, "out": folder("out", to["out"])}


def _meta_of(drafter: Drafter | None, to: JsonDict) -> JsonDict:
    """Returns the metadata of a run; removes "command" and "replay", which belong to it, from output options."""
    origin = {name: to.pop(name) for name in ("command", "replay") if name in to}
    return {"kind": "run", "drafter": repr(drafter) if drafter else None, **origin}


def kv_snapshot(
    model: CachedLM,
    prompt: Any,
    *,
    capacity: int | None = None,
    prefill_chunk: int | None = None,
    pad_prefill: bool | None = None,
    path: str = "auto",
    interventions: "Intervention | Iterable[object]" = (),
) -> KVSnapshot:
    """Returns a KVSnapshot: keys and values of a prompt without its last token, computed as for deterministic requests.

    Its methods `edited`, `spliced` and `masked` return changed copies. Continue one with
    `cp.run(model, cp.Request(prompt, cached=snapshot))`. For the keys and values of a generation, run
    `cp.Request(prompt, keep_kv=True)`, then call `cp.analysis.kv_snapshot(trace, request_id)`.
    Raises: ValueError for a prompt of one token, and for a model whose cache holds more than keys, values and
    recurrent states.
    """
    given = dict(
        capacity=capacity, prefill_chunk=prefill_chunk, pad_prefill=pad_prefill, deterministic=True, capture=None,
        max_new_tokens=1, path=path, interventions=interventions,
    )  # fmt: skip
    run = prepare(make_plan(model, [prompt], given, max_in_flight=1))
    plan, (state,) = run.plan, run.states
    if state.request.num_prompt_tokens < 2:
        raise ValueError("a prompt of one token leaves no row: its last token is read when generation goes on")
    last = state.request.num_prompt_tokens - 1
    for one in plan.interventions:
        if last in (one.positions or ()):
            raise ValueError(
                f"{one}: position {last} is that of the prompt's last token, which a KVSnapshot leaves out"
            )
    with hold_model(plan.model), run.hooks():
        return prefill_snapshot(plan.model, state, plan.config, Observer(), run.editor)


def verify(
    trace: Trace,
    model: CachedLM | None = None,
    *,
    interventions: "Intervention | Iterable[object] | None" = None,
    progress: bool = True,
    **to: Unpack[ImportOutput],
) -> Replay:
    """Runs the verified requests of a trace again with `reference`, and returns a Replay: the result of comparing both.

    Compares tokens; for deterministic requests also states and readings, bit for bit.
    model, interventions: those of the run; needed if the trace was loaded from disk (interventions: if it had any).
    to: out, overwrite and memory_budget record the run of the reference to disk, so that it may be longer than memory.
    Raises: FingerprintMismatch if this machine or model has another schedule fingerprint; ValueError without a model,
    without a request that can be compared, and for a run that cannot be made again, such as an import.
    """
    model = model or trace.model
    if model is None:
        raise ValueError("this trace was loaded without its model; use cp.verify(trace, model)")
    given = trace.interventions
    if interventions is not None:
        given = interventions_of(interventions, model, len(trace.requests))
    if trace.head is not None:  # the reference runs no head, whose states change drafts alone
        given = tuple(one for one in given if one.layer < trace.head.meta["head"]["first_layer"])
    return replay(trace, model, partial(reference, **to), progress, given)


def load_trace(directory: "str | Path", model: CachedLM | None = None) -> Trace:
    """Returns the Trace saved in a directory. Reads its tables now, and its states when they are first used.

    model: the run's model, for lenses and analyses that need its weights.
    Raises: ValueError for a model with other weights than the run's; TraceError for a directory without a readable
    manifest.json, for an unknown version of the trace format, and for a file that is missing or has another size than
    the manifest says.
    """
    if model is not None and not hasattr(model, "new_cache"):
        raise ValueError(f"model must be one that cp.load_model(...) made, got a {type(model).__name__}")
    trace = open_trace(folder("directory", directory), model)
    if model is not None and trace.fingerprint["weights_sha256"]:  # "" for an import without a model
        require_model(trace, model)
    return readable(trace)


def _progress_bar(plan: RunPlan, is_shown: bool, done: int = 0) -> ProgressBar:
    """Returns a ProgressBar whose total is the maximum number of new tokens of all requests. done: tokens that the run
    has committed before."""
    total = sum(request.sampling.max_new_tokens or 0 for request in plan.requests if request.sampling)
    return ProgressBar(total, enabled=is_shown, done=done)


def _checked(plan: RunPlan, trace: Trace, progress: bool) -> Trace:
    """Returns the trace unchanged. Warns of failed requests, data that the trace lacks, and interventions that missed
    committed rows; if `progress`, prints path and accuracy."""
    if progress and plan.capture.heads:
        print(f"path: {plan.path_reason}")
    for request_id, error in trace.meta["errors"].items():
        warnings.warn(f"request {request_id} ended with an error: {error}", RuntimeWarning, stacklevel=3)
    for reason in dict.fromkeys(trace.missing.values()):
        warnings.warn(reason, RuntimeWarning, stacklevel=3)
    _warn_of_edits(trace)
    if progress and trace.meta["behaviour"]:
        print(behaviour_line(trace.meta["behaviour"]))
    return trace


def _warn_of_edits(trace: Trace) -> None:
    """Warns of interventions that changed no committed row, or none at some of their positions."""
    for reason in edit_warnings(trace):
        warnings.warn(reason, RuntimeWarning, stacklevel=4)
