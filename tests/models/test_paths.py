"""Which forward of a model runs: the plain one, and the bridge where a hook or a head needs it."""

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import OPTConfig, OPTForCausalLM

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.bridge import BridgeLM
from cacheprobe.models.hf.shared import user_hooks
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.attention import BY_REQUEST
from cacheprobe.ops.equality import bitwise, close
from tests.proxies import take_members
from tests.tiny import PROMPTS, SMALL, VOCAB, hf_model

SUMS = "fused attention reorders sums"
IDS = torch.tensor([[1, 2, 3]])


def fresh(family: str = "llama", dtype: torch.dtype = torch.float32) -> PlainLM:
    """A model of its own, for tests that edit it or hang hooks on it."""
    return cp.load_model(hf_model(family, dtype))


def logits(model: cp.CachedLM) -> torch.Tensor:
    return model.forward(IDS, model.new_cache(1, 8), [0], [0])


class Stranger:
    """Another CachedLM."""

    def __init__(self, model: PlainLM) -> None:
        take_members(self, model)


def test_a_bridge_is_made_when_it_is_asked_for_and_leaves_the_model_as_it_is() -> None:
    live = hf_model("gpt-neox")
    with torch.inference_mode():
        own = live(IDS).logits
    model = cp.load_model(live)
    before, weights = logits(model), model.weights_sha256
    assert model.bridge is model.bridge and model.bridge.original_model is not live
    assert not any(type(module).__module__.startswith("transformer_lens") for module in live.modules())
    assert bitwise(logits(model), before) and model.weights_sha256 == weights
    there = {weight.data_ptr() for weight in live.parameters()}
    shared = [weight for weight in model.bridge.original_model.parameters() if weight.data_ptr() in there]
    assert len(shared) >= 28 and close(logits(model.bridged()), logits(model), 1e-5, because=SUMS)
    with torch.inference_mode():
        assert bitwise(live(IDS).logits, own)


def test_a_model_without_a_bridge_stays_as_it_is() -> None:
    live = hf_model("phi")
    model = cp.load_model(live)
    modules = [id(module) for module in live.modules()]
    with patch("cacheprobe.models.plain.bridged.check_model", side_effect=ModelError("no")):
        for _ in range(2):
            with pytest.raises(ModelError, match="no"):
                model.bridged()
    assert model.hooked_module is live and [id(module) for module in live.modules()] == modules


def test_an_edit_in_place_is_seen() -> None:
    model = fresh()
    before = logits(model)
    with torch.no_grad():
        model.bridge.blocks[1].mlp.out.weight.mul_(3.0)
    assert choose_path(model)[0] is model
    assert not close(logits(model), before, 1e-2, because="the edit shows")
    assert close(logits(model), logits(model.bridged()), 1e-5, because=SUMS)
    with torch.no_grad():
        model.bridge.unembed.b_U.add_(1.0)  # the bridge adds this bias, of zeros
    chosen, reason = choose_path(model)
    assert chosen is model.bridged() and "weights of the bridge were edited that it does not share" in reason
    assert chosen.fingerprint()["buffers_sha256"] != model.fingerprint()["buffers_sha256"]


def test_replaced_tensors_and_modules_are_followed() -> None:
    model = fresh()
    assert model.bridge
    before, down = logits(model), model.live.model.layers[0].mlp.down_proj
    down.weight = torch.nn.Parameter(down.weight.detach() * 2)
    assert not close(logits(model), before, 1e-3, because="it shows in the next pass")
    sha256, head = model.weights_sha256, torch.nn.Linear(32, VOCAB, bias=False)
    model.live.lm_head = head
    assert choose_path(model)[0] is model and model.model.lm_head.weight is head.weight
    assert model.weights_sha256 != sha256
    assert close(logits(choose_path(model, "bridge")[0]), logits(model), 1e-4, because=SUMS), "a new bridge"
    with torch.inference_mode():
        assert close(logits(model), model.live(IDS).logits, 1e-4, because=SUMS)


