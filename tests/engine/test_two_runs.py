"""Two runs on one model: streams by turns, runs of two threads, a run inside another, and a model loaded twice."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import pytest
import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module

import cacheprobe as cp
from cacheprobe.edits.interventions import zero
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.shared import user_hooks
from cacheprobe.models.paths import choose_path
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

LIGHT = dict(SMALL, deterministic=True, max_new_tokens=8)
LIGHT.pop("progress")
HEADS = cp.CaptureConfig(sites="STC", heads=("z", "q"))
PATTERN = cp.CaptureConfig(sites="S", heads=("pattern",))
FEW = PROMPTS[:3]


def digests(trace: Any) -> list[str]:
    return [trace.digest(i) for i in range(len(trace.requests))]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(HEADS, HEADS), (HEADS, PATTERN), (None, HEADS)],
    ids=["heads", "heads-patterns", "nothing-heads"],
)
def test_streams_of_one_model_by_turns(ours: Any, theirs: Any) -> None:
    """Each heard the other's passes: z and patterns were mixed up."""
    model = cp.load_model(hf_model())
    settings = [{**LIGHT, "capture": ours}, {**LIGHT, "capture": theirs, "window": 3, "group": 4}]
    prompts = [FEW, [*FEW[1:], [9, 8, 7]]]
    want = [cp.run(model, p, **s, progress=False) for p, s in zip(prompts, settings, strict=True)]
    streams = [cp.stream(model, p, **s) for p, s in zip(prompts, settings, strict=True)]
    for _ in zip_longest(*streams):
        pass
    for stream, trace in zip(streams, want, strict=True):
        assert digests(stream.trace()) == digests(trace) and stream.trace().fingerprint == trace.fingerprint


def test_what_is_done_between_two_pieces_is_not_heard() -> None:
    """Cache rows, runs, an oracle and plain forwards, on the model of a stream that keeps heads and edits states."""
    model = cp.load_model(hf_model())
    edit = zero(request_id=0, site="T", layer=1, positions=[2, 6, 7], own_fingerprint=True)
    settings = dict(LIGHT, capture=HEADS)
    want = cp.run(model, FEW, **settings, interventions=edit, progress=False)
    plain = cp.run(model, FEW[:2], **settings, progress=False)
    rows = cp.kv_snapshot(model, PROMPTS[2], capacity=96)
    stream = cp.stream(model, FEW, **settings, interventions=edit)
    for _ in stream:
        between = cp.kv_snapshot(model, PROMPTS[2], capacity=96)
        assert all(
            torch.equal(a, b) for a, b in zip((*between.keys, *between.values), (*rows.keys, *rows.values), strict=True)
        )
        again = cp.run(model, FEW[:2], **settings, progress=False)
        assert digests(again) == digests(plain) and again.fingerprint == plain.fingerprint
        assert not list(user_hooks(model.live))
        model.forward(torch.tensor([[1, 2, 3]]), model.new_cache(1, 8), [0], [0])
    assert cp.verify(plain, model, progress=False).is_equal
    assert digests(stream.trace()) == digests(want)


def test_runs_of_two_threads_have_each_its_own_states() -> None:
    """Four in thirty runs of two threads had wrong states, and nineteen ended with an error that misled."""
    model = cp.load_model(hf_model())
    kinds = [
        dict(LIGHT, capture=HEADS, progress=False),
        dict(LIGHT, capture=PATTERN, progress=False),
        dict(LIGHT, capture=HEADS, path="bridge", progress=False, window=3, group=4),
        dict(LIGHT, capture=HEADS, progress=False, drafter=cp.drafters.EarlyExit(layer=1)),
    ]
    want = [digests(cp.run(model, FEW, **kind)) for kind in kinds]
    with ThreadPoolExecutor(4) as pool:
        jobs = [(i % 4, pool.submit(cp.run, model, FEW, **kinds[i % 4])) for i in range(8)]
        for kind, job in jobs:
            assert digests(job.result()) == want[kind]


@pytest.mark.parametrize(("start", "is_second"), [("run", True), ("stream", False), ("kv_snapshot", False)])
def test_a_run_inside_a_step_of_another_is_refused(start: str, is_second: bool) -> None:
    """A hook that starts a run on the model that it is a part of would hear itself."""
    model = cp.load_model(live := hf_model())
    inner = cp.load_model(live) if is_second else model
    want = digests(cp.run(model, FEW, **LIGHT, capture="S", progress=False, path="bridge"))
    said: list[str] = []

    def nest(value: torch.Tensor, hook: object) -> None:
        if not said:
            try:
                if start == "run":
                    cp.run(inner, FEW[:1], progress=False)
                elif start == "stream":
                    next(cp.stream(inner, FEW[:1]))
                else:
                    cp.kv_snapshot(inner, FEW[0])
            except ModelError as error:
                said.append(str(error))

    with model.bridge.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", nest)]):
        trace = cp.run(model, FEW, **LIGHT, capture="S", progress=False)
    assert "is in the middle of a step of another run" in said[0] and "load a second model" in said[0]
    assert digests(trace) == want
    assert digests(cp.run(model, FEW, **LIGHT, capture="S", progress=False, path="bridge")) == want


