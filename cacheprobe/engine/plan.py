"""Makes the plan of a run: checks and completes its settings and requests. execution.py prepares and executes it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, cast

from cacheprobe.core.config import CaptureConfig, EngineConfig, captured_layers, pick_deterministic
from cacheprobe.core.hook_names import ALL_SITES, is_module
from cacheprobe.core.noise import derive_seed
from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.core.settings import DEFAULT_SAMPLING
from cacheprobe.core.values import JsonDict, require_known_options, whole_number
from cacheprobe.edits.interventions.base import Intervention, as_interventions
from cacheprobe.edits.interventions.checks import interventions_of
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.fingerprint import Fingerprint, require_ready, schedule_fingerprint
from cacheprobe.engine.shapes import choose_shapes, within_positions
from cacheprobe.engine.sizes import require_cache_fits, require_records_fit, require_room, with_capacity
from cacheprobe.kvcache.surgery import KVSnapshot, require_fit, require_plain
from cacheprobe.lenses.base import Lens, lens_identity, require_readable
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.conversation import assistant_turns, stop_sources
from cacheprobe.models.feeding import module_places, require_heads, row_shapes
from cacheprobe.models.heads.lm import DraftHeadLM
from cacheprobe.models.hf.masks import longrope_length
from cacheprobe.models.paths import choose_path
from cacheprobe.models.prompts import Chat, answer_ids_of, as_list, require_unpadded, text_of, token_ids_of
from cacheprobe.models.settings import live_model
from cacheprobe.trace.recording.features import recorded_dictionary
from cacheprobe.trace.recording.lens_reader import LENS_TILE
from cacheprobe.trace.recording.recorder import Recorder
from cacheprobe.trace.recording.stored_states import chosen_lens

DEFAULTS: dict[str, Any] = dict(
    drafter=None, deterministic=False, capture=ALL_SITES, dictionary=None, layers="all", lens=None, sampling=None,
    max_new_tokens=None, seed=0, path="auto", interventions=(),
)  # fmt: skip
"""Settings of a run that are no fields of EngineConfig, as `cp.run` takes them."""
SHAPES = tuple(field.name for field in fields(EngineConfig))


@dataclass(frozen=True)
class RunPlan:
    """Holds the checked settings of a run, and its requests. `make_plan` makes it."""

    model: CachedLM
    """The path that serves the run."""
    path_reason: str
    drafter: Drafter | None
    config: EngineConfig
    unset_shapes: frozenset[str]
    """Shapes that the caller did not give; `prepare` may replace window and group if passes of the shape depend on the
    batch."""
    capture: CaptureConfig
    recorded_capture: CaptureConfig
    """What is recorded during the run; without Z if the lens reads later."""
    layers: tuple[int, ...]
    lens: Lens
    sampling: SamplingParams
    """For requests without settings of their own; every field but the seed has a value."""
    interventions: tuple[Intervention, ...]
    requests: tuple[Request, ...]

    def recorder(self) -> Recorder:
        """Returns a new Recorder with the run's capture settings, prompts, and first token ids of task answers."""
        prompts = {r.request_id: r.prompt_token_ids for r in self.requests}
        known = {request_id: ids for request_id, (ids, _) in self._answers.items() if ids}
        return Recorder(self.model, self.recorded_capture, self.layers, self.lens, prompts, known)

    def head_recorder(self, head: DraftHeadLM) -> Recorder:
        """Returns a new Recorder of a draft head's rows, of all its layers, which the logit lens reads during the run.
        Leaves out sites of heads that it lacks."""
        heads = tuple(site for site in self.capture.heads if site not in head.lacks)
        sites = self.capture.sites or None
        capture = replace(self.capture, sites=sites, phases=None, layers=None, dictionary=None, heads=heads, modules=())
        prompts = {r.request_id: r.prompt_token_ids for r in self.requests}
        return Recorder(head, capture, tuple(range(head.n_layers)), LogitLens(), prompts)

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
        """Returns a dict from "answers of request N" to the reason why the first tokens of its task's possible answers
        are unknown. Has only requests whose task failed or gave what is no token."""
        return {f"answers of request {number}": why for number, (_, why) in self._answers.items() if why}

    def fingerprint(self) -> Fingerprint:
        """Returns the run's schedule fingerprint as a dict: see engine/fingerprint.py."""
        is_told = self.recorded_capture.reads_lens and not isinstance(self.lens, LogitLens)
        lens = lens_identity(self.lens) if is_told else ""
        return schedule_fingerprint(self.model, self.config, LENS_TILE, self.interventions, self.requests, lens)


# -- the plan


