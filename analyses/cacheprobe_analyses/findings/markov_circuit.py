"""Does forcing a recovered state change the prediction, and does an untrained transformer hold the belief as well?

Source: Markovian Circuit Tracing (arXiv 2605.20824), the medium process. Its repository (docs/METHODS.md) has other
settings than its first ones (width 128, 8,000 sequences of 64); the committed tables fit those of METHODS.md. Its
accuracies are multiples of 1 / 6,400, which fits 160 forced sequences of 40 tokens.
"""

from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pandas as pd

import cacheprobe as cp
from cacheprobe.core.registry import register
from cacheprobe_analyses.findings.finding import Advance, Finding, Measured, Published
from cacheprobe_analyses.findings.processes import HiddenMarkov, from_emissions

TRANSITION = np.array([[0.7, 0.2, 0.1, 0], [0.1, 0.6, 0.2, 0.1], [0, 0.2, 0.7, 0.1], [0.25, 0.25, 0.25, 0.25]])
EMISSION = np.array([[0.45, 0.35, 0.05, 0.05, 0.05, 0.05], [0.05, 0.05, 0.65, 0.1, 0.1, 0.05],
                     [0.05, 0.05, 0.05, 0.35, 0.25, 0.25], [0.2, 0.15, 0.15, 0.15, 0.2, 0.15]])  # fmt: skip
STATES, START = 4, 6
"""Hidden states; the token before every sequence."""
OTHERS = "other random numbers, and the probe's folds"
SEEDS = 5
"""Of the paper. Deviations are those of results/v1/tables/forcing_controls.csv and of the belief probe's table."""
_LEAST = 1e-12
"""Probabilities below it count as this, as in the paper's code."""


@dataclass(frozen=True)
class Settings:
    """Batch size and rate are the defaults of the paper's script; the length is what its tables fit."""

    length: int = 40
    width: int = 64
    inner: int = 128
    train: int = 1200
    validation: int = 250
    analysis: int = 800
    epochs: int = 30
    least_epochs: int = 6
    gap: float = 0.02
    """Training stops this near to the best possible validation loss, in nats a token."""
    batch: int = 256
    rate: float = 3e-4
    position: int = 20
    """Where a state is forced."""


