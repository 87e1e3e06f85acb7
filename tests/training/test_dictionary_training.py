"""Training a topk dictionary on a trace's states: it explains more than the mean and than random features."""

from pathlib import Path

import pytest
import torch

import cacheprobe as cp
from cacheprobe.ops.equality import bitwise
from cacheprobe.training.dictionary import _is_held, train_dictionary
from cacheprobe.training.settings import DictionarySettings
from tests.dictionaries.test_saelens import ask, differences, saelens
from tests.tiny import PROMPTS, SMALL, loaded

__all__ = ["saelens"]
SETTINGS = dict(site="C", layer=1, features=96, k=8, steps=200, batch=64)


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    prompts = [[(7 * i + j * j) % 90 for j in range(12)] for i in range(8)]
    return cp.run(loaded(), [*PROMPTS, *prompts], **SMALL, capture="C", drafter=cp.drafters.EarlyExit(layer=1))


def explained(trace: cp.Trace, **changes: object) -> float:
    about = train_dictionary(trace, DictionarySettings(**{**SETTINGS, **changes}), progress=False).config.about
    return float(str(about["variance_explained"]))


def test_training_explains_held_out_states(trace: cp.Trace) -> None:
    """Much more than at the beginning; and more with more features of a state."""
    few, untrained = explained(trace, k=2), explained(trace, steps=1, learning_rate=1e-9)
    assert explained(trace) > max(few, untrained, 0.5) + 0.1


def test_it_is_a_function_of_its_settings_and_is_read_again(trace: cp.Trace, tmp_path: Path) -> None:
    settings = DictionarySettings(**{**SETTINGS, "steps": 5})
    mine, same = (train_dictionary(trace, settings, out, progress=False) for out in (tmp_path / "out", None))
    with pytest.raises(ValueError, match="out holds a dictionary; choose another folder"):
        train_dictionary(trace, settings, tmp_path / "out", progress=False)
    again = cp.lenses.Dictionary.load(tmp_path / "out")
    assert mine.sha256 == same.sha256 == again.sha256 and again.config.place == ("C", 1)
    assert again.config.about["training"] == settings.as_dict()
    assert len(trace.features(again, top=3))
    other = train_dictionary(trace, DictionarySettings(**{**SETTINGS, "steps": 5, "seed": 1}), progress=False)
    assert not bitwise(other.tensors["W_dec"], mine.tensors["W_dec"])


@pytest.mark.slow
def test_saelens_reads_it(saelens: str, trace: cp.Trace, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    mine = train_dictionary(trace, DictionarySettings(**SETTINGS), tmp_path / "out", progress=False)
    ask(saelens, "--read", tmp_path / "out", tmp_path / "read")
    assert max(differences(mine, load_file(tmp_path / "read" / "expected.safetensors")).values()) <= 1e-6


def test_what_cannot_be_trained_is_refused(trace: cp.Trace) -> None:
    with pytest.raises(ValueError, match="site S was not captured"):
        train_dictionary(trace, DictionarySettings(**{**SETTINGS, "site": "S"}), progress=False)
    with pytest.raises(ValueError, match="a step draws 5000 states"):
        train_dictionary(trace, DictionarySettings(**{**SETTINGS, "batch": 5000}), progress=False)


def test_no_held_out_state_is_that_of_a_trained_row() -> None:
    """A draft and its verification, and equal prompts, have nearly the same states at a position."""
    prompts = [*PROMPTS[:2], PROMPTS[1]]
    trace = cp.run(loaded(), prompts, **SMALL, capture="S", drafter=cp.drafters.EarlyExit(layer=1))
    rows = trace.rows()
    held = _is_held(trace, rows, 0.2, torch.Generator().manual_seed(0)).numpy()
    keys = [(tuple(prompts[line.request_id]), line.position) for line in rows.itertuples()]
    sides = [{key for key, is_held in zip(keys, held, strict=True) if is_held == side} for side in (True, False)]
    assert held.any() and not sides[0] & sides[1] and len(set(keys)) < len(keys)
    assert {line.status for line in rows[held].itertuples()} >= {"committed", "rolled_back"}
