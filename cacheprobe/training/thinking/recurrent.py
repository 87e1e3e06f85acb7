"""Runs many texts through a Thinking States model side by side, with the model's own thoughts, and generates answers.

For evaluation, without the engine. `models.thinking.lm` runs a Thinking States model in the engine.
"""

from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from torch import Tensor

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.thinking.blocks import Memory, attention_bias
from cacheprobe.models.thinking.model import ThinkingModel

ThoughtIds = tuple[tuple[int, ...], ...]
"""Thoughts of one text: the token ids of the thought after each chunk."""

ChunkEdit = Callable[[int, Tensor, Sequence[int]], Tensor]
"""Function (chunk index, chunk states [n, c, m], indices of the n texts) -> chunk states to add: an intervention."""


class ChunkReader:
    """Runs texts through a Thinking States model side by side, in a KV cache with one cache row for each text."""

    def __init__(self, model: ThinkingModel, count: int, capacity: int) -> None:
        self.model, self.config = model, model.config
        weight = model.embed.weight
        self.cache = KVCache(count, capacity, model.layer_shapes, weight.dtype, weight.device)

    def feed(self, token_ids: Tensor, rows: Sequence[int], starts: Sequence[int], states: Tensor | None) -> Tensor:
        """Runs tokens [n, t] with chunk states [n, t, m] added, if given; returns H [n, t, m], the output of block
        l_out - 1.

        The tokens go to the cache rows `rows`, at positions from `starts` on. Stores the final residual stream in
        `self.residual`.
        """
        staged = StagedCache(self.cache, rows, starts, token_ids.shape[1])
        positions = staged.positions
        end = int(positions.max()) + 1
        bias = attention_bias(self.config, positions, torch.arange(end)[None], self.config.attention_window)

        def memory(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Writes keys and values of a layer to the cache; returns cached keys, cached values and attention bias."""
            all_keys, all_values = staged.write(layer, keys, values)
            return all_keys[:, :, :end], all_values[:, :, :end], bias

        return self._through(token_ids, states, positions, memory)

    def _through(self, token_ids: Tensor, states: Tensor | None, positions: Tensor, memory: Memory) -> Tensor:
        """Runs all blocks; returns H [n, t, m], the output of block l_out - 1, and sets `self.residual` to the last
        block's output."""
        hidden = self.model.loop(self.model.enter(token_ids, positions, memory), states, positions, memory)
        self.residual = self.model.leave(hidden, positions, memory)
        return hidden

    def think(self, hidden: Tensor) -> list[tuple[int, ...]]:
        """Returns a list with the greedy thought of each of n chunks, as token ids. hidden: H [n, c, m], the output of
        block l_out - 1.

        A thought without an end token is cut at `max_thought` tokens.
        """
        ids = torch.zeros(len(hidden), 0, dtype=torch.long)
        for _ in range(self.config.max_thought):
            ids = torch.cat([ids, best(self.model.think(hidden, ids)[:, -1])[:, None]], dim=1)
            if bool((ids == self.config.eos_id).any(1).all()):
                break
        return [up_to(thought, self.config.eos_id) for thought in ids.tolist()]

    def states(self, thoughts: Sequence[tuple[int, ...]]) -> Tensor:
        """Returns the chunk states [n, c, m] that the model computes from n thoughts."""
        distinct = sorted(set(thoughts))
        width = max(map(len, distinct))
        ids = torch.tensor([[*t, *[self.config.pad_id] * (width - len(t))] for t in distinct])
        return self.model.compress(ids)[[distinct.index(thought) for thought in thoughts]]


@torch.inference_mode()
def own_thoughts(
    model: ThinkingModel, prompts: Sequence[Sequence[int]], edit: ChunkEdit | None = None
) -> list[ThoughtIds]:
    """Runs prompts with the model's own thoughts; returns a list: for each prompt, the token ids of the thought after
    each chunk.

    Each prompt must consist of whole chunks. edit: changes the chunk states before they are added, from the second
    chunk on; not called if the model does not feed thoughts back.
    """
    config = model.config
    width = config.chunk if config.feeds_back else max(map(len, prompts))  # tokens of a prompt in one pass
    reader = ChunkReader(model, len(prompts), max(map(len, prompts)))
    thoughts: list[list[tuple[int, ...]]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), width):
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) > start]
        parts = [list(prompts[i][start : start + width]) for i in rows]
        longest = max(map(len, parts))
        token_ids = torch.tensor([ids + [config.pad_id] * (longest - len(ids)) for ids in parts])
        states = _states_to_add(reader, rows, thoughts, start, longest)
        if edit is not None and states is not None and start:
            states = edit(start // config.chunk, states, rows)
        hidden = reader.feed(token_ids, rows, [start] * len(rows), states)
        chunks = rearrange(hidden, "b (k c) m -> b k c m", c=config.chunk)
        counts = [len(ids) // config.chunk for ids in parts]
        new_thoughts = iter(reader.think(torch.cat([hidden[:n] for hidden, n in zip(chunks, counts, strict=True)])))
        for i, n in zip(rows, counts, strict=True):
            thoughts[i] += [next(new_thoughts) for _ in range(n)]
    return [tuple(of_prompt) for of_prompt in thoughts]


def _states_to_add(
    reader: ChunkReader, rows: Sequence[int], thoughts: Sequence[list], start: int, length: int
) -> Tensor | None:
    """Returns the chunk states [n, c, m] to add to the chunk at position `start`; None if the model does not feed
    thoughts back."""
    config = reader.config
    if not config.feeds_back:
        return None
    if start == 0:
        zero = torch.zeros(len(rows), length, config.d_model)
        return zero + reader.model.first_state if config.learned_first_state else zero
    return reader.states([thoughts[i][-1] for i in rows])


@torch.inference_mode()
def write(
    model: ThinkingModel,
    prompts: Sequence[Sequence[int]],
    thoughts: Sequence[ThoughtIds],
    max_new_tokens: int,
    edit: ChunkEdit | None = None,
) -> list[tuple[int, ...]]:
    """Generates a text greedily after each prompt; returns a list with the new token ids of each text. A text ends with
    its end token, or after `max_new_tokens`.

    thoughts: the thoughts of each prompt; if the model feeds thoughts back, their chunk states are added.  edit:
    changes these chunk states before they are added.
    """
    config = model.config
    longest = max(map(len, prompts))
    reader = ChunkReader(model, len(prompts), longest + max_new_tokens)
    token_ids = torch.full((len(prompts), longest), config.pad_id)
    states = torch.zeros(len(prompts), longest + max_new_tokens + config.chunk, config.d_model)
    is_fed = config.thinks and config.feeds_back
    for i, prompt in enumerate(prompts):
        token_ids[i, : len(prompt)] = torch.tensor(list(prompt))
        if config.learned_first_state:
            states[i, : config.chunk] = model.first_state
        if is_fed:
            chunk_states = reader.states(thoughts[i])
            if edit is not None:
                chunk_states = torch.cat([edit(k + 1, state[None], [i]) for k, state in enumerate(chunk_states)])
            states[i, config.chunk : (len(chunk_states) + 1) * config.chunk] = chunk_states.flatten(0, 1)
    rows = list(range(len(prompts)))
    reader.feed(token_ids, rows, [0] * len(rows), states[:, :longest] if config.thinks else None)
    ends = torch.tensor([len(prompt) for prompt in prompts])
    written = best(model.read_out(reader.residual[torch.arange(len(prompts)), ends - 1]))[:, None]
    while written.shape[1] < max_new_tokens and not bool((written == config.eos_id).any(1).all()):
        starts = (ends + written.shape[1] - 1).tolist()
        added = states[torch.tensor(rows)[:, None], torch.tensor(starts)[:, None]] if config.thinks else None
        reader.feed(written[:, -1:], rows, starts, added)
        written = torch.cat([written, best(model.read_out(reader.residual[:, 0]))[:, None]], dim=1)
    return [up_to(text, config.eos_id) for text in written.tolist()]


def up_to(token_ids: list[int], eos_id: int) -> tuple[int, ...]:
    """Returns the token ids up to and including the first `eos_id`; all token ids if `eos_id` does not occur."""
    return tuple(token_ids[: token_ids.index(eos_id) + 1] if eos_id in token_ids else token_ids)


def best(logits: Tensor) -> Tensor:
    """Returns a tensor with the index of the largest logit along the last axis; the lowest index of equal logits."""
    return torch.from_numpy(logits.numpy().argmax(-1))
