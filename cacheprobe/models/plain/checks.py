"""Checks a newly loaded plain model against its own forward without a cache."""

import torch

from cacheprobe.models.base import ModelError
from cacheprobe.models.checks import agrees, cached_logits, probe_cache, probe_ids
from cacheprobe.models.plain.lm import PlainLM


def check_plain(model: PlainLM) -> None:
    """Checks a newly loaded plain model: a short text, fed in parts through the KVCache, must give the logits of one
    forward of the model itself, alone and beside a sequence that starts at another position.

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


def _beside_another(model: PlainLM, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns float32 logits [t, v] of the last tokens of token_ids [1, n], computed in one pass with a sequence that
    starts at position 1."""
    n = token_ids.shape[1]
    cache = model.new_cache(2, n + 8)
    model.forward(token_ids[:, : n - 3], cache, [1], [0])
    model.forward(token_ids[:, :1], cache, [0], [0])
    both = torch.cat((token_ids[:, 1:4], token_ids[:, n - 3 :]))
    return model.forward(both, cache, [0, 1], [1, n - 3])[1].float()
