"""The plain model beside the bridge: same weights, same cache, same states, and bits that a fixed shape fixes."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.hf.bridge import BridgeLM
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.attention import BY_REQUEST
from cacheprobe.ops.compiled import operations
from cacheprobe.ops.compiled.basics import COMPILER
from cacheprobe.ops.compiled.queue import Queue
from cacheprobe.ops.equality import bitwise, close
from tests.compiled import on_loops
from tests.feeding import GARBAGE, fed_in_parts, texts
from tests.shapes import fixed_pass, serving
from tests.tiny import PROMPTS, QUICK_FAMILIES, SMALL, VOCAB, by_modules, hf_model, loaded

pytestmark = pytest.mark.determinism

SUMS = "fused attention reorders sums"


def hooks_on(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.fixture(scope="module", params=QUICK_FAMILIES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[BridgeLM, PlainLM]]:
    model = loaded(request.param)
    yield model.bridged(), model


def test_the_plain_model_equals_the_bridge(pair: tuple[BridgeLM, PlainLM]) -> None:
    """Ragged rows, pads, a third of the blocks wrong and rolled back."""
    bridge, plain = pair
    theirs, ours = fed_in_parts(bridge, texts(40, 31, 23)), fed_in_parts(plain, texts(40, 31, 23))
    assert sorted(ours) == sorted(theirs) and len(ours) == 3 * (1 + 1 + 3 * 3 + 2 * 3)
    for what, expected in theirs.items():
        assert close(ours[what], expected, 1e-5, because=SUMS), what
    assert not close(theirs["T 1 row 0"], theirs["C 1 row 0"], 1e-1, because="the control: sites differ")


def test_it_shares_every_tensor(pair: tuple[BridgeLM, PlainLM]) -> None:
    bridge, plain = pair
    there = {tensor.data_ptr() for tensor in bridge.bridge.original_model.state_dict(keep_vars=True).values()}
    there |= {tensor.data_ptr() for tensor in bridge.bridge.original_model.buffers()}
    held = [*plain.model.parameters(), *plain.model.buffers()]
    assert len(held) > 20 and all(tensor.data_ptr() in there for tensor in held)
    is_tied = plain.model.get_output_embeddings().weight is plain.model.get_input_embeddings().weight
    assert is_tied == plain.model.config.tie_word_embeddings


def test_the_bridge_keeps_its_attention(pair: tuple[BridgeLM, PlainLM]) -> None:
    bridge, plain = pair
    assert plain.model.config is not bridge.config
    assert all(m.config is plain.model.config for m in plain.model.modules() if hasattr(m, "config"))
    before = bridge.config._attn_implementation
    by_modules(plain)
    assert bridge.config._attn_implementation == before


def test_early_stop_is_the_state_after_that_block(pair: tuple[BridgeLM, PlainLM]) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    for model in pair:
        seen: list[Tensor] = []
        sites = [("pre", 0), *(("S", layer) for layer in range(3))]
        with model.capturing(sites, lambda site, layer, value, seen=seen: seen.append(value)):
            model.forward(ids, model.new_cache(1, 8), [0], [0])
        for num_layers, expected in enumerate(seen):
            cache = model.new_cache(1, 8)
            assert bitwise(model.forward(ids, cache, [0], [0], num_layers=num_layers), expected)
            assert [bool(keys.any()) for keys in cache.keys] == [layer < num_layers for layer in range(3)]


@pytest.mark.parametrize(("functional", "can_choose"), [(True, True), (False, False)])
def test_chosen_logits_are_those_of_the_slots(
    pair: tuple[BridgeLM, PlainLM], functional: bool, can_choose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order asked for, with and without a model that takes logits_to_keep."""
    plain = pair[1] if functional else by_modules(pair[1])
    monkeypatch.setattr(plain, "_can_choose_logits", can_choose)
    assert list(plain.logit_choice([3, 1])) == ["logits_to_keep"] * can_choose and plain.logit_choice(None) == {}
    ids, cache = torch.tensor([[5, 6, 7, 8]]), plain.new_cache(1, 8)
    every = plain.forward(ids, cache, [0], [0])
    chosen = plain.forward(ids, cache, [0], [0], logit_slots=[3, 1])
    why = "a product of two rows may sum in another order than one of four"
    assert chosen.shape == (1, 2, VOCAB) and close(chosen, every[:, [3, 1]], 1e-6, because=why)
    assert not close(chosen, every[:, [1, 3]], 1e-2, because="the control: other slots, other logits")


