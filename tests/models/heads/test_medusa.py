"""Medusa heads against plain torch, in both layouts; their states; what they refuse."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cacheprobe.models.base import ModelError
from cacheprobe.models.heads.medusa import beside, load_medusa
from cacheprobe.ops.equality import bitwise
from tests.models.heads.block_heads import medusa_folder, medusa_folder_of_vllm, medusa_tensors
from tests.tiny import VOCAB, hf_model, loaded
from tests.twins.block_heads_slowly import medusa_logits

TEXT = [(7 * i + 3) % 90 for i in range(9)]
K, M = 3, 32


def last_states() -> tuple[Tensor, Tensor]:
    """(the state of each position of TEXT after the last block, the same after transformers' final norm)."""
    seen: list[Tensor] = []
    with loaded().capturing([("S", 2)], lambda site, layer, value: seen.append(value[0].clone())):
        loaded().whole_logits(torch.tensor([TEXT]))
    with torch.inference_mode():
        return seen[0], hf_model()(torch.tensor([TEXT]), output_hidden_states=True).hidden_states[-1][0]


@pytest.mark.parametrize("write", [medusa_folder, medusa_folder_of_vllm])
@pytest.mark.parametrize("shape", [(3, 2), (2, 1), (11, 1)])
def test_heads_have_the_twins_logits(
    write: Callable[[Path, dict[str, Tensor]], Path], shape: tuple[int, int], tmp_path: Path
) -> None:
    """The file says how many heads and blocks there are, whatever its config says; a tenth head comes after the
    second."""
    tensors = medusa_tensors(*shape)
    heads = load_medusa(write(tmp_path, tensors), loaded())
    assert (heads.num_heads, heads.n_layers, heads.d_model) == (*shape, shape[0] * M)
    states, normed = last_states()
    out = heads.run(states[:, None])
    got = heads.read_out(out.flatten(0, 1)).unflatten(0, out.shape[:2])
    for i in range(len(TEXT)):
        for head in range(shape[0]):
            want = medusa_logits(tensors, head, normed[i], shape[1])
            assert torch.allclose(got[i, head], want, rtol=0, atol=1e-5 * float(want.abs().max()))


def test_heads_without_biases(tmp_path: Path) -> None:
    """vLLM's default: their blocks add silu(W x)."""
    tensors = medusa_tensors()
    biased = load_medusa(medusa_folder_of_vllm(tmp_path / "a", tensors), loaded())
    few = {name: tensor for name, tensor in tensors.items() if "bias" not in name}
    heads = load_medusa(medusa_folder_of_vllm(tmp_path / "b", few), loaded())
    zeros = {name: tensor * ("bias" not in name) for name, tensor in tensors.items()}
    same = load_medusa(medusa_folder(tmp_path / "c", zeros), loaded())
    states = last_states()[0][:, None]
    assert bitwise(heads.run(states), same.run(states)) and not bitwise(heads.run(states), biased.run(states))


def test_states_of_the_heads_are_captured_and_edited(tmp_path: Path) -> None:
    """Each row is zero outside of its head's own numbers, so that no head's state reaches another's logits."""
    heads = load_medusa(medusa_folder(tmp_path, medusa_tensors()), loaded())
    states, normed = last_states()
    seen: dict[tuple[str, int], Tensor] = {}
    sites = [(site, layer) for site in ("pre", "S", "T", "C") for layer in range(2)]
    with heads.capturing(sites, lambda site, layer, value: seen.update({(site, layer): value.clone()})):
        out = heads.run(states[:, None])
    assert bitwise(seen["S", 1], out) and bitwise(seen["pre", 1], seen["S", 0])
    for layer in range(2):
        assert bitwise(seen["S", layer], seen["pre", layer] + seen["C", layer]) and bool(seen["C", layer].any())
        assert seen["T", layer].shape == out.shape and not seen["T", layer].any()
    for head in range(K):
        for value in seen.values():
            assert not value[:, head, : head * M].any() and not value[:, head, (head + 1) * M :].any()
        assert torch.allclose(seen["pre", 0][:, head, head * M : (head + 1) * M], normed, atol=1e-5)
    with heads.editing([("C", 0)], lambda site, layer, value: value * 2):
        assert not torch.allclose(heads.run(states[:, None]), out)
    with pytest.raises(ModelError, match="is an MLP and has no attention heads"), heads.capturing([("z", 0)], print):
        pass
    with pytest.raises(ModelError, match="no pattern is seen"), heads.capturing([("pattern", 0)], print):
        pass


def test_numbers_are_put_beside_each_other() -> None:
    own = torch.tensor([[[1, 2], [3, 4]]])
    assert beside(own).tolist() == [[[1, 2, 0, 0], [0, 0, 3, 4]]]


def test_heads_are_no_model_of_tokens(tmp_path: Path) -> None:
    heads = load_medusa(medusa_folder(tmp_path, medusa_tensors()), loaded("llama", torch.bfloat16))
    assert heads.dtype == torch.bfloat16 and heads.fingerprint()["medusa_heads"] == K
    assert heads.unembedding.shape == (VOCAB, K * M)
    with pytest.raises(ModelError, match="no tokens"):
        heads.forward(torch.tensor([[1]]), heads.new_cache(1, 8), [0], [0])
    with pytest.raises(ModelError, match="no tokens"):
        heads.whole_logits(torch.tensor([[1]]))


# -- what is refused


class Harmful:
    """Runs code where a pickle is read without care."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harmed"),)


def test_a_pickle_with_code_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    medusa_folder(tmp_path / "head", {})
    torch.save({"0.1.weight": Harmful()}, tmp_path / "head" / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="medusa_lm_head.pt is not read"):
        load_medusa(tmp_path / "head", loaded())
    (tmp_path / "head" / "medusa_lm_head.pt").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match="medusa_lm_head.pt is not read"):
        load_medusa(tmp_path / "head", loaded())
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"0.0.linear.weight": torch.zeros(M, 64)}, r"another model: 0.0.linear.weight is of shape \(32, 64\).*32, 32"),
        ({"1.0.linear.bias": torch.zeros(64)}, r"another model: 1.0.linear.bias is of shape \(64,\)"),
        ({"2.2.weight": torch.zeros(96, M)}, r"another model: 2.2.weight is of shape \(96, 32\).*\(97, 32\)"),
        ({"1.1.linear.weight": None}, "must hold one unembedding for each head"),
        ({"1.2.weight": None}, "must hold one unembedding for each head"),
        ({f"0.{layer}.linear.{part}": None for layer in (0, 1) for part in ("weight", "bias")}, "must hold one"),
        ({"3.0.linear.bias": torch.zeros(M)}, "must hold one unembedding"),
        ({"token_map": torch.zeros(9)}, "holds token_map"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(changed: dict[str, Any], why: str, tmp_path: Path) -> None:
    tensors = {name: one for name, one in (medusa_tensors() | changed).items() if one is not None}
    with pytest.raises(ValueError, match=f"heads? .*{why}|^head.*{why}"):
        load_medusa(medusa_folder(tmp_path / "heads", tensors), loaded())
