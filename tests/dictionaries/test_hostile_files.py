"""Files that are damaged: one DictionaryError within a second, and no code of a file is run."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

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
        (dict(architecture="temporal"), "unknown architecture 'temporal'; choose one of standard"),
        (dict(architecture="standard"), "a standard dictionary has tensors .*, got .*'threshold'"),
        (dict(d_in=9), r"'W_enc': \(9, 20\).*, got .*'W_enc': \(8, 20\)"),
        (dict(d_in=-1), "d_in must be a whole number of at least 1, got -1"),
        (dict(d_sae=20.5), "d_sae must be a whole number"),
        (dict(apply_b_dec_to_input="no"), "apply_b_dec_to_input must be True or False"),
        (dict(normalize_activations="sphere"), "unknown normalize_activations 'sphere'"),
        (dict(reshape_activations="hook_q"), "unknown reshape_activations"),
    ],
)
def test_a_wrong_config_is_refused(folder: Path, changes: dict, match: str) -> None:
    text = refusal(with_config(folder, **changes))
    assert re.search(match, text), text


@pytest.mark.parametrize("k", [0, 21, "4"])
def test_a_wrong_number_of_kept_features_is_refused(tmp_path: Path, k: object) -> None:
    assert "k " in refusal(with_config(Path(shutil.copytree(STORED / "topk", tmp_path / "topk")), k=k))


NAN, TALL = torch.zeros(20).fill_(torch.nan), torch.zeros(21)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(b_enc=NAN), "b_enc holds NaN"),
        (dict(threshold=NAN), "threshold holds NaN"),
        (dict(b_enc=NAN.nan_to_num(torch.inf)), "b_enc holds NaN or infinity"),
        (dict(b_enc=TALL), "a jumprelu dictionary has tensors"),
        (dict(more=torch.zeros(3)), "a jumprelu dictionary has tensors"),
        (dict(scaling_factor=torch.full((20,), 2.0)), "scaling_factor is not 1"),
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
    "text",
    ["", "[]", "{", "[" * 100_000, "\xff"],
)
def test_what_is_no_config_is_refused(folder: Path, text: str) -> None:
    (folder / "cfg.json").write_bytes(text.encode("latin-1"))
    refusal(folder)


def test_odd_paths_are_refused(folder: Path, tmp_path: Path) -> None:
    assert "a dictionary is a folder with one of cfg.json" in refusal(tmp_path)
    assert "or a file that ends with .pt" in refusal(folder / "cfg.json")
    refusal(tmp_path / "absent.pt")
    refusal(tmp_path / ("x" * 400))


class Trap:
    """Unpickled as code, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


WEIGHTS = {name: torch.zeros(3) for name in ("W_enc", "b_enc", "W_dec", "b_dec")}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ([1, 2], "no whole file of tensors by name"),
        ({"W_enc": torch.zeros(2)}, "b_enc is missing"),
        ({**WEIGHTS, "b_enc": torch.zeros(4)}, "does not say its activation"),
        (WEIGHTS, "as many features as inputs"),
    ],
)
def test_a_torch_file_holds_weights_alone(tmp_path: Path, content: object, match: str) -> None:
    torch.save(content, tmp_path / "x.pt")
    assert match in refusal(tmp_path / "x.pt")


def test_no_code_of_a_torch_file_is_run(tmp_path: Path) -> None:
    torch.save({**WEIGHTS, "b_enc": Trap(tmp_path / "ran")}, tmp_path / "x.pt")
    refusal(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "ran").exists()  # the control: the trap leaves a file
