"""Files that do not fit are refused by name: nothing is filled with random numbers, and no code of a model is run."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.plain import files
from tests.twins.equivalence import hf_greedy

SIZES = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OddConfig(LlamaConfig):
    model_type = "odd"

class OddModel(LlamaForCausalLM):
    config_class = OddConfig
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def own_code(folder: Path, code: str) -> None:
    names = {"AutoConfig": "modeling_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddModel"}
    change_config(folder, auto_map=names, model_type="odd", architectures=["OddModel"])
    (folder / "modeling_odd.py").write_text(code)


def test_weights_that_are_missing_are_not_drawn(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 of the weights of a LlamaForCausalLM, such as model\.layers\.1\.mlp"):
        cp.load_model(folder)


def test_damaged_and_foreign_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="a file of its weights is damaged"):
        cp.load_model(folder)
    path.write_bytes(whole)
    change_config(folder, hidden_size=64)
    with pytest.raises(ModelError, match="other shapes than its config"):
        cp.load_model(folder)
    path.unlink()
    with pytest.raises(ModelError, match=r"no weights beside config\.json"):
        cp.load_model(folder)


@pytest.mark.parametrize(("is_large", "progress"), [(True, True), (True, False), (False, True)])
def test_a_large_model_shows_how_far_it_is(
    folder: Path,
    is_large: bool,
    progress: bool,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "_LARGE_BYTES", 0 if is_large else 2**40)
    cp.load_model(folder, progress=progress)
    assert ("Loading weights" in capfd.readouterr().err) == (is_large and progress)


def test_an_unknown_type(folder: Path) -> None:
    change_config(folder, model_type="odd")
    with pytest.raises(ModelError, match=r"model type `odd` but Transformers does not recognize"):
        cp.load_model(folder)


def test_code_of_a_model_is_never_run_unasked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the user asked at the keyboard, as transformers would do."""
    ran = folder / "ran"
    own_code(folder, f"open({str(ran)!r}, 'w')\n{CODE}")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked at the keyboard"))
    for trust in ({}, {"trust_remote_code": False}):
        with pytest.raises(ModelError, match=r"code of its own \(modeling_odd\.py\), which is not run"):
            cp.load_model(folder, **trust)  # pyright: ignore[reportArgumentType]
    assert not ran.exists()


def test_trusted_code_runs(folder: Path) -> None:
    own_code(folder, CODE)
    model = cp.load_model(folder, trust_remote_code=True)
    prompt = [1, 2, 3, 4]
    trace = cp.run(model, [prompt], max_new_tokens=8, drafter=cp.drafters.EarlyExit(layer=0), progress=False)
    assert trace.fingerprint["path"] == "plain" and "modeling_odd.py" in model.weights_note
    change_config(folder, model_type="llama", architectures=["LlamaForCausalLM"], auto_map={})
    assert trace.committed(0) == hf_greedy(LlamaForCausalLM.from_pretrained(folder), prompt, 8)


def test_own_code_of_a_known_type_is_left_alone(folder: Path) -> None:
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_odd.OddModel"})
    (folder / "modeling_odd.py").write_text("raise SystemExit")
    assert cp.load_model(folder).n_layers == 2


def test_a_tokenizer_of_another_model(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(90)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model = cp.load_model(folder, PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0"))
    with pytest.raises(ValueError, match="80 is outside the vocabulary of 40; is its tokenizer another model's"):
        cp.run(model, ["w3 w80"], progress=False)


def test_a_hub_name_that_is_not_here() -> None:
    with pytest.raises(ModelError, match="hf download someone/some-model"):
        cp.load_model("someone/some-model")
