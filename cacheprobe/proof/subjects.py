"""What is put to the test: tiny models of every family and dtype, and the real one; each with the shapes it runs in."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from cacheprobe.config import DTYPES
from cacheprobe.models.base import CachedLM
from cacheprobe.models.loaders import load_model
from cacheprobe.models.tiny import FAMILIES, SLIDING, VOCAB, tiny_model

REAL = "smollm2-135m"
_SLIDING_WIDTH = 8
_SHAPES = ((4, 2), (8, 1), (1, 4), (3, 2), (16, 1))
"""(window, group) of the tiny models, dealt out in turn."""


@dataclass(frozen=True)
class Subject:
    """A model under one schedule."""

    name: str
    dtype: str
    window: int
    group: int
    capacity: int
    prefill_chunk: int
    build: Callable[[], CachedLM]
    plain_family: tuple[str, int | None] | None = None
    """(family, sliding width) of a tiny model, to build Hugging Face's own copy of it."""

    @property
    def key(self) -> str:
        return f"{self.name} {self.dtype} W{self.window} G{self.group}"

    @property
    def is_real(self) -> bool:
        return self.plain_family is None

    @cached_property
    def model(self) -> CachedLM:
        return self.build()

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

            def build(family: str = family, width: int | None = width, dtype: str = dtype) -> CachedLM:
                return load_model(tiny_model(family, getattr(torch, dtype), window=width))

            name = family if width is None else f"{family}-window{width}"
            subjects.append(Subject(name, dtype, window, group, 96, 8, build, (family, width)))
    return subjects


def real_subject() -> Subject:
    """SmolLM2 in bfloat16, where batches really change the answer."""
    return Subject(REAL, "bfloat16", 4, 2, 128, 32, lambda: load_model(REAL, dtype="bfloat16", progress=False))


__all__ = ["REAL", "VOCAB", "Subject", "real_subject", "tiny_subjects"]
