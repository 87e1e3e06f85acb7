"""How often does a transformer misremember one bit, in and out of distribution, and can a glitch be seen coming?

Source: Liu et al. 2023 (arXiv 2306.00946). A text of the flip-flop language is a sequence of instructions, each with a
bit: write it, ignore it, or read, where the bit must be the one written last. A wrong bit after a read is a glitch.
Our own question: do the states at the read, or an early layer's reading, tell a glitch in advance?
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

import cacheprobe as cp
from cacheprobe.core.registry import register
from cacheprobe.lenses.probes.rollback_prediction import auroc
from cacheprobe_analyses.findings.finding import Advance, Finding, Measured, Published

WRITE, READ, IGNORE = 2, 3, 4
"""Tokens of the instructions; those of the bits are 0 and 1."""
TRAINED, RARE, OFTEN = 0.8, 0.98, 0.1
"""Shares of instructions that are ignored: in training, and out of distribution."""
LEAST_GLITCHES = 5
"""With fewer, one for each fold, no AUROC is defined."""
MARKS = ("last", "first", "margin", "distance", "shuffled")


def _foreseen_lines(name: str, text: str) -> tuple[Published, ...]:
    """Returns the lines on what tells a glitch in advance, in one distribution."""
    return (
        Published(f"{name}_foreseen_last", f"{text}: AUROC of a glitch, by the last layer's states"),
        Published(f"{name}_foreseen_first", "the same, first layer"),
        Published(f"{name}_foreseen_margin", "the same, by the margin of the two bits"),
        Published(f"{name}_foreseen_distance", "control: by the distance to the write, either way"),
        Published(f"{name}_foreseen_shuffled", "control: labels shuffled"),
        Published(f"{name}_draft_glitches", f"{text}: glitch rate of a draft from the layer before the last"),
        Published(f"{name}_draft_before_glitch", "share of glitches where that draft was wrong too"),
        Published(f"{name}_draft_before_right", "share of right reads where that draft was wrong"),
    )


@dataclass(frozen=True)
class Settings:
    """The paper trains 6 layers of width 512 with rotary positions on texts of 512 tokens for 10,000 steps. Our steps
    are as many as a test of minutes allows; the glitch rate in distribution shows what was learned."""

    instructions: int = 64
    layers: int = 4
    width: int = 64
    batch: int = 64
    steps: int = 2000
    rate: float = 1e-3
    texts: int = 1000
    """Texts of each distribution that are tested."""


@register("findings", "flip-flop")
class FlipFlop(Finding):
    """Glitch rates of a transformer, and what is known of a glitch before it."""

    question = "How often is one remembered bit wrong, and can that be foreseen?"
    paper = "Liu et al. 2023, arXiv 2306.00946"
    published = (
        Published("glitches_trained", "glitch rate in distribution"),
        Published("glitches_rare", "the same, rare writes"),
        Published("glitches_often", "the same, frequent writes"),
        Published("rare_more", "glitch rate, rare writes less in distribution"),
        Published("often_more", "glitch rate, frequent writes less in distribution"),
        *_foreseen_lines("often", "frequent writes"),
        *_foreseen_lines("rare", "rare writes"),
    )
    presets = {
        "tiny": Settings(10, 2, 16, 16, 15, 3e-3, 80),
        "small": Settings(instructions=32, batch=32, steps=100, texts=100),
        "full": Settings(),
    }

    def steps(self, settings: Settings) -> int:
        return settings.steps

    def measure(self, settings: Settings, seed: int, advance: Advance) -> Measured:
        import torch

        from cacheprobe_analyses.small_models import Architecture, random_model, train

        s, draw = settings, np.random.default_rng(seed)
        of = Architecture(5, 2 * s.instructions + 8, s.layers, s.width, 4, 4 * s.width, "gelu")
        live = random_model(of, seed)

        def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
            texts = sample(s.batch, s.instructions, TRAINED, draw)
            wanted = np.where(texts[:, :-1] == READ, texts[:, 1:], -100)
            return torch.from_numpy(texts[:, :-1]), torch.from_numpy(wanted)

        train(live, batches, s.steps, s.rate, advance)
        model, values, points = cp.load_model(live), {}, []
        for name, share in (("trained", TRAINED), ("rare", RARE), ("often", OFTEN)):
            texts = sample(s.texts, s.instructions, share, np.random.default_rng(1_000_000 + seed))
            reads = _reads(model, texts)
            is_wrong = reads["wrong"]
            values[f"glitches_{name}"] = float(is_wrong[-1].mean())
            points += [
                dict(writes=name, layer=layer, glitch_rate=round(float(own.mean()), 5))
                for layer, own in enumerate(is_wrong)
            ]
            if name != "trained":
                values |= {f"{name}_{key}": value for key, value in _foreseen(reads, seed).items()}
                values[f"{name}_more"] = values[f"glitches_{name}"] - values["glitches_trained"]
        return Measured(values, points)

    def figure(self, points: list[dict[str, Any]]) -> Any:
        return cp.plots.column_figure(pd.DataFrame(points), "glitch_rate")


def sample(number: int, instructions: int, ignored: float, draw: np.random.Generator) -> np.ndarray:
    """Returns texts [number, 2 * instructions] that begin with a write and end with a read. Of the other instructions,
    a share is ignored on average, and the rest are writes and reads alike."""
    kinds = draw.choice(
        [WRITE, READ, IGNORE], (number, instructions), p=[(1 - ignored) / 2, (1 - ignored) / 2, ignored]
    )
    kinds[:, 0], kinds[:, -1] = WRITE, READ
    bits = draw.integers(0, 2, (number, instructions))
    for place in range(1, instructions):  # the bit last written stands at the last write or read
        before = bits[np.arange(number), _last(kinds[:, :place] != IGNORE)]
        bits[:, place] = np.where(kinds[:, place] == READ, before, bits[:, place])
    return np.stack([kinds, bits], 2).reshape(number, -1)


def _last(is_one: np.ndarray) -> np.ndarray:
    """Returns the index of the last True of each row; every row has one."""
    return is_one.shape[1] - 1 - is_one[:, ::-1].argmax(1)


def _reads(model: Any, texts: np.ndarray) -> dict[str, np.ndarray]:
    """Reads every layer at every read instruction. Returns states [l, n, m], wrong [l, n] (of the two bits, the lens
    prefers the wrong one), margin [n] (nats, last layer), distance [n] to the last write, and text [n]."""
    from cacheprobe_analyses.small_models import capture, log_probabilities

    captured = capture(model, texts)
    text, place = np.nonzero(texts == READ)
    states = [one[text, place] for one in captured.values()]
    nats = np.stack([log_probabilities(model, one).numpy()[:, :2] for one in states])
    wanted = texts[text, place + 1]
    writes = np.where(texts == WRITE, np.arange(texts.shape[1]), -1)
    return {
        "states": np.stack([one.numpy() for one in states]), "wrong": nats.argmax(-1) != wanted,
        "margin": np.abs(nats[-1, :, 0] - nats[-1, :, 1]), "text": text,
        "distance": place - np.maximum.accumulate(writes, 1)[text, place],
    }  # fmt: skip


def _foreseen(reads: dict[str, np.ndarray], seed: int) -> dict[str, float]:
    """Returns AUROCs of a glitch at the last layer, and how the layer before it read the bit; NaN where there are too
    few glitches or right reads."""
    import torch

    wrong, draft = reads["wrong"][-1], reads["wrong"][-2]
    found = {"draft_glitches": float(draft.mean())}
    for name, own in (("glitch", wrong), ("right", ~wrong)):
        found[f"draft_before_{name}"] = float(draft[own].mean()) if own.any() else np.nan
    if min(wrong.sum(), (~wrong).sum()) < LEAST_GLITCHES:
        return found | {f"foreseen_{name}": np.nan for name in MARKS}
    shuffled = np.random.default_rng(seed).permutation(wrong)
    for name, layer, labels in (("last", -1, wrong), ("first", 0, wrong), ("shuffled", -1, shuffled)):
        states, target = torch.from_numpy(reads["states"][layer]), labels[:, None].astype(float)
        scores = cp.probes.regress({"S": states}, target, reads["text"].tolist(), seed=seed).predictions["S"][:, 0]
        found[f"foreseen_{name}"] = auroc(scores, labels.astype(int))
    found["foreseen_margin"] = auroc(-reads["margin"], wrong.astype(int))
    by_distance = auroc(reads["distance"].astype(float), wrong.astype(int))
    found["foreseen_distance"] = max(by_distance, 1 - by_distance)
    return found
