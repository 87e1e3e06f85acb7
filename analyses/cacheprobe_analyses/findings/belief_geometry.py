"""Do the residual streams of a small transformer hold the exact belief about the hidden state, as a linear image?

Source: Shai et al. 2024 (arXiv 2405.15943). A transformer learns to predict the tokens of a hidden Markov process. The
belief after each token is known exactly; a linear regression reads it from S. A causal model's state is a function of
the tokens so far, the prefix, and so is the belief: so the regression is tested on prefixes that it was not fitted on.
RRXOR has some 400 different sequences of ten tokens, so a split by sequence would test prefixes that were fitted.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

import cacheprobe as cp
from cacheprobe.core.registry import register
from cacheprobe_analyses.findings.finding import Advance, Finding, Measured, Published
from cacheprobe_analyses.findings.processes import HiddenMarkov, mess3, rrxor

ALL = "all layers"
MOST_DISTINCT = 100
"""Distances are compared where there are few distinct beliefs; Mess3 has a new one at almost every token."""
SECOND_HAND = "the number is second-hand, and the paper's split is not known"


@dataclass(frozen=True)
class Settings:
    """The paper trains for a million steps with plain gradient descent; AdamW needs fewer."""

    layers: int = 4
    width: int = 64
    context: int = 10
    batch: int = 64
    mess3_steps: int = 800
    rrxor_steps: int = 2500
    rate: float = 1e-3
    sequences: int = 2000
    """Sequences whose prefixes the regression is fitted and tested on, in five folds."""
    points: int = 1200
    """Points of the figure."""


@register("findings", "belief-geometry")
class BeliefGeometry(Finding):
    """Mess3's fractal and the random-random-XOR process."""

    question = "Does the residual stream hold the belief about the hidden state?"
    paper = "Shai et al. 2024, arXiv 2405.15943"
    published = (
        Published("mess3_gain", "Mess3, last layer: R2 trained less untrained", above=0),
        Published("rrxor_gain", "RRXOR, all layers joined: R2 trained less untrained", above=0),
        Published("mess3_last", "Mess3, last layer: R2"),
        Published("mess3_last_untrained", "the same, untrained"),
        Published("rrxor_last", "RRXOR, last layer: R2"),
        Published("rrxor_last_untrained", "the same, untrained"),
        Published("rrxor_all", "RRXOR, all layers joined: R2"),
        Published("rrxor_all_untrained", "the same, untrained"),
        Published("rrxor_distances", "RRXOR, all layers joined: R2 of distances"),
        Published("rrxor_distances_untrained", "the same, untrained"),
        Published("rrxor_all_same", "RRXOR, joined, fitted and tested on the same prefixes: R2"),
        Published("rrxor_all_same_untrained", "the same, untrained"),
        Published("rrxor_distances_same", "RRXOR, joined, fitted and tested on the same prefixes: R2 of distances",
                  "0.95", unjudged=SECOND_HAND),
        Published("rrxor_distances_same_untrained", "the same, untrained", "0.31", unjudged=SECOND_HAND),
        Published("rrxor_distances_tokens", "RRXOR: R2 of distances between exact next-token probabilities"),
        Published("mess3_excess", "Mess3: loss above the best possible, nats a token"),
        Published("rrxor_excess", "RRXOR: loss above the best possible, nats a token"),
    )  # fmt: skip
    presets = {
        "tiny": Settings(2, 16, 6, 32, 20, 20, 3e-3, 60, 50),
        "small": Settings(mess3_steps=200, rrxor_steps=400, sequences=400),
        "full": Settings(),
    }

    def steps(self, settings: Settings) -> int:
        return settings.mess3_steps + settings.rrxor_steps

    def measure(self, settings: Settings, seed: int, advance: Advance) -> Measured:
        points, values = [], {}
        for name, process, steps in (
            ("mess3", mess3(), settings.mess3_steps),
            ("rrxor", rrxor(), settings.rrxor_steps),
        ):
            own, drawn = _of_process(process, steps, settings, seed, advance)
            values |= {f"{name}_{key}": value for key, value in own.items()}
            points += drawn if name == "mess3" else []
        values["mess3_gain"] = values["mess3_last"] - values["mess3_last_untrained"]
        values["rrxor_gain"] = values["rrxor_all"] - values["rrxor_all_untrained"]
        return Measured(values, points)

    def figure(self, points: list[dict[str, Any]]) -> Any:
        return cp.plots.simplex_figure(pd.DataFrame(points))