def make_plan(
    model: CachedLM,
    prompts: Any,
    settings: Mapping[str, Any],
    max_in_flight: int | None = None,
    is_on_disk: bool = False,
) -> RunPlan:
    """Returns the RunPlan of these prompts. Checks all but whether interventions can act, and runs no pass.

    settings: keywords of `cp.run`, of DEFAULTS and SHAPES; a missing shape is chosen for the model and the requests.
    max_in_flight: maximum number of requests with a cache row; the setting max_batch if None.
    is_on_disk: the run is recorded to disk, so that states and readings need no memory.
    Raises: TypeError for an unknown setting; ValueError for settings that do not fit the model, or if the run is
    estimated not to fit in memory.
    """
    require_known_options(settings, (*DEFAULTS, *SHAPES))
    given = {**DEFAULTS, **settings}
    capture = _capture_of(given["capture"], given["dictionary"])
    is_drafted = given["drafter"] is not None
    config, unset = choose_shapes(model, is_drafted, {name: given[name] for name in SHAPES if name in given})
    if not hasattr(model, "new_cache"):
        raise ValueError(f"a run needs a model from cp.load_model(...), got a {type(model).__name__}")
    require_ready(model)
    edited = [one.site for one in as_interventions(given["interventions"]) if is_module(one.site)]
    served, path_reason = choose_path(model, given["path"], capture.heads, [*capture.modules, *edited])
    served.check_settings(config.window)
    layers = captured_layers(capture, given["layers"], model.n_layers)
    recorded_dictionary(capture, served)
    if capture.heads:
        require_heads(served, capture.heads, layers)
    row_shapes(served, module_places(served, capture.modules, layers))
    lens, recorded_capture = chosen_lens(given["lens"], capture, served)
    require_readable(lens, served, "S", layers)
    run_sampling = _run_sampling(given["sampling"], given["max_new_tokens"], model)
    run_seed = SamplingParams(seed=whole_number("seed", given["seed"])).seed or 0
    sampling = run_sampling.over(DEFAULT_SAMPLING).over(SamplingParams(stop_token_ids=model.stop_token_ids))
    listed = as_list(prompts)
    chosen = pick_deterministic(given["deterministic"], len(listed))

    def require_memory(config: EngineConfig, sizes: list[tuple[int, int, int]]) -> None:
        """Checks the memory for prompts of these sizes."""
        config = replace(config, max_batch=max_in_flight or config.max_batch)
        slots = [config.slots_needed(prompt, new) for prompt, new, n in sizes for _ in range(min(n, config.max_batch))]
        require_cache_fits(served, config, slots)
        require_records_fit(served, CaptureConfig(None) if is_on_disk else recorded_capture, layers, sizes)

    def sizes_of(items: Iterable[Any]) -> list[tuple[int, int, int]]:
        """Returns (prompt tokens, new tokens, samples) of each; 1 for a prompt that is not tokenized."""
        wanted = [(item, _own_sampling(item).over(sampling)) for item in items]
        return [
            (getattr(item, "num_prompt_tokens", 1) or 1, min(own.max_new_tokens or 1, served.n_ctx), own.n or 1)
            for item, own in wanted
        ]

    require_memory(config, sizes_of(listed))
    tokenized = _tokenized(listed, chosen, served, run_sampling, sampling)
    sizes = sizes_of(tokenized)
    config = _fitting_config(config, unset, tokenized, sizes, served)
    require_memory(config, sizes)
    requests: list[Request] = []
    for request in tokenized:
        requests += _samples(request, len(requests), run_seed)
    _check_positions(capture, requests)
    interventions = interventions_of(given["interventions"], served, len(requests))
    return RunPlan(
        served, path_reason, given["drafter"], config, unset, capture, recorded_capture, layers, lens, sampling,
        interventions, tuple(requests),
    )  # fmt: skip


def _capture_of(capture: "str | CaptureConfig | None", dictionary: object) -> CaptureConfig:
    """Returns the capture settings, with a dictionary if one is given. Raises: ValueError if they have one."""
    made = capture if isinstance(capture, CaptureConfig) else CaptureConfig(sites=capture)
    if dictionary is None:
        return made
    if made.dictionary is not None:
        raise ValueError("capture has a dictionary, and dictionary= was given; leave out one")
    return replace(made, sites=made.sites or None, dictionary=dictionary)


def _run_sampling(sampling: object, max_new_tokens: int | None, model: CachedLM) -> SamplingParams:
    """Returns the sampling settings that the run was given. Raises: ValueError for another object, and for a stop token
    that the model does not have."""
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise ValueError(f"sampling must be a cp.SamplingParams, got a {type(sampling).__name__}")
    made = SamplingParams(max_new_tokens=max_new_tokens).over(sampling or SamplingParams())
    _check_stops(made, model)
    return made


def _fitting_config(
    config: EngineConfig,
    unset: Collection[str],
    requests: Sequence[Request],
    sizes: Sequence[tuple[int, int, int]],
    model: CachedLM,
) -> EngineConfig:
    """Returns the config with a capacity for the longest request, unless one was given. Raises: ValueError if a request
    needs more slots."""
    if "capacity" in unset:
        needed = [(r.num_prompt_tokens, new, r.num_cached) for r, (_, new, _) in zip(requests, sizes, strict=True)]
        config = with_capacity(config, needed, model.n_ctx, "window" in unset)
    fitting = within_positions(model, config, "capacity" not in unset)
    for request, (_, new, _) in zip(requests, sizes, strict=True):
        require_room(fitting, request, new, fitting is not config)
    return fitting


# -- requests


