"""A run's arguments, resolved and checked before anything is computed, and the run that they describe."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

from cacheprobe.cache.sequence import SequenceState
from cacheprobe.cache.surgery import CacheRows, require_fit, require_plain
from cacheprobe.config import CaptureConfig, EngineConfig, pick_deterministic, resolve_layers
from cacheprobe.drafters.base import Drafter, drafted_layers
from cacheprobe.drafters.fast_path import FastPath
from cacheprobe.engine.consistency import Hooked, serving_config
from cacheprobe.engine.fingerprint import Fingerprint, schedule_fingerprint
from cacheprobe.engine.loop import rounds
from cacheprobe.engine.run_guard import RunGuard, require_ready
from cacheprobe.engine.watch import Watch
from cacheprobe.interventions.base import Intervention
from cacheprobe.interventions.checks import Drafting
from cacheprobe.interventions.editor import Editor
from cacheprobe.lenses.base import Lens, require_readable
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.heads import require_heads
from cacheprobe.models.paths import choose_path
from cacheprobe.models.turns import turn
from cacheprobe.noise import derive_seed
from cacheprobe.observe.assemble import assemble
from cacheprobe.observe.lens_reader import LENS_TILE
from cacheprobe.observe.observers import Tee
from cacheprobe.observe.recorder import Recorder
from cacheprobe.observe.trace import Trace
from cacheprobe.records import Observer, Request, SamplingParams

DEFAULT_SAMPLING = SamplingParams(
    temperature=0.0, max_new_tokens=32, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, stop=(), n=1
)

Start = Callable[[Sequence[SequenceState], Observer], Iterator[int]]
"""Begins a run over these states: an iterator of the steps that its rounds end with."""


class Setup:
    """What `run`, `stream` and `reference` have in common."""

    def __init__(
        self,
        model: CachedLM,
        prompts: Any,
        config: EngineConfig,
        is_group_given: bool = True,
        deterministic: Any = False,
        capture: "str | CaptureConfig | None" = "STCZ",
        layers: Any = "all",
        lens: Lens | None = None,
        sampling: SamplingParams | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        path: str = "auto",
        interventions: "Intervention | Iterable[Any]" = (),
    ) -> None:
        """is_group_given: False where a group is chosen that gives every row the same bits."""
        if not hasattr(model, "new_cache"):
            raise ValueError(f"a run needs a model from cp.load_model(...), got a {type(model).__name__}")
        require_ready(model)
        self.capture = capture if isinstance(capture, CaptureConfig) else CaptureConfig(sites=capture)
        self.model, self.path_reason = choose_path(model, path, self.capture.heads)
        self.model.check_settings(config.window)
        self.config, self.is_group_given = config, is_group_given
        self.layers = resolve_layers(layers if self.capture.layers is None else self.capture.layers, model.n_layers)
        if self.capture.heads:
            require_heads(self.model, self.capture.heads, self.layers)
        self.lens = LogitLens() if lens is None else lens
        require_readable(self.lens, self.model, "S", self.layers)
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling must be a cp.SamplingParams, got a {type(sampling).__name__}")
        run_sampling = SamplingParams(max_new_tokens=max_new_tokens).over(sampling or SamplingParams())
        self.fallback = run_sampling.over(DEFAULT_SAMPLING).over(SamplingParams(stop_token_ids=model.stop_token_ids))
        self.interventions = as_interventions(interventions)
        self.editor: Editor | None = None
        self.watch = Watch()
        listed = _as_list(prompts)
        chosen = pick_deterministic(deterministic, len(listed))
        self.requests: tuple[Request, ...] = ()
        for i, item in enumerate(listed):
            self.requests += self._samples(self._request(item, i, i in chosen), seed)
        self._check_positions()

    # -- requests

    def _samples(self, request: Request, run_seed: int) -> tuple[Request, ...]:
        """The request as often as it asks for samples, each with an id and a seed of its own."""
        assert request.sampling is not None and request.sampling.n is not None
        first, n = len(self.requests), request.sampling.n
        made = []
        for i in range(n):
            own = request.sampling.seed
            if own is None or (n > 1 and i > 0):
                own = derive_seed(run_seed if own is None else own, first + i)
            sampling = replace(request.sampling, seed=own, n=1)
            sample_of = first if n > 1 else request.sample_of
            made.append(replace(request, request_id=first + i, sampling=sampling, sample_of=sample_of))
        return tuple(made)

    def _request(self, item: Any, index: int, chosen: bool) -> Request:
        given = item if isinstance(item, Request) else None
        prompt: Any = given.prompt if given else item
        example = given.example if given else None
        if hasattr(prompt, "prompt_text"):
            example, prompt = prompt, prompt.prompt_text(self.model.tokenizer)
        ids = self._token_ids(prompt, index, is_chat=bool(getattr(example, "chat", False)))
        own = given.sampling if given and given.sampling else SamplingParams()
        if not isinstance(own, SamplingParams):
            raise ValueError(f"request {index}: sampling must be a cp.SamplingParams, got a {type(own).__name__}")
        request = Request(
            prompt=prompt if isinstance(prompt, str) else ids,
            sampling=own.over(self.fallback),
            is_deterministic=chosen or bool(given and given.is_deterministic),
            request_id=index,
            prompt_token_ids=ids,
            example=example,
            arrival_step=given.arrival_step if given else 0,
            sample_of=given.sample_of if given else None,
            cached=given.cached if given else None,
            own_fingerprint=bool(given and given.own_fingerprint),
            keep_rows=bool(given and given.keep_rows),
        )
        self._check_cached(request)
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
        needed = self.config.rows_needed(prompt, new, request.num_cached)
        if needed > self.config.capacity:
            raise ValueError(
                f"request {request.request_id}: prompt of {prompt} + {new} new tokens + window of {self.config.window} "
                f"need {needed} cache rows, capacity is {self.config.capacity}; set capacity={needed} or more"
            )
        if self.config.kv_rows is not None and prompt + new + self.config.window > self.config.kv_rows:
            raise ValueError(
                f"request {request.request_id}: prompt of {prompt} + {new} new tokens + window of {self.config.window} "
                f"exceed kv_rows={self.config.kv_rows} even when it runs alone; set "
                f"kv_rows={prompt + new + self.config.window} or more"
            )

    def _check_positions(self) -> None:
        """Raises: ValueError for a position to keep that no request reaches."""
        lengths = [r.num_prompt_tokens + (r.sampling.max_new_tokens or 0) for r in self.requests if r.sampling]
        last = max(lengths) - 2  # the newest token is never fed
        if max(self.capture.positions or (0,)) > last:
            raise ValueError(
                f"capture position {max(self.capture.positions or ())} lies outside every request; the longest "
                f"computes 0 to {last} (prompt and new tokens, the newest is never fed)"
            )

    def _check_cached(self, request: Request) -> None:
        """Raises: ValueError for cached rows that are not of this prompt or this model, for a promise broken, and for
        rows to keep of a cache that holds more than keys and values."""
        cached, name = request.cached, f"request {request.request_id}"
        if request.keep_rows:
            require_plain(self.model.new_cache(1, 1))
        if cached is None:
            return
        if not isinstance(cached, CacheRows):
            raise ValueError(f"{name}: cached must be CacheRows from cp.cache_rows(...), got a {type(cached).__name__}")
        if len(cached) >= request.num_prompt_tokens:
            raise ValueError(
                f"{name}: cached holds {len(cached)} positions, the prompt {request.num_prompt_tokens} tokens; its "
                f"last one is read, so that it chooses the next: use cached.cut({request.num_prompt_tokens - 1})"
            )
        if cached.token_ids != request.prompt_token_ids[: len(cached)]:
            raise ValueError(f"{name}: cached was read from another text than the prompt's first {len(cached)} tokens")
        if request.is_deterministic and not request.own_fingerprint:
            raise ValueError(
                f"{name}: it is deterministic and goes on from cached rows, so it is comparable only with others that "
                "begin there; say so with own_fingerprint=True"
            )
        require_fit(cached, self.model.new_cache(1, 1))

    # -- running

    def states(self, drafter: Drafter | None, is_all_verified: bool = False) -> list[SequenceState]:
        """A fresh state for each request; with a drafter all are verified, else the deterministic ones."""
        states = [
            SequenceState(
                request,
                is_all_verified or drafter is not None or request.is_deterministic,
                request.sampling or self.fallback,
                self.model.decode,
            )
            for request in self.requests
        ]
        for state in states:
            state.is_edited = state.request.cached is not None
        if self.interventions:
            drafting = None if is_all_verified else self._drafting(drafter or FastPath())
            self.editor = Editor(self.interventions, self.model, states, drafting)
        if any(state.is_verified for state in states):
            with turn(self.model):
                self.config = serving_config(self.model, self.config, self.is_group_given, self._hooked())
        return states

    def _hooked(self) -> Hooked:
        heads = tuple((site, layer) for layer in self.layers for site in self.capture.heads)
        return Hooked(heads, tuple(self.editor.sites) if self.editor is not None else ())

    def _drafting(self, drafter: Drafter) -> Drafting:
        _check_drafter(drafter)
        drafter.check(self.model)
        return Drafting(drafter.name, drafted_layers(drafter, self.model), self.config.window)

    def start(self, drafter: Drafter | None) -> Start:
        """The loop over these requests, ready to begin."""
        if drafter is not None:
            _check_drafter(drafter)
            drafter.check(self.model)
        return lambda states, observer: rounds(
            self.model, states, self.config, observer, drafter, self.editor, self.watch
        )

    def recorded(
        self, start: Start, states: Sequence[SequenceState], *observers: Observer, has_pauses: bool = True, **meta: Any
    ) -> Iterator[int]:
        """The run under a recorder; yields steps, and returns the Trace as the generator's value.

        has_pauses: the caller goes on in between, with the model free of the run's hooks; else no step is yielded.
        """
        model, requests = self.model, self.requests
        prompts = {r.request_id: r.prompt_token_ids for r in requests}
        answers = {r.request_id: ids for r in requests if (ids := _answer_token_ids(r, model))}
        recorder = Recorder(model, self.capture, self.layers, self.lens, prompts, answers)
        guard = RunGuard(model, self.fingerprint)
        steps = start(states, cast(Observer, Tee(recorder, *observers)))
        yield from guard.steps(steps, partial(self.hooks, recorder), has_pauses)
        guard.require_unchanged(has_pauses)
        errors = {str(state.request_id): state.error for state in states if state.error}
        meta = {**meta, "path_reason": self.path_reason, "errors": errors}
        if self.editor is not None:
            meta["interventions"] = self.editor.record()
        with turn(model):
            trace = assemble(recorder, requests, guard.fingerprint, self.config, self.capture, meta)
        trace.interventions = self.interventions
        trace.kept_rows = {s.request_id: s.kept_rows for s in states if s.kept_rows is not None}
        return trace

    def fingerprint(self) -> Fingerprint:
        return schedule_fingerprint(self.model, self.config, LENS_TILE, self.interventions, self.requests)

    @contextmanager
    def hooks(self, recorder: Recorder | None = None) -> Iterator[None]:
        """Puts the interventions on the model, and what keeps states for a recorder."""
        with ExitStack() as stack:
            if self.editor is not None:  # first, so that what is recorded is what the model went on with
                stack.enter_context(self.model.editing(self.editor.sites, self.editor.edit))
            if recorder is not None:
                stack.enter_context(self.model.capturing(recorder.wanted(), self.watch.listening(recorder.on_state)))
            yield


def drain(generator: Iterator[int]) -> Trace:
    """Run a recorded run to its end."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


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


def as_interventions(given: Any) -> tuple[Intervention, ...]:
    """One or many; the pairs that `swap` makes may stand among them as they are."""
    listed = [given] if isinstance(given, Intervention) else list(given)
    flat = [one for item in listed for one in (item if isinstance(item, tuple) else (item,))]
    for one in flat:
        if not isinstance(one, Intervention):
            raise ValueError(f"an intervention is made by cp.interventions.zero(...) and its like, got {one!r:.60}")
    return tuple(flat)


def _check_drafter(drafter: Any) -> None:
    if isinstance(drafter, type) or not hasattr(drafter, "extend"):
        raise ValueError(
            f"a drafter is an object such as cp.drafters.EarlyExit(layer=20), got {drafter!r:.60}; names stand only in "
            "command lines"
        )
