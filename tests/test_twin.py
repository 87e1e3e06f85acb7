"""The plain model beside the bridge: same weights, same cache, same states; and which of the two is chosen."""

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GraniteConfig, GraniteForCausalLM, OPTConfig, OPTForCausalLM

import cacheprobe as cp
from cacheprobe.models import paths, twin
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.bridge import BridgeLM
from cacheprobe.models.paths import choose_path
from cacheprobe.models.twin import FORCE_GQA, TwinLM
from cacheprobe.ops.equality import bitwise, close
from tests.feeding import GARBAGE, fed_in_parts, texts
from tests.tiny import FAMILIES, PROMPTS, SMALL, VOCAB, hf_model, loaded

SUMS = "fused attention reorders sums"


def fresh(family: str = "llama", dtype: torch.dtype = torch.float32) -> BridgeLM:
    """A model of its own, for tests that edit it or hang hooks on it."""
    return cp.load_model(hf_model(family, dtype))


def hooks_on(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class Stranger:
    """Another CachedLM."""

    def __init__(self, model: BridgeLM) -> None:
        self.inner = model

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[BridgeLM, TwinLM]]:
    model = loaded(request.param)
    yield model, TwinLM(model)


def test_twin_equals_bridge(pair: tuple[BridgeLM, TwinLM]) -> None:
    """Ragged rows, pads, a third of the blocks wrong and rolled back."""
    bridge, plain = pair
    theirs, ours = fed_in_parts(bridge, texts(40, 31, 23)), fed_in_parts(plain, texts(40, 31, 23))
    assert sorted(ours) == sorted(theirs) and len(ours) == 3 * (1 + 1 + 3 * 3 + 2 * 3)
    for what, expected in theirs.items():
        assert close(ours[what], expected, 1e-5, because=SUMS), what
    assert not close(theirs["T 1 row 0"], theirs["C 1 row 0"], 1e-1, because="the control: sites differ")


def test_twin_shares_every_tensor(pair: tuple[BridgeLM, TwinLM]) -> None:
    bridge, plain = pair
    there = {tensor.data_ptr() for tensor in bridge.bridge.original_model.state_dict(keep_vars=True).values()}
    there |= {tensor.data_ptr() for tensor in bridge.bridge.original_model.buffers()}
    held = [*plain.model.parameters(), *plain.model.buffers()]
    assert len(held) > 20 and all(tensor.data_ptr() in there for tensor in held)
    is_tied = plain.model.get_output_embeddings().weight is plain.model.get_input_embeddings().weight
    assert is_tied == plain.model.config.tie_word_embeddings


def test_the_bridge_keeps_its_attention(pair: tuple[BridgeLM, TwinLM]) -> None:
    bridge, plain = pair
    assert plain.model.config is not bridge.config
    assert all(m.config is plain.model.config for m in plain.model.modules() if hasattr(m, "config"))
    before = bridge.config._attn_implementation
    TwinLM(bridge)
    assert bridge.config._attn_implementation == before


def test_early_stop_is_the_state_after_that_block(pair: tuple[BridgeLM, TwinLM]) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    for model in pair:
        seen: list[Tensor] = []
        sites = [("pre", 0), *(("S", layer) for layer in range(3))]
        with model.capturing(sites, lambda site, layer, value, seen=seen: seen.append(value)):
            model.forward(ids, model.new_cache(1, 8), [0], [0])
        for num_layers, expected in enumerate(seen):
            cache = model.new_cache(1, 8)
            assert bitwise(model.forward(ids, cache, [0], [0], num_layers=num_layers), expected)
            assert [bool(keys.any()) for keys in cache.keys] == [layer < num_layers for layer in range(3)]


def test_chosen_logits_are_those_of_the_slots(pair: tuple[BridgeLM, TwinLM]) -> None:
    _, plain = pair
    ids, cache = torch.tensor([[5, 6, 7, 8]]), plain.new_cache(1, 8)
    every = plain.forward(ids, cache, [0], [0])
    chosen = plain.forward(ids, cache, [0], [0], logit_slots=[3, 1])
    assert chosen.shape == (1, 2, VOCAB) and close(chosen, every[:, [3, 1]], 1e-6, because="fewer rows in the product")


