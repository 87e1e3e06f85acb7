"""Blocks with attention and a recurrent mixer side by side, and blocks with a mixer or an MLP only: what T and C are,
how they are edited, and least time steps that transformers forgets in its decoding."""

from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import Tensor

from cacheprobe.kvcache.recurrent import memory_of
from cacheprobe.models.base import ModelError
from cacheprobe.models.checks import check_model
from cacheprobe.models.feeding import feed
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.models.plain.recurrence import StepForward
from cacheprobe.ops.equality import close
from tests.field.original import generated, logits_of
from tests.field.tiny_family import tiny_family
from tests.twins.equivalence import hf_greedy

Place = tuple[str, int]
IDS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
PARTS: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {
    "falcon_h1": [({"mamba": 0.6, "self_attn": 1.3}, {"feed_forward": 1.0})] * 4,
    "nemotron_h": [({"mixer": 1.0}, {}), ({}, {"mixer": 1.0}), ({"mixer": 1.0}, {}), ({}, {"mixer": 1.0})],
    "zamba2": [({"mamba": 1.0}, {}), ({"mamba_decoder.mamba": 1.0}, {})] * 2,
}
"""Written down from transformers' source, by block: modules and factors of T, and of C. In Zamba 2, shared attention
and MLP change what the mixer reads, and add nothing to the stream themselves."""


@cache
def model(family: str) -> PlainLM:
    return PlainLM(tiny_family(family), None, family)


@pytest.mark.parametrize("family", PARTS)
def test_the_modules_of_t_and_c(family: str) -> None:
    found = []
    for block in model(family).blocks:
        start = len(block.path) + 1
        found.append(tuple({p.path[start:]: p.factor for p in parts} for parts in (block.attended, block.mlp)))
    assert found == PARTS[family]


def states(family: str, edit: Place | None = None, value: Tensor | None = None) -> dict[Place, Tensor]:
    """Activations at all sites; with `value` put in place of the activation at `edit`."""
    one = model(family)
    sites = [("pre", 0), *((site, layer) for site in "STC" for layer in range(one.n_layers))]
    with one.editing([edit] if edit else [], lambda site, layer, old: value):
        return feed(one, IDS, sites).states


@pytest.mark.parametrize("family", PARTS)
def test_the_stream_is_the_sum_of_t_and_c(family: str) -> None:
    found = states(family)
    before = found["pre", 0]
    for layer, parts in enumerate(PARTS[family]):
        for site, modules in zip("TC", parts, strict=True):
            assert bool(found[site, layer].any()) == bool(modules)
        total = before + found["T", layer] + found["C", layer]
        assert close(found["S", layer], total, 1e-5, because="sums are reordered")
        before = found["S", layer]


@pytest.mark.parametrize(("family", "layer"), [("falcon_h1", 2), ("nemotron_h", 1), ("nemotron_h", 2), ("zamba2", 1)])
@pytest.mark.parametrize("site", "TC")
def test_an_edit_gives_the_edited_sum(family: str, layer: int, site: str) -> None:
    """Also where the block adds nothing at the site."""
    wanted = torch.linspace(-1, 1, model(family).d_model).expand(1, IDS.shape[1], -1)
    found = states(family, (site, layer), wanted)
    parts = [wanted if one == site else found[one, layer] for one in "TC"]
    total = found["S", layer - 1] + parts[0] + parts[1]
    assert close(found["S", layer], total, 1e-5, because="the last summand is a difference")


def test_a_layer_may_keep_keys_values_and_states() -> None:
    one = model("falcon_h1")
    held = one.new_cache(1, 16)
    one.forward(IDS, held, [0], [0])
    memory = memory_of(held)
    assert memory is not None and set(memory.initial) == set(range(4))
    for layer in range(4):
        assert bool(held.keys[layer][0, :, :10].any()) and bool(memory.after(layer, 0, 9)["recurrent", 0].any())
    found = feed(one, IDS, [("q", 0), ("z", 0), ("recurrent", 0)]).states
    shapes = {place: tuple(value.shape) for place, value in found.items()}
    assert shapes == {("q", 0): (1, 10, 4, 8), ("z", 0): (1, 10, 4, 8), ("recurrent", 0): (1, 10, 8, 128)}


@pytest.mark.parametrize(
    ("family", "layer", "why"),
    [
        ("falcon_h1", 0, "T of layer 0 is not the attention's output alone"),
        ("zamba2", 1, "T of layer 1 is not the attention's output alone"),
        ("nemotron_h", 0, "layer 0 is recurrent and has no attention heads"),
        ("nemotron_h", 1, "layer 1 is an MLP and has no attention heads"),
    ],
)
def test_heads_that_do_not_make_t_are_refused(family: str, layer: int, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        model(family).head_writer(layer)


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
def test_the_least_time_step_holds_for_single_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers applies it to several tokens at once and not to one, so that its cache changes what a text gives."""
    check_model(model(family))
    monkeypatch.setattr(StepForward, "_limits", lambda self: nullcontext())
    with pytest.raises(ModelError, match="with our KV cache differs from the model without it"):
        check_model(model(family))


def test_generate_with_its_cache_differs_from_its_forward() -> None:
    """Why `generated` leaves the cache out: of Zamba 2, transformers' own cached tokens are not the likeliest ones."""
    live, prompt = tiny_family("zamba2"), [(3 + 7 * i) % 89 for i in range(11)]
    new = generated(live, prompt, 8, [])
    likeliest = logits_of(live, [*prompt, *new]).argmax(-1)[len(prompt) - 1 : -1].tolist()
    assert new == likeliest != hf_greedy(live, prompt, 8)


@pytest.mark.parametrize("family", PARTS)
def test_in_16_bits(family: str) -> None:
    one = PlainLM(tiny_family(family).bfloat16(), None, family)
    check_model(one)
    assert [{p.factor for p in block.attended} for block in one.blocks] == [{*t.values()} for t, _ in PARTS[family]]


def test_a_factor_near_1_is_found_in_16_bits() -> None:
    """1 is within the rounding, too; Falcon-H1 0.5B has .9375."""
    fields = dict(attention_out_multiplier=0.9375, ssm_out_multiplier=1.0)
    one = PlainLM(tiny_family("falcon_h1", fields).bfloat16(), None, "falcon_h1")
    assert [[part.factor for part in block.attended] for block in one.blocks] == [[1.0, 0.9375]] * 4
