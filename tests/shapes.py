"""Shapes of verify passes that serve on the processor that runs the tests: the product says which."""

from cacheprobe.config import EngineConfig
from cacheprobe.engine.consistency import require_consistent
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import choose_path

_TRIED = 16
"""Groups to try."""


def serving(model: CachedLM, window: int, *, at_least: int = 2, capacity: int = 96, path: str = "auto") -> int:
    """Returns the smallest group, of `at_least` requests or more, with which a verify pass of `window` serves.

    A test that needs one window for its subject asks here for the group. Which shapes compute every row alike differs
    between processors, and a shape that does not serve is refused.
    """
    chosen, _ = choose_path(model, path)
    for group in range(at_least, at_least + _TRIED):
        try:
            require_consistent(chosen, EngineConfig(window=window, group=group, capacity=capacity, prefill_group=1))
        except ValueError:
            continue
        return group
    raise AssertionError(f"no group from {at_least} to {at_least + _TRIED - 1} serves with window={window}")
