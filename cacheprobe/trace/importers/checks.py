"""Compares imported states and logits with those of a loaded model, before they are used.

The model reads the text of every request, and every state and every row of logits is compared. So states or logits
that were exchanged between requests, passes, layers or tokens are found, unless they differ by less than rounding.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cacheprobe.models.base import CachedLM
from cacheprobe.models.experts.sites import layers_of
from cacheprobe.models.feeding import feed
from cacheprobe.trace.importers.common import Generation, ImportRefused

_CLOSE, _CLOSE_IN_16_BITS = 1e-3, 0.1
"""Largest accepted distance of a state from the model's own, as a share of its length. In float32, sums in another
order move a state by 1e-6 to 1e-4. In 16 bits, rounding moves it by some hundredths; the block before or after it, or
another token, moves it by some tenths."""
_OUTLIER = 5
"""A few states of many lie farther away: up to this many times `_CLOSE`, as a share of their distance from the middle
of the layer's states. In a mixture of experts, where rounding may choose another expert, they may be as far away as
that middle. Another token's state lies farther away."""
_DECIDEDLY = 3
"""A state belongs to another token or layer if it lies this many times nearer to that one's own state."""
_LOGITS = -1
"""Stands for a layer's number where logits are compared."""
_ROWS = 256
"""Number of tokens of a text that are computed in one pass."""


def require_states_of(model: CachedLM, generations: Sequence[Generation]) -> None:
    """Checks that all imported states and logits are those of `model`, which reads the text of every request.

    Raises: ImportRefused for another width, for tokens outside the vocabulary or beyond the context, for a layer that
    the model does not have, and for states or logits of another request, position or layer, or of other weights. The
    message names the nearest state of the model.
    """
    for number, one in enumerate(generations):
        if bad := [token for token in (*one.prompt, *one.generated) if not 0 <= token < model.d_vocab]:
            raise ImportRefused(
                f"request {number}: token id {bad[0]} is outside the vocabulary of {model.name}, {model.d_vocab}"
            )
        if one.num_rows > model.n_ctx:
            raise ImportRefused(
                f"request {number} has states of {one.num_rows} tokens, more than the context of {model.name}, "
                f"{model.n_ctx}, so they cannot be compared"
            )
        widths = {states.shape[1] for states in one.read(0, 1).values()}
        if widths != {model.d_model}:
            raise ImportRefused(
                f"states are {', '.join(map(str, widths))} wide, those of {model.name} {model.d_model}; give the model "
                "that ran"
            )
        if (highest := max(one.layers)) >= model.n_layers:
            raise ImportRefused(
                f"states of layer {highest} were given; {model.name} has layers 0 to {model.n_layers - 1}"
            )
    for number, one in enumerate(generations):
        _require_request(model, number, one)


def _require_request(model: CachedLM, number: int, one: Generation) -> None:
    """Compares all states and logits of one request with those of a forward over its text. Raises: ImportRefused."""
    text, first = [*one.prompt, *one.generated], len(one.prompt) - 1
    read_logits = one.read_logits
    some = [*one.read(0, 1).values(), *([read_logits(0, 1)] if read_logits is not None else [])]
    check = _RequestCheck(model, number, close_to(model, some))
    sites, cache = [("S", layer) for layer in range(model.n_layers)], model.new_cache(1, one.num_rows)
    for start in range(0, one.num_rows, _ROWS):
        end = min(start + _ROWS, one.num_rows)
        choosing = range(max(first, start), end if read_logits is not None else start)
        slots = [position - start for position in choosing] or [0]
        fed = feed(model, torch.tensor([text[start:end]]), sites, start=start, cache=cache, logit_slots=slots)
        ours = {layer: fed.states["S", layer][0] for layer in range(model.n_layers)}
        for layer, states in one.read(start, end).items():
            check.add(start, layer, states, ours)
        if read_logits is not None and choosing:
            logits = read_logits(choosing.start - first, choosing.stop - first)
            check.add(choosing.start, _LOGITS, _centred(logits), {_LOGITS: _centred(fed.out[0])})
    check.finish()


