"""Defines `SamplingParams`, how one request chooses its tokens, and the settings of a run that can be written as text:
flags of `cacheprobe run`, lines of its YAML file, and defaults of a sweep's file.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from cacheprobe.core.other_names import keyword_advice
from cacheprobe.core.values import NO_FLAG, as_flag, hint, listed, number, require_encodable, whole_number


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Holds how a request chooses its tokens. A field left at None takes the run's value, then the default.

    Order, as in Hugging Face: repetition penalty, temperature, top_k, top_p, min_p. Each of the five depends only on
    the logits and on the tokens before the position, so a rollback has no state to restore. Among equal logits the
    lower token id ranks first.
    """

    temperature: float | None = None
    """0 is greedy; otherwise logits are divided by it before keyed Gumbel noise is added. Default 0."""
    seed: int | None = field(default=None, metadata=NO_FLAG)
    """Seed of the noise. Default: derived from the run's seed and the request's index."""
    max_new_tokens: int | None = None
    """Maximum number of tokens to commit. Default 32."""
    stop_token_ids: "Iterable[int] | int | None" = field(default=None, metadata=NO_FLAG)
    """Token ids that end the request; the stop token is kept. Default: the model's own; (): none."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens. Default 0: from all."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together hold this much probability, at least one. Default 1: from all."""
    min_p: float | None = field(default=None, metadata=NO_FLAG)
    """Draw from the tokens with at least this share of the likeliest one's probability. Default 0: from all."""
    repetition_penalty: float | None = field(default=None, metadata=NO_FLAG)
    """Divides positive and multiplies negative logits of tokens in the prompt or the output. Default 1: no penalty."""
    stop: "Iterable[str] | None" = field(default=None, metadata=as_flag(tuple[str, ...] | None))
    """Texts that end the request; the token that completes one is kept as the last. Default (): none."""
    n: int | None = field(default=None, metadata=NO_FLAG)
    """Number of samples of the prompt. Each is a request with its own seed; they share one prefill. Default 1."""

    def __new__(cls, *args: object, **settings: object) -> "SamplingParams":
        for name in settings.keys() - cls.__dataclass_fields__.keys():
            if advice := keyword_advice(name, cls.__dataclass_fields__):
                raise ValueError(f"unknown sampling setting {name!r}{advice}")
            raise ValueError(
                f"{name} is no sampling setting here: what changes logits must be a function of the committed tokens "
                f"alone, so that it can be rolled back; there are {', '.join(cls.__dataclass_fields__)}"
                f"{hint(name, cls.__dataclass_fields__)}"
            )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            if getattr(self, name) is not None:  # numpy's numbers are welcome, and become Python's
                object.__setattr__(self, name, kind(name, getattr(self, name)))
        for name, (is_allowed, wanted) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not is_allowed(value):
                raise ValueError(f"{name} must be {wanted}, got {value}")
        if self.stop_token_ids is not None:
            ids = [whole_number("stop_token_ids: a token id", one, at_least=0) for one in listed(self.stop_token_ids)]
            object.__setattr__(self, "stop_token_ids", tuple(ids))
        if self.stop is not None:
            object.__setattr__(self, "stop", _stop_texts(self.stop))

    def over(self, fallback: "SamplingParams") -> "SamplingParams":
        """Returns these settings as a new SamplingParams, with the value of `fallback` for every field that is None."""
        mine = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(fallback, **{name: value for name, value in mine.items() if value is not None})

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen: temperature 0 or None."""
        return not self.temperature

    @property
    def is_plain(self) -> bool:
        """Whether logits are used unchanged, apart from the temperature: no top_k, top_p, min_p or repetition
        penalty."""
        return not self.top_k and self.top_p in (None, 1) and not self.min_p and self.repetition_penalty in (None, 1)


_KINDS = {
    "temperature": number, "seed": whole_number, "max_new_tokens": whole_number, "top_k": whole_number,
    "top_p": number, "min_p": number, "repetition_penalty": number, "n": whole_number,
}  # fmt: skip
_LIMITS = {
    "temperature": (lambda x: 0 <= x < float("inf"), "a finite number >= 0"),
    "seed": (lambda x: x >= 0, "a non-negative integer"),
    "max_new_tokens": (lambda x: x >= 1, "at least 1"),
    "top_k": (lambda x: x >= 0, "at least 0 (0 draws from all tokens)"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "min_p": (lambda x: 0 <= x <= 1, "between 0 and 1"),
    "repetition_penalty": (lambda x: 0 < x < float("inf"), "a finite number above 0"),
    "n": (lambda x: x >= 1, "at least 1"),
}


def _stop_texts(given: object) -> tuple[str, ...]:
    """Returns one stop text, or several, as a tuple. Raises: ValueError unless all are texts, not empty, in UTF-8."""
    texts = tuple(listed(given))
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop must hold texts of at least one character, got {given!r:.60}")
        require_encodable("stop", text)
    return texts


DEFAULT_SAMPLING = SamplingParams(
    temperature=0.0, max_new_tokens=32, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, stop=(), n=1
)
"""Sampling settings of a request, if neither the request nor the run gives them."""


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Holds the flags of `cacheprobe run` that `cp.load_model` takes."""

    model: str = "smollm2-135m"
    """"smollm2-135m", a hub name or a local directory."""
    dtype: str = "auto"
    """auto (that of the model's files), float32, bfloat16, float16 or float64."""
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
    """Holds the flags of `cacheprobe run` that are keywords of `cp.run`. Its other flags are the settings of
    EngineConfig, SamplingParams and CaptureConfig."""

    drafter: str | None = None
    """NAME or NAME:key=value,... such as early_exit:layer=20. Without one, only deterministic requests are verified."""
    deterministic: float = 0.0
    """Fraction of the requests that are deterministic."""
    lens: Literal["logit", "later"] = "logit"
    """later: record S during the run; the logit lens reads Z when a table or view of the run is first made with its
    model."""
    seed: int = 0
    """Seed of the task's examples and of the sampling noise."""