def test_a_stream_that_began_before_does_not_go_on_inside_a_step() -> None:
    model = cp.load_model(hf_model())
    waiting = cp.stream(model, FEW, **LIGHT)
    said: list[str] = []

    def nest(value: torch.Tensor, hook: object) -> None:
        if not said:
            try:
                next(waiting)
            except ModelError as error:
                said.append(str(error))

    with model.bridge.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", nest)]):
        cp.run(model, FEW[:1], **{**LIGHT, "deterministic": False}, progress=False)
    assert "is in the middle of a step of another run" in said[0]


def test_another_model_may_run_inside_a_step() -> None:
    """As a lens or a drafter of the user's may do."""
    model, other = cp.load_model(hf_model()), loaded("gpt2")
    want = digests(cp.run(other, FEW[:1], **LIGHT, capture="S", progress=False))
    found: list[list[str]] = []

    def nest(value: torch.Tensor, hook: object) -> None:
        if not found:
            found.append(digests(cp.run(other, FEW[:1], **LIGHT, capture="S", progress=False)))

    with model.bridge.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", nest)]):
        cp.run(model, FEW, **LIGHT, progress=False)
    assert found == [want]


@pytest.mark.parametrize("leave", ["close", "cycle", "error"])
def test_a_stream_that_is_left_blocks_nobody(leave: str) -> None:
    model = cp.load_model(hf_model())
    want = digests(cp.run(model, FEW, **LIGHT, capture=HEADS, progress=False))
    stream = cp.stream(model, FEW, **LIGHT, capture=HEADS)
    next(stream)
    if leave == "close":
        stream.close()
    elif leave == "cycle":
        stream.itself = stream
    elif leave == "error":
        with pytest.raises(ZeroDivisionError):
            for _ in stream:
                raise ZeroDivisionError
    del stream
    with ThreadPoolExecutor(1) as pool:  # a thread of its own, which a lock that is still held would stop
        job = pool.submit(cp.run, model, FEW, **LIGHT, capture=HEADS, progress=False)
        assert digests(job.result(timeout=120)) == want
    gc.collect()
    assert digests(cp.run(model, FEW, **LIGHT, capture=HEADS, progress=False)) == want


@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
def test_a_live_model_is_loaded_twice(family: str) -> None:
    """The second wrapping ended with a KeyError."""
    one = cp.load_model(live := hf_model(family))
    first = cp.run(one, FEW, **LIGHT, capture="STC", progress=False)
    two = cp.load_model(live)
    second = cp.run(two, FEW, **LIGHT, capture="STC", progress=False)
    assert one.weights_sha256 == two.weights_sha256
    assert digests(first) == digests(second) and first.fingerprint == second.fingerprint
    assert digests(cp.run(one, FEW, **LIGHT, capture="STC", progress=False)) == digests(first)
    assert cp.verify(first, two, progress=False).is_equal and cp.verify(second, one, progress=False).is_equal


def test_a_copy_of_a_loaded_model_is_another_model() -> None:
    one = cp.load_model(live := hf_model())
    want = digests(cp.run(one, FEW, **LIGHT, capture="S", progress=False))
    two = cp.load_model(copy.deepcopy(live))
    assert two.bridge is not one.bridge
    with torch.no_grad():
        next(two.bridge.original_model.parameters()).mul_(1.5)
    assert two.weights_sha256 != one.weights_sha256
    assert digests(cp.run(one, FEW, **LIGHT, capture="S", progress=False)) == want
    assert digests(cp.run(two, FEW, **LIGHT, capture="S", progress=False)) != want
    assert choose_path(two)[1].startswith("plain")


def test_a_model_inside_a_bridge_of_the_users_is_refused_by_name() -> None:
    bridge = build_bridge_from_module(live := hf_model(), "LlamaForCausalLM", hf_config=live.config)
    with pytest.raises(ModelError, match="is already inside a TransformerBridge; give the bridge"):
        cp.load_model(live)
    assert cp.load_model(bridge)
