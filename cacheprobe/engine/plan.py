"""Defines RunPlan: checks and completes the arguments of a run before the first pass. execution.py executes it."""

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from torch import Tensor

from cacheprobe.core.config import CaptureConfig, EngineConfig, captured_layers, pick_deterministic
from cacheprobe.core.hook_names import ALL_SITES
from cacheprobe.core.noise import derive_seed
from cacheprobe.core.records import Observer, Request, SamplingParams
from cacheprobe.core.values import JsonDict, whole_number
from cacheprobe.edits.interventions.base import Intervention, as_interventions
from cacheprobe.edits.interventions.checks import Drafting
from cacheprobe.edits.interventions.editor import Editor
from cacheprobe.engine.checker import RecomputeChecker
from cacheprobe.engine.drafters.base import Drafter, drafted_layers, require_drafter
from cacheprobe.engine.drafters.early_exit import FastPath
from cacheprobe.engine.fingerprint import Fingerprint, require_ready, schedule_fingerprint
from cacheprobe.engine.loop import generation_loop
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.shapes import Hooked, batches_prompts, within_positions
from cacheprobe.engine.sizes import require_cache_fits, require_records_fit, require_room, with_capacity
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.surgery import KVSnapshot, require_fit, require_plain
from cacheprobe.lenses.base import Lens, lens_identity, require_readable
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM, StateSink
from cacheprobe.models.conversation import assistant_turns, stop_sources
from cacheprobe.models.experts import head_places
from cacheprobe.models.feeding import require_heads
from cacheprobe.models.hf.masks import longrope_length
from cacheprobe.models.paths import choose_path
from cacheprobe.models.prompts import Chat, answer_ids_of, as_list, require_unpadded, text_of, token_ids_of
from cacheprobe.models.settings import hold_model, live_model
from cacheprobe.trace.recording.features import recorded_dictionary
from cacheprobe.trace.recording.lens_reader import LENS_TILE
from cacheprobe.trace.recording.recorder import Recorder
from cacheprobe.trace.recording.stored_states import chosen_lens

DEFAULT_SAMPLING = SamplingParams(
    temperature=0.0, max_new_tokens=32, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, stop=(), n=1
)
"""Sampling settings of a request, if neither the request nor the run gives them."""

BoundLoop = Callable[[Sequence[SequenceState], Observer], Generator[int, None, None]]
"""Type of a function (states, observer) -> generator of step numbers. A round runs at each `next` of the generator."""


