"""The few names that a notebook needs: load_model, run, reference, verify, load_trace."""

from collections.abc import Iterable, Mapping
from typing import Any

from cacheprobe.cache.sequence import SequenceState
from cacheprobe.config import CaptureConfig, EngineConfig, pick_deterministic, resolve_layers
from cacheprobe.drafters.base import Drafter
from cacheprobe.engine.fingerprint import schedule_fingerprint
from cacheprobe.engine.loop import run_loop
from cacheprobe.engine.reference import run_reference
from cacheprobe.lenses.base import Lens
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.loaders import load_model
from cacheprobe.noise import derive_seed
from cacheprobe.observe.assemble import assemble
from cacheprobe.observe.lens_reader import LENS_TILE
from cacheprobe.observe.observers import ProgressBar, Tee
from cacheprobe.observe.recorder import Recorder
from cacheprobe.observe.replay import Replay, replay
from cacheprobe.observe.storage import load_trace
from cacheprobe.observe.summary import behaviour_line
from cacheprobe.observe.trace import Trace
from cacheprobe.records import Observer, Request, SamplingParams

__all__ = ["load_model", "load_trace", "reference", "run", "verify"]

DEFAULT_SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=32)


def run(
    model: CachedLM,
    prompts: Any,
    *,
    drafter: Drafter | None = None,
    window: int = 16,
    group: int = 4,
    deterministic: "bool | float | Iterable[Any]" = False,
    capture: "str | CaptureConfig" = "STCZ",
    layers: "str | int | Iterable[Any]" = "all",
    lens: Lens | None = None,
    sampling: SamplingParams | None = None,
    max_new_tokens: int | None = None,
    seed: int = 0,
    capacity: int = 512,
    prefill_chunk: int = 32,
    max_batch: int = 64,
    progress: bool = True,
) -> Trace:
    """Generate, and record what every layer held for every token, rolled-back drafts included.

    prompts: strings, lists of token ids, task examples or Requests; one of them, or a sequence.
    drafter: proposes tokens for every request, all of which are then verified. Without one, the deterministic requests
        are drafted by the fast path and verified; the others are not.
    window, group: rows of a verify pass for each request (W), and requests in it (G).
    deterministic: all, none, a fraction (evenly spaced indices), or a list of indices or flags.
    capture: sites to keep, of S, T, C and Z; or a CaptureConfig with filters by layer, position and phase.
    layers: layers to keep, "all" or a list.  lens: what reads Z, the logit lens by default.
    sampling, max_new_tokens, seed: for requests that do not say themselves; seeds derive from (seed, index).
    capacity: cache rows of each request, part of the schedule fingerprint; prompt + max_new_tokens + window must fit.
    prefill_chunk: prompt tokens fed at once for verified requests.  max_batch: requests in flight at once.
    progress: show a bar on a terminal, and print how the model did where the prompts come from a task.
    Raises: ValueError for settings that cannot be met, before anything is computed; EngineError on NaN logits.
    Source: decode-verify-rollback of LLM-42, arXiv 2601.17768.  Twin: `reference`.
    """
    config = EngineConfig(window, group, capacity, prefill_chunk, max_batch)
    setup = _Setup(model, prompts, config, deterministic, capture, layers, lens, sampling, max_new_tokens, seed)
    if drafter is not None:
        _check_drafter(drafter)
        drafter.check(model)
    states = [
        setup.state(request, is_verified=drafter is not None or request.is_deterministic) for request in setup.requests
    ]

    def job(observer: Observer) -> None:
        run_loop(model, states, config, observer, drafter)

    return setup.record(job, progress, drafter=repr(drafter) if drafter else None, kind="run")


