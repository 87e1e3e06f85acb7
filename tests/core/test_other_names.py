"""Names of transformers, vLLM and TransformerLens: taken where one thing is meant, else answered with what to write."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import LlamaForCausalLM

import cacheprobe as cp
from cacheprobe.core import other_names
from cacheprobe.core.hook_names import captured_letters
from cacheprobe.engine.drafters.base import require_drafter
from tests.tiny import PROMPTS, SMALL, hf_model, loaded, perturbed

WRITE = {
    "max_tokens": "write max_new_tokens=",
    "max_length": "write max_new_tokens=, which counts no token of the prompt",
    "temperature": "write sampling=cp.SamplingParams(temperature=...)",
    "top_k": "write sampling=cp.SamplingParams(top_k=...)",
    "top_p": "write sampling=cp.SamplingParams(top_p=...)",
    "stop": "write sampling=cp.SamplingParams(stop=...)",
    "n": "write sampling=cp.SamplingParams(n=...)",
    "do_sample": "write sampling=cp.SamplingParams(temperature=1.0)",
    "assistant_model": "write drafter=cp.drafters.DraftModel(model)",
    "output_hidden_states": 'write capture="S"',
    "output_attentions": 'write capture=cp.CaptureConfig(heads=("pattern",))',
    "windw": "did you mean window?",
}


@pytest.mark.parametrize("name", WRITE)
def test_a_keyword_of_another_library_is_answered_with_ours(name: str) -> None:
    """`temperature` was answered with "did you mean capture?"."""
    given: dict[str, Any] = {**SMALL, name: 1}
    for door in (cp.run, cp.stream, cp.reference):
        with pytest.raises(TypeError) as raised:
            door(loaded(), PROMPTS[:1], **{k: v for k, v in given.items() if door is not cp.stream or k != "progress"})
        assert f"unknown argument {name!r}; {WRITE[name]}" in str(raised.value)


def test_settings_and_requests_answer_too() -> None:
    with pytest.raises(ValueError, match="'max_tokens'; write max_new_tokens="):
        cp.SamplingParams(max_tokens=3)
    with pytest.raises(TypeError, match=r"'temperature'; write sampling=cp\.SamplingParams\(temperature=\.\.\.\)"):
        cp.Request([1], temperature=0.5)
    with pytest.raises(TypeError, match="'torch_dtype'; write dtype="):
        cp.load_model("no-such-model", torch_dtype="bfloat16")


def test_every_piece_of_advice_names_an_argument_that_is_there() -> None:
    """What is advised can be written: the call with it is refused for its value alone, or taken."""
    known = {*cp.api.RunOptions.__annotations__, *cp.api.RunSettings.__annotations__}
    known |= {*cp.SamplingParams.__dataclass_fields__, "dtype"}
    for _, argument, text in other_names._KEYWORDS:
        assert argument in known, argument
        assert text.startswith((f"{argument}=", "sampling=cp.SamplingParams(")), text


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_may_have_its_short_name(name: Any, tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    assert cp.load_model(tmp_path, dtype=name, progress=False).dtype == torch.bfloat16
    assert cp.CaptureConfig(dtype=str(name)).dtype == "bfloat16"


def test_other_short_names_of_dtypes() -> None:
    names = dict(half=torch.float16, fp16=torch.float16, fp32=torch.float32, float=torch.float32, double=torch.float64)
    assert {name: getattr(torch, other_names.dtype_name(name)) for name in names} == names
    with pytest.raises(ValueError, match="unknown dtype for captured states 'fp8'"):
        cp.CaptureConfig(dtype="fp8")


def test_sites_may_have_the_names_of_other_libraries() -> None:
    assert cp.CaptureConfig(sites="resid_post").sites == "S" == cp.CaptureConfig(sites="hidden_states").sites
    assert captured_letters(["hook_mlp_out", "attn_out", "S"]) == "CTS"
    assert cp.CaptureConfig(heads=("hook_z", "pattern", "attn.hook_q")).heads == ("q", "z", "pattern")
    by_name = cp.interventions.zero(request_id=0, site="hook_attn_out", layer=1, positions=[3])
    assert (by_name.site, by_name.layer) == ("T", 1)
    ours = cp.interventions.zero(request_id=0, site="pre", layer=1, positions=[3])
    assert cp.interventions.zero(request_id=0, site="resid_pre", layer=1, positions=[3]).place == ours.place


WRONG_SITES = {
    "blocks.1.hook_resid_post": r"write CaptureConfig\(sites='S', layers=1\)",
    "hook_z": r"write CaptureConfig\(heads=\('z',\)\)",
    "blocks.2.attn.hook_pattern": r"write CaptureConfig\(heads=\('pattern',\), layers=2\)",
    "resid_pre": r"write CaptureConfig\(sites='S'\): S of the block below equals it",
}


@pytest.mark.parametrize("name", WRONG_SITES)
def test_what_is_no_site_to_capture_says_what_to_write(name: str) -> None:
    with pytest.raises(ValueError, match=WRONG_SITES[name]):
        cp.run(loaded(), PROMPTS[:1], **SMALL, capture=name)


def test_reading_a_site_by_another_name_says_ours() -> None:
    trace = cp.run(loaded(), PROMPTS[:1], **SMALL, capture="S")
    with pytest.raises(ValueError, match="unknown site 'resid_post'; here it is 'S'"):
        trace.states("resid_post", 1, 0)
    with pytest.raises(ValueError, match="unknown site 'hook_z' of heads.*; here it is 'z'"):
        trace.heads("hook_z", 1, 0)
    with pytest.raises(ValueError, match="'hook_z' is of attention heads; say site='T' with layer=1 and head="):
        cp.interventions.zero(request_id=0, site="hook_z", layer=1, positions=[3])


DRAFTERS = {
    "ngram": r"write drafter=cp\.drafters\.NGram\(\)",
    "early-exit": r"write drafter=cp\.drafters\.EarlyExit\(layer=\.\.\.\)",
    "early_exit:layer=1": r"write drafter=cp\.drafters\.EarlyExit\(layer=1\)",
    "unheard": "there are .*EarlyExit, .*NGram.* in cp.drafters",
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_name_of_a_drafter_says_how_to_make_it(name: str) -> None:
    with pytest.raises(ValueError, match=DRAFTERS[name]):
        require_drafter(name, loaded())


def test_a_model_or_a_class_in_place_of_a_drafter() -> None:
    for given, wanted in (
        (loaded(), r"write drafter=cp\.drafters\.DraftModel\(model\)"),
        (hf_model("llama"), r"write drafter=cp\.drafters\.DraftModel\(cp\.load_model\(model\)\)"),
        (cp.drafters.EarlyExit, r"write drafter=cp\.drafters\.EarlyExit\(layer=\.\.\.\)"),
    ):
        with pytest.raises(ValueError, match=wanted):
            require_drafter(given, loaded())


def test_a_prompt_that_is_too_long_is_told_its_length_and_the_option() -> None:
    with pytest.raises(ValueError, match=r"prompt of 60 \+ 20 new tokens .*capacity is 32; set capacity=82 or more"):
        cp.run(loaded(), [[1] * 60], **{**SMALL, "capacity": 32})
    longest = loaded().n_ctx
    with pytest.raises(ValueError, match=rf"prompt of {longest} .*context of {longest}; shorten the prompt to"):
        cp.run(loaded(), [[1] * longest], max_new_tokens=3, progress=False)


# -- readings of a run that kept S alone, and the model of a run


@pytest.fixture(scope="module")
def bare() -> cp.Trace:
    """A run that kept S and read no lens."""
    return cp.run(loaded(), PROMPTS[:2], **SMALL, capture="S", drafter=cp.drafters.EarlyExit(layer=1))


def test_hypotheses_reads_the_states_of_a_run_without_readings(bare: cp.Trace, tmp_path: Path) -> None:
    """The readings are those of a run that read Z; the first choices, those of transformers' own norm and head."""
    whole = cp.run(loaded(), PROMPTS[:2], **SMALL, drafter=cp.drafters.EarlyExit(layer=1))
    read = bare.hypotheses()
    names = ["row", "layer", "token_id", "logprob_nats", "rank", "verdict", "prediction_depth"]
    pd.testing.assert_frame_equal(read[names], whole.hypotheses()[names])
    live = hf_model("llama")
    assert isinstance(live, LlamaForCausalLM)
    for line in read.iloc[:40].itertuples():
        with torch.no_grad():
            logits = live.lm_head(live.model.norm(bare.vectors("S", line.layer, [line.row])))
        assert int(logits.argmax()) == line.token_id
    again = cp.load_trace(bare.save(tmp_path / "run"), loaded())
    pd.testing.assert_frame_equal(again.hypotheses()[names], read[names])
    with pytest.raises(ValueError, match=r"kept S: hypotheses\(\) reads it with the run's model, from cp\.load_trace"):
        cp.load_trace(tmp_path / "run").hypotheses()


