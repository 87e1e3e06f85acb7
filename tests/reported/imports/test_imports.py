"""Whose states an import of transformers' generate holds: those of each request, pass, layer and token, or refused."""

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.cli import imports as cli_import
from cacheprobe.trace.importers.common import ImportRefused
from cacheprobe.views.report.listings import run_listings
from tests.reported.imports.imported import Generated, exchange, written
from tests.tiny import hf_model, loaded

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11], [12, 13, 14]]
ROUNDING = 1e-5
"""Of float32 on one machine: the texts are computed token by token, in a batch, there."""


@pytest.fixture(scope="module")
def batch() -> Generated:
    return Generated(hf_model(), PROMPTS)


def of_file(path: Path, **settings: Any) -> cp.Trace:
    return cp.import_generate(path, stop_token_ids=(), **settings)


# --- assisted generation


@pytest.mark.parametrize(("prompt", "has_model"), [([1, 2, 3, 4, 5, 6, 7, 8], True), ([5, 6, 7] * 4, False)])
def test_a_generation_with_an_assistant_is_refused(prompt: list[int], has_model: bool, tmp_path: Path) -> None:
    made = Generated(hf_model(), [prompt], assistant_model=copy.deepcopy(hf_model()), max_new_tokens=10)
    plain = Generated(hf_model(), [prompt], max_new_tokens=10)
    assert torch.equal(made.output.sequences, plain.output.sequences)  # the tokens do not tell
    model = loaded() if has_model else None
    for given in (made.output, written(made.output, made.mask, tmp_path / "g.safetensors")):
        with pytest.raises(ImportRefused, match="assist"):
            cp.import_generate(given, model=model)
    assert (
        cp.import_generate(plain.output, model=model).committed(0) == plain.output.sequences[0, len(prompt) :].tolist()
    )


def test_a_generation_with_prompt_lookup_is_refused(tmp_path: Path) -> None:
    """Here the model says again what followed these two tokens; then a row of an accepted token is the prompt's."""
    made = Generated(hf_model(), [[0, 2, 17, 0, 2]], prompt_lookup_num_tokens=4)
    assert torch.equal(made.output.hidden_states[1][1], made.output.hidden_states[0][1][:, :1])
    later = Generated(hf_model(), [[1, 2, 3, 4, 5, 6, 7, 8]], prompt_lookup_num_tokens=4, max_new_tokens=12)
    for given in (made.output, written(made.output, made.mask, tmp_path / "g.safetensors"), later.output):
        with pytest.raises(ImportRefused, match="prompt lookup"):
            cp.import_generate(given, model=loaded())


def test_equal_tokens_are_no_sign_of_an_assistant() -> None:
    """A prompt of one token many times has equal states at each of them, and may be continued by that token."""
    made = Generated(hf_model(), [[3] * 8])
    made.output.sequences[0] = 3
    states = [
        [state[:, :1].repeat(1, 8 if not p else 1, 1) for state in made.output.hidden_states[0]] for p in range(6)
    ]
    cp.import_generate(SimpleNamespace(sequences=made.output.sequences, hidden_states=states))


# --- everything is compared


def _swap(of_pass: Sequence[Tensor], one: Any, other: Any) -> None:
    """Exchanges two parts of every tensor."""
    for state in of_pass:
        exchange(state[one], state[other])


def _shift(one: SimpleNamespace) -> None:
    """The states of the token before."""
    for block in range(len(one.hidden_states[0])):
        states = torch.cat([of_pass[block] for of_pass in one.hidden_states], 1).roll(1, 1)
        for of_pass, part in zip(one.hidden_states, states.split([5, 1, 1, 1, 1, 1], 1), strict=True):
            of_pass[block] = part.clone()


def _another_prompt(one: SimpleNamespace) -> None:
    other = Generated(hf_model(), [[21, 22, 23, 24, 25], *PROMPTS[1:]])
    one.hidden_states = [list(of_pass) for of_pass in other.output.hidden_states]


EXCHANGES: dict[str, Callable[[SimpleNamespace], object]] = {
    "requests": lambda one: [_swap(of_pass, 0, 1) for of_pass in one.hidden_states],
    "passes": lambda one: [exchange(*pair) for pair in zip(one.hidden_states[2], one.hidden_states[4], strict=True)],
    "layers": lambda one: [exchange(of_pass[1], of_pass[2]) for of_pass in one.hidden_states],
    "layers of a pass": lambda one: exchange(one.hidden_states[5][1], one.hidden_states[5][2]),
    "rows": lambda one: _swap(one.hidden_states[0], (1, 2), (1, 3)),
    "rows of a layer": lambda one: exchange(one.hidden_states[0][2][1, 1], one.hidden_states[0][2][1, 4]),
    "requests in a pass": lambda one: _swap(one.hidden_states[3], 1, 2),
    "requests in a layer of a pass": lambda one: exchange(one.hidden_states[5][2][0], one.hidden_states[5][2][2]),
    "the token before": _shift,
    "another prompt": _another_prompt,
    "one token of the prompt": lambda one: one.sequences[1, 0].fill_(30),
    "logits of steps": lambda one: exchange(one.logits[1], one.logits[4]),
    "logits of requests": lambda one: _swap(one.logits, 0, 2),
    "logits of requests at a step": lambda one: exchange(one.logits[5][0], one.logits[5][1]),
    "logits a step late": lambda one: setattr(one, "logits", [one.logits[0], *one.logits[:-1]]),
}


