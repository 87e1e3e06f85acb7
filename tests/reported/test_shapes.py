"""Tables of positions, padded vocabularies, and rotary embeddings that switch at a length."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PhimoeConfig, PhimoeForCausalLM

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe_benchmarks.shared.tiny import Size, tiny_model
from tests.field.tiny_family import tiny_family
from tests.tiny import loaded

QUIET: dict[str, Any] = dict(progress=False, capture="S")
PROMPT = [1, 2, 3, 4, 5]


def generated(live: Any, prompt: list[int], count: int) -> list[int]:
    """The tokens of transformers' own greedy decoding."""
    live.generation_config.eos_token_id = None
    out = live.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


# -- tables of positions


def mpt(length: int) -> Any:
    config = copy.deepcopy(tiny_family("mpt").config)
    config.max_seq_len = length
    torch.manual_seed(0)
    live = transformers.MptForCausalLM(config).float().eval()
    with torch.no_grad():
        for weight in live.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape))
    return live


WAYS: dict[str, dict[str, Any]] = {
    "deterministic": dict(deterministic=True),
    "drafted": dict(drafter=cp.drafters.NGram(), deterministic=True, window=4),
    "drafted without shapes": dict(drafter=cp.drafters.FastPath()),
}


@pytest.mark.parametrize(("way", "length"), [("deterministic", 128), ("drafted", 30), ("drafted without shapes", 100)])
def test_a_model_with_a_short_table_of_positions_runs(length: int, way: str) -> None:
    live, new = mpt(length), min(60, length - 10)
    want = generated(live, PROMPT, new)
    model = cp.load_model(live)
    trace = cp.run(model, [PROMPT, [7] * 8], max_new_tokens=new, **WAYS[way], **QUIET)
    assert trace.committed(0) == want and trace.meta["config"]["capacity"] == length
    pieces = [piece.token_ids for piece in cp.stream(model, [PROMPT], max_new_tokens=4, **WAYS[way])]
    assert [token for piece in pieces for token in piece] == want[:4]


def test_it_runs_up_to_the_last_position() -> None:
    live = mpt(100)
    want, settings = generated(live, PROMPT, 95), {**WAYS["deterministic"], **QUIET, "capture": None}
    assert cp.run(cp.load_model(live), [PROMPT], max_new_tokens=95, **settings).committed(0) == want


def test_beyond_the_table_the_remedy_is_named() -> None:
    model = cp.load_model(mpt(100))
    with pytest.raises(ValueError, match="no position beyond; set window=2 or max_new_tokens=81, or less"):
        cp.run(model, [PROMPT], max_new_tokens=95, drafter=cp.drafters.NGram(), **QUIET)
    with pytest.raises(ValueError, match=r"capacity=512: .* table of positions .*set capacity=100 or less"):
        cp.run(model, [PROMPT], max_new_tokens=4, capacity=512, **QUIET)
    with pytest.raises(ValueError, match="exceed the model's context of 100"):
        cp.run(model, [PROMPT], max_new_tokens=96, **QUIET)
    trace = cp.run(model, [PROMPT], max_new_tokens=95, drafter=cp.drafters.NGram(), window=2, **QUIET)
    assert trace.committed(0) == cp.run(model, [PROMPT], max_new_tokens=95, **QUIET).committed(0)


def test_it_drafts_for_another_model_up_to_its_last_position() -> None:
    """The drafts end where the draft model's table does; the run goes on."""
    target, draft = loaded(), cp.load_model(mpt(64))
    trace = cp.run(target, [PROMPT, [7] * 40], max_new_tokens=50, drafter=cp.drafters.DraftModel(draft), **QUIET)
    plain = cp.run(target, [PROMPT, [7] * 40], max_new_tokens=50, **QUIET)
    assert [trace.committed(i) for i in (0, 1)] == [plain.committed(i) for i in (0, 1)]
    assert not trace.meta["errors"] and trace.num_drafted


@pytest.mark.parametrize(
    ("window", "determinism", "drafter"),
    [(1, "verify", None), (4, "verify", cp.drafters.FastPath()), (4, "invariant", cp.drafters.EarlyExit(layer=0))],
)
def test_no_pass_writes_beyond_the_slots_that_are_said_to_be_needed(
    window: int, determinism: str, drafter: Any
) -> None:
    for new in (1, 2, 9):
        needed = EngineConfig(window=window, prefill_group=1, pad_prefill=False).slots_needed(5, new)
        assert needed == max(5, 5 + new - 1 + window - 1)
        settings: dict[str, Any] = dict(window=window, group=2, determinism=determinism, drafter=drafter)
        trace = cp.run(
            loaded(), [PROMPT], max_new_tokens=new, capacity=max(needed, 2 * window), deterministic=True, **settings,
            **QUIET,
        )  # fmt: skip
        assert len(trace.committed(0)) == new


# -- LongRoPE

