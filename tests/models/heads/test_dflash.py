"""DFlash heads against transformers' own, and against plain torch; their cache; what they refuse."""

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import DFlashCache

from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.heads.dflash import BlockHeadLM
from cacheprobe.models.heads.dflash_files import load_dflash
from cacheprobe.ops.equality import bitwise
from tests.exports.environment import run_script
from tests.models.heads.block_heads import BLOCK, BLOCKS, MASK, native_folder, speculators_folder, zlab_folder
from tests.tiny import VOCAB, hf_model, loaded
from tests.twins.block_heads_slowly import dflash_logits

TEXT = [(7 * i + 3) % 90 for i in range(40)]
ROUNDS = (2, 6, 9, 10, 15, 31)
"""Numbers of tokens so far, one after the other."""


@cache
def hidden_states(family: str = "llama") -> tuple[Tensor, ...]:
    """transformers' hidden states [1, p, m] of TEXT: the embeddings, then those after each block."""
    with torch.inference_mode():
        return hf_model(family)(torch.tensor([TEXT]), output_hidden_states=True).hidden_states


def read(head: BlockHeadLM, sites: tuple[int, ...], texts: list[int]) -> list[Tensor]:
    """Our logits [b, B, v] after each of ROUNDS, for a batch of `texts`: how many tokens each is behind. sites: of
    `hidden_states`."""
    kept = head.new_cache(len(texts) + 1, 64)
    rows = [kept.allocate() for _ in texts]
    fed, found = [0] * len(texts), []
    states = torch.stack([hidden_states()[i][0] for i in sites], -2)
    for most in ROUNDS:
        n = [max(2, most - behind) for behind in texts]
        width = max(1, *(a - 1 - b for a, b in zip(n, fed, strict=True)))
        given = torch.stack([head.entering(states[start : start + width]) for start in fed])
        head.feed(given, kept, rows, fed)
        token_ids = head.block_tokens([TEXT[a - 1] for a in n])
        out = head.run_block(token_ids, kept, rows, [a - 1 for a in n])
        found.append(head.read_out(out.flatten(0, 1)).unflatten(0, out.shape[:2]))
        fed = [a - 1 for a in n]
    return found


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_a_block_has_transformers_logits(kind: str, tmp_path: Path) -> None:
    """Round by round over one cache, with a window that is smaller than the text."""
    theirs, hf = native_folder(tmp_path, layer_types=[kind, "full_attention"]), hf_model()
    ours = read(load_dflash(tmp_path, loaded()), (1, 2), [0])
    kept, fed = DFlashCache(config=theirs.config), 0
    kept.activate_past_recording()
    states = torch.cat([hidden_states()[i] for i in (1, 2)], -1)
    for n, got in zip(ROUNDS, ours, strict=True):
        kept.set_previous_accepted_tokens(n - 1 - fed)
        if fed:
            kept.crop(-BLOCK)
        with torch.inference_mode():
            out = theirs(
                noise_embeds=hf.get_input_embeddings()(torch.tensor([[TEXT[n - 1], *[MASK] * (BLOCK - 1)]])),
                context_hidden_states=states[:, fed : n - 1],
                position_ids=torch.arange(fed, n - 1 + BLOCK)[None],
                attention_mask=torch.ones(1, n - 1 + BLOCK, dtype=torch.long),
                past_key_values=kept,
            )
            want = hf.lm_head(out.last_hidden_state)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
        fed = n - 1


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_a_block_has_the_twins_logits(layout: str, tmp_path: Path) -> None:
    """Several texts in one batch. z-lab's id i is the state after block i, speculators' that before it: both read here
    the embeddings or the states after blocks 0 and 1."""
    hf, is_zlab = hf_model(), layout == "z-lab"
    sites = (1, 2) if is_zlab else (0, 2)
    weights = zlab_folder(tmp_path) if is_zlab else speculators_folder(tmp_path, ids=sites)
    head = load_dflash(tmp_path, loaded())
    behind = [0, 3, 1]
    ours = read(head, sites, behind)
    states = torch.cat([hidden_states()[i][0] for i in sites], -1)
    unembedding = hf.lm_head.weight if is_zlab else weights["lm_head.weight"]
    for most, got in zip(ROUNDS, ours, strict=True):
        for b, back in enumerate(behind):
            n = max(2, most - back)
            block = [TEXT[n - 1], *[MASK] * (BLOCK - 1)]
            with torch.inference_mode():
                want = dflash_logits(weights, BLOCKS, states[: n - 1], block, hf.model.embed_tokens.weight, unembedding)
            if not is_zlab:
                known = torch.arange(3, 83, 2)
                want, few = torch.full((BLOCK, VOCAB), -torch.inf), want
                want[:, known] = few
            assert torch.allclose(got[b], want, rtol=1e-5, atol=1e-5)
    assert head.target_sites == ((("S", 0), ("S", 1)) if is_zlab else (("pre", 0), ("S", 1)))


