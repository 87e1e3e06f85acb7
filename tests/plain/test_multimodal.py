"""The text decoders of multimodal models: windows and chunks on longer texts, blocks that scale the stream, keys shared
between layers, and texts that must stay causal beside images that need not."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import cacheprobe as cp
from cacheprobe.core.live import LiveModule
from cacheprobe.engine.passes import EngineError
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models import checks
from cacheprobe.models.base import BlockSum, CachedLM, ModelError
from cacheprobe.models.fast import operations as kernel_operations
from cacheprobe.models.fast.operations import KernelOperations
from cacheprobe.models.feeding import feed
from cacheprobe.models.hf import cache as hf_cache
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain.files import refuse_unknown_memory
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.equality import close
from cacheprobe.ops.kernel_set import KernelSet
from cacheprobe.trace.self_checks import CaptureError, residual_check, residual_errors
from tests.feeding import fed_in_parts, texts
from tests.field.tiny_family import tiny_config, tiny_family
from tests.twins.equivalence import hf_greedy

WINDOW = 8
"""Width in tokens of the windows and chunks of the tiny models."""
CLOSE = {"gemma3": 1e-5, "llama4": 1e-5}
"""Largest accepted difference of logits, as `close` takes it; `NOISY` for the others."""
NOISY = 5e-4
"""Tiny Gemma 4 models attend with unscaled products of random norms, which amplifies rounding: transformers' own
float32 logits are 1e-4 away from its float64. A wrong mask gives more than .1."""
SCALE = 0.9
"""Factor by which the tiny Gemma 4's blocks multiply their sum."""
IDS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])


def llama4() -> PreTrainedModel:
    """The whole model, as a user may have it; AutoModelForCausalLM takes its text decoder alone."""
    model: LiveModule = transformers.Llama4ForConditionalGeneration(tiny_config("llama4")).eval()
    model.language_model = tiny_family("llama4")
    model.config.text_config = model.language_model.config
    model.generation_config.eos_token_id = None
    return model


EXPERTS = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=24)
KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma3": lambda: tiny_family("gemma3"),
    "gemma4": lambda: tiny_family("gemma4", dict(num_kv_shared_layers=2)),
    "gemma4_unified": lambda: tiny_family("gemma4_unified"),
    "llama4": llama4,
    "gemma4_text": lambda: tiny_family("gemma4_text", EXPERTS),
    "gemma4_unified_text": lambda: tiny_family("gemma4_unified_text"),
}
QUICK = ("gemma3", "gemma4", "llama4")
QUICK_KINDS = [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in KINDS]


@cache
def original(kind: str) -> PreTrainedModel:
    return KINDS[kind]()


@cache
def model(kind: str, path: str = "plain") -> CachedLM:
    loaded = cp.load_model(copy.deepcopy(original(kind)), products="torch")
    return choose_path(loaded, path)[0]


def plain(kind: str) -> PlainLM:
    found = model(kind, "plain")
    assert isinstance(found, PlainLM)
    return found


def uncached(kind: str, text: Tensor) -> Tensor:
    """[t, v] logits of the original, which builds its own masks."""
    with torch.inference_mode():
        return original(kind)(text[None], use_cache=False).logits[0]


def full_masks(config: object, cache: StagedCache, *where: Any) -> dict[str, Tensor]:
    """What a cache without windows and chunks would give."""
    kinds = ("full_attention", "sliding_attention", "chunked_attention")
    return dict.fromkeys(kinds, cache.mask(*where))


PLACES = [("gemma3", "bridge"), *((kind, "plain") for kind in KINDS)]
QUICK_PLACES = [
    pytest.param(*place, marks=[] if place[0] in QUICK and place[1] != "bridge" else [pytest.mark.slow])
    for place in PLACES
]


