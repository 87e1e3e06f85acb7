"""What people hand to an import: taken where its meaning is plain, refused with a sentence where it is not."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import cacheprobe as cp
from cacheprobe.core.hook_names import CONVENTION
from cacheprobe.trace.importers.common import ImportRefused
from tests.reported.imports.imported import Generated
from tests.reported.tokenizers import build
from tests.tiny import hf_model, loaded

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8]]


@pytest.fixture(scope="module")
def batch() -> Generated:
    return Generated(hf_model(), PROMPTS)


def set_token(token: int) -> Callable[[SimpleNamespace], None]:
    def change(one: SimpleNamespace) -> None:
        one.sequences[0, -1] = token

    return change


def set_nan(one: SimpleNamespace) -> None:
    one.logits[2][0] = torch.nan


def of_float(one: SimpleNamespace) -> None:
    one.sequences = one.sequences.float()


def of_whole_numbers(one: SimpleNamespace) -> None:
    one.hidden_states = [[(state * 100).int() for state in of_pass] for of_pass in one.hidden_states]


def narrower(one: SimpleNamespace) -> None:
    one.logits = [logits[:, :1] for logits in one.logits]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_token(500), r"sequence 0, pass 5 chose token 500, but its logits are of 97 tokens"),
        (set_token(-100), r"the sequences hold -100; token ids are 0 or more"),
        (narrower, r"sequence 0, pass 0 chose token \d+, but its logits are of 1 tokens"),
        (set_nan, r"sequence 0, pass 2: its logits are NaN"),
        (of_float, r"the sequences are torch.float32; expected token ids"),
        (of_whole_numbers, r"sequence 0: states of layer 0 .* are torch.int32; expected floating-point"),
    ],
)
def test_a_generation_that_is_none_is_refused(
    change: Callable[[SimpleNamespace], None], said: str, batch: Generated
) -> None:
    one = batch.copied()
    change(one)
    for speaker in (dict(model=loaded()), dict(stop_token_ids=())):
        with pytest.raises(ImportRefused, match=said):
            cp.import_generate(one, attention_mask=batch.mask, **speaker)


def test_logits_of_more_tokens_than_the_model_has_are_refused(batch: Generated) -> None:
    one = batch.copied()
    one.logits = [torch.cat([logits, logits[:, :3]], 1) for logits in one.logits]
    with pytest.raises(ImportRefused, match=r"request 0: logits of 100 tokens were given, and Llama.* of 97"):
        cp.import_generate(one, attention_mask=batch.mask, model=loaded())


def test_a_mask_with_a_hole_is_refused(batch: Generated) -> None:
    mask = torch.tensor([[1, 0, 1, 1, 1], [0, 0, 1, 1, 1]]).bool()
    with pytest.raises(ImportRefused, match="padded on the right or in between"):
        cp.import_generate(batch.output, attention_mask=mask, stop_token_ids=())
    with pytest.raises(ValueError, match="padded on the right or in between"):
        cp.replay(loaded(), batch.output, attention_mask=mask, progress=False)


def test_a_mask_of_one_row_fits_one_sequence(batch: Generated) -> None:
    alone = Generated(hf_model(), PROMPTS[:1])
    for mask in (alone.mask[0], alone.mask[0].tolist(), alone.mask.bool(), alone.mask.numpy()):
        trace = cp.import_generate(alone.output, attention_mask=mask, model=loaded())
        assert trace.requests[0].prompt_token_ids == tuple(PROMPTS[0])
    with pytest.raises(ImportRefused, match=r"attention_mask \(1, 5\) does not fit sequences \(2, "):
        cp.import_generate(batch.output, attention_mask=batch.mask[0], model=loaded())


def test_arrays_and_lists_are_read_as_tensors(batch: Generated) -> None:
    one = batch.copied()
    one.sequences = one.sequences.tolist()
    one.hidden_states = [[state.numpy() for state in of_pass] for of_pass in one.hidden_states]
    one.logits = [logits.numpy() for logits in one.logits]
    trace = cp.import_generate(one, attention_mask=batch.mask.numpy(), model=loaded())
    for number in range(2):
        assert torch.equal(trace.states("S", 1, number), batch.states(1, number)[: len(trace.rows(number))])


@pytest.mark.parametrize("kind", [np.int64, lambda token: torch.tensor(token)])
def test_one_stop_token_is_taken(kind: Any, batch: Generated) -> None:
    generated = batch.output.sequences[0, 5:].tolist()
    stop, end = generated[2], generated.index(generated[2]) + 1
    given = dict(attention_mask=batch.mask, stop_token_ids=kind(stop))
    assert cp.import_generate(batch.output, model=loaded(), **given).committed(0) == generated[:end]
    assert cp.replay(loaded(), batch.output, progress=False, **given).committed(0) == generated[:end]


def test_a_model_of_transformers_is_refused_by_name(batch: Generated, tmp_path: Path) -> None:
    hf, said = hf_model(), r"needs a model from cp.load_model\(...\), got a LlamaForCausalLM; give cp.load_model\(model"
    for call in (
        lambda: cp.import_generate(batch.output, attention_mask=batch.mask, model=hf),
        lambda: cp.import_vllm(dumped(tmp_path), [1, 2], model=hf),
        lambda: cp.replay(hf, [[1, 2]], prompts=[[1]], progress=False),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def dumped(folder: Path, metadata: dict[str, str] | None = None, **changed: torch.Tensor) -> Path:
    """A file in vLLM's layout, of layer ids 1 and 2, for one text."""
    made = Generated(hf_model(), PROMPTS[:1])
    states = torch.stack([made.states(layer, 0) for layer in (0, 1)], 1)
    tensors = {"hidden_states": states, "token_ids": made.output.sequences[0, : len(states)].clone(), **changed}
    save_file(tensors, folder / "a.safetensors", metadata=metadata)
    return folder / "a.safetensors"


