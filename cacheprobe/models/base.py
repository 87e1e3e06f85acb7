"""What the engine asks of a model: a forward over our own KV cache, and a place to listen."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, device, dtype

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.errors import ModelError as ModelError
from cacheprobe.models.output_parts import HeadWriter, OutputParts

StateSink = Callable[[str, int, Tensor], None]
"""Called inside the forward with (site, layer, [b, t, m] tensor); the tensor is the model's own: copy what is kept.
Site "pre" is the residual stream that enters block 0. At q, k, v and z the tensor is [b, t, h, d], k and v with as many
heads as the cache has; at "pattern" it is [b, h, t, s], over all cache slots."""

StateEdit = Callable[[str, int, Tensor], Tensor | None]
"""Called inside the forward like a StateSink; what it returns takes the tensor's place, None leaves it."""


@runtime_checkable
class CachedLM(Protocol):
    """A decoder that reads and writes a `KVCache`. It never learns the phase: position is an argument."""

    name: str
    weights_note: str
    n_layers: int
    d_model: int
    d_vocab: int
    n_ctx: int
    head_shape: tuple[int, int]
    """Query heads of a layer, and the width of each."""
    dtype: dtype
    device: device
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    injected_layers: tuple[int, ...]
    """Layers whose input is more than what left the layer before: something is added in between."""
    attends_by_request: bool
    """Whether attention follows the cache's `reach`: a call for each request, over slots that its positions name."""

    def check_settings(self, window: int) -> None:
        """Raises: ModelError for settings of a run that this model cannot be run with."""
        ...

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache of this model's shapes."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        cache: KVCache,
        rows: Sequence[int],
        starts: Sequence[int],
        *,
        num_layers: int | None = None,
        logit_slots: Sequence[int] | None = None,
    ) -> Tensor:
        """Feed token_ids [b, t] to cache rows `rows`, from absolute positions `starts` on.

        Returns logits [b, t, v] of every slot, or of `logit_slots` alone ([b, len, v]); or, where `num_layers` is
        given, the residual stream [b, t, m] after that many blocks, the others not computed.
        """
        ...

    def capturing(self, sites: Sequence[tuple[str, int]], sink: StateSink) -> AbstractContextManager[None]:
        """Call `sink` for these (site, layer) pairs in every forward inside the `with`."""
        ...

    def editing(self, sites: Sequence[tuple[str, int]], edit: StateEdit) -> AbstractContextManager[None]:
        """Let `edit` change these (site, layer) pairs in every forward inside the `with`. Whoever listens hears the
        result only where it began to listen later: enter `editing` first.

        Raises: ModelError for a site that this model has no hook for.
        """
        ...

    @property
    def unembedding(self) -> Tensor:
        """The matrix [v, m] that makes logits of the normalised residual stream; the model's own: do not edit."""
        ...

    def output_parts(self) -> OutputParts:
        """Final norm, unembedding and its bias, apart."""
        ...

    def head_writer(self, layer: int) -> HeadWriter:
        """The projection of a layer's heads, by head, and the norm behind it if there is one.

        Raises: ModelError where there is no such projection.
        """
        ...

    def read_out(self, states: Tensor) -> Tensor:
        """Logits [n, v] of residual states [n, m] through the final norm and the unembedding."""
        ...

    def read_out_with_gradients(self, states: Tensor) -> Tensor:
        """The same numbers as `read_out`, for a training: gradients flow back into `states`."""
        ...

    def fingerprint(self) -> dict[str, str | int | float]:
        """Everything of the model and its platform that may change bits."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's own text; "<17>" for token 17 where there is no tokenizer."""
        ...

    def to_activation_cache(self, states: dict[tuple[str, int], Tensor]) -> Any:
        """TransformerLens' ActivationCache of states [p, m] by (site, layer)."""
        ...
