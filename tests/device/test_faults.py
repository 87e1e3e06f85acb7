"""Faults that every GPU would have met at its first try, each beside the CPU's result."""

from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.ops.readout import read_logits
from cacheprobe.trace.trace import Trace
from tests.device.counts import Gpu
from tests.device.runs import numbers, on_both, states
from tests.thinking.test_thinking import text, tiny
from tests.tiny import PROMPTS, hf_model

RUN: dict[str, Any] = dict(window=4, group=2, capacity=64, max_new_tokens=8, progress=False, deterministic=True)
RUN |= dict(capture="STC", drafter=cp.drafters.EarlyExit(layer=1))
SUMS = "attention of the CPU is computed in loops, or for a group of heads at once, so sums have another order"


def both_runs(family: str, way: str) -> tuple[Trace, Trace]:
    host, device = (cp.run(model, PROMPTS[:2], **RUN) for model in on_both(hf_model(family), way))
    return host, device


@pytest.mark.parametrize("width", [97, 128, 5000])
def test_readings_of_any_vocabulary(gpu: Gpu, width: int) -> None:
    """Ids and ranks ==; numbers bitwise as long as the CPU sums a row in one piece too, then close."""
    logits, targets = torch.randn(70, width, generator=torch.Generator().manual_seed(0)), torch.arange(-1, 69)
    logits[0, 3] = -torch.inf
    host, device = read_logits(logits, targets, 5), read_logits(logits.to("cuda"), targets.to("cuda"), 5)
    for name, one, other in zip(host._fields, host, device, strict=True):
        if width > 4096 and one.is_floating_point():
            one, other = one.nan_to_num(0.0), other.cpu().nan_to_num(0.0)
            assert close(one, other, 1e-5, because="float32 sums of the CPU have several pieces"), name
        else:
            assert bitwise(one, other.cpu()), name


def test_patching_and_flips(way: str, gpu: Gpu) -> None:
    """Effects of every cell and edit close to the CPU's by torch: the cells of a batch share one row of the cache."""
    _, device = on_both(hf_model("llama"), way)
    theirs = cp.load_model(hf_model("llama"), products="torch")
    given: Any = dict(answer=(7, 11), progress=False)
    grids = [cp.patching.activation(m, [5, 17, 3, 44], [1, 17, 80, 44], site="S", **given) for m in (theirs, device)]
    assert close(numbers(grids[0].table), numbers(grids[1].table), 1e-4, because=SUMS)
    assert grids[0].table.logit_difference.std() > 0.1
    found = []
    for model in (theirs, device):
        trace = cp.run(model, PROMPTS[:2], **RUN)
        place = trace.rejected().iloc[-1]
        found.append(cp.analysis.flip(trace, int(place.request_id), int(place.step), progress=False).table)
    assert close(numbers(found[0]), numbers(found[1]), 1e-4, because=SUMS)


@pytest.mark.parametrize("while_decoding", [False, True])
def test_thinking_states(gpu: Gpu, while_decoding: bool) -> None:
    """Tokens and thoughts ==, states close."""
    model = tiny(think_while_decoding=while_decoding)
    host, device = ThinkingLM(model, name="thinker"), ThinkingLM(tiny(think_while_decoding=while_decoding).to("cuda"))
    settings = {**RUN, "prefill_chunk": 8, "sampling": cp.SamplingParams(stop_token_ids=())}
    ours, theirs = (cp.run(one, [text(8), text(17, 1)], **settings) for one in (device, host))
    assert ours.tokens == theirs.tokens and len(theirs.thoughts()) > 3
    assert ours.thoughts().token_ids.map(tuple).equals(theirs.thoughts().token_ids.map(tuple))
    for request_id in (0, 1):
        assert close(states(ours, request_id), states(theirs, request_id), 1e-4, because=SUMS)
    assert cp.verify(ours, progress=False).is_equal


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_attribution(way: str, gpu: Gpu, family: str) -> None:
    """Parts of a logit close to the CPU's."""
    host, device = (cp.analysis.attribution(trace, 0, 7) for trace in both_runs(family, way))
    assert device.site.tolist() == host.site.tolist() and len(host) > 6
    assert close(torch.tensor(device.logit), torch.tensor(host.logit), 1e-4, because=SUMS)


@pytest.mark.parametrize("kind", ["logit", "tuned", "jacobian"])
def test_lenses_read_states_from_anywhere(way: str, gpu: Gpu, kind: str) -> None:
    """A trace gives states on the CPU; they are read with the bits of states on the device."""
    _, model = on_both(hf_model("llama"), way)
    sha = cp.lenses.base.unembedding_sha256(model)
    matrices = 0.1 * torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0))
    lens = {
        "logit": lambda: cp.lenses.LogitLens(),
        "tuned": lambda: cp.lenses.TunedLens(matrices, matrices[:, 0], sha),
        "jacobian": lambda: cp.lenses.jacobian.JacobianLens(matrices.to("cuda"), sha),
    }[kind]()
    given, layers = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2])
    host, device = lens.logits(model, given, layers), lens.logits(model, given.to("cuda"), layers.to("cuda"))
    assert host.device == device.device == model.device and bitwise(host.cpu(), device.cpu())
    assert bitwise(model.read_out(given).cpu(), model.read_out(given.to("cuda")).cpu())
    assert close(model.read_out(given).cpu(), model.read_out_with_gradients(given).cpu(), 1e-5, because="one ulp")
