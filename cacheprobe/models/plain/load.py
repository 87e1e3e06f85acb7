"""Wraps a live transformers model: in a TransformerBridge if that works, otherwise as it is."""

from typing import TYPE_CHECKING

from cacheprobe.core.live import LiveModule, LiveTokenizer
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.masks import longrope_length, text_config
from cacheprobe.models.plain.memory import has_recurrent_layers
from cacheprobe.models.quantised.packed import packed_modules, require_usable

if TYPE_CHECKING:  # they take seconds to load
    from cacheprobe.models.hf.bridge import BridgeLM
    from cacheprobe.models.plain.lm import PlainLM

NO_ADAPTER = "TransformerBridge has no adapter for it"
_NO_CACHE = "TransformerBridge's forward of it does not take our KV cache"
_RECURRENT = "it has recurrent layers, whose states only the plain model keeps by position"
_PACKED = "its weights are packed, and a bridge reads weights as matrices"
_SCALED = "its blocks scale the residual stream, and TransformerBridge has no hook on that"
WITHOUT_BRIDGE: dict[str, str] = {
    **dict.fromkeys(("bloom", "falcon", "llama4", "llama4_text", "opt", "xglm"), _NO_CACHE),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _SCALED),
}
"""Model type -> why its bridge, which cannot be taken off again, is not tried."""


def wrap_live(live: LiveModule, tokenizer: LiveTokenizer, name: str, note: str = "") -> "BridgeLM | PlainLM":
    """Returns a BridgeLM around a live transformers model if TransformerLens has an adapter for it; otherwise a
    PlainLM, whose `why` is the reason. Both are unchecked.

    Raises: ModelError with both reasons if neither is possible; for a model inside a bridge made elsewhere; for packed
    weights that cannot be run.
    """
    from cacheprobe.models.plain.lm import PlainLM

    text = require_usable(live, name)
    note = note if text in note else "; ".join(filter(None, (note, text)))
    if packed_modules(live):
        return _plain(live, tokenizer, name, note, _PACKED)

    try:
        from cacheprobe.models.hf.bridge import BridgeLM
    except ImportError:
        return PlainLM(live, tokenizer, name, note, "transformer-lens is not installed")
    if any(type(module).__module__.startswith("transformer_lens") for module in live.modules()):
        return BridgeLM.wrap(live, tokenizer, name, note)
    if has_recurrent_layers(live.config):
        return _plain(live, tokenizer, name, note, _RECURRENT)
    if (why := WITHOUT_BRIDGE.get(str(live.config.model_type))) is not None:
        return _plain(live, tokenizer, name, note, why)
    try:
        return BridgeLM.wrap(live, tokenizer, name, note)
    except ModelError as no_bridge:
        has_none = "Unsupported architecture" in str(no_bridge)
        return _plain(live, tokenizer, name, note, NO_ADAPTER if has_none else str(no_bridge))


def check_or_replace(wrapped: "BridgeLM | PlainLM") -> "BridgeLM | PlainLM":
    """Checks a wrapped model, and returns it. If a BridgeLM fails the check, returns a checked PlainLM of the same
    weights instead. Raises: ModelError if that fails too."""
    from cacheprobe.models.checks import check_model
    from cacheprobe.models.plain.checks import check_plain
    from cacheprobe.models.plain.lm import PlainLM

    wrapped.n_ctx = min(wrapped.n_ctx, longrope_length(text_config(wrapped.config)) or wrapped.n_ctx)
    if isinstance(wrapped, PlainLM):
        check_plain(wrapped)
        return wrapped
    try:
        check_model(wrapped)
        return wrapped
    except ModelError as wrong:
        live = wrapped.bridge.original_model
        plain = _plain(live, wrapped.tokenizer, wrapped.name, wrapped.weights_note, str(wrong))
        try:
            check_plain(plain)
        except ModelError as refusal:
            raise ModelError(f"{wrong}; nor without the bridge: {refusal}") from wrong
        plain.adapter = wrapped.adapter
        return plain


def _plain(live: LiveModule, tokenizer: LiveTokenizer, name: str, note: str, why: str) -> "PlainLM":
    from cacheprobe.models.plain.lm import PlainLM

    try:
        return PlainLM(live, tokenizer, name, note, why)
    except ModelError as refusal:
        raise ModelError(f"{refusal}; nor with a bridge: {why}") from refusal
