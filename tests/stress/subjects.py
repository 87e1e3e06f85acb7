"""Lists the subjects of the soak: models with one shape of passes each. Tiny models, models with near ties, SmolLM2."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

import cacheprobe as cp
from cacheprobe.core.config import RUN_DTYPES
from cacheprobe.engine.shapes import ShapeRefused
from cacheprobe.models.base import CachedLM
from cacheprobe_benchmarks.shared.tiny import FAMILIES, NEAR_TIES, SLIDING, TINY, WIDE, Size, tiny_model

REAL = "smollm2-135m"
MOST_REFUSED = 20
"""Largest number of shapes that may be refused in a row, the first one included."""
_SHAPES = ((4, 4, 1), (8, 2, 2), (1, 8, 1), (3, 4, 3), (16, 1, 1), (5, 4, 2))
"""(window, group, prefill_group) of the tiny models, assigned in turn. With a window of one token, prompts are not
padded."""
_REAL_SHAPES = ((4, 1, 1, 16), (8, 2, 2, 16), (1, 16, 1, 64), (16, 4, 1, 32))
"""(window, group, prefill_group, prefill_chunk) of SmolLM2: two small shapes, the fastest verified one, the default."""
_NEAR_TIES = (
    ("llama", "float32", NEAR_TIES, 4, 2),
    ("qwen3", "bfloat16", WIDE, 4, 2),
    ("gpt-neox", "float32", NEAR_TIES, 8, 1),
    ("qwen3", "float16", WIDE, 4, 2),
    ("olmo2", "float32", NEAR_TIES, 2, 4),
    ("olmo2", "bfloat16", WIDE, 8, 1),
    ("gemma3", "float32", NEAR_TIES, 4, 2),
    ("llama", "float16", WIDE, 4, 4),
)
"""Family, dtype, size, window and group of models in which every token's unembedding nearly equals its neighbour's: the
order of a sum then decides the token, so fast path and verifier often disagree."""

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """Holds one model under test with one shape of passes."""

    family: str
    dtype: str
    window: int
    group: int
    prefill_group: int = 1
    prefill_chunk: int = 8
    sliding: int | None = None
    size: Size = TINY

    @property
    def is_real(self) -> bool:
        return self.family == REAL

    @property
    def disagrees(self) -> bool:
        """Whether the fast path often differs from the verifier; such a subject gets traffic that shows it."""
        return self.is_real or self.size.has_near_ties

    @property
    def name(self) -> str:
        ending = "-near-ties" if self.size.has_near_ties else f"-window{self.sliding}" if self.sliding else ""
        return f"{self.family}{ending} {self.dtype}"

    @property
    def key(self) -> str:
        return f"{self.name} W{self.window} G{self.group} P{self.prefill_group}"

    @property
    def model(self) -> CachedLM:
        return _loaded(self.family, self.dtype, self.sliding, self.size)

    @property
    def layers(self) -> tuple[int, ...]:
        n = self.model.n_layers
        return (0, n // 2, n - 1) if self.is_real else tuple(range(n))

    @property
    def settings(self) -> dict[str, Any]:
        """Keywords of `cp.run` that fix the shapes of the passes."""
        shape = dict(window=self.window, group=self.group, prefill_chunk=self.prefill_chunk)
        padding = dict(pad_prefill=False) if self.window == 1 else dict(prefill_group=self.prefill_group)
        return {**shape, **padding, "capacity": 128 if self.is_real else 96}


@cache
def _loaded(family: str, dtype: str, sliding: int | None, size: Size, noise: float = 0.0) -> CachedLM:
    if family == REAL:
        return cp.load_model(REAL, dtype=dtype, progress=False)
    live, draw = tiny_model(family, getattr(torch, dtype), window=sliding, size=size), torch.Generator().manual_seed(1)
    if noise:
        with torch.no_grad():
            for weight in live.parameters():
                drawn = noise * torch.randn(weight.shape, generator=draw) * weight.float().std()
                weight.add_(drawn.to(weight.dtype))
    # torch's products depend on the batch, so that the fast path of such a model disagrees with the verifier
    return cp.load_model(live, products="torch" if size.has_near_ties else "auto")


def draft_model(subject: Subject) -> CachedLM:
    """Returns a tiny subject's model with a little noise in its weights, which often proposes the right token."""
    return _loaded(subject.family, subject.dtype, subject.sliding, subject.size, noise=0.02)


def tiny_subjects() -> list[Subject]:
    """Returns each model family in float32, bfloat16 and float16; families with sliding windows also with 8 tokens."""
    kinds = [(family, None) for family in FAMILIES] + [(family, 8) for family in SLIDING]
    return [
        Subject(family, dtype, *_SHAPES[(i + j) % len(_SHAPES)], sliding=width)
        for i, (family, width) in enumerate(kinds)
        for j, dtype in enumerate(RUN_DTYPES)
    ]


def near_tie_subjects() -> list[Subject]:
    return [Subject(family, dtype, window, group, size=size) for family, dtype, size, window, group in _NEAR_TIES]


def real_subjects() -> list[Subject]:
    return [Subject(REAL, "bfloat16", *shape) for shape in _REAL_SHAPES]


def in_accepted_shape(subject: Subject, refused: dict[str, str], compute: Callable[[Subject], T]) -> tuple[Subject, T]:
    """Calls `compute` with the subject; if its shape is refused because it is not batch-invariant on this processor,
    with other shapes, drawn from the subject's key. Returns (the accepted subject, the result).

    refused: receives the key of each refused shape and the reason.
    """
    rng, shape = np.random.default_rng([*subject.key.encode()]), subject
    is_one = subject.window == 1  # prompts stay padded or unpadded
    for _ in range(MOST_REFUSED):
        try:
            return shape, compute(shape)
        except ShapeRefused as refusal:
            refused[shape.key] = str(refusal)
            shape = replace(
                subject,
                window=1 if is_one else int(rng.integers(2, 17)),
                group=int(rng.integers(1, 25 if is_one else 9)),
                prefill_group=1 if is_one else int(rng.integers(1, 4)),
            )
    raise RuntimeError(f"{MOST_REFUSED} shapes of {subject.key} were refused; try another OMP_NUM_THREADS: {refused}")