@pytest.mark.parametrize("change", EXCHANGES.values(), ids=EXCHANGES)
def test_states_and_logits_in_the_place_of_others_are_refused(
    change: Callable[[SimpleNamespace], object], batch: Generated
) -> None:
    one = batch.copied()
    change(one)
    with pytest.raises(ImportRefused, match=r"request \d, .* of their length away from those of Llama"):
        cp.import_generate(one, attention_mask=batch.mask, model=loaded())


def test_the_error_names_request_position_layer_and_the_nearest(batch: Generated) -> None:
    one = batch.copied()
    EXCHANGES["rows of a layer"](one)
    said = r"request 1, position 1: .* given as layer 1 lie \d\.\d+ .* \(0.001 at most\), and 0.00 from its position 4"
    with pytest.raises(ImportRefused, match=said):
        cp.import_generate(one, attention_mask=batch.mask, model=loaded())


def test_a_text_beyond_the_context_cannot_be_compared() -> None:
    hf = copy.deepcopy(hf_model())
    hf.config.max_position_embeddings = 64
    made = Generated(hf, [list(range(60))])
    with pytest.raises(ImportRefused, match="states of 65 tokens, more than the context of LlamaForCausalLM, 64"):
        cp.import_generate(made.output, model=cp.load_model(hf))


def test_states_of_other_weights_are_refused(batch: Generated) -> None:
    """Of a small training: every weight, of .3, is changed by a hundredth."""
    other, draw = copy.deepcopy(hf_model()), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.003 * torch.randn(weight.shape, generator=draw)
    with pytest.raises(ImportRefused, match="give the model that ran"):
        cp.import_generate(batch.output, attention_mask=batch.mask, model=cp.load_model(other))


def test_scores_in_the_place_of_logits_are_refused() -> None:
    torch.manual_seed(0)
    made = Generated(hf_model(), PROMPTS, do_sample=True, temperature=0.7, top_k=20, output_scores=True)
    one = made.copied()
    one.logits = list(made.output.scores)
    with pytest.raises(ImportRefused, match="logits that were given"):
        cp.import_generate(one, attention_mask=made.mask, model=loaded())


def test_logits_need_one_row_for_each_pass(batch: Generated) -> None:
    one = batch.copied()
    one.logits = one.logits[:5]
    with pytest.raises(ImportRefused, match="logits of 5 passes"):
        cp.import_generate(one, attention_mask=batch.mask, stop_token_ids=())


@pytest.mark.parametrize("count", [1, 2])
def test_beams_are_refused_in_a_file_too(count: int, tmp_path: Path) -> None:
    """A file does not say that they are beams: more states than sequences do, or states of other tokens."""
    made = Generated(hf_model(), PROMPTS[:1], num_beams=2, num_return_sequences=count)
    file = written(made.output, made.mask, tmp_path / "beams.safetensors")
    with pytest.raises(ImportRefused, match="beams" if count == 1 else "of their length away"):
        of_file(file, model=loaded())


