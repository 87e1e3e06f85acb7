"""Compares imported states and logits with those of a loaded model, before they are used.

The model reads the text of every request, and every state and every row of logits is compared: with the model's own,
and with its own of other layers, tokens and requests. So states or logits that were exchanged are found, unless they
differ by less than rounding.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cacheprobe.models.base import CachedLM
from cacheprobe.models.experts import layers_of
from cacheprobe.models.feeding import feed
from cacheprobe.trace.importers.common import Generation, ImportRefused

_CLOSE, _CLOSE_IN_16_BITS = 1e-3, 0.1
"""Largest accepted distance of a state from the model's own, as a share of its length. In float32, sums in another
order move a state by 1e-6 to 1e-4. In 16 bits, rounding moves it by some hundredths; the block before or after it, or
another token, moves it by some tenths."""
_OUTLIER = 5
"""A few states of many lie farther away: up to this many times `_CLOSE`, as a share of their distance from the middle
of the layer's states. In a mixture of experts in 16 bits, where rounding may choose another expert, they may be as far
away as that middle. Another token's state lies farther away."""
_DECIDEDLY = 3
"""A state farther away than half of `_CLOSE` belongs to another token or layer if it lies this many times nearer to
that one's own state."""
_NEARER = 2.0
"""States of several tokens belong to another request or layer if their squared distances from that one's are on average
this many times smaller. Rounding leaves them larger: 0.4 times smaller at most, measured in bfloat16."""
_SEVERAL = 3
_NEARER_ALONE = 16.0
"""The same for a single token: rounding that a model enlarges (4 times smaller was measured), or that chooses another
expert, may bring one near to another request's."""
_TOLD_APART = 0.02
"""Two own states nearer to each other than this share of `_CLOSE` are not told apart."""
_TOGETHER, _TOKENS_TOGETHER = 128, 65_536
"""Each request is compared with this many before it, as long as they hold no more tokens than this."""
_SKETCH = 64
"""Numbers by which requests are compared with each other: so many random sums of each state."""
_LOGITS = -1
"""Stands for a layer's number where logits are compared."""
_ROWS = 256
"""Number of tokens of a text that are computed in one pass."""


def require_numbers(generations: Sequence[Generation]) -> None:
    """Checks that the states of all tokens, not those of padding, are floating-point numbers, and neither NaN nor
    infinite. Raises: ImportRefused."""
    for one in generations:
        for start in range(0, one.num_rows, _ROWS):
            for layer, states in one.read(start, min(start + _ROWS, one.num_rows)).items():
                what = f"{one.name}: states of layer {layer} at positions from {start} are"
                if not states.is_floating_point():
                    raise ImportRefused(
                        f"{what} {states.dtype}; expected floating-point numbers, as the model computed them"
                    )
                if not bool(torch.isfinite(states).all()):
                    raise ImportRefused(
                        f"{what} NaN or infinite; generate again, for example in float32 or with another kind of "
                        "attention"
                    )


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
    recent = deque[_Sketch](maxlen=_TOGETHER)
    for number, one in enumerate(generations):
        newest = _require_request(model, number, one)
        for earlier in recent:
            _require_nearest(newest, earlier)
            _require_nearest(earlier, newest)
        recent.append(newest)
        while sum(len(sketch.text) for sketch in recent) > _TOKENS_TOGETHER:
            recent.popleft()


class _Sketch(NamedTuple):
    """Holds a few sums of each state of a request, by which it is compared with other requests."""

    text: Tensor
    """Token ids [t]."""
    prompt: int
    """Number of tokens of the prompt."""
    given: Tensor
    own: Tensor
    """[l, t, s]: sums of the given states, and of the model's. The last of l is that of logits, 0 where none are."""
    length: Tensor
    """[l, t]: lengths of the model's states; 1 where logits are 0."""
    check: "_RequestCheck"


