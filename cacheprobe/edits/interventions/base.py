"""Defines Intervention: one change of a request's states, given by site, layer and absolute positions."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Required, TypeAlias, TypedDict, cast

import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEADS, RECURRENT, ROUTER, SITES, is_module, site_advice
from cacheprobe.core.live import require_usable_process
from cacheprobe.core.noise import RESAMPLE_STREAM, uniform_noise
from cacheprobe.core.records import PHASES
from cacheprobe.core.values import JsonDict, flag, listed, require_known_options, require_one_of, whole_number

EDITED_SITES = (*SITES, "pre", ROUTER, RECURRENT)
"""Sites whose states an intervention may change: S, T, C, "pre", the input of a block, "router", the logits of a router
over its experts, and "recurrent", the state of a recurrent layer after a token. Besides, any module by its name."""
SITES_OF_HEADS = ("T", RECURRENT)
"""Sites at which an intervention may change a single head."""

Numbers: TypeAlias = "int | Iterable[int] | None"
"""Positions or steps: one, several, or None for all."""


RequestIds: TypeAlias = "int | Iterable[int] | slice | str"
"""Requests by their numbers in the run: one, several, a slice of all, or "all"."""


class Timed(TypedDict, total=False):
    """Declares keyword arguments of the functions of `cp.interventions` that say when an Intervention acts. They are
    fields of an Intervention, with the same meaning."""

    positions: Numbers
    phases: "str | Iterable[str] | None"
    steps: Numbers
    own_fingerprint: bool


class Acting(Timed, total=False):
    """Declares further: on which requests."""

    request_id: RequestIds


class OnRequest(Acting, total=False):
    """Declares the keyword arguments of `steer`: also the length of the prompt."""

    num_prompt_tokens: int | None


class Where(OnRequest, total=False):
    """Declares the keyword arguments of functions that create one Intervention: also site, layer and head."""

    site: Required[str]
    layer: int | None
    head: int | None


class HookOptions(OnRequest, total=False):
    """Declares the keyword arguments of `hook`: also layers and head."""

    layers: "int | Iterable[int] | None"
    head: int | None


class WhereLayers(HookOptions, total=False):
    """Declares the keyword arguments of functions that create an Intervention for each of several layers."""

    site: Required[str]


def checked_fields(name: str, given: Mapping[str, object], known: Any) -> JsonDict:
    """Returns the keyword arguments of a function of `cp.interventions` as a new dict, with generators as tuples. name:
    of the function.  known: the TypedDict that declares them. Raises: TypeError for an unknown or a missing
    argument."""
    require_known_options(given, known.__annotations__)
    if missing := sorted(known.__required_keys__ - given.keys()):
        raise TypeError(f"{name}() misses the required argument {missing[0]!r}")
    return {key: tuple(value) if isinstance(value, Iterator) else value for key, value in given.items()}


class StateContext(NamedTuple):
    """Says which state an intervention changes."""

    request_id: int
    site: str
    layer: int
    head: int | None
    position: int
    """Absolute position of the token; 0 is the prompt's first."""
    phase: str
    """prefill for a prompt token, decode for a token that is drafted or never verified, verify."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Intervention:
    """Describes a change of requests' states at one site and layer. A run makes one of each request from it.

    Acts whenever the model computes one of `positions`, also in a draft pass, unless `phases` or `steps` exclude it.

    Create one with `zero`, `add` and the other functions of `cp.interventions`. Later layers compute their keys
    and values from the changed states, as in a forward pass without a cache.
    """

    name: str
    """Name of the function that created the intervention, such as "zero"."""
    action: str
    """"replace" a state by a vector, "add" a vector to the state, or let a "function" compute it."""
    vectors: Tensor = field(repr=False)
    """[n, w], float32 or float64: one vector for all positions, one for each position, or, with `seed`, the vectors to
    choose from. w is d_model, the head's width, the number of experts, the numbers of all heads of a recurrent state
    (trace.heads("recurrent", layer, request).flatten(1)), or 1 for the same number in every dimension."""
    request_id: RequestIds = "all"
    """Number of the request in the run, from 0 on; several numbers (stored as a tuple), a slice, or "all"."""
    site: str
    """A module's name, from `core.hook_names.module_name`; or S, T, C, "pre": the residual stream that enters the
    block, "router": the logits over the experts, or "recurrent": the state of a recurrent layer after the token. The
    layer's output of the token itself is read before the change."""
    layer: int
    positions: Any = None
    """Absolute positions of input tokens, one or several (stored as a tuple); 0 is the prompt's first token. None for
    every computed position."""
    head: int | None = None
    """At site T: changes this head's z [d_head], its part of the output projection's input. None: changes T itself. At
    site recurrent: changes this head of the state, [d]. None: changes the whole state, [h * d]."""
    phases: "str | Iterable[str] | None" = None
    """One or more of prefill (prompts), decode (draft tokens when they are drafted, and the tokens of never verified
    requests) and verify; None for all."""
    steps: Any = None
    """Steps of the run in which to act; None for all. If a preempted request is rebuilt, its earlier changes are
    repeated."""
    own_fingerprint: bool = False
    """Must be True for a deterministic request. Its bits then equal only those of runs with the same interventions."""
    seed: int | None = None
    """If set, each position takes one of `vectors`, drawn from (seed, position)."""
    num_prompt_tokens: int | None = None
    """Prompt length that the request must have, in tokens; None for any."""
    keeps_shape: bool = False
    """Whether `changed` gets the states as the module has them, [n, ...], and not flat."""
    drafts: "frozenset[str] | None" = None
    """If set, acts on these draft tokens alone: digests of the text up to the token, as from `text_digest`."""
    include_special: bool = True
    """Whether to act on special tokens and on the first position too; see `core.tokens.special`. False for edits of
    features."""

    def __post_init__(self) -> None:
        def keep(name: str, value: object) -> None:
            """Sets a field although the dataclass is frozen."""
            object.__setattr__(self, name, value)

        keep("request_id", _checked_requests(self.name, self.request_id))
        for name in ("layer", *(("head",) if self.head is not None else ())):
            keep(name, whole_number(f"{self.name}: {name}", getattr(self, name)))
        keep("include_special", flag(f"{self.name}: include_special", self.include_special))
        keep("vectors", _checked(self.vectors, str(self)))
        for name in ("positions", "steps"):
            if (given := getattr(self, name)) is not None:
                keep(name, tuple(whole_number(f"{self}: one of {name}", one, at_least=0) for one in listed(given)))
        keep("phases", None if self.phases is None else tuple(listed(self.phases)))
        if not is_module(self.site):
            require_one_of(f"site for {self.name}", self.site, EDITED_SITES, _site_advice)
        if self.head is not None and self.site not in SITES_OF_HEADS:
            raise ValueError(f"{self}: only sites {' and '.join(SITES_OF_HEADS)} have heads; leave out head=")
        for phase in self.phases or ():
            require_one_of(f"phase for {self.name}", phase, PHASES)
        for name in ("positions", "steps", "phases"):
            if (given := getattr(self, name)) == ():
                raise ValueError(f"{self}: {name} is empty, so nothing would change; use None for all")
            if given is not None and len(set(given)) != len(given):
                raise ValueError(f"{self}: one of {name} is given twice; give each once")
        n, wanted = len(self.vectors), len(self.positions or ())
        if self.seed is None and n not in (1, wanted):
            raise ValueError(f"{self}: {n} vectors for {wanted or 'all'} positions; give one, or one for each")

    def __str__(self) -> str:
        head = "" if self.head is None else f" head {self.head}"
        place = self.site if is_module(self.site) else f"site {self.site} of layer {self.layer}{head}"
        return f"{self.name} of {_named(self.request_id)} at {place}"

    @property
    def request(self) -> int:
        """Number of the request, of an Intervention that names one."""
        assert isinstance(self.request_id, int)
        return self.request_id

    def of_requests(self, num_requests: int) -> "list[Intervention]":
        """Returns one Intervention for each request that it names, of a run of so many; they share the vectors. Raises:
        ValueError for a request that is not there, and if there is none."""
        given, there = self.request_id, range(num_requests)
        numbers = there[given] if isinstance(given, slice) else there if given == "all" else listed(given)
        missing = [f"no request {number}" for number in numbers if number not in there]
        if missing or not numbers:
            what = missing[0] if missing else "no request is named"
            raise ValueError(f"{self}: {what}; the run has 0 to {num_requests - 1}")
        made: list[Intervention] = [copy(self) for _ in numbers]
        for one, number in zip(made, numbers, strict=True):
            object.__setattr__(one, "request_id", number)
        return made

    @property
    def place(self) -> tuple[str, int]:
        """(site, layer) of the hook through which the intervention acts; for a head, the site of z."""
        return HEADS if self.site == "T" and self.head is not None else self.site, self.layer

    def at_start(self, digests: dict[int, tuple[str, str]]) -> "Intervention":
        """Returns the intervention as the run that starts now records it. digests: results of `function_digest` by the
        function's id; gets those that are missing. Here nothing is computed."""
        return self

    def changed(self, states: Tensor, contexts: Sequence[StateContext]) -> Tensor:
        """Returns the states [n, w] as they are to become, in the same dtype; one of `contexts` belongs to each."""
        new = self.vectors_at([one.position for one in contexts]).to(states.device, states.dtype)
        flat = states.flatten(1)
        return (new.expand_as(flat) if self.action == "replace" else flat + new).reshape(states.shape)

    def vectors_at(self, positions: list[int]) -> Tensor:
        """Returns a tensor [len(positions), w]: the vector for each of `positions`."""
        if self.seed is not None:
            n = len(self.vectors)
            return self.vectors[[int(uniform_noise(self.seed, p, 1, RESAMPLE_STREAM)[0] * n) for p in positions]]
        if len(self.vectors) == 1:
            return self.vectors.expand(len(positions), -1)
        assert isinstance(self.positions, tuple)
        return self.vectors[[self.positions.index(p) for p in positions]]

    def require_width(self, width: int) -> None:
        """Raises: ValueError if states of this width cannot be changed. A subclass says which; vectors are compared by
        `checks.check_model`."""

    def record(self) -> dict[str, object]:
        """Returns a dict for the run's metadata: the fields without own_fingerprint and num_prompt_tokens, and with the
        SHA-256 of the vectors instead of the vectors. include_special is there only if it is False, drafts if set."""
        names = ("name", "action", "request_id", "site", "layer", "positions", "head", "phases", "steps", "seed")
        values = {name: getattr(self, name) for name in names}
        as_lists = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        left_out = {} if self.include_special else {"include_special": False}
        of_drafts = {} if self.drafts is None else {"drafts": sorted(self.drafts)}
        return {
            **as_lists,
            **left_out,
            **of_drafts,
            "vectors_sha256": hashlib.sha256(self.vectors.numpy().tobytes()).hexdigest(),
        }


