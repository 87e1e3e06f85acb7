"""A Thinking States model as a CachedLM: thoughts are written inside the forward, in every phase.

A pass may hold several chunks, and a chunk's state is known only after the previous chunk was read. Therefore the
blocks between l_in and l_out run in rounds. An unknown state is first assumed to be that of the empty thought. T then
reads the chunks that end in the pass, up to the first whose thought is not empty; in that case the round runs again
with the new state. Recomputing a chunk under the same states gives the same bits, so the result equals that of one
chunk after another. All rounds have the pass's own shape, so determinism needs no further measure.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from cacheprobe.core.hook_names import PATTERN, hook_name, resid_pre_name
from cacheprobe.core.live import LiveModule, LiveTokenizer
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.base import ModelError, StateEdit, StateSink
from cacheprobe.models.facts import checksum_of, sha256_of
from cacheprobe.models.hf.hooked import ActivationCache, HookPoint
from cacheprobe.models.output_parts import HeadWriter, OutputParts, head_weights
from cacheprobe.models.settings import numeric_settings
from cacheprobe.models.thinking.blocks import Memory, Remembered, attention_bias
from cacheprobe.models.thinking.cache import RowThought, ThinkingCache
from cacheprobe.models.thinking.config import TrainingRecord
from cacheprobe.models.thinking.model import ThinkingModel
from cacheprobe.models.turns import computing, one_at_a_time
from cacheprobe.ops.attention.by_request import BY_REQUEST
from cacheprobe.ops.sampling import lowest_argmax
from cacheprobe.tasks.words import encode_strictly

_Hook = tuple[str | Callable[..., object], Callable[..., object]]
"""(hook name, function), as TransformerLens takes them."""


@dataclass(frozen=True)
class _End:
    """A chunk that ends in the current pass."""

    cache_row: int
    slot: int
    end: int
    """Absolute position of its last token."""


class ThinkingLM:
    """Runs a ThinkingModel on our cache.

    Text prompts are padded in front to whole chunks. If a prompt of token ids does not fill its last chunk, that chunk
    writes no thought. Each thought is decoded by itself in one fixed shape, so its bits depend only on its chunk.
    Source: Thinking States (arXiv 2602.08332), section 3; rounds: its speculative thinking.
    Twin: tests.twins.thinking_slowly.read_slowly, thoughts ==, logits close(1e-5).
    """

    def __init__(
        self, model: ThinkingModel, tokenizer: LiveTokenizer = None, name: str = "thinking", note: str = ""
    ) -> None:
        self.model, self.tokenizer, self.name, self.weights_note = model.eval(), tokenizer, name, note
        self.config = config = model.config
        self.n_layers, self.d_model, self.d_vocab = config.n_layers, config.d_model, config.d_vocab
        self.n_ctx = config.n_ctx
        self.head_shape = (config.n_heads, config.d_head)
        weight = model.embed.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.stop_token_ids = (config.eos_id,)
        self.injected_layers = (config.l_in,) if config.thinks and config.feeds_back else ()
        self.record: TrainingRecord = {}
        """How the model was trained; empty if it was not loaded from a folder."""
        self.num_rounds = 0
        """Number of rounds of the last forward."""
        self._made_with = config.think_while_decoding
        self._trivial: tuple[int, ...] = (config.eos_id,)
        self._states: dict[tuple[int, ...], Tensor] = {}
        self._valid_for: object = None
        self._hashed = "", ""
        self._listeners: list[tuple[dict[tuple[str, int], Tensor], StateSink]] = []
        """For each capture: the activations of the current forward, and the sink that receives them."""
        self._compression_points = [p for n, p in model.hook_dict.items() if n.startswith("compression")]

    @property
    def chunk(self) -> int:
        """Tokens in a chunk; a thought is written at the end of each."""
        return self.config.chunk

    def __repr__(self) -> str:
        return f"ThinkingLM({self.name}, {self.model!r})"

    attends_by_request = True

    # -- running

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """Returns an empty ThinkingCache; a plain KVCache for a backbone without thoughts."""
        c = self.config
        shapes = self.model.layer_shapes
        if not c.thinks:
            return KVCache(num_rows, capacity, shapes, self.dtype, self.device)
        return ThinkingCache(num_rows, capacity, shapes, self.dtype, self.device, c.d_model, c.chunk)

    def set_think_while_decoding(self, wanted: object) -> None:
        """Sets whether chunks that hold generated tokens also write thoughts, overriding the stored setting.

        Raises: ModelError for a model without thoughts.
        """
        if not isinstance(wanted, bool):
            raise ModelError(f"think_while_decoding must be True or False, got {wanted!r}")
        if not self.config.thinks:
            raise ModelError(f"{self.name} writes no thoughts, in no phase; leave out think_while_decoding")
        self.config = self.model.config = replace(self.config, think_while_decoding=wanted)

    def check_settings(self, window: int) -> None:
        """Raises: ModelError if the model thinks while decoding and the window is not a multiple of the chunk size."""
        self.config.check_window(self.name, window)

    @one_at_a_time()
    @torch.inference_mode()
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
        """Runs one forward, as CachedLM.forward describes, and notes new thoughts in the cache."""
        self._forget_old_states()
        cache.take_thoughts()  # of a pass that failed
        for heard, _ in self._listeners:
            heard.clear()
        config, model, ran = self.config, self.model, self.n_layers if num_layers is None else num_layers
        positions = cache.stage(cache_rows, starts, token_ids.shape[1])
        try:
            memory = self._memory(cache, positions)
            run = partial(model._blocks, positions=positions, memory=memory)
            x = model.hook_embed(model.embed(token_ids.to(self.device)))
            x = run(x, 0, min(config.l_in, ran))
            if ran > config.l_in and not config.thinks:
                x = model.hook_h(run(x, config.l_in, min(config.l_out, ran)))
            elif ran > config.l_in:
                assert isinstance(cache, ThinkingCache)
                x = self._in_rounds(x, cache, cache_rows, positions, memory, min(config.l_out, ran))
            x = run(x, config.l_out, ran) if ran > config.l_out else x
        finally:
            cache.unstage()
        for heard, sink in self._listeners:
            for (site, layer), value in heard.items():
                sink(site, layer, value)
        if num_layers is not None:
            return x
        return model.read_out(x if logit_slots is None else x[:, list(logit_slots)])

    def _in_rounds(
        self, x: Tensor, cache: ThinkingCache, cache_rows: Sequence[int], positions: Tensor, memory: Memory, last: int
    ) -> Tensor:
        """Runs the blocks between l_in and `last` once, and once more for every thought that is not empty."""
        config, h = self.config, x
        open_ends = self._ends(cache, cache_rows, positions)
        row_index = torch.tensor(list(cache_rows))[:, None]
        made: list[RowThought] = []
        for end in (end for ends in open_ends for end in ends):
            self._set_state(cache, end, self.state_of(self._trivial))
        self.num_rounds = 0
        is_final = False
        while not is_final:
            self.num_rounds += 1
            states = self._states_at(cache, row_index, positions)
            h = self.model._blocks(x + self.model.hook_state(states), config.l_in, last, positions, memory)
            h = self.model.hook_h(h)
            if last < config.l_out:
                return h
            cache.h_rows[row_index, positions] = h
            is_final = True
            for ends in open_ends:
                while ends:
                    end = ends.pop(0)
                    made.append(self._think(end, cache.h_rows[end.cache_row, end.end - config.chunk + 1 : end.end + 1]))
                    if made[-1].token_ids != self._trivial:  # what was read after it was read under another state
                        self._set_state(cache, end, made[-1].state)
                        is_final &= end.slot + 1 == positions.shape[1]
                        break
        for thought in made:
            cache.note(thought)
        return h

    def _ends(self, cache: KVCache, cache_rows: Sequence[int], positions: Tensor) -> list[list[_End]]:
        """Returns the chunks that end in this pass and must write a thought, for each batch index, in order; none for
        unused rows."""
        c = self.config.chunk
        thinks = (positions + 1) % c == 0
        if not self.config.think_while_decoding:
            thinks &= positions < cache.prompt_lengths[list(cache_rows)][:, None]
        return [
            [_End(cache_row, t, int(positions[b, t])) for t in thinks[b].nonzero().flatten().tolist()]
            for b, cache_row in enumerate(cache_rows)
            if not cache.is_free(cache_row)
        ]

    def _states_at(self, cache: ThinkingCache, row_index: Tensor, positions: Tensor) -> Tensor:
        """Returns the state to add at each position, [b, t, m]: the previous chunk's; S_1 in the first chunk; zero if
        there is no thought."""
        config = self.config
        if not config.feeds_back:
            return torch.zeros(*positions.shape, self.d_model, dtype=self.dtype, device=self.device)
        states = cache.states[row_index, positions]
        start = positions // config.chunk * config.chunk
        is_known = start > 0
        if not config.think_while_decoding:
            is_known &= start <= cache.prompt_lengths[row_index]
        states = states * is_known[..., None].to(states.dtype)
        if config.learned_first_state:
            first = self.model.first_state[positions % config.chunk]
            states = torch.where((start == 0)[..., None], first, states)
        return states

    def _set_state(self, cache: ThinkingCache, end: _End, state: Tensor) -> None:
        cache.states[end.cache_row, end.end + 1 : end.end + 1 + self.config.chunk] = state

    def _memory(self, cache: KVCache, positions: Tensor) -> Memory:
        slots = torch.arange(cache.span)[None]
        bias = attention_bias(self.config, positions, slots, self.config.attention_window)
        if not self.config.thinks:  # rows of keys and values alone may be masked by cache surgery
            bias = bias + cache.mask(positions, bias.dtype, self.device)
        lowest = max(torch.finfo(dtype).min for dtype in (bias.dtype, self.dtype))
        bias = bias.clamp_(min=lowest).to(self.dtype)  # finite in 16 bits too
        bias = cache.mask_by_layer(bias, self.config.n_heads)

        def memory(layer: int, keys: Tensor, values: Tensor) -> Remembered:
            """Writes keys and values to the cache; returns the cached ones, the mask and the pass's Reach."""
            return *cache.write(layer, keys, values), bias, cache.reach

        return memory

    # -- thinking

    def _think(self, end: _End, hidden: Tensor) -> RowThought:
        """Writes one thought from H [c, m], greedily, in one fixed shape for every length."""
        config = self.config
        ids, logprobs = [], []
        padded = torch.full((1, config.max_thought), config.pad_id, device=self.device)
        first = None
        for i in range(config.max_thought):
            logits = self.model.think(hidden[None], padded)[0, i].float()
            first = logits if first is None else first
            token_id = lowest_argmax(logits)
            ids.append(token_id)
            logprobs.append(float(logits.log_softmax(-1)[token_id]))
            padded[0, i] = token_id
            if token_id == config.eos_id:
                break
        assert first is not None
        has_ended = ids[-1] == config.eos_id
        return RowThought(
            end.cache_row, end.end, tuple(ids), has_ended, tuple(logprobs), first, self.state_of(tuple(ids))
        )

    def state_of(self, thought_ids: tuple[int, ...]) -> Tensor:
        """Returns the state [c, m] that C computes from one thought; each distinct thought is computed once, alone."""
        if thought_ids not in self._states:
            width = max(len(thought_ids), self.config.max_thought)
            ids = torch.tensor([[*thought_ids, *[self.config.pad_id] * (width - len(thought_ids))]])
            with torch.inference_mode():
                self._states[thought_ids] = self.model.compress(ids.to(self.device))[0]
        return self._states[thought_ids]

    def _forget_old_states(self) -> None:
        """Clears the stored states if the weights changed or C has hooks."""
        versions = tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in self.model.parameters())
        is_hooked = any(point.fwd_hooks for point in self._compression_points)
        if is_hooked or self._valid_for != (versions, is_hooked):
            self._states.clear()
        self._valid_for = (versions, is_hooked)

    # -- the interface for the engine and the recorder

    @contextmanager
    def capturing(self, sites: Sequence[tuple[str, int]], sink: StateSink) -> Iterator[None]:
        """Calls `sink` inside the `with`, as CachedLM.capturing describes. For a layer that runs in rounds, captures
        the last round."""
        heard: dict[tuple[str, int], Tensor] = {}

        def hear(site: str, layer: int, value: Tensor, hook: HookPoint) -> None:
            """Keeps the newest activation of this site and layer."""
            heard[site, layer] = value

        hooks = self._hooks(sites, hear)
        listener = (heard, sink)
        self._listeners.append(listener)
        try:
            with computing, self.model.hooks(fwd_hooks=hooks):
                yield
        finally:
            self._listeners = [other for other in self._listeners if other is not listener]

    @property
    def unembedding(self) -> Tensor:
        """The matrix [v, m] that maps the normalised residual stream to logits."""
        unembed: LiveModule = self.model.unembed
        return unembed.weight

    def output_parts(self) -> OutputParts:
        """Returns the final norm, the unembedding and its bias separately."""
        unembed: LiveModule = self.model.unembed
        return OutputParts(self.model.ln_final, unembed.weight, unembed.bias, lambda logits: logits)

    def head_writer(self, layer: int) -> HeadWriter:
        """Returns the output projection of a layer's heads, split by head."""
        block: LiveModule = self.model.blocks[layer]
        projection = block.attn.projection
        return HeadWriter(head_weights(projection, self.head_shape[0]), projection.bias, None)

    @contextmanager
    def editing(self, sites: Sequence[tuple[str, int]], edit: StateEdit) -> Iterator[None]:
        """Lets `edit` replace activations, as CachedLM.editing describes; in each round, if a layer runs in rounds."""

        def change(site: str, layer: int, value: Tensor, hook: HookPoint) -> Tensor | None:
            """Returns the edited activation, None if unchanged."""
            return edit(site, layer, value)

        with computing, self.model.hooks(fwd_hooks=self._hooks(sites, change)):
            yield

    def _hooks(self, sites: Sequence[tuple[str, int]], call: Callable[..., Tensor | None]) -> list[_Hook]:
        if any(site == PATTERN for site, _ in sites):  # it would be computed apart, and other bits with it
            raise ModelError(f"{self.name} attends without forming a pattern, so none can be kept; leave out 'pattern'")
        hooks: list[_Hook] = [(hook_name(site, layer), partial(call, site, layer)) for site, layer in sites]
        if missing := [name for name, _ in hooks if name not in self.model.hook_dict]:
            raise ModelError(f"{self.name} has no hook {missing[0]}")
        return hooks

    @one_at_a_time()
    @torch.inference_mode()
    def read_out(self, states: Tensor) -> Tensor:
        """Returns logits [n, v] of residual states [n, m]: final norm, then unembedding."""
        return self.model.read_out(states)

    def read_out_with_gradients(self, states: Tensor) -> Tensor:
        """Returns the same numbers as `read_out`, for training: gradients flow back into `states`."""
        return self.model.read_out(states)

    def fingerprint(self) -> dict[str, str | int | float]:
        """Returns every property of the model and its platform that may change the bits of a result."""
        now = self.config.think_while_decoding
        return {
            "model": self.name,
            "weights_sha256": self._weights_sha256(),
            "architecture": f"{type(self.model).__name__} {sorted(self.config.to_json().items())}",
            "path": "thinking",
            "attention": BY_REQUEST,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            **({"think_while_decoding": now} if now != self._made_with else {}),  # `verify` sets it as it was
            **numeric_settings(),
        }

    def _weights_sha256(self) -> str:
        """Returns the hash of the weights; after an edit, recomputes the hash and clears the stored states."""
        named = sorted(self.model.named_parameters(), key=lambda item: item[0])
        if self._hashed[0] != (checksum := checksum_of(named)):
            self._hashed = checksum, sha256_of(named)
            self._states.clear()
        return self._hashed[1]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Returns the token ids of a text; with special tokens, pads in front complete the first chunk.

        Raises: ModelError for a word outside the model's vocabulary, or if there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ModelError(f"{self.name} has no tokenizer, so prompts must be lists of token ids, not text")
        try:
            ids = encode_strictly(self.tokenizer, text)
        except ValueError as error:
            raise ModelError(f"{self.name}: {error}") from error
        pads = -len(ids) % self.config.chunk if add_special_tokens else 0
        return (*[self.config.pad_id] * pads, *ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids; "<17> <4>" if there is no tokenizer."""
        if self.tokenizer is None:
            return " ".join(self.token_texts(token_ids))
        return self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token by itself; "<17>" for token 17 if there is no tokenizer."""
        if self.tokenizer is None:
            return [f"<{token_id}>" for token_id in token_ids]
        return [self.tokenizer.decode([t], clean_up_tokenization_spaces=False) for t in token_ids]

    def to_activation_cache(self, states: dict[tuple[str, int], Tensor]) -> ActivationCache:
        """Returns TransformerLens' ActivationCache of states [p, m], keyed by (site, layer)."""
        named = {hook_name(site, layer): value[None] for (site, layer), value in states.items()}
        for (site, layer), value in states.items():
            if site == "S" and layer + 1 < self.n_layers and layer + 1 != self.config.l_in:
                named[resid_pre_name(layer + 1)] = value[None]
        return ActivationCache(named, self.model, has_batch_dim=True)
