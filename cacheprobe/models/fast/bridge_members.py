"""Lists the members of CachedLM that the fast forward takes unchanged from its bridge."""

from operator import attrgetter

from cacheprobe.models.hf.bridge import BridgeLM


class BridgeMembers:
    """Reads members of CachedLM (name, dtype, tokenizer, new_cache and others) from `origin`, a BridgeLM, at every
    access. Base class of HookedHF, the fast forward."""

    origin: BridgeLM

    name = property(attrgetter("origin.name"))
    weights_note = property(attrgetter("origin.weights_note"))
    n_layers = property(attrgetter("origin.n_layers"))
    d_model = property(attrgetter("origin.d_model"))
    d_vocab = property(attrgetter("origin.d_vocab"))
    n_ctx = property(attrgetter("origin.n_ctx"))
    head_shape = property(attrgetter("origin.head_shape"))
    operations = property(attrgetter("origin.operations"))
    dtype = property(attrgetter("origin.dtype"))
    device = property(attrgetter("origin.device"))
    tokenizer = property(attrgetter("origin.tokenizer"))
    prepend_bos = property(attrgetter("origin.prepend_bos"))
    stop_token_ids = property(attrgetter("origin.stop_token_ids"))
    stop_source = property(attrgetter("origin.stop_source"))
    new_cache = property(attrgetter("origin.new_cache"))
    injected_layers = property(attrgetter("origin.injected_layers"))
    check_settings = property(attrgetter("origin.check_settings"))
    unembedding = property(attrgetter("origin.unembedding"))
    output_parts = property(attrgetter("origin.output_parts"))
    head_writer = property(attrgetter("origin.head_writer"))
    read_out = property(attrgetter("origin.read_out"))
    read_tokens = property(attrgetter("origin.read_tokens"))
    read_out_with_gradients = property(attrgetter("origin.read_out_with_gradients"))
    encode = property(attrgetter("origin.encode"))
    decode = property(attrgetter("origin.decode"))
    token_texts = property(attrgetter("origin.token_texts"))
    to_activation_cache = property(attrgetter("origin.to_activation_cache"))
    logit_choice = property(attrgetter("origin.logit_choice"))
