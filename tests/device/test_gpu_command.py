"""`make gpu` without a GPU: every check once on the pretend GPU at tiny sizes, and the processes that run them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from cacheprobe.core.registry import names
from cacheprobe.models.base import ModelError
from cacheprobe.ops.kernel_set import KernelSet
from cacheprobe_benchmarks.gpu import checks, everything, jobs, one, wheels
from cacheprobe_benchmarks.gpu.listed import CHECKS, KERNELS, Check
from cacheprobe_kernels.base import Draws
from tests.device.counts import Gpu
from tests.device.runs import kernels_by_references

ROOT = Path(__file__).parents[2]
GIVEN = one.Given(1, dict(name="pretend", bytes_per_second=1e9, flops_per_second=1e9), is_small=True)
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run_check(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Function that runs a check on the pretend GPU: kernels alone in Triton's interpreter, in runs by references."""
    draws = lambda self: object.__setattr__(self, "generator", torch.Generator().manual_seed(self.seed))  # noqa: E731
    monkeypatch.setattr(Draws, "__post_init__", draws)  # a torch without CUDA can make no generator for a GPU
    tiny = jobs.random_llama(jobs.SMALL, "cpu")
    tokenizer = lambda text: SimpleNamespace(input_ids=[len(text) % 60, 5, 2])  # noqa: E731
    monkeypatch.setattr(jobs, "smollm2_directory", lambda: None)
    monkeypatch.setattr(jobs, "plain_model", lambda name, dtype: (tiny, tokenizer, ""))

    def run(name: str) -> dict[str, Any]:
        if name in (*KERNELS, "roofs"):
            return one.run_check(name, GIVEN)
        with kernels_by_references(gpu):
            return one.run_check(name, GIVEN)

    return run


@pytest.mark.parametrize("name", [check.name for check in CHECKS])
def test_a_check_gives_a_result(gpu: Gpu, run_check: Run, name: str) -> None:
    found = run_check(name)
    assert found["complaints"] == [] and gpu.refused == []
    if name == "device":
        assert found["lines"][0] == "Pretend GPU" and found["best"]["flops_per_second"] > 0
    if name == "roofs":
        assert [timing["kernel"] for timing in found["timings"]] == sorted(KERNELS)
    if name in ("smollm2-135m", *jobs.SHAPES):
        assert "Triton" in found["products"] and found["seconds_median"].keys() == {"hf", *jobs.JOBS}
        assert all(found[f"{job}_ratio"] > 0 and found[f"{job}_over_roofline"] > 1 for job in jobs.JOBS)
    json.dumps(found)


def test_every_kernel_has_a_check_and_the_sizes_of_a_large_model() -> None:
    assert sorted(KERNELS) == list(names("kernels")) == sorted(one.on_gpu.WIDE)
    assert one.on_gpu.large_cases(one.find("kernels", "matmul"))[1].sizes["o"] == 14_336


