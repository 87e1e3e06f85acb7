"""What a GPU's batched choice of tokens, its uploads and its downloads must keep, whatever the other requests are."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.devices import Download, upload
from cacheprobe.core.records import EngineError
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.ops.equality import bitwise
from cacheprobe.ops.sampling import choices_in, describe, top_two
from tests.device.counts import Gpu
from tests.tiny import PROMPTS, hf_model, loaded

RUN: dict[str, Any] = dict(window=4, group=2, capacity=64, max_new_tokens=6, progress=False, capture=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_best_tokens_of_rows_are_those_of_each_row(dtype: torch.dtype) -> None:
    """Ids and margins == `describe` of the lowest id of the largest logit, log-probabilities close; a row's bits are
    its own in a batch of any size."""
    logits = torch.randn(130, 301, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    logits[5, 40] = logits[5, 7] = logits[5].max() + 1  # a tie
    logits[6, 1:] = -torch.inf
    found = top_two(logits)
    for row, (token_id, nats, margin, largest) in zip(logits, found.tolist(), strict=True):
        lowest = int((row == row.max()).nonzero()[0, 0])
        of_row = describe(lowest, row)
        assert (int(token_id), margin, largest) == (lowest, of_row.margin_nats, float(row.max()))
        assert nats == pytest.approx(of_row.logprob_nats, abs=1e-5), "sums in another order"
    assert all(bitwise(found[i : i + 1], top_two(logits[i : i + 1])) for i in range(len(logits)))
    logits[2, 3], logits[3, 4] = torch.nan, torch.inf
    assert all(math.isnan(choice.logprob_nats) for choice in choices_in(top_two(logits))[2:4])


def test_a_shared_prompt_has_the_log_probabilities_of_a_prompt_alone(gpu: Gpu) -> None:
    """Beside a request that samples after the same prompt, whose logits are copied to the host."""
    model = cp.load_model(hf_model("llama").to("cuda"))
    for number in range(8):
        prompt = [*PROMPTS[number % 3], number + 40]
        greedy = cp.Request(prompt, is_deterministic=True)
        sampled = cp.Request(prompt, cp.SamplingParams(temperature=1.0, seed=number), is_deterministic=True)
        alone, beside = cp.run(model, [greedy], **RUN), cp.run(model, [sampled, greedy], **RUN)
        assert alone.committed(0) == beside.committed(1)
        assert alone.logprobs(0) == beside.logprobs(1)


def test_what_is_uploaded_together_is_aligned(gpu: Gpu) -> None:
    """Kernels are compiled for addresses that are multiples of 16 bytes, two numbers of 64 bits."""
    given = [torch.arange(count).view(1, count) for count in (3, 1, 4, 5)]
    parts = upload(torch.device("cuda", 0), given)
    assert all(torch.equal(part.cpu(), one) for part, one in zip(parts, given, strict=True))
    assert [part.storage_offset() % 2 for part in parts] == [0] * 4


def test_a_download_that_is_read_too_early_holds_no_number(gpu: Gpu) -> None:
    """The control: `tensors` waits for the copy."""
    download = Download([torch.ones(3, device="cuda"), torch.zeros(2)])
    assert download._held[0].isnan().all()
    assert [one.tolist() for one in download.tensors()] == [[1.0] * 3, [0.0] * 2]


@dataclass(frozen=True)
class Broken(LogitLens):
    """Gives NaN."""

    def logits(self, model: Any, states: torch.Tensor, layers: torch.Tensor) -> torch.Tensor:
        return super().logits(model, states, layers) * torch.nan


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_drafter_that_gives_nan_is_named(gpu: Gpu, device: str) -> None:
    """With request, step and position, as the model's own NaN is."""
    model = loaded() if device == "cpu" else cp.load_model(hf_model("llama").to("cuda"))
    drafter = cp.drafters.EarlyExit(layer=1, lens=Broken())
    with pytest.raises(EngineError, match=r"request 0 step 1: logits for position \d+ hold NaN"):
        cp.run(model, PROMPTS[:1], **RUN, deterministic=True, drafter=drafter)
