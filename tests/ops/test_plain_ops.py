"""The references of the kernels against what the engine runs, and against slow definitions."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.ops.readout import read_logits, read_states
from cacheprobe.ops.references import cached_attention, pack_rows, project, rms_norm
from tests.tiny import loaded
from tests.twins.kernels_slowly import attention_slowly, pack_rows_slowly


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_is_the_models_own(dtype: torch.dtype) -> None:
    values, norm = draw(5, 48).to(dtype), LlamaRMSNorm(48, 1e-5).to(dtype)
    norm.weight.data = draw(48, seed=1).to(dtype)
    made = rms_norm(values, norm.weight.detach(), 1e-5)
    assert bitwise(made, norm(values).detach()) and made.dtype == dtype


def test_read_states_is_a_models_readout() -> None:
    """Through the norm and the unembedding of a real model, to the bit."""
    model = loaded()
    hf = model.bridge.original_model
    states, targets = 5 * draw(4, model.d_model), torch.tensor([3, -1, 0, 7])
    norm = hf.model.norm
    weight, eps = norm.weight.detach(), float(norm.variance_epsilon)
    mine = read_states(states, weight, eps, hf.lm_head.weight.detach(), targets, 4)
    with torch.inference_mode():
        theirs = read_logits(hf.lm_head(norm(states[None]))[0], targets, 4)
    assert all(bitwise(a, b) for a, b in zip(mine, theirs, strict=True))
    normed = rms_norm(states, weight, eps)
    bare = read_states(normed, None, 0.0, hf.lm_head.weight.detach(), targets, 4, bias=torch.zeros(model.d_vocab))
    assert bitwise(bare.top_token_ids, mine.top_token_ids)
    assert project(normed, weight[None]).shape == (4, 1)


@pytest.mark.parametrize("window", [None, 6])
def test_attention_is_that_of_the_cache_and_its_mask(window: int | None) -> None:
    """What a pass hands to the fused attention: rows of a KVCache, its mask, grouped heads."""
    cache = KVCache(4, 20, [(2, 8, 6)], torch.float32)
    cache.keys[0][:], cache.values[0][:] = draw(4, 2, 20, 8), draw(4, 2, 20, 6, seed=1)
    cache.hidden[2, 3] = cache.hidden[2, 10] = cache.hidden[1, 0] = True
    rows, width = [2, 1], 3
    staged = StagedCache(cache, rows, [9, 12], width)
    positions = staged.positions
    keys, values = staged.write(0, draw(2, 2, width, 8, seed=2), draw(2, 2, width, 6, seed=3))
    q = draw(2, 4, width, 8, seed=4)
    mask = staged.mask(torch.float32, "cpu", window)
    theirs = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.3, enable_gqa=True)
    hidden = cache.hidden
    by_head = hidden[:, None].expand(-1, 2, -1)
    mine = cached_attention(q, cache.keys[0], cache.values[0], torch.tensor(rows), positions, 0.3, by_head, window)
    assert close(mine, theirs, 1e-6, because="fused attention reorders sums")
    own = int(positions[0, 1])
    first = 0 if window is None else own - window + 1
    seen = [s for s in range(first, own + 1) if s == own or not hidden[2, s]]
    by_hand = attention_slowly(q[0, 3, 1] * 0.3, cache.keys[0][2, 1], cache.values[0][2, 1], seen)
    assert close(mine[0, 3, 1], torch.tensor(by_hand), 1e-6, because="float32 against float64")


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_are_those_of_the_slow_twin(dtype: torch.dtype, kept: torch.dtype) -> None:
    """Of any strides; rows that are none leave their line as it was."""
    states = (3 * draw(4, 2, 9)).to(dtype).transpose(0, 1)
    states[0, 1, 2] = torch.inf
    rows, out = [*range(8), -1, 8, 4], draw(11, 9, seed=1).to(kept)
    expected = pack_rows_slowly(states, rows, out)
    pack_rows(states, torch.tensor(rows), out)
    assert out.tolist() == expected
