"""Defines the settings of a run that can be written as text: flags of `cacheprobe run`, and lines of its YAML file.

Each field is a flag; its docstring is the flag's help. Names are those of `cp.load_model` and `cp.run`. A sweep's file
takes its defaults from here.
"""

from dataclasses import dataclass
from typing import Literal

from cacheprobe.core.config import CaptureConfig, EngineConfig


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Holds the flags of `cacheprobe run` that `cp.load_model` takes."""

    model: str = "smollm2-135m"
    """"smollm2-135m", a hub name or a local directory."""
    dtype: str = "bfloat16"
    """float32, bfloat16, float16 or float64."""
    device: str | None = None
    """cpu, cuda or cuda:1; the CPU by default."""
    adapter: str | None = None
    """A LoRA adapter to merge: coin-flip, or a directory."""
    products: Literal["auto", "torch"] = "auto"
    """auto: loops compiled for this processor compute matrix products and Z where they are faster than torch's."""
    prepend_bos: bool = False
    """Put the tokenizer's start token in front of every prompt text that does not begin with it."""
    think_while_decoding: bool | None = None
    """Let a Thinking States model also think about generated tokens; the window must be a whole number of chunks."""


@dataclass(frozen=True, kw_only=True)
class PromptFlags:
    """Holds the flags of `cacheprobe run` that say what the model reads: texts, or examples of a task."""

    prompt: tuple[str, ...] = ()
    """A prompt's text, or several."""
    task: str | None = None
    """NAME or NAME:key=value,... of a task, such as coin_flip or variables:updates=3,modulus=7, instead of prompts."""
    n: int = 8
    """Examples of the task."""
    people: int | None = None
    """Number of people who flip or keep the coin, in a coin task."""
    flip_probability: float | None = None
    """Chance that a person flips the coin, in a coin task."""
    shots: int | None = None
    """Worked examples in front of each question, in tasks that have them."""
    chat: bool | None = None
    """Use the model's chat template, in tasks that have it."""

    def require_one_source(self) -> None:
        """Checks that either prompts or a task are given, not both. Raises: ValueError otherwise."""
        if bool(self.prompt) == (self.task is not None):
            raise ValueError("give either --prompt (once or more) or --task, such as --task coin_flip")

    @property
    def task_settings(self) -> dict[str, object]:
        """Settings of the task that were given as flags, as a dict by name; unset ones are left out."""
        named = {name: getattr(self, name) for name in ("people", "flip_probability", "shots", "chat")}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Holds the flags of `cacheprobe run` from which the arguments of `cp.run` are made."""

    drafter: str | None = None
    """NAME or NAME:key=value,... such as early_exit:layer=20. Without one, only deterministic requests are verified."""
    window: int | None = None
    """Token positions of a verify pass for each request; by default 16 with a drafter, and 1 without one on a CPU."""
    group: int | None = None
    """Requests of a verify pass; by default chosen for model and machine."""
    deterministic: float = 0.0
    """Fraction of the requests that are deterministic."""
    determinism: Literal["verify", "invariant"] = "verify"
    """How these get their bits: decided by a verifier, or by passes of any number of requests, if their bits allow."""
    capture: str = str(CaptureConfig.sites)
    """Sites to keep: letters of S (residual stream), T (attention output), C (MLP output) and Z (lens readings)."""
    lens: Literal["logit", "later"] = "logit"
    """later: record S during the run; the logit lens reads Z when a table or view of the run is first made with its
    model."""
    heads: tuple[str, ...] = ()
    """Head activations to keep: one or more of q, k, v, z and pattern."""
    layers: tuple[int, ...] = ()
    """Layers to keep, such as 0 15 29; all by default."""
    statuses: tuple[str, ...] = ()
    """Statuses of the rows whose states are kept: one or more of committed, superseded, rolled_back (rejected draft
    tokens), given_up; all by default."""
    every: int = CaptureConfig.every
    """Keep states of positions that are multiples of this number."""
    capture_dtype: str | None = None
    """dtype of kept states: float32, bfloat16, float16, float64 or int8; the model's by default."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Number of most likely tokens to draw from; 0 for all."""
    top_p: float = 1.0
    """Draw from the most likely tokens whose probabilities sum to this."""
    stop: tuple[str, ...] = ()
    """A text that ends a request, or several."""
    max_new_tokens: int = 32
    """Largest number of tokens to generate for a prompt."""
    seed: int = 0
    """Seed of the task's examples and of the sampling noise."""
    capacity: int | None = None
    """Cache slots of each request; by default what the longest request needs."""
    max_batch: int = EngineConfig.max_batch
    """Requests in flight at once; the others wait."""
    max_kv_tokens: int | None = EngineConfig.max_kv_tokens
    """Cache slots in use at once; if the running requests need more, the newest is preempted and resumed later. No
    limit by default."""