@pytest.mark.parametrize(("kind", "path"), QUICK_PLACES)
def test_logits_beyond_the_window(kind: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged rows of up to six windows, a third of the blocks rolled back; and what full attention would have given."""
    lm, rows = model(kind, path), texts(48, 41, 23)
    ours = fed_in_parts(lm, rows)
    for b, text in enumerate(rows):
        expected = uncached(kind, text)
        assert close(ours[f"logits row {b}"], expected, CLOSE.get(kind, NOISY), because="sums are reordered")
        assert torch.equal(ours[f"logits row {b}"].argmax(-1), expected.argmax(-1))
    for module in (hf_cache,):
        monkeypatch.setattr(module, "attention_masks", full_masks)
    wrong = fed_in_parts(lm, rows)["logits row 0"]
    assert float((wrong - ours["logits row 0"])[:WINDOW].abs().max()) < 10 * CLOSE.get(kind, NOISY)
    assert float((wrong - ours["logits row 0"])[WINDOW:].abs().max()) > 0.1


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_a_rollback_longer_than_the_window(kind: str) -> None:
    lm, (first, second) = plain(kind), texts(44, 44)
    cache = lm.new_cache(1, 48)
    lm.forward(first[None], cache, [0], [0])
    redone = lm.forward(second[None, 24:], cache, [0], [24])[0]
    text = torch.cat([first[:24], second[24:]])
    assert close(redone, uncached(kind, text)[24:], CLOSE.get(kind, NOISY), because="sums are reordered")


def outputs(kind: str, *names: str) -> dict[str, Tensor]:
    """[t, m] outputs of modules of the original, by their dotted names."""
    found: dict[str, Tensor] = {}

    def listen(name: str) -> Any:
        def hook(module: object, args: object, output: Any) -> None:
            found[name] = (output[0] if isinstance(output, tuple) else output)[0].clone()

        return original(kind).get_submodule(name).register_forward_hook(hook)

    handles = [listen(name) for name in names]
    uncached(kind, IDS[0])
    for handle in handles:
        handle.remove()
    return found


def test_s_t_and_c_of_blocks_that_scale_the_stream() -> None:
    """Written down from transformers' source: S = scale * (input + attention + MLP + what the token's own vector adds).
    Layer 3 attends over the keys of layer 1."""
    sites = [(site, layer) for site in "STC" for layer in range(4)]
    states = {place: value[0] for place, value in feed(plain("gemma4"), IDS, sites).states.items()}
    names = ("post_attention_layernorm", "post_feedforward_layernorm", "post_per_layer_input_norm")
    for layer in (1, 3):
        block = f"model.language_model.layers.{layer}"
        theirs = outputs("gemma4", block, *(f"{block}.{name}" for name in names))
        attended, mlp, own = (theirs[f"{block}.{name}"] for name in names)
        for site, expected in (("S", theirs[block]), ("T", SCALE * attended), ("C", SCALE * (mlp + own))):
            assert close(states[site, layer], expected, 1e-4, because="fused attention reorders sums"), site
        total = SCALE * states["S", layer - 1] + states["T", layer] + states["C", layer]
        assert close(states["S", layer], total, 1e-5, because="it is scaled before it is summed")
        assert not close(states["S", layer], total - 0.1 * states["S", layer - 1], 1e-2, because="unscaled input")


@pytest.mark.parametrize("site", "TC")
def test_an_edit_of_a_scaled_part_gives_the_edited_sum(site: str) -> None:
    wanted = torch.ones(1, IDS.shape[1], 32)
    sites = [("S", 0), ("T", 1), ("C", 1), ("S", 1)]
    with plain("gemma4").editing([(site, 1)], lambda site, layer, value: wanted):
        states = feed(plain("gemma4"), IDS, sites).states
    states[site, 1] = wanted
    total = SCALE * states["S", 0] + states["T", 1] + states["C", 1]
    assert close(states["S", 1], total, 1e-5, because="the last summand is a difference")


def hidden_by_hand(length: int, from_position: int, hidden: list[int]) -> dict[str, Tensor]:
    """Additive masks [1, 1, t, s] in which tokens from a position on do not see the positions `hidden`."""
    full = torch.ones(length, length).triu(1)
    full[from_position:, hidden] = 1
    distance = torch.arange(length)[:, None] - torch.arange(length)
    sliding = torch.where(distance >= WINDOW, 1, full)
    least = torch.finfo(torch.float32).min
    return {"full_attention": full[None, None] * least, "sliding_attention": sliding[None, None] * least}


def test_layers_that_share_keys_keep_none_and_see_what_is_hidden() -> None:
    lm, ids = plain("gemma4"), IDS[0].tolist()
    assert lm.sources == {2: 0, 3: 1} and [k.shape[1] for k in lm.new_cache(1, 8).keys] == [2, 2, 0, 0]
    rows = cp.kv_snapshot(lm, ids, capacity=64)
    settings: dict[str, Any] = dict(window=4, group=2, capacity=64, max_new_tokens=6, progress=False)

    def went_on(cached: object) -> list[int]:
        return cp.run(lm, [cp.Request(ids, cached=cached, own_fingerprint=True)], **settings).committed(0)

    assert went_on(rows) == hf_greedy(original("gemma4"), ids, 6)
    masked = went_on(rows.masked([4, 5]))
    text = torch.tensor([[*ids, *masked[:-1]]])
    with torch.inference_mode():
        masks = hidden_by_hand(text.shape[1], len(ids) - 1, [4, 5])
        logits = original("gemma4")(text, attention_mask=masks, use_cache=False).logits
    assert masked == logits[0, len(ids) - 1 :].argmax(-1).tolist() != went_on(rows)
    with pytest.raises(EngineError, match="layers 2, 3 attend over the keys of others"):
        went_on(rows.masked([4, 5], layers=1))


def test_heads_of_a_layer_that_shares_keys() -> None:
    """They are as wide as those of the layer whose keys it reads: 16 numbers in layers 1 and 3, 8 in the others."""
    ids = IDS[0].tolist()
    capture = cp.CaptureConfig(sites="S", heads="z")
    trace = cp.run(plain("gemma4"), [ids], max_new_tokens=2, capture=capture, capacity=64, progress=False)
    assert [tuple(trace.heads("z", layer, 0).shape[1:]) for layer in range(4)] == [(4, 8), (4, 16)] * 2
    into: list[Tensor] = []
    projection = original("gemma4").get_submodule("model.language_model.layers.3.self_attn.o_proj")
    handle = projection.register_forward_pre_hook(lambda module, args: into.append(args[0][0].clone()))
    uncached("gemma4", IDS[0])
    handle.remove()
    theirs = into[0].unflatten(-1, (4, 16))
    assert close(trace.heads("z", 3, 0)[: len(ids)], theirs, 1e-4, because="fused attention reorders sums")
    with pytest.raises(ModelError, match="layer 2 has no module for"):
        cp.run(plain("gemma4"), [ids], max_new_tokens=2, capture=cp.CaptureConfig(heads="k"), progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_text_stays_causal_where_images_need_not(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger Gemma 4 models say that tokens of images see each other; the weights decide what a text does."""
    live = tiny_family("gemma4", dict(use_bidirectional_attention="vision")).to(dtype)
    lm = cp.load_model(live)
    assert isinstance(lm, PlainLM) and checks.is_causal(lm, checks.probe_ids(lm))
    for family, flag in (("gemma4", "all"), ("gemma3_text", True)):
        both = tiny_family(family, dict(use_bidirectional_attention=flag)).to(dtype)
        with pytest.raises(ModelError, match="attends in both directions"):
            cp.load_model(both)
    wrong = PlainLM(tiny_family("gemma4", dict(use_bidirectional_attention="all")).to(dtype), None, "gemma4")
    assert not checks.is_causal(wrong, checks.probe_ids(wrong))
    with pytest.raises(ModelError, match="differs from the model without it"):
        checks.check_model(wrong)
    monkeypatch.setattr(checks, "agrees", lambda *given: True)
    with pytest.raises(ModelError, match="lets tokens of a text see later ones"):
        checks.check_model(wrong)