def test_fingerprint_tells_the_paths_apart(pair: tuple[BridgeLM, PlainLM]) -> None:
    bridge, plain = pair
    theirs, ours = bridge.fingerprint(), plain.fingerprint()
    assert ours["path"] == "plain"
    assert ours["attention"] == BY_REQUEST and COMPILER in BY_REQUEST
    assert {key for key in ours if ours[key] != theirs.get(key)} == {"path", "attention", "products"}


def test_it_is_a_cached_lm() -> None:
    plain = loaded()
    assert isinstance(plain, CachedLM)
    assert (plain.name, plain.n_layers, plain.d_vocab, plain.dtype) == ("LlamaForCausalLM", 3, VOCAB, torch.float32)
    states = torch.randn(2, 32)
    assert bitwise(plain.read_out(states), plain.bridged().read_out(states)) and plain.token_texts([3]) == ["<3>"]
    with pytest.raises(ModelError, match="no layer 7"), plain.capturing([("S", 7)], print):
        pass


@pytest.mark.parametrize("functional", [True, False])
def test_hooks_and_threads_are_restored_after_an_exception(functional: bool) -> None:
    plain = loaded() if functional else by_modules(loaded())
    cache, ids = plain.new_cache(1, 8), torch.tensor([[1, 2]])
    threads = torch.get_num_threads()
    captured: list[int] = []

    def fail(site: str, layer: int, value: Tensor) -> None:
        raise RuntimeError("the listener failed")

    with pytest.raises(RuntimeError, match="the listener failed"), plain.capturing([("T", 1)], fail):
        plain.forward(ids, cache, [0], [0], num_layers=2)
    assert hooks_on(plain.model) == 0 and torch.get_num_threads() == threads
    with plain.capturing([("T", 1)], lambda site, layer, value: captured.append(layer)):
        plain.forward(ids, cache, [0], [0])
        plain.forward(ids[:, :1], cache, [0], [0])
    assert captured == [1, 1]
    assert hooks_on(plain.model) == 0 and torch.get_num_threads() == threads


def test_what_a_listener_returns_changes_nothing() -> None:
    plain = loaded()
    ids = torch.tensor([[1, 2]])
    expected = plain.forward(ids, plain.new_cache(1, 8), [0], [0])
    with plain.capturing([("pre", 0), ("T", 1), ("S", 1)], lambda site, layer, value: value * 0):
        assert bitwise(plain.forward(ids, plain.new_cache(1, 8), [0], [0]), expected)