def reference(
    model: CachedLM,
    prompts: Any,
    *,
    drafter: Drafter | None = None,
    window: int = 16,
    group: int = 4,
    deterministic: "bool | float | Iterable[Any]" = False,
    capture: "str | CaptureConfig" = "STCZ",
    layers: "str | int | Iterable[Any]" = "all",
    lens: Lens | None = None,
    sampling: SamplingParams | None = None,
    max_new_tokens: int | None = None,
    seed: int = 0,
    capacity: int = 512,
    prefill_chunk: int = 32,
    max_batch: int = 64,
    progress: bool = True,
) -> Trace:
    """The slow oracle for `run` with the same arguments: each request alone, one verify pass a token, no drafter.

    `drafter` and `max_batch` are accepted, so that the two calls read the same, and do not matter. Tokens, states and
    readings of a deterministic request of `run` equal the oracle's bit for bit (D2).
    """
    config = EngineConfig(window, group, capacity, prefill_chunk, max_batch)
    setup = _Setup(model, prompts, config, deterministic, capture, layers, lens, sampling, max_new_tokens, seed)
    states = [setup.state(request, is_verified=True) for request in setup.requests]
    return setup.record(
        lambda observer: run_reference(model, states, config, observer), progress, drafter=None, kind="reference"
    )


def verify(trace: Trace, model: CachedLM | None = None, *, progress: bool = True) -> Replay:
    """Replay a run's verified requests against the oracle: tokens, and the states of deterministic requests, bitwise.

    model: needed for a trace that was loaded from disk.
    Raises: FingerprintMismatch where this machine or model has another schedule; ValueError where nothing was verified.
    """
    model = model or trace.model
    if model is None:
        raise ValueError("this trace was loaded without its model; use cp.verify(trace, model)")
    return replay(trace, model, reference, progress)


