"""Defines a finding: what was published, how it is measured again, and the rule of the verdict."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

Advance = Callable[[int], object]
"""Is called with the number of steps that were just done, for the progress display."""

REPRODUCED, NOT_REPRODUCED, DIFFERS = "reproduced", "not reproduced", "differs, because"
NO_FIGURE = "no published figure"


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
    """What of our settings differs for this value, if the verdict is that it differs. A claim has none."""

    def __post_init__(self) -> None:
        if self.value and self.above is not None:
            raise ValueError(f"{self.key}: a published figure is a value or a claim, not both")
        if self.because and not self.value:
            raise ValueError(f"{self.key}: only a value can differ for a reason; a claim holds or does not")

    @property
    def shown(self) -> str:
        """What was published, as text."""
        return self.value or ("none" if self.above is None else f"above {self.above:g}")

    @property
    def bounds(self) -> tuple[float, float]:
        """The numbers that are printed as the published value, or that the claim allows, as (low, high)."""
        if self.above is not None:
            return self.above, inf
        digits = len(self.value.partition(".")[2])
        half = 0.5 * 10.0**-digits
        return float(self.value) - half, float(self.value) + half

    def verdict(self, low: float, high: float) -> str:
        """Returns the verdict on our interval from `low` to `high`.

        A value is reproduced if it lies in the interval; its rounding is allowed for. A claim is reproduced if all of
        the interval agrees with it, so a wide interval helps a value and harms a claim.
        """
        if not self.value and self.above is None:
            return NO_FIGURE
        least, most = self.bounds
        if self.above is not None:
            return REPRODUCED if low > least else NOT_REPRODUCED
        if low <= most and least <= high:
            return REPRODUCED
        return f"{DIFFERS} {self.because}" if self.because else NOT_REPRODUCED


def overall(verdicts: list[str]) -> str:
    """Returns the verdict of a whole finding: the worst of its figures'."""
    kinds = [verdict for verdict in verdicts if verdict != NO_FIGURE]
    if NOT_REPRODUCED in kinds:
        return f"{NOT_REPRODUCED}: {kinds.count(NOT_REPRODUCED)} of {len(kinds)} figures"
    differing = sum(verdict.startswith(DIFFERS) for verdict in kinds)
    return f"differs in {differing} of {len(kinds)} figures" if differing else REPRODUCED


class Measured(NamedTuple):
    """Holds what one seed gave."""

    values: dict[str, float]
    """A number for each `Published.key`."""
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
