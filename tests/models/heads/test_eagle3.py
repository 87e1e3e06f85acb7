"""EAGLE-3 heads against speculators' own forward, and their layouts."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cacheprobe.core.values import JsonDict
from cacheprobe.models.heads.eagle3 import SWITCHES, Eagle3Module
from cacheprobe.models.heads.eagle3_files import load_eagle3, save_eagle3
from cacheprobe.models.heads.lm import HeadLM
from cacheprobe.ops.equality import bitwise, close
from tests.exports.environment import run_script
from tests.models.heads.eagle3_heads import (
    BLOCK,
    DRAFT_VOCAB,
    LAYERS,
    SITES,
    T,
    change,
    random_head,
    rows,
    safeailab_folder,
    speculators_folder,
    target,
)
from tests.tiny import VOCAB

CASES: dict[str, JsonDict] = {
    "plain": {},
    **{name: {name: True} for name in SWITCHES},
    "all": dict(norm_before_residual=True, norm_before_fc=True, norm_output=True),
    "two blocks": dict(block=dict(num_hidden_layers=2), norm_before_residual=True),
    "qwen3": dict(block=dict(model_type="qwen3", layer_types=["full_attention"])),
    "whole vocabulary": dict(draft_vocab_size=VOCAB),
}


SUMS = "one pass and several, and two versions of torch, sum in other orders"


def logits_of(head: HeadLM, widths: list[int]) -> Tensor:
    """Logits [t, v] of the head's rows, run in passes of these widths on its cache."""
    states, token_ids = rows()
    cache, found, start = head.new_cache(1, T + 4), [], 0
    for width in widths:
        part = slice(start, start + width)
        found.append(head.run(token_ids[:, part], head.entering(states[:, part]), cache, [0], [start]))
        start += width
    return head.read_out(torch.cat(found, dim=1)[0])


def chained(head: HeadLM, newest: int, steps: int) -> list[Tensor]:
    """Logits [v] after each row of a chain behind row `newest`, whose tokens are those of the text."""
    states, token_ids = rows()
    cache = head.new_cache(1, T + 4)
    residual = head.run(token_ids[:, : newest + 1], head.entering(states[:, : newest + 1]), cache, [0], [0])[:, -1:]
    found = []
    for step in range(1, steps + 1):
        at = newest + step
        residual = head.run(token_ids[:, at : at + 1], head.fed_back(residual), cache, [0], [at])
        found.append(head.read_out(residual[0])[0])
    return found


@pytest.fixture(scope="module")
def folder(speculators: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of heads that speculators made, and of heads that we wrote, each with speculators' logits."""
    path = tmp_path_factory.mktemp("eagle3")
    states, token_ids = rows()
    save_file({"states": states.flatten(2).contiguous(), "input_ids": token_ids}, path / "rows.safetensors")
    copy.deepcopy(target().live).save_pretrained(path / "target")
    for name, settings in CASES.items():
        case = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [2, 4, 5], **settings}
        place = path / "heads" / name
        place.mkdir(parents=True)
        (place / "case.json").write_text(json.dumps({**case, "block": {**BLOCK, **settings.get("block", {})}}))
        save_eagle3(random_head(**settings), path / "heads" / f"ours, {name}", str(path / "target"))
    done = run_script(speculators, "run_eagle3.py", [path])
    assert done.returncode == 0, done.stderr[-2000:]
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *(f"ours, {name}" for name in CASES)])
def test_it_equals_speculators(name: str, folder: Path) -> None:
    """The logits of every row, on a cache in several passes; those of chains, of the rows where speculators' chain has
    the same tokens; and the target's ids."""
    head = load_eagle3(folder / "heads" / name, target())
    assert head.target_sites == tuple(SITES)
    wanted = load_file(folder / f"{name}.safetensors")
    ids = torch.arange(VOCAB) if head.token_ids is None else head.token_ids
    found = logits_of(head, [5, 1, 6])
    assert close(found[:, ids], wanted["step_0"][0], 1e-5, because=SUMS)
    assert int(found.isneginf().sum()) == T * (VOCAB - len(ids))
    for newest in (0, 4):
        for step, logits in enumerate(chained(head, newest, 2), 1):
            assert close(logits[ids], wanted[f"step_{step}"][0, newest], 1e-5, because=SUMS)


@pytest.mark.parametrize("name", CASES)
def test_its_own_forward_is_what_the_cache_gives(name: str) -> None:
    """Teacher-forced, over the whole text at once."""
    head = random_head(**CASES[name])
    states, token_ids = rows()
    module = head.live
    assert isinstance(module, Eagle3Module)
    module.given = module.entering(states)
    wanted = module(token_ids).logits[0]
    module.given = None
    ids = torch.arange(VOCAB) if head.token_ids is None else head.token_ids
    for widths in ([T], [5, 1, 6], [1] * T):
        assert close(logits_of(head, widths)[:, ids], wanted, 1e-5, because=SUMS)


