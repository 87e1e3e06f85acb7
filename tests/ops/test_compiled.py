"""The loops that numba compiles: their numbers, batch-invariance, the choice between them and torch, and a model on
them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import cacheprobe as cp
from cacheprobe.cli.app import verify
from cacheprobe.ops.compiled import operations as choice
from cacheprobe.ops.compiled import queue
from cacheprobe.ops.compiled.lanes import FLOATS, PAIRS, TILES
from cacheprobe.ops.compiled.operations import CompiledProduct, CompiledReadout, choose
from cacheprobe.ops.equality import bitwise
from cacheprobe.ops.readout import Readout, read_logits
from tests.compiled import on_loops
from tests.tiny import PROMPTS, SMALL, hf_model

pytestmark = pytest.mark.determinism

CPU = torch.device("cpu")
HAS_PAIRS = bool(torch.cpu.get_capabilities().get("avx512_bf16"))
CASES = [(FLOATS, torch.float32), (FLOATS, torch.bfloat16), (FLOATS, torch.float16)]
CASES += [(PAIRS, torch.bfloat16)] if HAS_PAIRS else []
CASES += [(TILES, torch.bfloat16)] if choice._kind(torch.bfloat16, CPU)[0] == TILES else []
NAMES = {FLOATS: "floats", PAIRS: "pairs", TILES: "tiles"}
IDS = [f"{NAMES[kind]}-{str(dtype).removeprefix('torch.')}" for kind, dtype in CASES]
all_cases = pytest.mark.parametrize(("kind", "dtype"), CASES, ids=IDS)
ROUNDING = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def drawn(dtype: torch.dtype, *sizes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


@contextmanager
def on_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("inner", "width"), [(1, 3), (15, 16), (32, 300), (100, 37), (576, 1)])
@all_cases
def test_it_is_a_product(kind: int, dtype: torch.dtype, inner: int, width: int) -> None:
    """To one rounding of the result, or of the largest term where sums cancel."""
    product = CompiledProduct(kind)
    for rows in (1, 2, 3, 4, 5, 7, 8, 25, 70):
        values, weight, bias = drawn(dtype, (rows, inner), (width, inner), (width,))
        for added in (None, bias):
            wanted = linear(values.double(), weight.double(), None if added is None else added.double())
            made = product(values, weight, added)
            assert made.dtype == dtype and made.shape == wanted.shape
            assert bool(((made.double() - wanted).abs() <= wanted.abs() * ROUNDING[dtype] + 3e-5).all())


@all_cases
def test_a_row_is_batch_invariant(kind: int, dtype: torch.dtype) -> None:
    """Of any number of rows, beyond what is held at once too, at any place, on any number of threads: equal bits."""
    product = CompiledProduct(kind)
    values, weight = drawn(dtype, (300, 1000), (302, 1000))
    alone = torch.cat([product(row[None], weight) for row in values])
    for threads in (1, 2, 3):
        with on_threads(threads):
            for rows in (2, 7, 24, 31, 262, 263, 300):
                assert bitwise(product(values[:rows], weight), alone[:rows])
                assert bitwise(product(values[-rows:], weight), alone[-rows:])
            assert bitwise(product(values, weight[5:]), alone[:, 5:]), "an output depends on no other output"
    if dtype == torch.float32:
        assert not bitwise(product(values.flip(-1), weight.flip(-1)), alone), "the control: another order of sums shows"


@all_cases
def test_infinities_and_nan(kind: int, dtype: torch.dtype) -> None:
    values, weight = drawn(dtype, (4, 20), (18, 20))
    values[0, 3], values[1, 4], weight[:, 4] = torch.nan, torch.inf, 1.0
    values[2], weight[6] = torch.finfo(dtype).max, 2.0
    made = CompiledProduct(kind)(values, weight)
    assert bool(made[0].isnan().all()) and bool((made[1] == torch.inf).all())
    assert bool(made[2, 6].isinf()) and bool(made[3].isfinite().all())


def test_views_and_batches() -> None:
    """Values that do not lie in order, and more than two axes."""
    product = CompiledProduct(FLOATS)
    values, weight = drawn(torch.bfloat16, (3, 40, 2), (9, 40))
    turned = values.transpose(1, 2)
    made = product(turned, weight)
    assert made.shape == (3, 2, 9) and bitwise(made, product(turned.contiguous(), weight))


def test_other_types_and_shapes_are_refused() -> None:
    values, weight, bias = drawn(torch.bfloat16, (2, 8), (8, 8), (7,))
    with pytest.raises(TypeError, match=r"not of torch.bfloat16, torch.float32|not of torch.float32, torch.bfloat16"):
        CompiledProduct(FLOATS)(values.float(), weight)
    with pytest.raises(TypeError, match="not of torch.float64"):
        CompiledProduct(FLOATS)(values.double(), weight.double())
    with pytest.raises(TypeError, match="not of torch.float32"):
        CompiledProduct(PAIRS)(values.float(), weight.float())
    with pytest.raises(ValueError, match="width 4"):
        CompiledProduct(FLOATS)(values[:, :4], weight)
    with pytest.raises(ValueError, match=r"bias \(7,\)"):
        CompiledProduct(FLOATS)(values, weight, bias)


def logits_of_all_kinds(dtype: torch.dtype, width: int) -> Tensor:
    """Random rows, rows of few values, where most are equal, and tokens that cannot occur."""
    (spread,) = drawn(dtype, (7, width))
    rows = torch.cat((spread * 6, spread.float().round().to(dtype), torch.zeros(1, width, dtype=dtype)))
    rows[3, width // 3 + 1 :] = -torch.inf
    return torch.cat((rows, rows * 1e3))


def assert_readings_agree(made: Readout, wanted: Readout) -> None:
    assert bool((made.top_token_ids == wanted.top_token_ids).all())
    assert bool((made.target_rank == wanted.target_rank).all())
    for name in ("top_logprob_nats", "entropy_nats", "target_logprob_nats"):
        here, there = getattr(made, name), getattr(wanted, name)
        assert here.dtype == torch.float32
        assert torch.allclose(here, there, rtol=1e-5, atol=2e-5, equal_nan=True), name


@pytest.mark.parametrize("width", [1, 129, 513, 5000])
@all_cases
def test_readings_equal_their_twin(kind: int, dtype: torch.dtype, width: int) -> None:
    rows = logits_of_all_kinds(dtype, width)
    places = torch.arange(len(rows)) * 37 % width
    for targets in (places, torch.where(places % 2 == 0, -1, places), torch.full_like(places, width - 1)):
        made = CompiledReadout(CompiledProduct(kind)).of_logits(rows, targets, 5)
        assert_readings_agree(made, read_logits(rows.double(), targets, 5))  # float32 rounds logits of thousands


@pytest.mark.parametrize(("inner", "width"), [(64, 1), (100, 1300)])
@all_cases
def test_readings_of_states_have_the_bits_of_their_logits(
    kind: int, dtype: torch.dtype, inner: int, width: int
) -> None:
    """Whatever the number of rows and threads: a row alone, and every row of a large tile."""
    product = CompiledProduct(kind)
    readout = CompiledReadout(product)
    states, weight, bias = drawn(dtype, (70, inner), (width, inner), (width,))
    targets = torch.arange(70) * 37 % width
    targets[::3] = -1
    for added in (None, bias):
        wanted = readout.of_logits(product(states, weight, added), targets, 5)
        for threads in (1, 2, 3):
            with on_threads(threads):
                made = readout.of_states(states, weight, added, targets, 5)
                alone = readout.of_states(states[9:10], weight, added, targets[9:10], 5)
            assert all(bitwise(here, there) for here, there in zip(made, wanted, strict=True))
            assert all(bitwise(here, there[9:10]) for here, there in zip(alone, wanted, strict=True))


@all_cases
def test_readings_of_capped_logits(kind: int, dtype: torch.dtype) -> None:
    """As Gemma 2 caps them, each step rounded; a row has the same bits alone, and NaN stays NaN."""
    product = CompiledProduct(kind)
    readout = CompiledReadout(product)
    states, weight = drawn(dtype, (70, 64), (1300, 64))
    targets = torch.arange(70) * 17
    logits = (product(states, weight) / 5.0).tanh() * 5.0
    made, wanted = readout.of_states(states, weight, None, targets, 5, 5.0), read_logits(logits, targets, 5)
    near = 2e-5 if dtype == torch.float32 else 5 * ROUNDING[dtype]  # torch's tanh has other last bits
    for name in ("top_logprob_nats", "entropy_nats", "target_logprob_nats"):
        assert torch.allclose(getattr(made, name), getattr(wanted, name), atol=near), name
    assert (made.target_rank - wanted.target_rank).abs().float().mean() < (0.1 if dtype == torch.float32 else 20)
    alone = readout.of_states(states[9:10], weight, None, targets[9:10], 5, 5.0)
    assert all(bitwise(here, there[9:10]) for here, there in zip(alone, made, strict=True))
    assert float(made.top_logprob_nats.max()) < float(readout.of_states(states, weight, None, targets, 5)[1].max())
    states[3, 5] = torch.nan
    assert readout.of_states(states, weight, None, targets, 5, 5.0).entropy_nats.isnan().nonzero().tolist() == [[3]]


@all_cases
def test_readings_of_what_is_no_number(kind: int, dtype: torch.dtype) -> None:
    """A row with a NaN or an infinite logit has no distribution; the other rows keep theirs."""
    product = CompiledProduct(kind)
    readout = CompiledReadout(product)
    states, weight = drawn(dtype, (3, 64), (200, 64))
    targets = torch.tensor([1, 2, 3])
    clean = readout.of_states(states, weight, None, targets, 3)
    states[0, 5], states[1, 3] = torch.nan, torch.inf
    logits = product(states, weight)
    for made in (readout.of_states(states, weight, None, targets, 3), readout.of_logits(logits, targets, 3)):
        assert made.entropy_nats.isnan().tolist() == [True, True, False]
        assert made.target_logprob_nats.isnan().tolist() == [True, True, False]
        assert all(bitwise(here[2], there[2]) for here, there in zip(made, clean, strict=True))
        assert_readings_agree(made, read_logits(logits, targets, 3))


@pytest.mark.parametrize(("chunk", "others"), [(slice(0, 512), torch.nan), (slice(1536, 1600), -torch.inf)])
def test_a_chunk_without_a_number_is_noticed(chunk: slice, others: float) -> None:
    """NaN alone, or beside tokens that cannot occur: the row has no distribution, as torch's has none."""
    (logits,) = drawn(torch.float32, (2, 1600))
    logits[0, chunk] = others
    logits[0, chunk.start + 3] = torch.nan
    targets = torch.tensor([5, 6])
    made = CompiledReadout(CompiledProduct(FLOATS)).of_logits(logits, targets, 3)
    assert made.entropy_nats.isnan().tolist() == read_logits(logits, targets, 3).entropy_nats.isnan().tolist()
    assert made.entropy_nats.isnan().tolist() == [True, False]


