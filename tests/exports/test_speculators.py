"""The export for speculators, read back by speculators itself in an environment of its own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import cacheprobe as cp
from cacheprobe.analysis.exports import to_speculators
from cacheprobe.ops.equality import bitwise
from cacheprobe_benchmarks.shared.tiny import TINY, tiny_model
from tests.exports.environment import run_script
from tests.tiny import PROMPTS, SMALL


@pytest.mark.slow
@pytest.mark.parametrize("is_shifted", [False, True], ids=["as written", "other tokens"])
def test_its_trainer_gets_the_states_of_the_run(speculators: str, is_shifted: bool, tmp_path: Path) -> None:
    """Bit for bit, by its own file check and data set; it refuses files of other tokens, the control."""
    trace = cp.run(cp.load_model(tiny_model(size=replace(TINY, layers=8))), PROMPTS[:3], **SMALL, capture="S")
    paths = to_speculators(trace, tmp_path / "hidden_states", progress=False)
    wanted = [load_file(path) for path in paths]
    samples = [{"input_ids": (one["token_ids"] + is_shifted).tolist()} for one in wanted]
    (tmp_path / "prepared.jsonl").write_text("\n".join(map(json.dumps, samples)))
    (tmp_path / "out").mkdir()
    done = run_script(speculators, "read_speculators.py", [tmp_path, tmp_path / "out"])
    if is_shifted:
        assert done.returncode and "don't match expected token ids" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-2000:]
    for request, one in enumerate(wanted):
        item = load_file(tmp_path / "out" / f"{request}.safetensors")
        assert torch.equal(item["input_ids"], one["token_ids"])
        assert bitwise(item["hidden_states"], one["hidden_states"][:, :-1].flatten(1))
        assert bitwise(item["verifier_last_hidden_states"], one["hidden_states"][:, -1])
