"""What lies outside a run's weights and settings: buffers, the process, its default device, and broken files."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import cacheprobe as cp
from cacheprobe.edits import interventions as iv
from cacheprobe.edits.patching.grid import PatchingGrid
from cacheprobe.engine.fingerprint import FingerprintMismatch
from cacheprobe.engine.shapes import ShapeRefused
from cacheprobe.models.base import ModelError
from cacheprobe.tasks.files import load_examples
from cacheprobe.training.dictionary import train_dictionary
from cacheprobe.training.settings import DictionarySettings
from tests.dictionaries.planted import random_dictionary
from tests.field.tiny_family import tiny_family
from tests.reported.test_shapes import generated
from tests.tiny import SMALL, hf_model, loaded

RUN: dict[str, Any] = {**SMALL, "capture": "S"}
PROMPT = [1, 2, 3, 4, 5]


# -- buffers


def buffer(model: Any, name: str) -> torch.Tensor:
    """The first buffer of a loaded model whose name ends so."""
    return next(found for path, found in model.bridge.original_model.named_buffers() if path.endswith(name))


@pytest.mark.parametrize(("family", "name"), [("deepseek_v3", "e_score_correction_bias"), ("llama", ".inv_freq")])
def test_a_buffer_that_changes_inside_or_between_runs_is_noticed(family: str, name: str, tmp_path: Path) -> None:
    model = cp.load_model(hf_model(seed=5) if family == "llama" else tiny_family(family))
    changed = buffer(model, name)

    def keep(row: Any) -> bool:
        if row.position == 12:
            changed.data.add_(0.5)
        return True

    before = cp.run(model, [PROMPT], deterministic=True, **RUN)
    stream = cp.stream(model, [PROMPT], out=tmp_path / "run", max_new_tokens=20, window=4, group=2, capacity=96)
    for _ in range(3):
        next(stream)
    stream.close()
    with pytest.raises(FingerprintMismatch, match="begin and end of one run.*buffers_sha256"):
        cp.run(model, [PROMPT], **{**RUN, "capture": cp.CaptureConfig("S", keep=keep)})
    with pytest.raises(FingerprintMismatch, match="buffers_sha256"):
        cp.verify(before, model, progress=False)
    with pytest.raises(FingerprintMismatch, match="buffers_sha256"):
        cp.resume(tmp_path / "run", model, progress=False)
    changed.data.sub_(0.5)
    again = cp.run(model, [PROMPT], deterministic=True, **RUN)
    assert cp.verify(again, model, progress=False).is_equal


# -- processes

FORKED = """
import os, signal, torch
import cacheprobe as cp
from cacheprobe.training.settings import DictionarySettings
from cacheprobe.training.dictionary import train_dictionary
from tests.dictionaries.planted import random_dictionary
from tests.tiny import hf_model
torch.set_num_threads(2)
live, states, dictionary = hf_model(seed=1), torch.randn(3000, 32), random_dictionary("standard")
some = torch.randn(3000, 48)
settings = DictionarySettings(site="S", layer=1, features=16, k=2, steps=3, batch=64)

def tried(calls, num_threads=2):
    for name, call in calls.items():
        child = os.fork()
        if not child:
            signal.alarm(20)  # ends a process that waits for ever
            torch.set_num_threads(num_threads)
            try:
                print(name, call(), flush=True)
            except Exception as error:
                print(name, type(error).__name__, error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)

model = cp.load_model(live)
prompt, options = [1, 2, 3], dict(max_new_tokens=4, progress=False)
first = cp.run(model, [prompt], **options).committed(0)
trace = cp.run(model, [[i, 2 * i, 3, 5] for i in range(1, 9)], max_new_tokens=14, progress=False, capture="SZ")
tried({
    "run": lambda: cp.run(model, [prompt], **options),
    "stream": lambda: next(cp.stream(model, [prompt], max_new_tokens=4)),
    "reference": lambda: cp.reference(model, [prompt], **options),
    "load_model": lambda: cp.load_model(live),
    "patching": lambda: cp.patching.activation(model, prompt, [1, 4, 3], answer=(5, 6), progress=False),
    "kv_snapshot": lambda: cp.kv_snapshot(model, prompt),
    "features": lambda: trace.features(dictionary),
    "train": lambda: train_dictionary(trace, settings, progress=False),
    "neuronpedia": lambda: cp.analysis.to_neuronpedia(trace, dictionary, [7]),
    "encode": lambda: dictionary.encode(states),
    "decode": lambda: dictionary.decode(some),
    "read_states": lambda: cp.analysis.read_states(trace, cp.lenses.LogitLens()),
})
weights = dictionary.tensors
want = ((states - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]).relu()
tried({
    "alone": lambda: torch.allclose(dictionary.encode(states), want, atol=1e-5),
    "one thread": lambda: cp.run(model, [prompt], **options).committed(0) == first,
}, num_threads=1)
print("parent", cp.run(model, [prompt], **options).committed(0) == first)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")
def test_no_call_waits_for_ever_in_a_forked_process() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": f"{root}:{root}/kernels"},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    refused = lines[:-3]
    names = ["run", "stream", "reference", "load_model", "patching", "kv_snapshot"]
    names += ["features", "train", "neuronpedia", "encode", "decode", "read_states"]
    assert [line.split()[0] for line in refused] == names, done.stderr[-2000:]
    for line in refused:
        assert "ModelError this process was forked" in line and "get_context('spawn')" in line, line
    assert lines[-3:] == ["alone True", "one thread True", "parent True"]


