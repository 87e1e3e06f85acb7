"""Defines the functions that a notebook needs: load_model, run, stream, reference, verify, load_trace, import_*."""

import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack

from cacheprobe.analysis.reading import readable
from cacheprobe.analysis.replay import Replay, replay
from cacheprobe.analysis.summary import behaviour_line
from cacheprobe.capture.interrupts import Interrupted, cancelling
from cacheprobe.capture.observers import ProgressBar
from cacheprobe.capture.stream import Stream
from cacheprobe.core.config import CaptureConfig, EngineConfig, EngineOptions
from cacheprobe.core.records import Observer, SamplingParams
from cacheprobe.core.renamed import require_known_options
from cacheprobe.drafters.base import Drafter
from cacheprobe.engine.reference import read_rows, run_reference
from cacheprobe.engine.shapes import choose_shapes
from cacheprobe.interventions.base import Intervention
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.surgery import KVSnapshot
from cacheprobe.lenses.base import Lens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.loaders import load_model
from cacheprobe.models.turns import turn
from cacheprobe.plan import RunPlan, as_interventions
from cacheprobe.trace.importers.generate import trace_of_generate
from cacheprobe.trace.importers.vllm import trace_of_vllm
from cacheprobe.trace.trace import Trace
from cacheprobe.trace.trace import load_trace as open_trace

__all__ = [
    "import_generate", "import_vllm", "kv_snapshot", "load_model", "load_trace", "reference", "run", "stream", "verify",
]  # fmt: skip


class RunSettings(EngineOptions, total=False):
    """Names the settings that `reference` and `stream` share with `run`: what a user decides about a run."""

    drafter: Drafter | None
    deterministic: "bool | float | Iterable[Any]"
    capture: "str | CaptureConfig | None"
    lens: Lens | None
    sampling: SamplingParams | None
    max_new_tokens: int | None
    seed: int
    interventions: "Intervention | Iterable[Any]"


def run(
    model: CachedLM,
    prompts: Any,
    *,
    drafter: Drafter | None = None,
    deterministic: "bool | float | Iterable[Any]" = False,
    capture: "str | CaptureConfig | None" = "STCZ",
    lens: Lens | None = None,
    sampling: SamplingParams | None = None,
    max_new_tokens: int | None = None,
    seed: int = 0,
    interventions: "Intervention | Iterable[Any]" = (),
    progress: bool = True,
    **options: Unpack[EngineOptions],
) -> Trace:
    """Generates text and records the states of every layer for every token, rolled-back drafts included.

    prompts: strings, lists of token ids, task examples or Requests; one of them, or a sequence.
    drafter: proposes tokens for every request, all of which are then verified. Without one, the deterministic requests
        are drafted by the fast path and verified; the others are not.
    deterministic: all, none, a fraction (evenly spaced indices), or a list of indices or flags.
    capture: sites to keep, of S, T, C and Z; a CaptureConfig with filters by layer, position and phase, and with what
        to keep of attention heads; or None for tokens and events alone.
    lens: what reads Z, the logit lens by default.
    sampling, max_new_tokens, seed: for requests that do not say themselves; seeds derive from (seed, index).
    interventions: changes of states by request, layer, site and absolute position; see `cacheprobe.interventions`.
        They last as long as the run, act on either path, and leave the other requests' bits alone.
    progress: show a bar on a terminal, and print how the model did if the prompts come from a task.
    options: window, group, capacity, prefill_chunk, prefill_group, pad_prefill, max_batch, max_kv_tokens,
        draft_length, acceptance, layers and path; `cacheprobe.core.config.EngineOptions` says what each does. The
        defaults suit the model and the processor.
    A request whose pass fails ends with an error, with a warning, and the others go on.
    Ctrl-C ends every request after the pass at hand and raises `cp.Interrupted`, a KeyboardInterrupt. Its `trace` holds
    what was computed: finished requests complete, the others as they stand. A second Ctrl-C ends at once, without it.
    Raises: ValueError for settings that cannot be met, before anything is computed; EngineError if all requests failed.
    Source: decode-verify-rollback of LLM-42, arXiv 2601.17768.  Twin: `reference`.
    """
    given = dict(
        capture=capture, deterministic=deterministic, lens=lens, sampling=sampling, max_new_tokens=max_new_tokens,
        seed=seed, interventions=interventions, **options,
    )  # fmt: skip
    plan = _plan(model, prompts, drafter, given)
    states = plan.states(drafter)
    meta = {"kind": "run", "drafter": repr(drafter) if drafter else None}
    with _progress_bar(plan, progress) as bar, cancelling(states, progress) as stop:
        trace = plan.execute(plan.start(drafter), states, bar, **meta)
    if stop.was_pressed:
        raise Interrupted(trace)
    return _checked(plan, trace, progress)