def _centred(logits: Tensor) -> Tensor:
    """Returns logits [n, v] without their mean, which changes no probability."""
    return logits.float() - logits.float().mean(-1, keepdim=True)


def close_to(model: CachedLM, given: Iterable[Tensor]) -> float:
    """Returns the largest accepted distance of states from those of `model`, as a share of their length: that of 16
    bits if the model or one of the given tensors is in 16 bits, or holds only numbers that 16 bits can hold."""
    half = (torch.bfloat16, torch.float16)
    is_rounded = [torch.equal(one.to(kind).to(one.dtype), one) for one in given for kind in half]
    return _CLOSE_IN_16_BITS if model.dtype in half or any(is_rounded) else _CLOSE


def typical_share(theirs: Tensor, ours: Tensor) -> float:
    """Returns the median distance between the states [n, m] of a token, as a share of the length of `ours`."""
    return float(((theirs - ours).float().norm(dim=-1) / ours.float().norm(dim=-1).clamp(min=1e-30)).median())


@dataclass
class _RequestCheck:
    """Compares states of one request, part by part, with the model's."""

    model: CachedLM
    request: int
    limit: float
    """See `_CLOSE`."""
    middles: dict[int, Tensor] = field(default_factory=dict)
    """By layer, [m]: the middle of the model's states at the first tokens."""
    shares: dict[int, list[Tensor]] = field(default_factory=dict)
    """By layer, of each part: the distances of the given states, as shares of the length of the model's."""

    def add(self, start: int, layer: int, given: Tensor, own_states: Mapping[int, Tensor]) -> None:
        """Compares states [n, m] that were given for the tokens from position `start` on.

        own_states: by layer, [n, m]: the model's states of the same tokens.
        Raises: ImportRefused for one that lies too far away, or decidedly nearer to the model's state of another layer
        or another of these tokens.
        """
        own = own_states[layer].float()
        given = given.float().to(own.device)
        distance, length = (given - own).norm(dim=-1), own.norm(dim=-1).clamp(min=1e-30)
        self.shares.setdefault(layer, []).append(distance / length)
        middle = self.middles.setdefault(layer, own.median(0).values)
        outlier = 1 if layers_of(self.model) else _OUTLIER * self.limit
        allowed = torch.maximum(self.limit * length, outlier * (own - middle).norm(dim=-1))
        for row in torch.nonzero(~(distance <= self.limit / 2 * length))[:, 0].tolist():
            of_rows = (own - given[row]).norm(dim=-1)
            of_rows[row] = torch.inf
            nearest = int(of_rows.argmin())
            others = [(float(of_rows[nearest]), f"its position {start + nearest}")]
            others += [
                (float((states[row].float() - given[row]).norm()), f"its layer {number}")
                for number, states in own_states.items()
                if number != layer
            ]
            near, where = min(others)
            if not distance[row] <= allowed[row] or near < distance[row] / _DECIDEDLY:
                text = f", and {near / float(length[row]):.2f} from {where}" if len(own) + len(others) > 2 else ""
                raise self._refusal(f"position {start + row}: ", layer, float(distance[row] / length[row]), text)

    def finish(self) -> None:
        """Checks the typical distance of each layer's states. Raises: ImportRefused."""
        for layer, parts in self.shares.items():
            limit = self.limit * (2 if layer == _LOGITS else 1)  # the unembedding enlarges what rounding did
            if not (typical := float(torch.cat(parts).median())) <= limit:
                raise self._refusal("half of the ", layer, typical, "")

    def _refusal(self, which: str, layer: int, share: float, nearest: str) -> ImportRefused:
        """Returns the error about states at this distance from the model's."""
        what = "logits that were given" if layer == _LOGITS else f"states that were given as layer {layer}"
        away = f"{share:.{2 if share >= 0.01 else 4}f}"
        return ImportRefused(
            f"request {self.request}, {which}{what} lie {away} of their length away from those of {self.model.name} "
            f"({self.limit} at most){nearest}; give the model that ran, with its dtype=, and the layers and states as "
            "they were kept"
        )
