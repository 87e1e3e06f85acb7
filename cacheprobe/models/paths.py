"""Chooses which of a model's two forwards runs: the TransformerBridge, which hooks may edit, or the fast forward
(`FastLM`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from cacheprobe.core.hook_names import PATTERN, SITES
from cacheprobe.core.live import LiveModule
from cacheprobe.core.values import hint
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.recurrent import RecurrentCache
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.checks import LEAST_COSINE, cached_logits, cosine, probe_cache, probe_ids
from cacheprobe.models.experts import head_places
from cacheprobe.models.hf.shared import plain_path
from cacheprobe.models.settings import numeric_settings, one_at_a_time, product_dtype

if TYPE_CHECKING:  # both load transformer_lens, which takes seconds
    from cacheprobe.models.fast.lm import FastLM
    from cacheprobe.models.hf.bridge import BridgeLM

PATHS = ("auto", "bridge", "fast")
_PARITY = 1e-4
"""Largest accepted difference of the two forwards in float32, relative to the tensor's largest value: reordered sums
differ by about 1e-6, a wrong mask or site by more than .1."""


@dataclass(frozen=True)
class Trial:
    """Holds the result of comparing the fast forward with the bridge: the fast forward or None, and the reason. The
    result is valid as long as weights, config and numeric settings stay the same."""

    state: object
    """Identifies the model, its config, its weights and the numeric settings at the time of the comparison."""
    fast: "FastLM | None"
    reason: str
    heads: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Head sites -> text that says why the fast forward cannot record these sites, "" if it can. A set of sites is
    added when it is first captured."""


@one_at_a_time()  # the hooks of another thread's run would be taken for the user's
def choose_path(model: CachedLM, path: str = "auto", heads: Sequence[str] = ()) -> tuple[CachedLM, str]:
    """Returns (model to run on, reason as one line of text). The model is the given BridgeLM or its fast forward
    (FastLM).

    path: "auto" takes the fast forward if the user set no hook on the bridge and both forwards agreed on a short text;
    "bridge" takes the bridge; "fast" raises if the fast forward cannot be used. A CachedLM other than a BridgeLM is
    returned unchanged.
    heads: sites of attention heads that will be captured; if the fast forward cannot record these sites, "auto" takes
    the bridge.
    The fast forward is built when first considered, kept on the BridgeLM, and tested again if weights, config or
    numeric settings changed.
    Raises: ValueError for an unknown path; ModelError with the reason if path="fast" is impossible.
    """
    why = getattr(model, "why", None)  # of a PlainLM
    if path not in PATHS and not (path == "plain" and why):
        raise ValueError(f"unknown path {path!r}; choose one of {', '.join(PATHS)}{hint(path, PATHS)}")
    if why and path in ("fast", "bridge"):
        raise ModelError(f'{model.name} runs without a bridge ({why}), so it has no path {path!r}; use path="auto"')
    if not hasattr(model, "fast_trial"):
        return model, f"plain: {why}" if why else f"{type(model).__name__}: as given"
    if path == "bridge":
        return model, "bridge: as asked"
    bridged = cast("BridgeLM", model)
    hook = next(user_hooks(bridged.bridge), None)
    if PATTERN in heads:
        fast, reason = None, "attention patterns are asked for, and only the bridge has a hook on them"
    elif hook is not None:
        fast, reason = None, f"{hook} may edit the model, and acts on the bridge alone"
    else:
        trial = _tried_fast(bridged)
        fast, reason = trial.fast, trial.reason
        if fast is not None and heads:
            if (key := tuple(heads)) not in trial.heads:
                trial.heads[key] = _refusal_of_heads(bridged, fast, key)
            fast, reason = (None, trial.heads[key]) if trial.heads[key] else (fast, reason)
    if fast is not None:
        return cast(CachedLM, fast), f"fast: {reason}"
    if path == "fast":
        raise ModelError(f"{model.name} cannot run on its fast forward: {reason}; use path='auto' or 'bridge'")
    return model, f"bridge: {reason}"


def require_loaded(model: object, what: str) -> None:
    """Raises: ValueError for an object that is no CachedLM, such as a plain transformers model. what: names the
    caller, which needs one."""
    if not hasattr(model, "new_cache"):
        raise ValueError(
            f"{what} needs a model from cp.load_model(...), got a {type(model).__name__}; give cp.load_model(model)"
        )


