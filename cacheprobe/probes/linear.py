"""Linear probes by site, layer and place, each compared with baselines that do not use the states."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.statistics import wilson
from cacheprobe.probes.checks import LEAST, ProbeError, chosen_pairs, require_enough
from cacheprobe.probes.groups import control_labels, effective_number, group_folds
from cacheprobe.probes.places import embeddings, labelled
from cacheprobe.probes.ridge import held_out_scores
from cacheprobe.trace.trace import Trace

States = Mapping[tuple[str, int], Tensor]
"""Vectors [n, m], keyed by (site, layer)."""


@dataclass(frozen=True)
class ProbeResult:
    """Results of probes, one line for each site, layer and place.

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
    states: "Trace | States",
    labels: "Iterable[object] | None" = None,
    groups: "Iterable[Hashable] | None" = None,
    *,
    places: "Iterable[Hashable] | None" = None,
    words: "Iterable[Hashable] | None" = None,
    at: "str | Iterable[int]" = "event",
    sites: "Iterable[str] | None" = None,
    layers: "Iterable[int] | None" = None,
    pooled: bool = False,
    untrained: "Trace | States | None" = None,
    embedding: Tensor | None = None,
    folds: int = 5,
    controls: int = 10,
    least: int = LEAST,
    seed: int = 0,
) -> ProbeResult:
    """Fits a linear classifier of the true state for every site, layer and place, and tests it on held-out groups.

    states: a trace of task prompts, whose labels, groups, places and words are those of `labelled(trace, at)`; or
    vectors [n, m] keyed by (site, layer), with `labels` and `groups` [n], and optionally `places` and `words`.
    sites, layers: by default, those that were captured.  pooled: one probe for all places instead of one for each.
    untrained: the same prompts on `untrained(model)`, or its states, as a baseline.  embedding: [n, m] of the words
    alone; for a trace, computed with its model.
    folds: number of folds; each is tested by a probe fitted on the others.  controls: number of tasks in which every
    word has a random label; without `words` there are none.
    least: minimum number of groups of each class at a place.
    Raises: ProbeError for too few examples, and for sites and layers that do not exist.
    Source: linear probes, Alain and Bengio 2016 (arXiv 1610.01644); selectivity, Hewitt and Liang 2019 (arXiv
    1909.03368), section 3. The classifier is ridge regression on the classes: one factorisation serves the true labels
    and all control tasks.  Twin: tests.probes_slowly.fit_slowly (scikit-learn), accuracies ==.
    """
    at = at if isinstance(at, str) else list(at)
    about, kept = _examples(states, labels, groups, places, words, at, sites, layers)
    kind = "given" if not isinstance(states, Trace) else "event" if isinstance(at, str) else "position"
    bare = None if untrained is None else _aligned(untrained, about, at, list(kept))
    if isinstance(states, Trace) and embedding is None:
        embedding = embeddings(states, about)
    if pooled:
        about = about.assign(place="all")
    parts = []
    for place in about.place.drop_duplicates():
        here = np.flatnonzero((about.place == place).to_numpy())
        some = about.iloc[here]
        require_enough(some, place, folds, least)
        known = _Place(some, folds, controls, seed)
        baseline = np.nan if embedding is None else known.accuracies(embedding[here][None])[0][0]
        for site in dict.fromkeys(site for site, _ in kept):
            at_site = [layer for s, layer in kept if s == site]
            found = known.accuracies(torch.stack([kept[site, layer][here] for layer in at_site]), with_controls=True)
            without = (
                np.full(len(at_site), np.nan)
                if bare is None
                else known.accuracies(torch.stack([bare[site, layer][here] for layer in at_site]))[0]
            )
            parts.append(known.lines(site, at_site, found, without, baseline).assign(place=place, at=kind))
    columns = [
        "site", "layer", "at", "place", "examples", "groups", "classes", "accuracy", "low", "high", "control",
        "selectivity", "majority", "untrained", "embedding", "strength", "is_above",
    ]  # fmt: skip
    table = pd.concat(parts, ignore_index=True)[columns]
    return ProbeResult(table, folds, controls if "word" in about else 0, seed)


