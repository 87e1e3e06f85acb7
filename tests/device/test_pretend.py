"""The pretend GPU itself: it refuses what CUDA refuses, computes the CPU's bits, counts waits, and leaves nothing."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cacheprobe.ops.compiled.lanes import FLOATS
from cacheprobe.ops.compiled.queue import Queue
from cacheprobe.ops.equality import bitwise
from tests.device.counts import Gpu
from tests.device.pretend import GpuTensor, pretending
from tests.tiny import hf_model

Use = Callable[[Tensor], Any]
HOST = torch.ones(2, 3)


@pytest.mark.parametrize(
    "mix",
    [
        lambda a: a + HOST,
        lambda a: HOST.clone().add_(a),
        lambda a: torch.tensor(1.0).add_(a[0, 0]),
        lambda a: torch.cat([a, HOST]),
        lambda a: HOST[a[0].long()],
        lambda a: torch.where(a > 0, a, HOST),
        lambda a: a.masked_fill(HOST > 0, 0),
        lambda a: torch.nn.functional.embedding(torch.tensor(0), a),
        lambda a: torch.add(a, 1, out=HOST.clone()),
        lambda a: a + torch.ones(2, 3, device="cuda:1"),
        lambda a: a + torch.tensor(1.0, device="cuda:1"),
        lambda a: a[torch.tensor([0], device="cuda:1")],
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_tensors_of_two_devices_are_refused(gpu: Gpu, mode: Any, mix: Use) -> None:
    with mode(), pytest.raises(RuntimeError, match=r"at least two devices, cuda:\d and"):
        mix(torch.ones(2, 3, device="cuda"))
    assert len(gpu.refused) == 1 and "test_pretend.py" in gpu.refused[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda a: a + torch.tensor(1.0),
        lambda a: torch.tensor(1.0) * a,
        lambda a: a[torch.tensor([0])],
        lambda a: a.index_put_((torch.tensor([0]),), torch.tensor(2.0)),
        lambda a: a.copy_(HOST),
        lambda a: a.to("cuda:1").to("cuda:0") + a,
    ],
)
def test_what_cuda_takes_is_taken(gpu: Gpu, use: Use) -> None:
    assert use(torch.ones(2, 3, device="cuda")).device == torch.device("cuda", 0)


@pytest.mark.parametrize("read", [lambda a: a.numpy(), np.asarray, torch.from_numpy, np.from_dlpack])
def test_the_host_reads_no_memory_of_the_device(gpu: Gpu, read: Use) -> None:
    with pytest.raises((TypeError, BufferError, RuntimeError)):
        read(torch.ones(2, device="cuda"))


def test_compiled_loops_get_no_address(gpu: Gpu) -> None:
    """A loop that reads there would end the process."""
    with pytest.raises(RuntimeError, match="reads an address of cuda:0 on the host"):
        Queue(FLOATS, torch.float32, 1).norm(torch.ones(1, 8, device="cuda"), torch.ones(8), 0.0)


def test_views_and_writes_alias(gpu: Gpu) -> None:
    a = torch.zeros(2, 3, device="cuda")
    a[0].add_(1)
    a.view(-1)[4] = 7
    a.t()[2, 1] = 9
    out = torch.empty(3, device="cuda")
    assert torch.add(a[0], 1, out=out) is out
    assert a.tolist() == [[1, 1, 1], [0, 7, 9]] and out.tolist() == [2, 2, 2]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_copies_to_the_host_are_plain_tensors(gpu: Gpu, mode: Any) -> None:
    with mode():
        a = torch.ones(2, 3, device="cuda")
        copies = [a.cpu(), a.to("cpu"), a.to("cpu", torch.float64), a.to(HOST), a[0].cpu(), a.new_zeros(2).cpu()]
        assert {type(one) for one in copies} == {Tensor}
        assert a.double().device == a.to("cuda").device == a.device


@pytest.mark.parametrize(("family", "dtype"), [("llama-tied", torch.float32), ("gemma3", torch.bfloat16)])
def test_a_model_has_the_cpus_bits(gpu: Gpu, family: str, dtype: torch.dtype) -> None:
    """And its tied weights stay tied; gradients are close, since attention is computed in other steps."""
    model, ids = hf_model(family, dtype), torch.tensor([[1, 2, 3, 4, 5]])
    moved = copy.deepcopy(model).to("cuda")
    with torch.no_grad():
        assert bitwise(moved(ids.to("cuda")).logits.cpu(), model(ids).logits)
    ends = moved.get_input_embeddings().weight, moved.get_output_embeddings().weight
    assert (ends[0] is ends[1]) == model.config.tie_word_embeddings
    if dtype == torch.float32:
        model(ids, labels=ids).loss.backward()
        moved(ids.to("cuda"), labels=ids.to("cuda")).loss.backward()
        for ours, theirs in zip(model.parameters(), moved.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad.cpu(), rtol=1e-4, atol=1e-5)  # float32 sums in another order


def test_gradients_cross_two_devices(gpu: Gpu) -> None:
    x, w = torch.ones(3, device="cuda", requires_grad=True), torch.full((3,), 5.0, device="cuda:1", requires_grad=True)
    ((x * 2).to("cuda:1") * w).sum().backward()
    assert (x.grad.device.index, x.grad.tolist()) == (0, [10] * 3)
    assert (w.grad.device.index, w.grad.tolist()) == (1, [2] * 3)


def test_waits_and_launches_are_counted_by_phase_and_place(gpu: Gpu) -> None:
    a, other = torch.ones(3, device="cuda"), torch.zeros(3)
    for wait, use in {
        "item": lambda: bool(a.any()),
        "nonzero": lambda: a.nonzero(),
        "mask": lambda: a[a > 0],
        "download": lambda: a.tolist(),
        "upload": lambda: a.copy_(other),
        "equal": lambda: torch.equal(a, a),
        "unique": lambda: a.unique(),
        "synchronize": lambda: torch.cuda.synchronize(),
        "nothing": lambda: (a + a, a[0], a[torch.zeros(1, dtype=torch.long, device="cuda")], a.masked_fill_(a > 0, 2)),
        "nothing later": lambda: a.copy_(other, non_blocking=True),
    }.items():
        with gpu.in_phase(wait):
            use()
        expected = 0 if wait.startswith("nothing") else 1
        assert gpu.waits_by_phase().get(wait, 0) == expected, wait
    assert gpu.launches_by_phase()["nothing"] == 5 and "unique" in gpu.table()
    assert all(at.startswith("tests/device/test_pretend.py:") for _, _, at in gpu.waits)


def test_a_wait_can_be_an_error(gpu: Gpu) -> None:
    gpu.waits_are_errors = lambda kind, at: kind == "item"
    with pytest.raises(RuntimeError, match=r"the host waits for the device: item at tests/device/test_pretend.py"):
        torch.ones((), device="cuda").item()


def test_nothing_is_left_behind() -> None:
    before = torch.cuda.is_available, torch.cuda.Event, torch.Tensor.pin_memory
    with pytest.raises(KeyError), pretending() as gpu:
        assert torch.cuda.device_count() == 1 and torch.ones(1, device="cuda").device.index == 0
        raise KeyError
    assert (torch.cuda.is_available, torch.cuda.Event, torch.Tensor.pin_memory) == before
    assert not torch.cuda.is_available() and torch.accelerator.current_accelerator() is None
    assert not torch.__future__.get_swap_module_params_on_conversion()
    with pytest.raises((NotImplementedError, AssertionError, RuntimeError)):
        torch.ones(1, device="cuda")
    with pretending() as other:
        torch.ones(1, device="cuda").item()
    assert other.waits and not gpu.waits


def test_a_torch_with_cuda_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="a pretend GPU would hide it"), pretending():
        pass
    assert not isinstance(torch.ones(1), GpuTensor)
