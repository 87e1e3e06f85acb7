"""What a Thinking States model is made of: one frozen record, stored beside its weights."""

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from cacheprobe.models.base import ModelError

POSITIONS = ("rope", "nope", "alibi")
POOLINGS = ("last", "query")


@dataclass(frozen=True)
class ThinkingConfig:
    """Shapes and choices. What the paper says is the default; what it leaves open is a field with our choice.

    Source: Thinking States (arXiv 2602.08332), section 3 and appendix A.1.
    """

    d_vocab: int
    n_ctx: int = 8192
    d_model: int = 64
    n_layers: int = 4
    n_heads: int = 4
    d_mlp: int = 192
    """Inner width of the gated MLP."""
    chunk: int = 4
    """c: tokens of a chunk, and rows of a state."""
    l_in: int = 1
    """The state is added to what enters block l_in (0-indexed): the paper's shallow injection layer."""
    l_out: int = 3
    """H is what leaves block l_out - 1: with all blocks but the last in the loop, l_out = n_layers - 1."""
    max_thought: int = 8
    """Tokens of a thought at most, its end included; one that has not ended by then stops there and is marked so."""
    eos_id: int = 1
    pad_id: int = 0
    thinks: bool = True
    """False: the backbone alone, without T and C; the plain arm of a comparison."""
    feeds_back: bool = True
    """False: thoughts are written and trained, and no state is added: the arm without feedback."""
    think_while_decoding: bool = False
    """The paper's models think while the prompt is read. True: also over chunks that hold generated tokens."""
    positions: str = "rope"
    """Of backbone, T and C alike; T and C count from 0. The paper does not say."""
    rope_theta: float = 10_000.0
    attention_window: int | None = None
    """Positions that a token of the backbone sees, its own included; None for all."""
    thinking_layers: int = 1
    compression_is_causal: bool = False
    """The paper calls C an encoder, so it attends both ways."""
    pooling: str = "last"
    """How C makes c rows: "last", its last c outputs, a shorter thought being padded in front, and the pads attended by
    nobody; "query", c learned rows that attend over the thought."""
    learned_first_state: bool = False
    """The paper's S_1 is zero."""
    bidirectional_prefix: bool = False
    """Whether T's rows of H see each other both ways. The paper's T is a causal decoder layer."""

    format: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for name in ("d_vocab", "n_ctx", "d_model", "n_layers", "n_heads", "d_mlp", "chunk", "max_thought"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ModelError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.d_model % self.n_heads or (self.positions == "rope" and self.d_model // self.n_heads % 2):
            raise ModelError(
                f"d_model of {self.d_model} does not split into {self.n_heads} heads of even width; change n_heads"
            )
        if not 0 <= self.l_in < self.l_out <= self.n_layers:
            raise ModelError(
                f"need 0 <= l_in < l_out <= n_layers, got {self.l_in}, {self.l_out}, {self.n_layers}: the state enters "
                "before the thought is read"
            )
        if self.positions not in POSITIONS:
            raise ModelError(f"unknown positions {self.positions!r}; choose one of {', '.join(POSITIONS)}")
        if self.pooling not in POOLINGS:
            raise ModelError(f"unknown pooling {self.pooling!r}; choose one of {', '.join(POOLINGS)}")
        if self.attention_window is not None and self.attention_window < 1:
            raise ModelError(f"attention_window must be at least 1 or None, got {self.attention_window}")

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    def to_json(self) -> dict[str, Any]:
        return {"format": self.format, **asdict(self)}

    @classmethod
    def from_json(cls, held: dict[str, Any]) -> "ThinkingConfig":
        """Raises: ModelError for another format, or for a field that this version does not know."""
        given = dict(held)
        if (found := given.pop("format", None)) != cls.format:
            raise ModelError(f"a Thinking States config of format {found!r}; this version reads format {cls.format}")
        if unknown := sorted(set(given) - {field.name for field in fields(cls)}):
            raise ModelError(f"unknown field {unknown[0]!r} in a Thinking States config; it is of another version")
        return cls(**given)