class RunPlan:
    """Holds the checked arguments of `run`, `stream` or `reference`."""

    def __init__(
        self,
        model: CachedLM,
        prompts: Any,
        config: EngineConfig,
        unset_shapes: Collection[str] = (),
        deterministic: Any = False,
        capture: "str | CaptureConfig | None" = ALL_SITES,
        layers: Any = "all",
        lens: Lens | str | None = None,
        sampling: SamplingParams | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        path: str = "auto",
        interventions: "Intervention | Iterable[Any]" = (),
        max_in_flight: int | None = None,
        is_on_disk: bool = False,
    ) -> None:
        """Checks the arguments, but not yet whether interventions can act. Raises: ValueError for arguments that do not
        fit the model, or if the run is estimated not to fit in memory.

        unset_shapes: which settings the caller did not give: the capacity is chosen by the longest request; `states`
            may replace window and group if passes of the shape depend on the batch.
        max_in_flight: maximum number of requests with a cache row; config.max_batch if None.
        is_on_disk: the run is recorded to disk, so that states and readings need no memory.
        """
        if not hasattr(model, "new_cache"):
            raise ValueError(f"a run needs a model from cp.load_model(...), got a {type(model).__name__}")
        require_ready(model)
        self.capture = capture if isinstance(capture, CaptureConfig) else CaptureConfig(sites=capture)
        self.model, self.path_reason = choose_path(model, path, self.capture.heads)
        self.model.check_settings(config.window)
        self.config, self.unset_shapes, self._is_on_disk = config, unset_shapes, is_on_disk
        self.layers = captured_layers(self.capture, layers, model.n_layers)
        recorded_dictionary(self.capture, self.model)
        if self.capture.heads:
            require_heads(self.model, self.capture.heads, self.layers)
        self.lens, self.recorded_capture = chosen_lens(lens, self.capture, self.model)
        require_readable(self.lens, self.model, "S", self.layers)
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling must be a cp.SamplingParams, got a {type(sampling).__name__}")
        run_sampling = SamplingParams(max_new_tokens=max_new_tokens).over(sampling or SamplingParams())
        _check_stops(run_sampling, model)
        self._are_stops_given = run_sampling.stop_token_ids is not None
        run_seed = SamplingParams(seed=whole_number("seed", seed)).seed
        self.fallback = run_sampling.over(DEFAULT_SAMPLING).over(SamplingParams(stop_token_ids=model.stop_token_ids))
        self.interventions = as_interventions(interventions)
        self.editor: Editor | None = None
        self.checker = RecomputeChecker(self.model)
        listed = as_list(prompts)
        chosen = pick_deterministic(deterministic, len(listed))
        self._check_sizes([self._size(item) for item in listed], max_in_flight)
        tokenized = [self._request(item, i, i in chosen) for i, item in enumerate(listed)]
        require_unpadded(listed, model.tokenizer)
        if "capacity" in unset_shapes:
            needed = [(r.num_prompt_tokens, self._size(r)[1], r.num_cached) for r in tokenized]
            self.config = with_capacity(config, needed, model.n_ctx, "window" in unset_shapes)
        fitting = within_positions(model, self.config, "capacity" not in unset_shapes)
        is_longest, self.config = fitting is not self.config, fitting
        for request in tokenized:
            require_room(self.config, request, self._size(request)[1], is_longest)
        self._check_sizes([(r.num_prompt_tokens, *self._size(r)[1:]) for r in tokenized], max_in_flight)
        requests: list[Request] = []
        for request in tokenized:
            requests += self._samples(request, len(requests), run_seed or 0)
        self.requests: tuple[Request, ...] = tuple(requests)
        self._check_positions()

    # -- requests

    def _size(self, item: Any) -> tuple[int, int, int]:
        """Returns (1, new tokens, samples) of a prompt; 1 stands for the prompt's tokens, which are not counted yet."""
        settings = _own_sampling(item).over(self.fallback)
        return 1, min(settings.max_new_tokens or 1, self.model.n_ctx), settings.n or 1

    def _check_sizes(self, requests: list[tuple[int, int, int]], max_in_flight: int | None) -> None:
        """Raises: ValueError if the estimated memory of the run's KV cache, or of its records, is not available.
        requests: (prompt tokens, new tokens, samples) of each prompt."""
        config = replace(self.config, max_batch=max_in_flight or self.config.max_batch)
        slots = [
            config.slots_needed(prompt, new) for prompt, new, n in requests for _ in range(min(n, config.max_batch))
        ]
        require_cache_fits(self.model, config, slots)
        in_memory = CaptureConfig(None) if self._is_on_disk else self.recorded_capture
        require_records_fit(self.model, in_memory, self.layers, requests)

    def _samples(self, request: Request, first: int, run_seed: int) -> tuple[Request, ...]:
        """Returns one Request for each of the n samples of a request, with ids from `first` on and different seeds."""
        assert request.sampling is not None and request.sampling.n is not None
        n = request.sampling.n
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
        """Returns the complete Request of a prompt: tokenized, with all sampling settings, and checked. chosen: True if
        the run's argument `deterministic` selects this prompt."""
        given = item if isinstance(item, Request) else Request(())
        prompt: Any = given.prompt if given is item else item
        example = given.example
        is_chat = given.is_chat or bool(getattr(prompt, "chat", getattr(example, "chat", False)))
        chat = prompt if isinstance(prompt, Chat) else None
        if hasattr(prompt, "prompt_text"):
            example = example if isinstance(prompt, Chat) else prompt
            prompt = text_of(prompt, self.model, index)
        ids = token_ids_of(prompt, self.model, index, is_chat=is_chat)
        own = _own_sampling(given)
        _check_stops(own, self.model, f"request {index}: ")
        if is_chat and own.stop_token_ids is None and not self._are_stops_given:
            own = replace(own, stop_token_ids=tuple(sorted(stop_sources(self.model, is_chat, chat))))
        if bad := [token for token in given.forced_token_ids if not 0 <= token < self.model.d_vocab]:
            raise ValueError(
                f"request {index}: forced token {bad[0]} is outside the vocabulary of {self.model.name}, "
                f"{self.model.d_vocab}; give tokens of this model's tokenizer"
            )
        request = replace(
            given,
            prompt=prompt if isinstance(prompt, str) else ids,
            sampling=own.over(self.fallback),
            is_deterministic=chosen or given.is_deterministic,
            request_id=index,
            prompt_token_ids=ids,
            example=example,
            is_chat=is_chat,
            turns=given.turns if chat is None else assistant_turns(chat, self.model.tokenizer, ids),
        )
        self._check_cached(request)
        self._check_fit(request)
        return request

    def _check_fit(self, request: Request) -> None:
        """Raises: ValueError if prompt and new tokens exceed the model's context."""
        assert request.sampling is not None and request.sampling.max_new_tokens is not None
        prompt, new, n_ctx = request.num_prompt_tokens, request.sampling.max_new_tokens, self.model.n_ctx
        if prompt + new > n_ctx:
            config = getattr(live_model(self.model), "config", None)
            switch = ", beyond which the factors of its LongRoPE switch" if n_ctx == longrope_length(config) else ""
            count, remedy = f"{new} new tokens", f" or set max_new_tokens={n_ctx - prompt} or less"
            if prompt >= n_ctx:
                count, remedy = "a new token", f" to {n_ctx - 1} tokens or fewer"
            raise ValueError(
                f"request {request.request_id}: prompt of {prompt} + {count} exceed the model's context of "
                f"{n_ctx}{switch}; shorten the prompt{remedy}"
            )

    def _check_positions(self) -> None:
        """Raises: ValueError if the largest of capture.positions is beyond the last position of every request."""
        lengths = [r.num_prompt_tokens + (r.sampling.max_new_tokens or 0) for r in self.requests if r.sampling]
        last = max(lengths) - 2  # the newest token is never fed
        if max(self.capture.positions or (0,)) > last:
            raise ValueError(
                f"capture position {max(self.capture.positions or ())} lies outside every request; the longest "
                f"computes 0 to {last} (prompt and new tokens, the newest is never fed)"
            )

    def _check_cached(self, request: Request) -> None:
        """Raises: ValueError if a request's `cached` or `keep_kv` does not fit its prompt, settings or model."""
        cached, name = request.cached, f"request {request.request_id}"
        if request.keep_kv:
            require_plain(self.model.new_cache(1, 1))
        if cached is None:
            return
        if not isinstance(cached, KVSnapshot):
            raise ValueError(
                f"{name}: cached must be KVSnapshot from cp.kv_snapshot(...), got a {type(cached).__name__}"
            )
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
        """Returns a new SequenceState for each request. With a drafter all are verified, else the deterministic ones;
        with determinism="invariant" these are not verified, but invariant.

        is_all_verified: all are verified (or invariant) without a drafter, too.
        Also creates the run's editor of interventions and tries its pass shapes, which may change self.config. Raises:
        ShapeRefused if no allowed shape is batch-invariant; ValueError for interventions that cannot act.
        """
        is_drafted, is_invariant = drafter is not None, self.config.is_invariant
        states = []
        for request in self.requests:
            is_decided = is_all_verified or is_drafted or request.is_deterministic
            is_verified = is_decided and (is_drafted or not is_invariant)
            sampling, is_edited = request.sampling or self.fallback, request.cached is not None
            states.append(SequenceState(request, is_verified, sampling, self.model.decode, is_decided and is_invariant))
            states[-1].is_edited = is_edited
        self.editor = self._editor(drafter, states, is_all_verified)
        if any(state.reads_in_chunks for state in states):
            before, is_any = self.config, any(state.request.is_deterministic for state in states)
            # the slow reference needs the shapes of a deterministic run; other runs keep their window
            replaceable = {*self.unset_shapes} - (set() if is_any or is_all_verified else {"window"})
            most = 1 if is_all_verified else min(len(states), before.group if is_drafted else before.max_batch)
            with hold_model(self.model):
                self.config = self.checker.trial(
                    before, self._hooked(), replaceable, is_any, self._require_all_fit, most
                )
                if "prefill_group" in self.unset_shapes and not is_all_verified:
                    prompts = {state.request.prompt_token_ids for state in states if state.reads_in_chunks}
                    at_once = min(len(prompts), before.max_batch)
                    self.checker.batches_prompts = batches_prompts(self.model, self.config, self._hooked(), at_once)
            if self.config.window != before.window:
                self.editor = self._editor(drafter, states, is_all_verified)
        return states

    def _require_all_fit(self, config: EngineConfig) -> None:
        """Raises: ValueError if the model refuses the config's window, or a request does not fit the config's cache."""
        self.model.check_settings(config.window)
        for request in self.requests:
            sampling = (request.sampling or self.fallback).over(self.fallback)
            require_room(config, request, sampling.max_new_tokens or 1)

    def _editor(self, drafter: Drafter | None, states: Sequence[SequenceState], is_all_verified: bool) -> Editor | None:
        """Returns the Editor of the run's interventions; None without interventions."""
        if not self.interventions:
            return None
        drafting = None if is_all_verified else self._drafting(drafter or FastPath())
        return Editor(self.interventions, self.model, states, drafting)

    def _hooked(self) -> Hooked:
        """Returns the (site, layer) hooks of captured heads and of interventions, for the trial of pass shapes."""
        heads = tuple(head_places(self.model, self.capture.heads, self.layers))
        return Hooked(heads, tuple(self.editor.sites) if self.editor is not None else ())

    def _drafting(self, drafter: Drafter) -> Drafting:
        """Returns a Drafting: the drafter's name, the number of layers that its drafts run, and the window. Raises:
        ValueError if the drafter does not fit the model."""
        require_drafter(drafter, self.model)
        return Drafting(drafter.name, drafted_layers(drafter, self.model), self.config.window)

    def bind_loop(self, drafter: Drafter | None, step: int = -1) -> BoundLoop:
        """Returns a function (states, observer) -> generator of the main loop, see `engine.loop.generation_loop`.

        step: number of the last step that an earlier process has run; -1 for a new run.
        No pass runs before the generator's first `next`. Raises: ValueError if the drafter does not fit the model.
        """
        if drafter is not None:
            require_drafter(drafter, self.model)

        def loop(states: Sequence[SequenceState], observer: Observer) -> Generator[int, None, None]:
            """Returns the generator of the main loop."""

            def new_runner() -> ModelRunner:
                """Returns a ModelRunner with a new cache."""
                rows = min(len(states), self.config.max_batch) + 1  # one for dummies
                cache = self.model.new_cache(rows, self.config.capacity)
                return ModelRunner(self.model, cache, observer, self.checker, self.editor, step)

            return generation_loop(new_runner, states, self.config, drafter)

        return loop

    def recorder(self) -> Recorder:
        """Returns a new Recorder with the run's capture settings, prompts, and first token ids of task answers."""
        prompts = {r.request_id: r.prompt_token_ids for r in self.requests}
        known = {request_id: ids for request_id, (ids, _) in self._answers.items() if ids}
        return Recorder(self.model, self.recorded_capture, self.layers, self.lens, prompts, known)

    @cached_property
    def _answers(self) -> dict[int, tuple[tuple[int, ...], str]]:
        """Request id -> (first token id of each possible answer of the task, error text). The ids are () if unknown;
        the text is "" without an error."""
        return {request.request_id: answer_ids_of(request, self.model) for request in self.requests}

    def meta(self, meta: Mapping[str, object]) -> JsonDict:
        """Returns entries of the metadata with those that this plan adds before the first pass."""
        interventions = {"interventions": [one.record() for one in self.interventions]} if self.interventions else {}
        return {**meta, "path_reason": self.path_reason, **interventions}

    def missing_answers(self) -> dict[str, str]:
        """Returns, by a text that names the request, why the first tokens of its task's answers are unknown."""
        return {f"answers of request {number}": why for number, (_, why) in self._answers.items() if why}

    def fingerprint(self) -> Fingerprint:
        """Returns the run's schedule fingerprint as a dict: see engine/fingerprint.py."""
        is_told = self.recorded_capture.reads_lens and not isinstance(self.lens, LogitLens)
        lens = lens_identity(self.lens) if is_told else ""
        return schedule_fingerprint(self.model, self.config, LENS_TILE, self.interventions, self.requests, lens)

    @contextmanager
    def hooks(self, recorder: Recorder | None = None) -> Iterator[None]:
        """Inside the `with`, the hooks of the interventions, and of the recorder if given, are on the model."""
        with ExitStack() as stack:
            if self.editor is not None:  # first, so that the changed states are recorded
                stack.enter_context(self.model.editing(self.editor.sites, self.editor.edit))
            if recorder is not None:
                sink = of_this_thread(self.checker.listening(recorder.on_state))
                stack.enter_context(self.model.capturing(recorder.wanted(), sink))
            yield


