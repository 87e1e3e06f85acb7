"""Inserts states into a prompt at one position, each at a layer of its own, and continues the forward pass.

The positions before are computed once, for all states. The prompt's tokens from the position on are computed in batches
of states."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.recurrent import copy_prefix
from cacheprobe.kvcache.staged import PassAttention
from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import feed
from cacheprobe.ops.attention import AttentionSpans, spans_of_positions

IDENTITY_PROMPT = "cat->cat; 1135->1135; hello->hello; ?"
"""The token identity prompt of Ghandeharioun et al. 2024 (arXiv 2401.06102), section 4.1. The state is inserted at the
last token."""

HEIGHT = 96
"""Number of states that one pass computes together. The lens fills up a smaller batch, so that the bits of a state do
not depend on the number of other states."""


class Residuals(NamedTuple):
    """Holds the residual streams that one batch of inserted states leads to."""

    places: Tensor
    """[k]: which of the given states these are."""
    last: Tensor
    """[k, m]: the residual stream after the last layer, at the prompt's last position."""


@dataclass(frozen=True, eq=False)
class TargetPrompt:
    """Holds a prompt into which states are inserted at one position, and a cache that a batch of states shares."""

    model: CachedLM
    token_ids: tuple[int, ...]
    position: int
    cache: KVCache
    """Each row holds the positions before `position`, and room for the rest and for new tokens."""

    @classmethod
    def of(
        cls, model: CachedLM, token_ids: Sequence[int], position: int, height: int = HEIGHT, new_tokens: int = 1
    ) -> "TargetPrompt":
        """Returns a TargetPrompt; runs the prompt up to the position once.

        model: from `models.paths.usable`.  height: number of states in a batch.  new_tokens: how many tokens
        `continued` may generate.
        """
        length = len(token_ids) + new_tokens - 1
        cache = model.new_cache(height, length)
        cache.allocate()
        if position:
            prefix = model.new_cache(1, length)
            feed(model, torch.tensor([list(token_ids[:position])]), cache=prefix, logit_slots=[0])
            copy_prefix(prefix, cache, position)
        return cls(model, tuple(token_ids), position, cache)

    @property
    def suffix(self) -> tuple[int, ...]:
        """Token ids from the position on, which are computed again for every state."""
        return self.token_ids[self.position :]

    def run(self, token_ids: Tensor, start: int, num_layers: int | None) -> Tensor:
        """Runs token_ids [height, t] from position `start` on, each batch index by itself if the model can. Returns the
        residual stream [height, t, m] after `num_layers`, or if it is None the logits [height, 1, v] of the last."""
        height, width = token_ids.shape
        pieces = spans_of_positions(start, width, self.cache.capacity)
        spans = AttentionSpans(tuple(repeat(pieces, height))) if self.model.attends_by_request else None
        slots = None if num_layers is not None else [width - 1]
        attention = PassAttention(spans=spans)
        return self.model.forward(
            token_ids,
            self.cache,
            range(height),
            [start] * height,
            num_layers=num_layers,
            logit_slots=slots,
            attention=attention,
        )


def inserted(target: TargetPrompt, states: Float[Tensor, "n m"], layers: Int[Tensor, "n"]) -> Iterator[Residuals]:
    """Inserts each state into the prompt after its layer in `layers`; yields Residuals, batch by batch. The newest
    batch is in `target.cache`, until the next is asked for.

    A state's residual stream does not depend on the other states. At the last position of the prompt, a state that is
    inserted after the last layer is its own residual stream, with the same bits.
    Source: Ghandeharioun et al. 2024 (arXiv 2401.06102), section 3.
    Twin: tests.twins.lenses_slowly.inserted_slowly, close(1e-5) in float32.
    """
    height, n_layers = target.cache.rows, target.model.n_layers
    token_ids = torch.tensor([target.suffix] * height)
    for indices in torch.arange(len(states)).split(height):
        # a smaller last batch is padded with its last state, so that every batch has the same shape and bits
        padded = torch.cat([indices, indices[-1:].expand(height - len(indices))])
        given, at = states[padded.to(states.device)], layers.cpu()[padded]
        with target.model.editing(*_edits(given, at)):
            last = target.run(token_ids, target.position, n_layers)[:, -1].to(states.device)
        if len(target.suffix) == 1:  # nothing follows the last layer: the state as given, not in the model's dtype
            last = torch.where((at == n_layers - 1).to(last.device)[:, None], given, last)
        yield Residuals(indices, last[: len(indices)])


def continued(target: TargetPrompt, first: Sequence[int], count: int) -> list[list[int]]:
    """Returns the `count` likeliest tokens, one after the other, that follow the prompt for the batch of states that
    `inserted` has yielded last. A stop token does not end a list.

    first: the first token of each state, which the batch has predicted.
    Twin: tests.twins.lenses_slowly.continued_slowly.
    """
    height, texts = target.cache.rows, [[token_id] for token_id in first]
    for start in range(len(target.token_ids), len(target.token_ids) + count - 1):
        newest = torch.tensor([text[-1:] for text in texts] + [[0]] * (height - len(texts)))
        logits = target.run(newest, start, None)[: len(texts), 0]
        best = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)  # the lowest id of equal logits
        for text, token_id in zip(texts, best.tolist(), strict=True):
            text.append(token_id)
    return texts


def _edits(states: Tensor, layers: Tensor) -> tuple[list[tuple[str, int]], Callable[[str, int, Tensor], Tensor | None]]:
    """Returns (places, edit) for `CachedLM.editing`: batch index i gets states[i] after layer layers[i], at the first
    token slot."""
    indices = {layer: (layers == layer).nonzero()[:, 0] for layer in sorted(set(layers.tolist()))}

    def edit(site: str, layer: int, value: Tensor) -> Tensor:
        """Returns the activation with the states of this layer."""
        value, index = value.clone(), indices[layer]
        value[index.to(value.device), 0] = states[index.to(states.device)].to(value.device, value.dtype)
        return value

    return [("S", layer) for layer in indices], edit


LinearMap: TypeAlias = "Callable[[Tensor], Tensor] | Tensor | nn.Linear"
"""Map from source states [n, m] to target states [n, k]: a function, a matrix [k, m], or a linear module."""


def mapped(
    states: Float[Tensor, "n m"], linear_map: "LinearMap | None", model: CachedLM, source: str
) -> Float[Tensor, "n k"]:
    """Returns the states [n, k] after the map, in the dtype and on the device of the model that reads them.

    source: names the states in messages, such as "those of the trace".
    Raises: ValueError for states of another width than the map's or, after it, than the model's.
    """
    wide = states if states.dtype == torch.float64 else states.float()
    found: object = wide
    try:
        if isinstance(linear_map, nn.Linear):
            found = linear_map(wide.to(linear_map.weight.device, linear_map.weight.dtype))
        elif isinstance(linear_map, Tensor):
            found = wide.to(linear_map.device) @ linear_map.to(wide.dtype).T
        elif linear_map is not None:
            found = linear_map(wide.clone())
    except RuntimeError as error:
        raise ValueError(f"linear_map does not take {source}, of width {states.shape[1]}: {error!s:.120}") from error
    if not isinstance(found, Tensor) or found.shape != (len(states), model.d_model):
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        remedy = "" if linear_map is not None else "; give a linear_map between the two models"
        raise ValueError(
            f"states for {model.name} must be {[len(states), model.d_model]}, "
            f"{'the linear_map gave' if linear_map is not None else f'{source} are'} {got}{remedy}"
        )
    return found.detach().to(model.device, model.dtype)
