"""Products that a C++ compiler makes here: their numbers, batch-invariance, and the error without a compiler."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.fast.hooked_hf import HookedHF
from cacheprobe.ops import wide_product
from cacheprobe.ops.compiled import build
from cacheprobe.ops.compiled.block import CompiledBlock
from cacheprobe.ops.compiled.build import CompilerError
from cacheprobe.ops.compiled.product import CompiledProduct
from cacheprobe.ops.compiled.readout import CompiledReadout
from cacheprobe.ops.equality import bitwise
from cacheprobe.ops.plain import rms_norm
from cacheprobe.ops.readout import read_logits
from tests.tiny import PROMPTS, SMALL, hf_model

pytestmark = pytest.mark.determinism


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def product(folder: Path) -> CompiledProduct:
    return CompiledProduct(folder)


def drawn(*sizes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).bfloat16() for size in sizes]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [1, 3, 16, 37, 100])
@pytest.mark.parametrize("inner", [1, 15, 16, 100, 576])
def test_it_is_a_product(product: CompiledProduct, inner: int, width: int, threads: int) -> None:
    """To a unit in the last place of the result, or of the largest term where sums cancel."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 2, 3, 4, 5, 7, 8, 25, 70):
            values, weight, bias = drawn((rows, inner), (width, inner), (width,))
            for added in (None, bias):
                wanted = torch.nn.functional.linear(
                    values.double(), weight.double(), None if added is None else added.double()
                )
                far = (product(values, weight, added).double() - wanted).abs()
                assert bool((far <= wanted.abs() * 2**-8 + 1e-5).all())
    finally:
        torch.set_num_threads(before)


def test_a_row_is_batch_invariant(product: CompiledProduct) -> None:
    """Of any number of rows, beyond what is held at once too, at any place, on any number of threads: the very same."""
    values, weight = drawn((300, 1000), (300, 1000))
    alone = torch.cat([product(row[None], weight) for row in values])
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (2, 7, 24, 31, 262, 263, 300):
            assert bitwise(product(values[:rows], weight), alone[:rows])
            assert bitwise(product(values[-rows:], weight), alone[-rows:])
    torch.set_num_threads(before)
    backwards = product(values.flip(-1), weight.flip(-1))
    assert not bitwise(backwards, alone), "the control: another order of sums shows"


def test_what_is_no_number_stays_none(product: CompiledProduct) -> None:
    values, weight = drawn((4, 20), (18, 20))
    values[0, 3], values[1, 4], values[2] = torch.nan, torch.inf, 3e38
    weight[:, 4] = 1.0
    made = product(values, weight)
    assert bool(made[0].isnan().all()) and bool((made[1] == torch.inf).all())
    assert bool(made[2].isinf().any()) and bool(made[3].isfinite().all())


def test_views_and_batches(product: CompiledProduct) -> None:
    """Values that do not lie in order, and more than two axes."""
    values, weight = drawn((3, 40, 2), (9, 40))
    turned = values.transpose(1, 2)
    made = product(turned, weight)
    assert made.shape == (3, 2, 9) and bitwise(made, product(turned.contiguous(), weight))


def test_other_types_and_shapes_are_refused(product: CompiledProduct) -> None:
    values, weight = drawn((2, 8), (8, 8))
    with pytest.raises(TypeError, match="bfloat16, not torch.float32"):
        product(values.float(), weight)
    with pytest.raises(ValueError, match="width 4"):
        product(values[:, :4], weight)