@pytest.mark.parametrize(("name", "told"), [("loop", "of its largest number away"), ("patching", "a logit difference")])
def test_a_product_that_is_a_little_wrong_is_told(
    run_check: Run, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    right = KernelSet.product
    monkeypatch.setattr(checks, "MOST_APART", 1e-6)
    monkeypatch.setattr(KernelSet, "product", lambda self, *given: right(self, *given) * (1 + 2e-5))
    assert told in run_check(name)["complaints"][-1]


def test_a_wrong_product_is_an_error(run_check: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the comparison: such a model does not load."""
    right = KernelSet.product
    monkeypatch.setattr(KernelSet, "product", lambda self, *given: right(self, *given) * (1 + 2e-3))
    with pytest.raises(ModelError, match="differs from the model without it"):
        run_check("loop")


def test_a_control_that_goes_unnoticed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ignoring = type("Model", (), {"use_operations": lambda self, operations: None})
    monkeypatch.setattr(checks, "model_on", lambda device, size: ignoring())
    monkeypatch.setattr(checks, "differing", lambda model, new_tokens, **settings: [])
    told = checks.determinism_complaints("cpu", checks.SMALL)
    ways = ["plain", "verify", "invariant"]
    assert [text.split(":")[0] for text in told] == ways and all("planted" in text for text in told)


def test_a_job_needs_one_copy_of_the_weights_and_no_sha256(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: 8 billion weights were copied, and 16 GB of them downloaded for a SHA-256."""
    monkeypatch.setattr("cacheprobe.models.hf.lm.sha256_of", lambda named: 1 / 0)
    model, prompts = jobs.named("random-8b", "cpu", is_small=True)
    theirs: list[Any] = []
    generated = jobs.generated
    monkeypatch.setattr(jobs, "generated", lambda live, *given: theirs.append(live) or generated(live, *given))
    rates = jobs.Rates({"a": {"torch": 1.0}}, 1.0)
    assert jobs.main_job(model, prompts, rates, 1, 2)["stc_over_roofline"] > 1
    own, other = ({one.data_ptr() for one in live.parameters()} for live in (model.live, theirs[0]))
    assert own == other and theirs[0] is not model.live
    assert model.fingerprint()["weights_sha256"].startswith("seed 0, Shape(vocab=64")


def test_smollm2_is_skipped_by_name_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise FileNotFoundError("SmolLM2-135M is not installed")

    monkeypatch.setattr(jobs, "smollm2_directory", absent)
    assert one.run_check("smollm2-135m", GIVEN) == {"skipped": "SmolLM2-135M is not installed"}
    assert "rates" in one.run_check("roofs", GIVEN._replace(best=None))["skipped"]


WITHOUT = """
import sys
for name in ("cyclopts", "datasets", "gguf", "platformdirs", "plotly", "pydantic", "transformer_lens"):
    sys.modules[name] = None
from cacheprobe_benchmarks.gpu import one
found = one.run_check("random-1b", one.Given(1, dict(name="", bytes_per_second=1., flops_per_second=1.), True, "cpu"))
assert found["stc_ratio"] > 0
"""


def test_a_job_runs_without_packages_that_a_machine_may_lack(tmp_path: Path) -> None:
    env = {**os.environ, "CACHEPROBE_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CHILD = """
import json, os, signal, subprocess, sys, time
name, result, settings = sys.argv[1:]
given = json.loads(settings)
stored = list(json.load(open(os.environ["STORED"]))["checks"]) if os.path.exists(os.environ["STORED"]) else []
found = {"complaints": [], "lines": [f"after {stored}, {given}"]}
if name == "device":
    found |= {"name": "A GPU", "best": {"rate": 2}}
if name == "raises":
    print("loading")
    raise ValueError("out of memory")
if name == "sleeps":
    subprocess.run(["sleep", "60"])
if name == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if name == "complains":
    found["complaints"] = ["wrong by 3"]
if name == "absent":
    found = {"skipped": "no weights"}
if name == "imports":
    import carried
    found["lines"] = [carried.TEXT]
if name != "silent":
    json.dump(found, open(result, "w"))
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Function that runs the command with these checks, each as CHILD says; returns (exit status, what it stored)."""
    monkeypatch.setattr(everything, "CHILD", (sys.executable, "-c", CHILD))
    monkeypatch.setenv("STORED", str(stored := tmp_path / "gpu.json"))

    def run(listed: list[str], *options: str, seconds: float = 1) -> Any:
        limits = {name: 1 if name == "sleeps" else 30 for name in listed}
        monkeypatch.setattr(everything, "CHECKS", [Check(name, "", seconds, limits[name]) for name in listed])
        status = everything.main(["--json", str(stored), *options])
        return status, json.loads(stored.read_text())

    return run


def test_a_check_that_ends_badly_leaves_the_others(command: Run, capsys: pytest.CaptureFixture[str]) -> None:
    listed = ["device", "raises", "sleeps", "killed", "silent", "complains", "absent", "good"]
    status, stored = command(listed)
    assert status == 1 and stored["device"] == "A GPU" and list(stored["checks"]) == listed
    assert {name: (found["outcome"], found["reason"]) for name, found in stored["checks"].items()} == {
        "device": ("good", ""),
        "raises": ("failed", "ValueError: out of memory"),
        "sleeps": ("failed", "exceeded its limit of 1 s"),
        "killed": ("failed", "killed by SIGKILL"),
        "silent": ("failed", "ended with status 0 and said nothing"),
        "complains": ("complains", "wrong by 3"),
        "absent": ("skipped", "no weights"),
        "good": ("good", ""),
    }
    assert stored["checks"]["raises"]["last_lines"][0] == "loading" and stored["checks"]["sleeps"]["seconds"] < 20
    assert stored["checks"]["good"]["lines"] == [f"after {listed[:-1]}, {{'rounds': 3, 'best': {{'rate': 2}}}}"]
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in said[2:-1]] == [f"| {name}" for name in listed]


def test_only_named_checks_run_and_earlier_results_stay(command: Run) -> None:
    status, _ = command(["device", "complains", "good"])
    again, stored = command(["device", "complains", "good"], "--only", "good", "--rounds", "7")
    assert (status, again) == (1, 0)
    assert stored["checks"]["complains"]["outcome"] == "complains" and stored["rounds"] == 7
    with pytest.raises(SystemExit):
        command(["device"], "--only", "devise")


def test_what_does_not_fit_the_budget_is_skipped(command: Run) -> None:
    """By the estimate; by the seconds that an earlier run on this device measured, if there are any."""
    status, stored = command(["device", "good"], "--budget", "40", seconds=30)
    assert status == 0 and stored["checks"]["good"]["outcome"] == "good"
    status, stored = command(["device", "good", "absent"], "--budget", "29", seconds=28.99)
    assert status == 0 and stored["checks"]["good"]["outcome"] == "good"
    assert stored["checks"]["absent"]["reason"].startswith("needs about 29 s, 2")


def test_carried_wheels_are_imported(command: Run, tmp_path: Path) -> None:
    with ZipFile(tmp_path / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "TEXT = 'from a wheel'")
    _, stored = command(["device", "imports"], "--wheels", str(tmp_path))
    assert stored["checks"]["imports"]["lines"] == ["from a wheel"]
    assert command(["device", "imports"])[0] == 1


def test_wheels_are_few_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    asked: list[str] = []
    monkeypatch.setattr(wheels.subprocess, "run", lambda command, check: asked.extend(command))
    (tmp_path / "one-1-py3-none-any.whl").write_bytes(bytes(20_000))
    wheels.main(["--to", str(tmp_path), "--python", "3.13"])
    assert "platformdirs==4.14.5" in asked and "3.13" in asked and "--no-deps" in asked
    assert capsys.readouterr().out.split() == ["0.02", "MB", "one-1-py3-none-any.whl", "0.02", "MB", "in", "all"]
    wheels.main([])
    assert float(capsys.readouterr().out.splitlines()[-1].split()[0]) < 60


def test_without_a_gpu_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "cacheprobe_benchmarks.gpu.everything", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and not out.exists()
    assert "make gpu: there is no GPU" in done.stderr and "nothing was run or written" in done.stderr
    assert everything.main(["--list", "--only", "loop"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["device", "loop"]
