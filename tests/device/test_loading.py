"""What loading on a GPU says of kernels that cannot run, which of them run then, and running out of memory there."""

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

import cacheprobe as cp
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.passes import Pass
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.bridge import BridgeLM
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops import dispatch
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.trace.recording import lens_reader
from cacheprobe.trace.recording.lens_reader import LensReader
from tests.device.counts import Gpu
from tests.device.runs import kernels_by_references, states
from tests.tiny import PROMPTS, hf_model

BY_TORCH = "torch computes these operations, because their kernels cannot run: "
RUN: dict[str, Any] = dict(window=4, group=2, capacity=64, max_new_tokens=8, progress=False, deterministic=True)
RUN |= dict(capture="STCZ", drafter=cp.drafters.EarlyExit(layer=1))
WRONG = "out is wrong"


def loaded_on_gpu(**options: Any) -> tuple[Any, list[str]]:
    """Returns a model on the pretend GPU and the texts of the warnings at its load."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = cp.load_model(hf_model(dtype=options.pop("dtype", torch.float32)).to("cuda"), **options)
    return model, [str(one.message) for one in seen if one.category is RuntimeWarning]


def test_all_kernels_are_no_warning(gpu: Gpu) -> None:
    with kernels_by_references(gpu):
        model, said = loaded_on_gpu()
    assert said == [] and repr(model).endswith("cuda:0, Triton kernels)")
    assert loaded_on_gpu(products="torch")[1] == []


@pytest.mark.parametrize("name", [operation.name for operation in dispatch.OPERATIONS])
def test_one_kernel_that_fails_its_trial_is_replaced_alone(gpu: Gpu, name: str) -> None:
    """Tokens of a run ==, states close to those of all kernels; no launch of that kernel, and some of the others."""
    with kernels_by_references(gpu):
        whole = cp.run(loaded_on_gpu()[0], PROMPTS[:2], **RUN)
    gpu.launches.clear()
    with kernels_by_references(gpu, failing={name: WRONG}):
        model, said = loaded_on_gpu()
        trace = cp.run(model, PROMPTS[:2], **RUN)
    (line,) = said
    assert line == (f"LlamaForCausalLM on cuda:0: {BY_TORCH}{name}: the kernel is not its reference on cuda:0: {WRONG}")
    assert repr(model).endswith(f"cuda:0, Triton kernels; by torch: {name})")
    assert trace.fingerprint["products"].endswith(f"compute capability 9.0; by torch: {name}")
    launched = {operation for _, operation, _ in gpu.launches}
    assert {one.name for one in dispatch.OPERATIONS} - launched == {name}
    assert trace.tokens == whole.tokens
    for request_id in (0, 1):
        assert close(states(trace, request_id), states(whole, request_id), 1e-4, because="sums in another order")
    computes_no_state = name in ("lens_topk", "store_kv", "capture_pack")
    assert model.independent_width == (model.n_ctx if computes_no_state else 0)


def test_no_kernel_is_one_line_with_the_reason(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """triton is absent; the GPU has another capability; all trials fail. A dtype without kernels is no warning."""
    failing = {operation.name: WRONG for operation in dispatch.OPERATIONS}
    with kernels_by_references(gpu, failing):
        model, (line,) = loaded_on_gpu()
    assert line.startswith(f"LlamaForCausalLM on cuda:0: {BY_TORCH}the kernel is not its")
    assert line.count(WRONG) == 1 and repr(model).endswith("cuda:0, by torch)")
    with kernels_by_references(gpu):
        assert loaded_on_gpu(dtype=torch.float64)[1] == []
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
            _, (line,) = loaded_on_gpu()
            assert "Pretend GPU, compute capability 8.6; kernels are compiled and inspected for 8.0 and 9.0" in line
            with pytest.raises(ModelError, match="cannot run in Triton kernels: Pretend GPU, compute capability 8.6"):
                loaded_on_gpu(products="kernels")

    def absent(kind: str, name: str) -> Any:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    with kernels_by_references(gpu), monkeypatch.context() as patch:
        patch.setattr(dispatch, "find", absent)
        _, (line,) = loaded_on_gpu()
    assert line.endswith("triton is not installed: pip install 'cacheprobe[kernels]'")


def test_required_kernels_are_required_each(gpu: Gpu) -> None:
    with kernels_by_references(gpu, {"matmul": WRONG}), pytest.raises(ModelError, match=f"matmul: .*{WRONG}; use prod"):
        loaded_on_gpu(products="kernels")


def test_a_model_on_its_bridge_is_one_line(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain model is refused, and its bridge computes."""

    def refuses(model: PlainLM, *_: Any) -> None:
        raise ModelError("its parts were not found")

    monkeypatch.setattr(PlainLM, "__init__", refuses)
    model, (line,) = loaded_on_gpu()
    assert isinstance(model, BridgeLM)
    assert line.endswith("on cuda:0: runs on its bridge, whose blocks torch computes: its parts were not found")


