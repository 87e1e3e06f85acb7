"""GGUF files: every weight, and so the states and logits of a run, are those of the blocks' definitions; and a file or
folder that cannot be read is refused in one sentence, with nothing left in the cache."""

import copy
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoConfig, AutoModelForCausalLM

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.loaders import model_of_run
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain.files import plain_model
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.models.quantised import gguf as gguf_header
from cacheprobe.models.quantised.gguf import gguf_directory, read_header
from cacheprobe.models.smollm2 import smollm2_gguf
from cacheprobe.ops.equality import bitwise
from tests.field.columns import COLUMNS, PROMPTS, TinySubject
from tests.field.tiny_family import tiny_family
from tests.quantised import twins
from tests.quantised.twins import gguf_weights
from tests.quantised.writers import write_quantised

RUN = dict(max_new_tokens=6, capacity=64, window=4, group=2, progress=False)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, which the test's files do not share with the user's."""
    monkeypatch.setenv("CACHEPROBE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tiny_gguf(folder: Path, kind: str = "Q4_1") -> Path:
    return write_quantised(f"GGUF {kind}", tiny_family("llama", dict(intermediate_size=64)), folder) / "tiny.gguf"


def twin_of(file: Path) -> Any:
    """A dense llama with the weights that the file's blocks stand for."""
    twin: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(gguf_directory(file)[0])).float().eval()
    twin.load_state_dict(gguf_weights(file, twin.config, list(twin.state_dict())))
    return twin


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_all_that_a_run_gives_equals_the_dense_twin(kind: str, tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path, kind)
    live, _, _ = plain_model(file, "float32")
    twin = twin_of(file)
    assert all(bitwise(weight, twin.state_dict()[name]) for name, weight in live.state_dict().items())
    model, _ = choose_path(cp.load_model(file))
    bits = kind[1]
    assert model.weights_note == model.fingerprint()["quantised"] == f"{bits}-bit (GGUF {kind}), dequantised"
    subject = TinySubject(twin, PlainLM(copy.deepcopy(twin), None, "twin").blocks, model)
    assert {column: why for column, function in COLUMNS.items() if (why := function(subject))} == {}


