"""Checks before a probe is fitted: enough examples, existing sites and layers, and a model that performs the task."""

from collections.abc import Hashable, Iterable, Sequence

import pandas as pd

from cacheprobe.trace.trace import Trace

LEAST = 20
"""Default minimum number of groups of each class at a place."""


class ProbeError(ValueError):
    """Raised if a probe cannot be fitted as requested, or if the model does not perform the task."""


def chosen_pairs(
    held_sites: Sequence[str], held_layers: Sequence[int], sites: "Iterable[str] | None", layers: "Iterable[int] | None"
) -> list[tuple[str, int]]:
    """Returns a list of (site, layer): every requested site with every requested layer; None requests all captured
    ones.

    Raises: ProbeError for a site or layer that was not captured, or if the list would be empty.
    """
    sites, layers = list(held_sites if sites is None else sites), list(held_layers if layers is None else layers)
    if unknown := [site for site in sites if site not in held_sites]:
        raise ProbeError(f"there is no site {unknown[0]!r} to probe; there are {', '.join(held_sites) or 'none'}")
    if unknown := [layer for layer in layers if layer not in held_layers]:
        raise ProbeError(f"there is no layer {unknown[0]} to probe; there are {list(held_layers)}")
    if not sites or not layers:
        raise ProbeError("there is nothing to probe: no site or no layer was kept, or asked for")
    return [(site, layer) for site in sites for layer in layers]


def require_enough(lines: pd.DataFrame, place: Hashable, folds: int, least: int) -> None:
    """Checks that the examples of one place suffice for a probe: two classes or more, `least` groups of each class, and
    `folds` groups in all.

    lines: the examples of this place, with label and group.
    Raises: ProbeError if not.
    """
    labels = lines.label.astype(str)
    classes = labels.nunique()
    if classes < 2:
        raise ProbeError(f"place {place}: all {len(lines)} examples are of class {labels.iloc[0]!r}; nothing to tell")
    groups = lines.assign(label=labels).groupby("label").group.nunique()
    if (groups < least).any():
        raise ProbeError(
            f"place {place}: {len(lines)} examples of {classes} classes; class {groups.idxmin()!r} has {groups.min()} "
            f"groups of prompts, {least} are needed; give more prompts (those that begin alike are one group), or "
            "least= fewer"
        )
    if lines.group.nunique() < folds:
        raise ProbeError(f"place {place}: {lines.group.nunique()} groups cannot be split into {folds} folds")


def require_above_chance(trace: Trace) -> dict[str, float]:
    """Checks that the 95 % interval of a run's accuracy on its task lies above chance. Returns
    `trace.meta["behaviour"]`, a dict with accuracy, accuracy_low, accuracy_high, chance and the numbers of examples.

    Raises: ProbeError otherwise, and for a run without a task, or with tasks whose answers differ.
    """
    behaviour = trace.meta["behaviour"]
    if behaviour is None:
        raise ProbeError("the run has no accuracy: its prompts are of no task, or of tasks with different answers")
    low, chance = behaviour["accuracy_low"], behaviour["chance"]
    if low <= chance:
        raise ProbeError(
            f"{trace.fingerprint['model']} answers {behaviour['accuracy']:.0%} of {behaviour['num_examples']} prompts "
            f"right (95 % from {low:.0%}), chance is {chance:.0%}: what its states hold of the "
            "task cannot be asked; use a model that does it"
        )
    return behaviour