def test_in_16_bits_the_scale_is_found_and_the_states_add_up() -> None:
    """A scale of .9 is within the rounding of 1 in bfloat16, where a sum has 8 bits."""
    lm = cp.load_model(copy.deepcopy(original("gemma4")).to(torch.bfloat16))
    assert isinstance(lm, PlainLM)
    scale = float(torch.tensor(SCALE, dtype=torch.bfloat16))
    assert [(one.scale, one.mlp_parts) for one in lm.block_sums] == [(scale, 2)] * 4
    trace = cp.run(lm, [IDS[0].tolist()], max_new_tokens=12, capture="STC", capacity=64, progress=False)
    assert max(check["worst"] for check in trace.meta["checks"]) < 1


def test_parts_that_cancel_are_no_fault_of_a_block_of_several_parts() -> None:
    """In the first number the two parts of C cancel, and what the block added before is lost in their rounding."""
    pre, first, second = (torch.tensor([values]) for values in ([1e-8, 1.0], [1.0, 1.0], [-1.0, 1.0]))
    post, zero = (pre + first) + second, torch.zeros(1, 2)
    states = pre, zero, first + second, post
    residual_check(torch.float32).add([residual_errors(*states, form=BlockSum(mlp_parts=2)).max()], 0)
    for wrong in (BlockSum(), BlockSum(scale=SCALE, mlp_parts=2)):
        with pytest.raises(CaptureError, match="resid_post"):
            residual_check(torch.float32).add([residual_errors(*states, form=wrong).max()], 0)


@pytest.mark.parametrize("wrong", ["0", "negative", "half", "of another row"])
def test_a_wrong_c_of_several_parts_is_found_beside_a_massive_number(wrong: str) -> None:
    draw = torch.Generator().manual_seed(0)
    pre, attn, mlp = (scale * torch.randn(64, 256, generator=draw) for scale in (1.0, 0.2, 0.2))
    pre[:, 7] = 3000.0
    pre, attn, mlp = pre.bfloat16(), attn.bfloat16(), mlp.bfloat16()
    post = (pre + attn) + mlp
    residual_check(torch.bfloat16).add([residual_errors(pre, attn, mlp, post, form=BlockSum(mlp_parts=2)).max()], 0)
    given = {"0": 0 * mlp, "negative": -mlp, "half": mlp / 2, "of another row": mlp.roll(1, 0)}[wrong]
    with pytest.raises(CaptureError, match="resid_post"):
        residual_check(torch.bfloat16).add(
            [residual_errors(pre, attn, given, post, form=BlockSum(mlp_parts=2)).max()], 0
        )


