"""GGUF files: every weight, and so the states and logits of a run, are those of the blocks' definitions; and a file or
folder that cannot be read is refused in one sentence, with nothing left in the cache."""

import copy
import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, RopeScalingType
from transformers import AutoConfig, AutoModelForCausalLM

import cacheprobe as cp
from cacheprobe.models import known
from cacheprobe.models.base import ModelError
from cacheprobe.models.known import EMBEDDED, SMOLLM2
from cacheprobe.models.loaders import model_of_run
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain.files import plain_model
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.models.quantised import gguf as gguf_header
from cacheprobe.models.quantised.gguf import GGUFHeader, gguf_directory, read_header
from cacheprobe.ops.equality import bitwise
from tests.field.columns import COLUMNS, PROMPTS, TinySubject
from tests.field.tiny_family import tiny_family
from tests.quantised.twins import gguf_weights
from tests.quantised.writers import WRITERS, gguf_writer, write_quantised

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


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
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


def test_what_transformers_cannot_read_is_refused(tmp_path: Path, cache: Path) -> None:
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


def gguf_with(folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[GGUFWriter], None]) -> Path:
    """A tiny llama in a file to which `change` adds fields or tensors."""
    own = GGUFWriter.write_header_to_file

    def write(self: GGUFWriter, *arguments: Any, **more: Any) -> None:
        change(self)
        own(self, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(GGUFWriter, "write_header_to_file", write)
        return tiny_gguf(folder)


def scaled(kind: RopeScalingType, factor: float) -> Callable[[GGUFWriter], None]:
    def change(writer: GGUFWriter) -> None:
        """Adds the fields of a rope scaling."""
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(factor)

    return change


def frequencies(writer: GGUFWriter) -> None:
    """Adds the divisors of Llama 3's rope."""
    writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))