def as_interventions(given: object) -> tuple[Intervention, ...]:
    """Returns a flat tuple of Interventions from one, or from a sequence of them and of the pairs that `swap` returns.

    Raises: ValueError for another object in the sequence; TypeError if `given` is no Intervention and no sequence.
    """
    items = [given] if isinstance(given, Intervention) else list(cast("Iterable[object]", given))
    flat = [one for item in items for one in (item if isinstance(item, tuple) else (item,))]
    for one in flat:
        if not isinstance(one, Intervention):
            raise ValueError(f"an intervention is made by cp.interventions.zero(...) and its like, got {one!r:.60}")
    return cast("tuple[Intervention, ...]", tuple(flat))


def _checked_requests(name: str, given: object) -> "int | tuple[int, ...] | slice | str":
    """Returns the numbers of requests: one, a tuple, a slice or "all". Raises: ValueError for anything else, for none,
    and for a number that is given twice."""
    if isinstance(given, slice) or (isinstance(given, str) and given == "all"):
        return given
    numbers = tuple(whole_number(f"{name}: request_id", one, at_least=0) for one in listed(given))
    if not numbers or len(set(numbers)) != len(numbers):
        raise ValueError(f'{name}: request_id is {given!r:.60}; give each request once, or "all"')
    return numbers if isinstance(given, Iterable) else numbers[0]