def test_rounded_states_are_read_with_a_warning(bare: cp.Trace) -> None:
    rounded = cp.run(loaded(), PROMPTS[:1], **SMALL, capture=cp.CaptureConfig("S", dtype="bf16"))
    with pytest.warns(RuntimeWarning, match="of a float32 model that were stored in bfloat16"):
        rounded.hypotheses()


def test_a_run_is_not_loaded_with_another_model(bare: cp.Trace, tmp_path: Path) -> None:
    """Before, only what read a lens compared the weights."""
    kept = bare.save(tmp_path / "run")
    with pytest.raises(ValueError, match=r"the trace is of weights \w+, .* has \w+; load the run's model as it was"):
        cp.load_trace(kept, perturbed(loaded(), 0.02))
    with pytest.raises(ValueError, match=r"must be one that cp\.load_model\(\.\.\.\) made, got a str"):
        cp.load_trace(kept, "smollm2-135m")  # type: ignore[arg-type]
    assert cp.load_trace(kept, loaded()).model is loaded()
    of_bridge = cp.run(loaded(), PROMPTS[:1], **SMALL, path="bridge").save(tmp_path / "bridge")
    assert len(cp.load_trace(of_bridge, loaded()).hypotheses())
    assert len(cp.load_trace(kept, loaded().bridged()).hypotheses())
