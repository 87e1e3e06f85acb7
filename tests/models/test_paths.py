"""Which of a model's two forms is chosen: the twin where nothing edits and both agree, the bridge anywhere else."""

import pytest
import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GraniteConfig, GraniteForCausalLM, OPTConfig, OPTForCausalLM

import cacheprobe as cp
from cacheprobe.models import paths
from cacheprobe.models.base import ModelError
from cacheprobe.models.fast.lm import FastLM
from cacheprobe.models.hf.bridge import BridgeLM
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain import lm as copied
from cacheprobe.ops.attention import BY_REQUEST
from cacheprobe.ops.equality import close
from tests.proxies import take_members
from tests.tiny import VOCAB, hf_model, loaded

SUMS = "fused attention reorders sums"


def fresh(family: str = "llama", dtype: torch.dtype = torch.float32) -> BridgeLM:
    """A model of its own, for tests that edit it or hang hooks on it."""
    return cp.load_model(hf_model(family, dtype))


class Stranger:
    """Another CachedLM."""

    def __init__(self, model: BridgeLM) -> None:
        take_members(self, model)


def test_an_edit_in_place_is_seen() -> None:
    model = fresh()
    plain, _ = choose_path(model, "fast")
    ids = torch.tensor([[1, 2, 3]])
    before = plain.forward(ids, plain.new_cache(1, 8), [0], [0])
    with torch.no_grad():
        model.bridge.blocks[1].mlp.out.weight.mul_(3.0)
        model.bridge.unembed.b_U.add_(1.0)
    after = plain.forward(ids, plain.new_cache(1, 8), [0], [0])
    assert not close(after, before + 1.0, 1e-2, because="the control: the block's edit shows")
    assert close(after, model.forward(ids, model.new_cache(1, 8), [0], [0]), 1e-5, because=SUMS)
    assert isinstance(choose_path(model)[0], FastLM)
    assert plain.fingerprint()["weights_sha256"] == model.weights_sha256


def test_replaced_tensors_are_followed() -> None:
    model = fresh()
    plain, _ = choose_path(model, "fast")
    ids = torch.tensor([[1, 2, 3]])
    original = model.bridge.blocks[0].mlp.out.original_component
    original.weight = torch.nn.Parameter(original.weight.detach() * 2)
    expected = model.forward(ids, model.new_cache(1, 8), [0], [0])
    assert close(plain.forward(ids, plain.new_cache(1, 8), [0], [0]), expected, 1e-5, because=SUMS)
    chosen, _ = choose_path(model)
    assert isinstance(chosen, FastLM) and any(w is original.weight for w in chosen.model.parameters())


def test_a_replaced_module_is_refused() -> None:
    model = fresh()
    assert isinstance(choose_path(model)[0], FastLM)
    model.bridge.blocks[0].original_component.mlp = torch.nn.Identity()
    chosen, reason = choose_path(model)
    assert chosen is model and "is a Identity, not a LlamaMLP" in reason


def test_a_hook_chooses_the_bridge() -> None:
    model = fresh(dtype=torch.bfloat16)  # in 16 bits, hooks of our own are on it
    assert sum(len(point.fwd_hooks) for point in model.bridge.hook_dict.values()) > 0
    assert choose_path(model)[1].startswith("fast: no hook is set")
    with model.bridge.hooks(fwd_hooks=[("blocks.2.hook_mlp_out", lambda value, hook: value * 2)]):
        chosen, reason = choose_path(model)
        assert chosen is model and reason.startswith("bridge: a hook on blocks.2")
        with pytest.raises(ModelError, match="cannot run on its fast forward: a hook on blocks.2"):
            choose_path(model, "fast")
    with model.bridge.hooks(bwd_hooks=[("blocks.1.hook_resid_post", lambda grad, hook: None)]):
        assert choose_path(model)[0] is model
    model.bridge.add_caching_hooks("blocks.1.hook_resid_post", cache={})  # TransformerLens' own, and the user's wish
    assert choose_path(model)[0] is model
    model.bridge.reset_hooks()
    model.bridge.blocks[1].hook_in.add_perma_hook(lambda value, hook: value + 1)
    assert choose_path(model)[0] is model
    model.bridge.reset_hooks(including_permanent=True)
    for module in (model.bridge.blocks[1].original_component, model.bridge.blocks[1].mlp.hook_out):
        handle = module.register_forward_pre_hook(lambda module, args: None)
        assert choose_path(model)[1].startswith("bridge: a PyTorch hook on model.layers.1")
        handle.remove()
    assert isinstance(choose_path(model)[0], FastLM)


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float16), ("gpt2", torch.bfloat16), ("gemma3", torch.bfloat16)], ids=str
)
def test_a_model_in_16_bits_has_a_twin(family: str, dtype: torch.dtype) -> None:
    chosen, reason = choose_path(loaded(family, dtype))
    assert isinstance(chosen, FastLM), reason


