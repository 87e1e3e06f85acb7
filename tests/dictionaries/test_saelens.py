"""Dictionaries give the features and states that SAELens gives: stored values of every kind, and a slow twin."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import cacheprobe as cp
from cacheprobe.lenses.dictionaries.dictionary import Dictionary
from cacheprobe.ops.equality import bitwise

FIXTURES = Path(__file__).parents[1] / "fixtures"
STORED = FIXTURES / "saelens"
KINDS = sorted(path.parent.name for path in STORED.glob("*/cfg.json"))
OTHERS = sorted(str(path.parent.relative_to(STORED)) for path in STORED.rglob("params.*"))
QWEN = "SAE-Res-Qwen3-1.7B-Base-W32K-L0_4"
ORDER = "sums in another order"


def file_of(folder: Path) -> Path:
    return next(folder.glob("*.pt"), folder)


def differences(mine: Dictionary, expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference from SAELens' features, decoded and reconstructed states, over the largest number."""
    states = expected["states"]
    features = mine.encode(states)
    got = {"features": features, "decoded": mine.decode(features, states), "whole": mine.reconstruct(states)}
    assert all(got[name].shape == expected[name].shape for name in got)
    return {name: float((got[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in got}


@pytest.mark.parametrize("name", [*KINDS, *OTHERS, QWEN])
def test_features_and_states_are_those_of_saelens(name: str) -> None:
    expected = load_file(STORED / name / "expected.safetensors")
    assert all(one.abs().max() > 0.3 for one in expected.values())
    found = differences(cp.lenses.Dictionary.load(file_of(STORED / name)), expected)
    assert max(found.values()) <= 1e-6, found


def test_there_is_every_kind() -> None:
    from cacheprobe.lenses.dictionaries.config import ARCHITECTURES, NORMALISATIONS

    loaded = [Dictionary.load(STORED / name) for name in KINDS]
    assert {one.config.architecture for one in loaded} == set(ARCHITECTURES)
    assert {one.config.normalize_activations for one in loaded} == set(NORMALISATIONS)
    assert len(OTHERS) == 3 and (STORED / QWEN).exists()


HOOKS = {
    "standard": ("S", 1),
    "standard-unbiased": ("S", 1),  # the stream that enters block 2
    "standard-average": ("C", 1),
    "standard-heads": ("z", 1),
    "jumprelu": ("T", 1),
    "transcoder": None,
    "gemma-scope-2b-pt-res/layer_3/width_16k": ("S", 3),
    "gemma-scope-2/resid_post/layer_2_width_16k": ("S", 2),
    "gemma-scope-2/transcoder/layer_2_width_16k": None,
    QWEN: ("S", 1),
}


@pytest.mark.parametrize("name", HOOKS)
def test_the_hook_point_is_a_place_of_a_trace(name: str) -> None:
    mine = Dictionary.load(file_of(STORED / name))
    assert mine.config.place == HOOKS[name] and (mine.site, mine.layer) == (HOOKS[name] or (None, None))
    if "transcoder" in name:
        assert mine.config.place_out == ("C", 1 if name == "transcoder" else 2)
    assert Dictionary.load(file_of(STORED / name), hook="blocks.7.hook_mlp_out").config.place == ("C", 7)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_saved_is_read_again(name: str, tmp_path: Path) -> None:
    mine = Dictionary.load(STORED / name)
    again = Dictionary.load(mine.save(tmp_path / "saved"))
    assert again.sha256 == mine.sha256 and again.config.place_out == mine.config.place_out
    states = torch.randn(3, 8)
    assert bitwise(again.reconstruct(states), mine.reconstruct(states))
    assert mine.sha256 != Dictionary(mine.config, {n: -t for n, t in mine.tensors.items()}).sha256


def test_a_config_of_an_early_version_is_read(tmp_path: Path) -> None:
    """Before version 6 entries had other names, and topk was an activation function."""
    import json
    import shutil

    folder = Path(shutil.copytree(STORED / "topk", tmp_path / "old"))
    old = dict(d_in=8, d_sae=20, hook_point="blocks.1.hook_resid_post", activation_fn_str="topk", dtype="float32")
    old |= dict(activation_fn_kwargs={"k": 4}, normalize_activations=False, architecture="standard")
    (folder / "cfg.json").write_text(json.dumps(old))
    mine = Dictionary.load(folder)
    assert mine.config.place == ("S", 1)
    assert max(differences(mine, load_file(folder / "expected.safetensors")).values()) <= 1e-6


def test_the_largest_features_come_first() -> None:
    mine = Dictionary.load(STORED / "standard")
    states = torch.randn(300, 8, generator=torch.Generator().manual_seed(1))
    features, sizes = mine.top(states, 12)
    whole = mine.encode(states)
    assert features.shape == sizes.shape == (300, 12)
    assert bitwise(torch.where(features >= 0, whole.gather(1, features.clamp(min=0)), 0), sizes)
    assert bool((sizes.diff() <= 0).all()) and bool(((features < 0) == (sizes == 0)).all())
    assert bool(((whole > 0).sum(1).clamp(max=12) == (features >= 0).sum(1)).all())
    assert mine.top(states, 99)[0].shape == (300, 20) and mine.top(states[:0], 3)[0].shape == (0, 3)


def saelens_python(folder: Path) -> str:
    """An interpreter that has SAELens: that of CACHEPROBE_SAELENS, or one in a new environment."""
    if given := os.environ.get("CACHEPROBE_SAELENS"):
        return given
    python = folder / "saelens" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    for packages in ([f"torch=={torch.__version__.split('+')[0]}"], ["sae-lens==6.54.12"]):
        done = subprocess.run([python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True)
        if done.returncode:
            said = f"SAELens cannot be installed here: {done.stderr[-300:]}"
            pytest.fail(said) if os.environ.get("CI") else pytest.skip(said)
    return str(python)


@pytest.fixture(scope="module")
def saelens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saelens_python(tmp_path_factory.mktemp("environment"))


def ask(python: str, *arguments: str | Path) -> None:
    script = FIXTURES / "write_saelens.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, script, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_random_dictionaries_equal_saelens_in_its_own_environment(saelens: str, seed: int, tmp_path: Path) -> None:
    ask(saelens, tmp_path, str(seed))
    folders = [path.parent for path in tmp_path.rglob("expected.safetensors")]
    assert len(folders) == len(KINDS) + len(OTHERS) + 1
    for folder in folders:
        found = differences(Dictionary.load(file_of(folder)), load_file(folder / "expected.safetensors"))
        assert max(found.values()) <= 1e-6, (folder, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_saelens_reads_what_is_saved(saelens: str, name: str, tmp_path: Path) -> None:
    mine = Dictionary.load(STORED / name)
    ask(saelens, "--read", mine.save(tmp_path / "saved"), tmp_path / "out")
    found = differences(mine, load_file(tmp_path / "out" / "expected.safetensors"))
    assert max(found.values()) <= 1e-6, found
