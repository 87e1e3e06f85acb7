"""What is put to the test: tiny models, near-tied ones and the real one, each with its shapes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from transformers import PreTrainedModel

from cacheprobe.config import DTYPES
from cacheprobe.models.base import CachedLM
from cacheprobe.models.loaders import load_model
from cacheprobe.models.tiny import FAMILIES, SLIDING, TWINS, WIDE, tiny_model

REAL = "smollm2-135m"
_SLIDING_WIDTH = 8
_SHAPES = ((4, 4), (8, 2), (1, 8), (3, 4), (16, 1), (5, 4))
"""(window, group) of the tiny models, dealt out in turn."""
_TWINS = (
    ("llama", "float32", TWINS, 4, 2),
    ("qwen3", "bfloat16", WIDE, 4, 2),
    ("gpt-neox", "float32", TWINS, 8, 1),
    ("qwen3", "float16", WIDE, 4, 2),
    ("olmo2", "float32", TWINS, 2, 4),
    ("olmo2", "bfloat16", WIDE, 8, 1),
    ("gemma3", "float32", TWINS, 4, 2),
    ("llama", "float16", WIDE, 4, 4),
)
"""Family, dtype, size, window and group of the models that disagree with themselves."""


@dataclass(frozen=True)
class Subject:
    """A model under one schedule."""

    name: str
    dtype: str
    window: int
    group: int
    capacity: int
    prefill_chunk: int
    build: Callable[[], PreTrainedModel] | None = None
    """Makes the model as Hugging Face has it; None for the real one."""
    disagrees: bool = False
    """Its fast path differs from its verifier by itself, so it is given traffic that shows it."""

    @property
    def key(self) -> str:
        return f"{self.name} {self.dtype} W{self.window} G{self.group}"

    @property
    def is_real(self) -> bool:
        return self.build is None

    @property
    def kind(self) -> str:
        """tiny, twins or real."""
        return "real" if self.is_real else "twins" if self.disagrees else "tiny"

    @cached_property
    def model(self) -> CachedLM:
        if self.build is None:
            return load_model(REAL, dtype=self.dtype, progress=False)
        return load_model(self.build())

    @cached_property
    def plain(self) -> PreTrainedModel | None:
        """Hugging Face's own copy, which nothing of ours has touched; None for the real model."""
        return self.build() if self.build else None

    @property
    def settings(self) -> dict[str, int]:
        return dict(window=self.window, group=self.group, capacity=self.capacity, prefill_chunk=self.prefill_chunk)


def tiny_subjects() -> list[Subject]:
    """Every family in every dtype, those with sliding windows also past their windows."""
    kinds = [(family, None) for family in FAMILIES] + [(family, _SLIDING_WIDTH) for family in SLIDING]
    subjects = []
    for i, (family, width) in enumerate(kinds):
        for j, dtype in enumerate(DTYPES):
            window, group = _SHAPES[(i + j) % len(_SHAPES)]
            build = partial(tiny_model, family, getattr(torch, dtype), window=width)
            name = family if width is None else f"{family}-window{width}"
            subjects.append(Subject(name, dtype, window, group, 96, 8, build))
    return subjects


def twin_subjects() -> list[Subject]:
    """Random weights too, and a vocabulary of near twins: the fast path and the verifier disagree by themselves.

    Tiny models hardly do. Another number of rows reorders the sums, which shows in the last bits of most logits in
    float32, and far less often in 16 bits, where sums are kept in float32 and rounded; a token shows it only where two
    of them are that close. So every token here has one whose unembedding differs in the last bits alone. In bfloat16
    it takes decodes of one row, in float16 decodes of any number, and products wide enough.
    """
    subjects = []
    for family, dtype, size, window, group in _TWINS:
        build = partial(tiny_model, family, getattr(torch, dtype), size=size)
        subjects.append(Subject(f"{family}-twins", dtype, window, group, 96, 8, build, disagrees=True))
    return subjects


def real_subject() -> Subject:
    """SmolLM2 in bfloat16, where batches really change the answer."""
    return Subject(REAL, "bfloat16", 4, 1, 128, 16, disagrees=True)