@pytest.mark.parametrize("name", CASES)
def test_a_head_is_written_and_read_exactly(name: str, tmp_path: Path) -> None:
    head = random_head(**CASES[name])
    again = load_eagle3(save_eagle3(head, tmp_path / "head", "tiny"), target())
    for (one, weight), (other, read) in zip(head.named_weights(), again.named_weights(), strict=True):
        assert one == other and bitwise(weight, read)
    assert bitwise(logits_of(head, [T]), logits_of(again, [T]))
    assert again.target_sites == head.target_sites and again.name == "head"


def test_safeailabs_layout(tmp_path: Path) -> None:
    """The same tensors give the same logits; the embedding is the target's own memory."""
    source = speculators_folder(tmp_path / "ours")
    embedding = target().live.get_input_embeddings().weight
    tensors = load_file(source / "model.safetensors") | {"embed_tokens.weight": embedding.detach().clone()}
    save_file(tensors, source / "model.safetensors")
    head = load_eagle3(safeailab_folder(source, tmp_path / "theirs"), target())
    assert bitwise(logits_of(head, [T]), logits_of(load_eagle3(source, target()), [T]))
    assert head.live.get_input_embeddings().weight.data_ptr() == embedding.data_ptr()
    assert head.target_sites == tuple(SITES)
    assert not any(weight.requires_grad for weight in head.live.parameters()) and embedding.requires_grad


@pytest.mark.parametrize("is_nested", [False, True])
def test_its_names_may_begin_with_model(is_nested: bool, tmp_path: Path) -> None:
    """And the settings may stand in eagle_config, as NVIDIA writes them; tensors may lie in several files."""
    source = speculators_folder(tmp_path / "ours", norm_before_fc=True)
    config = json.loads((source / "config.json").read_text())
    settings = {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    nested = {"eagle_config": settings} if is_nested else settings
    path = tmp_path / "theirs"
    path.mkdir()
    block = config["transformer_layer_config"]
    (path / "config.json").write_text(json.dumps({**block, **nested, "draft_vocab_size": DRAFT_VOCAB}))
    tensors = load_file(source / "model.safetensors")
    inner = {f"model.{name}" if name[0] in "len" else name: tensor for name, tensor in tensors.items()}
    inner = {name.replace("model.lm_head", "lm_head"): tensor for name, tensor in inner.items()}
    for i, part in enumerate((sorted(inner)[:4], sorted(inner)[4:])):
        save_file({name: inner[name] for name in part}, path / f"model-0000{i}-of-00002.safetensors")
    head = load_eagle3(path, target())
    assert bitwise(logits_of(head, [T]), logits_of(load_eagle3(source, target()), [T]))


@pytest.mark.parametrize(
    ("ids", "layers_are", "wanted"),
    [
        ([2, 4, 5], None, SITES),
        ([1, 3, 4], "outputs", SITES),
        ([0, 4, LAYERS], "inputs", [("pre", 0), ("S", 3), ("S", LAYERS - 1)]),
        ([0, 3, LAYERS - 1], "outputs", [("S", 0), ("S", 3), ("S", LAYERS - 1)]),
        (None, None, SITES),
    ],
)
@pytest.mark.parametrize("are_given", [False, True])
def test_layer_ids(ids: list[int] | None, layers_are, wanted, are_given: bool, tmp_path: Path) -> None:
    """Inputs of blocks unless it is said otherwise; in config.json, or given."""
    folder = change(speculators_folder(tmp_path), eagle_aux_hidden_state_layer_ids=None if are_given else ids)
    head = load_eagle3(folder, target(), layer_ids=ids if are_given else None, layers_are=layers_are)
    assert head.target_sites == tuple(wanted)


def test_ids_that_begin_with_1_are_told_apart(tmp_path: Path) -> None:
    """vLLM counts inputs, SGLang outputs where the first id is 1."""
    folder = safeailab_folder(
        speculators_folder(tmp_path / "a"), tmp_path / "b", eagle_aux_hidden_state_layer_ids=[1, 3, 4]
    )
    with pytest.raises(ValueError, match='say layers_are="inputs" or'):
        load_eagle3(folder, target())
    assert load_eagle3(folder, target(), layers_are="outputs").target_sites == tuple(SITES)
    assert load_eagle3(folder, target(), layers_are="inputs").target_sites == (("S", 0), ("S", 2), ("S", 3))


def test_a_longer_context_is_the_targets(tmp_path: Path) -> None:
    """SafeAILab's heads say 2,048 for a target of 131,072; a rotation without limit is extended, another is not."""
    folder = change(speculators_folder(tmp_path), block_max_position_embeddings=64)
    assert load_eagle3(folder, target()).n_ctx == target().n_ctx
    yarn = dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=32, rope_theta=1e4)
    assert load_eagle3(change(folder, block_rope_parameters=yarn), target()).n_ctx == 64
