"""Runs the blocks of a Thinking States model between l_in and l_out, in one pass that may hold several chunks.

A chunk's state is known only after the previous chunk was read. Therefore these blocks run in rounds. An unknown state
is first assumed to be that of the empty thought. T then reads the chunks that end in the pass, up to the first whose
thought is not empty; in that case the round runs again with the new state. Recomputing a chunk under the same states
gives the same bits, so the result equals that of one chunk after another. All rounds have the pass's own shape, so
determinism needs no further measure.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.thinking.blocks import Memory
from cacheprobe.models.thinking.cache import ChunkStates, RowThought, ThinkingCache
from cacheprobe.ops.sampling import lowest_argmax


@dataclass(frozen=True)
class _ChunkEnd:
    """Names the last token of a chunk that ends in the current pass: cache row, index in the pass, and position."""

    cache_row: int
    index: int
    """Index of the last token among the t tokens that the pass feeds for its request."""
    position: int
    """Absolute position of the last token."""


class Rounds:
    """Runs the blocks from l_in to l_out of one pass in rounds, and writes the thoughts of the chunks that end in the
    pass. A new thought that is not empty changes the state of the next chunk, so the blocks run again if the pass holds
    tokens of that chunk."""

    def __init__(self, chunk_states: ChunkStates, staged: StagedCache, memory: Memory) -> None:
        assert isinstance(staged.cache, ThinkingCache)
        self.model, self.config, self.chunk_states = chunk_states.model, chunk_states.model.config, chunk_states
        self.cache, self.cache_rows, self.positions = staged.cache, staged.rows, staged.positions
        self.placed, self.memory = staged.placed(self.cache.layer_outputs.device), memory
        self.count = 0
        """Number of rounds that have run."""

    def run(self, x: Tensor, last: int) -> Tensor:
        """Returns H [b, t, m], the output of block l_out - 1, from x, the input of block l_in. Stores H and the new
        thoughts in the cache.

        Runs blocks l_in to `last` - 1, and again after each round in which a thought that is not empty changes the
        state of later tokens. If `last` is below l_out, returns the output of block `last` - 1 and writes no thought.
        """
        config, cache, positions = self.config, self.cache, self.placed.positions
        open_ends = self._chunk_ends()
        empty = (config.eos_id,)
        written: list[RowThought] = []
        for end in (end for ends in open_ends for end in ends):
            self._set_state(end, self.chunk_states.of(empty))
        h, is_final = x, False
        while not is_final:
            self.count += 1
            added = self.model.hook_state(self._added_states())
            h = self.model.run_blocks(x + added, config.l_in, last, positions, self.memory)
            h = self.model.hook_h(h)
            if last < config.l_out:
                return h
            cache.layer_outputs[self.placed.rows[:, None], positions] = h
            is_final = True
            for ends in open_ends:
                while ends:
                    end = ends.pop(0)
                    chunk = slice(end.position + 1 - config.chunk, end.position + 1)
                    written.append(self._think(end, cache.layer_outputs[end.cache_row, chunk]))
                    if written[-1].token_ids != empty:  # what was read after it was read under another state
                        self._set_state(end, written[-1].state)
                        is_final &= end.index + 1 == self.positions.shape[1]
                        break
        for thought in written:
            cache.note(thought)
        return h

    def _chunk_ends(self) -> list[list[_ChunkEnd]]:
        """Returns, for each batch index whose cache row is in use, a list of the _ChunkEnds in this pass at which a
        thought must be written."""
        thinks = (self.positions + 1) % self.config.chunk == 0
        if not self.config.think_while_decoding:
            thinks &= self.positions < self.cache.prompt_lengths[self.cache_rows][:, None]
        return [
            [_ChunkEnd(cache_row, t, int(self.positions[b, t])) for t in thinks[b].nonzero().flatten().tolist()]
            for b, cache_row in enumerate(self.cache_rows)
            if not self.cache.is_free(cache_row)
        ]

    def _added_states(self) -> Tensor:
        """Returns the chunk states [b, t, m] to add at the positions of this pass; zeros at positions without one."""
        config, positions, stored = self.config, self.placed.positions, self.cache.chunk_states
        if not config.feeds_back:
            return stored.new_zeros(*positions.shape, config.d_model)
        states = stored[self.placed.rows[:, None], positions]
        start = positions // config.chunk * config.chunk
        is_known = start > 0
        if not config.think_while_decoding:
            lengths = self.cache.prompt_lengths[self.cache_rows][:, None]
            is_known &= start <= lengths.to(start.device)  # the previous chunk lies within the prompt
        states = states * is_known[..., None].to(states.dtype)
        if config.learned_first_state:
            first = self.model.first_state[positions % config.chunk]
            states = torch.where((start == 0)[..., None], first, states)
        return states

    def _set_state(self, end: _ChunkEnd, state: Tensor) -> None:
        """Stores a chunk state [c, m] in the cache, at the positions of the chunk that follows the chunk end `end`."""
        self.cache.chunk_states[end.cache_row, end.position + 1 : end.position + 1 + self.config.chunk] = state

    def _think(self, end: _ChunkEnd, hidden: Tensor) -> RowThought:
        """Generates the thought of one chunk greedily with the thinking block, and returns a RowThought. hidden: the
        chunk's layer outputs H, [c, m]."""
        config = self.config
        ids: list[int] = []
        logprobs: list[float] = []
        padded = torch.full((1, config.max_thought), config.pad_id, device=hidden.device)
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
            end.cache_row, end.position, tuple(ids), has_ended, tuple(logprobs), first, self.chunk_states.of(tuple(ids))
        )
