"""Files that were damaged or made to harm: one DictionaryError within a second, little memory, and no code is run."""

import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cacheprobe.lenses.dictionaries.dictionary import Dictionary, DictionaryError
from tests.dictionaries.test_saelens import QWEN, STORED

SECONDS = 1.0


def refusal(path: Path, **said: object) -> str:
    """The text of the one error with which a path is refused, within a second."""
    began = time.perf_counter()
    with pytest.raises(DictionaryError) as caught:
        Dictionary.load(path, **said)
    assert time.perf_counter() - began < SECONDS
    text = str(caught.value)
    assert str(path) in text and "\n" not in text and len(text) < 1500, text
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED / "jumprelu", tmp_path / "jumprelu"))


def with_config(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "cfg.json").read_text())
    (folder / "cfg.json").write_text(json.dumps({**config, **changes}))
    return folder


def with_tensors(folder: Path, **changes: torch.Tensor) -> Path:
    save_file(load_file(folder / "sae_weights.safetensors") | changes, folder / "sae_weights.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(architecture="temporal"), "unknown architecture 'temporal'; cacheprobe reads standard"),
        (dict(architecture="standard"), "it holds 'threshold', which a dictionary of this kind does not have"),
        (dict(architecture="gated"), "b_gate should be of shape"),
        (dict(d_in=9), r"W_enc should be of shape \(9, 20\), it is \(8, 20\)"),
        (dict(d_in=-1), "d_in is -1"),
        (dict(d_in=2**40), "d_in is 1099511627776; it must be 1 to"),
        (dict(d_in="8"), "d_in must be a whole number"),
        (dict(d_sae=20.5), "d_sae must be a whole number"),
        (dict(apply_b_dec_to_input="no"), "apply_b_dec_to_input must be true or false"),
        (dict(normalize_activations="sphere"), "unknown normalize_activations 'sphere'"),
        (dict(reshape_activations="hook_q"), "unknown reshape_activations"),
        (dict(metadata={"hook_name": "../" * 999}), "hook_name must be a short text"),
    ],
)
def test_a_wrong_config_is_refused(folder: Path, changes: dict, match: str) -> None:
    text = refusal(with_config(folder, **changes))
    assert re.search(match, text), text


@pytest.mark.parametrize("k", [0, -1, 21, "4", None, 1e9])
def test_a_wrong_number_of_kept_features_is_refused(tmp_path: Path, k: object) -> None:
    assert "k " in refusal(with_config(Path(shutil.copytree(STORED / "topk", tmp_path / "topk")), k=k))


