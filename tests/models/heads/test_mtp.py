"""MTP modules of checkpoints: what they compute, where their weights come from, what is refused."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import cacheprobe as cp
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.feeding import feed
from cacheprobe.models.heads.lm import HeadLM
from cacheprobe.models.heads.load_mtp import load_mtp
from cacheprobe.ops.equality import close
from tests.field.tiny_family import tiny_family
from tests.models.heads.checkpoints import (
    FAMILIES,
    VOCAB,
    change_weights,
    logits_slowly,
    module_slowly,
    original,
    weights_file,
    write_checkpoint,
)

TEXT = [(5 + 31 * i + i * i) % VOCAB for i in range(40)]
SUMS = "sums and rotations have another order than transformers'"
_folders = TemporaryDirectory()


@cache
def folder(family: str) -> Path:
    """A checkpoint of the family, which no test changes."""
    path = Path(_folders.name, family)
    write_checkpoint(family, path)
    return path


@cache
def loaded(family: str) -> CachedLM:
    return cp.load_model(folder(family))


@cache
def head(family: str) -> HeadLM:
    return load_mtp(loaded(family))


def rows(model: CachedLM, one: HeadLM, text: list[int], width: int = 11) -> Tensor:
    """The head's residual stream [t - 1, m] over a text, `width` rows a pass."""
    states = feed(model, torch.tensor([text]), one.target_sites).states[one.target_sites[0]].view(len(text), 1, -1)
    store, found = one.new_cache(1, len(text) - 1), []
    for start in range(0, len(text) - 1, width):
        end = min(start + width, len(text) - 1)
        given = one.entering(states[None, start:end])
        found.append(one.run(torch.tensor([text[start + 1 : end + 1]]), given, store, [0], [start])[0])
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_equals_that_of_transformers(family: str) -> None:
    live = original(folder(family))
    want = logits_slowly(live, module_slowly(family, folder(family), live), TEXT)
    got = head(family).read_out(rows(loaded(family), head(family), TEXT))
    assert close(got, want, 1e-5, because=SUMS)
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_shared_and_what_is_read(family: str) -> None:
    """Embedding, final norm and unembedding are the model's modules. Norms and attention are those of the file."""
    module, live = head(family).live.model, loaded(family).live
    assert module.embed_tokens is live.get_input_embeddings() and head(family).live.lm_head is live.lm_head
    assert module.target_norm is live.model.norm and module.rotary_emb is live.model.rotary_emb
    stored, layout = load_file(weights_file(folder(family))), FAMILIES[family]
    place = "mtp." if layout.block.startswith("mtp.") else layout.block
    found = [module.enorm, module.hnorm, module.eh_proj, module.norm]
    for name, one in zip(layout.around, found, strict=True):
        assert torch.equal(one.weight, stored[f"{place}{name}.weight"])
    assert torch.equal(module.layers[0].input_layernorm.weight, stored[f"{layout.block}input_layernorm.weight"])
    before = {key for key in vars(live.config) if "mtp" in key}
    assert before == {key for key in vars(type(live).from_pretrained(folder(family)).config) if "mtp" in key}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sites_of_a_module(family: str) -> None:
    """The stream is its input plus T and C; the pattern of a row sums to 1, with nothing at position 0; experts have a
    routing."""
    one, seen = head(family), dict[str, Tensor]()
    sites = [("pre", 0), ("S", 0), ("T", 0), ("C", 0), ("pattern", 0), *[("router", 0)][: len(one.mixtures)]]

    def keep(site: str, layer: int, value: Tensor) -> None:
        seen[site] = value.clone()

    with one.capturing(sites, keep):
        stream = rows(loaded(family), one, TEXT, width=len(TEXT))
    assert torch.equal(seen["S"][0], stream)
    assert close(seen["pre"] + seen["T"] + seen["C"], seen["S"], 1e-5, because=SUMS)
    pattern = seen["pattern"]
    assert close(pattern.sum(-1), torch.ones(pattern.shape[:-1]), 1e-5, because=SUMS)
    assert pattern.shape[-2:] == (len(TEXT) - 1, len(TEXT)) and not pattern[..., 0].any()
    assert not pattern[..., 0, 2:].any()  # the first row, at position 1, attends to itself alone
    assert ("router" in seen) == (family in ("deepseek_v3", "glm4_moe", "bailing_hybrid", "qwen3_next"))


# -- what is refused


def refused(path: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        load_mtp(cp.load_model(path))


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text", "qwen2"])
def test_a_checkpoint_without_its_module_is_refused_by_name(family: str, tmp_path: Path) -> None:
    """What save_pretrained writes, and what lacks one tensor, or has one of another shape or a second module."""
    module = write_checkpoint(family, tmp_path)
    (projection,) = (key for key, value in module.items() if value.shape == (32, 64) and "mlp" not in key)
    (norm,) = (key for key in module if key.endswith("post_attention_layernorm.weight"))
    whole = load_file(weights_file(tmp_path))
    change_weights(tmp_path, lambda all: {key: value for key, value in all.items() if key != norm})
    refused(tmp_path, "lacks tensors of its MTP module.*post_attention_layernorm.*whole checkpoint")
    change_weights(tmp_path, lambda all: {**whole, norm: torch.ones(31)})
    refused(tmp_path, "other shapes than config.json says")
    second = {"glm4_moe": "model.layers.5.", "qwen3_5_text": "mtp.layers.1.", "qwen2": "model.mtp_layers.1."}[family]
    change_weights(tmp_path, lambda all: {**whole, f"{second}input_layernorm.weight": torch.ones(32)})
    refused(tmp_path, f"several MTP modules .*{second}.*another drafter")
    change_weights(tmp_path, lambda all: {key: value for key, value in whole.items() if key != projection})
    refused(tmp_path, f"holds {min(module.keys() - {projection})}, but no projection of an MTP module; looked for")
    change_weights(tmp_path, lambda all: {key: value for key, value in whole.items() if key not in module})
    refused(tmp_path, "holds no tensor of an MTP module; looked for .*eh_proj.* or mtp.fc.*mtp_num_hidden_layers=None")


def test_a_model_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="LlamaForCausalLM was made without files.*cp.load_model"):
        load_mtp(cp.load_model(tiny_family("llama")))
    write_checkpoint("qwen2", tmp_path)
    model = cp.load_model(tmp_path)
    weights_file(tmp_path).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"holds no .safetensors file.*pickle.*convert"):
        load_mtp(model)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=f"{tmp_path} is gone"):
        load_mtp(model)


def test_weights_of_another_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cp.load_model(folder("qwen2"))
    monkeypatch.setattr("cacheprobe.models.heads.load_mtp.quantised_text", lambda live: "4-bit (a test)")
    with pytest.raises(ModelError, match=r"quantised \(4-bit \(a test\)\).*bfloat16"):
        load_mtp(model)
    monkeypatch.undo()
    model.live.lm_head.to("meta")
    with pytest.raises(ModelError, match="is on cpu, meta; .* one device"):
        load_mtp(model)


def test_a_model_inside_a_bridge_is_refused_and_one_on_its_bridge_is_not(tmp_path: Path) -> None:
    one = load_mtp(loaded("qwen2").bridged())
    assert torch.equal(rows(loaded("qwen2"), one, TEXT), rows(loaded("qwen2"), head("qwen2"), TEXT))
    write_checkpoint("qwen2", tmp_path)
    inside = cp.load_model(cp.load_model(tmp_path).bridged().bridge)
    with pytest.raises(ModelError, match="inside a TransformerBridge.*name or folder"):
        load_mtp(inside)
