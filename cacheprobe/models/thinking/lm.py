"""Runs a Thinking States model as a CachedLM: the forward itself writes thoughts, whatever the phase of the pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cacheprobe.core.hook_names import PATTERN
from cacheprobe.core.live import LiveModule, LiveTokenizer
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.base import HeadWriter, ModelError, OutputParts, StateSink
from cacheprobe.models.hf.lm import HookedSites
from cacheprobe.models.settings import numeric_settings, one_at_a_time
from cacheprobe.models.thinking.cache import ChunkStates, ThinkingCache, cache_memory
from cacheprobe.models.thinking.config import TrainingRecord
from cacheprobe.models.thinking.model import ThinkingModel
from cacheprobe.models.thinking.rounds import Rounds
from cacheprobe.models.weights import head_weights
from cacheprobe.ops.attention import BY_REQUEST
from cacheprobe.tasks.words import encode_strictly


class ThinkingLM(HookedSites):
    """Runs a ThinkingModel on our KVCache, as a CachedLM. If the model has thoughts, each forward writes those of the
    prompt chunks that end in that forward; with think_while_decoding, those of generated chunks too.

    Text prompts are padded in front to whole chunks. If a prompt of token ids does not fill its last chunk, that chunk
    writes no thought. Each thought is decoded by itself in one fixed shape, so its bits depend only on its chunk.
    Source: Thinking States (arXiv 2602.08332), section 3; rounds: its speculative thinking.
    Twin: tests.twins.thinking_slowly.read_slowly, thoughts ==, logits close(1e-5).
    """

    def __init__(
        self, model: ThinkingModel, tokenizer: LiveTokenizer = None, name: str = "thinking", note: str = ""
    ) -> None:
        self.model = self.live = self.hooked_module = model.eval()
        self.tokenizer, self.name, self.weights_note = tokenizer, name, note
        self.config = config = model.config
        self.n_layers, self.d_model, self.d_vocab = config.n_layers, config.d_model, config.d_vocab
        self.n_ctx = config.n_ctx
        self.head_shape = (config.n_heads, config.d_head)
        weight = model.embed.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.stop_token_ids, self.stop_source = (config.eos_id,), "the model's config"
        self.injected_layers = (config.l_in,) if config.thinks and config.feeds_back else ()
        self.record: TrainingRecord = {}
        """Training record: how the model was trained; empty if the model was not loaded from a folder."""
        self.num_rounds = 0
        """Number of rounds of the last forward."""
        self._stored_think_while_decoding = config.think_while_decoding
        self._chunk_states = ChunkStates(model)
        self._captures: list[tuple[dict[tuple[str, int], Tensor], StateSink]] = []
        """For each `capturing`: the activations of the current forward, and the sink that receives them."""

    @property
    def chunk(self) -> int:
        """Number of tokens in a chunk; the model writes a thought at the end of each chunk."""
        return self.config.chunk

    def __repr__(self) -> str:
        return f"ThinkingLM({self.name}, {self.model!r})"

    attends_by_request = True

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """Returns an empty ThinkingCache with `num_rows` cache rows of `capacity` token slots each; a plain KVCache if
        the model writes no thoughts."""
        c = self.config
        shapes = self.model.layer_shapes
        if not c.thinks:
            return KVCache(num_rows, capacity, shapes, self.dtype, self.device)
        return ThinkingCache(num_rows, capacity, shapes, self.dtype, self.device, c.d_model, c.chunk)

    def set_think_while_decoding(self, wanted: object) -> None:
        """Sets whether chunks that hold generated tokens also write thoughts, overriding the stored setting.

        Raises: ModelError for a model without thoughts, and for a value other than True or False.
        """
        if not isinstance(wanted, bool):
            raise ModelError(f"think_while_decoding must be True or False, got {wanted!r}")
        if not self.config.thinks:
            raise ModelError(f"{self.name} writes no thoughts, in no phase; leave out think_while_decoding")
        self.config = self.model.config = replace(self.config, think_while_decoding=wanted)

    def check_settings(self, window: int) -> None:
        """Checks that the model supports verify windows of `window` tokens. Raises: ModelError if the model thinks
        while decoding and the window is not a multiple of the chunk size."""
        self.config.check_window(self.name, window)

    def _forward(
        self, token_ids: Tensor, cache: StagedCache, num_layers: int | None, logit_slots: Sequence[int] | None
    ) -> Tensor:
        """Returns what `forward` returns. Stores new thoughts in the cache, for `take_thoughts`."""
        self._chunk_states.forget_old()
        cache.cache.take_thoughts()  # of a pass that failed
        for captured, _ in self._captures:
            captured.clear()
        config, model, ran = self.config, self.model, self.n_layers if num_layers is None else num_layers
        positions, memory = cache.placed(self.device).positions, cache_memory(config, cache)
        run = partial(model.run_blocks, positions=positions, memory=memory)
        x = model.hook_embed(model.embed(token_ids))
        x = run(x, 0, min(config.l_in, ran))
        if ran > config.l_in and not config.thinks:
            x = model.hook_h(run(x, config.l_in, min(config.l_out, ran)))
        elif ran > config.l_in:
            rounds = Rounds(self._chunk_states, cache, memory)
            x = rounds.run(x, min(config.l_out, ran))
            self.num_rounds = rounds.count
        x = run(x, config.l_out, ran) if ran > config.l_out else x
        for captured, sink in self._captures:
            for (site, layer), value in captured.items():
                sink(site, layer, value)
        if num_layers is not None:
            return x
        return model.read_out(x if logit_slots is None else x[:, list(logit_slots)])

    def state_of(self, thought_ids: tuple[int, ...]) -> Tensor:
        """Returns the chunk state [c, m] that the compression block C computes from one thought."""
        return self._chunk_states.of(thought_ids)

    @contextmanager
    def capturing(self, sites: Sequence[tuple[str, int]], sink: StateSink) -> Iterator[None]:
        """Returns a context manager. Inside its `with`, a forward calls `sink(site, layer, activation)` for each (site,
        layer) pair of `sites` whose layer it runs, after its last block. Layers that run in several rounds give the
        last round's activation."""
        captured: dict[tuple[str, int], Tensor] = {}

        def capture(site: str, layer: int, value: Tensor) -> None:
            """Stores the newest activation of this site and layer."""
            captured[site, layer] = value

        with self._hooked(sites, capture):
            own = captured, sink
            self._captures.append(own)
            try:
                yield
            finally:
                self._captures = [other for other in self._captures if other is not own]

    def _check_sites(self, sites: Sequence[tuple[str, int]]) -> None:
        """Raises: ModelError for a site without a hook, and for the site of attention patterns."""
        if any(site == PATTERN for site, _ in sites):  # it would be computed apart, and other bits with it
            raise ModelError(f"{self.name} attends without forming a pattern, so none can be kept; leave out 'pattern'")
        super()._check_sites(sites)

    def output_parts(self) -> OutputParts:
        """Returns the steps from the last residual stream to the logits as OutputParts: final norm, unembedding matrix
        [v, m], bias, and a last function that changes nothing."""
        unembed: LiveModule = self.model.unembed
        return OutputParts(self.model.ln_final, unembed.weight, unembed.bias, lambda logits: logits)

    def head_writer(self, layer: int) -> HeadWriter:
        """Returns the steps from one layer's attention heads to the residual stream as a HeadWriter: output projection
        split by head [h, d, m], bias, and no norm."""
        block: LiveModule = self.model.blocks[layer]
        projection = block.attn.projection
        return HeadWriter(head_weights(projection, self.head_shape[0]), projection.bias, None)

    @one_at_a_time()
    @torch.inference_mode()
    def read_out(self, states: Tensor) -> Tensor:
        """Returns logits [n, v] of residual states [n, m]: final norm, then unembedding. Records no gradients."""
        return self.model.read_out(states)

    def read_out_with_gradients(self, states: Tensor) -> Tensor:
        """Returns the logits of `read_out`, and lets gradients flow back into `states`."""
        return self.model.read_out(states)

    def fingerprint(self) -> dict[str, str | int | float]:
        """Returns a dictionary of properties of the model, the libraries and the process that may change the bits of a
        result: weights hash, dtype, device, threads and others."""
        now = self.config.think_while_decoding
        self._chunk_states.forget_other_weights(weights := self.weights_sha256)
        return {
            "model": self.name,
            "weights_sha256": weights,
            "architecture": f"{type(self.model).__name__} {sorted(self.config.to_json().items())}",
            "path": "thinking",
            "attention": BY_REQUEST,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            # only if the caller changed the setting, so that `cacheprobe verify` loads the model with the same one
            **({"think_while_decoding": now} if now != self._stored_think_while_decoding else {}),
            **numeric_settings(),
        }

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Returns the token ids of a text as a tuple. If `add_special_tokens`, pads in front make the number of ids a
        multiple of the chunk size.

        Raises: ModelError for a word outside the model's vocabulary, or if there is no tokenizer.
        """
        tokenizer = self._required_tokenizer()
        try:
            ids = encode_strictly(tokenizer, text)
        except ValueError as error:
            raise ModelError(f"{self.name}: {error}") from error
        pads = -len(ids) % self.config.chunk if add_special_tokens else 0
        return (*[self.config.pad_id] * pads, *ids)