NAN, TALL = torch.zeros(20).fill_(torch.nan), torch.zeros(21)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(b_enc=NAN), "b_enc holds NaN"),
        (dict(b_enc=NAN.nan_to_num(torch.inf)), "b_enc holds NaN or infinity"),
        (dict(b_enc=TALL), "b_enc should be of shape (20,), it is (21,)"),
        (dict(b_enc=torch.zeros(20, dtype=torch.int64)), "b_enc is of dtype I64"),
        (dict(b_enc=torch.zeros(20).to(torch.float8_e4m3fn)), "b_enc is of dtype F8_E4M3"),
        (dict(more=torch.zeros(3)), "it holds 'more'"),
        (dict(scaling_factor=torch.full((20,), 2.0)), "scaling_factor is not 1"),
        ({str(i): torch.zeros(1) for i in range(99)}, "more than 64 tensors"),
    ],
)
def test_wrong_weights_are_refused(folder: Path, changes: dict, match: str) -> None:
    assert match in refusal(with_tensors(folder, **changes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats_are_widened(folder: Path, dtype: torch.dtype) -> None:
    tensors = load_file(folder / "sae_weights.safetensors")
    mine = Dictionary.load(with_tensors(folder, **{name: one.to(dtype) for name, one in tensors.items()}))
    assert all(one.dtype == torch.float32 for one in mine.tensors.values())
    assert torch.equal(mine.tensors["W_enc"], tensors["W_enc"].to(dtype).float())
    with_tensors(folder, scaling_factor=torch.ones(20))
    assert Dictionary.load(folder).tensors.keys() == mine.tensors.keys()


def cut_ends(data: bytes) -> Iterator[bytes]:
    yield from (data[:length] for length in range(0, len(data), max(1, len(data) // 40)))


@pytest.mark.parametrize(
    "place",
    [
        "jumprelu/cfg.json",
        "jumprelu/sae_weights.safetensors",
        "gemma-scope-2/resid_post/layer_2_width_16k/params.safetensors",
        "gemma-scope-2b-pt-res/layer_3/width_16k/params.npz",
        f"{QWEN}/layer1.sae.pt",
    ],
)
def test_a_truncated_file_is_refused(place: str, tmp_path: Path) -> None:
    whole = Path(shutil.copytree((STORED / place).parent, tmp_path / "a" / Path(place).parent)) / Path(place).name
    asked = whole if whole.suffix == ".pt" else whole.parent
    data = whole.read_bytes()
    Dictionary.load(asked)
    for part in cut_ends(data):
        whole.write_bytes(part)
        refusal(asked)
    whole.unlink()
    refusal(asked)


@pytest.mark.parametrize(
    "place", ["sae_weights.safetensors", "cfg.json", "params.npz", "layer1.sae.pt", "params.safetensors"]
)
def test_a_flipped_byte_is_harmless_or_one_error(place: str, tmp_path: Path) -> None:
    """It may change a number, which these formats do not guard; it never raises anything but a DictionaryError."""
    found = next(path for path in STORED.rglob(place) if path.parent.name != "transcoder")
    copy = Path(shutil.copytree(found.parent, tmp_path / "a" / found.parent.relative_to(STORED))) / place
    data, rng, refused = copy.read_bytes(), np.random.default_rng(0), 0
    for _ in range(150):
        changed = bytearray(data)
        changed[rng.integers(min(len(data), 1500) if rng.random() < 0.7 else len(data))] = rng.integers(256)
        copy.write_bytes(changed)
        began = time.perf_counter()
        try:
            Dictionary.load(copy if copy.suffix == ".pt" else copy.parent)
        except DictionaryError as error:
            refused += 1
            assert "\n" not in str(error)
        assert time.perf_counter() - began < SECONDS
    assert refused > 10


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "7", "{", '{"d_in": ', "[" * 100_000, '{"a":' * 100_000, '{"d_in": ' + "9" * 9000 + "}", "\xff"],
)
def test_what_is_no_config_is_refused(folder: Path, text: str) -> None:
    (folder / "cfg.json").write_bytes(text.encode("latin-1"))
    refusal(folder)


def test_odd_paths_are_refused(folder: Path, tmp_path: Path) -> None:
    """A pipe or a device would be read without end."""
    assert "holds none of cfg.json" in refusal(tmp_path)
    assert "a dictionary is a folder, or a file" in refusal(folder / "cfg.json")
    refusal(tmp_path / "absent.pt")
    refusal(tmp_path / ("x" * 400))
    for name in ("cfg.json", "sae_weights.safetensors"):
        copy = Path(shutil.copytree(folder, tmp_path / "copy"))
        for make in (
            os.mkfifo,
            os.mkdir,
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: path.symlink_to(path),
        ):
            (copy / name).unlink()
            make(copy / name)
            refusal(copy)
            shutil.rmtree(copy)
            shutil.copytree(folder, copy)
        shutil.rmtree(copy)
    for ending in (".pt", ".npz"):
        os.mkfifo(tmp_path / f"pipe{ending}")
        assert "no plain file" in refusal(tmp_path / f"pipe{ending}")


class Trap:
    """Unpickled as code, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


class Long:
    """`weights_only` makes it: as many bytes as it says."""

    def __reduce__(self) -> tuple:
        return bytearray, (8 * 2**30,)


WEIGHTS = {name: torch.zeros(3) for name in ("W_enc", "b_enc", "W_dec", "b_dec")}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({**WEIGHTS, "b_dec": Long()}, "which is no tensor"),
        ([1, 2], "it should be a dictionary of tensors"),
        ({1: torch.zeros(2)}, "it should be a dictionary of tensors"),
        ({"W_enc": torch.zeros(2)}, "b_enc is missing"),
        ({**WEIGHTS, "W_enc": torch.zeros(1).expand(2**20, 2**20)}, "names more numbers than the file holds"),
        ({**WEIGHTS, "b_enc": torch.zeros(4)}, "does not say its activation"),
        (WEIGHTS, "as many features as inputs"),
        ({**WEIGHTS, "W_dec": torch.zeros(4, 3), "W_enc": torch.zeros(3, 4), "b_enc": torch.zeros(4).long(),
          "threshold": torch.zeros(4)}, "b_enc is of dtype torch.int64"),
    ],
)  # fmt: skip
def test_a_torch_file_holds_weights_alone(tmp_path: Path, content: object, match: str) -> None:
    torch.save(content, tmp_path / "x.pt")
    assert match in refusal(tmp_path / "x.pt")


def test_no_code_of_a_torch_file_is_run(tmp_path: Path) -> None:
    torch.save({**WEIGHTS, "b_enc": Trap(tmp_path / "ran")}, tmp_path / "x.pt")
    refusal(tmp_path / "x.pt")
    torch.save(WEIGHTS, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    refusal(tmp_path / "old.pt")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "ran").exists()  # the control: the trap leaves a file


def test_a_torch_file_that_names_more_numbers_than_it_holds_is_refused(tmp_path: Path) -> None:
    """torch.load believes the index; the numbers behind the end would be those of other memory."""
    small, large = io.BytesIO(), io.BytesIO()
    torch.save({**WEIGHTS}, small)
    torch.save({name: torch.zeros(300) for name in WEIGHTS}, large)
    with zipfile.ZipFile(small) as few, zipfile.ZipFile(large) as many, zipfile.ZipFile(tmp_path / "x.pt", "w") as out:
        for one in many.infolist():
            source = few if "/data/" in one.filename else many
            out.writestr(one.filename, source.read(one.filename))
    text = refusal(tmp_path / "x.pt")
    assert "names more numbers than the file holds" in text or "RuntimeError" in text, text


def bomb_npz(path: Path) -> None:
    """Some kilobytes that inflate to half a gigabyte."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("w_enc.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": "<f4", "fortran_order": False, "shape": (2**12, 2**15)}
            )
            for _ in range(16):
                file.write(bytes(2**25))


def named_npz(path: Path) -> None:
    """An array whose header names a million times its size."""
    with zipfile.ZipFile(path, "w") as archive:
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (2**20, 2**20)})
        archive.writestr("w_enc.npy", file.getvalue() + bytes(100))