def test_what_cannot_be_followed_is_refused() -> None:
    """Before anything is changed: a second try does not run on half of it."""
    model = fresh()
    before = logits(model)
    own = model.live.model.layers[1].mlp
    for change in (lambda: setattr(model.live.model.layers[1], "mlp", torch.nn.Identity()),
                   lambda: vars(own).update(forward=torch.tanh)):  # fmt: skip
        change()
        for _ in range(2):
            with pytest.raises(ModelError, match="load the changed model again"):
                choose_path(model)
        model.live.model.layers[1].mlp = own
        vars(own).pop("forward", None)
        assert choose_path(model)[0] is model and bitwise(logits(model), before)
    model.live.config.pad_token_id = 0  # changes no number
    assert choose_path(model)[0] is model
    model.live.config.sliding_window = 3
    with pytest.raises(ModelError, match="its config was changed after it was loaded"):
        choose_path(model)


def test_a_bridge_that_the_user_makes_later_is_refused() -> None:
    """Its hooks would not act."""
    model = cp.load_model(live := hf_model())
    build_bridge_from_module(live, "LlamaForCausalLM", hf_config=live.config)
    with pytest.raises(ModelError, match="already inside a TransformerBridge; give the bridge"):
        choose_path(model)


def test_a_hook_chooses_the_bridge() -> None:
    model = fresh(dtype=torch.bfloat16)  # in 16 bits, hooks of our own are on it
    assert sum(len(point.fwd_hooks) for point in model.bridge.hook_dict.values()) > 0
    assert choose_path(model) == (model, "plain: no hook is set")
    bridged = model.bridged()
    with model.bridge.hooks(fwd_hooks=[("blocks.2.hook_mlp_out", lambda value, hook: value * 2)]):
        chosen, reason = choose_path(model)
        assert chosen is bridged and reason.startswith("bridge: a hook on blocks.2")
        with pytest.raises(ModelError, match="cannot run without its bridge: a hook on blocks.2"):
            choose_path(model, "plain")
    with model.bridge.hooks(bwd_hooks=[("blocks.1.hook_resid_post", lambda grad, hook: None)]):
        assert choose_path(model)[0] is bridged
    model.bridge.add_caching_hooks("blocks.1.hook_resid_post", cache={})  # TransformerLens' own, and the user's wish
    assert choose_path(model)[0] is bridged
    model.bridge.reset_hooks()
    model.bridge.blocks[1].hook_in.add_perma_hook(lambda value, hook: value + 1)
    assert choose_path(model)[0] is bridged
    model.bridge.reset_hooks(including_permanent=True)
    for module in (model.bridge.blocks[1].original_component, model.bridge.blocks[1].mlp.hook_out):
        handle = module.register_forward_pre_hook(lambda module, args: None)
        assert choose_path(model)[1].startswith("bridge: a PyTorch hook on model.layers.1")
        handle.remove()
    assert choose_path(model)[0] is model


@pytest.mark.parametrize(
    ("family", "path"), [("llama", "model.layers.1.self_attn"), ("gpt2", "transformer.ln_f"), ("gemma3", "lm_head")]
)
def test_a_hook_on_a_live_model_acts_on_the_plain_model(family: str, path: str) -> None:
    """In any module, and until it is removed. What it may do to other rows is not known, so no width is independent."""
    model = cp.load_model(live := hf_model(family))
    before, width = cp.run(model, PROMPTS[:1], **SMALL), model.independent_width

    def zero(module: object, args: object, output: object) -> object:
        return (output[0] * 0, *output[1:]) if isinstance(output, tuple) else output * 0

    handle = live.get_submodule(path).register_forward_hook(zero)
    hooked = cp.run(model, PROMPTS[:1], **SMALL)
    assert hooked.meta["path_reason"] == f"plain: a PyTorch hook on {path} acts" and model.independent_width == 0
    with torch.inference_mode():
        want = live(torch.tensor([PROMPTS[0]]))
    assert hooked.committed(0)[0] == int(want.logits[0, -1].argmax())
    assert hooked.logprobs(0)[0] != before.logprobs(0)[0]
    with pytest.raises(ModelError, match="acts on the plain model alone"):
        choose_path(model, "bridge")
    handle.remove()
    again = cp.run(model, PROMPTS[:1], **SMALL)
    assert again.digest(0) == before.digest(0) and model.independent_width == width


