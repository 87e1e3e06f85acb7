"""Defines a finding: what was published, how it is measured again, and the rule of the verdict."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import mean, stdev
from typing import Any, NamedTuple

Advance = Callable[[int], object]
"""Is called with the number of steps that were just done, for the progress display."""

REPRODUCED, NOT_REPRODUCED, DIFFERS = "reproduced", "not reproduced", "differs; possible reasons:"
NO_FIGURE, NOT_JUDGED = "no published figure", "not judged:"
LEAST_SEEDS = 3
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
         2.120, 2.110, 2.101)  # fmt: skip
"""Student's t at 97.5 %, for 1, 2, ... degrees of freedom."""


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns (mean, low, high): the mean and its 95 % interval by Student's t. Twin: scipy.stats.t.interval,
    close(1e-3), since the table of t has three digits."""
    middle = mean(values)
    half = _T_95[len(values) - 2] * stdev(values) / len(values) ** 0.5
    return middle, middle - half, middle + half


@dataclass(frozen=True)
class Published:
    """Holds one published figure, with its name among the measured values.

    It is a value with the digits that were printed, or a claim that something lies above a bound, or neither: then the
    line is ours alone and has no verdict.
    """

    key: str
    text: str
    value: str = ""
    """As printed, such as "0.385"; "" for a claim and for a line of ours."""
    above: float | None = None
    """The bound of a claim."""
    because: str = ""
    """What of our settings differs for this value: possible reasons if the values differ. A claim has none."""
    unjudged: str = ""
    """Why a published value gets no verdict."""
    sd: float | None = None
    """Standard deviation of the published value over its seeds; None if it is not known."""
    seeds: int = 0
    """Number of seeds whose mean the published value is; 0 if it is not known."""

    def __post_init__(self) -> None:
        if self.value and self.above is not None:
            raise ValueError(f"{self.key}: a published figure is a value or a claim, not both")
        if self.because and not self.value:
            raise ValueError(f"{self.key}: only a value can differ for a reason; a claim holds or does not")
        if self.sd is not None and self.seeds < 2:
            raise ValueError(f"{self.key}: a standard deviation is of two or more seeds, got seeds={self.seeds}")

    @property
    def shown(self) -> str:
        """What was published, as text."""
        return self.value or ("none" if self.above is None else f"above {self.above:g}")

    def verdict(self, values: Sequence[float]) -> str:
        """Returns the verdict on our values, one a seed; those that are not finite are undefined, and left out.

        A claim is reproduced if our whole 95 % interval agrees with it. A value is reproduced if 0 lies in the 95 %
        interval of the difference of the means, to within its rounding. So a wide interval helps a value and harms a
        claim. With fewer than three defined values there is no verdict.
        """
        if not self.value and self.above is None:
            return NO_FIGURE
        defined = [value for value in values if isfinite(value)]
        if self.unjudged or len(defined) < LEAST_SEEDS:
            return f"{NOT_JUDGED} {self.unjudged or f'defined in {len(defined)} seeds'}"
        ours, low, _ = interval(defined)
        if self.above is not None:
            return REPRODUCED if low > self.above else NOT_REPRODUCED
        rounding = 0.5 * 10.0 ** -len(self.value.partition(".")[2])
        if abs(ours - float(self.value)) <= self.half_difference(defined) + rounding:
            return REPRODUCED
        return f"{DIFFERS} {self.because}" if self.because else NOT_REPRODUCED

    def half_difference(self, values: Sequence[float]) -> float:
        """Returns half the 95 % interval of the mean of our values less the published one.

        If only the number of published seeds is known, their deviation is taken to be ours. If neither is, the
        published value counts as exact: of equal truths, some 10 to 20 % then get "differs".
        Source: Welch 1947; the degrees of freedom are rounded down. Twin: scipy.stats.ttest_ind_from_stats, the same
        verdict where the degrees of freedom are whole.
        """
        number, own = len(values), stdev(values) ** 2 / len(values)
        if self.sd is None:
            theirs = own * number / self.seeds if self.seeds else 0.0
            return _T_95[number - 2] * (own + theirs) ** 0.5
        theirs = self.sd**2 / self.seeds
        if not own + theirs:
            return 0.0
        freedom = (own + theirs) ** 2 / (own**2 / (number - 1) + theirs**2 / (self.seeds - 1))
        return _T_95[min(int(freedom), len(_T_95)) - 1] * (own + theirs) ** 0.5


def is_judged(verdict: str) -> bool:
    """Returns whether a line has one of the three verdicts."""
    return not verdict.startswith((NO_FIGURE, NOT_JUDGED))


def overall(verdicts: list[str]) -> str:
    """Returns the verdict of a whole finding: the worst of its figures'."""
    kinds = [verdict for verdict in verdicts if is_judged(verdict)]
    if not kinds:
        return "no figure is judged"
    if NOT_REPRODUCED in kinds:
        return f"{NOT_REPRODUCED}: {kinds.count(NOT_REPRODUCED)} of {len(kinds)} figures"
    differing = sum(verdict.startswith(DIFFERS) for verdict in kinds)
    return f"differs in {differing} of {len(kinds)} figures" if differing else REPRODUCED


class Measured(NamedTuple):
    """Holds what one seed gave."""

    values: dict[str, float]
    """A number for each `Published.key`; NaN where it is not defined, such as a glitch's mark without a glitch."""
    points: list[dict[str, Any]]
    """Lines of the table that the figure draws."""


class Finding(ABC):
    """Measures one published result again. A subclass is registered with `@register("findings", NAME)`."""

    question: str
    paper: str
    published: tuple[Published, ...]
    presets: Mapping[str, Any]
    """Settings by preset: tiny (for tests, means nothing), small and full."""

    @abstractmethod
    def steps(self, settings: Any) -> int:
        """Returns the number of steps that one seed takes, for the progress display."""

    @abstractmethod
    def measure(self, settings: Any, seed: int, advance: Advance) -> Measured:
        """Trains or loads with this seed, and measures."""

    @abstractmethod
    def figure(self, points: list[dict[str, Any]]) -> Any:
        """Draws the points of the first seed; returns a plotly figure."""