def test_it_is_compiled_once(folder: Path, product: CompiledProduct, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"product-{product.digest}.so" in [path.name for path in folder.iterdir()]
    monkeypatch.setattr(build, "_compile", lambda *of: pytest.fail("it was compiled again"))
    assert CompiledProduct(folder).digest == product.digest


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None here, one that fails, one that makes something else: said, and nothing is left behind."""
    build.compiler.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerError, match=r"no C\+\+ compiler was found \(no-such-compiler\).*leave out"):
        CompiledProduct(tmp_path / "none")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(CompilerError, match="exit status 1"):
        CompiledProduct(tmp_path / "fails")
    monkeypatch.delenv("CXX")
    build.compiler.cache_clear()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOUTPUTS=0"))
    with pytest.raises(CompilerError, match="exit status"):
        CompiledProduct(tmp_path / "wrong")
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_wrong_product_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may be wrong: what it made is tried before it is relied on."""
    honest = build._compile
    monkeypatch.setattr(build, "_compile", lambda source, path: honest(source.replace("sums + added", "sums"), path))
    with pytest.raises(CompilerError, match="away from torch's"):
        CompiledProduct(tmp_path)


@pytest.fixture(scope="module")
def block(folder: Path) -> CompiledBlock:
    return CompiledBlock(folder)


@pytest.mark.parametrize("width", [2, 16, 30, 64, 576, 1000])
def test_norms_and_rotations_equal_their_twins(block: CompiledBlock, width: int) -> None:
    """The norm to a unit in the last place of either of its two roundings; the rotation bit for bit."""
    rows, weight, heads, cos, sin = drawn(
        (70, width), (width,), (2, 35, 3, width), (2, 35, 1, width), (1, 35, 1, width)
    )
    rows[1], rows[2] = rows[1] * 1e-20, rows[2] * 1e18
    made, wanted = block.rms_norm(rows, weight, 1e-6), rms_norm(rows, weight, 1e-6)
    assert bool(((made.float() - wanted.float()).abs() <= wanted.float().abs() * 2**-7).all())
    first, second = heads.chunk(2, -1)
    turned = (heads * cos) + torch.cat((second, first), -1) * sin
    assert bitwise(block.turn_(heads.clone(), cos, sin), turned)


def test_a_norm_is_batch_invariant(block: CompiledBlock) -> None:
    rows, weight = drawn((300, 576), (576,))
    whole = block.rms_norm(rows, weight, 1e-5)
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert bitwise(torch.cat([block.rms_norm(row[None], weight, 1e-5) for row in rows]), whole)
    torch.set_num_threads(before)


def test_norms_and_rotations_of_what_they_are_not_for(block: CompiledBlock) -> None:
    rows, weight, heads, cos = drawn((3, 8), (8,), (1, 4, 2, 8), (1, 4, 1, 8))
    rows[0, 1] = torch.nan
    assert block.rms_norm(rows, weight, 1e-5).isnan().any(-1).tolist() == [True, False, False]
    with pytest.raises(TypeError, match="bfloat16, not torch.float32"):
        block.rms_norm(rows.float(), weight, 1e-5)
    with pytest.raises(ValueError, match="width 8 are not scaled by 7"):
        block.rms_norm(rows, weight[:7], 1e-5)
    with pytest.raises(ValueError, match="in order"):
        block.turn_(heads.transpose(1, 2), cos, cos)


def test_a_wrong_norm_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = build._compile
    monkeypatch.setattr(
        build,
        "_compile",
        lambda source, path: honest(source.replace("folded(squares) / width", "folded(squares)"), path),
    )
    with pytest.raises(CompilerError, match="norm or rotation"):
        CompiledBlock(tmp_path)


@pytest.fixture(scope="module")
def readout(folder: Path) -> CompiledReadout:
    return CompiledReadout(folder)


@pytest.mark.parametrize("width", [1, 5, 127, 128, 129, 300, 5000])
def test_readings_equal_their_twin(readout: CompiledReadout, width: int) -> None:
    """Random rows, rows of few values, where most are equal, and tokens that cannot occur."""
    (spread,) = drawn((7, width))
    rows = torch.cat((spread * 6, spread.float().round().bfloat16(), torch.zeros(1, width).bfloat16()))
    rows[3, width // 3 + 1 :] = -torch.inf
    rows = torch.cat((rows, rows * 1e3))
    places = torch.arange(len(rows)) * 37 % width
    for targets in (places, torch.where(places % 2 == 0, -1, places), torch.full_like(places, width - 1)):
        made, wanted = readout(rows, targets, 5), read_logits(rows, targets, 5)
        assert bool((made.top_token_ids == wanted.top_token_ids).all())
        assert bool((made.target_rank == wanted.target_rank).all())
        for name in ("top_logprob_nats", "entropy_nats", "target_logprob_nats"):
            here, there = getattr(made, name), getattr(wanted, name)
            assert torch.allclose(here, there, rtol=1e-5, atol=2e-5, equal_nan=True), name


def test_a_reading_is_batch_invariant(readout: CompiledReadout) -> None:
    (logits,) = drawn((40, 1000))
    targets = torch.arange(40)
    whole = readout(logits, targets, 3)
    for at in (0, 17, 39):
        alone = readout(logits[at : at + 1], targets[at : at + 1], 3)
        assert all(bitwise(one, many[at : at + 1]) for one, many in zip(alone, whole, strict=True))


def test_readings_of_what_is_no_number(readout: CompiledReadout) -> None:
    """Not hidden: where a logit is NaN or infinite there is no distribution."""
    (logits,) = drawn((3, 200))
    logits[0, 150], logits[1, 3] = torch.nan, torch.inf
    made = readout(logits, torch.tensor([1, 2, 3]), 3)
    assert made.entropy_nats.isnan().tolist() == [True, True, False]
    assert made.target_logprob_nats.isnan().tolist() == [True, True, False]


def test_a_wrong_readout_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = build._compile
    wrong = ("start + i < target", "start + i <= target")
    monkeypatch.setattr(build, "_compile", lambda source, path: honest(source.replace(*wrong), path))
    with pytest.raises(CompilerError, match="another target_rank than torch's"):
        CompiledReadout(tmp_path)


def compiled_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CachedLM:
    monkeypatch.setenv("CACHEPROBE_CACHE", str(folder))
    monkeypatch.setattr(wide_product, "wide_rows", lambda dtype, device: 32 if dtype == torch.bfloat16 else None)
    return cp.load_model(hf_model("llama", torch.bfloat16), products="compiled")


def test_a_model_runs_on_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic requests say what they say alone, bit for bit; the fingerprint tells; modules give the same."""
    model = compiled_model(folder, monkeypatch)
    calls: list[int] = []
    real = CompiledProduct.__call__
    monkeypatch.setattr(CompiledProduct, "__call__", lambda self, *of: (calls.append(1), real(self, *of))[1])
    trace = cp.run(model, PROMPTS, **SMALL, deterministic=True, capture="STCZ")
    assert calls and trace.fingerprint["products_compiled"] == model.compiled.product.digest
    assert trace.fingerprint["norms_compiled"] == model.compiled.block.digest
    assert trace.fingerprint["readings_compiled"] == model.compiled.readout.digest
    assert cp.verify(trace, model, progress=False).is_equal
    with pytest.raises(ValueError, match="products_compiled"):
        cp.verify(trace, cp.load_model(hf_model("llama", torch.bfloat16)), progress=False)
    told, normed = [], []
    norm = CompiledBlock.rms_norm
    monkeypatch.setattr(CompiledBlock, "rms_norm", lambda self, *of: (normed.append(functional), norm(self, *of))[1])
    for functional in (True, False):
        fast = HookedHF(model, functional=functional)
        cache = fast.new_cache(2, 16)
        cache.allocate()
        cache.allocate()
        told.append(fast.forward(torch.tensor([[5, 6, 7], [1, 2, 3]]), cache, [0, 1], [0, 0]))
    assert bitwise(*told) and normed == [True] * (2 * model.n_layers + 1) + [False] * (2 * model.n_layers + 1)


def test_what_it_is_not_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="not for float32 on cpu here"):
        cp.load_model(hf_model("llama"), products="compiled")
    with pytest.raises(ModelError, match='neither "torch" nor "compiled"'):
        cp.load_model(hf_model("llama"), products="fast")
    with pytest.raises(ModelError, match="Thinking States"):
        cp.load_model("coinflip-thinking", products="compiled")
    monkeypatch.setattr(wide_product, "wide_rows", lambda dtype, device: None)
    with pytest.raises(ModelError, match="not for bfloat16 on cpu here"):
        cp.load_model(hf_model("llama", torch.bfloat16), products="compiled")
