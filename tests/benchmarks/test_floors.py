"""What a job's products take by themselves: each weight is multiplied as often as the job does."""

from collections import Counter

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe_benchmarks.speed import floors
from tests.planted_costs import HOUR, Clock
from tests.tiny import hf_model


def test_every_product_of_a_job_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cp.load_model(hf_model("llama", torch.bfloat16))
    config = hf_model("llama").config
    real, seen = floors.linear, Counter()

    def counted(values: Tensor, weight: Tensor) -> Tensor:
        seen[len(values), weight.shape[0] == config.vocab_size] += 1
        return real(values, weight)

    monkeypatch.setattr(floors, "linear", counted)
    floors.products_seconds(model, [9, 2, 2], [3])
    of_blocks = 7 * config.num_hidden_layers
    assert {key: count / floors.REPEATS for key, count in seen.items()} == {
        (9, False): of_blocks, (2, False): of_blocks, (3, True): 1
    }  # fmt: skip


@pytest.mark.parametrize(("of_linear", "of_widened"), [(2, 3), (3, 2)])
def test_of_two_ways_the_quickest_counts(monkeypatch: pytest.MonkeyPatch, of_linear: float, of_widened: float) -> None:
    """Each product takes two hours one way and three the other: two hours count, for every product of the job."""
    model = cp.load_model(hf_model("llama", torch.bfloat16))
    clock = Clock(monkeypatch)
    clock.plant(floors, "linear", of_linear)
    clock.plant(floors, "widened", of_widened)
    of_blocks = 7 * hf_model("llama").config.num_hidden_layers
    seconds = floors.products_seconds(model, [9, 2, 2], [3])
    assert seconds == pytest.approx(2 * HOUR * (3 * of_blocks + 1), rel=0.01)


def test_passes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cp.load_model(hf_model("llama", torch.bfloat16))
    monkeypatch.setattr(floors, "_quickest", lambda ways, weights, rows: rows * (1000 if len(weights) > 1 else 1))
    assert floors.products_seconds(model, [9, 2, 2], [3, 3]) == 13_000 + 6