ROPE = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=48)
FACTORS = dict(short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[4.0, 5.0, 6.0, 7.0])
SMALL = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, eos_token_id=None,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=None, max_position_embeddings=256, initializer_range=0.3,
)  # fmt: skip


def longrope(family: str) -> Any:
    torch.manual_seed(1)
    if family == "phi3":  # as in Phi-3.5 and Phi-4-mini
        own = dict(original_max_position_embeddings=48, rope_parameters={**ROPE, **FACTORS})
        return Phi3ForCausalLM(Phi3Config(**SMALL, **own)).eval()
    scales = dict(short_mscale=1.1, long_mscale=1.5)
    config = PhimoeConfig(**SMALL, num_local_experts=4, rope_parameters={**ROPE, **FACTORS, **scales})
    return PhimoeForCausalLM(config).eval()


@pytest.mark.parametrize("family", ["phi3", "phimoe"])
def test_longrope_runs_up_to_its_original_length(family: str) -> None:
    """Tokens by generate, states by one forward with hooks, beside a request that is longer; the pads of its windows
    reach beyond the length, and so would the longest row."""
    live = longrope(family)
    want, seen = generated(live, PROMPT, 43), {}
    handle = live.model.layers[1].register_forward_hook(
        lambda module, args, out: seen.update(S=out if isinstance(out, torch.Tensor) else out[0])
    )
    with torch.no_grad():
        live(torch.tensor([[*PROMPT, *want[:-1]]]))
    handle.remove()
    model = cp.load_model(live)
    for way in ({}, dict(deterministic=True), dict(drafter=cp.drafters.NGram(), deterministic=True)):
        trace = cp.run(model, [PROMPT, [7] * 40], max_new_tokens=8, **way, **QUIET)
        assert trace.committed(0) == want[:8]
        trace = cp.run(model, [PROMPT], max_new_tokens=43, **way, **QUIET)
        assert trace.committed(0) == want
        torch.testing.assert_close(trace.states("S", 1, 0), seen["S"][0], rtol=1e-4, atol=1e-4)  # other orders of sums


def test_beyond_that_length_it_is_refused_by_name() -> None:
    model = cp.load_model(longrope("phi3"))
    with pytest.raises(ValueError, match="context of 48, beyond which the factors of its LongRoPE switch"):
        cp.run(model, [PROMPT], max_new_tokens=44, **QUIET)
    with pytest.raises(ValueError, match="context of 48"):
        cp.patching.activation(model, [1] * 49, [2] * 49, answer=(5, 6), progress=False)


def test_an_edit_of_a_longrope_model_is_taken_over() -> None:
    """The frequencies that a forward keeps in the module are no tensor that the model lacks."""
    live = longrope("phimoe")
    model = cp.load_model(live)
    live.model.norm.weight = torch.nn.Parameter(live.model.norm.weight.detach() * 3)
    live.lm_head.weight = torch.nn.Parameter(live.lm_head.weight.detach().flip(0))
    assert cp.run(model, [PROMPT], max_new_tokens=9, **QUIET).committed(0) == generated(live, PROMPT, 9)


# -- padded vocabularies


@cache
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = {"<unk>": 0} | {f"w{i}": i for i in range(1, 96)}
    built = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=built, unk_token="<unk>")


def other_tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = {"<unk>": 0} | {f"v{i}": i for i in range(1, 96)}
    built = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=built, unk_token="<unk>")


def padded(vocab: int, noise: float = 0.0) -> Any:
    """A model whose first 100 tokens are those of every other; its weights moved a little by `noise`."""
    live = tiny_model("llama", size=Size(104, hidden=32, mlp=48, layers=2, heads=4, initializer_range=0.3))
    with torch.no_grad():
        for weight in live.parameters():
            weight += noise * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
        live.lm_head.weight[100:] *= 0.1  # a trained model does not say them either
    config = copy.deepcopy(live.config)
    config.vocab_size = vocab
    made = LlamaForCausalLM(config).eval()
    weights = live.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:vocab]
    made.load_state_dict(weights)
    made.generation_config.eos_token_id = None
    return made


TEXTS = ["w1 w2 w3 w4", "w50 w60 w7", "w9 " * 12]
SIZES = [(104, 100), (100, 104)]


@pytest.mark.parametrize(("target_size", "draft_size"), SIZES)
def test_models_of_one_tokenizer_and_other_paddings_draft_for_each_other(target_size: int, draft_size: int) -> None:
    live = padded(target_size)
    prompts = [tokenizer()(text).input_ids for text in TEXTS]
    want = [generated(live, prompt, 20) for prompt in prompts]
    target = cp.load_model(live, tokenizer())
    drafter = cp.drafters.DraftModel(cp.load_model(padded(draft_size, 0.01), tokenizer()))
    for settings in ({}, dict(deterministic=True), dict(acceptance="rejection")):
        trace = cp.run(target, prompts, drafter=drafter, max_new_tokens=20, **settings, **QUIET)
        assert [trace.committed(i) for i in range(3)] == want and not trace.meta["errors"]
        events = trace.events().query("phase == 'verify'")
        assert events.num_accepted.sum() > 20
        assert max(max(ids, default=0) for ids in events.draft_token_ids) < len(tokenizer())


