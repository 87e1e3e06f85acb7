"""How often the host waits for a GPU from one pass to the next, and how much it launches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.passes import Pass
from cacheprobe.models.fast.graphs import Graphs
from cacheprobe.trace.recording.lens_reader import LensReader
from cacheprobe.trace.recording.recorder import Recorder
from cacheprobe_benchmarks.shared.tiny import TINY, tiny_model
from tests.device.counts import Gpu
from tests.device.runs import kernels_by_references

MOST_WAITS = {"prefill": 4, "decode": 3, "verify": 4}
"""Phase -> waits of a pass after which nothing else is done."""


class Counted(NamedTuple):
    """Holds what was done from a pass until the next one began."""

    phase: str
    also: tuple[str, ...]
    """What else was done, each with one wait: "check" of states, "trial" of a graph, "tile" of lens readings,
    "comparison" of states of drafts; or "twice" if tokens were computed twice."""
    is_graph: bool
    waits: int
    launches: int


@contextmanager
def counting(gpu: Gpu) -> Iterator[list[Counted]]:
    """Counts each pass apart inside the `with`, but the last one of a run, after which the whole cache is checked: also
    of the short runs that measure drafts."""
    found, now, also = list[Counted](), list[tuple[ModelRunner, str]](), list[str]()

    def passing(own: Callable[..., Tensor], runner: ModelRunner, a_pass: Pass) -> Tensor:
        if now and now[0][0] is runner:
            names = {name for _, name, _ in gpu.launches}
            waits, launches = (sum(counts.values()) for counts in (gpu.waits, gpu.launches))
            found.append(Counted(now[0][1], tuple(sorted(also)), "graph" in names, waits, launches))
        for counts in (gpu.waits, gpu.launches, also):
            counts.clear()
        now[:] = [(runner, a_pass.phase)]
        out = own(runner, a_pass)
        also.extend(["twice"] if a_pass.is_compared else [])
        return out

    def noting(what: str) -> Callable[..., Any]:
        def note(own: Callable[..., Any], *args: Any) -> Any:
            also.append(what)
            return own(*args)

        return note

    wrapped: list[tuple[type, str, Callable[..., Any]]] = [
        (ModelRunner, "run", passing), (Recorder, "_check", noting("check")),
        (Graphs, "_require_equal", noting("trial")), (LensReader, "_read_tile", noting("tile")),
        (LensReader, "_compare", noting("comparison")),
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, wrap in wrapped:
            own = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, wrap=wrap, own=own: wrap(own, *args))
        yield found


@pytest.mark.parametrize(
    ("num_layers", "num_requests", "window", "capture", "temperature", "drafter", "is_deterministic"),
    [
        (3, 4, 8, "STC", 0.0, cp.drafters.FastPath(), True),
        (6, 4, 8, "STC", 1.0, cp.drafters.EarlyExit(layer=1), False),
        (3, 4, 8, "STCZ", 1.0, None, True),
        (3, 16, 16, "STCZ", 0.0, cp.drafters.EarlyExit(layer=1), True),
        (6, 16, 16, "STC", 0.0, cp.drafters.FastPath(), False),
        (3, 16, 16, None, 1.0, None, False),
        (6, 4, 8, None, 0.0, cp.drafters.FastPath(), True),
    ],
    ids=str,
)
def test_waits_and_launches_of_a_pass(
    gpu: Gpu,
    num_layers: int,
    num_requests: int,
    window: int,
    capture: str | None,
    temperature: float,
    drafter: Any,
    is_deterministic: bool,
) -> None:
    """Launches on our kernels' path: of a graph, of the copies of states, and of what reads the logits."""
    with kernels_by_references(gpu):
        live = tiny_model("llama", torch.float32, size=replace(TINY, layers=num_layers)).to("cuda")
        model = cp.load_model(live)
        sampling = cp.SamplingParams(max_new_tokens=24, stop_token_ids=(), temperature=temperature, seed=1)
        prompts = [[5 + i, 6, 7, 8 + i, 9] for i in range(num_requests)]
        settings = {"window": window, "group": min(4, num_requests), "draft_length": window - 1}
        with counting(gpu) as found:
            cp.run(
                model, prompts, drafter=drafter, deterministic=is_deterministic, capture=capture, sampling=sampling,
                progress=False, **settings,
            )  # fmt: skip
    assert model.tapes is not None and not model.tapes.refusal, model.tapes.refusal
    for one in found:
        assert "twice" in one.also or one.waits <= MOST_WAITS[one.phase] + len(one.also), one
    decodes = [one for one in found if one.phase == "decode" and one.is_graph and not one.also]
    assert len(decodes) >= 6
    for one in decodes:
        assert one.launches <= 12 * num_layers + 30, one