def _require_request(model: CachedLM, number: int, one: Generation) -> _Sketch:
    """Compares all states and logits of one request with those of a forward over its text. Raises: ImportRefused."""
    text, first = [*one.prompt, *one.generated], len(one.prompt) - 1
    read_logits = one.read_logits
    some = [*one.read(0, 1).values(), *([read_logits(0, 1)] if read_logits is not None else [])]
    check = _RequestCheck(model, number, one.layers, close_to(model, some))
    sites, cache = [("S", layer) for layer in range(model.n_layers)], model.new_cache(1, one.num_rows)
    shape, width = (len(one.layers) + 1, one.num_rows), min(_SKETCH, model.d_model)
    given, own, length = torch.zeros(*shape, width), torch.zeros(*shape, width), torch.ones(shape)
    for start in range(0, one.num_rows, _ROWS):
        end = min(start + _ROWS, one.num_rows)
        choosing = range(max(first, start), end if read_logits is not None else start)
        slots = [position - start for position in choosing] or [0]
        fed = feed(model, torch.tensor([text[start:end]]), sites, start=start, cache=cache, logit_slots=slots)
        ours = {layer: fed.states["S", layer][0].float().cpu() for layer in range(model.n_layers)}
        theirs = {layer: states.float() for layer, states in one.read(start, end).items()}
        for layer, states in theirs.items():
            check.add(start, layer, states, ours)
        every = _sketched(torch.stack([*ours.values()]), width)
        given[:-1, start:end] = _sketched(torch.stack([theirs[layer] for layer in one.layers]), width)
        own[:-1, start:end] = every[list(one.layers)]
        length[:-1, start:end] = torch.stack([ours[layer].norm(dim=-1) for layer in one.layers])
        check.add_layers(given[:-1, start:end], every, length[:-1, start:end])
        if read_logits is not None and choosing:
            logits = _centred(read_logits(choosing.start - first, choosing.stop - first))
            mine, rows = _centred(fed.out[0].cpu()), slice(choosing.start, choosing.stop)
            if logits.shape != mine.shape:
                raise ImportRefused(
                    f"request {number}: logits of {logits.shape[1]} tokens were given, and {model.name} computes those "
                    f"of {mine.shape[1]}; give the model that ran, and its logits as they were kept"
                )
            check.add(choosing.start, _LOGITS, logits, {_LOGITS: mine})
            given[-1, rows], own[-1, rows] = _sketched(logits, width), _sketched(mine, width)
            length[-1, rows] = mine.norm(dim=-1)
    check.finish()
    return _Sketch(torch.tensor(text), len(one.prompt), given, own, length.clamp(min=1e-30), check)


def _sketched(states: Tensor, width: int) -> Tensor:
    """Returns `width` random sums of each state [..., m]; the states themselves if they are not longer. The distances
    between the results are about those between the states."""
    if states.shape[-1] <= width:
        return states
    draw = torch.Generator().manual_seed(0)
    return states @ (torch.randn(states.shape[-1], width, generator=draw) / width**0.5)


def _require_nearest(one: _Sketch, other: _Sketch) -> None:
    """Checks that no token, layer or part of a request is nearer to another request's own states and logits, at the
    same position or as many tokens after the prompt. Raises: ImportRefused."""
    check = one.check
    for shift in {0, one.prompt - other.prompt}:
        start, end = max(shift, 0), min(one.own.shape[1], other.own.shape[1] + shift)
        differ = torch.nonzero(one.text[start:end] != other.text[start - shift : end - shift])[:, 0]
        if not len(differ):
            continue
        start += int(differ[0])  # texts that are equal so far have equal states
        length = one.length[:, start:end, None]
        given, own = one.given[:, start:end] / length, one.own[:, start:end] / length
        theirs = other.own[:, start - shift : end - shift] / length
        gap, near, far = ((a - b).square().sum(-1) for a, b in ((own, theirs), (given, theirs), (given, own)))
        has_both = (own != 0).any(-1) & (theirs != 0).any(-1)  # most positions have no logits
        told = has_both & (gap > (_TOLD_APART * check.limit) ** 2)
        both = torch.stack([near, far]).where(told, 0)
        of_tokens = both[:, :-1].sum(1)
        for what, (near, far) in (("states", of_tokens), ("logits", both[:, -1])):
            if len(found := torch.nonzero(near * _NEARER_ALONE < far)):
                raise _refusal(one, other, f"position {start + int(found[0])}: {what}")
        shares, of_tokens = (far / (near + far) for near, far in (both, of_tokens))  # NaN where nothing is told apart
        is_prompt = torch.arange(start, end) < one.prompt
        parts = torch.stack([*shares, *(of_tokens.where(which, torch.nan) for which in (is_prompt, ~is_prompt))])
        names = [*(f"states of layer {layer}" for layer in check.layers), "logits", "states of the prompt"]
        is_theirs = (parts.nanmean(1) > _NEARER / (1 + _NEARER)) & ((~parts.isnan()).sum(1) >= _SEVERAL)
        if len(found := torch.nonzero(is_theirs)):
            raise _refusal(one, other, [*names, "states of the generated tokens"][int(found[0])])


