"""Models that bitsandbytes, torchao and compressed-tensors have quantised: their states, logits, drafts and edits equal
those of a dense twin, whose weights are computed from the files' bytes. Skipped where the libraries are absent; see
test_in_own_environment.py."""

import copy
import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import AutoModelForCausalLM

import cacheprobe as cp
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.feeding import feed
from cacheprobe.models.loaders import model_of_run
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.models.quantised import packed
from cacheprobe.models.quantised.packed import METHODS
from cacheprobe.ops.equality import bitwise, close
from tests.field.columns import COLUMNS, PROMPTS, TinySubject
from tests.field.original import logits_of, states_of
from tests.field.tiny_family import tiny_family
from tests.quantised.twins import twin_of, with_rounded_activations
from tests.quantised.writers import WRITERS, write_quantised

FORMATS = [name for name in WRITERS if "GGUF" not in name]
ABSENT = [method.package for method in METHODS.values() if method.package and find_spec(method.package) is None]
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}")
NOTES = {
    "bitsandbytes nf4": "4-bit (bitsandbytes nf4)",
    "bitsandbytes nf4 nested": "4-bit (bitsandbytes nf4)",
    "bitsandbytes fp4": "4-bit (bitsandbytes fp4)",
    "bitsandbytes int8": "8-bit (bitsandbytes LLM.int8, activations too)",
    "torchao int8": "8-bit (torchao Int8Tensor)",
    "torchao int4": "4-bit (torchao IntxUnpackedToInt8Tensor)",
    "torchao float8": "8-bit (torchao Float8Tensor)",
    "compressed-tensors int4": "4-bit (compressed-tensors pack-quantized), dequantised",
    "compressed-tensors int8": "8-bit (compressed-tensors pack-quantized), dequantised",
    "compressed-tensors int8 activations": (
        "8-bit (compressed-tensors int-quantized), dequantised, activations not rounded"
    ),
    "compressed-tensors float8": "8-bit (compressed-tensors naive-quantized), dequantised",
}
IDS = list(range(3, 20))
RUN = dict(max_new_tokens=6, capacity=64, window=4, group=2, progress=False)


