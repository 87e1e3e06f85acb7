"""The interface that the engine requires of a model: a forward over our KV cache, capture and edits of activations."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor, device, dtype

from cacheprobe.core.live import LiveTokenizer
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.errors import ModelError as ModelError
from cacheprobe.models.output_parts import HeadWriter, OutputParts

StateSink = Callable[[str, int, Tensor], None]
"""Called inside the forward with (site, layer, tensor [b, t, m]). The tensor belongs to the model: copy what you keep.
Site "pre" is the residual stream that enters block 0. At q, k, v and z the tensor is [b, t, h, d]; k and v have as many
heads as the cache. At "pattern" the tensor is [b, h, t, s], over all cache slots.
"""

StateEdit = Callable[[str, int, Tensor], Tensor | None]
"""Called inside the forward like a StateSink. A returned tensor replaces the activation; None leaves the activation
unchanged."""


@runtime_checkable
class CachedLM(Protocol):
    """A decoder that reads and writes a `KVCache`. The model never sees the phase (prefill, decode or verify): position
    is an argument."""

    name: str
    weights_note: str
    n_layers: int
    d_model: int
    d_vocab: int
    n_ctx: int
    head_shape: tuple[int, int]
    """(number of query heads of a layer, width of a head)."""
    dtype: dtype
    device: device
    tokenizer: LiveTokenizer
    stop_token_ids: tuple[int, ...]
    injected_layers: tuple[int, ...]
    """Layers to whose input the model adds something (for example a thought state) besides the previous layer's
    output."""
    attends_by_request: bool
    """Whether attention follows the cache's `reach`: one attention call for each request, over slots chosen by
    position."""

    def check_settings(self, window: int) -> None:
        """Checks that the model supports a run with this verify window. Raises: ModelError if not."""
        ...

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """Returns an empty KVCache with this model's shapes: `rows` sequences of at most `capacity` tokens."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        cache: KVCache,
        cache_rows: Sequence[int],
        starts: Sequence[int],
        *,
        num_layers: int | None = None,
        logit_slots: Sequence[int] | None = None,
    ) -> Tensor:
        """Runs token_ids [b, t] through the model; batch index i writes to cache row rows[i] from absolute position
        starts[i] on.

        Returns logits [b, t, v] of every token slot, or of `logit_slots` only ([b, len, v]). If `num_layers` is given,
        returns the residual stream [b, t, m] after that many blocks and does not compute the later blocks.
        """
        ...

    def capturing(self, sites: Sequence[tuple[str, int]], sink: StateSink) -> AbstractContextManager[None]:
        """Calls `sink` with the activations at these (site, layer) pairs in every forward inside the `with`."""
        ...

    def editing(self, sites: Sequence[tuple[str, int]], edit: StateEdit) -> AbstractContextManager[None]:
        """Lets `edit` replace activations at these (site, layer) pairs in every forward inside the `with`.

        A sink records the edited value only if `capturing` is entered after `editing`: enter `editing` first.
        Raises: ModelError for a site that this model has no hook for.
        """
        ...

    @property
    def unembedding(self) -> Tensor:
        """Returns the matrix [v, m] that maps the normalised residual stream to logits. It is the model's own tensor:
        do not edit it."""
        ...

    def output_parts(self) -> OutputParts:
        """Returns the final norm, the unembedding and its bias separately."""
        ...

    def head_writer(self, layer: int) -> HeadWriter:
        """Returns the output projection of a layer's heads, split by head, and the norm after the projection if the
        model has one.

        Raises: ModelError if the layer has no such projection.
        """
        ...

    def read_out(self, states: Tensor) -> Tensor:
        """Returns logits [n, v] of residual states [n, m]: final norm, then unembedding."""
        ...

    def read_out_with_gradients(self, states: Tensor) -> Tensor:
        """Returns the same numbers as `read_out`, for training: gradients flow back into `states`."""
        ...

    def fingerprint(self) -> dict[str, str | int | float]:
        """Returns every property of the model and its platform that may change the bits of a result."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Returns the token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids."""
        ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token by itself; "<17>" for token 17 if there is no tokenizer."""
        ...

    def to_activation_cache(self, states: dict[tuple[str, int], Tensor]) -> object:
        """Returns TransformerLens' ActivationCache of states [p, m], keyed by (site, layer)."""
        ...
