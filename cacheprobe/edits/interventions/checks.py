"""Checks, before a run, that an intervention fits the model and can act on its request."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from cacheprobe.core.hook_names import RECURRENT, ROUTER, is_module
from cacheprobe.edits.interventions.base import Intervention, as_interventions
from cacheprobe.kvcache.recurrent import memory_of
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.experts import layers_of, state_shapes
from cacheprobe.models.feeding import located


@dataclass(frozen=True)
class Drafting:
    """Holds how a run drafts, to check interventions that act in drafts: the drafter's name, the number of layers that
    a draft runs, and the window."""

    drafter: str
    """The drafter's name."""
    layers: int
    """Number of the model's layers that a draft runs, see `drafters.base.drafted_layers`."""
    window: int
    """Tokens of one request in a verify pass."""


def require_hooks(model: object) -> None:
    """Raises: ModelError if a user's own model has no method `editing`, which interventions need."""
    if not hasattr(model, "editing"):
        raise ModelError(
            f"{getattr(model, 'name', model)} has no `editing`, so interventions cannot act on it; see CachedLM"
        )


def interventions_of(given: object, model: CachedLM, num_requests: int) -> tuple[Intervention, ...]:
    """Returns one Intervention for each request and place, from those that a user gave to a run of so many requests.
    Raises: ValueError for a request that is not there; ModelError for a module that is not there."""
    found: list[Intervention] = []
    digests: dict[int, tuple[str, str]] = {}
    for one in as_interventions(given):
        _, layer = located(model, one.site, one.layer)
        placed = one if layer == one.layer else replace(one, layer=layer)
        found += placed.at_start(digests).of_requests(num_requests)
    return tuple(found)


def check_model(one: Intervention, model: CachedLM, shapes: Mapping[tuple[str, int], tuple[int, ...]]) -> None:
    """Raises: ValueError if the model lacks the intervention's layer or head, or if the vectors are infinite in the
    dtype of the model or of its recurrent state. Also if their width is neither 1 nor that of the changed state.

    shapes: of one token's entry at each module."""
    if not 0 <= one.layer < model.n_layers:
        raise ValueError(f"{one}: unknown layer {one.layer}; the model has layers 0 to {model.n_layers - 1}")
    heads, head_width = model.head_shape
    if one.site == RECURRENT:
        heads, head_width = _state_shape(one, model)
    elif one.head is not None and hasattr(model, "head_writer"):
        heads = len(model.head_writer(one.layer).weight)
    if one.head is not None and not 0 <= one.head < heads:
        raise ValueError(f"{one}: unknown head {one.head}; layer {one.layer} has heads 0 to {heads - 1}")
    width = model.d_model if one.head is None else head_width
    if one.site == RECURRENT and one.head is None:
        width = heads * head_width
    if one.site == ROUTER:
        width = _num_experts(one, model)
    if is_module(one.site):
        width = prod(shapes[one.place])
    one.require_width(width)
    if one.vectors.shape[1] not in (1, width):
        raise ValueError(f"{one}: vectors of width {one.vectors.shape[1]}, where states have {width}")
    dtype = _state_dtype(one, model) if one.site == RECURRENT else model.dtype
    if not bool(torch.isfinite(one.vectors.to(dtype)).all()):
        raise ValueError(
            f"{one}: its vectors are infinite in {dtype}, and a slot that is not finite poisons attention "
            "even where it is masked; make them smaller, or load the model in float32"
        )


def _state_shape(one: Intervention, model: CachedLM) -> tuple[int, int]:
    """Returns (heads, numbers of a head) of the recurrent state that an intervention changes. Raises: ValueError if the
    layer has none."""
    shapes = state_shapes(model)
    if one.layer not in shapes:
        there = ", ".join(map(str, shapes)) or "none"
        raise ValueError(f"{one}: layer {one.layer} has no recurrent state; layers with one: {there}")
    return shapes[one.layer]


def _state_dtype(one: Intervention, model: CachedLM) -> torch.dtype:
    """Returns the dtype in which the cache keeps the recurrent state that an intervention changes."""
    memory = memory_of(model.new_cache(1, 1))
    return model.dtype if memory is None else memory.initial[one.layer][RECURRENT, 0].dtype