def test_the_command_refuses_them(batch: Generated, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_model().save_pretrained(tmp_path / "model")
    one = batch.copied()
    file, settings = tmp_path / "g.safetensors", dict(out=tmp_path / "run", model=str(tmp_path / "model"))
    written(one, batch.mask, file)
    cli_import.generate(file, **settings)
    assert "not checked" not in capsys.readouterr().out
    cli_import.generate(file, out=tmp_path / "unchecked", stop=(96,))
    assert "layers not checked: no model was given" in capsys.readouterr().out
    EXCHANGES["requests"](one)
    written(one, batch.mask, file)
    with pytest.raises(ImportRefused, match="of their length away"):
        cli_import.generate(file, overwrite=True, **settings)
    assert cp.load_trace(tmp_path / "run").committed(0) == batch.output.sequences[0, 5:].tolist()


# --- what is right is imported


def require_states_of_hooks(trace: cp.Trace, made: Generated, layers: range, close: float = ROUNDING) -> None:
    assert trace.store.layers == tuple(layers)
    for sequence in range(len(made.mask)):
        for layer in layers:
            theirs = trace.states("S", layer, sequence).float()
            ours = made.states(layer, sequence)[: len(theirs)].float()
            assert len(theirs) == len(trace.rows(sequence))
            assert (theirs - ours).abs().max() <= close * ours.abs().max()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_states_that_were_stored_in_another_dtype_are_imported(stored: torch.dtype) -> None:
    """A run in bfloat16 may be kept in float32, and a run in float32 rounded to float16."""
    ran = torch.bfloat16 if stored == torch.float32 else torch.float32
    made = Generated(hf_model("llama", ran), PROMPTS)
    one = made.copied()
    one.hidden_states = [[state.to(stored) for state in of_pass] for of_pass in one.hidden_states]
    trace = cp.import_generate(one, attention_mask=made.mask, model=cp.load_model(hf_model("llama", ran).float()))
    assert trace.states("S", 1, 2).dtype == stored


def test_samples_of_one_prompt_are_imported() -> None:
    torch.manual_seed(0)
    made = Generated(hf_model(), PROMPTS, do_sample=True, num_return_sequences=2)
    trace = cp.import_generate(made.output, attention_mask=made.mask, model=loaded())
    assert len({tuple(trace.committed(number)) for number in range(6)}) == 6
    require_states_of_hooks(trace, made, range(2))
    with pytest.raises(ImportRefused, match=r"repeat_interleave\(num_return_sequences\)"):
        cp.import_generate(made.output, attention_mask=made.mask[::2], model=loaded())


def test_sequences_that_stopped_early_are_cut_or_refused() -> None:
    free = Generated(hf_model(), PROMPTS, max_new_tokens=8)
    stop = int(free.output.sequences[0, 5 + 2])
    made = Generated(hf_model(), PROMPTS, max_new_tokens=8, eos_token_id=stop)
    assert made.output.sequences[0, 8:].tolist() == [0] * 5
    trace = cp.import_generate(made.output, attention_mask=made.mask, model=loaded(), stop_token_ids=[stop])
    assert trace.committed(0) == free.output.sequences[0, 5:8].tolist() and len(trace.committed(1)) == 8
    assert trace.meta["finish"]["0"] == "stop" and len(trace.states("S", 0, 0)) == len(PROMPTS[0]) + 2
    assert trace.events().groupby("request_id").step.nunique().tolist() == [3, 8, 8]
    require_states_of_hooks(trace, made, range(2))
    with pytest.raises(ImportRefused, match="sequence 0 ends in 5 tokens 0, .* padding after a stop token"):
        cp.import_generate(made.output, attention_mask=made.mask, model=loaded())


def test_layers_that_do_nothing_are_imported() -> None:
    """Their states equal those of the layer below, so no distance tells them apart."""
    hf = copy.deepcopy(hf_model())
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            if "layers.1" in name and name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
    made = Generated(hf, [[3] * 40, PROMPTS[0] * 8])
    require_states_of_hooks(
        cp.import_generate(made.output, attention_mask=made.mask, model=cp.load_model(hf)), made, range(2)
    )


def test_the_last_layer_is_there_if_its_state_was_kept() -> None:
    """With config.tie_last_hidden_states=False, generate keeps it before the final norm."""
    hf = copy.deepcopy(hf_model())
    hf.config.tie_last_hidden_states = False
    made = Generated(hf, PROMPTS)
    assert torch.equal(made.output.hidden_states[0][-1], made.left[2][:, :5])
    trace = cp.import_generate(made.output, attention_mask=made.mask, model=loaded())
    require_states_of_hooks(trace, made, range(3))
    assert "S of layer 2" not in trace.missing
    unchecked = cp.import_generate(made.output, attention_mask=made.mask, stop_token_ids=())
    assert unchecked.store.layers == (0, 1) and "tie_last_hidden_states" in unchecked.missing["S of layer 2"]


def test_of_chosen_hidden_states_those_layers_are_imported() -> None:
    """transformers leaves None for the others."""
    made = Generated(hf_model(), PROMPTS, output_hidden_states=[2])
    trace = cp.import_generate(made.output, attention_mask=made.mask, model=loaded())
    require_states_of_hooks(trace, made, range(1, 2))


def test_chosen_hidden_states_without_a_block_s_output_are_refused() -> None:
    made = Generated(hf_model(), PROMPTS, output_hidden_states=[0, -1])
    with pytest.raises(ImportRefused, match="no states of a block's output"):
        cp.import_generate(made.output, attention_mask=made.mask, model=loaded())


def test_without_a_model_the_trace_says_that_nothing_was_checked(batch: Generated, tmp_path: Path) -> None:
    said = "layers not checked: no model was given"
    trace = cp.import_generate(batch.output, attention_mask=batch.mask, stop_token_ids=())
    for one in (trace, cp.load_trace(trace.save(tmp_path / "run"))):
        assert said in repr(one) and said in one.missing.values() and said in str(run_listings(one))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked = cp.import_generate(batch.output, attention_mask=batch.mask, model=loaded())
    assert "not checked" not in repr(checked) and said not in checked.missing.values()