def usable(model: CachedLM, path: str) -> CachedLM:
    """Returns the model that runs the grid: for a model inside a TransformerBridge, the bridge or its fast forward, as
    `path` says; another model is returned unchanged.

    Raises: ValueError for an object without `new_cache`, such as a plain transformers model, and for an unknown path;
    ModelError if path="fast" is impossible, and for a model without `editing` or with a cache of more than keys and
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


def user_hooks(bridge: LiveModule) -> Iterator[str]:
    """Yields text, such as "a hook on blocks.0.hook_attn_out", for each hook that the user set on a bridge: at a
    HookPoint, or as a PyTorch forward hook on a module. Permanent hooks of TransformerLens and cacheprobe, and PyTorch
    hooks of TransformerLens and transformers, are left out."""
    modules = list(bridge.original_model.named_modules())
    points = bridge.hook_dict | {plain_path(name): module for name, module in modules if "fwd_hooks" in vars(module)}
    for name, point in points.items():
        for handle in (*point.fwd_hooks, *point.bwd_hooks):
            if not (handle.is_permanent and _is_of(handle.user_hook, "transformer_lens", "cacheprobe")):
                yield f"a hook on {name}"
    for name, module in modules:
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not _is_of(hook, "transformer_lens", "transformers"):  # HookPoints' own, and recorders
                yield f"a PyTorch hook on {plain_path(name) or 'the model'}"


def _is_of(function: object, *libraries: str) -> bool:
    home = getattr(getattr(function, "func", function), "__module__", None) or ""
    return home.split(".")[0] in libraries


def _tried_fast(model: "BridgeLM") -> Trial:
    """Returns the Trial stored on the model, or a new one if weights, config or numeric settings have changed."""
    original, checksum = model.bridge.original_model, model.weights_checksum
    state = id(original), str(original.config), checksum, numeric_settings()
    trial = model.fast_trial
    if not isinstance(trial, Trial) or trial.state != state:
        trial = model.fast_trial = Trial(state, *_try_fast(model, checksum != model.checksum_at_load))
    return trial


def _try_fast(model: "BridgeLM", is_edited: bool) -> "tuple[FastLM | None, str]":
    """Builds the fast forward and compares it with the bridge on one short text: logits and sites S, T and C. Returns
    (fast forward, or None if it cannot be used; reason as text)."""
    from cacheprobe.models.fast.lm import FastLM

    try:
        fast = FastLM(model)
        if is_edited and (apart := fast.weights.kept_apart()):
            return None, f"weights were edited, and the bridge keeps copies of some, such as {apart[0]}"
        name, distance = _largest_distance(model, fast, SITES)
    except ModelError as refusal:
        return None, str(refusal)
    except (ValueError, RuntimeError, TypeError, IndexError, AttributeError, KeyError) as error:
        return None, f"the plain model does not run on our cache ({type(error).__name__}: {error!s:.120})"
    if name:
        return None, f"{name} of the plain model are {distance} away from the bridge's"
    return fast, f"no hook is set, and on {probe_ids(model).shape[1]} tokens it was within {distance} of the bridge"


def _refusal_of_heads(model: "BridgeLM", fast: "FastLM", heads: tuple[str, ...]) -> str:
    """Returns text that says why the fast forward cannot record these head sites, "" if it can."""
    try:
        name, distance = _largest_distance(model, fast, heads)
    except (ModelError, RuntimeError) as error:
        return f"the plain model has no {', '.join(heads)} of its heads ({error!s:.120})"
    return f"{name} of the plain model is {distance} away from the bridge's" if name else ""


def _largest_distance(model: "BridgeLM", fast: "FastLM", sites: Sequence[str]) -> tuple[str, str]:
    """Runs both forwards on one short text. Returns (name of the first activation in which they differ too much, ""
    for none; its distance as text, or else the largest)."""
    token_ids = probe_ids(model)
    of_bridge, of_fast = _observed(model, token_ids, sites), _observed(cast(CachedLM, fast), token_ids, sites)
    if product_dtype(model.dtype) in (torch.float32, torch.float64):
        distances = {name: _relative_distance(of_fast[name], value) for name, value in of_bridge.items()}
        limit, template = _PARITY, "{:.0e} of the largest value"
    else:
        distances = {name: 1 - cosine(of_fast[name], value) for name, value in of_bridge.items()}
        limit, template = 1 - LEAST_COSINE, "{:.0e} from a cosine of 1"
    # not "> limit": a NaN is no agreement
    too_far = next((name for name, distance in distances.items() if not distance <= limit), "")
    return too_far, template.format(distances[too_far] if too_far else max(distances.values()))


def _relative_distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


def _observed(model: CachedLM, token_ids: Tensor, sites: Sequence[str]) -> dict[str, Tensor]:
    """Runs the model on token_ids [1, t] and returns a dict of float32 tensors: "logits" [t, v], and one [t, width] for
    each site and layer, such as "S of layer 3"."""
    cache = probe_cache(model, token_ids)
    parts: dict[str, list[Tensor]] = {}

    def keep(site: str, layer: int, value: Tensor) -> None:
        """Appends an activation, as float32 [t, m], to the list `parts["SITE of layer N"]`."""
        parts.setdefault(f"{site} of layer {layer}", []).append(value[0].flatten(1).float())

    with model.capturing([("pre", 0), *head_places(model, sites, range(model.n_layers))], keep):
        logits = cached_logits(model, token_ids, cache)
    return {"logits": logits} | {name: torch.cat(pieces) for name, pieces in parts.items()}