def test_threads_that_ask_for_the_bridge_at_once_get_one() -> None:
    model = fresh("gpt-neox")
    with ThreadPoolExecutor(3) as pool, torch.inference_mode():
        made = {id(job.result()) for job in [pool.submit(model.bridged) for _ in range(3)]}
    assert made == {id(model.bridged())}
    assert not any(weight.is_inference() for weight in model.bridge.original_model.parameters())


def test_paths_that_are_asked_for() -> None:
    model = fresh()
    bridged, reason = choose_path(model, "bridge")
    assert isinstance(bridged, BridgeLM) and reason == "bridge: as asked"
    assert choose_path(model, "bridge")[0] is bridged and choose_path(bridged) == (bridged, "bridge: as given")
    assert choose_path(model, "plain") == (model, "plain: no hook is set")
    assert choose_path(stranger := Stranger(model)) == (stranger, "Stranger: as given")
    with pytest.raises(ModelError, match="runs on its bridge alone"):
        choose_path(bridged, "plain")
    with pytest.raises(ValueError, match="unknown path 'quick'; choose one of auto, bridge, plain"):
        choose_path(model, "quick")


def test_a_bridge_of_the_users_runs_plain_and_its_hooks_act() -> None:
    live = hf_model()
    live.set_attn_implementation("eager")
    live.config.output_attentions = True  # as TransformerBridge.boot_transformers sets it
    bridge = build_bridge_from_module(live, "LlamaForCausalLM", hf_config=live.config)
    model = cp.load_model(bridge)
    assert choose_path(model)[0] is model and model.fingerprint()["attention"] == BY_REQUEST
    assert not model.model.config.output_attentions and model.bridge is bridge
    with bridge.hooks(fwd_hooks=[("blocks.2.hook_mlp_out", lambda value, hook: value * 2)]):
        assert choose_path(model)[1].startswith("bridge: a hook on blocks.2")


def test_processed_weights_run_on_the_bridge() -> None:
    bridge = build_bridge_from_module(live := hf_model(), "LlamaForCausalLM", hf_config=live.config)
    bridge.enable_compatibility_mode(disable_warnings=True)
    model = cp.load_model(bridge)
    assert isinstance(model, BridgeLM) and choose_path(model) == (model, "bridge: as given")


def test_a_live_model_with_other_modules_runs_on_the_bridge() -> None:
    """A copy made from its config would be another model: in its parts, or only in its numbers."""

    class Mlp(torch.nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states.tanh()

    live, scaled = hf_model(), hf_model()
    with torch.inference_mode():
        before = live(IDS).logits
    live.model.layers[1].self_attn.scaling *= 3
    with torch.inference_mode():
        want = live(IDS).logits
    model = cp.load_model(live)
    assert isinstance(model, BridgeLM) and close(logits(model), want, 1e-4, because=SUMS)
    assert not close(logits(model), before, 1e-3, because="the control: it shows")
    scaled.model.layers[1].mlp = Mlp()
    with pytest.raises(ModelError, match="is a Mlp, not a LlamaMLP.*; nor with a bridge: "):
        cp.load_model(scaled)


def test_hooks_of_the_bridges_own_do_not_count() -> None:
    """OPT's MLP is no module, so the bridge mirrors the hooks of its parts with permanent hooks."""
    config = OPTConfig(vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4)
    bridge = build_bridge_from_module(OPTForCausalLM(config), "OPTForCausalLM", hf_config=config)
    assert any(point.fwd_hooks for point in bridge.hook_dict.values())
    assert list(user_hooks(bridge.original_model)) == []
