"""RWKV and xLSTM, whose states are in objects of their own: two modules with states in a block, a stream that
transformers halves, the norm inside block 0, and texts in chunks."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RwkvConfig, RwkvForCausalLM

import cacheprobe as cp
from cacheprobe.kvcache.recurrent import memory_of
from cacheprobe.models.base import ModelError
from cacheprobe.models.feeding import feed
from cacheprobe.models.plain import own_states
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.models.plain.structure import PlainBlock
from cacheprobe.ops.equality import close
from tests.field.original import changing, logits_of, states_of
from tests.field.tiny_family import tiny_family
from tests.twins.equivalence import hf_greedy

TEXT = [3, 10, 17, 24, 31, 38, 45, 52]
SHAPE: dict[str, Any] = dict(window=4, group=2, capacity=128, max_new_tokens=8, progress=False)
SUMS = "sums are reordered"
HALVED = dict(rescale_every=2, layer_norm_epsilon=1e-12)
"""A stream halved after blocks 1 and 3, with an epsilon that does not see it in the norms of blocks."""


def model(live: Any) -> PlainLM:
    one = cp.load_model(live, products="torch")
    assert isinstance(one, PlainLM)
    return one


def states(one: PlainLM, text: list[int]) -> dict[tuple[str, int], Tensor]:
    found: dict[tuple[str, int], Tensor] = {}
    places = [("pre", 0), *((site, layer) for site in "STC" for layer in range(one.n_layers))]
    with one.capturing(places, lambda site, layer, value: found.update({(site, layer): value[0].clone()})):
        one.forward(torch.tensor([text]), one.new_cache(1, 32), [0], [0])
    return found


def test_rwkv_is_not_halved_and_s_is_a_sum() -> None:
    original = tiny_family("rwkv", HALVED)
    live = copy.deepcopy(original)
    one = model(live)
    assert one.weights_note == "residual stream not halved every 2 blocks" and live.config.rescale_every == 0
    ours, theirs = states(one, TEXT), states_of(original, one.blocks, TEXT)
    for (site, layer), value in theirs.items():
        assert close(ours[site, layer], value * 2 ** (layer // 2), 1e-5, because=SUMS), (site, layer)
    for layer in range(4):
        below = ours["S", layer - 1] if layer else ours["pre", 0]
        assert close(below + ours["T", layer] + ours["C", layer], ours["S", layer], 1e-5, because=SUMS)
    # the last norm's epsilon of 1e-5 is beside a variance of more than 1, a sixteenth of it if halved twice
    for logits in (feed(one, torch.tensor([TEXT])).out[0], logits_of(live, TEXT)):
        assert close(logits, logits_of(original, TEXT), 1e-4, because="of the last norm's epsilon")


def test_weights_that_a_forward_has_divided_are_multiplied_again() -> None:
    divided, fresh = tiny_family("rwkv", HALVED), tiny_family("rwkv", HALVED)
    before = divided.rwkv.blocks[3].attention.output.weight.detach().clone()
    logits_of(divided, TEXT)
    assert torch.equal(divided.rwkv.blocks[3].attention.output.weight * 2, before)
    ones = [model(live) for live in (divided, fresh)]
    assert ones[0].weights_sha256 == ones[1].weights_sha256
    logits_of(divided, TEXT)  # would divide the shared weights
    first, second = (feed(one, torch.tensor([TEXT])).out for one in ones)
    assert torch.equal(first, second)


def test_packed_weights_that_a_forward_has_divided_are_refused() -> None:
    live = tiny_family("rwkv", HALVED)
    logits_of(live, TEXT)
    first, last = (live.rwkv.blocks[number].attention.output for number in (2, 3))
    last.weight = torch.nn.Parameter(last.weight.to(torch.uint8), requires_grad=False)
    before = first.weight.detach().clone()
    with pytest.raises(ModelError, match="packed weights that its first forward divided; load it again"):
        own_states._RWKV.prepare(live)
    assert torch.equal(first.weight, before)


def test_a_halved_stream_is_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="halves its residual stream every 2 blocks.*config.rescale_every=0"):
        model(tiny_family("rwkv", HALVED).half())
    half = model(tiny_family("rwkv").half())  # four blocks are not halved every six
    assert half.initial[0]["recurrent", 0].dtype == torch.float32
    monkeypatch.setitem(vars(own_states._RWKV), "prepare", lambda live: "")
    with pytest.raises(ModelError, match="something changes the residual stream between block 1 and block 2"):
        model(tiny_family("rwkv", HALVED))


def test_the_stream_begins_after_the_norm_in_block_0() -> None:
    original = tiny_family("rwkv")
    one = model(copy.deepcopy(original))
    assert one.blocks[0].entry == "rwkv.blocks.0.pre_ln" and not one.blocks[1].entry
    ids, vector = torch.tensor([TEXT]), torch.randn(one.d_model, generator=torch.Generator().manual_seed(0))
    start = one.forward(ids, one.new_cache(1, 32), [0], [0], num_layers=0)
    assert torch.equal(start[0], states(one, TEXT)["pre", 0])

    def add(value: Tensor) -> Tensor:
        return value + vector

    with one.editing([("pre", 0)], lambda site, layer, value: add(value)):
        ours = feed(one, ids).out[0]
    entry = PlainBlock(one.blocks[0].entry, "", "", (), ())
    with changing(original, entry, "S", add):
        theirs = logits_of(original, TEXT)
    assert close(ours, theirs, 1e-5, because=SUMS)
    assert not close(ours, logits_of(original, TEXT), 1e-2, because="the vector is as large as the stream")


def test_both_modules_of_a_block_start_from_their_own_states() -> None:
    original = tiny_family("rwkv")
    one = model(copy.deepcopy(original))
    held = one.new_cache(1, 32)
    one.forward(torch.tensor([TEXT]), held, [0], [0])
    memory = memory_of(held)
    assert memory is not None
    keys = [("conv", 0), ("conv", 1), ("recurrent", 0)]
    assert [sorted(memory.after(layer, 0, 5)) for layer in range(4)] == [keys] * 4
    right = logits_of(original, TEXT)
    cache = one.new_cache(1, 32)
    parts = [one.forward(torch.tensor([part]), cache, [0], [at]) for at, part in ((0, TEXT[:5]), (5, TEXT[5:]))]
    for found in (feed(one, torch.tensor([TEXT])).out[0], torch.cat(parts, dim=1)[0]):
        assert close(found, right, 1e-5, because=SUMS)


@pytest.mark.slow
def test_the_config_of_rwkv_4_169m() -> None:
    """With random weights and few tokens: the published sizes, and a stream halved after blocks 5 and 11."""
    sizes = dict(vocab_size=600, hidden_size=768, intermediate_size=3072, num_hidden_layers=12)
    with torch.device("meta"):  # transformers' own random weights take a minute
        live = RwkvForCausalLM(RwkvConfig(**sizes, context_length=1024, rescale_every=6))
    live = live.to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(1)
    for weight in live.parameters():
        torch.nn.init.normal_(weight, float(weight.dim() < 2), 0.3 if weight.dim() < 2 else 0.04, generator=generator)
    prompt = [510, 379, 310, 85]
    text = [*prompt, *hf_greedy(live, prompt, 5)]
    drafter = cp.drafters.Scripted(lambda state: [text[len(state.token_ids)], 17])
    trace = cp.run(model(live), [prompt], drafter=drafter, capture=None, **{**SHAPE, "max_new_tokens": 5})
    assert 0 < trace.num_rolled_back < trace.num_drafted
    assert trace.committed(0) == text[4:]


def test_time_mixing_may_be_wider_than_the_stream() -> None:
    """transformers' own list of states has the stream's width, so that it cannot generate with such a model."""
    original = tiny_family("rwkv", {"attention_hidden_size": 64})
    one = model(copy.deepcopy(original))
    assert one.state_shapes == dict.fromkeys(range(4), (64, 3))
    assert close(feed(one, torch.tensor([TEXT])).out[0], logits_of(original, TEXT), 1e-5, because=SUMS)


@pytest.mark.parametrize("family", ["rwkv", pytest.param("xlstm", marks=pytest.mark.slow)])
def test_drafts_in_bfloat16_leave_the_bits_of_the_oracle(family: str) -> None:
    one = model(tiny_family(family).bfloat16())
    trace = cp.run(one, [TEXT], drafter=cp.drafters.EarlyExit(1), deterministic=True, **SHAPE)
    assert trace.num_rolled_back
    assert trace.digest(0) == cp.reference(one, [TEXT], **SHAPE).digest(0)


@pytest.mark.slow
def test_texts_that_xlstm_computes_in_chunks() -> None:
    """From 64 tokens on, transformers' forward computes chunks; `generate` then goes on from their last state."""
    text = [(7 * i) % 89 for i in range(80)]
    original = tiny_family("xlstm")
    one = model(copy.deepcopy(original))
    assert close(feed(one, torch.tensor([text])).out[0], logits_of(original, text), 1e-4, because=SUMS)
    trace = cp.run(one, [text], sampling=cp.SamplingParams(stop_token_ids=()), deterministic=True, **SHAPE)
    assert trace.committed(0) == hf_greedy(original, text, 8)


def test_xlstm_is_not_fed_more_than_it_takes_at_once() -> None:
    one = model(tiny_family("xlstm", {"max_inference_chunksize": 32}))
    with pytest.raises(ValueError, match="exceed the model's context of 32"):
        cp.run(one, [list(range(40))], **SHAPE)
