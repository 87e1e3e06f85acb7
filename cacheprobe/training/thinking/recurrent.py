"""Runs many texts through a Thinking States model at once, chunk after chunk, with its own thoughts; then writes
answers.

For evaluation: batched and without the engine. `models.thinking.lm` runs one text through the engine.
"""

from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from torch import Tensor

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.thinking.blocks import Memory, attention_bias
from cacheprobe.models.thinking.model import ThinkingModel

Thoughts = tuple[tuple[int, ...], ...]
"""For one text: the token ids of each chunk's thought."""

Edit = Callable[[int, Tensor, Sequence[int]], Tensor]
"""An intervention: (chunk, states [n, c, m] that act on the chunk, indices of their texts) -> states to add instead."""


class Reader:
    """Runs texts side by side in its own cache, each from position 0."""

    def __init__(self, model: ThinkingModel, count: int, capacity: int) -> None:
        self.model, self.config = model, model.config
        weight = model.embed.weight
        self.cache = KVCache(count, capacity, model.layer_shapes, weight.dtype, weight.device)

    def feed(self, token_ids: Tensor, rows: Sequence[int], starts: Sequence[int], states: Tensor | None) -> Tensor:
        """Feeds tokens [n, t] to these rows at these positions, with states [n, t, m] added; returns H and keeps the
        residual stream."""
        positions = self.cache.stage(rows, starts, token_ids.shape[1])
        end = int(positions.max()) + 1
        bias = attention_bias(self.config, positions, torch.arange(end)[None], self.config.attention_window)

        def memory(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Writes keys and values to the cache; returns the cached ones and the mask."""
            all_keys, all_values = self.cache.write(layer, keys, values)
            return all_keys[:, :, :end], all_values[:, :, :end], bias

        hidden = self._through(token_ids, states, positions, memory)
        self.cache.unstage()
        return hidden

    def _through(self, token_ids: Tensor, states: Tensor | None, positions: Tensor, memory: Memory) -> Tensor:
        hidden = self.model.loop(self.model.enter(token_ids, positions, memory), states, positions, memory)
        self.residual = self.model.leave(hidden, positions, memory)
        return hidden

    def think(self, hidden: Tensor) -> list[tuple[int, ...]]:
        """Returns greedy thoughts of chunks H [n, c, m]; a thought without an end is cut at the limit."""
        ids = torch.zeros(len(hidden), 0, dtype=torch.long)
        for _ in range(self.config.max_thought):
            ids = torch.cat([ids, best(self.model.think(hidden, ids)[:, -1])[:, None]], dim=1)
            if bool((ids == self.config.eos_id).any(1).all()):
                break
        return [up_to(row, self.config.eos_id) for row in ids.tolist()]

    def states(self, thoughts: Sequence[tuple[int, ...]]) -> Tensor:
        """Returns states [n, c, m] of thoughts; each distinct thought is compressed once."""
        distinct = sorted(set(thoughts))
        width = max(map(len, distinct))
        ids = torch.tensor([[*t, *[self.config.pad_id] * (width - len(t))] for t in distinct])
        return self.model.compress(ids)[[distinct.index(thought) for thought in thoughts]]


@torch.inference_mode()
def own_thoughts(model: ThinkingModel, prompts: Sequence[Sequence[int]], edit: Edit | None = None) -> list[Thoughts]:
    """Returns the model's own thoughts after each chunk of each prompt; prompts must be whole chunks."""
    config = model.config
    width = config.chunk if config.feeds_back else max(map(len, prompts))
    reader = Reader(model, len(prompts), max(map(len, prompts)))
    thoughts: list[list[tuple[int, ...]]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), width):
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) > start]
        fed = [list(prompts[i][start : start + width]) for i in rows]
        longest = max(map(len, fed))
        token_ids = torch.tensor([ids + [config.pad_id] * (longest - len(ids)) for ids in fed])
        states = _added(reader, rows, thoughts, start, longest)
        if edit is not None and states is not None and start:
            states = edit(start // config.chunk, states, rows)
        hidden = reader.feed(token_ids, rows, [start] * len(rows), states)
        chunks = rearrange(hidden, "b (k c) m -> b k c m", c=config.chunk)
        counts = [len(ids) // config.chunk for ids in fed]
        made = iter(reader.think(torch.cat([own[:n] for own, n in zip(chunks, counts, strict=True)])))
        for i, n in zip(rows, counts, strict=True):
            thoughts[i] += [next(made) for _ in range(n)]
    return [tuple(own) for own in thoughts]


def _added(reader: Reader, rows: Sequence[int], thoughts: Sequence[list], start: int, length: int) -> Tensor | None:
    """Returns the states to add to one chunk, [n, c, m]; None if the model has no feedback."""
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
    thoughts: Sequence[Thoughts],
    max_new_tokens: int,
    edit: Edit | None = None,
) -> list[tuple[int, ...]]:
    """Returns greedy text after each prompt, read with these thoughts, up to its end or the limit."""
    config = model.config
    longest = max(map(len, prompts))
    reader = Reader(model, len(prompts), longest + max_new_tokens)
    token_ids = torch.full((len(prompts), longest), config.pad_id)
    states = torch.zeros(len(prompts), longest + max_new_tokens + config.chunk, config.d_model)
    is_fed = config.thinks and config.feeds_back
    for i, prompt in enumerate(prompts):
        token_ids[i, : len(prompt)] = torch.tensor(list(prompt))
        if config.learned_first_state:
            states[i, : config.chunk] = model.first_state
        if is_fed:
            own = reader.states(thoughts[i])
            if edit is not None:
                own = torch.cat([edit(k + 1, state[None], [i]) for k, state in enumerate(own)])
            states[i, config.chunk : (len(own) + 1) * config.chunk] = own.flatten(0, 1)
    rows = list(range(len(prompts)))
    reader.feed(token_ids, rows, [0] * len(rows), states[:, :longest] if config.thinks else None)
    ends = torch.tensor([len(prompt) for prompt in prompts])
    written = best(model.read_out(reader.residual[torch.arange(len(prompts)), ends - 1]))[:, None]
    while written.shape[1] < max_new_tokens and not bool((written == config.eos_id).any(1).all()):
        starts = (ends + written.shape[1] - 1).tolist()
        added = states[torch.tensor(rows)[:, None], torch.tensor(starts)[:, None]] if config.thinks else None
        reader.feed(written[:, -1:], rows, starts, added)
        written = torch.cat([written, best(model.read_out(reader.residual[:, 0]))[:, None]], dim=1)
    return [up_to(row, config.eos_id) for row in written.tolist()]


def up_to(token_ids: list[int], eos_id: int) -> tuple[int, ...]:
    """Returns a text up to and including its end token; all of the text if it has none."""
    return tuple(token_ids[: token_ids.index(eos_id) + 1] if eos_id in token_ids else token_ids)


def best(logits: Tensor) -> Tensor:
    """Returns the index of the largest logit of each row; the lowest of equal ones, as NumPy guarantees."""
    return torch.from_numpy(logits.numpy().argmax(-1))