def test_what_the_loops_cannot_read_is_refused_or_left_to_torch() -> None:
    product = CompiledProduct(FLOATS)
    readout = CompiledReadout(product)
    values, weight = drawn(torch.float32, (3, 8), (20, 8))
    with pytest.raises(ValueError, match="of CPU tensors, not of cpu and meta"):
        product(values, weight.to("meta"))
    with pytest.raises(IndexError, match="outside the vocabulary of 20"):
        readout.of_states(values, weight, None, torch.tensor([1, 2, 20]), 3)
    with pytest.raises(ValueError, match="no states to read"):
        readout.of_states(values[:0], weight, None, torch.empty(0, dtype=torch.long), 3)
    trained = weight.clone().requires_grad_()
    product(values, trained).sum().backward()
    assert trained.grad is not None and torch.allclose(trained.grad, values.sum(0).expand(20, 8))


def test_a_run_is_verified_on_its_own_operations(tmp_path: Path) -> None:
    """`cacheprobe verify` loads the model as the run had it."""
    hf_model("llama", torch.bfloat16).save_pretrained(tmp_path / "model")
    model = cp.load_model(tmp_path / "model", dtype="bfloat16", progress=False)
    cp.run(model, PROMPTS[:1], **SMALL, path="bridge", deterministic=True).save(tmp_path / "run")
    assert verify(tmp_path / "run", progress=False) == 0


