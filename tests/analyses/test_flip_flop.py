"""Texts of the flip-flop language, and what is measured at their reads, against plain loops."""

import numpy as np
import pytest
import torch

import cacheprobe as cp
from cacheprobe_analyses.findings.flip_flop import IGNORE, MARKS, READ, WRITE, _foreseen, _reads, sample
from cacheprobe_analyses.small_models import Architecture, random_model


@pytest.mark.parametrize("ignored", [0.1, 0.8, 0.98])
def test_a_read_has_the_bit_written_last(ignored: float) -> None:
    texts = sample(200, 20, ignored, np.random.default_rng(0))
    free = []
    for text in texts:
        bit = None
        for kind, own in zip(text[::2], text[1::2], strict=True):
            assert own in (0, 1)
            if kind == WRITE:
                bit = own
            assert kind != READ or own == bit
            free += [own] if kind == IGNORE else []
    assert (texts[:, 0] == WRITE).all() and (texts[:, -2] == READ).all()
    inner = texts[:, 2:-2:2]
    assert abs((inner == IGNORE).mean() - ignored) < 0.03 and 0.4 < np.mean(free) < 0.6
    assert abs((inner == WRITE).mean() - (inner == READ).mean()) < 0.03


def test_reads_are_those_of_the_model() -> None:
    """Twin: transformers' own forward, one text and one read at a time."""
    live = random_model(Architecture(5, 32, 2, 16, 4, 32), 0)
    texts = sample(12, 8, 0.5, np.random.default_rng(1))
    found = _reads(cp.load_model(random_model(Architecture(5, 32, 2, 16, 4, 32), 0)), texts)
    wrong, margins, distances, owners = [], [], [], []
    for number, text in enumerate(texts):
        with torch.no_grad():
            nats = live(torch.from_numpy(text[None])).logits[0].log_softmax(-1)
        for place in range(0, len(text), 2):
            if text[place] == READ:
                wrong.append(bool(nats[place, :2].argmax() != text[place + 1]))
                margins.append(float((nats[place, 0] - nats[place, 1]).abs()))
                distances.append(place - max(p for p in range(place) if p % 2 == 0 and text[p] == WRITE))
                owners.append(number)
    assert found["wrong"][-1].tolist() == wrong and found["distance"].tolist() == distances
    assert found["text"].tolist() == owners and np.allclose(found["margin"], margins, atol=1e-4)  # other kernels
    assert found["states"].shape == (2, len(owners), 16) and found["wrong"].shape == (2, len(owners))


def test_planted_glitches_are_foreseen_and_shuffled_ones_are_not() -> None:
    draw = np.random.default_rng(0)
    wrong = draw.random(600) < 0.2
    states = draw.normal(size=(2, 600, 4))
    states[1, :, 0] += 4 * wrong
    reads = dict(states=states, wrong=np.stack([~wrong, wrong]), text=np.arange(600) // 3, margin=1.0 - wrong,
                 distance=draw.integers(1, 9, 600))  # fmt: skip
    found = _foreseen(reads, 0)
    assert found["foreseen_last"] > 0.95 and found["foreseen_margin"] == 1.0
    assert all(0.4 < found[f"foreseen_{name}"] < 0.6 for name in ("first", "shuffled", "distance"))
    assert (found["draft_before_glitch"], found["draft_before_right"]) == (0.0, 1.0)


@pytest.mark.parametrize("glitches", [0, 4, 600])
def test_without_glitches_nothing_foresees_them(glitches: int) -> None:
    """Undefined, not a half: with fewer than five glitches, or right reads."""
    wrong = np.arange(600) < glitches
    reads = dict(states=np.zeros((2, 600, 3)), wrong=np.stack([wrong, wrong]), text=np.arange(600),
                 margin=np.ones(600), distance=np.ones(600))  # fmt: skip
    found = _foreseen(reads, 0)
    assert all(np.isnan(found[f"foreseen_{name}"]) for name in MARKS)
    assert np.isnan(found["draft_before_glitch"]) == (glitches == 0)
    assert np.isnan(found["draft_before_right"]) == (glitches == 600)
