"""Chooses which forward of a model runs."""

from collections.abc import Sequence

from cacheprobe.core.values import hint
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.recurrent import RecurrentCache
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.settings import one_at_a_time

PATHS = ("auto", "bridge", "plain")


@one_at_a_time()  # the hooks of another thread's run would be taken for the user's
def choose_path(
    model: CachedLM, path: str = "auto", heads: Sequence[str] = (), modules: Sequence[str] = ()
) -> tuple[CachedLM, str]:
    """Returns (model to run on, reason as one line of text). The model is the given one or, of a PlainLM, the BridgeLM
    of its weights.

    path: "auto" takes the plain model, unless the user set a hook, or heads or modules need the bridge; "plain" raises
    then;
    "bridge" takes the bridge. A CachedLM with one forward alone is returned unchanged.
    heads: sites of attention heads that will be captured.  modules: names of modules and hook points that will be
    hooked.
    Raises: ValueError for an unknown path; ModelError with the reason if the asked path is impossible.
    """
    if path not in PATHS:
        raise ValueError(f"unknown path {path!r}; choose one of {', '.join(PATHS)}{hint(path, PATHS)}")
    if (on_path := getattr(model, "on_path", None)) is not None:
        bridge, reason = on_path(path, heads, modules)
        return model if bridge is None else bridge, reason
    only = str(getattr(model, "path", ""))
    if only and path not in ("auto", only):
        raise ModelError(f"{model.name} runs on its bridge alone; use path='auto'")
    return model, f"{only or type(model).__name__}: as given"


def require_loaded(model: object, what: str) -> None:
    """Raises: ValueError for an object that is no CachedLM, such as a plain transformers model. what: names the
    caller, which needs one."""
    if not hasattr(model, "new_cache"):
        raise ValueError(
            f"{what} needs a model from cp.load_model(...), got a {type(model).__name__}; give cp.load_model(model)"
        )


def usable(model: CachedLM, path: str) -> CachedLM:
    """Returns the model that runs the grid: the plain model or its bridge, as `path` says; another model is
    returned unchanged.

    Raises: ValueError for an object without `new_cache`, such as a plain transformers model, and for an unknown path;
    ModelError if the path is impossible, for a model without `editing`, and for one with a cache of more than keys and
    values.
    """
    require_loaded(model, "a patching grid")
    chosen, _ = choose_path(model, path)
    if not hasattr(chosen, "editing"):
        raise ModelError(f"{chosen.name} has no `editing`, so nothing can be patched in it; see CachedLM")
    if type(cache := chosen.new_cache(1, 1)) not in (KVCache, RecurrentCache):
        raise ModelError(
            f"{chosen.name} keeps a {type(cache).__name__}, more than keys and values, which cells cannot share; use a "
            "model whose only memory is keys and values"
        )
    return chosen
