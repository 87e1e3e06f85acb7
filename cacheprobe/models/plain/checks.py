"""Checks a newly loaded plain model against its own forward without a cache."""

import torch

from cacheprobe.models.base import ModelError
from cacheprobe.models.checks import agrees, cached_logits, probe_cache, probe_ids
from cacheprobe.models.plain.lm import PlainLM


def check_plain(model: PlainLM) -> None:
    """Checks a newly loaded plain model: a short text, fed in parts through the KVCache, must give the logits of one
    forward of the model itself, alone and beside a sequence that starts at another position. If the config lets some
    tokens see later ones, such as an image's, the logits of a text must not change with what follows.

    Tolerances are those of `checks.agrees`. Raises: ModelError naming what differs.
    """
    token_ids = probe_ids(model)
    kind = type(model.live).__name__
    try:
        with torch.inference_mode():
            whole = model.whole_logits(token_ids)[0].float()
            cache, last = probe_cache(model, token_ids), {}
            with model.capturing([("S", model.n_layers - 1)], lambda site, layer, value: last.update({site: value[0]})):
                cached = cached_logits(model, token_ids, cache)
            read = model.read_out(last["S"]).float()
            beside = _beside_another(model, token_ids)
    except ModelError:
        raise
    except (ValueError, RuntimeError, TypeError, IndexError, AttributeError, KeyError, AssertionError) as error:
        raise ModelError(
            f"{model.name}: {kind} does not run on our KV cache ({type(error).__name__}: {error!s:.120})"
        ) from error
    if not bool(torch.isfinite(cached).all()):
        raise ModelError(f"{model.name} gives NaN or infinite logits; load it in float32 or check its weights")
    for what, logits in (
        ("with our KV cache", cached),
        ("beside a sequence of another length", beside),
        ("read from its last state by norm and unembedding", read),
    ):
        if not agrees(logits, whole[-len(logits) :], model.dtype):
            raise ModelError(
                f"{model.name}: {kind} {what} differs from the model without it by up to "
                f"{float((logits - whole[-len(logits) :]).abs().max()):.3g}; its attention, positions or experts "
                "follow a rule that is not known here"
            )
    if getattr(model.config, "use_bidirectional_attention", None) and not is_causal(model, token_ids):
        raise ModelError(
            f"{model.name}: {kind} lets tokens of a text see later ones; cacheprobe runs models that generate"
        )


def is_causal(model: PlainLM, token_ids: torch.Tensor) -> bool:
    """Returns True if the logits of the first half of token_ids [1, t] stay the same, in forwards of the model itself,
    when the second half becomes another text.

    Both forwards have the same shapes. Only sums over the tokens of one expert may take another order, so the tolerance
    is 1e-3 of the largest logit in float32 and float64, and .03, a few roundings, in 16 bits.
    """
    half = token_ids.shape[1] // 2
    other = torch.cat((token_ids[:, :half], token_ids[:, : token_ids.shape[1] - half].flip(1)), 1)
    one, two = (model.whole_logits(ids)[0, :half].float() for ids in (token_ids, other))
    limit = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.03
    return bool((one - two).abs().max() <= limit * one.abs().max())


def _beside_another(model: PlainLM, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns float32 logits [t, v] of the last tokens of token_ids [1, n], computed in one pass with a sequence that
    starts at position 1."""
    n = token_ids.shape[1]
    cache = model.new_cache(2, n + 8)
    model.forward(token_ids[:, : n - 3], cache, [1], [0])
    model.forward(token_ids[:, :1], cache, [0], [0])
    both = torch.cat((token_ids[:, 1:4], token_ids[:, n - 3 :]))
    return model.forward(both, cache, [0, 1], [1, n - 3])[1].float()