def _tokenized(
    listed: Sequence[Any],
    chosen: Collection[int],
    model: CachedLM,
    run_sampling: SamplingParams,
    sampling: SamplingParams,
) -> list[Request]:
    """Returns the checked Request of each prompt. chosen: indices of those that the run makes deterministic."""
    tokenized = []
    for i, item in enumerate(listed):
        request = _request(item, i, model, run_sampling, sampling)
        request = replace(request, is_deterministic=i in chosen or request.is_deterministic)
        _check_cached(request, model)
        _check_fit(request, model)
        tokenized.append(request)
    require_unpadded(listed, model.tokenizer)
    return tokenized


def _samples(request: Request, first: int, run_seed: int) -> tuple[Request, ...]:
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


def _request(item: Any, index: int, model: CachedLM, run_sampling: SamplingParams, sampling: SamplingParams) -> Request:
    """Returns the complete Request of a prompt: tokenized, with all sampling settings. run_sampling: those that the run
    was given.  sampling: those with the defaults."""
    given = item if isinstance(item, Request) else Request(())
    prompt: Any = given.prompt if given is item else item
    example = given.example
    is_chat = given.is_chat or bool(getattr(prompt, "chat", getattr(example, "chat", False)))
    chat = prompt if isinstance(prompt, Chat) else None
    if hasattr(prompt, "prompt_text"):
        example = example if isinstance(prompt, Chat) else prompt
        prompt = text_of(prompt, model, index)
    ids = token_ids_of(prompt, model, index, is_chat=is_chat)
    own = _own_sampling(given)
    _check_stops(own, model, f"request {index}: ")
    if is_chat and own.stop_token_ids is None and run_sampling.stop_token_ids is None:
        own = replace(own, stop_token_ids=tuple(sorted(stop_sources(model, is_chat, chat))))
    if bad := [token for token in given.forced_token_ids if not 0 <= token < model.d_vocab]:
        raise ValueError(
            f"request {index}: forced token {bad[0]} is outside the vocabulary of {model.name}, "
            f"{model.d_vocab}; give tokens of this model's tokenizer"
        )
    return replace(
        given,
        prompt=prompt if isinstance(prompt, str) else ids,
        sampling=own.over(sampling),
        request_id=index,
        prompt_token_ids=ids,
        example=example,
        is_chat=is_chat,
        turns=given.turns if chat is None else assistant_turns(chat, model.tokenizer, ids),
    )


def _check_fit(request: Request, model: CachedLM) -> None:
    """Raises: ValueError if prompt and new tokens exceed the model's context."""
    assert request.sampling is not None and request.sampling.max_new_tokens is not None
    prompt, new, n_ctx = request.num_prompt_tokens, request.sampling.max_new_tokens, model.n_ctx
    if prompt + new > n_ctx:
        config = getattr(live_model(model), "config", None)
        switch = ", beyond which the factors of its LongRoPE switch" if n_ctx == longrope_length(config) else ""
        count, remedy = f"{new} new tokens", f" or set max_new_tokens={n_ctx - prompt} or less"
        if prompt >= n_ctx:
            count, remedy = "a new token", f" to {n_ctx - 1} tokens or fewer"
        raise ValueError(
            f"request {request.request_id}: prompt of {prompt} + {count} exceed the model's context of "
            f"{n_ctx}{switch}; shorten the prompt{remedy}"
        )


def _check_positions(capture: CaptureConfig, requests: Iterable[Request]) -> None:
    """Raises: ValueError if the largest of capture.positions is beyond the last position of every request."""
    lengths = [r.num_prompt_tokens + (r.sampling.max_new_tokens or 0) for r in requests if r.sampling]
    last = max(lengths) - 2  # the newest token is never fed
    if max(capture.positions or (0,)) > last:
        raise ValueError(
            f"capture position {max(capture.positions or ())} lies outside every request; the longest "
            f"computes 0 to {last} (prompt and new tokens, the newest is never fed)"
        )


def _check_cached(request: Request, model: CachedLM) -> None:
    """Raises: ValueError if a request's `cached` or `keep_kv` does not fit its prompt, settings or model."""
    cached, name = request.cached, f"request {request.request_id}"
    if request.keep_kv:
        require_plain(model.new_cache(1, 1))
    if cached is None:
        return
    if not isinstance(cached, KVSnapshot):
        raise ValueError(f"{name}: cached must be KVSnapshot from cp.kv_snapshot(...), got a {type(cached).__name__}")
    if len(cached) >= request.num_prompt_tokens:
        raise ValueError(
            f"{name}: cached holds {len(cached)} positions, but the prompt only {request.num_prompt_tokens} tokens; "
            f"the run must read the prompt's last token itself: use cached.cut({request.num_prompt_tokens - 1})"
        )
    if cached.token_ids != request.prompt_token_ids[: len(cached)]:
        raise ValueError(f"{name}: cached was read from another text than the prompt's first {len(cached)} tokens")
    if request.is_deterministic and not request.own_fingerprint:
        raise ValueError(
            f"{name}: it is deterministic and goes on from cached rows, so it is comparable only with others that "
            "begin there; say so with own_fingerprint=True"
        )
    require_fit(cached, model.new_cache(1, 1))


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
