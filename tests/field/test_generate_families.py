"""transformers' generation checks on its tiny models: cacheprobe's greedy tokens are those of `generate`.

Every causal language model of the installed transformers is tried: undrafted, drafted, and in a ragged batch.
`python -m tests.field` prints the results as a table.
"""

import copy
import warnings

import pytest
import torch
import transformers

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.plain.files import SLIDING_FAMILIES
from tests.field.family_checks import (
    COLUMNS,
    DIFFERENT,
    EQUAL,
    NEW_TOKENS,
    PROMPTS,
    RUN,
    FamilyRow,
    check_family,
    table,
    tokens_of,
)  # fmt: skip
from tests.field.family_models import CONTEXT, SLIDING_WINDOW, class_name, model_types, tiny_family

SUPPORTED = frozenset(
    "afmoe apertus arcee aria_text axk1 bailing_hybrid bamba biogpt bitnet bloom codegen cohere cohere2 "
    "cohere2_moe ctrl cwm dbrx deepseek_v2 deepseek_v3 diffllama dots1 emu3 ernie4_5 ernie4_5_moe exaone4 "
    "exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma4 "
    "gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2 "
    "gpt_bigcode gpt_neox gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid "
    "granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jamba "
    "jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe llama llama4 llama4_text mamba mamba2 megatron-bert mellum "
    "mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder "
    "mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phi4_multimodal "
    "phimoe qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next rwkv "
    "seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm xlstm youtu zamba zamba2".split()
)
"""Families that must run, and give the tokens of `generate`. All others must be refused by name."""

MAY_STAY_UNTRIED = frozenset("dots3_note gemma3n gemma4_assistant gemma4_unified_assistant qwen4_exp".split())
"""Model types without a tiny text model: two draft for other models, gemma3n needs pillow, and the text parts of the
other two are tried under their own names."""

QUICK = frozenset(
    "deepseek_v3 gemma3_text gpt2 gpt_neox llama mixtral qwen3 bart bloom blt falcon gpt_neo gpt_oss lfm2 mamba opt "
    "qwen3_5_text".split()
)
"""Tried by `make test`: at least one family of each kind. The rest are slow."""


@pytest.fixture(autouse=True)
def without_notes_of_transformers():
    """transformers prints notes about unusual settings; they are no failures."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
    transformers.logging.set_verbosity(level)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in model_types()]
)
def test_family_gives_the_tokens_of_generate_or_is_refused_by_name(model_type: str) -> None:
    row = check_family(model_type)
    if model_type in SUPPORTED:
        assert row.outcome == "compared", row.reason
        assert (row.undrafted, row.drafted, row.ragged) == (EQUAL, EQUAL, EQUAL), row.reason
        assert row.num_rolled_back > 0
    elif row.outcome == "not tried":
        assert model_type in MAY_STAY_UNTRIED, row.reason
    else:
        assert row.outcome == "refused", f"{model_type} runs now; add it to SUPPORTED"
        assert class_name(model_type) in row.reason, row.reason


def test_every_family_of_the_sliding_list_is_compared_past_its_window() -> None:
    assert set(SLIDING_FAMILIES) <= SUPPORTED
    for model_type in ("gemma2", "gemma3_text", "mistral"):
        config = tiny_family(model_type).config
        assert config.sliding_window == SLIDING_WINDOW < max(map(len, PROMPTS)) < CONTEXT


def test_a_model_that_answers_with_other_weights_is_called_different() -> None:
    """The control: the same check fails for a model whose last norm was changed after transformers answered."""

    def spoilt(model):
        with torch.no_grad():
            model.model.norm.weight.mul_(torch.linspace(-1, 1, model.config.hidden_size))
        return cp.load_model(model)

    row = check_family("llama", spoilt)
    assert row.is_failure and {row.undrafted, row.drafted, row.ragged} == {DIFFERENT}
    assert DIFFERENT in table([row]) and "generate gives" in row.reason


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text"])
def test_drafts_equal_the_assisted_generation_and_prompt_lookup_of_transformers(model_type: str) -> None:
    """transformers speculates with a smaller model and with n-grams of the prompt; so do our two drafters."""
    plain, other = tiny_family(model_type), tiny_family(model_type, seed=1)
    drafters = {
        "assistant": (dict(assistant_model=other), cp.drafters.DraftModel(cp.load_model(copy.deepcopy(other)))),
        "lookup": (dict(prompt_lookup_num_tokens=3), cp.drafters.NGram(min_ngram=1)),
    }
    model = cp.load_model(copy.deepcopy(plain))
    for how, drafter in drafters.values():
        theirs = [
            plain.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **how,
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]  # fmt: skip
        trace = cp.run(model, PROMPTS, **RUN, drafter=drafter)
        assert tokens_of(trace) == theirs
        assert trace.num_rolled_back > 0


def test_a_model_that_transformer_lens_cannot_describe_is_refused_by_name() -> None:
    """TransformerLens raises a TypeError for a config without sizes of its own, such as BLT's."""
    with pytest.raises(ModelError, match=r"TransformerBridge does not take BltForCausalLM: .*missing"):
        cp.load_model(tiny_family("blt"))


def test_table_has_a_line_for_each_family_and_says_why_not() -> None:
    rows = [
        FamilyRow("llama", *[EQUAL] * len(COLUMNS), padded=EQUAL, num_rolled_back=3),
        FamilyRow("mamba", outcome="refused", reason="keeps a state\n| of its own"),
    ]
    lines = table(rows).splitlines()
    assert lines[2] == "| llama | LlamaForCausalLM | equal | equal | equal | 3 | equal |  |"
    assert lines[3] == "| mamba | MambaForCausalLM |  |  |  |  |  | refused: keeps a state \\| of its own |"
