"""The forward without modules against the model's own modules: the same bits, whatever is asked of it."""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.models.fast.functional import FUNCTIONAL
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.equality import bitwise
from tests.feeding import fed_in_parts, texts
from tests.tiny import FAMILIES, by_modules, hf_model, loaded

pytestmark = pytest.mark.determinism


def is_functional(family: str) -> bool:
    return any(kind.takes(loaded(family).model) for kind in FUNCTIONAL)


CASES = [
    ("llama", None, torch.float32), ("gpt2", None, torch.bfloat16), ("gpt-neox", None, torch.float16),
    ("mistral", 6, torch.bfloat16), ("qwen3", None, torch.float64),
]  # fmt: skip


@cache
def uneven(family: str, dtype: torch.dtype, window: int | None) -> PlainLM:
    """A tiny model whose norms and biases are no ones and zeros, which would hide when they are applied."""
    live = copy.deepcopy(hf_model(family, dtype, window=window))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in live.parameters():
            if weight.dim() == 1:
                weight += torch.randn(weight.shape, generator=generator).to(dtype) / 3
    return cp.load_model(live)


def forms(family: str, dtype: torch.dtype = torch.float32, window: int | None = None) -> tuple[PlainLM, PlainLM]:
    """The forward without modules, and the one that runs the modules, which is seen to be run."""
    model = uneven(family, dtype, window)
    return model, by_modules(model)


def num_module_runs(fast: PlainLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows whenever the first block's module runs. No hook tells: it would be a reason to run it."""
    ran: list[int] = []
    decoder = fast.model.base_model
    block = (decoder.h if hasattr(decoder, "h") else decoder.layers)[0]
    run = block.forward
    monkeypatch.setattr(block, "forward", lambda *args, **kwargs: (ran.append(1), run(*args, **kwargs))[1])
    return ran


def test_the_families_are_there() -> None:
    computed = {family for family in FAMILIES if is_functional(family)}
    assert computed >= {"llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt-neox"}
    assert {*FAMILIES} - computed >= {"phi", "olmo2", "gemma2"}


@pytest.mark.parametrize(("family", "window", "dtype"), CASES, ids=str)
def test_every_bit_is_the_modules(
    family: str, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits, S, T, C, keys and values; ragged rows, pads, blocks taken back; few rows and many."""
    fast, modules = forms(family, dtype, window)
    ran, ran_there = num_module_runs(fast, monkeypatch), num_module_runs(modules, monkeypatch)
    for lengths in ((21, 17), (14, 11, 9, 8, 7, 6)):
        ours, theirs = (fed_in_parts(form, texts(*lengths)) for form in (fast, modules))
        assert ours.keys() == theirs.keys() and len(ours) == len(lengths) * (1 + 1 + 3 * 3 + 2 * 3)
        for what, expected in theirs.items():
            assert bitwise(ours[what], expected), what
    assert not ran and ran_there


def test_gpt_neox_with_one_part_of_a_block_after_the_other() -> None:
    live = hf_model("gpt-neox")
    torch.manual_seed(0)
    config = copy.deepcopy(live.config)
    config.use_parallel_residual = False
    model = cp.load_model(type(live)(config).eval())
    ours, theirs = (fed_in_parts(form, texts(9, 6)) for form in (model, by_modules(model)))
    assert all(bitwise(ours[what], expected) for what, expected in theirs.items())
    beside = fed_in_parts(loaded("gpt-neox"), texts(9, 6))
    assert not all(bitwise(ours[what], other) for what, other in beside.items()), "the control: it shows"


@pytest.mark.parametrize(("family", "width"), [("llama", 1), ("gpt2", 5)])
def test_early_stops_and_chosen_logits_are_the_modules(family: str, width: int) -> None:
    ids = texts(width)[0][None].repeat(2, 1)
    outputs: list[list[Tensor]] = []
    for form in forms(family):
        cache = form.new_cache(2, 16)
        asked = [dict(num_layers=n) for n in range(4)] + [dict(logit_slots=[width - 1, 0]), {}]
        outputs.append([form.forward(ids, cache, [0, 1], [3, 0], **how) for how in asked])
    assert all(bitwise(ours, theirs) for ours, theirs in zip(*outputs, strict=True))
    assert outputs[0][0].shape == (2, width, 32) and outputs[0][4].shape[1] == 2


def test_modules_run_where_something_acts_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Editors, and hooks of any other origin."""
    fast, _ = forms("llama")
    ran = num_module_runs(fast, monkeypatch)
    ids, cache = texts(4)[0][None], fast.new_cache(1, 16)
    plain = fast.forward(ids, cache, [0], [0])
    assert not ran
    with fast.editing([("C", 1)], lambda site, layer, value: None):
        assert bitwise(fast.forward(ids, cache, [0], [0]), plain) and len(ran) == 1
    with fast.editing([("C", 1)], lambda site, layer, value: value * 0):
        assert not bitwise(fast.forward(ids, cache, [0], [0]), plain)
    hook = fast.model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, out: out * 0)
    with fast.capturing([("S", 0)], lambda site, layer, value: None):
        assert not bitwise(fast.forward(ids, cache, [0], [0]), plain) and len(ran) == 3
    hook.remove()
    assert bitwise(fast.forward(ids, cache, [0], [0]), plain) and len(ran) == 3