def folder_of(name: str, folder: Path, **fields: int) -> Path:
    """Returns the folder of a tiny llama in a format; by default with rows of 32, half a block of bitsandbytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return write_quantised(name, tiny_family("llama", dict(intermediate_size=64) | fields), folder)


def distances(model: CachedLM, twin: Any, twin_for_blocks: Any) -> tuple[float, float]:
    """Largest difference (of all S, T and C; of logits), relative to the largest value."""
    blocks = PlainLM(copy.deepcopy(twin_for_blocks), None, "twin").blocks
    theirs = states_of(twin, blocks, IDS)
    ours = feed(model, torch.tensor([IDS]), list(theirs))
    apart = [float((ours.states[place][0] - value).abs().max() / value.abs().max()) for place, value in theirs.items()]
    logits = logits_of(twin, IDS)
    return max(apart), float((ours.out[0] - logits).abs().max() / logits.abs().max())


def rounding(twin: Any, exact: Any) -> float:
    """Largest difference of the twin's states from those of float64, relative to the largest value."""
    blocks = PlainLM(copy.deepcopy(twin), None, "twin").blocks
    theirs, own = states_of(exact, blocks, IDS), states_of(twin, blocks, IDS)
    return max(float((own[place] - value).abs().max() / value.abs().max()) for place, value in theirs.items())


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bitsandbytes int8"])
def test_all_that_a_run_gives_equals_the_dense_twin(name: str, width: int, tmp_path: Path) -> None:
    """Weights of float32 times the same inputs: only attention and torchao's scales after the sum round in another
    order. So the model is as near to float64 as its twin is, whatever the processor."""
    model, _ = choose_path(cp.load_model(folder_of(name, tmp_path, hidden_size=width, head_dim=width // 4)))
    twin = twin_of(tmp_path)
    assert model.weights_note == model.fingerprint()["quantised"] == NOTES[name]
    exact = copy.deepcopy(twin).double()
    assert max(distances(model, exact, twin)) < max(1e-5, 2 * rounding(twin, exact))
    subject = TinySubject(twin, PlainLM(copy.deepcopy(twin), None, "twin").blocks, model)
    assert {column: why for column, function in COLUMNS.items() if (why := function(subject))} == {}


@pytest.mark.parametrize("name", [name for name in FORMATS if "compressed" not in name and name != "bitsandbytes int8"])
def test_a_packed_product_is_that_of_the_twins_weight(name: str, tmp_path: Path) -> None:
    live: Any = AutoModelForCausalLM.from_pretrained(folder_of(name, tmp_path), dtype=torch.float32)
    weights = twin_of(tmp_path).state_dict()
    values = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for path, module in packed.packed_modules(live).items():
        weight, some = weights[f"{path}.weight"], values[:, : module.in_features]
        if name == "bitsandbytes fp4":
            weight = packed.dense_weight(module)
            assert close(weight, weights[f"{path}.weight"], 1e-6, because="its table holds rounded thirds")
        assert bitwise(packed.dense_weight(module), weight), path
        ours = packed.packed_copy(module)(some)
        if name == "torchao int8":
            assert close(ours, linear(some, weight), 1e-6, because="it multiplies by the scale after the sum")
        else:
            assert bitwise(ours, linear(some, weight)), path


@pytest.mark.parametrize("threshold", [0.0, 2.0], ids=["no outliers", "outliers"])
def test_llm_int8_equals_its_definition_and_is_near_the_dense_twin(threshold: float, tmp_path: Path) -> None:
    """Near: activations are rounded to 127 steps, in four blocks one after the other; measured: .05 and .13."""
    folder = folder_of("bitsandbytes int8", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["llm_int8_threshold"] = threshold
    (folder / "config.json").write_text(json.dumps(config))
    model = cp.load_model(folder)
    by_token = f", outliers from {threshold:g} by token" * (threshold > 0)
    assert model.weights_note == NOTES["bitsandbytes int8"].replace(" too", f" too{by_token}")
    twin = twin_of(folder)
    assert 1e-3 < max(distances(model, twin, twin)) < 0.2
    defined = with_rounded_activations(copy.deepcopy(twin), folder)
    assert max(distances(model, defined, twin)) < 1e-3  # a rounding to 16 bits that falls to the other side: 1 / 2048
    subject = TinySubject(twin, PlainLM(copy.deepcopy(twin), None, "twin").blocks, model)
    for column in ("rollback", "D1", "D2"):
        assert not COLUMNS[column](subject), column


def test_outliers_of_a_whole_call_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library chooses them: a token's result then depends on the other tokens of its call."""
    folder = folder_of("bitsandbytes int8", tmp_path)
    config = (folder / "config.json").read_text().replace('"llm_int8_threshold": 0.0', '"llm_int8_threshold": 2.0')
    (folder / "config.json").write_text(config)
    cp.load_model(folder)
    monkeypatch.setattr(packed, "_by_token", lambda forward, threshold, values: forward(values))
    with pytest.raises(ModelError, match="differs from the model without it"):
        cp.load_model(folder)


def test_a_live_model_and_its_folder_give_the_same_run(tmp_path: Path) -> None:
    folder = folder_of("bitsandbytes nf4", tmp_path)
    live: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    runs = [cp.run(cp.load_model(one), PROMPTS, deterministic=True, **RUN) for one in (live, folder)]
    assert runs[0].digest(0) == runs[1].digest(0) and runs[0].meta["weights_note"] == NOTES["bitsandbytes nf4"]
    again = model_of_run(runs[1].fingerprint)
    assert again.fingerprint()["weights_sha256"] == runs[0].fingerprint["weights_sha256"]


def test_another_quantisation_is_another_fingerprint(tmp_path: Path) -> None:
    """Also where only a scale differs; and a run of one is not repeated with another."""
    found = {}
    for name in ("bitsandbytes nf4", "bitsandbytes nf4 nested", "torchao int4"):
        folder = tmp_path / name
        folder.mkdir()
        found[name] = cp.load_model(folder_of(name, folder)).fingerprint()
    assert len({one["weights_sha256"] for one in found.values()}) == 3
    live: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "torchao int4", dtype=torch.float32)
    before = cp.load_model(live).fingerprint()["weights_sha256"]
    live.model.layers[0].mlp.up_proj.weight.scale.mul_(1.01)
    assert cp.load_model(live).fingerprint()["weights_sha256"] != before
    run = found["bitsandbytes nf4"] | {"model": str(tmp_path / "torchao int4")}
    with pytest.raises(ModelError, match="the run's weights were 4-bit .bitsandbytes nf4., those of .* 4-bit .torch"):
        model_of_run(run)


def test_bitsandbytes_computes_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    """transformers leaves its models in the dtype in which they were saved."""
    model = cp.load_model(folder_of("bitsandbytes nf4", tmp_path), dtype="bfloat16")
    assert model.dtype == torch.bfloat16 and model.fingerprint()["dtype"] == "bfloat16"
    twin = twin_of(tmp_path)
    weight = twin.state_dict()["model.layers.1.mlp.up_proj.weight"].bfloat16()
    values = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert bitwise(model.model.get_submodule("model.layers.1.mlp.up_proj")(values), linear(values, weight))
    subject = TinySubject(twin, PlainLM(copy.deepcopy(twin), None, "twin").blocks, model)
    for column in ("rollback", "D1", "D2"):
        assert not COLUMNS[column](subject), column


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    folder = folder_of("bitsandbytes nf4", tmp_path)
    live: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with pytest.raises(ModelError, match="do not compute in float64"):
        cp.load_model(folder, dtype="float64")
    with pytest.raises(ModelError, match='use products="auto"'):
        cp.load_model(folder, products="kernels")
    module = live.model.layers[0].mlp.up_proj
    module.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ModelError, match="was run before, and bitsandbytes then rounded its scales"):
        cp.load_model(live)
    module.weight.quant_state.packing_format_for_cpu = False
    bridge = build_bridge_from_module(live, "LlamaForCausalLM", hf_config=live.config, tokenizer=None)
    with pytest.raises(ModelError, match="are packed, and a bridge reads weights as matrices"):
        cp.load_model(bridge)


def test_a_live_compressed_model_is_refused_and_its_folder_runs(tmp_path: Path) -> None:
    folder = folder_of("compressed-tensors int4", tmp_path)
    with pytest.raises(ModelError, match="give its folder, or load it with dequantize=True"):
        cp.load_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert cp.load_model(folder).weights_note == NOTES["compressed-tensors int4"]
