"""Defines the record of a thought that a Thinking States model wrote for one cache row."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowThought:
    """Holds a thought that a Thinking States model wrote for one cache row (one sequence): its tokens,
    log-probabilities and chunk state."""

    cache_row: int
    end: int
    """Absolute position of the last token of the chunk that the thought was computed from."""
    token_ids: tuple[int, ...]
    has_ended: bool
    """False if the thought was cut at the length limit."""
    logprobs: tuple[float, ...]
    """Log-probability of each thought token, in nats."""
    first_logits: Tensor
    """Logits [v] of the first thought token."""
    state: Tensor
    """The chunk state [c, m], which is added to the input of block l_in at the positions of the next chunk."""
