"""Faults that a review found, each with the case that showed it."""

from dataclasses import replace

import pytest
import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPTNeoConfig, GPTNeoForCausalLM

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe.engine.fingerprint import FingerprintMismatch, require_same, schedule_fingerprint
from cacheprobe.models.base import ModelError
from tests.tiny import PROMPTS, SMALL, loaded


def test_local_attention_is_refused_by_name() -> None:
    """GPT-Neo builds its local band from the cache's capacity: it loaded, and generated wrong tokens."""
    config = GPTNeoConfig(
        vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    )
    with pytest.raises(ModelError, match="GPTNeoForCausalLM has local attention layers"):
        cp.load_model(GPTNeoForCausalLM(config))


def test_a_bridge_does_not_bypass_the_refusal() -> None:
    config = GPTNeoConfig(
        vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    )
    bridge = build_bridge_from_module(GPTNeoForCausalLM(config), "GPTNeoForCausalLM", hf_config=config)
    with pytest.raises(ModelError, match="local attention layers"):
        cp.load_model(bridge)


@pytest.mark.parametrize("shape", ["window", "group", "capacity", "prefill_chunk", "prefill_group"])
def test_every_fixed_shape_alone_makes_another_fingerprint(shape: str) -> None:
    """prefill_group was left out, and it is the height of a prefill pass."""
    config = EngineConfig(window=4, group=2, capacity=64, prefill_chunk=8, prefill_group=2)
    other = replace(config, **{shape: getattr(config, shape) + 1})
    one, two = (schedule_fingerprint(loaded(), c, 16) for c in (config, other))
    require_same(one, dict(one), "a run and itself")
    with pytest.raises(FingerprintMismatch, match=f"under different schedules; {shape}: "):
        require_same(one, two, "two runs")


def test_unpadded_prefill_is_another_schedule_and_is_verified_as_such() -> None:
    """Runs from before there was a choice say nothing of it, and were padded."""
    settings = {**SMALL, "pad_prefill": False}
    trace = cp.run(loaded(), PROMPTS[:2], **settings, deterministic=True)
    assert cp.verify(trace, progress=False).is_equal
    padded = cp.run(loaded(), PROMPTS[:2], **SMALL, pad_prefill=True, deterministic=True)
    assert "pad_prefill" not in padded.fingerprint
    with pytest.raises(FingerprintMismatch, match="under different schedules; pad_prefill: "):
        require_same(padded.fingerprint, trace.fingerprint, "two runs")
    with pytest.raises(ValueError, match="prefill passes of 2 prompts need one shape; set prefill_group=1"):
        cp.run(loaded(), PROMPTS[:2], **{**settings, "prefill_group": 2})


def test_activation_cache_knows_what_enters_a_block() -> None:
    trace = cp.run(loaded(), PROMPTS[:1], **SMALL)
    cache = cp.analysis.to_activation_cache(trace, 0)
    assert torch.equal(cache["resid_pre", 2], cache["resid_post", 1])
