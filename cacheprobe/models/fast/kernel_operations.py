"""Computes the operations of a forward in Triton kernels, on a GPU or in Triton's interpreter."""

from collections.abc import Sequence
from functools import partial

from jaxtyping import Float
from torch import Tensor

from cacheprobe.core.live import LiveConfig, LiveModule
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.fast.operations import Operations
from cacheprobe.models.hf.masks import sliding_window, text_config
from cacheprobe.models.hf.rms_norms import Norm, rms_norm_of
from cacheprobe.ops.kernel_set import KernelSet


class KernelOperations(Operations):
    """Computes products, norms, attention and cache writes in Triton kernels, the rest by torch. Attention covers all
    slots up to a token's own, so it needs no mask and no `spans`.

    Twin: Operations, close(1e-4) in float32, since sums are reordered.
    """

    def __init__(self, kernels: KernelSet, config: LiveConfig, num_layers: int) -> None:
        """Takes the kernels, and from a model's config the sliding window of each layer."""
        super().__init__(kernels.product)
        self.kernels = kernels
        window, kinds = sliding_window(config), getattr(text_config(config), "layer_types", None)
        slides = [kind == "sliding_attention" for kind in kinds] if kinds else [True] * num_layers
        self.windows = [window if is_sliding else None for is_sliding in slides]

    def norm(self, values: Tensor, norm: Norm) -> Tensor:
        """Returns the RMSNorm of `values` [..., m], in the dtype of `values`."""
        return self.kernels.norm(values, *norm)

    def attended(
        self, cache: StagedCache, layer: int, heads: Sequence[Tensor], mask: Tensor, scale: float
    ) -> Float[Tensor, "b t w"]:
        """Stores keys and values at the positions of `cache`, and returns the attention outputs [b, t, h * d].
        heads: new queries [b, t, h, d], keys and values [b, t, g, d].  mask: read by torch's attention alone, which
        computes over a cache that is not written (`SharedPrefix`)."""
        if not cache.is_written:
            return super().attended(cache, layer, heads, mask, scale)
        q, k, v = (part.transpose(1, 2) for part in heads)
        cache.store(layer, k, v)
        return self.attend(cache, layer, q, scale)

    def attend(
        self, cache: StagedCache, layer: int, q: Float[Tensor, "b h t d"], scale: float | None
    ) -> Float[Tensor, "b t w"]:
        """Returns attention outputs [b, t, h * d] of queries whose keys and values are stored at its
        positions."""
        placed, factor = cache.placed(q.device), q.shape[-1] ** -0.5 if scale is None else scale
        held = cache.keys[layer], cache.values[layer], placed.rows, placed.positions
        out = self.kernels.attend(q, *held, factor, cache.hidden_slots(layer), self.windows[layer])
        return out.transpose(1, 2).flatten(2)

    def replace_norms(self, model: LiveModule) -> None:
        """Makes every plain RMSNorm module of the model compute with `norm`."""
        for module in model.modules():
            if rms_norm_of(module) is not None:
                vars(module)["forward"] = partial(self._norm_by, module)

    def _norm_by(self, module: LiveModule, values: Tensor) -> Tensor:
        norm = rms_norm_of(module)
        assert norm is not None
        return self.norm(values, norm)