def test_paths_that_are_asked_for() -> None:
    model = fresh()
    assert choose_path(model, "bridge") == (model, "bridge: as asked") and model.fast_trial is None
    plain, reason = choose_path(model, "fast")
    assert isinstance(plain, FastLM) and plain.origin is model and reason.startswith("fast:")
    assert choose_path(model)[0] is plain  # built once
    assert choose_path(plain)[0] is plain and choose_path(plain, "bridge")[0] is plain
    assert choose_path(stranger := Stranger(model)) == (stranger, "Stranger: as given")
    with pytest.raises(ValueError, match="unknown path 'quick'; choose one of auto, bridge, fast"):
        choose_path(model, "quick")


def test_a_bridge_of_the_users_has_a_twin() -> None:
    live = hf_model()
    live.set_attn_implementation("eager")
    live.config.output_attentions = True  # as TransformerBridge.boot_transformers sets it
    bridge = build_bridge_from_module(live, "LlamaForCausalLM", hf_config=live.config)
    plain, _ = choose_path(cp.load_model(bridge), "fast")
    assert plain.fingerprint()["attention"] == BY_REQUEST
    assert not plain.model.config.output_attentions


def test_processed_weights_are_refused() -> None:
    bridge = build_bridge_from_module(live := hf_model(), "LlamaForCausalLM", hf_config=live.config)
    bridge.enable_compatibility_mode(disable_warnings=True)
    model = BridgeLM(bridge, "tiny")
    with pytest.raises(ModelError, match="tiny: the bridge's weights were processed"):
        FastLM(model)
    assert choose_path(model)[0] is model


def test_a_hook_that_is_no_modules_is_refused() -> None:
    """Granite scales what a block adds to the residual stream, inside the block: no module gives T or C."""
    shape = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = GraniteConfig(**shape, num_key_value_heads=2, residual_multiplier=0.5, initializer_range=0.3)
    model = cp.load_model(GraniteForCausalLM(config))
    chosen, reason = choose_path(model)
    assert chosen is model and "which is no module of the plain model" in reason


def test_hooks_of_the_bridges_own_do_not_count() -> None:
    """OPT's MLP is no module, so the bridge mirrors the hooks of its parts with permanent hooks."""
    config = OPTConfig(vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4)
    bridge = build_bridge_from_module(OPTForCausalLM(config), "OPTForCausalLM", hf_config=config)
    assert any(point.fwd_hooks for point in bridge.hook_dict.values())
    assert list(paths.user_hooks(bridge)) == []


def test_a_twin_that_differs_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = copied.empty_model

    def other_rotation(wrapped: torch.nn.Module) -> torch.nn.Module:
        plain = right(wrapped)
        for layer in plain.model.layers:
            layer.self_attn.scaling *= 3
        return plain

    monkeypatch.setattr(copied, "empty_model", other_rotation)
    model = fresh(dtype=torch.bfloat16)
    chosen, reason = choose_path(model)
    assert chosen is model and "of the plain model are" in reason


def test_a_nan_is_no_agreement() -> None:
    model = fresh()
    with torch.no_grad():
        model.bridge.blocks[2].mlp.out.weight[0, 0] = torch.nan
    chosen, reason = choose_path(model)
    assert chosen is model and "nan" in reason
