"""Bits of a deterministic request do not depend on how wide a pass another request's drafts make it."""

from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import Request
from cacheprobe.engine.shapes import Hooked, ShapeRefused, invariant_widths, narrow_widths
from cacheprobe.models.paths import choose_path
from tests.compiled import on_loops
from tests.field.tiny_family import tiny_family
from tests.tiny import VOCAB, hf_model

pytestmark = pytest.mark.determinism

PROMPTS = [[5, 6, 7], [*range(20, 32)], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
RUN: dict[str, Any] = dict(window=4, group=4, capacity=64, max_new_tokens=24)


def softcapped(dtype: torch.dtype) -> Any:
    return on_loops(cp.load_model(hf_model("gemma2", dtype)))


def every_other_draft() -> cp.drafters.Scripted:
    """Drafts three tokens for every second text length, and none for the others."""
    return cp.drafters.Scripted(lambda state: [1, 2, 3] if len(state.token_ids) % 2 else [])


def test_the_other_requests_drafts_do_not_decide_the_width() -> None:
    """Alone, without drafts and beside one that drafts: every verify pass has the whole window."""
    model, widths = softcapped(torch.float16), set()
    for prompts in (PROMPTS[:1], PROMPTS):
        trace = cp.run(model, prompts, deterministic=True, drafter=every_other_draft(), progress=False, **RUN)
        widths |= {*trace.events().query("phase == 'verify'").batch_slots}
    assert widths == {4}


FAMILIES = {"llama": (2, 4, 8), "gpt2": (), "gemma2": ()}
"""Narrow widths of a window of 16. Norms, products, attention and activations of the first are computed in loops in
which no token depends on another."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_width_is_used_only_where_it_is_safe_by_construction(family: str) -> None:
    dtype = (torch.float16, torch.bfloat16, torch.float32)[len(family) % 3]
    fast = choose_path(on_loops(cp.load_model(hf_model(family, dtype))), "plain")[0]
    config = EngineConfig(window=16, group=4, capacity=512)
    assert narrow_widths(fast, config) == FAMILIES[family]
    if not FAMILIES[family]:
        assert not set(invariant_widths(fast, config, Hooked(), 1))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 64), (torch.bfloat16, 16)])
def test_a_window_that_is_too_long_for_loops_has_no_narrow_passes(dtype: torch.dtype, most: int) -> None:
    """torch attends over longer windows, in calls whose shape has the width."""
    fast = choose_path(on_loops(cp.load_model(hf_model("llama", dtype))), "plain")[0]
    for window, wanted in ((most, (2, 4, 8)), (most + 1, ())):
        config = EngineConfig(window=window, group=2, capacity=512)
        assert narrow_widths(fast, config) == wanted
        with nullcontext() if wanted else suppress(ShapeRefused):  # torch's attention may depend on the slot
            assert (8 in invariant_widths(fast, config, Hooked(), 1)) == bool(wanted)


def test_latent_attention_has_no_narrow_passes() -> None:
    fast = choose_path(on_loops(cp.load_model(tiny_family("deepseek_v3"))), "auto")[0]
    assert narrow_widths(fast, EngineConfig(window=16, group=4, capacity=512)) == ()


def test_a_drafted_llama_still_runs_narrow_passes_with_the_bits_of_the_reference() -> None:
    model = on_loops(cp.load_model(hf_model("llama", torch.float16)))
    requests = [Request(prompt, is_deterministic=True) for prompt in PROMPTS]
    settings: dict[str, Any] = {**RUN, "window": 8, "drafter": every_other_draft(), "progress": False}
    trace, want = cp.run(model, requests, **settings), cp.reference(model, requests, **settings)
    assert {2, 4} <= {*trace.events().query("phase == 'verify'").batch_slots}
    assert [trace.digest(i) for i in range(3)] == [want.digest(i) for i in range(3)]
    assert max(max(trace.committed(i)) for i in range(3)) < VOCAB
