"""The roofline of a job: a pass takes the longer of its multiplications and of reading its weights once."""

import pytest
import torch

import cacheprobe as cp
from cacheprobe_benchmarks.speed.products import Rates
from cacheprobe_benchmarks.speed.roofline import Roofline
from tests.tiny import hf_model

RATES = Rates({"a": {"torch bfloat16": 100.0, "loops bfloat16": 200.0}, "b": {"torch float32": 50.0}}, 10.0)


def test_the_best_rate_of_any_product_counts() -> None:
    assert RATES.best_gflops == 200.0


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        (1, 0.2),  # 1e9 weights of 2 bytes at 10 GB/s; multiplying would take .01 s
        (20, 0.2),  # both take as long
        (40, 0.4),  # 80e9 operations at 200e9 a second
    ],
)
def test_a_pass_takes_the_longer_of_the_two(rows: int, seconds: float) -> None:
    roofline = Roofline(block_weights=10**9, head_weights=2 * 10**9, bytes_per_weight=2, rates=RATES)
    assert roofline.seconds([rows], []) == pytest.approx(seconds)
    assert roofline.seconds([], [rows]) == pytest.approx(2 * seconds)
    assert roofline.seconds([rows, rows], [rows]) == pytest.approx(4 * seconds)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2"])
def test_weights_are_those_of_the_products(family: str) -> None:
    """Matrices of the blocks, and the unembedding, tied to the embedding or not; norms and biases count nothing."""
    model = cp.load_model(hf_model(family, torch.bfloat16))
    plain = hf_model(family, torch.bfloat16)
    linears = [m.weight.numel() for m in plain.modules() if type(m) is torch.nn.Linear]
    roofline = Roofline.of(model, RATES)
    assert roofline.head_weights == plain.get_output_embeddings().weight.numel()
    assert roofline.block_weights == sum(linears) - roofline.head_weights
    assert roofline.bytes_per_weight == 2
