"""nnsight's arm of `field`: S, T and C saved while its model generates, beside its own Hugging Face model alone.

nnsight is no dependency of cacheprobe. It is installed once, without its dependencies and with the few that are
missing, into a folder of the user's cache, and imported by a process of its own with the same torch and transformers.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from cacheprobe.models.converted import cache_directory
from cacheprobe.models.known import smollm2_directory

PACKAGES = ("nnsight==0.8.1", "greenlet>=3,<4", "cloudpickle>=3,<4", "websocket-client>=1.8,<2", "zstandard>=0.23,<1")


def measure(prompts: list[list[int]], new_tokens: int, rounds: int) -> Iterator[tuple[float, float, int]]:
    """Of each round: seconds of nnsight's run, of `generate` before and after it on average, and the bytes kept.

    Raises: RuntimeError, naming the cause, where nnsight cannot be installed or fails.
    """
    import torch

    folder = _installed()
    command = [sys.executable, "-m", __name__]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    asked = json.dumps([prompts, new_tokens, rounds, torch.get_num_threads()])
    with TemporaryFile("w+") as said:  # no pipe: it may say more than one holds before it is read
        with subprocess.Popen([*command, asked], stdout=subprocess.PIPE, stderr=said, env=env, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                took, beside, kept = json.loads(line)
                yield took, beside, kept
        if process.returncode:
            said.seek(0)
            end = said.read().strip()[-500:]
            raise RuntimeError(f"nnsight's process ended with exit code {process.returncode}: {end}")


def _installed() -> Path:
    """The folder that has nnsight, whole or not at all."""
    folder = cache_directory() / PACKAGES[0].replace("==", "-")
    if folder.exists():
        return folder
    staging = folder.with_name(f"{folder.name}.{os.getpid()}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(staging), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(staging, ignore_errors=True)
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
        raise RuntimeError(f"pip could not install {PACKAGES[0]}: {errors[-1]}")
    try:
        staging.rename(folder)
    except OSError:  # another process was sooner
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _serve(prompts: list[list[int]], new_tokens: int, rounds: int, threads: int) -> None:
    """In nnsight's process: a line of JSON for each round but the first, which allocates."""
    import torch
    from nnsight import TransformersModel  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    told = sys.stdout
    sys.stdout = sys.stderr
    model = TransformersModel(
        str(smollm2_directory()), task="text-generation", dtype=torch.bfloat16, dispatch=True, device_map="cpu"
    )
    ids = torch.tensor(prompts)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    settings: dict[str, Any] = dict(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    plain = model._module

    def alone() -> Any:
        with torch.inference_mode():
            return plain.generate(**inputs, **settings)

    def traced() -> Any:
        # nnsight reads this block's source and runs it inside the model, step by step
        with torch.inference_mode(), model.generate(inputs, **settings) as tracer:
            kept = list().save()
            for _ in tracer.iter[0:new_tokens]:
                for layer in model.model.layers:
                    kept.append(layer.self_attn.output[0].clone())
                    kept.append(layer.mlp.output.clone())
                    kept.append(layer.output.clone())
            result = tracer.result.save()
        return kept, result

    def seconds(job: Callable[[], Any]) -> tuple[float, Any]:
        began = time.perf_counter()
        made = job()
        return time.perf_counter() - began, made

    before, said = seconds(alone)
    for number in range(rounds + 1):
        took, (kept, result) = seconds(traced)
        after, _ = seconds(alone)
        if not torch.equal(said, result):
            raise RuntimeError("nnsight's model generated other tokens than Hugging Face's")
        size = sum(states.numel() * states.element_size() for states in kept)
        if number:
            print(json.dumps([took, (before + after) / 2, size]), file=told, flush=True)
        before = after


if __name__ == "__main__":
    _serve(*json.loads(sys.argv[1]))