@register("findings", "markov-circuit")
class MarkovCircuit(Finding):
    """State forcing and belief probes of a transformer that was trained on a process of four hidden states."""

    question = "Do recovered hidden states steer the prediction, and is the belief learned?"
    paper = "Markovian Circuit Tracing, arXiv 2605.20824"
    published = (
        Published("unpatched", "KL unpatched", "0.3847", because=OTHERS, sd=0.0084, seeds=SEEDS),
        Published("recovered", "KL, recovered centroid", "0.188", because=OTHERS, seeds=SEEDS),
        Published("wrong", "KL, another state's", "0.394", because=OTHERS, seeds=SEEDS),
        Published("selective", "another state's less recovered", above=0),
        Published("belief_r2", "belief R2, trained", "0.84897", because=OTHERS, sd=0.0021, seeds=SEEDS),
        Published("belief_kl", "belief KL, trained", "0.0246", because=OTHERS, seeds=SEEDS),
        Published("belief_kl_untrained", "belief KL, untrained", "0.0247", because=OTHERS, seeds=SEEDS),
        Published("belief_gain", "untrained less trained", "0.00006", unjudged="our interval is ten times as wide"),
        Published("belief_r2_untrained", "belief R2, untrained"),
        Published("excess", "loss above the best", "0.0198", unjudged="the stopping rule fixes it"),
        Published("epochs", "epochs", "16.2", because=OTHERS, seeds=SEEDS),
    )
    presets = {
        "tiny": Settings(12, 16, 32, 64, 20, 60, 2, 1, batch=32, position=8),
        "small": Settings(train=600, validation=150, analysis=300, epochs=12),
        "full": Settings(),
    }

    def steps(self, settings: Settings) -> int:
        return settings.epochs * -(-settings.train // settings.batch)

    def measure(self, settings: Settings, seed: int, advance: Advance) -> Measured:
        from cacheprobe_analyses.small_models import Architecture, capture, random_model

        s, process = settings, from_emissions(TRANSITION, EMISSION, np.full(STATES, 0.25))
        of = Architecture(START + 1, s.length + 8, 2, s.width, 4, s.inner, "gelu", torch_weights=True)
        live = random_model(of, seed)
        epochs = _train(live, process, s, seed, advance)
        tokens = process.sample(s.analysis, s.length, np.random.default_rng(seed + 2_000_000))
        given, beliefs = _inputs(tokens), process.beliefs(tokens)[:, :-1]
        trained, fresh = cp.load_model(live), cp.load_model(random_model(of, seed + 999))
        states = capture(trained, given)[1]
        values = {"epochs": float(epochs), "excess": _excess(trained, states, process.next_token(beliefs), tokens)}
        for name, own in (("", states), ("_untrained", capture(fresh, given)[1])):
            groups = np.repeat(np.arange(len(tokens)), s.length)
            flat = beliefs.reshape(-1, STATES)
            read = cp.probes.regress({"S": own.flatten(0, 1)}, flat, groups, seed=seed).predictions["S"]
            read = np.maximum(read, _LEAST)
            read /= read.sum(1, keepdims=True)
            values[f"belief_kl{name}"] = float(_kl(flat, read).mean())
            values[f"belief_r2{name}"] = float(1 - np.square(flat - read).sum() / np.square(flat - flat.mean(0)).sum())
        values["belief_gain"] = values["belief_kl_untrained"] - values["belief_kl"]
        points = _force(trained, given, states.numpy(), beliefs, s, seed)
        for name in ("unpatched", "recovered", "wrong"):
            values[name] = float(np.mean([point["kl"] for point in points if point["patch"] == name]))
        values["selective"] = values["wrong"] - values["recovered"]
        return Measured(values, points)

    def figure(self, points: list[dict[str, Any]]) -> Any:
        return cp.plots.forcing_figure(pd.DataFrame(points))


def _inputs(tokens: np.ndarray) -> np.ndarray:
    """Returns the sequences one place later, behind the start token: position t has read the tokens before t."""
    return np.concatenate([np.full((len(tokens), 1), START), tokens[:, :-1]], 1)


def _kl(exact: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Returns the KL divergence, in nats, of each pair of distributions [n, v]."""
    exact, read = np.maximum(exact, _LEAST), np.maximum(read, _LEAST)
    return (exact * (np.log(exact) - np.log(read))).sum(-1)


def _train(live: Any, process: HiddenMarkov, s: Settings, seed: int, advance: Advance) -> int:
    """Trains until the validation loss is near the best possible; returns the number of epochs."""
    import torch
    from torch.nn import functional

    from cacheprobe_analyses.small_models import train

    draw = np.random.default_rng(seed)
    texts, held_out = (process.sample(number, s.length, draw) for number in (s.train, s.validation))
    exact = process.next_token(process.beliefs(held_out)[:, :-1])
    best = -np.log(np.take_along_axis(exact, held_out[..., None], -1)).mean()
    given, wanted = torch.from_numpy(_inputs(texts)), torch.from_numpy(texts)
    in_epoch = -(-s.train // s.batch)
    order = np.concatenate([draw.permutation(s.train) for _ in range(s.epochs)])

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        epoch, place = divmod(step, in_epoch)
        chosen = order[epoch * s.train :][: s.train][place * s.batch :][: s.batch]
        return given[chosen], wanted[chosen]

    @torch.no_grad()
    def ends(done: int) -> bool:
        if done % in_epoch or done < s.least_epochs * in_epoch:
            return False
        logits = live.eval()(torch.from_numpy(_inputs(held_out))).logits
        live.train()
        return functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(held_out).flatten()) < best + s.gap

    return len(train(live, batches, s.epochs * in_epoch, s.rate, advance, decays=False, ends=ends)) // in_epoch


def _excess(model: Any, states: Any, exact: np.ndarray, tokens: np.ndarray) -> float:
    """Returns the loss above the best possible, in nats a token, on sequences that were not trained on."""
    from cacheprobe_analyses.small_models import log_probabilities

    nats = log_probabilities(model, states).numpy()
    own, best = (np.take_along_axis(one, tokens[..., None], -1).mean() for one in (nats, np.log(exact)))
    return float(best - own)


def _force(
    model: Any, given: np.ndarray, states: np.ndarray, beliefs: np.ndarray, s: Settings, seed: int
) -> list[dict[str, Any]]:
    """Replaces S of the last block at one position by a centroid, and returns the KL from the forced state's emissions
    to the prediction there, by state and patch. Centroids are of 60 % of the sequences; 20 % are forced."""
    calibration, forced = states[: int(0.6 * len(states))], given[int(0.8 * len(given)) :, : s.position + 1]
    flat = calibration.reshape(-1, calibration.shape[-1])
    sampled = _sampled(beliefs[: len(calibration)].reshape(-1, STATES), seed)
    centroids = recovered_centroids(flat, sampled, seed)
    points = []
    for state in range(STATES):
        vectors = {"unpatched": None, "recovered": centroids[state], "wrong": centroids[(state + 1) % STATES]}
        for patch, vector in vectors.items():
            own = _predictions(model, forced, vector)
            exact = np.append(EMISSION[state], 0)  # the start token is never emitted
            points.append(dict(state=state, patch=patch, kl=round(float(_kl(exact, own).mean()), 5)))
    return points


def _sampled(beliefs: np.ndarray, seed: int) -> np.ndarray:
    """Draws a hidden state from each exact belief [n, s]: the same distribution as the states that emitted."""
    draw = np.random.default_rng(seed)
    return (draw.random((len(beliefs), 1)) > beliefs.cumsum(1)[:, :-1]).sum(1)


def _predictions(model: Any, prompts: np.ndarray, vector: "np.ndarray | None") -> np.ndarray:
    """Returns the model's distribution [n, v] after each prompt [n, t], with S of the last block replaced there."""
    import torch

    from cacheprobe_analyses.small_models import log_probabilities

    position, changes = prompts.shape[1] - 1, []
    if vector is not None:
        new = torch.from_numpy(vector)
        where = dict(site="S", layer=model.n_layers - 1, positions=[position])
        changes = [cp.interventions.replace(new, request_id=i, **where) for i in range(len(prompts))]
    trace = cp.run(
        model, [row.tolist() for row in prompts], max_new_tokens=1, capture="S", interventions=changes, progress=False
    )
    rows = trace.row_table[trace.row_table.position == position].sort_values("request_id").row.tolist()
    return log_probabilities(model, trace.vectors("S", model.n_layers - 1, rows)).exp().numpy()


def recovered_centroids(points: np.ndarray, labels: np.ndarray, seed: int, restarts: int = 10) -> np.ndarray:
    """Returns [s, m]: the means of the clusters of points [n, m] that k-means finds, in the order of the states that
    their labels [n] agree with best.

    Twin: scikit-learn's KMeans, close(1e-3) where clusters are apart, and scipy's linear_sum_assignment, ==.
    """
    draw = np.random.default_rng(seed)
    best, found, nearest = np.inf, points[:STATES], np.zeros(len(points), int)
    for _ in range(restarts):
        centers = points[draw.integers(len(points))][None]
        while len(centers) < STATES:  # k-means++: far points are likelier
            weights = _distances(points, centers).min(1)
            centers = np.vstack([centers, points[draw.choice(len(points), p=weights / weights.sum())]])
        for _ in range(100):
            own = _distances(points, centers).argmin(1)
            moved = np.stack([points[own == k].mean(0) if (own == k).any() else centers[k] for k in range(STATES)])
            if np.allclose(moved, centers, atol=1e-6):
                break
            centers = moved
        distance = _distances(points, centers)
        if distance.min(1).sum() < best:
            best, found, nearest = distance.min(1).sum(), centers, distance.argmin(1)
    counts = np.zeros((STATES, STATES))
    np.add.at(counts, (nearest, labels), 1)
    order = max(permutations(range(STATES)), key=lambda one: sum(counts[k, state] for state, k in enumerate(one)))
    return found[list(order)].astype(np.float32)


def _distances(points: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """Returns the squared distances [n, k]."""
    squares = (points**2).sum(1)[:, None] - 2 * points @ centers.T + (centers**2).sum(1)
    return np.maximum(squares, 0).astype(np.float64)