@pytest.mark.parametrize("length", [[3], torch.tensor(3)])
def test_a_prompt_s_length_is_any_whole_number(length: Any, tmp_path: Path) -> None:
    trace = cp.import_vllm(dumped(tmp_path), [1, 2], num_prompt_tokens=length, model=loaded())
    assert trace.requests[0].prompt_token_ids == (1, 2, 3)


@pytest.mark.parametrize("length", [["3"], 3.5])
def test_another_length_is_refused(length: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_prompt_tokens of file 0 must be a whole number, got"):
        cp.import_vllm(dumped(tmp_path), [1, 2], num_prompt_tokens=length)


@pytest.mark.parametrize("layers", ["1,2", [1.0, 2.7]])
def test_layers_that_are_no_whole_numbers_are_refused(layers: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a layer id .* as in layers=\[1, 2\], must be a whole number, got"):
        cp.import_vllm(dumped(tmp_path), layers)


def test_one_layer_is_taken(tmp_path: Path) -> None:
    states = Generated(hf_model(), PROMPTS[:1]).states(1, 0)
    trace = cp.import_vllm(dumped(tmp_path, hidden_states=states[:, None].clone()), 2, model=loaded())
    assert trace.store.layers == (1,) and torch.equal(trace.states("S", 1, 0), states)


@pytest.mark.parametrize("named", [None, "-1,0"])
def test_our_export_without_the_names_of_its_layers_is_refused(named: str | None, tmp_path: Path) -> None:
    metadata = {"convention": CONVENTION, **({} if named is None else {"layers": named})}
    with pytest.raises(ImportRefused, match="a.safetensors names its layers as .*; expected layers such as '1,5,9'"):
        cp.import_vllm(dumped(tmp_path, metadata))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (dict(token_ids=torch.arange(10.0)), "token_ids are torch.float32; expected token ids"),
        (dict(token_ids=torch.arange(10) - 1), "token_ids hold -1; token ids are 0 or more"),
        (dict(hidden_states=torch.ones(10, 2, 32, dtype=torch.int32)), "are torch.int32; expected floating-point"),
    ],
)
def test_a_file_of_other_numbers_is_refused(changed: dict[str, torch.Tensor], said: str, tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match=f"a.safetensors: .*{said}"):
        cp.import_vllm(dumped(tmp_path, **changed), [1, 2])


def test_a_run_of_imported_requests_reads_the_same_tokens() -> None:
    """The tokenizer puts a start token before every text; the generation had none."""
    tokenizer = build("byte-level, start token added")
    ids = tokenizer("the coin", add_special_tokens=False).input_ids
    assert tokenizer(tokenizer.decode(ids)).input_ids != ids
    model, made = cp.load_model(hf_model(), tokenizer), Generated(hf_model(), [ids])
    trace = cp.import_generate(made.output, model=model, stop_token_ids=())
    again = cp.run(model, trace.requests, progress=False)
    assert again.requests[0].prompt_token_ids == tuple(ids)
    assert again.committed(0) == made.output.sequences[0, len(ids) :].tolist()


def test_an_import_without_a_model_knows_the_special_tokens_of_its_tokenizer() -> None:
    """By hand: the prompt's token 2 is special, and its first token is the first of the text."""
    tokenizer = build("metaspace, start token not added")
    made = Generated(hf_model(), [[9, 8, 2, 7, 9]], max_new_tokens=2)
    trace = cp.import_generate(made.output, tokenizer=tokenizer, stop_token_ids=(), attention_mask=made.mask)
    rows = trace.rows(0)
    assert 2 in tokenizer.all_special_ids
    special = rows[trace.is_special(rows)]
    places = [*zip(rows.position, rows.token_id, strict=True)]
    chosen = {(0, 9), *(place for place in places if place[1] in tokenizer.all_special_ids)}
    assert set(zip(special.position, special.token_id, strict=True)) == chosen and (2, 2) in chosen
