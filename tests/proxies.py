"""Objects that stand for a model and pass most calls on to one."""

from typing import Any

from cacheprobe.models.base import CachedLM


def take_members(proxy: Any, model: CachedLM) -> None:
    """Sets on the proxy every member of CachedLM that its own class does not define.

    Real attributes: from Python 3.12 on, a runtime protocol does not see those that `__getattr__` gives.
    """
    for name in (*CachedLM.__annotations__, *(n for n in vars(CachedLM) if not n.startswith("_"))):
        if not hasattr(type(proxy), name):
            setattr(proxy, name, getattr(model, name))
    for name in ("operations", "read_tokens", "independent_width"):  # of models that can run in compiled loops
        if hasattr(model, name):
            setattr(proxy, name, getattr(model, name))
