"""Gives RWKV and xLSTM their recurrent states as they take them: not in transformers' Cache."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from cacheprobe.core.hook_names import RECURRENT
from cacheprobe.core.live import LiveConfig, LiveModule
from cacheprobe.kvcache.recurrent import LayerStates
from cacheprobe.models.base import ModelError
from cacheprobe.models.plain.recurrence import CONV, FeedToken, PlacesCache, RunMixer

_NEVER = -1e30
"""RWKV's maximum before the first token: a past of weight exp(-1e30) = 0. Source: RwkvModel.forward."""


@dataclass(frozen=True)
class OwnStates:
    """Holds how the modules of a family start, take and return their recurrent states."""

    argument: str
    """Argument of the model's forward that holds the states of all layers."""
    argument_of: Callable[[Cache], object]
    """Returns the value of that argument, from which each recurrent module gets the given Cache."""
    initial: Callable[[LiveModule, Tensor], LayerStates]
    """Returns the states of a module before the first token, {} for a module without any. Takes the module and an input
    [b, t, m] of it."""
    feed: FeedToken
    """Feeds one token."""
    prepare: Callable[[LiveModule], str] = lambda live: ""
    """Changes a model before it is copied. Returns a note about the change, "" for none."""


def own_states(config: LiveConfig) -> OwnStates | None:
    """Returns how a family with states of its own keeps them; None for a family that takes transformers' Cache."""
    return {"rwkv": _RWKV, "xlstm": _XLSTM}.get(str(config.model_type))


class _Slot:
    """Stands for a tensor [b, m, layers] of one state: a module of RWKV reads and writes its `[:, :, layer]`."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __getitem__(self, index: object) -> Tensor:
        return self.value

    def __setitem__(self, index: object, value: Tensor) -> None:
        self.value = value


def _rwkv_initial(module: LiveModule, value: Tensor) -> LayerStates:
    """Returns time mixing's states: its last input [m] and, as one state [a, 3], numerator, denominator and maximum of
    the weighted mean of each of its `a` channels; or channel mixing's: its last input [m]."""
    kind, last_input = type(module).__name__, value.new_zeros(value.shape[-1])
    if kind == "RwkvFeedForward":
        return {(CONV, 1): last_input}
    if kind != "RwkvSelfAttention":
        return {}
    dtype = torch.promote_types(value.dtype, torch.float32)
    empty = torch.tensor([0.0, 0.0, _NEVER], dtype=dtype, device=value.device)
    return {(CONV, 0): last_input, (RECURRENT, 0): empty.repeat(module.attention_hidden_size, 1)}


def _feed_rwkv(module: LiveModule, run: RunMixer, states: LayerStates) -> tuple[Tensor, LayerStates]:
    """Feeds one token to time mixing or channel mixing, with the states as RWKV's list of five tensors.

    transformers' list gives the last input as [b, m], which is right for one batch index only; here it is [b, 1, m].
    """
    if (CONV, 1) in states:
        last_input = _Slot(states[CONV, 1][:, None])
        outputs, _ = run([last_input])
        return outputs, {(CONV, 1): last_input.value}
    shifted, *mean = map(_Slot, (states[CONV, 0][:, None], *states[RECURRENT, 0].unbind(-1)))
    outputs, _ = run([None, shifted, *mean])
    return outputs, {(CONV, 0): shifted.value, (RECURRENT, 0): torch.stack([slot.value for slot in mean], dim=-1)}


def _stop_rescaling(live: LiveModule) -> str:
    """Sets `rescale_every=0` in an RWKV model, which otherwise halves the residual stream after every so many blocks,
    and divides weights in place at its first forward. Weights that were divided are multiplied again.

    Halving keeps float16 from overflowing. Without it, S is S of the layer below plus T plus C in every layer, and
    logits differ by the epsilon of norms alone. Source: the package rwkv, which halves in float16 only.
    Raises: ModelError for float16, and for packed weights that were divided.
    """
    decoder: LiveModule = live.base_model
    every = int(decoder.config.rescale_every)
    if every <= 0 or every > len(decoder.blocks):
        return ""
    if decoder.blocks[0].attention.key.weight.dtype == torch.float16:
        raise ModelError(
            f"{type(live).__name__} halves its residual stream every {every} blocks, so that float16 does not "
            'overflow, and S would not be a sum; load it with dtype="float32" or "bfloat16", or, if it does not '
            "overflow, with config.rescale_every=0"
        )
    if decoder.layers_are_rescaled:
        divided = [(b.attention.output.weight, b.feed_forward.value.weight) for b in decoder.blocks]
        if not all(weight.is_floating_point() for pair in divided for weight in pair):
            raise ModelError(
                f"{type(live).__name__} has packed weights that its first forward divided; load it again, and give it "
                "to cacheprobe before it runs"
            )
        with torch.no_grad():
            for number, pair in enumerate(divided):
                for weight in pair:
                    weight.mul_(2 ** (number // every))
    live.config.rescale_every = decoder.config.rescale_every = 0
    decoder.layers_are_rescaled = False
    return f"residual stream not halved every {every} blocks"


def _xlstm_initial(module: LiveModule, value: Tensor) -> LayerStates:
    """Returns an mLSTM's state [h, q * v + q + 1]: of each head its matrix [q, v], normaliser [q] and maximum."""
    if type(module).__name__ not in ("xLSTMLayer", "mLSTMLayer"):  # transformers' own, or that of the package xlstm
        return {}
    named = module.mlstm_backend.config.inference_state_dtype
    dtype = value.dtype if value.dtype == torch.float64 else getattr(torch, named)
    shape = (module.config.num_heads, sum(_xlstm_widths(module)))
    return {(RECURRENT, 0): torch.zeros(shape, dtype=dtype, device=value.device)}


def _feed_xlstm(module: LiveModule, run: RunMixer, states: LayerStates) -> tuple[Tensor, LayerStates]:
    """Feeds one token to an mLSTM, with its matrix, normaliser and maximum."""
    matrix, normaliser, largest = states[RECURRENT, 0].split(_xlstm_widths(module), dim=-1)
    shaped = matrix.unflatten(-1, (normaliser.shape[-1], -1))
    outputs, (matrix, normaliser, largest) = run((shaped, normaliser, largest))
    return outputs, {(RECURRENT, 0): torch.cat((matrix.flatten(-2), normaliser, largest), dim=-1)}


def _xlstm_widths(module: LiveModule) -> list[int]:
    """Returns how many numbers of a head are its matrix, its normaliser and its maximum."""
    keys, values = (width // module.config.num_heads for width in (module.qk_dim, module.v_dim))
    return [keys * values, keys, 1]


class _OfLayers:
    """Presents a Cache as xLSTM's cache: the states of every layer are an empty Cache, so that the model copies none,
    and the layer finds in it where our cache keeps them."""

    seqlen_offset = 0

    def __init__(self, cache: Cache) -> None:
        self.rnn_state = self
        self._cache = PlacesCache(getattr(cache, "places", None))

    def __getitem__(self, layer: int) -> Cache:
        return self._cache


_RWKV = OwnStates("state", lambda cache: cache, _rwkv_initial, _feed_rwkv, _stop_rescaling)
_XLSTM = OwnStates("cache_params", _OfLayers, _xlstm_initial, _feed_xlstm)