def memory_ends(gpu: Gpu, launch: int, does_end: Callable[[Pass], bool]) -> AbstractContextManager[None]:
    """Lets that launch of each pass find no memory for which `does_end` says so, counted from the pass's start."""
    right = ModelRunner.run

    def run(runner: ModelRunner, a_pass: Pass) -> Any:
        if does_end(a_pass):
            gpu.memory_ends_at = launch
        return right(runner, a_pass)

    return mock.patch.object(ModelRunner, "run", run)


def test_memory_that_ends_once_loses_nothing(gpu: Gpu) -> None:
    """Anywhere in passes, choices, captures and readings: tokens and states == those of a run with enough of it. Only
    where the lens finds no memory, a request has no readings, and the warning says which."""
    with kernels_by_references(gpu):
        model = loaded_on_gpu()[0]
        whole = cp.run(model, PROMPTS[:2], **RUN)
        for launch in range(30, 2400, 395):
            passes = iter(range(999))
            with memory_ends(gpu, launch, lambda _, passes=passes: next(passes) == 0), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "request . step . layer .: lens logit f.* has no readings")
                trace = cp.run(model, PROMPTS[:2], **RUN)
            assert gpu.memory_ends_at is None, f"launch {launch} lies behind the run"
            assert trace.tokens == whole.tokens, launch
            for request_id in (0, 1):
                assert bitwise(states(trace, request_id), states(whole, request_id)), launch


def test_memory_that_stays_away_is_an_error_of_its_request(gpu: Gpu) -> None:
    """It names request, step and pass; the request keeps what it had committed, and the other one is whole."""
    with kernels_by_references(gpu):
        model = loaded_on_gpu()[0]
        whole = cp.run(model, PROMPTS[:2], **RUN)

        def does_end(a_pass: Pass) -> bool:
            return any(one.state.request_id == 1 and len(one.state.generated) > 3 for one in a_pass.entries)

        error = r"request 1 ended with an error: step \d+: the decode pass of requests 1, 1 x 1, failed with Out"
        with memory_ends(gpu, 3, does_end), pytest.warns(RuntimeWarning, match=error):
            trace = cp.run(model, PROMPTS[:2], **RUN)
    assert trace.tokens[0] == whole.tokens[0] and bitwise(states(trace, 0), states(whole, 0))
    kept = trace.committed(1)
    assert 3 < len(kept) < len(whole.committed(1)) and kept == whole.committed(1)[: len(kept)]
    assert bitwise(states(trace, 1), states(whole, 1)[:, : states(trace, 1).shape[1]])


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ("_compared", torch.OutOfMemoryError("CUDA out of memory.")),
        ("_read", torch.OutOfMemoryError("CUDA out of memory.")),
        ("_read", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    ],
)
def test_readings_without_memory_end_no_run(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception
) -> None:
    """Where states are compared, so that equal ones are read once: all are read, and readings ==. Where a tile is made:
    its request has no readings, and the warning names request, step and layer; tokens and states stay."""
    with kernels_by_references(gpu):
        model = loaded_on_gpu()[0]
        whole = cp.run(model, PROMPTS[:1], **RUN)
        owner = lens_reader if part == "_compared" else LensReader
        monkeypatch.setattr(owner, part, mock.Mock(side_effect=error))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trace = cp.run(model, PROMPTS[:1], **RUN)
    assert trace.tokens == whole.tokens and bitwise(states(trace, 0), states(whole, 0))
    if part == "_compared":
        assert seen == [] and trace.hypotheses().equals(whole.hypotheses())
        assert whole.fingerprint == trace.fingerprint
    else:
        said = r"request 0 step \d+ layer \d: lens logit found no memory for a tile \(.*memory"
        assert re.match(said, str(seen[0].message))
