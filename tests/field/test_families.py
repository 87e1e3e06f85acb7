"""The table of model families: telling families pass all columns, others are refused with a reason, and a planted fault
turns its column red."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.plain.files import SLIDING_FAMILIES
from tests.field import table
from tests.field.columns import PROMPTS
from tests.field.rows import measure
from tests.field.tiny_family import families, tiny_config, tiny_family
from tests.field.variants import VARIANTS

QUICK = frozenset("llama gpt2 bloom rwkv gemma3_text deepseek_v3 gpt_oss inkling_text bart openai-gpt blt".split())
"""Tried by `make test`: a family of each kind, and some that are refused. The rest are slow."""
Edit = Callable[[Tensor], Tensor | None]
DOCS = Path(__file__).parents[2] / "docs/families.txt"
DOCUMENTED = {line.split(" | ")[0].removeprefix("| "): line for line in DOCS.read_text(encoding="utf-8").splitlines()}
"""The line of docs/families.txt of each family and variant."""
DENSE = [*families(), *(name for name, variant in VARIANTS.items() if not variant.quantised)]
"""tests/quantised measures the others, with the libraries that they need."""


@pytest.fixture(autouse=True)
def without_notes() -> Iterator[None]:
    """transformers warns of unusual settings; these notes are no failures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in DENSE]
)
def test_a_family_passes_the_columns_that_the_table_says_or_is_refused(name: str) -> None:
    row = measure(name)
    said = table.markdown_line(row).rpartition(" | ")[0]  # numbers in a reason may differ
    assert DOCUMENTED[name].startswith(said), row
    assert row.is_green or row.reasons[0]
    assert row.is_green == ("| all |" in DOCUMENTED[name]) and row.is_refused == (
        "| none, refused |" in DOCUMENTED[name]
    )


def test_every_family_of_the_sliding_list_is_compared_past_its_window() -> None:
    assert all("| all |" in DOCUMENTED[family] for family in SLIDING_FAMILIES)
    for family in ("gemma2", "gemma3_text", "mistral"):
        assert tiny_config(family).sliding_window < max(map(len, PROMPTS))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_drafts_equal_the_assisted_generation_and_prompt_lookup_of_transformers(family: str) -> None:
    """transformers speculates with a smaller model and with n-grams of the prompt; so do our two drafters."""
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9], [3, 9, 27, 81, 5, 15, 45] * 3, [11, 12]]
    plain, other = tiny_family(family), tiny_family(family, seed=1)
    drafters: list[tuple[dict[str, Any], Any]] = [
        (dict(assistant_model=other), cp.drafters.DraftModel(cp.load_model(copy.deepcopy(other)))),
        (dict(prompt_lookup_num_tokens=3), cp.drafters.NGram(min_ngram=1)),
    ]
    model = cp.load_model(copy.deepcopy(plain))
    generate: Any = plain.generate
    for how, drafter in drafters:
        theirs = [
            generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=10, do_sample=False, pad_token_id=0, **how,
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]  # fmt: skip
        trace = cp.run(model, prompts, drafter=drafter, capacity=96, max_new_tokens=10, capture=None, progress=False)
        assert [trace.committed(i) for i in range(len(prompts))] == theirs
        assert trace.num_rolled_back > 0


def test_a_model_that_transformer_lens_cannot_describe_is_refused_by_name() -> None:
    """TransformerLens raises a TypeError for a config without sizes of its own, such as BLT's."""
    with pytest.raises(ModelError, match=r"TransformerBridge does not take BltForCausalLM: .*missing"):
        cp.load_model(tiny_family("blt"))
