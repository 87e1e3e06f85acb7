"""Every finding is measured by its preset small, as a user would: its verdict is written, and its claims are judged."""

import json
from pathlib import Path

import pytest
import torch

from cacheprobe.cli.app import app
from cacheprobe.core.registry import available, find
from cacheprobe_analyses.findings.finding import is_judged

HOLD = {"belief-geometry": ["mess3_gain"], "markov-circuit": ["selective"], "depth": ["tuned_better"], "flip-flop": [],
        "attention-drift": []}  # fmt: skip
"""Claims that preset small reproduces, with little training too."""


@pytest.mark.slow
@pytest.mark.parametrize("name", available("findings"))
def test_the_small_preset_gives_verdicts(name: str, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        command = ["findings", "run", name, "--preset", "small", "--out", str(tmp_path)]
        assert app(command, result_action="return_value") in (0, None)
    finally:
        torch.set_num_threads(before)
    result = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    lines = {line["key"]: line for line in result["lines"]}
    assert result["preset"] == "small" and len(result["seeds"]) == 3
    judged = [one.key for one in find("findings", name)().published if (one.value or one.above is not None)]
    assert all(is_judged(lines[key]["verdict"]) or "not judged" in lines[key]["verdict"] for key in judged)
    assert [key for key in HOLD[name] if lines[key]["verdict"] != "reproduced"] == []
