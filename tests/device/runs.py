"""Runs of tiny models on the pretend GPU: their loading, our kernels computed by their references, and phases."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import cacheprobe as cp
from cacheprobe.core.registry import find
from cacheprobe.engine.loop import Engine
from cacheprobe.ops import dispatch
from tests.device.counts import Gpu
from tests.device.pretend import held, launch, on_gpu


@contextmanager
def kernels_by_references(gpu: Gpu, failing: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Makes our kernels computable inside the `with`, on the pretend GPU and on the CPU: each call passes the kernel's
    own checks, counts its launches, and is computed by the kernel's reference on the held tensors.

    failing: kernel -> what its trial complains about.
    """

    def found(kind: str, name: str) -> Any:
        kernel = find(kind, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(kernel.plan).bind(*args, **kwargs).arguments
            for _ in kernel.plan(**given).launches:
                gpu.launched(name)
            on_cpu = {key: held(value) for key, value in given.items()}
            computed = partial(kernel.reference, **on_cpu)
            result = launch(computed, [one for one in on_cpu.values() if isinstance(one, Tensor)])
            device = next(one.device for one in given.values() if isinstance(one, Tensor))
            return on_gpu(result, device) if device.type == "cuda" else result

        return SimpleNamespace(tried=lambda device: [failing[name]] if name in failing else [], run=run)

    right = dispatch.reason_against
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "find", found)
        patch.setattr(dispatch, "uses_triton_interpreter", lambda: False)
        patch.setattr(dispatch, "reason_against", lambda device: "" if device.type == "cpu" else right(device))
        for operation in dispatch.OPERATIONS:
            patch.setattr(operation, "_paths", {})
        yield


@contextmanager
def phases(gpu: Gpu) -> Iterator[None]:
    """Counts apart, inside the `with`, what prefill, decode, draft and verify steps do from pass to commit."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("decode", "draft", "verify"):
            patch.setattr(Engine, name, _in_phase(gpu, name, getattr(Engine, name)))
        yield


def _in_phase(gpu: Gpu, name: str, step: Callable[..., None]) -> Callable[..., None]:
    def counted(engine: Engine, *args: Any) -> None:
        with gpu.in_phase(name):
            step(engine, *args)

    return counted


def on_both(model: PreTrainedModel, way: str = "torch") -> tuple[Any, Any]:
    """Returns a model on the CPU and the same on the pretend GPU, both computed by torch, or both in kernels."""
    copied = copy.deepcopy(model).to("cuda")
    return cp.load_model(model, products=way), cp.load_model(copied, products="torch" if way == "torch" else "auto")


def states(trace: cp.Trace, request_id: int) -> Tensor:
    """Returns the states [l, p, m] of a request's committed rows at sites S, T and C of all layers, one after another,
    on the CPU. The trace must have kept all."""
    rows = trace.rows(request_id)
    own = rows[(rows.status == "committed") & (rows.state_index >= 0)].sort_values("position").row.tolist()
    return torch.stack([trace.vectors(site, layer, own) for layer in trace.store.layers for site in "STC"])


def numbers(table: pd.DataFrame) -> Tensor:
    """Returns the columns of numbers of a table, [rows, columns] in float64; -1 where there is none."""
    return torch.tensor(table.select_dtypes("number").fillna(-1).to_numpy("float64"))
