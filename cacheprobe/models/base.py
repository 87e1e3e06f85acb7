"""Defines CachedLM, the interface of a model that the engine runs: a forward over a KVCache, capture and edits of
activations."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, device, dtype, nn

from cacheprobe.core.live import LiveTokenizer
from cacheprobe.core.live import ModelError as ModelError
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import PassAttention

StateSink = Callable[[str, int, Tensor], None]
"""Function that a forward calls with (site, layer, tensor [b, t, m]) for each captured activation. The tensor belongs
to the model: copy what you keep.
Site "pre" is the residual stream that enters the block. At q, k, v and z the tensor is [b, t, h, d]; k and v have as
many heads as the cache. At "pattern" the tensor is [b, h, t, s], over all cache slots.
At "router" the tensor is [b, t, k, 2]: id and weight of each expert of a token. At "recurrent" it is [b, t, h, d]: the
state of a recurrent layer after each token, with h its first axis."""

StateEdit = Callable[[str, int, Tensor], Tensor | None]
"""Function that a forward calls like a StateSink. A returned tensor replaces the activation; None leaves the activation
unchanged. At "router" the tensor is the logits [b, t, e] over the e experts.
At "recurrent" a forward calls it after each token, with a view [b, t, h, d] that shows the states after the t-th token
t times. Copy [:, -1:] only: a copy of all costs time quadratic in t. Of a returned tensor, [b, 1, h, d] or longer, only
[:, -1] counts: the layer goes on from it with the next token."""


class BlockSum(NamedTuple):
    """Describes how a block adds up: S = scale * (S of the layer below) + T + C. T and C are as captured, and not
    scaled again. C is the sum of the outputs of `mlp_parts` modules."""

    scale: float = 1.0
    mlp_parts: int = 1


def block_sum(model: object, layer: int) -> BlockSum:
    """Returns the BlockSum of a layer of a CachedLM: scale 1 and one part, unless the model says otherwise."""
    sums: Sequence[BlockSum] = getattr(model, "block_sums", ())
    return sums[layer] if sums else BlockSum()


class OutputParts(NamedTuple):
    """Holds the steps from the last residual stream to the logits: final norm, unembedding, bias, last function."""

    norm: nn.Module
    weight: Tensor
    """[v, m]"""
    bias: Tensor | None
    """[v]"""
    finish: Callable[[Tensor], Tensor]
    """Function applied to the logits [n, v] last: the architecture's soft cap or scale, or no change."""


class HeadWriter(NamedTuple):
    """Holds the steps from the heads of one layer to the attention output (site T): projection by head, bias, norm."""

    weight: Tensor
    """[h, d, m]"""
    bias: Tensor | None
    """[m]"""
    norm: nn.Module | None
    """Norm after the projection, in post-norm models."""