def test_fingerprint_tells_the_paths_apart(pair: tuple[BridgeLM, TwinLM]) -> None:
    bridge, plain = pair
    is_capped = plain.origin.config.model_type == "gemma2"
    expected = ("twin", "eager", "never") if is_capped else ("twin", "sdpa", "beyond one slot")
    theirs, ours = bridge.fingerprint(), plain.fingerprint()
    assert (ours["path"], ours["attention"], ours["sdpa_force_gqa"]) == expected
    assert {key for key in ours if ours[key] != theirs.get(key)} == {"path", "attention", "sdpa_force_gqa"}


def test_twin_is_a_cached_lm() -> None:
    model = loaded()
    plain = TwinLM(model)
    assert isinstance(plain, CachedLM)
    assert (plain.name, plain.n_layers, plain.d_vocab, plain.dtype) == (model.name, 3, VOCAB, torch.float32)
    states = torch.randn(2, 32)
    assert bitwise(plain.read_out(states), model.read_out(states)) and plain.token_texts([3]) == ["<3>"]
    with pytest.raises(ModelError, match="no site S at layer 7"), plain.capturing([("S", 7)], print):
        pass


def test_the_loop_runs_on_a_twin() -> None:
    drafter = cp.drafters.EarlyExit(layer=1)
    ours = cp.run(TwinLM(loaded()), PROMPTS, **SMALL, drafter=drafter, deterministic=True)
    oracle = cp.reference(TwinLM(loaded()), PROMPTS, **SMALL)
    theirs = cp.reference(loaded(), PROMPTS, **SMALL)
    assert ours.num_rolled_back > 0
    for i in range(len(PROMPTS)):
        assert ours.committed(i) == oracle.committed(i) == theirs.committed(i)
        assert ours.digest(i) == oracle.digest(i)


def test_hooks_and_environment_are_restored_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TwinLM(loaded())
    cache, ids = plain.new_cache(1, 8), torch.tensor([[1, 2]])
    for before in (None, "0", "1"):
        monkeypatch.delenv(FORCE_GQA, raising=False)
        if before is not None:
            monkeypatch.setenv(FORCE_GQA, before)
        inside: list[str | None] = []

        def fail(site: str, layer: int, value: Tensor, inside: list = inside) -> None:
            inside.append(os.environ.get(FORCE_GQA))
            raise RuntimeError("the listener failed")

        with pytest.raises(RuntimeError, match="the listener failed"), plain.capturing([("T", 1)], fail):
            plain.forward(ids, cache, [0], [0], num_layers=2)
        assert hooks_on(plain.model) == 0 and os.environ.get(FORCE_GQA) == before
        assert cache._staged is None
        with plain.capturing([("T", 1)], lambda *state, inside=inside: inside.append(os.environ[FORCE_GQA])):
            plain.forward(ids, cache, [0], [0])
            plain.forward(ids[:, :1], cache, [0], [0])
        assert inside == ["1", "1", "0"]
        assert hooks_on(plain.model) == 0 and os.environ.get(FORCE_GQA) == before