def stream(model: CachedLM, prompts: Any, **settings: Unpack[RunSettings]) -> Stream:
    """Generates text and returns an iterator of `Piece`s, which yields every token as soon as it is committed.

    Takes the settings of `run`, apart from `progress`; nothing is captured unless `capture=` says so. A piece's text
    is whole if a character spans tokens, and what was handed over is always a prefix of the final text.
    `stream.cancel(request_id)` ends a request where it stands; `stream.trace()` is the run's trace, after the last
    piece.
    """
    drafter = settings.pop("drafter", None)
    asked: dict[str, Any] = {"capture": None, **settings}
    plan = _plan(model, prompts, drafter, asked)
    states = plan.states(drafter)
    start, meta = plan.start(drafter), {"kind": "run", "drafter": repr(drafter) if drafter else None}
    return Stream(states, plan.model.decode, lambda observer: plan.recorded(start, states, observer, **meta))


def reference(model: CachedLM, prompts: Any, *, progress: bool = True, **settings: Unpack[RunSettings]) -> Trace:
    """Generates with the slow reference of `run`: each request alone, one verify pass per token.

    `max_batch`, `max_kv_tokens`, `draft_length` and `acceptance` are accepted and ignored, so that both calls take the
    same settings. The drafter only sets the default window. Tokens, states and readings of a deterministic request of
    `run` equal the oracle's bit for bit (D2).
    """
    asked: dict[str, Any] = {**settings}
    drafter = asked.pop("drafter", None)
    for unused in ("max_batch", "max_kv_tokens", "draft_length"):
        asked.pop(unused, None)
    plan = _plan(model, prompts, drafter, asked, max_in_flight=1)
    states = plan.states(drafter, is_all_verified=True)

    def start(states: Sequence[SequenceState], observer: Observer) -> Generator[int, None, None]:
        """Begins the reference loop over these states."""
        return run_reference(plan.model, states, plan.config, observer, plan.editor, plan.watch)

    with _progress_bar(plan, progress) as bar:
        trace = plan.execute(start, states, bar, kind="reference", drafter=None)
    return _checked(plan, trace, progress)


def _plan(
    model: CachedLM, prompts: Any, drafter: Drafter | None, given: Mapping[str, Any], max_in_flight: int | None = None
) -> RunPlan:
    """Splits the settings into the engine's shapes, which are completed for the model, and the plan's arguments."""
    require_known_options(given, RunSettings.__annotations__)
    settings = dict(given)
    shapes = {field.name: settings.pop(field.name) for field in fields(EngineConfig) if field.name in settings}
    config = choose_shapes(model, drafter is not None, shapes)
    return RunPlan(model, prompts, *config, **settings, max_in_flight=max_in_flight)


def kv_snapshot(
    model: CachedLM,
    prompt: Any,
    *,
    capacity: int = 512,
    prefill_chunk: int | None = None,
    pad_prefill: bool | None = None,
    path: str = "auto",
    interventions: "Intervention | Iterable[Any]" = (),
) -> KVSnapshot:
    """Returns the keys and values of a prompt without its last token, as a deterministic request's prefill writes them.

    Change them with `edited`, `spliced` and `masked`, and go on: `cp.run(model, cp.Request(prompt, cached=rows))`.
    Those of a generation: run `cp.Request(prompt, keep_kv=True)`, then `cp.analysis.kv_snapshot(trace, request_id)`.
    Raises: ValueError for a prompt of one token, and for a model that remembers more than keys and values.
    """
    shapes = dict(capacity=capacity, prefill_chunk=prefill_chunk, pad_prefill=pad_prefill)
    chosen = choose_shapes(model, False, shapes)
    plan = RunPlan(
        model, [prompt], *chosen, True, None, max_new_tokens=1, path=path, interventions=interventions, max_in_flight=1
    )
    (state,) = plan.states(None)
    if state.request.num_prompt_tokens < 2:
        raise ValueError("a prompt of one token leaves no row: its last token is read when generation goes on")
    with turn(plan.model), plan.hooks():
        return read_rows(plan.model, state, plan.config, Observer(), plan.editor)


