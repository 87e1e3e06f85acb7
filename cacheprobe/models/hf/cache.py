"""Offers our KVCache through Hugging Face's cache interface, so that unmodified attention modules read and write it.

Each forward makes a StagedCache first. The two methods from which transformers would guess a position
or build a mask raise an error, so a forgotten mask or position cannot stay unnoticed.
"""

from typing import NoReturn, TypedDict

from torch import Tensor, device
from transformers.cache_utils import Cache, CacheLayerMixin

from cacheprobe.core.live import LiveConfig, LiveModule
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.hf.masks import attention_masks


class KVCacheLayer(CacheLayerMixin):
    """Presents one layer of a StagedCache as a cache layer of transformers (CacheLayerMixin)."""

    is_compileable = True
    is_croppable = False
    is_sliding = False
    supports_early_init = True

    def __init__(self, cache: StagedCache, layer: int, length: int | None) -> None:
        super().__init__()
        self._cache, self._layer, self._length = cache, layer, length
        # after super().__init__(), which sets them to None
        self.keys, self.values = cache.keys[layer], cache.values[layer]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the KVCache allocated its tensors when it was created."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes new keys and values [b, h, t, d] at the positions of the StagedCache. Returns all keys and
        values of the staged cache rows in the slots that attention covers, [b, h, s, d] each."""
        return self._cache.write(self._layer, key_states, value_states)

    def get_seq_length(self) -> int:
        """Returns the length given to the KVCacheAdapter. Raises: RuntimeError if none was given, because sequences of
        one batch have different lengths: callers must pass position_ids."""
        if self._length is None:
            raise RuntimeError("position_ids must be passed with a KVCacheAdapter: rows have lengths of their own")
        return self._length

    def get_mask_sizes(self, query_length: int) -> NoReturn:
        """Raises: RuntimeError, because callers must pass a 4-D attention mask."""
        raise RuntimeError("a 4-D attention mask must be passed with a KVCacheAdapter")

    def get_max_length(self) -> int:
        """Returns the capacity of a cache row in tokens."""
        return self._cache.cache.capacity


class KVCacheAdapter(Cache):
    """Presents a StagedCache as transformers' Cache, for the argument `past_key_values` of a model."""

    def __init__(self, cache: StagedCache, length: int | None = None, places: object = None) -> None:
        """length: of the first batch index, for families that ask the cache for a length. A family that takes positions
        from it would be wrong for the other batch indices; `check_model` compares such a batch at load.
        places: where recurrent layers find their states (RecurrentPlaces); None for a model without any."""
        super().__init__(layers=[KVCacheLayer(cache, layer, length) for layer in range(len(cache.keys))])
        self.places = places


class ForwardInputs(TypedDict):
    """Holds the positions and masks of a Hugging Face forward over our KVCache (a TypedDict)."""

    attention_mask: LiveModule
    """Mask [b, 1, t, s], or a dict of masks by kind of layer. (TransformerLens declares only the first.)"""
    position_ids: Tensor


def forward_inputs(cache: StagedCache, config: LiveConfig, n_ctx: int) -> ForwardInputs:
    """Returns the mask and the position ids of one forward, as keyword arguments for a Hugging Face model."""
    dtype, device = cache.keys[0].dtype, cache.keys[0].device
    return {
        "attention_mask": attention_masks(config, cache, dtype, device),
        # pads may lie beyond the context; learned position tables have no row there
        "position_ids": cache.placed(device).positions.clamp(max=n_ctx - 1),
    }


def masks_in(inputs: ForwardInputs) -> list[Tensor]:
    """Returns the masks among the inputs of a forward."""
    masks = inputs["attention_mask"]
    return [masks] if isinstance(masks, Tensor) else [*masks.values()]


class ShapeProbe(Cache):
    """Records each layer's (heads, key width, value width) and device, as the cache argument of one short forward.
    Stores no keys or values."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layer_shapes: dict[int, tuple[int, int, int]] = {}
        self.devices: dict[int, device] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Records the layer's shape and device, and returns the given keys and values unchanged."""
        self.layer_shapes[layer_idx] = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        self.devices[layer_idx] = key_states.device
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0: this cache stores no tokens."""
        return 0
