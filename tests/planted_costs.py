"""Planted costs for benchmarks: hours that pass at once, and a model as small as a test with SmolLM2's tokenizer."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cacheprobe.models.converted import commit_directory
from cacheprobe.models.known import SMOLLM2, converted_directory, smollm2_directory

HOUR = 3600.0
"""So long that what a test really computes beside it does not show in a ratio."""
LAYERS = 4


class Clock:
    """Moves `time.perf_counter` and `time.process_time` forward without waiting. Real seconds count as well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.skipped, self._monkeypatch = 0.0, monkeypatch
        for name in ("perf_counter", "process_time"):
            real = getattr(time, name)
            monkeypatch.setattr(time, name, lambda real=real: real() + self.skipped)

    def skip(self, hours: float) -> None:
        """Lets so many hours pass."""
        self.skipped += hours * HOUR

    def plant(self, owner: Any, name: str, hours: "float | Callable[..., float]") -> None:
        """Makes a function or method of `owner` take so many hours more.

        hours: a number, or a function of the arguments of the call.
        """
        setter = self._monkeypatch.setitem if isinstance(owner, dict) else self._monkeypatch.setattr
        setter(owner, name, self.costing(owner[name] if isinstance(owner, dict) else getattr(owner, name), hours))

    def costing(self, function: Callable[..., Any], hours: "float | Callable[..., float]") -> Callable[..., Any]:
        """Returns the function with this cost."""

        def costly(*args: Any, **kwargs: Any) -> Any:
            self.skip(hours(*args, **kwargs) if callable(hours) else hours)
            return function(*args, **kwargs)

        return costly


def write_small_smollm2(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `smollm2_directory` return a model of four layers, in this process and in those that it starts."""
    tokenizer_from = smollm2_directory(progress=False)
    monkeypatch.setenv("CACHEPROBE_CACHE", str(cache))

    def build(directory: Path) -> None:
        """Writes random weights, and SmolLM2's own tokenizer."""
        config = AutoConfig.from_pretrained(tokenizer_from)
        config.update(dict(hidden_size=36, intermediate_size=48, num_hidden_layers=LAYERS, head_dim=4))
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        AutoTokenizer.from_pretrained(tokenizer_from).save_pretrained(directory)

    commit_directory(build, converted_directory(SMOLLM2))
