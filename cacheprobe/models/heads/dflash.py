"""Defines DFlash draft heads: DFlashHead, the module, and BlockHeadLM, which drafts a block of tokens in one pass on a
KVCache of its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model, Qwen3RMSNorm, apply_rotary_pos_emb

from cacheprobe.core.hook_names import PATTERN
from cacheprobe.core.live import LiveModule, ModuleValue
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.base import CachedLM, ModelError, StateSink
from cacheprobe.models.heads.lm import HeadLM
from cacheprobe.models.heads.module import HeadModule
from cacheprobe.models.settings import one_at_a_time


class DFlashHead(HeadModule):
    """Computes a block of draft tokens at once. Each layer attends from the block's rows to the context rows, which are
    made from the target's states, and to all rows of the block.

    Its blocks are Qwen3's. `forward` runs the block's rows alone; `keys_and_values` gives the context rows.
    Source: DFlash, Chen et al. 2026 (arXiv 2602.06036).
    Twin: tests.twins.block_heads_slowly.dflash_logits, close(1e-5) in float32.
    """

    config_class = Qwen3Config
    fc: nn.Module
    hidden_norm: nn.Module

    def __init__(self, config: LiveModule) -> None:
        """config: a Qwen3Config with num_states, embed_scale and draft_vocab_size besides; see `load_dflash`."""
        super().__init__(config)
        self.model = Qwen3Model(config)
        self.fc = nn.Linear(config.num_states * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def entering(self, states: Tensor) -> Tensor:
        """Returns the context rows [..., m] of the target's states [..., l, m]."""
        return self.hidden_norm(self.fc(states.flatten(-2)))

    def fed_back(self, residual: Tensor) -> Tensor:
        """Raises: ModelError, because a block is one pass: no row follows from the head's own states."""
        raise ModelError("a DFlash head drafts a block in one pass; its own states make no further rows")

    def block_input(self, states: Tensor, embeds: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the embeddings [b, t, m] of the block's tokens, scaled as the target scales them, and {}."""
        return embeds * self.config.embed_scale, {}

    def residual(
        self,
        input_ids: Tensor,
        attention_mask: "Tensor | dict[str, Tensor] | None" = None,
        position_ids: Tensor | None = None,
        past_key_values: ModuleValue = None,
    ) -> Tensor:
        """Returns the residual stream [b, t, m] of a block after the last layer. Each row attends to what the mask lets
        the block's last row see, and so to all rows of the block; in a sliding layer, as far back as its own window."""
        mask: Tensor | dict[str, Tensor]
        if attention_mask is None or position_ids is None:
            mask = self.lm_head.weight.new_zeros(1, 1, input_ids.shape[1], input_ids.shape[1])
        elif isinstance(attention_mask, dict):
            last = attention_mask["full_attention"][:, :, -1:]
            mask = {kind: _both_ways(one, last, position_ids) for kind, one in attention_mask.items()}
        else:
            mask = _both_ways(attention_mask, attention_mask[:, :, -1:], position_ids)
        return super().residual(input_ids, mask, position_ids, past_key_values)

    def keys_and_values(self, given: Tensor, position_ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the keys and values [b, h, t, d] of context rows [b, t, m], layer by layer.

        position_ids: [b, t], those of the target's states."""
        cos, sin = self.model.rotary_emb(given, position_ids)
        for layer in self.model.layers:
            attention = layer.self_attn
            k, v = (one(given).unflatten(-1, (-1, attention.head_dim)) for one in (attention.k_proj, attention.v_proj))
            keys = attention.k_norm(k).transpose(1, 2)
            yield apply_rotary_pos_emb(keys, keys, cos, sin)[1], v.transpose(1, 2)


class BlockHeadLM(HeadLM):
    """Runs a DFlash head on a KVCache of its own. Slot i of a cache row holds the context row of text position i, and
    behind the last one the rows of the present block, which the next context rows overwrite.

    The block of n tokens so far is the newest token and B - 1 mask tokens, at positions n - 1 to n + B - 2. Row j >= 1
    of it is the draft of position n - 1 + j.
    Twin: transformers' MuseGlimmerAssistantModel with a DFlashCache, close(1e-5) in float32.
    """

    lacks = (PATTERN,)

    def __init__(
        self,
        live: DFlashHead,
        target: CachedLM,
        name: str,
        target_sites: Sequence[tuple[str, int]],
        block: tuple[int, int],
        token_ids: Tensor | None = None,
    ) -> None:
        """block: (B, id of the mask token).  Other arguments and errors: as of HeadLM."""
        super().__init__(live, target, name, target_sites, token_ids)
        self.block_size, self.mask_token_id = block

    @one_at_a_time()
    @torch.inference_mode()
    def feed(self, given: Tensor, cache: KVCache, cache_rows: Sequence[int], starts: Sequence[int]) -> None:
        """Writes the keys and values of context rows to the cache.

        given: [b, t, m], from `entering`.  starts: text position of the first row of each batch index. Rows behind a
        batch index's last one are overwritten by its next block.
        """
        staged = StagedCache(cache, cache_rows, starts, given.shape[1])
        positions = staged.placed(self.device).positions.clamp(max=self.n_ctx - 1)
        for layer, (k, v) in enumerate(self.model.keys_and_values(given.to(self.device, self.dtype), positions)):
            staged.store(layer, k, v)

    def run_block(self, token_ids: Tensor, cache: KVCache, cache_rows: Sequence[int], starts: Sequence[int]) -> Tensor:
        """Returns the residual stream [b, B, m] of one block of each batch index after the last layer.

        token_ids: [b, B], from `block_tokens`.  starts: text position of each newest token; the context rows of all
        positions before it must be fed.
        """
        nothing = torch.empty(0, device=self.device)  # what a block reads of the target is in the cache
        return self.run(token_ids, nothing, cache, cache_rows, starts)

    def block_tokens(self, newest: Sequence[int]) -> Tensor:
        """Returns the tokens [b, B] of blocks: each newest token, then masks."""
        token_ids = torch.full((len(newest), self.block_size), self.mask_token_id)
        token_ids[:, 0] = torch.tensor(newest)
        return token_ids

    @contextmanager
    def capturing(self, sites: Sequence[tuple[str, int]], sink: StateSink) -> Iterator[None]:
        """Returns a context manager as PlainLM's. Raises: ModelError for "pattern"; see `lacking`."""
        if any(site == PATTERN for site, _ in sites):
            raise ModelError(self.lacking([PATTERN]))
        with super().capturing(sites, sink):
            yield

    def lacking(self, sites: Sequence[str]) -> str:
        """Returns text on the first of these sites that the head lacks, "" if there is none."""
        if PATTERN in sites:
            return (
                f"{self.name}: the rows of a block attend to later rows of it, and a recorded pattern ends with a "
                'row\'s own position, so it would lack weights; leave out "pattern"'
            )
        return super().lacking(sites)


def _both_ways(mask: Tensor, last: Tensor, positions: Tensor) -> Tensor:
    """Returns a causal mask [b, 1, t, s] with the slots behind each row's own as `last` [b, 1, 1, s] has them.
    positions: [b, t] of the rows."""
    slots = torch.arange(mask.shape[-1], device=mask.device)
    return torch.where(slots > positions[:, None, :, None], last, mask)