@pytest.mark.parametrize(
    ("family", "dtype", "shape"),
    [("llama", torch.bfloat16, (4, 8)), ("gpt-neox", torch.float32, (1, 8)), ("gemma3", torch.bfloat16, (4, 1))],
    ids=str,
)
def test_fixed_shapes_fix_the_bits(family: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Neither its place in the batch, nor the other rows, nor what is stale, nor its slot in the window matter."""
    plain = loaded(family, dtype)
    (text,) = texts(40)
    at_least, width = shape
    batch = serving(plain, width, at_least=at_least, capacity=64)
    num_rows = 2 * max(batch, 4)

    def measured(seed: int, index: int, row: int, start: int, garbage: float) -> tuple[Tensor, ...]:
        """Logits of position 31, and keys and values up to it, of one row among others."""
        generator = torch.Generator().manual_seed(seed)
        cache = plain.new_cache(num_rows, 64)
        for held in (*cache.keys, *cache.values):
            held.normal_(0, garbage, generator=generator)
        others = [r for r in torch.randperm(num_rows, generator=generator).tolist() if r != row][: batch - 1]
        rows = [*others[:index], row, *others[index:]]
        for begin in range(0, 24, 8):  # the prompt, in chunks of one shape
            fixed_pass(plain, text[None, begin : begin + 8], cache, [row], [begin], is_prefill=True)
        for begin in range(24, 32, width):  # generated tokens, in the shape that may compute them again
            window = text[None, begin : begin + width].expand(batch, -1)
            fixed_pass(plain, window, cache, rows, [begin] * batch)
        for other in others:
            noise = torch.randint(0, VOCAB, (1, 8), generator=generator)
            plain.forward(noise, cache, [other], [int(torch.randint(0, 24, (), generator=generator))])
        ids = torch.randint(0, VOCAB, (batch, width), generator=generator)
        starts = torch.randint(0, 40, (batch,), generator=generator).tolist()
        ids[index], starts[index] = text[start : start + width], start
        ids[index, 31 - start + 1 :] = 7 + seed  # rejected, or pads
        logits = fixed_pass(plain, ids, cache, rows, starts)[index, 31 - start]
        return logits, *(held[row, :, :32] for held in (*cache.keys, *cache.values))

    last = batch - 1
    expected = measured(0, 0, 0, 31, 0.0)
    variants = {
        "again": (0, 0, 0, 31, 0.0),
        "other rows": (1, 0, 0, 31, 0.0),
        "stale garbage": (2, 0, 0, 31, GARBAGE),
        "cache row": (3, 0, 5, 31, GARBAGE),
        "batch index": (4, last, 2, 31, GARBAGE),
        **({f"slot {slot}": (5, last, 1, 31 - slot, GARBAGE) for slot in (1, 3, 7)} if width > 1 else {}),
    }
    for what, variant in variants.items():
        assert all(bitwise(a, b) for a, b in zip(measured(*variant), expected, strict=True)), what


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_readings_of_the_loops_are_those_of_the_twin(family: str) -> None:
    """Norm, bias and soft cap as in its twin, on either path; without stored logits too."""
    model = on_loops(cp.load_model(hf_model(family, torch.bfloat16)))
    states = torch.randn(40, model.d_model, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        slow = model.read_out_with_gradients(states)
    made = model.read_out(states)
    assert (made - slow).abs().max() <= slow.abs().max() * torch.finfo(torch.bfloat16).eps
    assert bitwise(made, model.bridged().read_out(states))
    targets = torch.arange(40) % model.d_vocab
    read = model.read_tokens(states, targets, 5)
    wanted = model.operations.readout.of_logits(made, targets, 5)
    if family == "gemma2":  # torch's tanh has other last bits, which rounding to bfloat16 hides in most logits
        assert (read.top_token_ids == wanted.top_token_ids).float().mean() > 0.98
        assert torch.allclose(read.entropy_nats, wanted.entropy_nats, atol=1e-3)
        assert torch.allclose(read.target_logprob_nats, wanted.target_logprob_nats, atol=0.02)
    else:
        assert all(bitwise(here, there) for here, there in zip(read, wanted, strict=True))
    model.use_operations(None)
    assert bitwise(model.read_out(states), slow) and model.read_tokens(states, targets, 5) is None
    assert model.fingerprint()["readings"] == "torch"


def test_loops_read_the_logits_that_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's products are faster than the loops', as in float32 on Intel's processors."""
    monkeypatch.setattr(operations, "choose", lambda *of: operations.LoopChoice(None, "a test"))
    ours, theirs = (cp.load_model(hf_model(), products=products) for products in ("auto", "torch"))
    assert ours.operations is None and theirs.logits_readout is None
    if operations._refusal(ours.dtype, ours.device):
        assert ours.logits_readout is None
        return
    calls: list[int] = []
    read = operations.CompiledReadout.of_logits
    monkeypatch.setattr(
        operations.CompiledReadout, "of_logits", lambda self, *given: (calls.append(1), read(self, *given))[1]
    )
    mine, other = (cp.run(model, PROMPTS[:2], capture="SZ", **SMALL) for model in (ours, theirs))
    found, wanted = (trace.hypotheses().sort_values(["row", "layer"]) for trace in (mine, other))
    assert calls and mine.tokens == other.tokens
    for name in ("row", "layer", "token_id", "rank", "committed_token_id"):
        assert found[name].tolist() == wanted[name].tolist(), name
    assert abs(found.logprob_nats.to_numpy() - wanted.logprob_nats.to_numpy()).max() < 1e-5
    assert mine.fingerprint["readings"] == operations.READ_IN_LOOPS and other.fingerprint["readings"] == "torch"


def test_building_it_draws_no_random_numbers() -> None:
    model = loaded()
    state = torch.get_rng_state()
    by_modules(model)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("functional", [True, False])
def test_every_product_of_a_layer_runs_in_the_loops(functional: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = Queue.product

    def watched(self: Queue, values: Tensor, weight: Tensor, bias: Tensor | None = None, **settings: bool) -> Tensor:
        seen.append(weight.data_ptr())
        return real(self, values, weight, bias, **settings)

    plain = on_loops(cp.load_model(hf_model()))
    plain = plain if functional else by_modules(plain)
    monkeypatch.setattr(Queue, "product", watched)
    linears = [m for m in plain.model.modules() if type(m) is torch.nn.Linear]
    cache = plain.new_cache(1, 32)
    cache.allocate()
    plain.forward(torch.arange(32)[None] % 7, cache, [0], [0])
    assert sorted(seen) == sorted(m.weight.data_ptr() for m in linears)
