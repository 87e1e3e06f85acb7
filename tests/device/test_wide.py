"""Runs and analyses of many families on the pretend GPU, by torch and in kernels, beside the same on the CPU."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

import cacheprobe as cp
from cacheprobe.core.registry import available, find
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.passes import Pass
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.trace.trace import Trace
from cacheprobe_kernels.base import Draws
from cacheprobe_kernels.comparing import named
from tests.device.counts import Gpu
from tests.device.runs import kernels_by_references, numbers, on_both, phases, states
from tests.dictionaries.planted import random_dictionary
from tests.experts.families import plain as mixture
from tests.field.tiny_family import tiny_family
from tests.tiny import PROMPTS, hf_model

RUN: dict[str, Any] = dict(window=4, capacity=64, max_new_tokens=7, progress=False)
RUN |= dict(sampling=cp.SamplingParams(stop_token_ids=()))
SUMS = "attention of the CPU is computed in loops, or for a group of heads at once, so sums have another order"
RTOL = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Of states through three layers; in 16 bits a few roundings of the residual stream."""
EXIT, FAST, NGRAM = cp.drafters.EarlyExit(layer=1), cp.drafters.FastPath(), cp.drafters.NGram()


class Row(NamedTuple):
    """Holds one combination to run."""

    family: str
    way: str
    drafter: Any = EXIT
    dtype: torch.dtype = torch.float32
    settings: tuple[tuple[str, Any], ...] = ()


ROWS = [
    Row("llama", "kernels"),
    Row("llama", "kernels", FAST, torch.bfloat16, (("determinism", "invariant"), ("deterministic", True))),
    Row("llama", "kernels", NGRAM, torch.float16, (("deterministic", True), ("group", 2))),
    Row("llama", "torch", None, torch.float64),
    Row("llama", "torch", EXIT, settings=(("acceptance", "rejection"),)),
    Row("gpt2", "kernels", EXIT, settings=(("deterministic", True), ("group", 2))),
    Row("gpt2", "torch", FAST, torch.bfloat16),
    Row("gpt-neox", "kernels"),
    Row("gemma2", "kernels"),
    Row("gemma2", "torch", EXIT, torch.bfloat16),
    Row("qwen3", "kernels", NGRAM, torch.bfloat16),
    Row("qwen3", "torch", EXIT, settings=(("path", "bridge"),)),
    Row("mixtral", "kernels", FAST),
    Row("qwen3-moe", "torch", EXIT, torch.bfloat16),
    Row("gpt-oss", "torch", None),
    Row("bamba", "kernels", EXIT, settings=(("deterministic", True), ("group", 2))),
]


