"""One change of a request's states, given by absolute position. This file contains no code for passes, slots or
models."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEADS, SITES
from cacheprobe.core.noise import RESAMPLE_STREAM, uniform_noise
from cacheprobe.core.records import PHASES

EDITED_SITES = (*SITES, "pre")
ACTIONS = ("replace", "add")


@dataclass(frozen=True, eq=False, kw_only=True)
class Intervention:
    """Changes states of one request whenever these positions are computed: in drafts, verification and recomputation.

    Create one with `zero`, `mean`, `resample`, `add`, `replace` or `swap`. In the layers above, the cached keys and
    values of a position follow from its changed states, as in a forward without a cache.
    """

    name: str
    """The function that created it, such as "zero"."""
    action: str
    """"replace" or "add"."""
    vectors: Tensor = field(repr=False)
    """[n, w] in float32, or in float64 if given so: one for all positions, one for each position, or, with `seed`,
    those to choose from. w is d_model, the head's width, or 1 for the same number in every dimension."""
    request_id: int
    """The request's number in the trace."""
    site: str
    """S, T, C, or "pre": the residual stream that enters the block."""
    layer: int
    positions: Any = None
    """Absolute positions of input tokens, a number or several (stored as a tuple); the prompt's first is 0. None for
    every computed position."""
    head: int | None = None
    """At site T: changes only what this head gives to the output projection, [d_head], instead of the whole of T."""
    phases: "str | Iterable[str] | None" = None
    """Of prefill (prompts), decode (drafts of the fast path, and all tokens of requests that are never verified) and
    verify; None for all."""
    steps: Any = None
    """Steps of the run in which to act; None for all. Positions recomputed after a preemption repeat their earlier
    changes."""
    own_fingerprint: bool = False
    """Must be True for a deterministic request: its results are comparable only with runs of the same interventions."""
    seed: int | None = None
    """If set, each position takes one of `vectors`, chosen by noise keyed by (seed, position)."""
    num_prompt_tokens: int | None = None
    """Required length of the request's prompt, if `positions` are meaningful for that length only."""

    def __post_init__(self) -> None:
        def keep(name: str, value: object) -> None:
            """Sets a field of the frozen dataclass."""
            object.__setattr__(self, name, value)

        keep("vectors", _checked(self.vectors, str(self)))
        keep("positions", _as_numbers(self.positions, "position", str(self)))
        keep("steps", _as_numbers(self.steps, "step", str(self)))
        keep("phases", (self.phases,) if isinstance(self.phases, str) else self.phases and tuple(self.phases))
        if self.site not in EDITED_SITES:
            raise ValueError(f"{self}: unknown site {self.site!r}; sites to change are {', '.join(EDITED_SITES)}")
        if self.action not in ACTIONS:
            raise ValueError(f"{self}: unknown action {self.action!r}; choose one of {', '.join(ACTIONS)}")
        if self.head is not None and self.site != "T":
            raise ValueError(f"{self}: heads give to site T alone; leave out head=, or use site='T'")
        for phase in self.phases or ():
            if phase not in PHASES:
                raise ValueError(f"{self}: unknown phase {phase!r}; phases are {', '.join(PHASES)}")
        if self.phases is not None and not self.phases:
            raise ValueError(f"{self}: phases is empty, so nothing would change; use None for all")
        n, wanted = len(self.vectors), len(self.positions or ())
        if self.seed is None and n not in (1, wanted):
            raise ValueError(f"{self}: {n} vectors for {wanted or 'all'} positions; give one, or one for each")

    def __str__(self) -> str:
        head = "" if self.head is None else f" head {self.head}"
        return f"{self.name} of request {self.request_id} at site {self.site} of layer {self.layer}{head}"

    @property
    def place(self) -> tuple[str, int]:
        """(site, layer) of the hook through which this intervention acts."""
        return self.site if self.head is None else HEADS, self.layer

    def vectors_at(self, positions: list[int]) -> Tensor:
        """Returns the vector of each of these positions, [len, w]."""
        if self.seed is not None:
            n = len(self.vectors)
            return self.vectors[[int(uniform_noise(self.seed, p, 1, RESAMPLE_STREAM)[0] * n) for p in positions]]
        if len(self.vectors) == 1:
            return self.vectors.expand(len(positions), -1)
        assert isinstance(self.positions, tuple)
        return self.vectors[[self.positions.index(p) for p in positions]]

    def record(self) -> dict[str, object]:
        """Returns all fields for a manifest, with the SHA-256 of the vectors instead of the vectors."""
        names = ("name", "action", "request_id", "site", "layer", "positions", "head", "phases", "steps", "seed")
        held = {name: getattr(self, name) for name in names}
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in held.items()}
        return {**listed, "vectors_sha256": hashlib.sha256(self.vectors.numpy().tobytes()).hexdigest()}


def as_wide(vectors: object) -> Tensor:
    """Returns vectors as float32; a float64 tensor, such as the states of a float64 model, stays float64."""
    made = torch.as_tensor(vectors)
    return made if isinstance(vectors, Tensor) and made.dtype == torch.float64 else made.float()


def _checked(vectors: object, what: str) -> Tensor:
    """Returns a copy as finite [n, w] float32 or float64 on the CPU. Raises: ValueError for other shapes, NaN or
    infinity."""
    made = as_wide(vectors).detach().to("cpu", copy=True)
    made = made[None] if made.dim() == 1 else made
    if made.dim() != 2 or not made.numel():
        raise ValueError(f"{what}: vectors must be [w] or [n, w], got {list(made.shape)}")
    if not bool(torch.isfinite(made).all()):
        raise ValueError(f"{what}: vectors hold NaN or infinity, which no mask would hide; give finite numbers")
    return made.contiguous()


def _as_numbers(given: Any, noun: str, what: str) -> tuple[int, ...] | None:
    if given is None:
        return None
    listed = tuple(int(x) for x in given) if isinstance(given, Iterable) else (int(given),)
    if not listed:
        raise ValueError(f"{what}: there is no {noun}, so nothing would change; use None for all")
    if min(listed) < 0:
        raise ValueError(f"{what}: {noun} {min(listed)} is negative; {noun}s are absolute and count from 0")
    if len(set(listed)) != len(listed):
        raise ValueError(f"{what}: a {noun} is given twice; give each once")
    return listed
