"""Two results of a benchmark: worse, better, or within the noise of their rounds; and which benchmarks there are."""

import json
from pathlib import Path
from typing import Any

import pytest

from cacheprobe.cli.measure import compare as command
from cacheprobe.cli.measure import measure
from cacheprobe_benchmarks import catalogue
from cacheprobe_benchmarks.catalogue import benchmark, questions
from cacheprobe_benchmarks.compare import compare, elsewhere
from cacheprobe_benchmarks.states import lens

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def result(**rounds: list[float]) -> dict[str, Any]:
    return {"benchmark": "determinism", "lower_is_better": ["cost"], "of_each_round": rounds, "torch": "2"}


@pytest.mark.parametrize(
    ("name", "old", "new", "verdict"),
    [
        ("kept", [0.9, 0.8, 0.85], [0.7, 0.79, 0.75], "worse"),
        ("kept", [0.9, 0.8, 0.85], [0.7, 0.81, 0.75], "within noise"),
        ("kept", [0.9, 0.8, 0.85], [0.91, 0.95, 0.99], "better"),
        ("cost", [0.9, 0.8, 0.85], [0.7, 0.79, 0.75], "better"),
        ("cost", [0.9, 0.8, 0.85], [0.91, 0.95, 0.99], "worse"),
        ("kept", [0.9, 0.9], [0.1, 0.1, 0.1], "cannot tell"),
    ],
)
def test_a_change_is_judged_by_the_rounds_of_both(name: str, old: list[float], new: list[float], verdict: str) -> None:
    (change,) = compare(result(**{name: old}), result(**{name: new}))
    assert change.verdict == verdict
    assert (change.gain > 1) == (verdict == "better")


def test_the_command_prints_and_exits_by_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "old.json", tmp_path / "new.json"
    for path, values in zip(files, ([0.9, 0.8, 0.85], [0.5, 0.6, 0.55]), strict=True):
        path.write_text(json.dumps(result(kept=values)))
    files[1].write_text(files[1].read_text().replace('"torch": "2"', '"torch": "3"'))
    assert command(*files) == 1 and command(files[1], files[0]) == 0
    said = capsys.readouterr().out
    assert "0.55 (0.50 to 0.60)" in said and "worse" in said and "torch: 2 -> 3" in said
    assert elsewhere(result(), result()) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ({"benchmark": "lens"}, result(kept=[1.0]), "of lens and of determinism"),
        ({}, {}, "no benchmark"),
        ({"benchmark": "determinism"}, result(kept=[1.0]), "first result has no 'of_each_round'"),
        (result(kept=[1.0]), result(lost=[1.0]), "no ratio in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(old: dict[str, Any], new: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compare(old, new)


def test_a_file_that_is_no_result_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"x\.json cannot be read"):
        command(tmp_path / "x.json", tmp_path / "x.json")
    with pytest.raises(ValueError, match=r"y\.json cannot be read"):
        command(tmp_path / "y.json", tmp_path / "x.json")


def test_benchmarks_are_found_and_their_helpers_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    known = questions()
    assert {"main-job", "determinism", "speculation", "lens"} <= set(known) and not {"machine", "compare"} & set(known)
    assert all(len(question) > 20 for question in known.values())
    measure()
    told = capsys.readouterr().out
    assert all(f"{name} " in told and question in told for name, question in known.items())
    with pytest.raises(ValueError, match="unknown benchmark 'machine'; there are"):
        benchmark("machine")
    with pytest.raises(ValueError, match="--rounds 0"):
        measure("lens", rounds=0)


def test_two_files_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark is found in any folder, and its name says which file it is."""
    home = tmp_path / "benchmarks"
    for folder in ("one", "two"):
        (home / folder).mkdir(parents=True)
    (home / "one" / "mine_too.py").write_text('"""How long does mine take?"""\ndef run(rounds): ...\n')
    monkeypatch.setattr(catalogue, "HOME", home)
    assert questions() == {"mine-too": "How long does mine take?"}
    (home / "two" / "mine_too.py").write_text("def run(rounds): ...\n")
    with pytest.raises(ValueError, match=r"'mine-too', benchmarks\.one\.mine_too and benchmarks\.two\.mine_too"):
        questions()


def test_a_benchmark_without_a_small_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(lens, "SMALL")
    with pytest.raises(ValueError, match="benchmark 'lens' has no small form"):
        measure("lens", small=True)


def test_stored_results_can_be_compared() -> None:
    for name in ("determinism", "speculation"):
        held = json.loads((RESULTS / f"{name}.json").read_text())
        assert {change.verdict for change in compare(held, held)} == {"within noise"}
