"""Adapters: merged to what peft computes, named in every result; what does not fit or could run code is refused."""

import copy
import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.adapters import TRAINING, WEIGHTS, adapter_directory, file_sha256, merge_adapter
from cacheprobe.tasks.drawing import HELD_OUT_NAMES
from cacheprobe.training.lora.evaluate import evaluate
from cacheprobe.training.settings import LoraSettings
from cacheprobe_benchmarks.shared.tiny import tiny_model
from tests.lora import edited, save_base, train_small


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small(base, tmp_path_factory.mktemp("adapters") / "coin")


def test_merged_is_what_peft_computes(base: Path, trained: Path) -> None:
    """peft adds the two small products to each layer's output, we add their product to the weights: float32 sums in
    another order, 1e-6 of the largest logit apart, times the depth."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    ours = cp.load_model(base, adapter=trained)
    theirs = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), trained).eval()
    plain = LlamaForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        merged, unmerged, without = (model(ids).logits for model in (ours.bridge.original_model, theirs, plain))
    largest = unmerged.abs().max()
    assert (merged - unmerged).abs().max() < 1e-5 * largest < (merged - without).abs().max()
    assert ours.weights_note == "LoRA adapter coin of rank 2 merged in"
    assert ours.weights_sha256 != cp.load_model(base).weights_sha256


def test_another_dtype_is_rounded_after_the_merge(base: Path, trained: Path) -> None:
    exact = dict(cp.load_model(base, adapter=trained).bridge.original_model.named_parameters())
    rounded = cp.load_model(base, adapter=trained, dtype="bfloat16").bridge.original_model
    assert all(torch.equal(weight, exact[name].bfloat16()) for name, weight in rounded.named_parameters())


def test_a_stored_run_names_its_adapter(base: Path, trained: Path, tmp_path: Path, capsys) -> None:
    from cacheprobe.cli.app import app

    run = ["run", "--out", str(tmp_path / "run"), "--model", str(base), "--adapter", str(trained), "--dtype", "float32"]
    app([*run, "--prompt", "A coin", "--deterministic", "1", "--max-new-tokens", "3"], result_action="return_value")
    assert cp.load_trace(tmp_path / "run").meta["weights_note"] == "LoRA adapter coin of rank 2 merged in"
    assert app(["verify", str(tmp_path / "run")], result_action="return_value") == 0
    assert "equal to the oracle" in capsys.readouterr().out


def test_the_same_weights_are_comparable_wherever_the_adapter_lay(base: Path, trained: Path, tmp_path: Path) -> None:
    copied = edited(trained, tmp_path / "moved")
    one, other = cp.load_model(base, adapter=trained), cp.load_model(base, adapter=copied)
    trace = cp.run(one, [[1, 2, 3]], deterministic=True, max_new_tokens=2, capacity=64, progress=False)
    assert one.fingerprint()["adapter"] != other.fingerprint()["adapter"]
    assert cp.verify(trace, other, progress=False).is_equal
    with pytest.raises(ValueError, match="weights_sha256"):
        cp.verify(trace, cp.load_model(base), progress=False)


def test_an_adapter_of_another_model_is_refused_by_name(base: Path, trained: Path, tmp_path: Path) -> None:
    tiny_model(seed=9).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=rf"was trained on {base} \(weights \w+\), not on {tmp_path / 'other'}"):
        cp.load_model(tmp_path / "other", adapter=trained)
    with pytest.raises(ModelError, match="was trained on tiny-gpt, not on"):
        cp.load_model(base, adapter=edited(trained, tmp_path / "named", base_model_name_or_path="tiny-gpt"))
    assert cp.load_model(base, adapter=edited(trained, tmp_path / "right", base_model_name_or_path="x/tiny-llama"))
    wider = edited(trained, tmp_path / "wider")
    tensors = load_file(wider / WEIGHTS)
    key = next(key for key in tensors if key.endswith("q_proj.lora_A.weight"))
    save_file({**tensors, key: torch.zeros(2, 33)}, wider / WEIGHTS)
    with pytest.raises(ModelError, match=r"q_proj has matrices \(2, 33\).*belongs to another model"):
        cp.load_model(base, adapter=wider)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(r=3), "at rank 3; the adapter belongs to another model"),
        (dict(r=0), "rank 0 and lora_alpha 16 are not"),
        (dict(use_dora=True), "sets use_dora=True.*merge it with peft"),
        (dict(rank_pattern={"q_proj": 4}), "sets rank_pattern"),
        (dict(bias="all"), "sets bias='all'"),
        (dict(something_new=1), "sets something_new=1"),
        (dict(peft_type="IA3"), "is a IA3 adapter; only LORA"),
    ],
)
def test_other_kinds_of_adapters_are_refused(base: Path, trained: Path, tmp_path: Path, config, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        cp.load_model(base, adapter=edited(trained, tmp_path / "edited", **config))


def test_a_refused_adapter_changes_nothing(trained: Path, tmp_path: Path) -> None:
    """The second matrix pair does not fit; the first is not added before that is seen."""
    adapter = edited(trained, tmp_path / "half")
    tensors = load_file(adapter / WEIGHTS)
    last = sorted(key for key in tensors if key.endswith("lora_B.weight"))[-1]
    save_file({**tensors, last: torch.zeros(5, 2)}, adapter / WEIGHTS)
    live, before = tiny_model(), copy.deepcopy(tiny_model().state_dict())
    with pytest.raises(ModelError, match="belongs to another model"):
        merge_adapter(live, "tiny-llama", adapter)
    assert all(torch.equal(weight, before[name]) for name, weight in live.state_dict().items())


def test_no_pickle_is_read(base: Path, trained: Path, tmp_path: Path) -> None:
    adapter = edited(trained, tmp_path / "pickled")
    torch.save(load_file(adapter / WEIGHTS), adapter / "adapter_model.bin")
    (adapter / WEIGHTS).unlink()
    with pytest.raises(ModelError, match="adapter_model.bin is a pickle, which is never read"):
        cp.load_model(base, adapter=adapter)


def test_a_changed_file_is_refused(base: Path, trained: Path, tmp_path: Path) -> None:
    adapter = edited(trained, tmp_path / "changed")
    (adapter / TRAINING).write_bytes((trained / TRAINING).read_bytes())
    assert cp.load_model(base, adapter=adapter)
    save_file({key: 2 * value for key, value in load_file(adapter / WEIGHTS).items()}, adapter / WEIGHTS)
    with pytest.raises(ModelError, match=r"is not the file that training.json speaks of"):
        cp.load_model(base, adapter=adapter)


def test_unknown_adapters(base: Path) -> None:
    with pytest.raises(ModelError, match=r"unknown adapter 'poker' for .*cacheprobe train lora") as caught:
        cp.load_model(base, adapter="poker")
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="not into a live LlamaForCausalLM"):
        cp.load_model(tiny_model(), adapter="coin-flip")


SHIPPED = adapter_directory("coin-flip", "smollm2-135m")


def test_the_shipped_adapter_is_whole() -> None:
    told = json.loads((SHIPPED / TRAINING).read_text())
    assert SHIPPED.parent.parent == Path(cp.__file__).parent / "data"
    assert file_sha256(SHIPPED / WEIGHTS) == told["adapter_sha256"]
    assert (SHIPPED / WEIGHTS).stat().st_size == told["adapter_bytes"] < 5_000_000
    assert LoraSettings(**told["settings"]) == LoraSettings(), "the command's defaults are the shipped training"
    assert told["held_out_names"] == list(HELD_OUT_NAMES) and told["curve"][-1]["step"] == LoraSettings().steps
    assert adapter_directory("coin_flip", "smollm2-135m") == SHIPPED


@pytest.mark.slow
def test_the_shipped_adapter_answers() -> None:
    """Also in bfloat16, which the demo uses; and the base alone does not."""
    adapted = cp.load_model("smollm2-135m", adapter="coin-flip", progress=False)
    assert adapted.weights_note.startswith("4-bit dequantised") and "coin-flip-smollm2-135m" in adapted.weights_note
    cells = evaluate(adapted, (1, 2, 3, 4), questions=24, seed=2)
    assert sum(cell.correct for cell in cells) >= 0.95 * 4 * 24
    rounded = cp.load_model("smollm2-135m", adapter="coin-flip", dtype="bfloat16", progress=False)
    assert evaluate(rounded, (4,), questions=16, seed=2)[0].correct >= 15
    (alone,) = evaluate(cp.load_model("smollm2-135m", progress=False), (4,), questions=24, seed=2)
    assert alone.correct < 12 and alone.forced_correct < 20
