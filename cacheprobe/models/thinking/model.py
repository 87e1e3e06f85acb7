"""Defines the Thinking States model: a decoder in which each chunk of input writes a thought that is added to the next
chunk.

    S_1 = 0;  X~_i = X_i + S_i at l_in;  H_i = output of block l_out - 1;  Z_{i+1} = T(H_i);  S_{i+1} = C(Z_{i+1})

This file holds the parts and the single parallel pass for training; `models.thinking.rounds` runs the model over a
cache, one chunk after another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from cacheprobe.core.live import LiveModule
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.hooked import HookedRootModule, HookPoint
from cacheprobe.models.thinking.blocks import Block, Memory, RMSNorm, alibi_slopes, attention_bias, new_block
from cacheprobe.models.thinking.config import ThinkingConfig


class ThinkingBlock(nn.Module):
    """Implements T, the thinking block: decoder layers that read one chunk's layer outputs H (of layer l_out - 1) and
    the thought so far, and predict the next thought token. T has its own unembedding.

    The first thought token is predicted at the last position of H: there is no start token. T sees only its own chunk.
    Source: Thinking States (arXiv 2602.08332), Eq. 4.
    """

    def __init__(self, config: ThinkingConfig, blocks: nn.ModuleList, ln_final: nn.Module, unembed: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.blocks, self.ln_final, self.unembed = blocks, ln_final, unembed
        self.hook_in, self.hook_logits = HookPoint(), HookPoint()

    def forward(self, hidden: Float[Tensor, "n c m"], thought: Float[Tensor, "n r m"]) -> Float[Tensor, "n r1 v"]:
        """Returns logits [n, r + 1, v] of thought tokens 0 to r. hidden: layer outputs H of n chunks, [n, c, m].
        thought: embeddings of thought tokens 0 to r - 1, [n, r, m]."""
        x = self.hook_in(torch.cat([hidden, thought], dim=1))
        positions = torch.arange(x.shape[1], device=x.device)[None]
        memory = self._memory(hidden.shape[1], positions)
        for block in self.blocks:
            x = block(x, positions, memory)
        return self.hook_logits(self.unembed(self.ln_final(x[:, hidden.shape[1] - 1 :])))

    def _memory(self, prefix: int, positions: Tensor) -> Memory:
        """Returns the Memory for the layers of the thinking block: a function that returns the given keys and values,
        and the attention mask. prefix: number of positions that belong to H."""
        if self.config.positions != "alibi" and not self.config.bidirectional_prefix:
            return at_hand
        bias = attention_bias(self.config, positions, positions, None)
        if self.config.bidirectional_prefix:
            bias[..., :prefix, :prefix] = 0
        return lambda layer, k, v: (k, v, bias)


class Compression(nn.Module):
    """Implements C, the compression block: an encoder layer over a thought, whose outputs are pooled to a chunk state
    of c positions.

    Pads stand before the thought and no thought token attends to a pad, so pads do not dilute a short thought.
    Source: Thinking States (arXiv 2602.08332), Eq. 5 and appendix A.1: the last c outputs, shorter thoughts padded.
    """

    def __init__(self, config: ThinkingConfig, block: Block) -> None:
        super().__init__()
        self.config = config
        self.block = block
        self.hook_in, self.hook_state = HookPoint(), HookPoint()
        if config.pooling == "query":
            self.queries = nn.Parameter(torch.randn(config.chunk, config.d_model) * config.d_model**-0.5)

    def forward(self, thought: Float[Tensor, "n l m"], is_real: Int[Tensor, "n l"]) -> Float[Tensor, "n c m"]:
        """Returns chunk states [n, c, m]. thought: embeddings [n, l, m], padded in front to at least c positions;
        is_real: 1 at thought tokens, 0 at pads."""
        if self.config.pooling == "query":
            thought = torch.cat([thought, self.queries.expand(len(thought), -1, -1)], dim=1)
            is_real = torch.cat([is_real, is_real.new_zeros(len(is_real), self.config.chunk)], dim=1)
        x = self.hook_in(thought)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        lowest = torch.finfo(x.dtype).min
        hidden = (is_real == 0)[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        if self.config.compression_is_causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            # a pad in front precedes all real tokens; it sees itself, so that every query has a key
            own = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
            hidden = (hidden | later) & ~own
        bias = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device).masked_fill_(hidden, lowest)
        if self.config.positions == "alibi":
            both_ways = (positions[:, :, None] - positions[:, None, :]).abs()
            bias = bias - alibi_slopes(self.config.n_heads, x.device)[:, None, None] * both_ways[:, None]
        x = self.block(x, positions, lambda layer, k, v: (k, v, bias))
        return self.hook_state(x[:, -self.config.chunk :])


@dataclass(frozen=True)
class ThinkingParts:
    """Holds the modules of a Thinking States model: embedding, blocks, final norm, unembedding, thinking block,
    compression block. The last two are None in a model without thoughts."""

    embed: nn.Embedding
    blocks: nn.ModuleList
    ln_final: nn.Module
    unembed: nn.Module
    thinking: ThinkingBlock | None
    compression: Compression | None


def new_parts(config: ThinkingConfig) -> ThinkingParts:
    """Returns the ThinkingParts of a new model: modules with random weights, for training from scratch."""
    parts = ThinkingParts(
        nn.Embedding(config.d_vocab, config.d_model),
        *_new_decoder(config, config.n_layers),
        ThinkingBlock(config, *_new_decoder(config, config.thinking_layers)) if config.thinks else None,
        Compression(config, new_block(config, 0)) if config.thinks else None,
    )
    for part in vars(parts).values():
        if part is not None:
            _scale(part, config)
    return parts


def _new_decoder(config: ThinkingConfig, num_layers: int) -> tuple[nn.ModuleList, RMSNorm, nn.Linear]:
    """Returns (blocks, final norm, unembedding) of a decoder with new weights."""
    blocks = nn.ModuleList([new_block(config, i) for i in range(num_layers)])
    return blocks, RMSNorm(config.d_model), nn.Linear(config.d_model, config.d_vocab, bias=False)


def _scale(part: nn.Module, config: ThinkingConfig) -> None:
    """Initialises the matrices of `part`, except learned queries, in place, at random, scaled as in GPT-2."""
    std = 0.02 * (768 / config.d_model) ** 0.5
    for name, weight in part.named_parameters():
        if weight.dim() == 2 and not name.endswith("queries"):
            is_writer = name.endswith(("attn.out.weight", "mlp.down.weight"))
            nn.init.normal_(weight, std=std / (2 * config.n_layers) ** 0.5 if is_writer else std)


class ThinkingModel(HookedRootModule):
    """Computes a Thinking States model: backbone, thinking block (T) and compression block (C). Hook points of the
    backbone have TransformerLens' names; those of T and C start with `thinking.` and `compression.`.

    `hook_state` has the chunk states S that are added, [b, t, m]; `hook_h` has H, the output of block l_out - 1;
    `thinking.hook_logits` has the logits of thoughts.
    Source: Thinking States (arXiv 2602.08332), section 3.  Twin: tests.twins.thinking_slowly.read_slowly.
    """

    def __init__(
        self, config: ThinkingConfig, seed: int = 0, make: Callable[[ThinkingConfig], ThinkingParts] = new_parts
    ) -> None:
        """Builds the modules by calling `make(config)`, under the random seed `seed`; by default with new random
        weights."""
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            parts = make(config)
        self.embed, self.blocks, self.ln_final, self.unembed = parts.embed, parts.blocks, parts.ln_final, parts.unembed
        if parts.thinking is not None and parts.compression is not None:
            self.thinking, self.compression = parts.thinking, parts.compression
        if config.learned_first_state:
            self.first_state = nn.Parameter(self.embed.weight.new_zeros(config.chunk, config.d_model))
        self.hook_embed, self.hook_state, self.hook_h = HookPoint(), HookPoint(), HookPoint()
        self.setup()

    def __repr__(self) -> str:
        c = self.config
        kind = "ThinkingModel" if c.thinks else "ThinkingModel without thoughts"
        return f"{kind}({self.num_parameters:,} parameters, {c.n_layers} layers, d_model {c.d_model}, chunk {c.chunk})"

    @property
    def num_parameters(self) -> int:
        """Number of parameters: the sum of the sizes of all weights, also of frozen ones."""
        return sum(weight.numel() for weight in self.parameters())

    @property
    def layer_shapes(self) -> list[tuple[int, int, int]]:
        """(number of key and value heads, key width, value width) of each backbone block's cache, as a list."""
        blocks: LiveModule = self.blocks
        return [block.attn.cache_shape for block in blocks]

    # -- the parts

    def enter(self, token_ids: Int[Tensor, "b t"], positions: Tensor, memory: Memory) -> Float[Tensor, "b t m"]:
        """Embeds token_ids [b, t], runs the blocks before l_in, to which no chunk state is added, and returns the
        residual stream [b, t, m]."""
        return self.run_blocks(self.hook_embed(self.embed(token_ids)), 0, self.config.l_in, positions, memory)

    def loop(self, x: Tensor, states: Tensor | None, positions: Tensor, memory: Memory) -> Float[Tensor, "b t m"]:
        """Adds the chunk states [b, t, m] to the residual stream x, unless None, and runs blocks l_in to l_out - 1
        (both included). Returns H [b, t, m], the output of block l_out - 1."""
        if states is not None:
            x = x + self.hook_state(states)
        return self.hook_h(self.run_blocks(x, self.config.l_in, self.config.l_out, positions, memory))

    def leave(self, hidden: Tensor, positions: Tensor, memory: Memory) -> Float[Tensor, "b t m"]:
        """Runs block l_out and all later blocks on H (the output of block l_out - 1), and returns the last residual
        stream [b, t, m], before the final norm."""
        return self.run_blocks(hidden, self.config.l_out, self.config.n_layers, positions, memory)

    def run_blocks(self, x: Tensor, first: int, last: int, positions: Tensor, memory: Memory) -> Tensor:
        """Returns the residual stream [b, t, m] after running blocks `first` to `last` - 1 on x."""
        for block in self.blocks[first:last]:
            x = block(x, positions, memory)
        return x

    def read_out(self, x: Tensor) -> Tensor:
        """Returns logits [..., v] of residual states [..., m]: final norm, then unembedding."""
        return self.unembed(self.ln_final(x))

    def think(self, hidden: Float[Tensor, "n c m"], thought_ids: Int[Tensor, "n r"]) -> Float[Tensor, "n r1 v"]:
        """Returns the thinking block's logits [n, r + 1, v] of thought tokens 0 to r, given the layer outputs H of n
        chunks [n, c, m] and thought tokens 0 to r - 1. The pad token gets the lowest logit."""
        logits = self.thinking(hidden, self.embed(thought_ids))
        logits[..., self.config.pad_id] = torch.finfo(logits.dtype).min
        return logits

    def compress(self, thought_ids: Int[Tensor, "n r"]) -> Float[Tensor, "n c m"]:
        """Returns the chunk states [n, c, m] of thoughts, given as token ids [n, r] padded at the end."""
        padded = pad_in_front(thought_ids, max(self.config.chunk, thought_ids.shape[1]), self.config.pad_id)
        return self.compression(self.embed(padded), (padded != self.config.pad_id).long())

    # -- training

    def forward(
        self,
        token_ids: Int[Tensor, "b t"],
        thoughts: Int[Tensor, "b k r"] | None = None,
        positions: Int[Tensor, "b t"] | None = None,
        bias: Float[Tensor, "b 1 t t"] | None = None,
    ) -> tuple[Float[Tensor, "b t v"], Float[Tensor, "b k r v"] | None]:
        """Runs all chunks in one pass with given thoughts, for training. Returns (logits [b, t, v] of the text, logits
        [b, k, r, v] of every thought token; None for a model without a thinking block T).

        thoughts: one for each of the first k chunks, including its end token, padded at the end; thought i is computed
        from chunk i and acts on chunk i + 1. None for a model without T.  positions: 0, 1, ... by default.
        bias: added to the attention scores of the backbone, [text, 1, query, key]; the result must stay causal.
        Raises: ModelError for thoughts with more tokens than max_thought, or of more chunks than the text has;
        ValueError if a model with T gets no thoughts.
        """
        if positions is None:
            positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        memory = self._whole(positions, bias)
        x = self.enter(token_ids, positions, memory)
        if not self.config.thinks:
            return self.read_out(self.leave(self.loop(x, None, positions, memory), positions, memory)), None
        if thoughts is None:
            raise ValueError(
                "a pass over all chunks at once needs the thoughts; give them, or run the model on a cache"
            )
        self._check_shape(thoughts, token_ids.shape[1])
        hidden = self.loop(x, self.states_of(thoughts, token_ids.shape[1]), positions, memory)
        logits = self.read_out(self.leave(hidden, positions, memory))
        b, k, _ = thoughts.shape
        chunks = rearrange(hidden[:, : k * self.config.chunk], "b (k c) m -> (b k) c m", k=k)
        thought_logits = self.think(chunks, rearrange(thoughts, "b k r -> (b k) r")[:, :-1])
        return logits, rearrange(thought_logits, "(b k) r v -> b k r v", b=b)

    def _check_shape(self, thoughts: Int[Tensor, "b k r"], length: int) -> None:
        """Raises: ModelError for thoughts with more tokens than max_thought, or more chunks than `length` tokens
        have."""
        _, k, r = thoughts.shape
        c, longest = self.config.chunk, self.config.max_thought
        if r > longest:
            raise ModelError(
                f"thoughts of up to {r} tokens, ends included, for a model of max_thought={longest}; annotate the "
                f"texts with max_thought={longest}, or make a model with max_thought={r}"
            )
        if k > length // c:
            raise ModelError(
                f"thoughts of {k} chunks for texts of {length} tokens, which hold {length // c} chunks of {c}; give "
                f"one thought for each chunk, of texts that are annotated with chunk={c}"
            )

    def states_of(self, thoughts: Int[Tensor, "b k r"], length: int) -> Float[Tensor, "b t m"]:
        """Returns the chunk states [b, t, m] that are added at each of the first t = `length` positions of a text,
        given its thoughts.

        The thought of chunk i acts on chunk i + 1. The first chunk gets zeros, or the learned first state if the model
        has one. Positions on which no thought acts get zeros; with feeds_back=False, all do.
        """
        b, k, _ = thoughts.shape
        c, m = self.config.chunk, self.config.d_model
        out = self.embed.weight.new_zeros(b, max(length, (k + 1) * c), m)
        if self.config.feeds_back and self.config.learned_first_state:
            out[:, :c] = self.first_state
        if self.config.feeds_back:
            # few thoughts are distinct, and each is compressed once
            distinct, index = torch.unique(rearrange(thoughts, "b k r -> (b k) r"), dim=0, return_inverse=True)
            out[:, c : (k + 1) * c] = rearrange(self.compress(distinct)[index], "(b k) c m -> b (k c) m", b=b)
        return out[:, :length]

    def _whole(self, positions: Tensor, bias: Tensor | None) -> Memory:
        """Returns the Memory of the parallel pass: a function that returns the given keys and values, and a causal mask
        with `bias` added (None stands for plain causal attention)."""
        if self.config.positions != "alibi" and self.config.attention_window is None and bias is None:
            return at_hand
        own = attention_bias(self.config, positions, positions, self.config.attention_window)
        added = own if bias is None else own + bias
        return lambda layer, k, v: (k, v, added)


