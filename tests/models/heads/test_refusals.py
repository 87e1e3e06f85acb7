"""What is no EAGLE-3 head, or one of another model, is refused by name, with what was expected, got, and the remedy."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.models.heads.eagle3_files import load_eagle3, save_eagle3
from cacheprobe.models.heads.files import open_head
from cacheprobe_benchmarks.shared.tiny import TINY
from tests.models.heads.eagle3_heads import (
    DRAFT_VOCAB,
    change,
    change_tensors,
    random_head,
    safeailab_folder,
    speculators_folder,
    target,
)
from tests.tiny import VOCAB, hf_model

OFFSETS = torch.arange(DRAFT_VOCAB)

CONFIGS: dict[str, tuple[dict[str, object], str]] = {
    "another width": (dict(block_hidden_size=64), "reads states of width 64, .* has 32; use its own head"),
    "states of another width": (dict(target_hidden_size=48), "reads states of width 48, .* has 32"),
    "another vocabulary": (dict(block_vocab_size=98), "vocabulary of 98 tokens, .* has 97; use its own head"),
    "another kind of head": (dict(speculators_model_type="dflash"), "holds a 'dflash' head"),
    "no config of a block": (dict(transformer_layer_config=[1]), "holds a 'eagle3' head with no EAGLE-3 config"),
    "another kind of block": (dict(block_model_type="gpt2"), "model_type 'gpt2', .* llama or qwen3"),
    "sliding attention": (
        dict(block_model_type="qwen3", block_layer_types=["sliding_attention"], block_sliding_window=8,
             block_use_sliding_window=True),
        "it has sliding attention",
    ),
    "two kinds of norms before fc": (dict(norm_before_fc=True, fc_norm=True), "norm_before_fc and fc_norm, which"),
    "a switch that its tensors lack": (
        dict(norm_before_fc=True), r"input_norm.weight must be of shape \(96,\), as config.json says, and is missing",
    ),
    "another number of layers": (
        dict(eagle_aux_hidden_state_layer_ids=[2, 4]), "fc reads 96 numbers, 2 layers of width 32 give 64; give"
    ),
    "a layer that the model lacks": (
        dict(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), r"inputs of 8 blocks lie in 0 to 8, got \[2, 4, 9\]; give"
    ),
    "a layer twice": (dict(eagle_aux_hidden_state_layer_ids=[2, 4, 4]), r"layer ids must differ, got \[2, 4, 4\]"),
    "a wider MLP": (
        dict(block_intermediate_size=50),
        r"mlp.gate_proj.weight must be of shape \(50, 32\), as config.json says, and is \(48, 32\); give",
    ),
    "fewer tokens": (dict(draft_vocab_size=39), r"lm_head.weight must be of shape \(39, 32\)"),
}  # fmt: skip

TENSORS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "no fc": (dict(fc_weight=None), "fc.weight must be of shape .* and is missing"),
    "a norm too many": (
        dict(input_norm_weight=torch.ones(96)), "holds input_norm_weight, which a head .* a setting may be missing"
    ),
    "no d2t": (dict(d2t=None), "no d2t, and has 40 of 97 tokens"),
    "d2t of ids": (dict(d2t=OFFSETS + 50), "d2t gives ids 50 to 128, the target's are 0 to 96; d2t is the target's id"),
    "d2t below 0": (dict(d2t=-OFFSETS - 1), "d2t gives ids -1 to -1, the target's are"),
    "d2t of one id": (dict(d2t=5 - OFFSETS), "one target id to several"),
    "d2t of floats": (dict(d2t=OFFSETS.float()), "must be 40 whole numbers, got .* of torch.float32"),
    "d2t that is short": (dict(d2t=OFFSETS[:-1]), r"must be 40 whole numbers, got \(39,\)"),
    "another t2d": (dict(t2d=torch.ones(VOCAB, dtype=torch.bool)), "t2d marks other tokens than d2t"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_does_not_fit(name: str, tmp_path: Path) -> None:
    changes, said = CONFIGS[name]
    with pytest.raises(ValueError, match=said) as refusal:
        load_eagle3(change(speculators_folder(tmp_path), **changes), target())
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit(name: str, tmp_path: Path) -> None:
    changes, said = TENSORS[name]
    with pytest.raises(ValueError, match=said) as refusal:
        load_eagle3(change_tensors(speculators_folder(tmp_path), **changes), target())
    assert str(tmp_path) in str(refusal.value)


class Runs:
    """Pickled, it runs a function when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return print, ("this ran",)


