"""Runs traffic in another shape of passes if the drawn shape is refused: before a run, a trial tests whether its shape
is batch-invariant."""

from collections.abc import Callable
from typing import TypeVar

from cacheprobe.engine.consistency import ShapeRefused
from cacheprobe.stress.subjects import Subject, other_shapes

MOST_REFUSED = 20
"""Largest number of shapes that may be refused in a row, the drawn one included."""

T = TypeVar("T")


class NoShapeServes(RuntimeError):
    """Raised if every shape of passes that was tried for a subject was refused, because it is not batch-invariant."""


def run_in_accepted_shape(
    subject: Subject, refused: dict[str, str], compute: Callable[[Subject], T]
) -> tuple[Subject, T]:
    """Calls `compute` with `subject`; if that raises ShapeRefused (the shape is not batch-invariant), with the subject
    in other shapes. Returns (the subject in the first accepted shape, the result of `compute`).

    compute: draws the traffic for a shape and runs it. Only `ShapeRefused` is caught, which is raised before a request
    is computed. Other errors are passed on.
    refused: receives the key of each refused shape and the reason.
    Raises: NoShapeServes if all shapes tried, at most MOST_REFUSED, are refused.
    """
    reasons = []
    for shape in (subject, *other_shapes(subject, MOST_REFUSED - 1)):
        try:
            return shape, compute(shape)
        except ShapeRefused as refusal:
            refused[shape.key] = str(refusal)
            reasons.append(f"{shape.key}: {refusal}")
    raise NoShapeServes(
        f"the trial refused {len(reasons)} shapes in a row, so the traffic of {subject.key} cannot be compared in this "
        f"environment; the first was {reasons[0]}; the last was {reasons[-1]}; try another OMP_NUM_THREADS"
    )