def at_hand(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, None]:
    """Returns (keys, values, None): a Memory without a cache, in which attention is causal over the current tokens."""
    return keys, values, None


def pad_in_front(ids: Int[Tensor, "n r"], width: int, pad_id: int) -> Int[Tensor, "n w"]:
    """Returns token ids [n, width] whose pads stand in front, from ids [n, r] whose pads stand at the end."""
    r = ids.shape[1]
    lengths = (ids != pad_id).sum(1, keepdim=True)
    source = torch.arange(width, device=ids.device)[None] - (width - lengths)
    padded = ids.gather(1, source.clamp(min=0, max=r - 1))
    return padded.masked_fill(source < 0, pad_id)


def thought_table(thoughts: Sequence[Sequence[Sequence[int]]], pad_id: int) -> Int[Tensor, "b k r"]:
    """Returns the thoughts of each chunk of each text as one tensor of token ids [texts, chunks, tokens], padded at the
    end; a missing chunk is all pads."""
    k = max(map(len, thoughts))
    r = max((len(thought) for chunks in thoughts for thought in chunks), default=1)
    table = torch.full((len(thoughts), k, max(r, 1)), pad_id)
    for b, chunks in enumerate(thoughts):
        for i, thought in enumerate(chunks):
            table[b, i, : len(thought)] = torch.tensor(thought)
    return table
