"""Collects the examples that probes are fitted on, from a trace of task prompts or from vectors with labels."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd
from torch import Tensor

from cacheprobe.lenses.probes.checks import ProbeError, chosen_pairs
from cacheprobe.lenses.probes.places import embeddings, labelled
from cacheprobe.trace.trace import Trace

LabelledStates = Mapping[tuple[str, int], Tensor]
"""Vectors [n, m], keyed by (site, layer)."""

Given = tuple[
    "Iterable[object] | None", "Iterable[Hashable] | None", "Iterable[Hashable] | None", "Iterable[Hashable] | None"
]
"""Labels, groups, places and words, each [n] or None."""


@dataclass(frozen=True)
class Examples:
    """Holds the n examples that probes are fitted on: labels and groups, states by (site, layer), and baseline
    features."""

    about: pd.DataFrame
    """One line for each example: label, group, place and, if known, word."""
    states: LabelledStates
    kind: str
    """"event", "position" or "given": how the examples were chosen."""
    untrained: LabelledStates | None
    """States of the same examples in an untrained model; None if not given."""
    embedding: Tensor | None
    """Features [n, k] of the words alone; None if there are none."""

    @property
    def places(self) -> list[Hashable]:
        """The distinct places (such as operation numbers or positions), in the order of their first example."""
        return list(self.about.place.drop_duplicates())


def of_trace(
    trace: Trace,
    at: "str | Iterable[int]",
    sites: "Iterable[str] | None",
    layers: "Iterable[int] | None",
    untrained: "Trace | LabelledStates | None",
    embedding: Tensor | None,
) -> Examples:
    """Returns the probe examples of a trace of task prompts: labels from the task, and the captured states of their
    rows.

    at: the places, as in `labelled`.  untrained, embedding: baselines, as in `fit`.
    Raises: ProbeError for a site or layer that was not captured, and for an untrained run of other prompts; ValueError
    as in `labelled`.
    """
    at = at if isinstance(at, str) else list(at)
    lines = labelled(trace, at)
    pairs = chosen_pairs(trace.store.sites, trace.store.layers, sites, layers)
    states = {pair: trace.vectors(*pair, lines) for pair in pairs}
    bare = None if untrained is None else _aligned(untrained, lines, at, pairs)
    embedding = embeddings(trace, lines) if embedding is None else embedding
    return Examples(lines, states, "event" if isinstance(at, str) else "position", bare, embedding)


def of_vectors(
    vectors: LabelledStates,
    given: Given,
    at: "str | Iterable[int]",
    sites: "Iterable[str] | None",
    layers: "Iterable[int] | None",
    untrained: "Trace | LabelledStates | None",
    embedding: Tensor | None,
) -> Examples:
    """Returns the probe examples for given vectors [n, m] by (site, layer), with labels, groups, places and words in
    `given`.

    Raises: ProbeError if labels or groups are missing, if labels, groups, places and words differ in number, if that
    number is not n, and for a site or layer that no key of `vectors` has.
    """
    labels, groups, places, words = given
    if labels is None or groups is None:
        raise ProbeError("vectors need labels, and groups: what stands in one group is never split, such as a prompt")
    columns = {"label": labels, "group": groups, "place": places, "word": words}
    lists = {name: list(values) for name, values in columns.items() if values is not None}
    if len({len(values) for values in lists.values()}) > 1:
        numbers = ", ".join(f"{len(values)} {name}s" for name, values in lists.items())
        raise ProbeError(f"there are {numbers}; give one of each for every vector")
    about = pd.DataFrame(lists)
    if places is None:
        about.insert(2, "place", "all")
    held = tuple(sorted({site for site, _ in vectors}))
    wanted = chosen_pairs(held, tuple(sorted({layer for _, layer in vectors})), sites, layers)
    states = {pair: vectors[pair] for pair in wanted if pair in vectors}
    for (site, layer), kept in states.items():
        if kept.ndim != 2 or len(kept) != len(about):
            raise ProbeError(
                f"states of {site} at layer {layer} are {list(kept.shape)}; {len(about)} labels need [n, m] with "
                f"n = {len(about)}"
            )
    bare = None if untrained is None else _aligned(untrained, about, at, list(states))
    return Examples(about, states, "given", bare, embedding)


def pooled_examples(examples: Examples) -> Examples:
    """Returns the examples with all places merged into one, "all", so that one probe is fitted for all of them."""
    return replace(examples, about=examples.about.assign(place="all"))


def _aligned(
    untrained: "Trace | LabelledStates",
    lines: pd.DataFrame,
    at: "str | Iterable[int]",
    pairs: Sequence[tuple[str, int]],
) -> LabelledStates:
    """Returns the untrained model's states of the same examples, as a dict by (site, layer). Raises: ProbeError if the
    run is of other prompts, or states are missing."""
    if isinstance(untrained, Trace):
        same = labelled(untrained, at)
        columns = ["request_id", "place", "position", "label", "word"]
        if len(same) != len(lines) or not same[columns].equals(lines[columns]):
            raise ProbeError("the untrained model's run is of other prompts; run it on the same examples")
        untrained = {(site, layer): untrained.vectors(site, layer, same) for site, layer in pairs}
    for pair in pairs:
        if pair not in untrained or len(untrained[pair]) != len(lines):
            raise ProbeError(f"the untrained model's states have no {pair[0]} of layer {pair[1]} for every example")
    return untrained