@runtime_checkable
class CachedLM(Protocol):
    """Describes a decoder-only language model that reads and writes a `KVCache` (a Protocol). A forward gets token ids
    and positions as arguments, but never the phase (prefill, decode or verify).

    Some kinds of model have further members. Read them by getattr with a default:
    operations: compiled loops or kernels, of which the engine uses `readout` for the best tokens.
    read_tokens(states, targets, count): reads the best tokens of residual states in compiled loops.
    independent_width: most tokens of a request in a pass whose bits depend neither on its width nor on its other rows.
    path: "plain" or "bridge", of a model that can run in both ways; see `choose_path`.
    block_sums: a BlockSum for each layer; see `block_sum`.
    mixtures: the experts of each layer that has any.  sources: layer -> the layer whose keys it attends over.
    state_shapes: layer -> shape of its recurrent state.  batch_may_grow: whether a batch may be larger than usual.
    """

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
    prepend_bos: bool
    """Whether `encode` puts the tokenizer's start token in front where the tokenizer itself does not."""
    stop_token_ids: tuple[int, ...]
    stop_source: str
    """Where the model's stop tokens are named: "the generation config", for one."""
    injected_layers: tuple[int, ...]
    """Layers to whose input the model adds something (for example a thought state) besides the previous layer's
    output."""

    @property
    def attends_by_request(self) -> bool:
        """Whether attention runs request by request, over the slots in a pass's `spans`; otherwise one call covers
        the batch."""
        ...

    def check_settings(self, window: int) -> None:
        """Checks that the model supports verify passes with `window` tokens of each request. Raises: ModelError if the
        model does not support them."""
        ...

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """Returns an empty KVCache with this model's layer shapes: `num_rows` cache rows, one for each sequence, of
        `capacity` token slots each."""
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
        attention: PassAttention | None = None,
    ) -> Tensor:
        """Runs token_ids [b, t] through the model and returns logits [b, t, v]. Batch index i writes keys and values to
        cache row cache_rows[i], from absolute position starts[i] on.

        logit_slots: indices (0 to t - 1) of the tokens whose logits are returned, [b, len(logit_slots), v]; None for
        all.
        num_layers: run only the first `num_layers` blocks, and return the residual stream [b, t, m] after these blocks.
        attention: which slots attention runs over, and whether a batch index computes another one's tokens again; None
        for all slots. A forward hands it to the StagedCache that it makes of `cache`.
        """
        ...

    def capturing(self, sites: Sequence[tuple[str, int]], sink: StateSink) -> AbstractContextManager[None]:
        """Returns a context manager. Inside its `with`, a forward calls `sink(site, layer, activation)` for each (site,
        layer) pair of `sites` whose layer it runs. Raises: ModelError, when the `with` begins, for a site that this
        model cannot capture."""
        ...

    def editing(self, sites: Sequence[tuple[str, int]], edit: StateEdit) -> AbstractContextManager[None]:
        """Returns a context manager. Inside its `with`, a forward calls `edit(site, layer, activation)` for each (site,
        layer) pair of `sites` whose layer it runs. A returned tensor replaces the activation; None leaves the
        activation unchanged.

        A sink records the edited value only if `capturing` is entered after `editing`: enter `editing` first.
        Raises: ModelError, when the `with` begins, for a site that this model has no hook for.
        """
        ...

    @property
    def unembedding(self) -> Tensor:
        """Unembedding matrix [v, m], which maps the normalised residual stream to logits. The tensor is the model's
        own, not a copy: do not edit the tensor."""
        ...

    def output_parts(self) -> OutputParts:
        """Returns the steps from the last residual stream to the logits as OutputParts: final norm, unembedding matrix
        [v, m], bias, and a last function of the logits (softcap or scale)."""
        ...

    def head_writer(self, layer: int) -> HeadWriter:
        """Returns the steps from one layer's attention heads to the residual stream as a HeadWriter: output projection
        split by head [h, d, m], bias, and the norm after the projection (None if the model has none).

        Raises: ModelError if the layer has no such projection.
        """
        ...

    def read_out(self, states: Tensor) -> Tensor:
        """Returns logits [n, v] of residual states [n, m]: final norm, unembedding, then the architecture's softcap or
        scale. Records no gradients."""
        ...

    def read_out_with_gradients(self, states: Tensor) -> Tensor:
        """Returns the logits of `read_out`, up to one unit in the last place, and lets gradients flow back into
        `states`."""
        ...

    def fingerprint(self) -> dict[str, str | int | float]:
        """Returns a dictionary of properties of the model, the libraries and the process that may change the bits of a
        result: weights hash, dtype, device, threads and others."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Returns the token ids of a text as a tuple. add_special_tokens: include the tokens that the tokenizer adds to
        a text, such as a start token."""
        ...

    def decode(self, token_ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """Returns the text of a sequence of token ids, as it stands after the tokens `after`; text such as "<17> <4>"
        if the model has no tokenizer."""
        ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns a list with the text of each token id; "<17>" for id 17 without a token. No two ids have one
        text."""
        ...

    def to_activation_cache(self, states: dict[tuple[str, int], Tensor]) -> object:
        """Returns the given states as TransformerLens' ActivationCache. states: (site, layer) -> tensor [p, m] of p
        positions."""
        ...