def of_this_thread(sink: StateSink) -> StateSink:
    """Returns a sink for captured states that ignores states of other threads, such as an abandoned drafter's."""
    owner = threading.get_ident()

    def capture(site: str, layer: int, value: Tensor) -> None:
        """Calls `sink` with a state if the thread that created this function computed it."""
        if threading.get_ident() == owner:
            sink(site, layer, value)

    return capture


def _own_sampling(item: Any) -> SamplingParams:
    """Returns the sampling settings of a prompt itself; None where it leaves one to the run. A request with forced
    tokens commits all of them, and nothing else."""
    if not isinstance(item, Request):
        return SamplingParams()
    if forced := item.forced_token_ids:
        return SamplingParams(temperature=0.0, max_new_tokens=len(forced), n=1, stop_token_ids=(), stop=())
    return item.sampling or SamplingParams()


def _check_stops(sampling: SamplingParams, model: CachedLM, where: str = "") -> None:
    """Raises: ValueError if a stop token id lies outside the model's vocabulary. where: prefix of the message."""
    ids = cast("tuple[int, ...]", sampling.stop_token_ids or ())
    if bad := [token_id for token_id in ids if token_id >= model.d_vocab]:
        raise ValueError(f"{where}stop_token_ids holds {bad[0]}, outside the vocabulary of {model.d_vocab}")
