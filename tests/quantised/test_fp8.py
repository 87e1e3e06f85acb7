"""A folder whose weights are fp8 numbers with a scale for each block, as DeepSeek publishes its models: transformers
reads it without a library, and the model equals the dense twin that the file's bytes stand for."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain.files import plain_model
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.equality import bitwise
from tests.field.columns import COLUMNS, TinySubject
from tests.field.tiny_family import tiny_family
from tests.quantised.test_libraries import distances
from tests.quantised.twins import twin_of

BLOCK = 16
LARGEST = 448
"""The largest number of float8_e4m3fn."""


def fp8_folder(folder: Path, method: str = "fp8") -> Path:
    """Writes a tiny llama whose linear layers are fp8."""
    tiny_family("llama", dict(intermediate_size=64)).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if "_proj" in name]:
        outputs, inputs = stored[name].shape
        blocks = stored[name].view(outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3)) / LARGEST
        numbers = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[name], stored[f"{name}_scale_inv"] = numbers.reshape(outputs, inputs).contiguous(), scale
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": method,
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_all_that_a_run_gives_equals_the_dense_twin(tmp_path: Path) -> None:
    twin = twin_of(fp8_folder(tmp_path))
    live, _, _ = plain_model(tmp_path, "float32")
    assert all(bitwise(weight, twin.state_dict()[name]) for name, weight in live.state_dict().items())
    model, _ = choose_path(cp.load_model(tmp_path))
    note = "8-bit (fp8), dequantised, activations not rounded"
    assert model.weights_note == model.fingerprint()["quantised"] == note
    assert max(distances(model, twin, twin)) < 1e-5  # the weights are equal: attention rounds in another order
    subject = TinySubject(twin, PlainLM(copy.deepcopy(twin), None, "twin").blocks, model)
    assert {column: why for column, function in COLUMNS.items() if (why := function(subject))} == {}


def test_mxfp4_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="by 'mxfp4', which is not supported"):
        cp.load_model(fp8_folder(tmp_path, "mxfp4"))