@pytest.mark.parametrize("bias", [torch.arange(10.0)[::2], torch.ones(1).expand(5)], ids=["strided", "expanded"])
def test_a_bias_may_be_a_view(bias: Tensor) -> None:
    values, weight = torch.zeros(2, 3), torch.zeros(5, 3)
    assert torch.equal(CompiledProduct(FLOATS)(values, weight, bias), bias.expand(2, 5))


def test_a_weight_without_outputs_is_torchs() -> None:
    assert CompiledProduct(FLOATS)(torch.ones(3, 8), torch.ones(0, 8)).shape == (3, 0)


@all_cases
def test_denormal_numbers(kind: int, dtype: torch.dtype) -> None:
    """Products of bfloat16 in hardware take them as zero; float32 arithmetic does not."""
    if dtype == torch.bfloat16:
        values, weight = torch.full((1, 32), 2e-39, dtype=dtype), torch.full((16, 32), 2.0**126, dtype=dtype)
        made, exact = CompiledProduct(kind)(values, weight), linear(values.double(), weight.double())
        assert torch.equal(made.double(), torch.zeros(1, 16).double() if kind != FLOATS else exact.to(dtype).double())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_a_model_runs_on_them(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic requests equal the reference bit for bit; the fingerprint names the loops; in float32 the states
    are torch's, to what another order of sums changes."""
    model = on_loops(cp.load_model(hf_model(family, dtype)))
    calls: list[int] = []
    real = queue.Queue.product
    monkeypatch.setattr(queue.Queue, "product", lambda self, *of, **by: (calls.append(1), real(self, *of, **by))[1])
    trace = cp.run(model, PROMPTS, **SMALL, deterministic=True, capture="STCZ")
    assert calls and trace.fingerprint["products"] == trace.fingerprint["readings"] == model.operations.text
    assert cp.verify(trace, model, progress=False).is_equal
    plain = cp.load_model(hf_model(family, dtype), products="torch")
    with pytest.raises(ValueError, match="products"):
        cp.verify(trace, plain, progress=False)
    if dtype == torch.float32:
        other = cp.run(plain, PROMPTS, **SMALL, deterministic=True, capture="STCZ")
        for site in "STC":
            assert torch.allclose(trace.states(site, 1, 0), other.states(site, 1, 0), atol=1e-5)
        here, there = trace.hypotheses(), other.hypotheses()
        assert (here.entropy_nats - there.entropy_nats).abs().max() < 1e-4


def test_the_setting_chooses_the_operations() -> None:
    assert cp.load_model(hf_model("llama"), products="torch").operations is None
    assert cp.load_model(hf_model("llama")).operations is choose(torch.float32, CPU).operations