def test_another_default_device_is_named_wherever_tensors_are_made(tmp_path: Path) -> None:
    model, dictionary = loaded(), random_dictionary()
    out = hf_model().generate(
        torch.tensor([PROMPT]), return_dict_in_generate=True, output_hidden_states=True, do_sample=False,
        max_new_tokens=6, pad_token_id=0,
    )  # fmt: skip
    trace = cp.run(model, [PROMPT], **RUN)
    settings = DictionarySettings(site="S", layer=1, features=16, k=2, steps=3, batch=8)
    saved = trace.save(tmp_path / "run")
    calls: list[Callable[[], object]] = [
        lambda: cp.run(model, [PROMPT], **RUN),
        lambda: cp.stream(model, [PROMPT], max_new_tokens=4),
        lambda: cp.reference(model, [PROMPT], **RUN),
        lambda: cp.load_model(hf_model(seed=6)),
        lambda: cp.patching.activation(model, [1, 2, 3], [1, 4, 3], answer=(5, 6), progress=False),
        lambda: cp.import_generate(out, model=model),
        lambda: cp.import_generate(out, stop_token_ids=()),
        lambda: trace.features(dictionary),
        lambda: cp.load_trace(saved).states("S", 1, 0),
        lambda: cp.analysis.reconstruction(trace, dictionary),
        lambda: train_dictionary(trace, settings, progress=False),
        lambda: cp.analysis.to_neuronpedia(trace, dictionary, [3]),
        lambda: iv.zero(request_id=0, site="S", layer=1),
    ]
    with torch.device("meta"):
        for call in calls:
            with pytest.raises(ModelError, match=r"default device is meta.*torch.set_default_device\('cpu'\)"):
                call()
    for call in calls:
        call()


# -- invariant requests


def one_key_head() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=1, initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=None,
            max_position_embeddings=256,
        )
    ).eval()  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gpt_bigcode", "bloom"])
def test_invariant_requests_run_or_are_refused_before_the_first_step(family: str) -> None:
    """Of one key head, as in the first two, too; one request as several. What the refusal advises works."""
    live = one_key_head() if family == "llama" else tiny_family(family)
    live.generation_config.eos_token_id = None
    prompts = [PROMPT, [7] * 8]
    want = [generated(copy.deepcopy(live), prompt, 8) for prompt in prompts]
    model = cp.load_model(live)
    settings: dict[str, Any] = dict(max_new_tokens=8, deterministic=True, progress=False)
    for given in (prompts[:1], prompts):
        try:
            trace = cp.run(model, given, determinism="invariant", **settings)
        except ShapeRefused as refused:
            assert str(refused).endswith("set determinism='verify'")
            trace = cp.run(model, given, determinism="verify", **settings)
        assert [trace.committed(i) for i in range(len(given))] == want[: len(given)]


# -- broken files and long prompts


def test_deeply_nested_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000 + "]" * 100_000)
    for call in (
        lambda: PatchingGrid.load(path),
        lambda: load_examples(path),
        lambda: cp.sweep(path, out=tmp_path / "out", progress=False),
    ):
        with pytest.raises(ValueError, match=r"deep\.json"):
            call()


def test_a_prompt_beyond_the_context_is_to_be_shortened() -> None:
    model = cp.load_model(one_key_head())
    for call in (
        lambda: cp.run(model, [[7] * 300], **{**RUN, "capacity": 512}),
        lambda: cp.kv_snapshot(model, [7] * 256, capacity=512),
    ):
        with pytest.raises(ValueError, match="context of 256; shorten the prompt to 255 tokens or fewer$"):
            call()
    with pytest.raises(ValueError, match="context of 256; shorten the prompt or set max_new_tokens=6 or less$"):
        cp.run(model, [[7] * 250], **{**RUN, "capacity": 512})
    with pytest.raises(ValueError, match="context of 256; shorten the prompt$"):
        cp.gradients(model, [[7] * 257], cp.analysis.token_logprob(5), progress=False)
    assert len(cp.run(model, [[7] * 255], **{**RUN, "capacity": 512, "max_new_tokens": 1}).committed(0)) == 1