def _num_experts(one: Intervention, model: CachedLM) -> int:
    """Returns the number of experts at the layer of an intervention on a router. Raises: ValueError if the layer has no
    router, or if fewer experts remain than compute a token."""
    mixtures = layers_of(model)
    if one.layer not in mixtures:
        raise ValueError(f"{one}: layer {one.layer} has no experts; layers with experts: {list(mixtures) or 'none'}")
    mixture = mixtures[one.layer]
    if mixture.router is None:
        raise ValueError(f"{one}: the mixture of layer {one.layer} has no router whose logits can be changed")
    num_left = mixture.num_experts - len(getattr(one, "experts", ()))
    if num_left < mixture.top_k:
        raise ValueError(f"{one}: {num_left} experts remain, and {mixture.top_k} compute each token; ablate fewer")
    return mixture.num_experts


def check_request(one: Intervention, state: SequenceState, drafting: Drafting | None = None) -> None:
    """Raises: ValueError if the request cannot compute one of the intervention's positions, or computes none of them in
    its phases. Also if the prompt's length differs from the intervention's num_prompt_tokens.

    For a deterministic request, also if `steps` are given or own_fingerprint is not True.
    drafting: None for the slow reference (`cp.reference`), which drafts no tokens.
    """
    request, prompt = state.request, state.request.num_prompt_tokens
    assert state.sampling.max_new_tokens is not None
    last = prompt + state.sampling.max_new_tokens - 2  # the newest token is never fed
    acts_on = f"computes 0 to {last} at most"
    if one.site == RECURRENT:
        last, acts_on = last - 1, f"goes on from the states after 0 to {last - 1} at most"
    if one.num_prompt_tokens not in (None, prompt):
        raise ValueError(
            f"{one}: made for a prompt of {one.num_prompt_tokens} tokens, request {one.request} has {prompt}"
        )
    if one.positions is not None and max(one.positions) > last:
        raise ValueError(
            f"{one}: position {max(one.positions)} lies outside the request, which {acts_on} "
            f"(prompt of {prompt} + {state.sampling.max_new_tokens} new tokens, the newest is never fed)"
        )
    if one.positions is not None and min(one.positions) < request.num_cached:
        raise ValueError(
            f"{one}: position {min(one.positions)} lies in the {request.num_cached} cached rows that the request goes "
            "on from, and is not computed; edit those rows instead"
        )
    possible = _possible_phases(one, state, last, drafting)
    if one.phases is not None and not possible & set(one.phases):
        drafts = f" (drafts of {drafting.drafter}, window of {drafting.window})" if drafting else ""
        raise ValueError(
            f"{one}: its positions are never computed in phase {' or '.join(one.phases)}, but in "
            f"{' or '.join(sorted(possible))}{drafts}; leave out phases="
        )
    if not request.is_deterministic:
        return
    if unnamed := getattr(one, "unnamed", ""):
        raise ValueError(
            f"{one}: the request is deterministic, and the function uses {unnamed}, which no fingerprint can hold; "
            "give it numbers, tensors and functions, such as by functools.partial"
        )
    if one.steps is not None:
        raise ValueError(
            f"{one}: the request is deterministic, and when its positions are computed depends on the traffic; "
            "leave out steps="
        )
    if not one.own_fingerprint:
        raise ValueError(
            f"{one}: the request is deterministic; changed, it is comparable only with runs of the same interventions; "
            "say so with own_fingerprint=True"
        )


def _possible_phases(one: Intervention, state: SequenceState, last: int, drafting: Drafting | None) -> set[str]:
    """Returns the set of phases in which a position of the intervention may be computed."""
    prompt = state.request.num_prompt_tokens
    lowest, highest = (min(one.positions), max(one.positions)) if one.positions else (0, last)
    possible = {"prefill"} if lowest < prompt else set()
    if highest < prompt:
        return possible
    if not state.is_verified:
        return possible | {"decode"}
    first = min(p for p in one.positions if p >= prompt) if one.positions else prompt
    if drafting is None or (drafting.window > 1 and one.layer < drafting.layers and first < last):
        possible.add("decode")
    return possible | {"verify"}