def tiny(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A new tiny model of a decoder, a mixture of experts, or a recurrent hybrid."""
    if family in ("mixtral", "qwen3-moe", "gpt-oss"):
        return mixture(family, dtype)
    if family == "bamba":
        return tiny_family(family, {"eos_token_id": None})
    return hf_model(family, dtype)


def assert_alike(device: Trace, host: Trace, is_bitwise: bool, dtype: torch.dtype = torch.float32) -> None:
    """Tokens and verdicts ==; states and readings of committed rows bitwise, or close."""
    assert device.tokens == host.tokens and device.fingerprint["device"] == "cuda:0"
    assert device.row_table.status.tolist() == host.row_table.status.tolist()
    for request_id in (0, 1):
        ours, theirs = states(device, request_id), states(host, request_id)
        assert bitwise(ours, theirs) if is_bitwise else close(ours, theirs, RTOL[dtype], because=SUMS)
    ours, theirs = (one.hypotheses() for one in (device, host))
    assert len(ours) == len(theirs) > 30 and not ours.entropy_nats.isna().any()
    if is_bitwise:
        assert ours.equals(theirs)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.family}-{row.way}-{row.dtype}".replace("torch.", ""))
def test_a_run_is_the_cpus(gpu: Gpu, row: Row) -> None:
    """In kernels bitwise, since the same functions compute; by torch tokens ==, states close."""
    settings = {**RUN, **dict(row.settings), "drafter": row.drafter, "capture": "STCZ"}
    if row.way == "torch":
        device, host = (cp.run(one, PROMPTS[:2], **settings) for one in reversed(on_both(tiny(row.family, row.dtype))))
    else:
        with kernels_by_references(gpu):
            models = on_both(tiny(row.family, row.dtype), "kernels")
            device, host = (cp.run(one, PROMPTS[:2], **settings) for one in reversed(models))
    attends_by_torch = row.way == "torch" or row.family == "gemma2"  # no kernel limits scores
    assert_alike(device, host, is_bitwise=not attends_by_torch, dtype=row.dtype)
    assert gpu.refused == []


def test_a_draft_model_and_a_snapshot(way: str, gpu: Gpu) -> None:
    """Tokens == those on the CPU: drafts of another model on the GPU, and a run on from stored keys and values."""
    found = []
    for model in on_both(hf_model("llama"), way):
        near = hf_model("llama")
        with torch.no_grad():
            near.lm_head.weight[::7] *= 0.5  # agrees often, and not always
        drafter = cp.drafters.DraftModel(cp.load_model(near.to(model.device), products="torch"))
        drafted = cp.run(model, PROMPTS[:2], drafter=drafter, **RUN)
        rows = cp.kv_snapshot(model, PROMPTS[0], capacity=64).masked([1])
        hidden = cp.run(model, [cp.Request(PROMPTS[0], cached=rows, own_fingerprint=True)], **RUN)
        found.append((drafted.tokens, hidden.tokens, drafted.num_drafted > 3))
    assert found[0] == found[1] and found[0][2] and found[0][1][0] != found[0][0][0]


def test_to_disk_and_on(way: str, gpu: Gpu, tmp_path: Path) -> None:
    """A run that is written while it goes on, ended in its middle and resumed: tokens and states == those in memory."""
    _, model = on_both(hf_model("llama"), way)
    settings = {**RUN, "capture": "STCZ", "drafter": EXIT, "deterministic": True, "group": 2}
    memory = cp.run(model, PROMPTS[:2], **settings)
    right, passes = ModelRunner.run, iter(range(999))

    def run(runner: ModelRunner, a_pass: Pass) -> Any:
        if next(passes) == 9:
            raise KeyboardInterrupt
        return right(runner, a_pass)

    with mock.patch.object(ModelRunner, "run", run), pytest.raises(KeyboardInterrupt):
        cp.run(model, PROMPTS[:2], **settings, out=tmp_path / "run")
    resumed = cp.resume(tmp_path / "run", model, drafter=EXIT, progress=False)
    for trace in (resumed, cp.load_trace(tmp_path / "run", model)):
        assert trace.tokens == memory.tokens
        assert all(bitwise(states(trace, i), states(memory, i)) for i in (0, 1))
    assert cp.verify(resumed, progress=False).is_equal


def test_gradients(way: str, gpu: Gpu) -> None:
    """Gradients of activations close to the CPU's."""
    metric = cp.analysis.logit_difference(3, 5)
    host, device = (cp.gradients(one, PROMPTS[:1], metric, progress=False) for one in on_both(hf_model("llama"), way))
    for site, layer in (("S", 0), ("T", 1), ("C", 2)):
        ours, theirs = (one.of_request(site, layer, 0) for one in (device, host))
        assert theirs.abs().max() > 0
        assert close(ours.cpu(), theirs, 1e-4, because="attention and its gradient are computed in other steps")


def test_interventions_heads_and_features(way: str, gpu: Gpu) -> None:
    """Tokens of a steered run == the CPU's; its heads and the features of its states close."""
    vector, found = 20 * torch.randn(32, generator=torch.Generator().manual_seed(1)), []
    capture = cp.CaptureConfig(
        sites="STC", heads=tuple("qkvz"), dictionary=random_dictionary("topk", "S", 1), top_features=4
    )
    host, device = on_both(hf_model("llama"), way)
    for model in (host, device):
        steer = cp.interventions.add(vector, site="S", layer=1, request_id=1)
        found.append(cp.run(model, PROMPTS[:2], drafter=EXIT, capture=capture, interventions=[steer], **RUN))
    ours, theirs = found[1], found[0]
    assert ours.tokens == theirs.tokens != cp.run(host, PROMPTS[:2], **RUN).tokens
    for site in "qkvz":
        assert close(ours.vectors(site, 1, [0, 1, 2]), theirs.vectors(site, 1, [0, 1, 2]), 1e-4, because=SUMS), site
    assert close(numbers(ours.features()), numbers(theirs.features()), 1e-4, because=SUMS) and len(ours.features()) > 40


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox", "gemma2"])
def test_a_model_over_two_gpus(gpu: Gpu, tmp_path: Path, family: str) -> None:
    """Layers on cuda:0 and cuda:1, in the plain model: tokens ==, states close to the CPU's."""
    live = hf_model(family)
    live.save_pretrained(tmp_path)
    inner, base = live.base_model, live.base_model_prefix
    head = 0 if live.config.tie_word_embeddings else 1
    device_map = {name: head for name, _ in live.named_children() if name != base}
    for name, child in inner.named_children():
        of_layers = {f"{base}.{name}.{layer}": int(layer > 0) for layer in range(3)}
        is_list = isinstance(child, torch.nn.ModuleList)
        device_map |= of_layers if is_list else {f"{base}.{name}": int("norm" in name or name == "ln_f")}
    capture = cp.CaptureConfig(sites="STCZ", heads=("z", "pattern"))
    settings = {**RUN, "drafter": EXIT, "capture": capture, "deterministic": True, "group": 2}
    host = cp.run(cp.load_model(tmp_path, products="torch"), PROMPTS[:2], **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model = cp.load_model(tmp_path, device_map=device_map)
    assert model.path == "plain"
    assert {str(one.device) for one in model.live.parameters()} == {"cuda:0", "cuda:1"}
    device = cp.run(model, PROMPTS[:2], **settings)
    assert device.fingerprint["device"] == "cuda:0, cuda:1" and device.tokens == host.tokens
    assert all(close(states(device, i), states(host, i), 1e-4, because=SUMS) for i in (0, 1))
    assert gpu.refused == [] and len(device.hypotheses()) == len(host.hypotheses())


@pytest.mark.parametrize("name", available("kernels"))
def test_kernels_in_tritons_interpreter_take_the_gpus_tensors(gpu: Gpu, name: str) -> None:
    """The kernels themselves, not their references: bitwise what the interpreter computes on the CPU. A whole run would
    take minutes."""
    kernel = find("kernels", name)
    arguments = kernel.inputs(kernel.cases[0], Draws(torch.device("cpu")))
    moved = {key: one.to("cuda") if isinstance(one, torch.Tensor) else one for key, one in arguments.items()}
    host, device = kernel.outcome(kernel.run, arguments), {**moved}
    returned = named(kernel.run(**device))
    for key, wanted in host.items():
        found = {**device, **returned}[key]
        assert found.device.type == "cuda" and bitwise(found.cpu(), wanted), key
    assert gpu.refused == []


def test_a_planted_host_read_is_counted_in_each_layer_of_its_phase(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each layer and decode pass, with its place; verify passes wait as often as before."""
    _, model = on_both(hf_model("llama"))
    settings = {**RUN, "drafter": FAST, "capture": None, "draft_length": 3}

    def waits() -> dict[str, int]:
        gpu.waits.clear()
        gpu.passes.clear()
        with phases(gpu):
            cp.run(model, PROMPTS[:2], **settings)
        return gpu.waits_by_phase()

    before, right = waits(), StagedCache.store

    def reads(cache: StagedCache, layer: int, k: torch.Tensor, *others: Any) -> None:
        if k.shape[2] == 1:
            k.sum().item()
        right(cache, layer, k, *others)

    monkeypatch.setattr(StagedCache, "store", reads)
    after = waits()
    assert after["draft"] - before["draft"] == 3 * gpu.passes["draft"] > 0
    assert after["verify"] == before["verify"] and gpu.passes["verify"] > 0
    assert any("test_wide.py" in at for phase, kind, at in gpu.waits if (phase, kind) == ("draft", "item"))


def test_a_planted_mix_ends_the_run(way: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight of the last norm stays on the host: the error names both devices."""
    _, model = on_both(hf_model("llama"), way)
    right = model.output_parts().norm.weight
    monkeypatch.setattr(model.head.norm, "weight", torch.nn.Parameter(right.detach().cpu(), requires_grad=False))
    with pytest.raises(
        (cp.core.records.EngineError, RuntimeError), match="two devices, cuda:0 and cpu|one device is needed"
    ):
        cp.run(model, PROMPTS[:2], **RUN)