def test_the_twin_can_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of bytes in another order are other weights."""
    file = tiny_gguf(tmp_path)
    live, _, _ = plain_model(file, "float32")
    own = twins.of_gguf

    def swapped(raw: np.ndarray, kind: str) -> np.ndarray:
        """The two halves of every block in the other order."""
        weights = own(raw, kind)
        return weights if kind == "F32" else weights.reshape(len(raw), -1, 2, 16)[:, :, ::-1].reshape(len(raw), -1)

    name = "model.embed_tokens.weight"
    assert bitwise(live.state_dict()[name], twin_of(file).state_dict()[name])
    monkeypatch.setattr(twins, "of_gguf", swapped)
    assert not bitwise(live.state_dict()[name], twin_of(file).state_dict()[name])


def test_a_folder_with_one_file_is_that_file_and_a_run_is_loaded_again(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path)
    traces = [cp.run(cp.load_model(one), PROMPTS, deterministic=True, **RUN) for one in (file, tmp_path)]
    assert traces[0].digest(0) == traces[1].digest(0)
    assert traces[0].meta["weights_note"] == "4-bit (GGUF Q4_1), dequantised"
    traces[0].save(tmp_path / "run")
    stored = cp.load_trace(tmp_path / "run")
    again = model_of_run(stored.fingerprint)
    assert again.fingerprint()["weights_sha256"] == traces[0].fingerprint["weights_sha256"]
    other = tmp_path / "other"
    other.mkdir()
    q8 = cp.load_model(tiny_gguf(other, "Q8_0")).fingerprint()
    assert q8["quantised"] != stored.fingerprint["quantised"]
    assert q8["weights_sha256"] != stored.fingerprint["weights_sha256"]


def test_a_file_that_is_cut_off_is_refused_at_once(tmp_path: Path, cache: Path) -> None:
    whole = tiny_gguf(tmp_path).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 7, 20, 40, 100, 300, 700, len(whole) // 2, len(whole) - 40]:
        cut.write_bytes(whole[:length])
        began = time.perf_counter()
        with pytest.raises(ModelError, match="cut.gguf is (cut off or damaged|no GGUF file)"):
            cp.load_model(cut)
        assert time.perf_counter() - began < 2
    assert not cache.exists() or not list(cache.iterdir())
    cut.write_bytes(whole)
    cp.load_model(cut)  # the control


def test_damaged_bytes_of_the_header_raise_no_other_error(tmp_path: Path) -> None:
    whole = tiny_gguf(tmp_path).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        place, value = (int(torch.randint(limit, (1,), generator=generator)) for limit in (900, 256))
        damaged.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
        try:
            read_header(damaged)
        except ModelError as error:
            assert "damaged.gguf" in str(error)


def other_gguf(folder: Path, architecture: str) -> Path:
    writer = GGUFWriter(folder / "other.gguf", architecture)
    writer.add_tensor("output.weight", torch.ones(2, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "other.gguf"


def test_what_transformers_cannot_read_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="reads no GGUF of the architecture 'rwkv6', only .*llama"):
        cp.load_model(other_gguf(tmp_path, "rwkv6"))
    with pytest.raises(ModelError, match="its header names no llama.block_count"):
        cp.load_model(other_gguf(tmp_path, "llama"))
    with pytest.raises(ModelError, match="there is no file .*absent.gguf"):
        cp.load_model(str(tmp_path / "absent.gguf"))
    part = tmp_path / "tiny-00001-of-00002.gguf"
    shutil.copy(tmp_path / "other.gguf", part)
    with pytest.raises(ModelError, match="holds 2 GGUF files; give one of them"):
        cp.load_model(tmp_path)
    with pytest.raises(ModelError, match="is one part of a model"):
        cp.load_model(part)
    monkeypatch.setattr("cacheprobe.models.quantised.gguf.shutil.disk_usage", lambda _: type("", (), {"free": 10}))
    with pytest.raises(ModelError, match="set CACHEPROBE_CACHE to a larger folder"):
        cp.load_model(tiny_gguf(tmp_path))
    assert not [path for path in cache.glob("*") if path.is_dir()]


def test_a_missing_weight_is_no_random_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = GGUFWriter.add_tensor

    def all_but_one(self: GGUFWriter, name: str, *arguments: Any, **more: Any) -> None:
        if name != "blk.2.ffn_up.weight":
            own(self, name, *arguments, **more)

    monkeypatch.setattr(GGUFWriter, "add_tensor", all_but_one)
    with pytest.raises(ModelError, match="lacks 1 of the model's weights, such as model.layers.2.mlp.up_proj.weight"):
        cp.load_model(tiny_gguf(tmp_path))


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        ({"quant_method": "bitsandbyte"}, "by 'bitsandbyte', which is not supported; did you mean .*bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "by 'gptq', which is not supported"),
        ({"load_in_4bit": True}, "by bitsandbytes, which is not installed; pip install bitsandbytes"),
        ({"quant_method": "torchao"}, "by torchao, which is not installed; pip install torchao"),
        ({"quant_method": "compressed-tensors"}, "not installed; pip install compressed-tensors"),
    ],
)
def test_a_folder_of_another_quantisation_is_refused_by_name(
    stored: dict[str, object], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_family("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("cacheprobe.models.quantised.packed.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=why):
        cp.load_model(tmp_path)


@pytest.mark.slow
def test_every_weight_of_smollm2_is_that_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CACHEPROBE_CACHE")
    live, _, note = plain_model(smollm2_gguf(), "float32", progress=False)
    assert note == "4-bit (GGUF Q4_1 and Q8_0), dequantised"
    names = [name for name in live.state_dict() if name != "lm_head.weight"]
    expected = gguf_weights(smollm2_gguf(), live.config, names)
    assert all(bitwise(live.state_dict()[name], expected[name]) for name in names)
    assert gguf_header.gguf_file(str(smollm2_gguf())) == smollm2_gguf()