def bias(writer: GGUFWriter) -> None:
    """Adds a bias, which this llama does not have."""
    writer.add_tensor("blk.0.attn_q.bias", np.ones(32, np.float32))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (scaled(RopeScalingType.YARN, 4.0), "llama.rope.scaling.type = 'yarn'"),
        (scaled(RopeScalingType.LINEAR, 4.0), "llama.rope.scaling.type = 'linear'"),
        (scaled(RopeScalingType.NONE, 4.0), "llama.rope.scaling.factor = 4.0"),
        (lambda writer: writer.add_float32("llama.rope.scale_linear", 2.0), "llama.rope.scale_linear = 2.0"),
        (frequencies, "the tensor rope_freqs.weight"),
        (bias, "the tensor blk.0.attn_q.bias"),
    ],
    ids=["yarn", "linear", "factor", "old factor", "frequencies", "bias"],
)
def test_what_transformers_would_leave_out_is_refused(
    change: Callable[[GGUFWriter], None], named: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_with(tmp_path, monkeypatch, change)
    with pytest.raises(ModelError, match=f"transformers does not read {named}.*; give the original safetensors model"):
        cp.load_model(file)
    assert not [path for path in cache.glob("*") if path.is_dir()]


def test_rope_scaling_that_changes_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cp.load_model(gguf_with(tmp_path, monkeypatch, scaled(RopeScalingType.NONE, 1.0)))


def without_alignment(whole: bytes) -> bytes:
    field = b"general.alignment" + struct.pack("<I", 4)
    assert whole.count(field + struct.pack("<I", 32)) == 1
    return whole.replace(field + struct.pack("<I", 32), field + struct.pack("<I", 0))


def nested(depth: int) -> bytes:
    """A header whose one field is a list in so many lists."""
    lists = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + lists


@pytest.mark.parametrize(
    ("change", "said"),
    [(without_alignment, "alignment"), (lambda whole: nested(20), "lists"), (lambda whole: nested(5000), "lists")],
    ids=["alignment", "lists", "deep lists"],
)
def test_a_header_without_sense_is_damage(change: Callable[[bytes], bytes], said: str, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(change(tiny_gguf(tmp_path).read_bytes()))
    with pytest.raises(ModelError, match=f"damaged.gguf is cut off or damaged .*{said}"):
        read_header(damaged)


@pytest.mark.parametrize("damaged", ["model.safetensors", "config.json"])
def test_a_damaged_converted_folder_is_named(damaged: str, tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path)
    folder = gguf_directory(file)[0]
    contents = (folder / damaged).read_bytes()
    (folder / damaged).write_bytes(b"\xff" * 8 + contents[8:])
    with pytest.raises(ModelError, match=f"tiny.gguf: its converted folder {folder} is damaged .*; remove it"):
        cp.load_model(file)


def test_a_live_model_from_a_file_is_refused_with_a_remedy_that_exists(tmp_path: Path) -> None:
    tiny_gguf(tmp_path)
    live = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    with pytest.raises(ModelError, match=r"transformers loaded it from a GGUF file.*; give the \.gguf file itself"):
        cp.load_model(live)


def test_a_cache_that_cannot_be_written_is_not_called_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tiny_gguf(tmp_path)
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("CACHEPROBE_CACHE", str(tmp_path / "a file"))
    with pytest.raises(ModelError, match="tiny.gguf: cannot make .*set CACHEPROBE_CACHE to a folder with 1 MB free"):
        cp.load_model(file)


@pytest.mark.parametrize(("free", "said"), [(10, "0.0 MB"), (100_000, "0.1 MB"), (9_000_000, "")])
def test_room_is_told_in_units_that_one_can_read(
    free: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_gguf(tmp_path)
    monkeypatch.setattr("cacheprobe.models.quantised.gguf.shutil.disk_usage", lambda _: type("", (), {"free": free}))
    if not said:
        cp.load_model(file)
        return
    with pytest.raises(ModelError, match=rf"float32 weights take 0\.\d MB, and .* has room for {said}; set CACHEPROBE"):
        cp.load_model(file)


@pytest.mark.parametrize(
    ("elements", "note"),
    [
        ({"F32": 100}, ""),
        ({"F16": 10, "BF16": 100}, ""),
        ({"F16": 100, "Q8_0": 10}, "16-bit (GGUF F16 and Q8_0), dequantised"),
        ({"F32": 10, "Q8_0": 20, "Q4_1": 100}, "4-bit (GGUF Q4_1 and Q8_0), dequantised"),
    ],
)
def test_the_note_names_the_most_frequent_type_first(elements: dict[str, int], note: str) -> None:
    assert GGUFHeader({}, elements).note == note


def test_a_suffix_in_capitals_is_accepted(tmp_path: Path) -> None:
    lower = tiny_gguf(tmp_path, "Q8_0")
    weights = plain_model(lower, "float32")[0].state_dict()
    upper = lower.rename(tmp_path / "TINY.GGUF")
    for given in (upper, tmp_path):
        live, _, note = plain_model(given, "float32")
        assert note == "8-bit (GGUF Q8_0), dequantised"
        assert all(torch.equal(weight, weights[name]) for name, weight in live.state_dict().items())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_are_read_from_the_file_and_stored_nowhere_else(
    kind: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second load reads them, too; what is written to a mapped weight stays out of the file."""
    monkeypatch.setitem(WRITERS, "GGUF floats", gguf_writer(kind))
    live = tiny_family("llama", dict(intermediate_size=64))
    file = write_quantised("GGUF floats", live, tmp_path) / "tiny.gguf"
    before = file.read_bytes()
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    for _ in range(2):
        ours, _, note = plain_model(file, "float32")
        weights = ours.state_dict()
        assert note == "" and all(bitwise(weights[name], one) for name, one in theirs.state_dict().items())
        weights["model.layers.0.mlp.up_proj.weight"].zero_()
    assert cp.load_model(file, dtype="bfloat16").dtype == torch.bfloat16
    assert {path.name for path in cache.glob("tiny-*/*")} == {"config.json", "contents.json"}
    assert file.read_bytes() == before


def test_a_file_and_its_copies_share_one_folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own SmolLM2, given by the path of its file, was converted a second time."""
    file = tiny_gguf(tmp_path)
    stand_in = EMBEDDED[SMOLLM2]._replace(file=file.name)
    monkeypatch.setitem(EMBEDDED, SMOLLM2, stand_in)
    monkeypatch.setattr(type(stand_in), "package", lambda self: tmp_path)
    copy_of_it = shutil.copy(file, tmp_path / "other.gguf")
    folders = {known.embedded_directory(SMOLLM2), *(gguf_directory(Path(one))[0] for one in (file, copy_of_it))}
    assert len(folders) == 1 and folders == {path for path in cache.iterdir() if path.is_dir()}
    assert gguf_directory(file)[1] == "4-bit (GGUF Q4_1), dequantised"


@pytest.mark.slow
def test_every_weight_of_smollm2_is_that_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CACHEPROBE_CACHE")
    live, _, note = plain_model(EMBEDDED[SMOLLM2].gguf(Path()), "float32", progress=False)
    assert note == "4-bit (GGUF Q4_1 and Q8_0), dequantised"
    names = [name for name in live.state_dict() if name != "lm_head.weight"]
    expected = gguf_weights(EMBEDDED[SMOLLM2].gguf(Path()), live.config, names)
    assert all(bitwise(live.state_dict()[name], expected[name]) for name in names)
    assert gguf_header.gguf_file(str(EMBEDDED[SMOLLM2].gguf(Path()))) == EMBEDDED[SMOLLM2].gguf(Path())
