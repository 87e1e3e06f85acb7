"""Lists the subjects of the stress test, models with one shape of passes each: tiny models, models with near ties, and
SmolLM2."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import NotRequired, TypedDict

import numpy as np
import torch
from transformers import PreTrainedModel

from cacheprobe.core.config import RUN_DTYPES
from cacheprobe.models.base import CachedLM
from cacheprobe.models.hf.tiny import FAMILIES, NEAR_TIES, SLIDING, WIDE, tiny_model
from cacheprobe.models.loaders import load_model

REAL = "smollm2-135m"
_SLIDING_WIDTH = 8
_MOVED = 0.02
"""Size of the noise added to a draft model's weights, as a share of each weight's standard deviation."""
_SHAPES = ((4, 4, 1), (8, 2, 2), (1, 8, 1), (3, 4, 3), (16, 1, 1), (5, 4, 2))
"""(window, group, prefill_group) of the tiny models, assigned in turn. With a window of one token, prompts are not
padded."""
_REAL_SHAPES = ((4, 1, 1, 16), (8, 2, 2, 16), (1, 16, 1, 64), (16, 4, 1, 32))
"""(window, group, prefill_group, prefill_chunk) of SmolLM2: two small shapes, the fastest verified one, the default."""
_LONGEST_WINDOW, _LARGEST_GROUP, _LARGEST_GROUP_OF_ONE = 16, 8, 24
"""Limits of the shapes that are drawn if a shape is refused; the last is the largest group for a window of one token.
"""
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
"""Family, dtype, size, window and group of the models whose fast path and verifier often disagree."""


class Shapes(TypedDict):
    """Declares the types of the keywords of `cp.run` that fix the shapes of the passes; see `EngineConfig`."""

    window: int
    group: int
    capacity: int
    prefill_chunk: int
    prefill_group: NotRequired[int]
    """Only for padded prompts; others are read as `cp.run` chooses."""
    pad_prefill: bool


@dataclass(frozen=True)
class Subject:
    """Holds one model under test with one shape of passes. The model is loaded at its first use."""

    name: str
    dtype: str
    window: int
    group: int
    capacity: int
    prefill_chunk: int
    build: Callable[[], PreTrainedModel] | None = None
    """Function that builds the model as a plain transformers module; None for SmolLM2, which is loaded by name."""
    prefill_group: int = 1
    disagrees: bool = False
    """Whether the model's fast path often differs from its verifier; such a subject gets traffic that shows the
    difference."""
    original: "Subject | None" = None
    """The subject whose shape was refused, if this one runs the same model and traffic in another shape; else None."""

    @property
    def key(self) -> str:
        """Name, dtype and shape of passes (window W, group G, prefill group P) of the subject, as one text."""
        ends = "" if self.pads_prefill else " unpadded"
        name = f"{self.name} {self.dtype}" if self.original is None else f"{self.original.key} as"
        return f"{name} W{self.window} G{self.group} P{self.prefill_group}{ends}"

    @property
    def traffic_key(self) -> str:
        """Key by which requests are drawn and counted: the `key`, or for a replacement shape that of its original."""
        return self.key if self.original is None else self.original.traffic_key

    @property
    def pads_prefill(self) -> bool:
        """Whether prompts are padded to whole chunks: True for windows of more than one token."""
        return self.window > 1

    @property
    def is_real(self) -> bool:
        """Whether the model is SmolLM2, and not a tiny model with random weights."""
        return self.build is None

    @property
    def kind(self) -> str:
        """Kind of subject, as text: "tiny", "near_ties" or "real"."""
        return "real" if self.is_real else "near_ties" if self.disagrees else "tiny"

    @cached_property
    def model(self) -> CachedLM:
        """The model as a CachedLM, loaded at the first use."""
        if self.original is not None:
            return self.original.model
        if self.build is None:
            return _real_model(self.dtype)
        # torch's products depend on the batch, so that the fast path of such a model disagrees with the verifier
        return load_model(self.build(), products="torch" if self.disagrees else "auto")

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers to capture: the first, middle and last of SmolLM2; all layers of other models."""
        n = self.model.n_layers
        return (0, n // 2, n - 1) if self.is_real else tuple(range(n))

    @cached_property
    def draft_model(self) -> CachedLM | None:
        """Draft model that often proposes the right token: the same weights with a little noise. None for SmolLM2."""
        if self.original is not None:
            return self.original.draft_model
        if self.build is None:
            return None
        noisy = self.build()
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in noisy.parameters():
                noise = torch.randn(weight.shape, generator=draw) * weight.float().std()
                weight.add_((_MOVED * noise).to(weight.dtype))
        return load_model(noisy)

    @cached_property
    def plain(self) -> PreTrainedModel | None:
        """The model as a plain transformers module, built anew with the same weights and never given to cacheprobe;
        None for SmolLM2."""
        if self.original is not None:
            return self.original.plain
        return self.build() if self.build else None

    @property
    def settings(self) -> Shapes:
        """Keywords of `cp.run` that fix the shapes of the passes, as a dict."""
        shapes = Shapes(
            window=self.window, group=self.group, capacity=self.capacity, prefill_chunk=self.prefill_chunk,
            pad_prefill=self.pads_prefill,
        )  # fmt: skip
        if self.pads_prefill:
            shapes["prefill_group"] = self.prefill_group
        return shapes


def other_shapes(subject: Subject, number: int) -> Iterator[Subject]:
    """Yields the subject in up to `number` other shapes, in an order that is random but fixed by the subject's key.

    A window of one token stays one token, and a longer window stays longer than one. So prompts stay padded or
    unpadded, and unpadded prompts are still read one a pass. For a window of one token, larger groups are allowed.
    """
    rng = np.random.default_rng([*subject.key.encode()])
    windows = range(2, _LONGEST_WINDOW + 1) if subject.window > 1 else (1,)
    shapes = [
        (window, group, prefill_group)
        for window in windows
        for group in range(1, (_LARGEST_GROUP if subject.window > 1 else _LARGEST_GROUP_OF_ONE) + 1)
        for prefill_group in ((1, 2, 3) if subject.pads_prefill else (1,))
        if (window, group, prefill_group) != (subject.window, subject.group, subject.prefill_group)
    ]
    for i in rng.permutation(len(shapes))[:number]:
        window, group, prefill_group = shapes[i]
        yield replace(subject, window=window, group=group, prefill_group=prefill_group, original=subject)


@cache
def _real_model(dtype: str) -> CachedLM:
    return load_model(REAL, dtype=dtype, progress=False)


def tiny_subjects() -> list[Subject]:
    """Returns a list of tiny subjects: each model family in float32, bfloat16 and float16; families with sliding-window
    attention also with a window of 8 tokens."""
    kinds = [(family, None) for family in FAMILIES] + [(family, _SLIDING_WIDTH) for family in SLIDING]
    subjects = []
    for i, (family, width) in enumerate(kinds):
        for j, dtype in enumerate(RUN_DTYPES):
            window, group, prefill_group = _SHAPES[(i + j) % len(_SHAPES)]
            build = partial(tiny_model, family, getattr(torch, dtype), window=width)
            name = family if width is None else f"{family}-window{width}"
            subjects.append(Subject(name, dtype, window, group, 96, 8, build, prefill_group))
    return subjects


def near_tie_subjects() -> list[Subject]:
    """Returns a list of subjects with random weights and pairs of nearly equal tokens, whose fast path and verifier
    often disagree.

    Another batch size reorders the sums, which changes the last bits of logits. A token changes only if two logits are
    that close. So every token of these models has a partner whose unembedding differs in the last bits only. In
    bfloat16 and float16 this needs wide matrices (size WIDE). In bfloat16 it also needs decode passes with a single
    request.
    """
    subjects = []
    for family, dtype, size, window, group in _NEAR_TIES:
        build = partial(tiny_model, family, getattr(torch, dtype), size=size)
        subjects.append(Subject(f"{family}-near-ties", dtype, window, group, 96, 8, build, disagrees=True))
    return subjects


def real_subjects() -> list[Subject]:
    """Returns SmolLM2 in bfloat16 as a list of subjects, one for each of four shapes of passes. Tokens that SmolLM2
    generates may change with the batch if they are not verified."""
    return [
        Subject(REAL, "bfloat16", window, group, 128, chunk, None, prefill_group, disagrees=True)
        for window, group, prefill_group, chunk in _REAL_SHAPES
    ]
