"""Defines ready metrics of gradients: functions of a text's logits that return one number with a graph."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from cacheprobe.edits.gradients.texts import GradientText

Metric: TypeAlias = Callable[[Tensor, GradientText], Tensor]
"""Function of a text's logits [n, v] and its GradientText that returns a tensor of one number."""


@dataclass(frozen=True)
class NamedMetric:
    """Holds a metric with the text that names it."""

    name: str
    function: Metric = field(repr=False)

    def __call__(self, logits: Tensor, text: GradientText) -> Tensor:
        """Returns the number of logits [n, v], as a tensor."""
        return self.function(logits, text)


def name_of(metric: Metric) -> str:
    """Returns the name of a metric for listings: its own, or that of the function."""
    return metric.name if isinstance(metric, NamedMetric) else str(getattr(metric, "__name__", type(metric).__name__))


def logit_difference(first: "str | int", second: "str | int", position: int = -1) -> NamedMetric:
    """Returns the metric of `cp.gradients` that is the logit of one token minus that of another, in the prediction at
    a position.

    first, second: tokens as text or ids.  position: of the row that predicts them; a negative one counts from the
    end.
    """

    def difference(logits: Tensor, text: GradientText) -> Tensor:
        """Returns the difference of the two logits."""
        at = logits[text.position(position)]
        return at[text.token_id(first, position)] - at[text.token_id(second, position)]

    return NamedMetric(f"logit_difference({first!r}, {second!r}, position={position})", difference)


def token_logprob(token: "str | int", position: int = -1) -> NamedMetric:
    """Returns the metric of `cp.gradients` that is the log-probability of a token in nats, in the prediction at a
    position. Arguments: as in `logit_difference`."""

    def logprob(logits: Tensor, text: GradientText) -> Tensor:
        """Returns the log-probability of the token."""
        return _wide(logits[text.position(position)]).log_softmax(-1)[text.token_id(token, position)]

    return NamedMetric(f"token_logprob({token!r}, position={position})", logprob)


def text_logprob(positions: "range | None" = None) -> NamedMetric:
    """Returns the metric of `cp.gradients` that is the log-probability in nats of the text itself: the sum over the
    tokens that were generated (of a committed text), drafted and rejected (of a rejected draft), or follow the first
    token (of a prompt).

    positions: only the predictions of the rows at these positions; by default all.
    """

    def logprob(logits: Tensor, text: GradientText) -> Tensor:
        """Returns the sum of the log-probabilities of the tokens that follow."""
        chosen = {at: token for at, token in text.following.items() if positions is None or at in positions}
        if not chosen:
            raise ValueError(f"{text}: no token follows at the positions of text_logprob; give others")
        rows, tokens = (torch.tensor(list(side), device=logits.device) for side in (chosen, chosen.values()))
        return _wide(logits[rows]).log_softmax(-1).gather(-1, tokens[:, None]).sum()

    return NamedMetric("text_logprob()" if positions is None else f"text_logprob({positions})", logprob)


def _wide(logits: Tensor) -> Tensor:
    """Returns logits in float32 at least, so that a sum over a vocabulary in 16 bits is not rounded."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
