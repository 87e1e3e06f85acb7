"""Hook points of TransformerLens and nnsight, given in place of a site and a layer."""

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.hook_names import place_of
from cacheprobe.edits.interventions import hook, swap, zero
from tests.by_hand import changed, forward
from tests.tiny import PROMPTS, SMALL, hf_model, loaded


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("blocks.1.hook_resid_post", ("S", 1)),
        ("blocks.0.hook_attn_out", ("T", 0)),
        ("blocks.12.hook_mlp_out", ("C", 12)),
        ("blocks.0.hook_resid_pre", ("pre", 0)),
        ("blocks.2.hook_resid_pre", ("S", 1)),
        ("blocks.1.hook_out", ("S", 1)),
        ("blocks.1.hook_in", ("S", 0)),
        ("model.layers[1].input", ("S", 0)),
        ("model.layers[0].input", ("pre", 0)),
        ("model.layers[3].output[0]", ("S", 3)),
        ("model.model.layers.3", ("S", 3)),
        ("transformer.h.2.output", ("S", 2)),
        ("gpt_neox.layers[1]", ("S", 1)),
        ("model.layers[3].self_attn", ("model.layers.3.self_attn", 3)),
        ("transformer.h[0].mlp.output", ("transformer.h.0.mlp.output", 0)),
        ("model.decoder.layers.2.output[1]", ("model.decoder.layers.2.output.1", 2)),
        ("blocks.1.attn.hook_out", ("blocks.1.attn.hook_out", 1)),
        ("blocks.1.ln1.hook_scale", ("blocks.1.ln1.hook_scale", 1)),
        ("lm_head", ("lm_head.output", 0)),
    ],
)
def test_a_hook_point_names_site_and_layer(name: str, place: tuple[str, int]) -> None:
    assert place_of(name, None) == place
    assert place_of(name, place[1] if "." in name else None) == place


@pytest.mark.parametrize(
    ("site", "layer", "says"),
    [
        ("blocks.1.hook_resid_post", 2, "is at layer 1, and layer=2 was given"),
        ("model.layers.*.mlp", None, "say of which with layer= or layers="),
        ("model.layers.3.mlp", 2, "is at layer 3, and layer=2 was given"),
        ("blocks.1.attn.hook_z", None, "say site='T' with layer=1 and head="),
        ("model.layers 3", None, "names no module"),
        ("S", None, "site S needs layer="),
    ],
)
def test_other_names_are_refused(site: str, layer: int | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        place_of(site, layer)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_the_block_of_nnsight_is_the_block_that_changes(family: str) -> None:
    """close(1e-4): another order of the same sums. Against a plain hook on Hugging Face's block."""
    live, path = hf_model(family), {"gpt2": "transformer.h.0"}.get(family, "model.layers.0")
    edit = zero(request_id=0, site=f"{path}.output[0]", positions=[2])
    trace = cp.run(loaded(family), [PROMPTS[0]], **SMALL | {"max_new_tokens": 1}, interventions=[edit])
    with changed(live.get_submodule(path), lambda states: states[:, 2].zero_()):
        _, states = forward(live, PROMPTS[0])
    for layer in (0, 1):
        torch.testing.assert_close(trace.states("S", layer, 0), states[layer], rtol=1e-4, atol=1e-4)


def test_every_function_takes_a_hook_point() -> None:
    (one,) = hook("blocks.1.hook_mlp_out", lambda state, context: state)
    assert (one.site, one.layer) == ("C", 1)
    trace = cp.run(loaded(), [PROMPTS[1], PROMPTS[1]], **SMALL)
    first, second = swap(trace, 0, 1, site="blocks.1.hook_resid_post", positions=[1])
    assert (first.site, first.layer, second.layer) == ("S", 1, 1)
