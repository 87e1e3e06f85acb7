"""Whether a benchmark got worse: two stored results of it, against the spread of their own rounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

ROUNDS, LOWER = "of_each_round", "lower_is_better"
FEWEST = 3
"""Rounds of each side: of two and two, every third pair of equal benchmarks would stand apart by chance."""
PLACE = ("cpu", "cpu_capability", "bfloat16_in_hardware", "threads", "torch", "transformers", "transformer-lens")


@dataclass(frozen=True)
class Change:
    """One ratio, before and after."""

    name: str
    old: tuple[float, ...]
    new: tuple[float, ...]
    lower_is_better: bool

    @property
    def gain(self) -> float:
        """Of the medians, above 1 where the new one is better."""
        gain = median(self.new) / median(self.old)
        return 1 / gain if self.lower_is_better else gain

    @property
    def verdict(self) -> str:
        """worse or better: every round of one side lies beyond every round of the other; else within noise.

        Source: the rank-sum test (Wilcoxon 1945) at its extreme; for three rounds against three, 1 in 20 by chance to
        one side.
        """
        if min(len(self.old), len(self.new)) < FEWEST:
            return "cannot tell"
        apart = max(self.old) < min(self.new) or max(self.new) < min(self.old)
        return ("better" if self.gain > 1 else "worse") if apart else "within noise"


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every ratio that both results have.

    Raises: ValueError for results of two benchmarks, or of none, or without rounds to compare.
    """
    if old.get("benchmark") != new.get("benchmark") or "benchmark" not in old:
        names = [str(one.get("benchmark", "no benchmark")) for one in (old, new)]
        raise ValueError(f"these are results of {names[0]} and of {names[1]}; give two of one benchmark")
    for which, one in (("first", old), ("second", new)):
        if not one.get(ROUNDS):
            raise ValueError(
                f"the {which} result has no {ROUNDS!r}, so its noise is not known; measure it again with "
                f"cacheprobe bench {old['benchmark']} --rounds {FEWEST} --json FILE"
            )
    shared = [name for name in old[ROUNDS] if name in new[ROUNDS]]
    if not shared:
        raise ValueError("the two results have no ratio in common; measure both with one version of the benchmark")
    return [
        Change(name, tuple(old[ROUNDS][name]), tuple(new[ROUNDS][name]), _is_cost(name, old, new)) for name in shared
    ]


def _is_cost(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return name in new.get(LOWER, old.get(LOWER, ()))


def elsewhere(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs of the machines and the versions, since it may be what changed a ratio."""
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in PLACE if old.get(key) != new.get(key)]


def table(changes: list[Change]) -> str:
    """Medians with the range of rounds in brackets; gain above 1 is an improvement."""
    lines = [f"{'ratio':34}{'old':>22}{'new':>22}{'gain':>8}  verdict"]
    for one in changes:
        old, new = (f"{median(v):.2f} ({min(v):.2f} to {max(v):.2f})" for v in (one.old, one.new))
        lines.append(f"{one.name:34}{old:>22}{new:>22}{one.gain:>8.2f}  {one.verdict}")
    return "\n".join(lines)
