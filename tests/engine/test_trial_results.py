"""What the trials of pass shapes found is read by a later process, and not for other weights, dtypes or threads."""

from pathlib import Path

import pytest
import torch

import cacheprobe as cp
from cacheprobe.engine import shape_trial, shapes
from cacheprobe.models.plain.lm import PlainLM
from tests.tiny import PROMPTS, SMALL, hf_model

ASKED = {name: value for name, value in SMALL.items() if name != "group"}


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The shapes that are tried; results are stored in a folder of the test."""
    made: list[tuple] = []

    class Counted(shapes.ShapeTrial):
        """A trial that is counted."""

        def __init__(self, model: PlainLM, *shape: object) -> None:
            made.append(shape)
            super().__init__(model, *shape)

    monkeypatch.setattr(shapes, "ShapeTrial", Counted)
    monkeypatch.setattr(shape_trial, "_path", own_path)
    monkeypatch.setenv("CACHEPROBE_CACHE", str(tmp_path))
    return made


own_path = shape_trial._path
"""That of the module: the set-up of all tests replaces it."""


def run(model: PlainLM) -> list[int]:
    return cp.run(model, PROMPTS, **ASKED, deterministic=True).committed(0)


def another_process(dtype: torch.dtype = torch.float32, seed: int = 0) -> PlainLM:
    """The same weights in a model of which this process knows nothing."""
    return cp.load_model(hf_model("llama", dtype, seed))


def test_a_later_process_tries_nothing(tried: list[tuple], tmp_path: Path) -> None:
    first = run(another_process())
    count = len(tried)
    assert count and len(list((tmp_path / "trials").iterdir())) == 1
    assert run(another_process()) == first and len(tried) == count


@pytest.mark.parametrize("change", ["weights", "dtype", "threads"])
def test_other_bits_are_tried_anew(tried: list[tuple], change: str) -> None:
    run(another_process())
    count = len(tried)
    if change == "threads":
        torch.set_num_threads(1)
    run(another_process(torch.bfloat16 if change == "dtype" else torch.float32, 1 if change == "weights" else 0))
    assert len(tried) > count


def test_faults_and_models_with_hooks_are_not_stored(tried: list[tuple], tmp_path: Path) -> None:
    """A hook may mix requests: what it makes of the bits is true of this model alone."""
    model = another_process()
    shapes.forbid_batched_prompts(model, "other keys")
    assert not (tmp_path / "trials").exists()
    live = hf_model("llama", seed=3)
    handle = live.model.layers[1].mlp.register_forward_hook(lambda module, args, out: None)
    run(cp.load_model(live))
    handle.remove()
    assert not (tmp_path / "trials").exists()


@pytest.mark.parametrize("content", ["{", "[1]", '"x"'])
def test_a_damaged_file_is_written_anew(tried: list[tuple], tmp_path: Path, content: str) -> None:
    run(another_process())
    (file,) = (tmp_path / "trials").iterdir()
    file.write_text(content)
    count = len(tried)
    run(another_process())
    assert len(tried) == 2 * count
    run(another_process())
    assert len(tried) == 2 * count


def test_a_folder_that_cannot_be_written_stops_nothing(tried: list[tuple], tmp_path: Path) -> None:
    (tmp_path / "trials").write_text("a file")
    assert run(another_process())