def _refusal(one: _Sketch, other: _Sketch, what: str) -> ImportRefused:
    """Returns the error about states or logits that are nearer to another request's."""
    return ImportRefused(
        f"request {one.check.request}, {what} that were given are nearer to those that {one.check.model.name} computes "
        f"for request {other.check.request} than to its own; give those of each request as they were kept"
    )


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
    layers: tuple[int, ...]
    limit: float
    """See `_CLOSE`."""
    middles: dict[int, Tensor] = field(default_factory=dict)
    """By layer, [m]: the middle of the model's states at the first tokens."""
    shares: dict[int, list[Tensor]] = field(default_factory=dict)
    """By layer, of each part: the distances of the given states, as shares of the length of the model's."""

    sums: Tensor | float = 0.0
    """[2, l, n_layers]: sums of the squared distances of a given layer's states from the model's of each layer, and
    from those of the same layer, over the tokens where the two layers are told apart."""

    @property
    def chooses_experts(self) -> bool:
        """Whether rounding may choose other experts: in 16 bits, in a mixture of experts."""
        return self.limit > _CLOSE and bool(layers_of(self.model))

    def add_layers(self, given: Tensor, every: Tensor, length: Tensor) -> None:
        """Adds the distances of given states [l, n, s] from the model's states of every layer, [n_layers, n, s].
        length: [l, n]."""
        own = every[list(self.layers)]
        near, gap = ((one[:, None] - every).norm(dim=-1) / length[:, None] for one in (given, own))
        told = gap > _TOLD_APART * self.limit
        far = ((given - own).norm(dim=-1) / length)[:, None].expand_as(near)
        self.sums = self.sums + torch.stack([near, far]).square().where(told, 0).sum(-1)

    def add(self, start: int, layer: int, given: Tensor, own_states: Mapping[int, Tensor]) -> None:
        """Compares states [n, m] that were given for the tokens from position `start` on.

        own_states: by layer, [n, m]: the model's states of the same tokens.
        Raises: ImportRefused for one that lies too far away, or decidedly nearer to the model's state of another layer
        or another of these tokens.
        """
        own = own_states[layer]
        distance, length = (given - own).norm(dim=-1), own.norm(dim=-1).clamp(min=1e-30)
        self.shares.setdefault(layer, []).append(distance / length)
        middle = self.middles.setdefault(layer, own.median(0).values)
        outlier = 1 if self.chooses_experts else _OUTLIER * self.limit
        allowed = torch.maximum(self.limit * length, outlier * (own - middle).norm(dim=-1))
        for row in torch.nonzero(~(distance <= self.limit / 2 * length))[:, 0].tolist():
            of_rows = (own - given[row]).norm(dim=-1)
            of_rows[row] = torch.inf
            nearest = int(of_rows.argmin())
            others = [(float(of_rows[nearest]), f"its position {start + nearest}")]
            others += [
                (float((states[row] - given[row]).norm()), f"its layer {number}")
                for number, states in own_states.items()
                if number != layer
            ]
            near, where = min(others)
            if not distance[row] <= allowed[row] or near < distance[row] / _DECIDEDLY:
                text = f", and {near / float(length[row]):.2f} from {where}" if len(own) + len(others) > 2 else ""
                raise self._refusal(f"position {start + row}: ", layer, float(distance[row] / length[row]), text)

    def finish(self) -> None:
        """Checks the typical distance of each layer's states. Raises: ImportRefused."""
        near, far = torch.as_tensor(self.sums)
        for index, nearest in torch.nonzero(near * _NEARER < far).tolist():
            layer, times = self.layers[index], float(far[index, nearest] / near[index, nearest].clamp(min=1e-30)) ** 0.5
            raise ImportRefused(
                f"request {self.request}, states that were given as layer {layer} lie {times:.1f} times as far from "
                f"those of {self.model.name} as from its layer {nearest}; give the layers as they were kept"
            )
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
