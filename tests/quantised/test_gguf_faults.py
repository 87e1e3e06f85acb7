"""GGUF files of which transformers would read only a part, damaged files and folders, and a cache that cannot be used:
each is refused in one sentence that names the remedy."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, RopeScalingType
from transformers import AutoModelForCausalLM

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.plain.files import plain_model
from cacheprobe.models.quantised.gguf import GGUFHeader, gguf_directory, read_header
from tests.field.tiny_family import tiny_family
from tests.quantised.writers import write_quantised


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, which the test's files do not share with the user's."""
    monkeypatch.setenv("CACHEPROBE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tiny_gguf(folder: Path) -> Path:
    return write_quantised("GGUF Q8_0", tiny_family("llama", dict(intermediate_size=64)), folder) / "tiny.gguf"


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


def test_an_alignment_of_zero_is_damage(tmp_path: Path) -> None:
    whole = tiny_gguf(tmp_path).read_bytes()
    field = b"general.alignment" + struct.pack("<I", 4)
    assert whole.count(field + struct.pack("<I", 32)) == 1
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(whole.replace(field + struct.pack("<I", 32), field + struct.pack("<I", 0)))
    with pytest.raises(ModelError, match="damaged.gguf is cut off or damaged .*alignment"):
        read_header(damaged)


@pytest.mark.parametrize("depth", [20, 5000])
def test_lists_in_lists_are_damage(depth: int, tmp_path: Path) -> None:
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 0)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + nested)
    with pytest.raises(ModelError, match="damaged.gguf is cut off or damaged .*lists"):
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
    lower = tiny_gguf(tmp_path)
    weights = plain_model(lower, "float32")[0].state_dict()
    upper = lower.rename(tmp_path / "TINY.GGUF")
    for given in (upper, tmp_path):
        live, _, note = plain_model(given, "float32")
        assert note == "8-bit (GGUF Q8_0), dequantised"
        assert all(torch.equal(weight, weights[name]) for name, weight in live.state_dict().items())