def _of_process(
    process: HiddenMarkov, steps: int, settings: Settings, seed: int, advance: Advance
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Trains on one process; returns R2 by layer and the points of the figure."""
    import torch  # here, so that the list of findings is quick

    from cacheprobe_analyses.small_models import Architecture, capture, log_probabilities, random_model, train

    s, draw = settings, np.random.default_rng(seed)
    of = Architecture(process.vocabulary, s.context + 8, s.layers, s.width, 1, 4 * s.width)

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.from_numpy(process.sample(s.batch, s.context + 1, draw))
        return tokens[:, :-1], tokens[:, 1:]

    live = random_model(of, seed)
    train(live, batches, steps, s.rate, advance)
    trained = cp.load_model(live)
    tokens = process.sample(s.sequences, s.context, np.random.default_rng(1_000_000 + seed))
    beliefs = process.beliefs(tokens)[:, 1:]
    exact = process.next_token(beliefs)
    values: dict[str, float] = {}
    has_few = len(np.unique(beliefs.reshape(-1, beliefs.shape[-1]).round(6), axis=0)) <= MOST_DISTINCT
    if has_few:
        values["distances_tokens"] = _distance_r2(beliefs, exact)
    points: list[dict[str, Any]] = []
    for model, suffix in ((trained, ""), (cp.probes.untrained(trained, seed), "_untrained")):
        states = {name: one.flatten(0, 1) for name, one in capture(model, tokens).items()}
        last = max(states)
        given = {**states, ALL: torch.cat(list(states.values()), 1)}
        groups, flat = prefix_groups(tokens), beliefs.reshape(tokens.size, -1)
        found = cp.probes.regress(given, flat, groups.tolist(), seed=seed)
        r2 = found.table.set_index("name").r2
        values |= {f"layer_{layer}{suffix}": float(r2[layer]) for layer in states}
        values |= {f"last{suffix}": float(r2[last]), f"all{suffix}": float(r2[ALL])}
        if has_few:
            read = _fitted_to_all(given[ALL].numpy(), flat)
            errors, spread = np.square(flat - read).sum(), np.square(flat - flat.mean(0)).sum()
            values[f"all_same{suffix}"] = float(1 - errors / spread)
            values[f"distances_same{suffix}"] = _distance_r2(beliefs, read)
            values[f"distances{suffix}"] = _distance_r2(beliefs, found.predictions[ALL])
        if not suffix:
            nats = log_probabilities(model, states[last]).numpy().reshape(exact.shape)
            values["excess"] = float((exact * (np.log(np.maximum(exact, 1e-30)) - nats)).sum(-1).mean())
        points += _points(beliefs, found.predictions[last], s.points, "untrained" if suffix else "trained", not suffix)
    return values, points


def prefix_groups(tokens: np.ndarray) -> np.ndarray:
    """Returns a number [n * t] for each token of the sequences [n, t]: tokens with the same prefix, itself included,
    have the same number."""
    prefixes = [tuple(row[: end + 1]) for row in tokens.tolist() for end in range(tokens.shape[1])]
    numbers = {prefix: number for number, prefix in enumerate(dict.fromkeys(prefixes))}
    return np.array([numbers[prefix] for prefix in prefixes])


def _fitted_to_all(states: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns what a linear regression with a constant, fitted to all examples [n, m], reads from the same examples.

    Twin: scikit-learn's LinearRegression, close(1e-6).
    """
    with_constant = np.concatenate([states, np.ones((len(states), 1))], 1).astype(np.float64)
    return with_constant @ np.linalg.lstsq(with_constant, targets, rcond=None)[0]


def _points(beliefs: np.ndarray, read: np.ndarray, most: int, name: str, and_exact: bool) -> list[dict[str, Any]]:
    """Returns lines of panel, exact belief (a, b, c) and where the point is drawn (x, y, z)."""
    flat = beliefs.reshape(read.shape)[:most]
    panels = [("exact", flat)] * and_exact + [(name, read[:most])]
    return [
        dict(zip("abcxyz", [round(float(value), 3) for value in (*belief, *place)], strict=True), panel=panel)
        for panel, places in panels
        for belief, place in zip(flat, places, strict=True)
        if len(belief) == 3
    ]


def _distance_r2(beliefs: np.ndarray, read: np.ndarray) -> float:
    """Returns the squared correlation, over all pairs of distinct beliefs, between their distance and the distance of
    what was read, which is first averaged over the tokens with the same belief."""
    flat, seen = beliefs.reshape(-1, beliefs.shape[-1]), read.reshape(-1, read.shape[-1])
    distinct, index = np.unique(flat.round(6), axis=0, return_inverse=True)
    means = np.stack([np.bincount(index, column) / np.bincount(index) for column in seen.T], 1)
    first, second = np.triu_indices(len(distinct), 1)
    pairs = [np.linalg.norm(one[first] - one[second], axis=1) for one in (distinct, means)]
    return float(np.corrcoef(*pairs)[0, 1] ** 2)
