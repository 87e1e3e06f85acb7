"""Sliding windows over the full cache, far beyond the window, against Hugging Face's model without any cache."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models import checks
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.hf import cache as hf_cache
from cacheprobe.models.hf.masks import attention_masks, sliding_window
from cacheprobe.ops.equality import close
from tests.feeding import fed_in_parts, texts
from tests.tiny import SLIDING, hf_model, loaded
from tests.twins.equivalence import hf_greedy

WINDOW = 8
PATHS: dict[str, Callable[..., CachedLM]] = {"bridge": lambda model: model.bridged(), "plain": lambda model: model}
CASES = [("mistral", "bridge"), ("qwen2", "plain"), ("gemma3", "plain"), ("gemma3", "bridge")]


def uncached(family: str, text: Tensor) -> Tensor:
    """[t, v] logits of Hugging Face's model, which builds its own masks."""
    with torch.inference_mode():
        return hf_model(family, window=WINDOW)(text[None]).logits[0]


@pytest.mark.parametrize(("family", "path"), CASES)
def test_logits_beyond_the_window(family: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged rows of up to six windows, a third of the blocks rolled back; and what the plain mask would have given."""
    model = PATHS[path](loaded(family, window=WINDOW))
    rows = texts(48, 41, 23)
    ours = fed_in_parts(model, rows)
    for b, text in enumerate(rows):
        expected = uncached(family, text)
        assert close(ours[f"logits row {b}"], expected, 1e-5, because="sums are reordered")
        assert torch.equal(ours[f"logits row {b}"].argmax(-1), expected.argmax(-1))

    def plain(config: object, cache: StagedCache, *where: object) -> Tensor:
        return cache.mask(*where)

    monkeypatch.setattr(hf_cache, "attention_masks", plain)
    wrong = fed_in_parts(model, rows)["logits row 0"]
    assert float((wrong - ours["logits row 0"])[:WINDOW].abs().max()) < 1e-4
    assert float((wrong - ours["logits row 0"])[WINDOW:].abs().max()) > 0.1


@pytest.mark.parametrize(("family", "path"), CASES)
def test_a_rollback_longer_than_the_window(family: str, path: str) -> None:
    """Twenty tokens are taken back and replaced: a ring buffer of eight slots would have lost what came before them."""
    model = PATHS[path](loaded(family, window=WINDOW))
    first, second = texts(44, 44)
    cache = model.new_cache(1, 48)
    model.forward(first[None], cache, [0], [0])
    redone = model.forward(second[None, 24:], cache, [0], [24])[0]
    text = torch.cat([first[:24], second[24:]])
    assert close(redone, uncached(family, text)[24:], 1e-5, because="sums are reordered")


@pytest.mark.parametrize(("family", "path"), [("mistral", "plain"), ("gemma3", "bridge")])
def test_the_loop_beyond_the_window(family: str, path: str) -> None:
    model = loaded(family, window=WINDOW)
    prompts = [text.tolist() for text in texts(30, 11)]
    settings = dict(window=4, group=2, capacity=64, max_new_tokens=16, path=path, progress=False)
    drafter = cp.drafters.EarlyExit(layer=1)
    trace = cp.run(model, prompts, **settings, drafter=drafter, deterministic=True)
    oracle = cp.reference(model, prompts, **settings)
    assert trace.num_rolled_back > 0
    for i, prompt in enumerate(prompts):
        assert trace.committed(i) == hf_greedy(hf_model(family, window=WINDOW), prompt, 16)
        assert trace.digest(i) == oracle.digest(i)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_the_mask_shows_a_window_of_positions(window: int | None) -> None:
    staged = StagedCache(KVCache(2, 12, [(1, 2, 2)], torch.float32), [0, 1], [0, 6], 3)
    positions, mask = staged.positions, staged.mask(torch.float32, "cpu", window)
    assert mask.shape == (2, 1, 3, 12)
    for b, row in enumerate(positions.tolist()):
        for t, position in enumerate(row):
            seen = [s for s in range(12) if mask[b, 0, t, s] == 0]
            assert seen == [s for s in range(12) if s <= position and (window is None or position - s < window)]


@pytest.mark.parametrize("family", SLIDING)
def test_masks_are_what_the_config_asks_for(family: str) -> None:
    staged = StagedCache(KVCache(1, 64, [(1, 2, 2)], torch.float32), [0], [0], 48)
    masks = attention_masks(hf_model(family, window=WINDOW).config, staged, torch.float32, "cpu")
    named = masks if isinstance(masks, dict) else {"": masks}
    visible = {name: int((mask[0, 0, -1] == 0).sum()) for name, mask in named.items()}
    expected = {"": WINDOW} if family == "mistral" else {"full_attention": 48, "sliding_attention": WINDOW}
    assert visible == expected


def test_windows_that_are_switched_off() -> None:
    assert sliding_window(hf_model("qwen2").config) is None  # use_sliding_window=False
    assert sliding_window(hf_model("mistral").config) is None
    assert sliding_window(hf_model("llama").config) is None
    assert sliding_window(SimpleNamespace(sliding_window=8, use_sliding_window=False)) is None
    assert sliding_window(SimpleNamespace(sliding_window=8, layer_types=["full_attention"] * 2)) is None
    assert sliding_window(hf_model("gemma3").config) == 4096
    assert sliding_window(hf_model("qwen3", window=WINDOW).config) == WINDOW


@pytest.mark.parametrize(("window", "length"), [(8, 24), (40, 48), (88, 96), (89, 24)])
def test_the_load_check_reaches_beyond_a_small_window(window: int, length: int) -> None:
    assert checks.probe_ids(loaded("mistral", window=window)).shape == (1, length)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_the_load_check_sees_a_wrong_window(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(family, window=40)
    checks.check_model(model)
    right = StagedCache.mask
    monkeypatch.setattr(StagedCache, "mask", lambda self, dtype, device, window=None: right(self, dtype, device))
    with pytest.raises(ModelError, match="differs from the model without it"):
        checks.check_model(model)
