"""Imports in 16 bits of requests, layers and tokens whose states are near each other; and of mixtures of experts."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import cacheprobe as cp
from cacheprobe.trace.importers.common import ImportRefused
from tests.reported.imports.imported import Generated, exchange
from tests.tiny import hf_model

SHARED = list(range(5, 25))
NEAR = [[1, *SHARED], [2, *SHARED]]
"""Two texts that differ in their first token."""


def mixture(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
    ends = dict(eos_token_id=None, bos_token_id=None, pad_token_id=None)
    experts = dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.3)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts, **ends)).to(dtype).eval()


def quiet(scale: float, dtype: torch.dtype, family: str = "llama") -> Any:
    """A model whose blocks add little to the stream, as those in the middle of a deep one do."""
    hf = copy.deepcopy(hf_model(family))
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= scale
    return hf.to(dtype)


def of_rows(start: int, end: int) -> Callable[[SimpleNamespace], None]:
    """Exchanges the states of two requests at some positions of the prompt."""

    def change(one: SimpleNamespace) -> None:
        for state in one.hidden_states[0]:
            exchange(state[0, start:end], state[1, start:end])

    return change


def of_passes(one: SimpleNamespace) -> None:
    for of_pass in one.hidden_states[1:4]:
        for state in of_pass:
            exchange(state[0], state[1])


def of_logits(one: SimpleNamespace) -> None:
    for logits in one.logits:
        exchange(logits[0], logits[1])


def copied_row(one: SimpleNamespace) -> None:
    """The first request's states at a position, given for both."""
    for state in one.hidden_states[0]:
        state[1, 12] = state[0, 12]


CHANGES = [of_rows(10, 11), of_rows(20, 21), of_passes, of_logits, copied_row]


def require_refused(made: Generated, models: list[Any], change: Callable[[SimpleNamespace], None]) -> None:
    one = made.copied()
    change(one)
    for model in models:
        cp.import_generate(made.output, attention_mask=made.mask, model=model)
        with pytest.raises(ImportRefused, match=r"request \d, .* for request \d than|of their length away"):
            cp.import_generate(one, attention_mask=made.mask, model=model)


@pytest.mark.parametrize("change", CHANGES)
def test_near_requests_are_told_apart(change: Callable[[SimpleNamespace], None]) -> None:
    """Of rows, passes and logits. The tokens of the second text attend to the first one alike."""
    hf = hf_model("gpt2", torch.bfloat16)
    made = Generated(hf, NEAR)
    require_refused(made, [cp.load_model(hf), cp.load_model(copy.deepcopy(hf).float())], change)


def test_requests_of_two_lengths_are_told_apart() -> None:
    """The second text lacks the first token but one; their states are near each other as many tokens before the end."""
    hf = quiet(0.05, torch.bfloat16)
    made = Generated(hf, [[1, 3, *SHARED], [2, *SHARED]])
    require_refused(made, [cp.load_model(hf)], of_rows(15, 22))


def test_near_requests_of_a_mixture_are_told_apart() -> None:
    hf = mixture(torch.bfloat16)
    require_refused(Generated(hf, NEAR), [cp.load_model(hf)], of_rows(10, 11))


@pytest.mark.parametrize("scale", [0.0, 1.5])
def test_changed_rows_of_a_mixture_are_refused_in_float32(scale: float) -> None:
    """Rounding in float32 chooses no other expert: rows that are longer, or of half noise, are not the model's."""
    hf, draw = mixture(torch.float32), torch.Generator().manual_seed(0)

    def change(one: SimpleNamespace) -> None:
        for state in one.hidden_states[0][1:-1]:
            rows = state[0, 5:14]
            noise = nn.functional.normalize(torch.randn(rows.shape, generator=draw), dim=-1)
            state[0, 5:14] = rows * scale if scale else rows + 0.5 * rows.norm(dim=-1, keepdim=True) * noise

    require_refused(Generated(hf, NEAR), [cp.load_model(hf)], change)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_near_layers_are_told_apart(stored: torch.dtype, tmp_path: Path) -> None:
    """Each block moves the stream by three hundredths, less than rounding may move a state."""
    dtype = torch.bfloat16 if stored == torch.float32 else torch.float32
    hf = quiet(0.002, dtype)
    made, model = Generated(hf, [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13]]), cp.load_model(hf)
    one = made.copied()
    one.hidden_states = [[state.to(stored).to(torch.bfloat16) for state in of_pass] for of_pass in one.hidden_states]
    cp.import_generate(one, attention_mask=made.mask, model=model)
    file, states = tmp_path / "a.safetensors", torch.stack([made.states(layer, 0)[:-1] for layer in (0, 1)], 1)
    tokens = made.output.sequences[0, : len(states)]
    save_file({"hidden_states": states.to(torch.bfloat16), "token_ids": tokens.contiguous()}, file)
    cp.import_vllm(file, [1, 2], model=model)
    with pytest.raises(ImportRefused, match=r"given as layer 1 lie \d+\.\d times as far from .* as from its layer 0"):
        cp.import_vllm(file, [2, 3], model=model)
    for of_pass in one.hidden_states:
        exchange(of_pass[1], of_pass[2])
    with pytest.raises(ImportRefused, match=r"given as layer 0 lie \d+\.\d times as far from .* as from its layer 1"):
        cp.import_generate(one, attention_mask=made.mask, model=model)


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float16), ("gemma3", torch.float32)]
)
def test_near_requests_as_they_were_kept_are_imported(family: str, dtype: torch.dtype) -> None:
    """Also samples of one prompt, equal texts and texts of one token, whose states are told apart by nothing."""
    hf = hf_model(family, dtype)
    prompts = [*NEAR, NEAR[0], [1, 3, *SHARED], [*SHARED[:-1], 30], [3] * 20, [3] * 12, [4, *[3] * 12], [1]]
    made = Generated(hf, prompts, max_new_tokens=12)
    for model in (cp.load_model(hf), cp.load_model(copy.deepcopy(hf).float())):
        trace = cp.import_generate(made.output, attention_mask=made.mask, model=model)
        for number in range(len(prompts)):
            states = made.states(1, number)[: len(trace.rows(number))]
            assert torch.equal(trace.states("S", 1, number), states)