def test_the_targets_embedding_is_scaled_as_in_the_target(tmp_path: Path) -> None:
    """Gemma multiplies its embeddings by a number, which transformers keeps for a head's block."""
    weights, hf = zlab_folder(tmp_path), hf_model("gemma3")
    head = load_dflash(tmp_path, loaded("gemma3"))
    kept, tokens = head.new_cache(2, 64), [5, *[MASK] * (BLOCK - 1)]
    states = torch.stack([hidden_states("gemma3")[i][0, :7] for i in (1, 2)], -2)
    head.feed(head.entering(states)[None], kept, [kept.allocate()], [0])
    got = head.read_out(head.run_block(torch.tensor([tokens]), kept, [0], [7])[0])
    with torch.inference_mode():
        embedding = hf.get_input_embeddings()(torch.arange(VOCAB))
        want = dflash_logits(weights, BLOCKS, states.flatten(1), tokens, embedding, hf.lm_head.weight)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-4)  # as large as the embedding's factor


@pytest.mark.slow
def test_a_block_has_speculators_logits(speculators: str, tmp_path: Path) -> None:
    """A head that speculators wrote, with a vocabulary of its own, at several places of one text."""
    block = {**BLOCKS, "layer_types": ["full_attention"] * 2}
    case = dict(
        block=block, draft_vocab_size=40, block_size=BLOCK, mask_token_id=MASK, aux_hidden_state_layer_ids=[0, 2]
    )
    (tmp_path / "case.json").write_text(json.dumps(case))
    copy.deepcopy(loaded().live).save_pretrained(tmp_path / "target")
    anchors, states = [1, 8, 9, 30], torch.stack([hidden_states()[i][0] for i in (0, 2)], -2)
    tensors = {"states": states.flatten(1)[None].contiguous(), "input_ids": torch.tensor([TEXT])}
    save_file({**tensors, "anchors": torch.tensor(anchors)}, tmp_path / "rows.safetensors")
    done = run_script(speculators, "run_dflash.py", [tmp_path])
    assert done.returncode == 0, done.stderr[-2000:]
    head, wanted = load_dflash(tmp_path / "head", loaded()), load_file(tmp_path / "logits.safetensors")["logits"]
    assert head.target_sites == (("pre", 0), ("S", 1))
    for newest, want in zip(anchors, wanted, strict=True):
        kept = head.new_cache(1, 64)
        head.feed(head.entering(states[:newest])[None], kept, [0], [0])
        got = head.read_out(head.run_block(head.block_tokens([TEXT[newest]]), kept, [0], [newest])[0])
        assert torch.allclose(got[:, head.token_ids], want, rtol=1e-5, atol=1e-5)


def zlab_head(folder: Path, target: CachedLM | None = None, **changed: Any) -> BlockHeadLM:
    zlab_folder(folder, **changed)
    return load_dflash(folder, target or loaded())


def test_no_row_of_a_block_survives(tmp_path: Path) -> None:
    """A head whose blocks held other tokens has the keys, the values and the next block of one that never ran them."""
    head = zlab_head(tmp_path)
    states = torch.stack([hidden_states()[i][0] for i in (1, 2)], -2)
    left = []
    for others in ([], [11], [80, 3]):
        kept = head.new_cache(1, 64)
        row, fed = kept.allocate(), 0
        for n in ROUNDS:
            head.feed(head.entering(states[fed : n - 1])[None], kept, [row], [fed])
            for token in others:
                head.run_block(head.block_tokens([token]), kept, [row], [n - 1])
            fed = n - 1
        last = head.run_block(head.block_tokens([TEXT[fed]]), kept, [row], [fed])
        tensors = [tensor[row, :, :fed].clone() for tensor in (*kept.keys, *kept.values)]
        left.append([*tensors, last])
    for other in left[1:]:
        assert all(bitwise(a, b) for a, b in zip(left[0], other, strict=True))


