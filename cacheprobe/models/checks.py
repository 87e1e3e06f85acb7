"""Checks a newly loaded model: the logits of a short text, fed in parts through the KVCache, must agree with the logits
of one forward without a cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from cacheprobe.core.hook_names import SITES
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.base import CachedLM, ModelError, block_sum
from cacheprobe.models.hf.lm import HuggingFaceLM
from cacheprobe.models.hf.masks import chunk_size, sliding_window
from cacheprobe.models.hf.shared import user_hooks
from cacheprobe.models.settings import product_dtype

_PROBE_TEXT = "The coin lies on the table. Alice flips it, and then Bob looks at it"
_PROBE_LENGTH = 24
LONGEST_PROBE = 96
"""Longest probe text in tokens. A small sliding window is tested beyond its end; for a large one, the test would cost
seconds per load."""
_SPARE_SLOTS = 24
_FEW = 4
"""A text of so few tokens, of a tiny context or tokenizer, is not checked beside another one."""
LEAST_COSINE = 0.9
"""In 16 bits, two correct computations of the same logits agree to a cosine of about .99; a wrong mask gives less than
.5."""


def check_model(model: CachedLM) -> None:
    """Checks a newly loaded model: a short text, fed in parts through the KVCache, must give the logits of one forward
    without a cache; so must the last layer's state, read by the model's norm and unembedding.

    The hooks of every layer must fire, and a block's output must be its input plus T plus C. The model must also give
    these logits beside a sequence that starts at another position. If its config lets some tokens see
    later ones, such as an image's, the logits of a text must not change with what follows.
    Tolerances are those of `agrees`. Raises: ModelError naming what differs.
    """
    around = cast(HuggingFaceLM, model)
    token_ids, kind = probe_ids(model), type(around.live).__name__
    wanted = [("pre", 0), *((site, layer) for layer in range(model.n_layers) for site in SITES)]
    last, fired = ("S", model.n_layers - 1), dict[tuple[str, int], Tensor]()

    def note(site: str, layer: int, value: Tensor) -> None:
        """Keeps a copy of the activation, if it has shape [b, t, d_model]."""
        if value.shape[-1] == model.d_model and value.dim() == 3:
            fired[site, layer] = value[0].to("cpu", copy=True)  # layers may lie on several devices

    with _running(model):
        whole = around.original_logits(token_ids)[0].float()
        cache = probe_cache(model, token_ids)
        with model.capturing(wanted, note):
            cached = cached_logits(model, token_ids, cache)
        if silent := sorted(set(wanted) - set(fired)):
            raise ModelError(f"{model.name}: the hook for site {silent[0][0]} of layer {silent[0][1]} does not fire")
        found = {"with our KV cache": cached}
        if token_ids.shape[1] > _FEW:
            found["beside a sequence of another length"] = _beside_another(model, token_ids, cache)
        found["read from its last state by norm and unembedding"] = model.read_out(fired[last]).float()
    for what, logits in found.items():
        expected = whole[-len(logits) :].to(logits.device)
        if not agrees(logits, expected, model.dtype):
            raise ModelError(
                f"{model.name}: {kind} {what} differs from the model without it by up to "
                f"{float((logits - expected).abs().max()):.3g}; its attention, positions or experts follow a rule that "
                "is not known here"
            )
    if next(user_hooks(around.live), None) is None:  # they may change a sum
        _check_sums(model, fired)
    if getattr(around.config, "use_bidirectional_attention", None) and not is_causal(model, token_ids):
        raise ModelError(
            f"{model.name}: {kind} lets tokens of a text see later ones; cacheprobe runs models that generate"
        )


def _check_sums(model: CachedLM, states: dict[tuple[str, int], Tensor]) -> None:
    """Raises: ModelError if a block's output [t, m] is not its input plus T plus C, as `block_sum` says, up to 1e-3 of
    the largest value (.1 in 16 bits)."""
    limit = 1e-3 if product_dtype(model.dtype) in (torch.float32, torch.float64) else 0.1
    for layer in range(model.n_layers):
        below = states["S", layer - 1] if layer else states["pre", 0]
        total = block_sum(model, layer).scale * below.float() + states["T", layer].float() + states["C", layer].float()
        after = states["S", layer].float()
        if layer not in model.injected_layers and float((total - after).abs().max()) > limit * float(after.abs().max()):
            raise ModelError(f"{model.name}: S of layer {layer} is not S of the layer below plus T plus C")


def is_causal(model: CachedLM, token_ids: Tensor) -> bool:
    """Returns True if the logits of the first half of token_ids [1, t] stay the same, in forwards of the model itself,
    when the second half becomes another text.

    Both forwards have the same shapes. Only sums over the tokens of one expert may take another order, so the tolerance
    is 1e-3 of the largest logit in float32 and float64, and .03, a few roundings, in 16 bits.
    """
    half = token_ids.shape[1] // 2
    other = torch.cat((token_ids[:, :half], token_ids[:, : token_ids.shape[1] - half].flip(1)), 1)
    one, two = (cast(HuggingFaceLM, model).whole_logits(ids)[0, :half].float() for ids in (token_ids, other))
    limit = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.03
    return bool((one - two).abs().max() <= limit * one.abs().max())


def _beside_another(model: CachedLM, token_ids: Tensor, cache: KVCache) -> Tensor:
    """Returns float32 logits [t, v] of the last tokens of token_ids [1, n], computed again in one pass with a sequence
    that starts at position 1. cache: from `probe_cache`; its cache row 0 holds all the tokens."""
    n = token_ids.shape[1]
    model.forward(token_ids[:, :1], cache, [1], [0], num_layers=model.n_layers)  # no logits: none is compared
    both = torch.cat((token_ids[:, 1:4], token_ids[:, n - 3 :]))
    return model.forward(both, cache, [1, 0], [1, n - 3])[1].float()


@contextmanager
def _running(model: CachedLM) -> Iterator[None]:
    """Raises: ModelError for what a model raises inside the `with`."""
    try:
        yield
    except ModelError:
        raise
    except (ValueError, RuntimeError, TypeError, IndexError, AttributeError, KeyError, AssertionError) as error:
        kind = type(cast(HuggingFaceLM, model).live).__name__
        raise ModelError(
            f"{model.name}: {kind} does not run on our KV cache ({type(error).__name__}: {error!s:.120})"
        ) from error


def probe_cache(model: CachedLM, token_ids: torch.Tensor) -> KVCache:
    """Returns a KVCache with two cache rows, each with room for the probe text `token_ids` [1, t] and up to 24 pads
    inside the model's context. Call this function before adding hooks, because a model runs one short forward to make
    its first cache."""
    return model.new_cache(2, min(token_ids.shape[1] + _SPARE_SLOTS, model.n_ctx))


def cached_logits(model: CachedLM, token_ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """Returns float32 logits [t, v] of token_ids [1, t], which the model reads in parts over cache row 0: the first
    half, the rest except one token, the last token."""
    n = token_ids.shape[1]
    parts = ((0, n // 2), (n // 2, n - 1), (n - 1, n))
    pieces = [model.forward(token_ids[:, start:end], cache, [0], [start]) for start, end in parts if end > start]
    return torch.cat(pieces, dim=1)[0].float()


def agrees(cached: torch.Tensor, whole: torch.Tensor, dtype: torch.dtype) -> bool:
    """Returns True if two computations of the same logits [t, v] agree: within 1e-3 of the largest logit (or 1e-3 if
    that is below 1) in float32 and float64; with a cosine of at least LEAST_COSINE in 16 bits, and if float32 products
    run at lower precision."""
    if product_dtype(dtype) in (torch.float32, torch.float64):
        return bool((cached - whole).abs().max() <= 1e-3 * whole.abs().max().clamp(min=1.0))
    return cosine(cached, whole) >= LEAST_COSINE


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the cosine similarity of two float32 tensors [t, v] as one number: the mean of each row is subtracted,
    then each tensor is flattened to one vector."""
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))


def probe_ids(model: CachedLM) -> torch.Tensor:
    """Returns token ids [1, t] of a short English text, for checks of a model. Without a tokenizer, returns a fixed
    pattern of ids. (In 16 bits, random tokens give unstable results.)

    The text is longer than the model's sliding window if that window is small.
    """
    config = cast(HuggingFaceLM, model).config
    length = max(_PROBE_LENGTH, (sliding_window(config) or chunk_size(config) or 0) + 8)
    if length > min(LONGEST_PROBE, model.n_ctx):
        length = min(_PROBE_LENGTH, model.n_ctx)
    ids = [] if model.tokenizer is None else list(model.encode(_PROBE_TEXT))
    if ids:
        if max(ids) >= model.d_vocab:
            raise ModelError(
                f"{model.name}: its tokenizer gives token {max(ids)}, and the model has {model.d_vocab} tokens; give "
                "the model's own tokenizer"
            )
        ids = ids * -(-length // len(ids)) if length > _PROBE_LENGTH else ids
    else:
        ids = [(7 + 31 * i) % model.d_vocab for i in range(length)]
    return torch.tensor([ids[:length]])
