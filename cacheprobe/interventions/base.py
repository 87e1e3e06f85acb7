"""One change of a request's states, said by absolute position. Knows nothing about passes, slots or models."""

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
    """States of one request are changed wherever these positions are computed: drafts, verification, recomputation.

    Make one with `zero`, `mean`, `resample`, `add`, `replace` or `swap`. What the cache holds of a position follows
    from its changed states in the layers above, as in a forward without a cache.
    """

    name: str
    """What made it, such as "zero"."""
    action: str
    """"replace" or "add"."""
    vectors: Tensor = field(repr=False)
    """[n, w] in float32, or in float64 as given: one for all positions, one for each, or, with `seed`, those to draw
    from. w is d_model, the head's width, or 1 for the same number everywhere."""
    request_id: int
    """As the trace numbers them."""
    site: str
    """S, T, C, or "pre": the residual stream that enters the block."""
    layer: int
    positions: Any = None
    """Absolute positions of input tokens, a number or several (a tuple once it is made); the prompt's first is 0. None
    for every one that is computed."""
    head: int | None = None
    """At site T: change what this head gives to the output projection, [d_head], and not the whole of T."""
    phases: "str | Iterable[str] | None" = None
    """Of prefill (prompts), decode (drafts of the fast path, and all tokens of requests that are never verified) and
    verify; None for all."""
    steps: Any = None
    """Steps of the run, likewise; None for all. Rows that an eviction took away are rewritten as they were."""
    own_fingerprint: bool = False
    """Must be said where the request is deterministic: it is comparable only with runs of the same interventions."""
    seed: int | None = None
    """Each position takes one of `vectors`, drawn from noise keyed by (seed, position)."""
    num_prompt_tokens: int | None = None
    """The length that the request's prompt must have, where `positions` mean something for that length alone."""

    def __post_init__(self) -> None:
        def keep(name: str, value: Any) -> None:
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
        """(site, layer) of the hook that it acts through."""
        return self.site if self.head is None else HEADS, self.layer

    def vectors_at(self, positions: list[int]) -> Tensor:
        """[len, w]: the vector of each of these positions."""
        if self.seed is not None:
            n = len(self.vectors)
            return self.vectors[[int(uniform_noise(self.seed, p, 1, RESAMPLE_STREAM)[0] * n) for p in positions]]
        if len(self.vectors) == 1:
            return self.vectors.expand(len(positions), -1)
        assert isinstance(self.positions, tuple)
        return self.vectors[[self.positions.index(p) for p in positions]]

    def record(self) -> dict[str, Any]:
        """All of it for a manifest, the vectors as their SHA-256."""
        names = ("name", "action", "request_id", "site", "layer", "positions", "head", "phases", "steps", "seed")
        held = {name: getattr(self, name) for name in names}
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in held.items()}
        return {**listed, "vectors_sha256": hashlib.sha256(self.vectors.numpy().tobytes()).hexdigest()}


def as_wide(vectors: Any) -> Tensor:
    """As float32; a tensor of float64, such as the states of a model in float64, as it is."""
    made = torch.as_tensor(vectors)
    return made if isinstance(vectors, Tensor) and made.dtype == torch.float64 else made.float()


def _checked(vectors: Any, what: str) -> Tensor:
    """[n, w] finite float32 or float64 on the CPU, of its own."""
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