def object_npz(path: Path) -> None:
    """An array of pickled objects."""
    np.savez(path, w_enc=np.array([{}], dtype=object))


def huge_header(path: Path) -> None:
    """A safetensors file with a header of 90 MB."""
    header = json.dumps({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(10)})
    text = header[:-1].encode() + b" " * 90_000_000 + b"}"
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def endless_header(path: Path) -> None:
    """A safetensors file that says its header has 2**63 bytes."""
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")


def huge_shape(path: Path) -> None:
    """A tensor of 2**60 numbers in a file of some bytes."""
    text = json.dumps({"W_enc": {"dtype": "F32", "shape": [2**30, 2**30], "data_offsets": [0, 2**62]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def bomb_pt(path: Path) -> None:
    """A torch file whose records are compressed zeros."""
    plain = io.BytesIO()
    torch.save({"W_enc": torch.zeros(2**24)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for one in source.infolist():
            out.writestr(one.filename, source.read(one.filename))


def huge_config(path: Path) -> None:
    """A config of 50 MB."""
    path.write_bytes(b'{"a": "' + b"x" * 50_000_000 + b'"}')


BOMBS: dict[str, Callable[[Path], None]] = {
    "npz-bomb/params.npz": bomb_npz,
    "npz-named/params.npz": named_npz,
    "npz-object/params.npz": object_npz,
    "header/sae_weights.safetensors": huge_header,
    "endless/sae_weights.safetensors": endless_header,
    "shape/sae_weights.safetensors": huge_shape,
    "config/cfg.json": huge_config,
    "pt/x.pt": bomb_pt,
    "long/x.pt": lambda path: torch.save({**WEIGHTS, "b_dec": Long()}, path),
}
LOADING = """
import resource, sys, time
from pathlib import Path
from cacheprobe.lenses.dictionaries.dictionary import Dictionary, DictionaryError

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

for path in map(Path, sys.argv[1:]):
    before, began = peak(), time.perf_counter()
    try:
        Dictionary.load(path)
        print(path, "was read")
    except DictionaryError as error:
        seconds, taken = time.perf_counter() - began, peak() - before
        print("refused", f"{seconds:.2f}", taken, path if seconds > 1 or taken > 30e6 else "", sep="\\t")
"""


def test_large_promises_take_little_memory(tmp_path: Path) -> None:
    paths = []
    for place, write in BOMBS.items():
        path = tmp_path / place
        shutil.copytree(STORED / "jumprelu", path.parent) if "sae_weights" in place else path.parent.mkdir()
        write(path)
        paths.append(path if path.suffix == ".pt" else path.parent)
    done = subprocess.run([sys.executable, "-c", LOADING, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert len(lines) == len(BOMBS)
    assert all(word == "refused" and not where for word, _, _, where in lines), done.stdout
