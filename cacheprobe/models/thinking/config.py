"""Defines ThinkingConfig, the configuration of a Thinking States model, which is stored beside its weights."""

import math
from dataclasses import MISSING, asdict, dataclass, fields
from typing import ClassVar, TypedDict

from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import ModelError

POSITIONS = ("rope", "nope", "alibi")
POOLINGS = ("last", "query")

_COUNTS = (
    "d_vocab", "n_ctx", "d_model", "n_layers", "n_heads", "d_mlp", "chunk", "max_thought", "l_out", "thinking_layers",
)  # fmt: skip


class TrainingRecord(TypedDict, total=False):
    """Holds the fields of a model's training record that cacheprobe reads: command, number of parameters, CPU seconds.
    A stored record may have more."""

    command: str
    parameters: int
    cpu_seconds: float
    cpu_seconds_to_99: float | None
    cpu_seconds_to_100: float | None


@dataclass(frozen=True)
class ThinkingConfig:
    """Holds the shapes and design choices of a Thinking States model. Defaults follow the paper; choices that the paper
    leaves open are fields. T is the thinking block, C the compression block (not the sites T and C of a trace).

    Source: Thinking States (arXiv 2602.08332), section 3 and appendix A.1.

    H is the residual stream that T reads, the output of block l_out - 1; S is a chunk state (not the site S). Choices
    on which the sources are silent or disagree, one a line; those that are fields are documented there too:

    - L_in: S is added to the output of block 0, before block 1 (`l_in`), without norm, gate or scale.
    - L_out: H is the residual stream after the last block but one (`l_out`), before any norm.
    - c: 4 tokens, shorter than one operation of the coin task; the paper's value for its state tasks is not public.
    - T sees the c positions of its own chunk and no earlier chunk.
    - T has no start token: its first token is predicted at the last position of H.
    - T has its own unembedding, tied to no other weight; T and C use the backbone's embedding.
    - T decodes greedily (lowest id of equal logits) and never chooses a pad; a thought cut at `max_thought` is
    compressed as it is.
    - T and C use the backbone's kind of positions, counted from 0, and no attention window.
    - C attends in both directions (`compression_is_causal`).
    - C's pads stand in front, and no token attends to them; the first tokens of longer thoughts act through attention
    only.
    - S of the last chunk is added to the first c positions of the answer, in training and inference, and to no later
    position.
    - An incomplete last chunk of a prompt writes no thought; text prompts are padded in front to whole chunks.
    - L_LM covers the answer and its end only; both losses are sums over tokens, divided by the number of texts.
    - Backbone, T and C are trained together from GPT-2's random initialisation; gold thoughts carry no noise.
    """

    d_vocab: int
    n_ctx: int = 8192
    d_model: int = 64
    n_layers: int = 4
    n_heads: int = 4
    d_mlp: int = 192
    """Inner width of the gated MLP."""
    chunk: int = 4
    """c: tokens in a chunk, and positions that a chunk state covers."""
    l_in: int = 1
    """The chunk state is added to the input of block l_in (0-indexed): the paper's shallow injection layer."""
    l_out: int = 3
    """H is the output of block l_out - 1. With all blocks but the last in the loop, l_out = n_layers - 1."""
    max_thought: int = 8
    """Maximum tokens of a thought, including its end token; a thought without an end token by then is cut there
    (`has_ended` is False)."""
    eos_id: int = 1
    pad_id: int = 0
    thinks: bool = True
    """False: the backbone alone, without T and C; the plain variant of a comparison."""
    feeds_back: bool = True
    """False: thoughts are written and trained, but no chunk state is added; the variant without feedback."""
    think_while_decoding: bool = False
    """True: thoughts are also written for chunks that hold generated tokens. The paper's models think only during
    prefill."""
    positions: str = "rope"
    """Kind of positions in backbone, T and C; T and C count from 0. The paper does not specify this."""
    rope_theta: float = 10_000.0
    attention_window: int | None = None
    """Number of positions that a backbone token sees, including its own; None for all."""
    thinking_layers: int = 1
    compression_is_causal: bool = False
    """False: C attends in both directions, because the paper calls C an encoder."""
    pooling: str = "last"
    """How C reduces a thought to c positions. "last": its last c outputs; shorter thoughts are padded in front, and no
    token attends to the pads. "query": c learned vectors that attend over the thought."""
    learned_first_state: bool = False
    """False: S_1, the chunk state of the first chunk, is zero, as in the paper."""
    bidirectional_prefix: bool = False
    """Whether T's positions of H attend to each other in both directions. The paper's T is a causal decoder layer."""

    format: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ModelError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("eos_id", "pad_id"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < self.d_vocab:
                raise ModelError(
                    f"{name} of {value!r} is no token of a vocabulary of {self.d_vocab}; "
                    f"give one of 0 to {self.d_vocab - 1}"
                )
        if self.eos_id == self.pad_id:
            raise ModelError(f"token {self.eos_id} cannot both end a thought and pad it; declare another pad_id")
        if self.d_model % self.n_heads or (self.positions == "rope" and self.d_model // self.n_heads % 2):
            raise ModelError(
                f"d_model of {self.d_model} does not split into {self.n_heads} heads of even width; change n_heads"
            )
        if type(self.l_in) is not int or not 0 <= self.l_in < self.l_out <= self.n_layers:
            raise ModelError(
                f"need 0 <= l_in < l_out <= n_layers, got {self.l_in!r}, {self.l_out}, {self.n_layers}: the state "
                "enters before the thought is read"
            )
        if self.positions not in POSITIONS:
            raise ModelError(f"unknown positions {self.positions!r}; choose one of {', '.join(POSITIONS)}")
        if self.pooling not in POOLINGS:
            raise ModelError(f"unknown pooling {self.pooling!r}; choose one of {', '.join(POOLINGS)}")
        if type(self.rope_theta) not in (int, float) or not 0 < self.rope_theta < math.inf:
            raise ModelError(f"rope_theta must be a number above 0, got {self.rope_theta!r}")
        window = self.attention_window
        if window is not None and (type(window) is not int or window < 1):
            raise ModelError(f"attention_window must be a whole number of at least 1 or None, got {window!r}")

    @property
    def d_head(self) -> int:
        """Width of an attention head."""
        return self.d_model // self.n_heads

    def check_window(self, name: str, window: int) -> None:
        """Checks that a model called `name` can verify windows of `window` tokens. Raises: ModelError if the model
        thinks while decoding and the window is not a multiple of the chunk size."""
        if self.thinks and self.think_while_decoding and window % self.chunk:
            raise ModelError(
                f"{name} thinks while it decodes, in chunks of {self.chunk} tokens, which do not divide the window of "
                f"{window}; set window={-(-window // self.chunk) * self.chunk}"
            )

    def to_json(self) -> dict[str, object]:
        """Returns the config as a dictionary for JSON, with the number of the file format."""
        return {"format": self.format, **asdict(self)}

    @classmethod
    def from_json(cls, stored: JsonDict) -> "ThinkingConfig":
        """Returns the ThinkingConfig that a dictionary from `to_json` describes.

        Raises: ModelError for another format, an unknown field, a missing field that has no default, or an invalid
        value.
        """
        given = dict(stored)
        if (number := given.pop("format", None)) != cls.format:
            raise ModelError(f"a Thinking States config of format {number!r}; this version reads format {cls.format}")
        if unknown := sorted(set(given) - {field.name for field in fields(cls)}):
            raise ModelError(f"unknown field {unknown[0]!r} in a Thinking States config; it is of another version")
        required = [field.name for field in fields(cls) if field.default is MISSING]
        if lacking := [name for name in required if name not in given]:
            raise ModelError(f"a Thinking States config without the field {lacking[0]!r}; give it")
        return cls(**given)