def test_states_of_a_block_are_captured_and_edited(tmp_path: Path) -> None:
    """S is the sum of the stream before and of T and C; the last S gives the logits; an edit reaches them."""
    head = zlab_head(tmp_path)
    states = torch.stack([hidden_states()[i][0, :9] for i in (1, 2)], -2)
    kept = head.new_cache(1, 64)
    head.feed(head.entering(states)[None], kept, [kept.allocate()], [0])
    tokens = head.block_tokens([TEXT[9]])
    seen: dict[tuple[str, int], Tensor] = {}
    sites = [(site, layer) for site in ("pre", "S", "T", "C", "q", "k", "v", "z") for layer in range(2)]
    with head.capturing(sites, lambda site, layer, value: seen.update({(site, layer): value.clone()})):
        out = head.run_block(tokens, kept, [0], [9])
        head.feed(head.entering(states)[None], kept, [0], [0])
    assert bitwise(seen["S", 1], out) and seen["z", 0].shape == (1, BLOCK, 4, 6)
    assert bitwise(seen["pre", 0], hf_model().get_input_embeddings()(tokens).detach())
    for layer in range(2):
        total = seen["pre", layer] + seen["T", layer] + seen["C", layer]
        assert torch.allclose(seen["S", layer], total, atol=1e-6)
        assert all(bool(seen[site, layer].any()) for site in "TC")
    with pytest.raises(ModelError, match="is a draft head"):
        head.forward(tokens, kept, [0], [9])
    with head.editing([("S", 0)], lambda site, layer, value: value * 2):
        edited = head.run_block(tokens, kept, [0], [9])
    assert not torch.allclose(edited, out)
    with pytest.raises(ModelError, match="attend to later rows"), head.capturing([("pattern", 0)], print):
        pass
    assert head.lacking(["pattern"]) and not head.lacking(["z"])


def test_a_head_in_the_targets_dtype(tmp_path: Path) -> None:
    head = zlab_head(tmp_path, loaded("llama", torch.bfloat16))
    assert head.dtype == torch.bfloat16 and head.d_vocab == VOCAB and head.fingerprint()["architecture"] == "DFlashHead"


# -- what is refused


def without(name: str) -> Callable[[Path], None]:
    """Drops a tensor of a folder."""

    def drop(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")

    return drop


def with_tensor(name: str, tensor: Tensor) -> Callable[[Path], None]:
    """Adds or replaces a tensor of a folder."""
    return lambda folder: save_file(
        load_file(folder / "model.safetensors") | {name: tensor}, folder / "model.safetensors"
    )


def own(**changed: Any) -> dict[str, Any]:
    return {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": MASK} | changed}


@pytest.mark.parametrize(
    ("changed", "damage", "why"),
    [
        (dict(hidden_size=64), None, "another model: its hidden_size is 64, that of .* is 32"),
        (dict(vocab_size=96), None, "another model: its vocab_size is 96, that of .* is 97"),
        (dict(num_target_layers=4), None, "another model: its num_target_layers is 4, that of .* is 3"),
        (own(mask_token_id=VOCAB), None, "mask token 97 is outside of the 97 tokens"),
        (own(mask_token_id=None), None, "lacks a block_size above 1, mask_token_id"),
        (dict(block_size=1), None, "lacks a block_size above 1"),
        (own(target_layer_ids=[0, 2]), None, "the stream after 3 blocks; .* after 0 to 2"),
        (own(target_layer_ids=[0, -2]), None, "the stream after -1 blocks"),
        (dict(dflash_config=None), None, "lacks a block_size"),
        (dict(layer_types=["sliding_attention"] * 2, sliding_window=16), None, "sliding layers"),
        ({}, without("hidden_norm.weight"), "hidden_norm.weight must be of shape .* missing"),
        ({}, with_tensor("fc.weight", torch.zeros(32, 96)), r"fc.weight must be of shape \(32, 64\).* is \(32, 96\)"),
        ({}, with_tensor("layers.0.self_attn.q_proj.bias", torch.zeros(24)), "holds layers.0.self_attn.q_proj.bias"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    changed: dict[str, Any], damage: Callable[[Path], None] | None, why: str, tmp_path: Path
) -> None:
    if changed == dict(dflash_config=None):
        changed = {"dflash_config": {}}
    zlab_folder(tmp_path / "head", **changed)
    if damage is not None:
        damage(tmp_path / "head")
    with pytest.raises(ValueError, match=why) as refusal:
        load_dflash(tmp_path / "head", loaded())
    assert "head" in str(refusal.value)


def test_other_heads_and_settings_of_speculators_are_refused(tmp_path: Path) -> None:
    speculators_folder(tmp_path / "a", sample_from_anchor=True)
    with pytest.raises(ModelError, match="sample_from_anchor"):
        load_dflash(tmp_path / "a", loaded())
    speculators_folder(tmp_path / "b")
    with_tensor("d2t", torch.full((40,), 90))(tmp_path / "b")
    with pytest.raises(ValueError, match="d2t gives ids 90 to 129"):
        load_dflash(tmp_path / "b", loaded())
    speculators_folder(tmp_path / "c", speculators_model_type="eagle3")
    with pytest.raises(ModelError, match="c is no DFlash head"):
        load_dflash(tmp_path / "c", loaded())


def test_a_head_shares_the_targets_embedding_and_unembedding(tmp_path: Path) -> None:
    target = loaded("qwen3")
    head = zlab_head(tmp_path, target)
    assert head.unembedding.data_ptr() == target.unembedding.data_ptr()
    mine, its_own = (live.get_input_embeddings().weight for live in (head.live, target.live))
    assert mine.data_ptr() == its_own.data_ptr()
    assert its_own.requires_grad and target.live.get_output_embeddings().weight.requires_grad