@pytest.mark.parametrize(("target_size", "draft_size"), SIZES)
def test_no_draft_id_lies_outside_the_target_however_much_the_draft_model_likes_it(
    target_size: int, draft_size: int
) -> None:
    live = padded(draft_size)
    with torch.no_grad():
        live.lm_head.weight[min(99, draft_size - 1) :] = 50 * live.lm_head.weight[0].sign()
    target = cp.load_model(padded(target_size), tokenizer())
    drafter = cp.drafters.DraftModel(cp.load_model(live, tokenizer()))
    for sampling in (cp.SamplingParams(), cp.SamplingParams(temperature=1.0, seed=2, top_k=5)):
        plain = cp.run(target, TEXTS, max_new_tokens=12, sampling=sampling, **QUIET)
        trace = cp.run(target, TEXTS, drafter=drafter, max_new_tokens=12, sampling=sampling, **QUIET)
        assert [trace.committed(i) for i in range(3)] == [plain.committed(i) for i in range(3)]
        assert not trace.meta["errors"] and trace.num_drafted
        drafted = {token for ids in trace.events().draft_token_ids for token in ids}
        assert max(drafted) < len(tokenizer())


def test_a_text_with_an_id_that_the_draft_model_lacks_gets_no_drafts() -> None:
    live = padded(104)
    target = cp.load_model(live, tokenizer())
    drafter = cp.drafters.DraftModel(cp.load_model(padded(100), tokenizer()))
    prompts = [[1, 2, 102, 3], [1, 2, 3]]
    trace = cp.run(target, prompts, drafter=drafter, max_new_tokens=12, **QUIET)
    assert [trace.committed(i) for i in (0, 1)] == [generated(live, prompt, 12) for prompt in prompts]
    drafted = trace.events().query("phase == 'verify'").groupby("request_id").draft_token_ids
    assert drafted.apply(lambda ids: sum(map(len, ids))).gt(0).to_dict() == {0: False, 1: True}


# -- one check of drafters, for runs and for replays of drafts


def test_acceptance_refuses_what_a_run_refuses() -> None:
    target = cp.load_model(padded(104), tokenizer())
    trace = cp.run(target, TEXTS, max_new_tokens=12, progress=False)
    DraftModel, EarlyExit = cp.drafters.DraftModel, cp.drafters.EarlyExit
    refused: dict[Any, str] = {
        DraftModel(cp.load_model(padded(100), other_tokenizer())): "share 1 token, less than 10%",
        EarlyExit(layer=7): "unknown layer 7",
        EarlyExit(layer=1): "unknown layer 1",
        DraftModel: "a drafter is an object",
        "ngram": "a drafter is an object",
    }
    refused[DraftModel(target)] = "the very weights"
    refused[DraftModel(cp.load_model(padded(100)))] = "vocabulary of 100.*one of 104"
    for drafter, said in refused.items():
        with pytest.raises(ValueError, match=said):
            cp.run(target, TEXTS, drafter=drafter, max_new_tokens=4, **QUIET)
        with pytest.raises(ValueError, match=said):
            cp.analysis.acceptance(trace, [drafter], progress=False)


@pytest.mark.parametrize(("target_size", "draft_size", "temperature"), [(104, 100, 0.8), (100, 104, 0.0)])
def test_the_counts_of_a_padded_draft_model_are_those_of_the_run(
    target_size: int, draft_size: int, temperature: float, tmp_path: Any
) -> None:
    target = cp.load_model(padded(target_size), tokenizer())
    live = padded(draft_size, 0.05)
    with torch.no_grad():
        live.lm_head.weight[100:] *= 20
    drafter = cp.drafters.DraftModel(cp.load_model(live, tokenizer()))
    settings: dict[str, Any] = dict(sampling=cp.SamplingParams(temperature=temperature), max_new_tokens=16, **QUIET)
    stored = cp.load_trace(cp.run(target, TEXTS, **settings).save(tmp_path / "run"))
    table = cp.analysis.acceptance(stored, drafter, windows=8, progress=False)
    events = cp.run(target, TEXTS, drafter=drafter, window=8, **settings).events().query("phase == 'verify'")
    of_run = [
        (len(own), sum(map(len, own.draft_token_ids)), own.num_accepted.sum())
        for _, own in events.groupby("request_id")
    ]
    assert [(r.passes, r.drafted, r.accepted) for r in table.itertuples()] == of_run
    assert set(table.kind) == {"exact"} and table.drafted.sum() > table.accepted.sum() > 0