def verify(
    trace: Trace,
    model: CachedLM | None = None,
    *,
    interventions: "Intervention | Iterable[Any] | None" = None,
    progress: bool = True,
) -> Replay:
    """Runs a trace's verified requests again by `reference` and compares tokens, and bitwise the states of
    deterministic ones.

    model: needed for a trace that was loaded from disk.
    interventions: those of the run, for a trace that was loaded from disk; else the trace has them.
    Raises: FingerprintMismatch where this machine or model has another schedule; ValueError where nothing was verified.
    """
    model = model or trace.model
    if model is None:
        raise ValueError("this trace was loaded without its model; use cp.verify(trace, model)")
    given = trace.interventions if interventions is None else as_interventions(interventions)
    return replay(trace, model, reference, progress, given)


def load_trace(directory: "str | Path", model: CachedLM | None = None) -> Trace:
    """Opens a saved trace. Tables are read now, states when first asked for.

    model: that of the run, for lenses and analyses that need its weights.
    Raises: TraceError for a directory without a manifest, of another version, or with a file missing or cut short.
    """
    return readable(open_trace(directory, model))


def import_generate(
    outputs: Any,
    *,
    attention_mask: Any = None,
    stop_token_ids: "Iterable[int] | None" = None,
    model: CachedLM | None = None,
    tokenizer: Any = None,
    name: str | None = None,
) -> Trace:
    """Returns a trace of Hugging Face's `generate` output with hidden states: one request for each sequence.

    outputs: of generate(..., return_dict_in_generate=True, output_hidden_states=True), and output_logits=True for
        log-probabilities; or a safetensors file of `sequences`, `hidden_states.PASS.BLOCK`, `logits.PASS` and
        `attention_mask`.
    attention_mask: [b, prompt], as generate was given it; needed where there is more than one sequence.
    stop_token_ids: what ended a sequence, () where nothing did; by default the model's.
    model: what generated, loaded here: states of the first prompt are compared with its own, and lenses can be read.
    tokenizer: for texts, where no model is given.  name: of the model, for the record.
    S of every block but the last is there; `trace.missing` says what is not, and asking for it is an error.
    Raises: ImportRefused for beams, drafts, passes without a cache, padding on the right, and states that are not the
    model's.
    """
    return readable(
        trace_of_generate(
            outputs,
            attention_mask=attention_mask,
            stop_token_ids=stop_token_ids,
            model=model,
            tokenizer=tokenizer,
            name=name,
        )
    )


def import_vllm(
    outputs: Any,
    layers: "Iterable[int]",
    *,
    num_prompt_tokens: "int | Iterable[int] | None" = None,
    model: CachedLM | None = None,
    tokenizer: Any = None,
    name: str | None = None,
) -> Trace:
    """Returns a trace of hidden states written by vLLM's ExampleHiddenStatesConnector: one request for each file.

    outputs: what `LLM.generate` returned, whose `kv_transfer_params` name the files; or files, or folders of them.
    layers: the setting eagle_aux_hidden_state_layer_ids; id k is S of layer k - 1 here.
    num_prompt_tokens: for files alone, how many of their tokens are prompt, one number or one for each; by default all.
        The last generated token stands in no file: its row does not exist.
    model, tokenizer, name: as for `import_generate`.
    `trace.missing` says what is not there, and asking for it is an error.
    Raises: ImportRefused for another layout, other layers than the file has, values that are no numbers, and states
    that are not the model's.
    """
    return readable(
        trace_of_vllm(
            outputs,
            layers,
            num_prompt_tokens=num_prompt_tokens,
            model=model,
            tokenizer=tokenizer,
            name=name,
        )
    )


def _progress_bar(plan: RunPlan, is_shown: bool) -> ProgressBar:
    total = sum(request.sampling.max_new_tokens or 0 for request in plan.requests if request.sampling)
    return ProgressBar(total, enabled=is_shown)


def _checked(plan: RunPlan, trace: Trace, progress: bool) -> Trace:
    """Returns the trace, and warns of failed requests, of what could not be recorded and of unused interventions."""
    if progress and plan.capture.heads:
        print(f"path: {plan.path_reason}")
    for request_id, error in trace.meta["errors"].items():
        warnings.warn(f"request {request_id} ended with an error: {error}", RuntimeWarning, stacklevel=3)
    for why in dict.fromkeys(trace.missing.values()):
        warnings.warn(why, RuntimeWarning, stacklevel=3)
    if plan.editor is not None and trace.meta["kind"] == "run":  # the oracle runs no drafts that could be changed
        for one in [one for one in plan.editor.unused() if str(one.request_id) not in trace.meta["errors"]]:
            warnings.warn(f"{one} never acted: no pass computed its positions", RuntimeWarning, stacklevel=3)
    if progress and trace.meta["behaviour"]:
        print(behaviour_line(trace.meta["behaviour"]))
    return trace