def test_a_pickle_with_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before it runs, whatever it calls itself."""
    folder = safeailab_folder(speculators_folder(tmp_path / "a"), tmp_path / "b")
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save({**tensors, "more": Runs()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="may run code .* names __builtin__ print.*; convert it to safetensors"):
        load_eagle3(folder, target())
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(ValueError, match="convert it to safetensors"):
        load_eagle3(folder, target())
    assert "this ran" not in capsys.readouterr().out


def test_folders_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no readable config.json .*; give the folder of a draft head"):
        load_eagle3(tmp_path / "absent", target())
    folder = speculators_folder(tmp_path / "head")
    (folder / "model.safetensors").rename(folder / "model2.safetensors")
    (folder / "model.safetensors").write_bytes((folder / "model2.safetensors").read_bytes())
    with pytest.raises(ValueError, match="in model2.safetensors and .*; keep one of the files"):
        open_head(folder)
    (folder / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(ValueError, match="model.safetensors is broken .*; get the file again"):
        open_head(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match="no .safetensors file and no pytorch_model.bin"):
        open_head(folder)
    copy.deepcopy(target().live).save_pretrained(
        tmp_path / "model"
    )  # a model of the right width and vocabulary, and no head
    with pytest.raises(ValueError, match="self_attn.q_proj.weight must be of shape .*32, 64.* is .*32, 32"):
        load_eagle3(tmp_path / "model", target())


def test_one_tensor_is_read_by_its_name(tmp_path: Path) -> None:
    files = open_head(speculators_folder(tmp_path))
    assert torch.equal(files.tensor("fc.weight"), random_head().live.fc.weight)
    with pytest.raises(ValueError, match="holds no tensor gc.weight; it has d2t, embed_tokens.weight, "):
        files.tensor("gc.weight")


def test_no_embedding_of_its_own_and_another_width(tmp_path: Path) -> None:
    """The target's embedding cannot stand in."""
    folder = change(speculators_folder(tmp_path), target_hidden_size=32, block_hidden_size=16)
    with pytest.raises(ValueError, match=r"no embed_tokens, and .* of shape \(97, 32\), not \(97, 16\); give a head"):
        load_eagle3(change_tensors(folder, embed_tokens_weight=None), target())


def test_one_state_after_the_norm(tmp_path: Path) -> None:
    """As the first heads for gpt-oss read it."""
    config = {"use_aux_hidden_state": False}
    folder = safeailab_folder(speculators_folder(tmp_path / "a"), tmp_path / "b", eagle_config=config)
    with pytest.raises(ValueError, match="reads one state after the target's last norm"):
        load_eagle3(folder, target())


@pytest.mark.parametrize("layers_are", ["inputs", "outputs", "ids"])
def test_ids_out_of_range(layers_are: str, tmp_path: Path) -> None:
    said = "choose one of inputs, outputs" if layers_are == "ids" else f"that are {layers_are} of 8 blocks lie in 0 to "
    with pytest.raises(ValueError, match=said):
        load_eagle3(speculators_folder(tmp_path), target(), layer_ids=[-1, 4, 5], layers_are=layers_are)


def test_a_model_too_small_for_eagles_own_choice(tmp_path: Path) -> None:
    """2, n/2 and n - 3 are no three layers of 4."""
    folder = change(speculators_folder(tmp_path), eagle_aux_hidden_state_layer_ids=None)
    small = cp.load_model(hf_model(size=replace(TINY, layers=4)))
    with pytest.raises(ValueError, match=r"must differ, got \[2, 2, 1\] for 4 layers; give layer_ids="):
        load_eagle3(folder, small)
    assert load_eagle3(folder, small, layer_ids=[0, 2, 4]).target_sites == (("pre", 0), ("S", 1), ("S", 3))


def test_a_head_of_another_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its folder names the model; who knows better says that name."""
    folder = save_eagle3(random_head(), tmp_path, "meta-llama/Llama-3.1-8B-Instruct")
    load_eagle3(folder, target())  # a live model without a name
    for name, is_refused in {"somebody/other-8b": True, "mine/llama-3.1-8b-instruct": False}.items():
        monkeypatch.setattr(target(), "name", name)
        if is_refused:
            with pytest.raises(ValueError, match=f"a head of meta-llama/.*, the model is {name}; if both are the same"):
                load_eagle3(folder, target())
        else:
            load_eagle3(folder, target())
    monkeypatch.setattr(target(), "name", "somebody/other-8b")
    load_eagle3(folder, target(), verifier="meta-llama/Llama-3.1-8B-Instruct")
    with pytest.raises(ValueError, match="the model is some/thing; if both are the same, say verifier="):
        load_eagle3(folder, target(), verifier="some/thing")


def test_only_its_own_kind_is_written(tmp_path: Path) -> None:
    head = random_head()
    head.live = target().live
    with pytest.raises(ValueError, match="is a LlamaForCausalLM, not an EAGLE-3 head"):
        save_eagle3(head, tmp_path, "tiny")
    assert not list(tmp_path.iterdir())