class _Setup:
    """A run's arguments, resolved and checked; builds what `run` and `reference` have in common."""

    def __init__(
        self,
        model: CachedLM,
        prompts: Any,
        config: EngineConfig,
        deterministic: Any,
        capture: "str | CaptureConfig",
        layers: Any,
        lens: Lens | None,
        sampling: SamplingParams | None,
        max_new_tokens: int | None,
        seed: int,
    ) -> None:
        if not hasattr(model, "new_cache"):
            raise ValueError(f"a run needs a model from cp.load_model(...), got a {type(model).__name__}")
        self.model, self.config = model, config
        self.capture = CaptureConfig(sites=capture) if isinstance(capture, str) else capture
        self.layers = resolve_layers(layers if self.capture.layers is None else self.capture.layers, model.n_layers)
        if isinstance(lens, type) or (lens is not None and not hasattr(lens, "logits")):
            raise ValueError(f"a lens is an object such as cp.lenses.LogitLens(), got {lens!r:.60}")
        self.lens = lens or LogitLens()
        run_sampling = SamplingParams(max_new_tokens=max_new_tokens).over(sampling or SamplingParams())
        self.fallback = run_sampling.over(DEFAULT_SAMPLING).over(SamplingParams(stop_token_ids=model.stop_token_ids))
        listed = _as_list(prompts)
        chosen = pick_deterministic(deterministic, len(listed))
        self.requests = tuple(self._request(item, i, i in chosen, seed) for i, item in enumerate(listed))

    def _request(self, item: Any, index: int, chosen: bool, seed: int) -> Request:
        given = item if isinstance(item, Request) else None
        prompt = given.prompt if given else item
        example = given.example if given else None
        if hasattr(prompt, "prompt_text"):
            example, prompt = prompt, prompt.prompt_text(self.model.tokenizer)
        ids = self._token_ids(prompt, index, is_chat=bool(getattr(example, "chat", False)))
        own = given.sampling if given and given.sampling else SamplingParams()
        sampling = own.over(self.fallback).over(SamplingParams(seed=derive_seed(seed, index)))
        request = Request(
            prompt=prompt if isinstance(prompt, str) else ids,
            sampling=sampling,
            is_deterministic=chosen or bool(given and given.is_deterministic),
            request_id=index,
            prompt_token_ids=ids,
            example=example,
        )
        self._check_fit(request)
        return request

    def _token_ids(self, prompt: Any, index: int, is_chat: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            ids = self.model.encode(prompt, add_special_tokens=not is_chat)
        else:
            try:
                ids = tuple(int(token_id) for token_id in prompt)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"request {index}: a prompt is text, a list of token ids, a task example or a Request; "
                    f"got {prompt!r:.60}"
                ) from error
        if not ids or prompt == "":
            raise ValueError(f"request {index}: the prompt is empty; give at least one token")
        if bad := [t for t in ids if not 0 <= t < self.model.d_vocab]:
            raise ValueError(f"request {index}: token id {bad[0]} is outside the vocabulary of {self.model.d_vocab}")
        return ids

    def _check_fit(self, request: Request) -> None:
        assert request.sampling is not None and request.sampling.max_new_tokens is not None
        prompt, new, n_ctx = request.num_prompt_tokens, request.sampling.max_new_tokens, self.model.n_ctx
        if prompt + new > n_ctx:
            raise ValueError(
                f"request {request.request_id}: prompt of {prompt} + {new} new tokens exceed the model's context of "
                f"{n_ctx}; shorten the prompt or set max_new_tokens={max(n_ctx - prompt, 0)} or less"
            )
        needed = self.config.rows_needed(prompt, new)
        if needed > self.config.capacity:
            raise ValueError(
                f"request {request.request_id}: prompt of {prompt} + {new} new tokens + window of {self.config.window} "
                f"need {needed} cache rows, capacity is {self.config.capacity}; set capacity={needed} or more"
            )

    def state(self, request: Request, is_verified: bool) -> SequenceState:
        sampling = request.sampling
        assert sampling is not None and sampling.stop_token_ids is not None and sampling.temperature is not None
        assert sampling.max_new_tokens is not None and sampling.seed is not None
        return SequenceState(
            request,
            is_verified,
            sampling.stop_token_ids,
            sampling.max_new_tokens,
            sampling.temperature,
            sampling.seed,
            token_ids=list(request.prompt_token_ids),
        )

    def record(self, job: Any, progress: bool, **meta: Any) -> Trace:
        """Run the job under a recorder and put the trace together."""
        model, requests = self.model, self.requests
        prompts = {r.request_id: r.prompt_token_ids for r in requests}
        answers = {r.request_id: ids for r in requests if (ids := _answer_token_ids(r, model))}
        recorder = Recorder(model, self.capture, self.layers, self.lens, prompts, answers)
        total = sum(r.sampling.max_new_tokens for r in requests)
        with ProgressBar(total, enabled=progress) as bar, model.capturing(recorder.wanted(), recorder.on_state):
            job(Tee(recorder, bar))
        fingerprint = schedule_fingerprint(model, self.config, LENS_TILE)
        trace = assemble(recorder, requests, fingerprint, self.config, self.capture, meta)
        if progress and trace.meta["behaviour"]:
            print(behaviour_line(trace.meta["behaviour"]))
        return trace


def _answer_token_ids(request: Request, model: CachedLM) -> tuple[int, ...]:
    """First token ids of a task's answers; none where the tokenizer does not tell them apart at their first token."""
    if request.example is None:
        return ()
    try:
        return request.example.answer_token_ids(model.tokenizer)
    except ValueError:
        return ()


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or many: a list of whole numbers is one prompt of token ids."""
    if isinstance(prompts, str | Request) or hasattr(prompts, "prompt_text"):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise ValueError("prompts are a mapping, as a tokenizer returns; pass its input_ids as lists of token ids")
    if not isinstance(prompts, Iterable):
        raise ValueError(f"a prompt is text, a list of token ids, a task example or a Request; got {prompts!r:.60}")
    listed = list(prompts)
    if not listed:
        raise ValueError("there are no prompts; give at least one")
    return [listed] if all(isinstance(item, int) or getattr(item, "ndim", None) == 0 for item in listed) else listed


def _check_drafter(drafter: Any) -> None:
    if isinstance(drafter, type) or not hasattr(drafter, "extend"):
        raise ValueError(
            f"a drafter is an object such as cp.drafters.EarlyExit(layer=20), got {drafter!r:.60}; names stand only in "
            "command lines"
        )