def test_what_a_listener_returns_changes_nothing() -> None:
    plain = TwinLM(loaded())
    ids = torch.tensor([[1, 2]])
    expected = plain.forward(ids, plain.new_cache(1, 8), [0], [0])
    with plain.capturing([("pre", 0), ("T", 1), ("S", 1)], lambda site, layer, value: value * 0):
        assert bitwise(plain.forward(ids, plain.new_cache(1, 8), [0], [0]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt-neox", "gemma3"])
@pytest.mark.parametrize("shape", [(4, 8), (1, 8), (4, 1)], ids=str)
def test_fixed_shapes_fix_the_bits(family: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Neither its place in the batch, nor the other rows, nor what is stale, nor its slot in the window matter."""
    plain = TwinLM(loaded(family, dtype))
    (text,) = texts(40)
    batch, width = shape

    def measured(seed: int, index: int, row: int, start: int, garbage: float) -> tuple[Tensor, ...]:
        """Logits of position 31, and keys and values up to it, of one row among others."""
        generator = torch.Generator().manual_seed(seed)
        cache = plain.new_cache(8, 64)
        for held in (*cache.keys, *cache.values):
            held.normal_(0, garbage, generator=generator)
        others = [r for r in torch.randperm(8, generator=generator).tolist() if r != row][: batch - 1]
        rows = [*others[:index], row, *others[index:]]
        for begin in range(0, 32, 8):  # the prompt, in chunks of one shape, beyond the window's start too
            plain.forward(text[None, begin : begin + 8], cache, [row], [begin])
        for other in others:
            noise = torch.randint(0, VOCAB, (1, 8), generator=generator)
            plain.forward(noise, cache, [other], [int(torch.randint(0, 24, (), generator=generator))])
        ids = torch.randint(0, VOCAB, (batch, width), generator=generator)
        starts = torch.randint(0, 40, (batch,), generator=generator).tolist()
        ids[index], starts[index] = text[start : start + width], start
        ids[index, 31 - start + 1 :] = 7 + seed  # rejected, or pads
        logits = plain.forward(ids, cache, rows, starts)[index, 31 - start]
        return logits, *(held[row, :, :32] for held in (*cache.keys, *cache.values))

    last = batch - 1
    expected = measured(0, 0, 0, 31, 0.0)
    variants = {
        "again": (0, 0, 0, 31, 0.0),
        "other rows": (1, 0, 0, 31, 0.0),
        "stale garbage": (2, 0, 0, 31, GARBAGE),
        "cache row": (3, 0, 5, 31, GARBAGE),
        "batch index": (4, last, 2, 31, GARBAGE),
        **({f"slot {slot}": (5, last, 1, 31 - slot, GARBAGE) for slot in (1, 3, 7)} if width > 1 else {}),
    }
    for what, variant in variants.items():
        assert all(bitwise(a, b) for a, b in zip(measured(*variant), expected, strict=True)), what


def test_an_edit_in_place_is_seen() -> None:
    model = fresh()
    plain, _ = choose_path(model, "twin")
    ids = torch.tensor([[1, 2, 3]])
    before = plain.forward(ids, plain.new_cache(1, 8), [0], [0])
    with torch.no_grad():
        model.bridge.blocks[1].mlp.out.weight.mul_(3.0)
        model.bridge.unembed.b_U.add_(1.0)
    after = plain.forward(ids, plain.new_cache(1, 8), [0], [0])
    assert not close(after, before + 1.0, 1e-2, because="the control: the block's edit shows")
    assert close(after, model.forward(ids, model.new_cache(1, 8), [0], [0]), 1e-5, because=SUMS)
    assert isinstance(choose_path(model)[0], TwinLM)
    assert plain.fingerprint()["weights_sha256"] == model.weights_sha256


def test_replaced_tensors_are_followed() -> None:
    model = fresh()
    plain, _ = choose_path(model, "twin")
    ids = torch.tensor([[1, 2, 3]])
    original = model.bridge.blocks[0].mlp.out.original_component
    original.weight = torch.nn.Parameter(original.weight.detach() * 2)
    expected = model.forward(ids, model.new_cache(1, 8), [0], [0])
    assert close(plain.forward(ids, plain.new_cache(1, 8), [0], [0]), expected, 1e-5, because=SUMS)
    chosen, _ = choose_path(model)
    assert isinstance(chosen, TwinLM) and any(w is original.weight for w in chosen.model.parameters())


def test_a_replaced_module_is_refused() -> None:
    model = fresh()
    assert isinstance(choose_path(model)[0], TwinLM)
    model.bridge.blocks[0].original_component.mlp = torch.nn.Identity()
    chosen, reason = choose_path(model)
    assert chosen is model and "is a Identity, not a LlamaMLP" in reason


def test_an_edit_of_a_copy_that_the_bridge_keeps() -> None:
    """GPT-NeoX's joint projection is split into copies: the twin computes with one, the bridge with the others."""
    model = fresh("gpt-neox")
    assert isinstance(choose_path(model)[0], TwinLM)
    with torch.no_grad():
        model.bridge.blocks[0].attn.q.weight.mul_(1 + 1e-6)  # far less than the comparison would notice
    chosen, reason = choose_path(model)
    assert chosen is model and "weights were edited, and the bridge keeps copies" in reason


def test_a_hook_chooses_the_bridge() -> None:
    model = fresh(dtype=torch.bfloat16)  # in 16 bits, hooks of our own are on it
    assert sum(len(point.fwd_hooks) for point in model.bridge.hook_dict.values()) > 0
    assert choose_path(model)[1].startswith("twin: no hook is set")
    with model.bridge.hooks(fwd_hooks=[("blocks.2.hook_mlp_out", lambda value, hook: value * 2)]):
        chosen, reason = choose_path(model)
        assert chosen is model and reason.startswith("bridge: a hook on blocks.2")
        with pytest.raises(ModelError, match="cannot run on its twin: a hook on blocks.2"):
            choose_path(model, "twin")
    with model.bridge.hooks(bwd_hooks=[("blocks.1.hook_resid_post", lambda grad, hook: None)]):
        assert choose_path(model)[0] is model
    model.bridge.blocks[1].hook_in.add_perma_hook(lambda value, hook: value + 1)
    assert choose_path(model)[0] is model
    model.bridge.reset_hooks(including_permanent=True)
    handle = model.bridge.blocks[1].original_component.register_forward_pre_hook(lambda module, args: None)
    assert choose_path(model)[1].startswith("bridge: a PyTorch hook on model.layers.1")
    handle.remove()
    assert isinstance(choose_path(model)[0], TwinLM)


def test_paths_that_are_asked_for() -> None:
    model = fresh()
    assert choose_path(model, "bridge") == (model, "bridge: as asked") and model.twin_trial is None
    plain, reason = choose_path(model, "twin")
    assert isinstance(plain, TwinLM) and plain.origin is model and reason.startswith("twin:")
    assert choose_path(model)[0] is plain  # built once
    assert choose_path(plain)[0] is plain and choose_path(plain, "bridge")[0] is plain
    assert choose_path(stranger := Stranger(model)) == (stranger, "Stranger: as given")
    with pytest.raises(ValueError, match="unknown path 'fast'; choose one of auto, bridge, twin"):
        choose_path(model, "fast")


def test_a_bridge_of_the_users_has_a_twin() -> None:
    live = hf_model()
    live.set_attn_implementation("eager")
    live.config.output_attentions = True  # as TransformerBridge.boot_transformers sets it
    bridge = build_bridge_from_module(live, "LlamaForCausalLM", hf_config=live.config)
    assert isinstance(choose_path(cp.load_model(bridge))[0], TwinLM)


def test_processed_weights_are_refused() -> None:
    bridge = build_bridge_from_module(live := hf_model(), "LlamaForCausalLM", hf_config=live.config)
    bridge.enable_compatibility_mode(disable_warnings=True)
    model = BridgeLM(bridge, "tiny")
    with pytest.raises(ModelError, match="tiny: the bridge's weights were processed"):
        TwinLM(model)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_twin_that_differs_is_not_chosen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    right = twin.empty_model

    def other_rotation(wrapped: torch.nn.Module) -> torch.nn.Module:
        plain = right(wrapped)
        for layer in plain.model.layers:
            layer.self_attn.scaling *= 3
        return plain

    monkeypatch.setattr(twin, "empty_model", other_rotation)
    model = fresh(dtype=dtype)
    chosen, reason = choose_path(model)
    assert chosen is model and "of the plain model are" in reason


def test_a_nan_is_no_agreement() -> None:
    model = fresh()
    with torch.no_grad():
        model.bridge.blocks[2].mlp.out.weight[0, 0] = torch.nan
    chosen, reason = choose_path(model)
    assert chosen is model and "nan" in reason


def test_building_a_twin_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    TwinLM(loaded())
    assert torch.equal(torch.get_rng_state(), state)
