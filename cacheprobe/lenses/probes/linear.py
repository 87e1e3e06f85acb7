"""Fits linear classifiers by site, layer and place, and compares each with baselines that do not use the states; fits
linear regressions from states to vectors, such as beliefs. Both are tested on held-out groups."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict, TypeVar, Unpack

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from torch import Tensor

from cacheprobe.core.values import KnownKeywords
from cacheprobe.lenses.probes.examples import (
    LEAST,
    Examples,
    LabelledStates,
    ProbeError,
    of_trace,
    of_vectors,
    require_enough,
)
from cacheprobe.lenses.probes.ridge import control_labels, effective_number, group_folds, held_out_scores
from cacheprobe.ops.statistics import wilson
from cacheprobe.trace.trace import Trace

COLUMNS = [
    "site", "layer", "at", "place", "examples", "groups", "classes", "accuracy", "low", "high", "control",
    "selectivity", "majority", "untrained", "embedding", "strength", "is_above",
]  # fmt: skip


class ProbeOptions(TypedDict, total=False):
    """Declares the keyword arguments of `cp.probes.fit` that say how a probe is tested."""

    pooled: bool
    """One probe for all places instead of one for each."""
    untrained: "Trace | LabelledStates | None"
    """The same prompts on `untrained(model)`, or its states, as a baseline."""
    embedding: Tensor | None
    """[n, m] of the words alone; for a trace, by default computed with its model."""
    folds: int
    """Number of folds; each is tested by a probe fitted on the others."""
    controls: int
    """Number of control tasks, in which every word has a random label; none if there are no words."""
    least: int
    """Minimum number of groups of each class at a place."""
    seed: int
    """Seed of the folds and of the control tasks."""


@dataclass(frozen=True)
class ProbeConfig(KnownKeywords):
    """Holds the options of one call of `cp.probes.fit`, with defaults; ProbeOptions says what each does."""

    pooled: bool = False
    untrained: "Trace | LabelledStates | None" = None
    embedding: Tensor | None = None
    folds: int = 5
    controls: int = 10
    least: int = LEAST
    seed: int = 0


@dataclass(frozen=True)
class ProbeResult:
    """Holds the results of probes in `table`: one line for each site, layer and place, with accuracy and baselines.

    table: site, layer, at ("event", "position" or "given"), place ("all" if pooled), examples, groups, classes;
    accuracy on held-out groups, and its 95 % interval low to high; control (mean accuracy on the control tasks, over
    held-out examples whose word occurs in training) and selectivity, accuracy - control; majority (share of the
    commonest class); untrained and embedding (accuracy of the same probe on these baselines), null if absent; strength
    (median penalty); is_above: whether low is above majority, untrained and embedding, as far as present.
    The interval is Wilson's, as if each group were one example. It ignores that folds share training examples.
    """

    table: pd.DataFrame = field(repr=False)
    folds: int
    controls: int
    seed: int

    def __repr__(self) -> str:
        t = self.table
        shape = f"{t.site.nunique()} sites x {t.layer.nunique()} layers x {t.place.nunique()} places"
        best = t.loc[t.accuracy.idxmax()]
        where = f"{best.site} of layer {best.layer} at {best.place}"
        return (
            f"ProbeResult({shape}; {int(t.is_above.sum())} of {len(t)} above their baselines; most accurate {where}: "
            f"{best.accuracy:.3f}, {best.low:.3f} to {best.high:.3f})"
        )


def fit(
    states: "Trace | LabelledStates",
    labels: "Iterable[object] | None" = None,
    groups: "Iterable[Hashable] | None" = None,
    *,
    places: "Iterable[Hashable] | None" = None,
    words: "Iterable[Hashable] | None" = None,
    at: "str | Iterable[int]" = "event",
    sites: "Iterable[str] | None" = None,
    layers: "Iterable[int] | None" = None,
    **options: Unpack[ProbeOptions],
) -> ProbeResult:
    """Fits a linear classifier of the labels for each site, layer and place, and tests the classifier on held-out
    groups. Returns a ProbeResult.

    states: a trace of task prompts, whose labels, groups, places and words are those of `labelled(trace, at)`; or
    vectors [n, m] keyed by (site, layer), with `labels` and `groups` [n], and optionally `places` and `words`.
    sites, layers: by default, those that were captured.
    options: pooled, untrained and embedding (baselines), folds (5), controls (10), least (20 groups of each class at a
    place) and seed; ProbeOptions says what each does.
    Raises: ProbeError for too few examples, and for unknown sites and layers; ValueError for fewer than three folds.
    Source: linear probes, Alain and Bengio 2016 (arXiv 1610.01644); selectivity, Hewitt and Liang 2019 (arXiv
    1909.03368), section 3. The classifier is ridge regression on the classes: one factorisation serves the true labels
    and all control tasks.  Twin: tests.twins.probes_slowly.accuracy_slowly (scikit-learn), accuracies ==.
    """
    config = ProbeConfig(**options)
    if isinstance(states, Trace):
        if any(given is not None for given in (labels, groups, places, words)):
            raise ProbeError(
                "a trace brings its own labels, groups, places and words; to give others, give vectors too: "
                "fit({(site, layer): trace.vectors(site, layer, rows)}, labels, groups)"
            )
        examples = of_trace(states, at, sites, layers, config.untrained, config.embedding)
    else:
        given = {"label": labels, "group": groups, "place": places, "word": words}
        examples = of_vectors(states, given, at, sites, layers, config.untrained, config.embedding)
    if config.pooled:
        examples = replace(examples, about=examples.about.assign(place="all"))
    parts = [part for place in examples.places for part in _tables(examples, place, config)]
    controls = config.controls if "word" in examples.about else 0
    return ProbeResult(pd.concat(parts, ignore_index=True)[COLUMNS], config.folds, controls, config.seed)


def _tables(examples: Examples, place: Hashable, config: ProbeConfig) -> Iterator[pd.DataFrame]:
    """Fits the probes of one place; yields a DataFrame for each site, with a line for each layer. Raises: ProbeError
    for too few groups or classes, or a class whose groups are all in one fold."""
    indices = np.flatnonzero((examples.about.place == place).to_numpy())
    of_place = examples.about.iloc[indices]
    require_enough(of_place, place, config.folds, config.least)
    place_data = _PlaceData(of_place, config.folds, config.controls, config.seed)
    embedding, baseline = examples.embedding, np.nan
    if embedding is not None:
        baseline = place_data.accuracies(embedding[indices][None])[0][0]
    for site in dict.fromkeys(site for site, _ in examples.states):
        at_site = [layer for s, layer in examples.states if s == site]
        accuracies = place_data.accuracies(_stacked(examples.states, site, at_site, indices), with_controls=True)
        untrained_accuracy = np.full(len(at_site), np.nan)
        if examples.untrained is not None:
            untrained_accuracy = place_data.accuracies(_stacked(examples.untrained, site, at_site, indices))[0]
        lines = place_data.lines(site, at_site, accuracies, untrained_accuracy, baseline)
        yield lines.assign(place=place, at=examples.kind)


def _stacked(states: LabelledStates, site: str, layers: list[int], indices: np.ndarray) -> Tensor:
    """Returns the states [l, n, m] of some layers at one site, for the examples with these indices."""
    return torch.stack([states[site, layer][indices] for layer in layers])


class _PlaceData:
    """Holds the examples of one place (site, layer, position in the text): their classes, groups and folds, and the
    random labels of the control tasks."""

    def __init__(self, lines: pd.DataFrame, folds: int, controls: int, seed: int) -> None:
        self.classes, self.truth = np.unique(lines.label.astype(str).to_numpy(), return_inverse=True)
        self.groups = lines.group.to_numpy()
        self.folds = group_folds(self.groups, folds, seed)
        for fold in range(folds):
            if missing := set(range(len(self.classes))) - set(self.truth[self.folds != fold]):
                absent = self.classes[missing.pop()]
                raise ProbeError(f"every example of class {absent!r} is in one fold of groups; give more groups of it")
        words = lines.word.tolist() if "word" in lines and controls else []
        self.drawn = control_labels(words, self.truth, controls, seed) if words else np.zeros((0, len(lines)), int)
        folds_of_word: dict[Hashable, set[int]] = {}
        for word, fold in zip(words, self.folds, strict=False):
            folds_of_word.setdefault(word, set()).add(int(fold))
        self.is_seen = np.array([len(folds_of_word[word]) > 1 for word in words], dtype=bool)  # in training too

    def accuracies(self, states: Tensor, with_controls: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fits the probes of all folds on states [l, n, m]. Returns three arrays [l]: accuracy, mean accuracy on the
        control tasks (NaN without them), median penalty."""
        sets = np.stack([self.truth, *(self.drawn if with_controls else ())])  # [t, n]
        one_hot = np.eye(len(self.classes))[sets]
        flat = torch.from_numpy(rearrange(one_hot, "t n k -> n (t k)"))
        widths = [len(self.classes)] * len(sets)
        scores, strengths = held_out_scores(states, flat, torch.from_numpy(self.folds), widths)
        predicted = rearrange(scores, "l n (t k) -> l n t k", t=len(sets)).argmax(-1).numpy()
        right = predicted == sets.T
        control = np.full(len(states), np.nan)
        if with_controls and self.is_seen.any():
            control = right[:, self.is_seen, 1:].mean((1, 2))
        return right[:, :, 0].mean(1), control, strengths.median(0).values.numpy()

    def lines(
        self, site: str, layers: list[int], accuracies: tuple, untrained: np.ndarray, embedding: float
    ) -> pd.DataFrame:
        """Returns the lines of `ProbeResult.table` for one site as a DataFrame, one line for each layer."""
        accuracy, control, strength = accuracies
        number = effective_number(self.groups)
        low, high = zip(*(wilson(float(share), number) for share in accuracy), strict=True)
        majority = np.bincount(self.truth).max() / len(self.truth)
        table = pd.DataFrame(
            dict(site=site, layer=layers, examples=len(self.truth), groups=len(set(self.groups)),
                 classes=len(self.classes), accuracy=accuracy, low=low, high=high, control=control,
                 selectivity=accuracy - control, majority=majority, untrained=untrained, embedding=embedding,
                 strength=strength)
        )  # fmt: skip
        return table.assign(is_above=table.low > table[["majority", "untrained", "embedding"]].max(axis=1))


