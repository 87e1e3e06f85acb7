"""Where weights are put. Of a GPU there is only the refusal here: what runs on CUDA is marked `cuda`."""

from pathlib import Path
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.base import ModelError
from cacheprobe.models.plain import files as devices
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="it is about a machine without a GPU")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    hf_model().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "asked",
    [
        dict(device="cpu"),
        dict(device_map={"model": "cpu", "lm_head": "cpu"}),
        pytest.param(dict(device_map="auto"), marks=WITHOUT_GPU),
    ],
    ids=str,
)
def test_on_the_cpu_a_run_is_the_same_bits(directory: Path, asked: dict[str, Any]) -> None:
    expected = cp.run(loaded(), PROMPTS[:2], **SMALL, deterministic=True)
    model = cp.load_model(directory, **asked)
    trace = cp.run(model, PROMPTS[:2], **SMALL, deterministic=True)
    assert str(model.device) == "cpu" and trace.fingerprint["device"] == "cpu"
    assert trace.fingerprint["path"] == expected.fingerprint["path"] == "plain"
    assert [trace.digest(i) for i in (0, 1)] == [expected.digest(i) for i in (0, 1)]


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("tiny", dict(device="cuda")),
        ("coinflip-thinking", dict(device_map={"": 0})),
        ("nowhere/at-all", dict(device_map={"": "cuda:1"})),
    ],
)
def test_without_a_gpu_cuda_is_refused_before_anything_is_loaded(
    directory: Path, name: str, asked: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=r"device 'cuda(:\d)?' was asked for, and torch .* finds no CUDA GPU here"):
        cp.load_model(directory if name == "tiny" else name, **asked)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (dict(device="cpu", device_map="auto"), "give device= or device_map=, not both"),
        (dict(device="tpu"), "unknown device 'tpu'"),
        (dict(device="mps"), "device 'mps' is not supported; cacheprobe runs on cpu and cuda"),
        (dict(device_map="everywhere"), "unknown device_map 'everywhere'; give one of auto"),
        (dict(device_map={}), "device_map is {}; give a dict"),
        (dict(device_map={"model": "cpu", "lm_head": "disk"}), "leaves lm_head on the disk"),
        (dict(device_map="auto", adapter="coin-flip"), "merged on one device; merge it with peft first"),
    ],
)
def test_what_cannot_be_is_refused_by_name(directory: Path, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        cp.load_model(directory, **asked)


def test_a_live_model_stays_where_it_is() -> None:
    with pytest.raises(ModelError, match="a live LlamaForCausalLM stays where it is"):
        cp.load_model(hf_model(), device="cpu")


def test_a_small_model_is_not_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(cp.load_model("coinflip-plain", device="cpu").device) == "cpu"
    monkeypatch.setattr(devices, "checked_device", torch.device)
    with pytest.raises(ModelError, match="runs on one device; give device= instead"):
        cp.load_model("coinflip-plain", device_map={"blocks": "cpu", "unembed": "cuda"})


def test_weights_without_a_place_are_refused() -> None:
    model = hf_model()
    model.lm_head.to("meta")
    with pytest.raises(ModelError, match=r"no room for 1 weights, such as lm_head.weight"):
        devices.require_placed(model, "tiny")


def test_each_layer_of_a_cache_has_its_own_device() -> None:
    shapes = [(2, 8, 8)] * 2
    cache = KVCache(2, 16, shapes, torch.float32, [torch.device("cpu"), torch.device("meta")])
    assert [held.device.type for held in (*cache.keys, *cache.values)] == ["cpu", "meta"] * 2
    assert loaded().cache_layers()[1] == [torch.device("cpu")] * 3


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_a_run_is_its_oracles(directory: Path) -> None:
    model = cp.load_model(directory, device="cuda")
    trace = cp.run(model, PROMPTS[:2], **SMALL, deterministic=True, drafter=cp.drafters.EarlyExit(layer=1))
    assert trace.fingerprint["device"] == "cuda:0" and cp.verify(trace).is_equal