class _Place:
    """The examples of one place: their folds, their labels, and the control tasks."""

    def __init__(self, about: pd.DataFrame, folds: int, controls: int, seed: int) -> None:
        self.classes, self.truth = np.unique(about.label.astype(str).to_numpy(), return_inverse=True)
        self.groups = about.group.to_numpy()
        self.folds = group_folds(self.groups, folds, seed)
        for fold in range(folds):
            if missing := set(range(len(self.classes))) - set(self.truth[self.folds != fold]):
                lost = self.classes[missing.pop()]
                raise ProbeError(f"every example of class {lost!r} is in one fold of groups; give more groups of it")
        words = about.word.tolist() if "word" in about and controls else []
        self.drawn = control_labels(words, self.truth, controls, seed) if words else np.zeros((0, len(about)), int)
        homes: dict[Hashable, set[int]] = {}
        for word, fold in zip(words, self.folds, strict=False):
            homes.setdefault(word, set()).add(int(fold))
        self.is_seen = np.array([len(homes[word]) > 1 for word in words], dtype=bool)  # in training too

    def accuracies(self, states: Tensor, with_controls: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns, for states [l, n, m]: accuracy [l], mean accuracy on the control tasks [l], median penalty [l]."""
        sets = np.stack([self.truth, *(self.drawn if with_controls else ())])  # [t, n]
        hot = np.eye(len(self.classes))[sets].transpose(1, 0, 2)  # [n, t, k]
        flat = torch.from_numpy(np.ascontiguousarray(hot)).flatten(1)
        widths = [len(self.classes)] * len(sets)
        scores, strengths = held_out_scores(states, flat, torch.from_numpy(self.folds), widths)
        said = scores.unflatten(2, (len(sets), -1)).argmax(-1).numpy()  # [l, n, t]
        right = said == sets.T
        control = np.full(len(states), np.nan)
        if with_controls and self.is_seen.any():
            control = right[:, self.is_seen, 1:].mean((1, 2))
        return right[:, :, 0].mean(1), control, strengths.median(0).values.numpy()

    def lines(
        self, site: str, layers: list[int], found: tuple, untrained: np.ndarray, embedding: float
    ) -> pd.DataFrame:
        """Returns the table's lines for one site."""
        accuracy, control, strength = found
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


def _examples(
    states: "Trace | States",
    labels: "Iterable[object] | None",
    groups: "Iterable[Hashable] | None",
    places: "Iterable[Hashable] | None",
    words: "Iterable[Hashable] | None",
    at: "str | Iterable[int]",
    sites: "Iterable[str] | None",
    layers: "Iterable[int] | None",
) -> tuple[pd.DataFrame, States]:
    """Returns the examples' labels, groups, places and words, and their vectors keyed by (site, layer)."""
    if isinstance(states, Trace):
        if labels is not None or groups is not None or places is not None or words is not None:
            raise ProbeError(
                "a trace brings its own labels, groups, places and words; to give others, give vectors too: "
                "fit({(site, layer): trace.vectors(site, layer, rows)}, labels, groups)"
            )
        about = labelled(states, at)
        wanted = chosen_pairs(states.store.sites, states.store.layers, sites, layers)
        return about, {pair: states.vectors(*pair, about) for pair in wanted}
    if labels is None or groups is None:
        raise ProbeError("vectors need labels, and groups: what stands in one group is never split, such as a prompt")
    about = pd.DataFrame({"label": list(labels), "group": list(groups)})
    about["place"] = "all" if places is None else list(places)
    if words is not None:
        about["word"] = list(words)
    held = tuple(sorted({site for site, _ in states}))
    wanted = chosen_pairs(held, tuple(sorted({layer for _, layer in states})), sites, layers)
    kept = {pair: states[pair] for pair in wanted if pair in states}
    for (site, layer), vectors in kept.items():
        if vectors.ndim != 2 or len(vectors) != len(about):
            raise ProbeError(
                f"states of {site} at layer {layer} are {list(vectors.shape)}; {len(about)} labels need [n, m] with "
                f"n = {len(about)}"
            )
    return about, kept


def _aligned(untrained: "Trace | States", about: pd.DataFrame, at: "str | Iterable[int]", pairs: list) -> States:
    """Returns the untrained model's states of the same examples."""
    if isinstance(untrained, Trace):
        same = labelled(untrained, at)
        columns = ["request_id", "place", "position", "label", "word"]
        if len(same) != len(about) or not same[columns].equals(about[columns]):
            raise ProbeError("the untrained model's run is of other prompts; run it on the same examples")
        untrained = {(site, layer): untrained.vectors(site, layer, same) for site, layer in pairs}
    for pair in pairs:
        if pair not in untrained or len(untrained[pair]) != len(about):
            raise ProbeError(f"the untrained model's states have no {pair[0]} of layer {pair[1]} for every example")
    return untrained