def _site_advice(name: str) -> str:
    """Returns the end of the error message for an unknown site."""
    return site_advice(name) or f"; if {name!r} is a module of the model, leave out layer= and layers="


def _named(request_id: object) -> str:
    """Returns text such as "request 3" for the request_id of an Intervention."""
    if isinstance(request_id, slice):
        bounds = (request_id.start, request_id.stop, request_id.step)
        return f"requests [{':'.join('' if one is None else str(one) for one in bounds).removesuffix(':')}]"
    if isinstance(request_id, tuple):
        return f"requests {', '.join(map(str, request_id))}"
    return f"request {request_id}" if request_id != "all" else "all requests"


def as_wide(vectors: object) -> Tensor:
    """Returns vectors as a float32 tensor; a float64 tensor, such as the states of a float64 model, stays float64."""
    made = torch.as_tensor(vectors)
    return made if isinstance(vectors, Tensor) and made.dtype == torch.float64 else made.float()


def _checked(vectors: object, what: str) -> Tensor:
    """Returns a copy of vectors [w] or [n, w] as [n, w], in float32 or float64, on the CPU. Raises: ValueError for
    other shapes, an empty tensor, NaN or infinity."""
    require_usable_process()
    made = as_wide(vectors).detach().to("cpu", copy=True)
    made = made[None] if made.dim() == 1 else made
    if made.dim() != 2 or not made.numel():
        raise ValueError(f"{what}: vectors must be [w] or [n, w], got {list(made.shape)}")
    if not bool(torch.isfinite(made).all()):
        raise ValueError(f"{what}: vectors hold NaN or infinity, which no mask would hide; give finite numbers")
    return made.contiguous()