def test_routing_of_a_router_in_the_block() -> None:
    """Two of four experts; transformers' own router gives their weights."""
    capture = cp.CaptureConfig(sites="S", heads="router")
    trace = cp.run(model("gemma4_text"), [IDS[0].tolist()], max_new_tokens=1, capture=capture, progress=False)
    theirs: list[Tensor] = []
    router = original("gemma4_text").get_submodule("model.layers.2.router")
    handle = router.register_forward_hook(lambda module, args, output: theirs.extend(output[1:]))
    uncached("gemma4_text", IDS[0])
    handle.remove()
    ids, weights = trace.heads("router", 2, 0).unbind(-1)
    ours = torch.zeros(IDS.shape[1], 4).scatter(1, ids.long(), weights)  # by expert: the order of the two may differ
    expected = torch.zeros(IDS.shape[1], 4).scatter(1, theirs[1], theirs[0])
    assert torch.equal(ours != 0, expected != 0)
    assert close(ours, expected, 1e-3, because="fused attention reorders sums")


def test_kernels_take_each_layers_window_from_the_text_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, config = cast(KernelSet, SimpleNamespace(product=None)), original("gemma3").config
    assert KernelOperations(kernels, config, 4).windows == [WINDOW, None] * 2
    monkeypatch.setattr(kernel_operations, "text_config", lambda whole: whole)  # the control
    assert KernelOperations(kernels, config, 4).windows == [WINDOW] * 4


def test_a_logit_is_the_sum_of_scaled_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, ids = plain("gemma4"), IDS[0].tolist()
    trace = cp.run(lm, [ids], max_new_tokens=2, capture="STC", capacity=64, progress=False)
    tokens = list(range(lm.d_vocab))

    def logits_of(site: str | None) -> Tensor:
        """[v] what a site, or all sites together, give to the logit of every token."""
        table = cp.analysis.attribution(trace, 0, position=5, token=tokens, model=lm)
        table = table if site is None else table[table.site == site]
        return torch.tensor(table.groupby("token_id").logit.sum().to_numpy())

    theirs = uncached("gemma4", IDS[0])[5]
    assert close(logits_of(None), theirs, 1e-4, because="fused attention reorders sums")
    assert float(logits_of("rest").abs().max()) < 1e-4
    monkeypatch.setattr(lm, "block_sums", ())
    assert float(logits_of("rest").abs().max()) > 0.1


@pytest.mark.parametrize("kind", ["gemma3", "llama4"])
def test_a_folder_of_a_whole_checkpoint(kind: str, tmp_path: Path) -> None:
    original(kind).save_pretrained(tmp_path)
    lm = cp.load_model(tmp_path, progress=False)
    trace = cp.run(lm, [IDS[0].tolist()], max_new_tokens=8, capacity=64, progress=False)
    assert trace.committed(0) == hf_greedy(original(kind), IDS[0].tolist(), 8)


def test_windows_of_types_that_no_test_covers_are_refused() -> None:
    """The text decoder's windows are tested for Cohere 2, the model around it is not."""
    text = SimpleNamespace(model_type="cohere2", sliding_window=512, layer_types=["sliding_attention"])
    whole = SimpleNamespace(model_type="cohere2_vision", get_text_config=lambda: text)
    with pytest.raises(ModelError, match="window of 512"):
        refuse_unknown_memory(whole, "Cohere2VisionForConditionalGeneration")
    whole.model_type = "gemma3"
    refuse_unknown_memory(whole, "as if it were Gemma 3")


def test_several_streams_are_refused_by_their_cause() -> None:
    live = tiny_family("gemma3n_text")
    with pytest.raises(ModelError, match="Gemma3nForCausalLM has 4 residual streams"):
        cp.load_model(live)
    with pytest.raises(ModelError, match="block 0 has a stream of 4 dimensions"):  # the values say so, too
        PlainLM(live, None, "gemma3n_text")


def test_a_model_without_keys_of_its_own_is_refused() -> None:
    config = transformers.AutoConfig.for_model("gemma4_unified_assistant")
    with pytest.raises(ModelError, match="has no keys and values of its own"):
        refuse_unknown_memory(config, "Gemma4UnifiedAssistantForCausalLM")