K = TypeVar("K", bound=Hashable)
REGRESSION_STRENGTHS = (1e-6, 1e-4, 1e-2, 1.0)
"""Penalties to try, in units of the number of features; smaller than a classifier's, since the targets have no
noise."""


@dataclass(frozen=True)
class Regression:
    """Holds linear regressions from states to vectors."""

    table: pd.DataFrame
    """A line for each set of states: name, examples, groups, features, r2 (on held-out examples)."""
    predictions: Mapping[Hashable, np.ndarray]
    """The name of a set of states -> held-out predictions [n, q]."""


def regress(
    states: Mapping[K, Tensor],
    targets: np.ndarray,
    groups: Sequence[Hashable] | np.ndarray,
    *,
    folds: int = 5,
    seed: int = 0,
) -> Regression:
    """Fits a ridge regression from each set of states to the targets, and returns a Regression with held-out R2.

    states: a name, such as a layer -> [n, m] states; widths may differ.  targets: [n, q] vectors.  groups: what each
    example comes from, such as its sequence; the examples of a group are all in one fold.
    R2 is one minus the squared error over the squared distance from the mean target, both summed over examples and
    columns; it is below 0 where the mean predicts better.
    Raises: ProbeError for lengths that differ, fewer groups than folds, or targets that are all the same.
    Source: linear regression from the residual stream to beliefs, Shai et al. 2024 (arXiv 2405.15943).
    Twin: tests.twins.probes_slowly.r2_slowly (scikit-learn), close(1e-6).
    """
    wanted = torch.as_tensor(np.asarray(targets, dtype=np.float64))
    lengths = {str(name): len(one) for name, one in states.items()} | {"groups": len(groups)}
    if wrong := {name: length for name, length in lengths.items() if length != len(wanted)}:
        raise ProbeError(f"there are {len(wanted)} targets, but {wrong}; give one row for each target")
    if (number := len(np.unique(np.asarray(groups)))) < folds:
        raise ProbeError(f"{number} groups cannot fill {folds} folds; give more groups, or fewer folds")
    spread = float((wanted - wanted.mean(0)).square().sum())
    if not spread:
        raise ProbeError("the targets are all the same, so there is nothing to predict; give other examples")
    of_fold = torch.from_numpy(group_folds(np.asarray(groups), folds, seed))
    lines, predictions = [], {}
    for name, own in states.items():
        scores = held_out_scores(own[None], wanted, of_fold, [wanted.shape[1]], REGRESSION_STRENGTHS).scores[0]
        predictions[name] = scores.numpy()
        r2 = 1 - float((scores - wanted).square().sum()) / spread
        lines.append(dict(name=name, examples=len(own), groups=number, features=own.shape[1], r2=r2))
    return Regression(pd.DataFrame(lines), predictions)
