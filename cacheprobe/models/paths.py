"""Chooses which of a model's two forwards runs: the bridge, which hooks may edit, or the fast forward (`HookedHF`)."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor

from cacheprobe.core.hook_names import PATTERN, SITES
from cacheprobe.core.live import LiveModule
from cacheprobe.core.values import hint
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.hf.shared import plain_path
from cacheprobe.models.settings import numeric_settings, product_dtype
from cacheprobe.models.turns import one_at_a_time

if TYPE_CHECKING:  # both load transformer_lens, which takes seconds
    from cacheprobe.models.fast.hooked_hf import HookedHF
    from cacheprobe.models.hf.bridge import BridgeLM

PATHS = ("auto", "bridge", "fast")
_PARITY = 1e-4
"""In float32, relative to the largest value: reordered sums differ by about 1e-6, a wrong mask or site by more than
.1."""


@dataclass(frozen=True)
class Trial:
    """The result of testing the fast forward; valid as long as weights, config and settings stay the same."""

    state: object
    fast: "HookedHF | None"
    reason: str
    heads: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Why the fast forward cannot record these head sites, "" if it can; filled at the first request for each set of
    sites."""


@one_at_a_time()  # the hooks of another thread's run would be taken for the user's
def choose_path(model: CachedLM, path: str = "auto", heads: Sequence[str] = ()) -> tuple[CachedLM, str]:
    """Returns the model to run on and, in one line, the reason.

    path: "auto" takes the fast forward if the user set no hook on the bridge and both forwards agreed on a short text;
    "bridge" takes the bridge; "fast" raises if the fast forward cannot be used. A CachedLM other than a BridgeLM is
    returned unchanged.
    heads: sites of attention heads that will be captured; if the fast forward does not have them, the bridge is taken.
    The fast forward is built when first chosen, kept on the BridgeLM, and tested again after every edit of the weights.
    Raises: ValueError for an unknown path; ModelError with the reason if path="fast" is impossible.
    """
    if path not in PATHS:
        raise ValueError(f"unknown path {path!r}; choose one of {', '.join(PATHS)}{hint(path, PATHS)}")
    if not _is_bridge(model):
        return model, f"{type(model).__name__}: as given"
    if path == "bridge":
        return model, "bridge: as asked"
    hook = next(user_hooks(model.bridge), None)
    if PATTERN in heads:
        fast, reason = None, "attention patterns are asked for, and only the bridge has a hook on them"
    elif hook is not None:
        fast, reason = None, f"{hook} may edit the model, and acts on the bridge alone"
    else:
        trial = _tried_fast(model)
        fast, reason = trial.fast, trial.reason
        if fast is not None and heads and (refusal := _refusal_of_heads(model, trial, tuple(heads))):
            fast, reason = None, refusal
    if fast is not None:
        return cast(CachedLM, fast), f"fast: {reason}"
    if path == "fast":
        raise ModelError(f"{model.name} cannot run on its fast forward: {reason}; use path='auto' or 'bridge'")
    return model, f"bridge: {reason}"


def _is_bridge(model: CachedLM) -> "TypeGuard[BridgeLM]":
    """Returns whether the model is a BridgeLM, without importing the slow module: if a BridgeLM exists, the module is
    loaded."""
    loaded = sys.modules.get("cacheprobe.models.hf.bridge")
    return loaded is not None and isinstance(model, loaded.BridgeLM)


def user_hooks(bridge: LiveModule) -> Iterator[str]:
    """Yields a description of every user hook on the bridge: on a HookPoint, or PyTorch's on a module inside."""
    modules = list(bridge.original_model.named_modules())
    points = bridge.hook_dict | {plain_path(name): module for name, module in modules if hasattr(module, "fwd_hooks")}
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
    """Returns the last trial if nothing changed since then, else a new one."""
    original, checksum = model.bridge.original_model, model.weights_checksum
    state = id(original), str(original.config), checksum, numeric_settings()
    trial = model.fast_trial
    if not isinstance(trial, Trial) or trial.state != state:
        trial = model.fast_trial = Trial(state, *_try_fast(model, checksum != model.checksum_at_load))
    return trial


def _try_fast(model: "BridgeLM", is_edited: bool) -> "tuple[HookedHF | None, str]":
    from cacheprobe.models.fast.hooked_hf import HookedHF

    try:
        fast = HookedHF(model)
        if is_edited and (apart := fast.weights.kept_apart()):
            return None, f"weights were edited, and the bridge keeps copies of some, such as {apart[0]}"
        return _compared(model, fast)
    except ModelError as refusal:
        return None, str(refusal)
    except (ValueError, RuntimeError, TypeError, IndexError, AttributeError, KeyError) as error:
        return None, f"the plain model does not run on our cache ({type(error).__name__}: {error!s:.120})"


def _compared(model: "BridgeLM", fast: "HookedHF") -> "tuple[HookedHF | None, str]":
    """Compares the fast forward with the bridge on one short text, fed in parts: logits and sites S, T and C.

    Returns (the fast forward, or None if they differ; a sentence with the result).
    In float32 and float64 the tolerance is 1e-4 of each tensor's largest value. In 16 bits, and if float32 products run
    at lower precision, the cosine must reach the limit in models.checks.
    """
    from cacheprobe.models.checks import probe_ids

    far, limit, found = _distances(model, fast, SITES)
    # not "> limit": a NaN is no agreement
    if wrong := [what for what, distance in far.items() if not distance <= limit]:
        return None, f"{wrong[0]} of the plain model are {found.format(far[wrong[0]])} away from the bridge's"
    worst = found.format(max(far.values()))
    return fast, f"no hook is set, and on {probe_ids(model).shape[1]} tokens it was within {worst} of the bridge"


def _refusal_of_heads(model: "BridgeLM", trial: Trial, heads: tuple[str, ...]) -> str:
    """Returns why the fast forward cannot record these head sites, "" if it can; compares each set of sites once."""
    assert trial.fast is not None
    if heads not in trial.heads:
        try:
            far, limit, found = _distances(model, trial.fast, heads)
            wrong = [what for what, distance in far.items() if not distance <= limit]
            said = [f"{what} of the plain model is {found.format(far[what])} away from the bridge's" for what in wrong]
            trial.heads[heads] = said[0] if said else ""
        except (ModelError, RuntimeError) as error:
            trial.heads[heads] = f"the plain model has no {', '.join(heads)} of its heads ({error!s:.120})"
    return trial.heads[heads]


def _distances(model: "BridgeLM", fast: "HookedHF", sites: Sequence[str]) -> tuple[dict[str, float], float, str]:
    """Returns how far the two forwards differ on one short text, fed in parts; the allowed distance; and a format for
    messages."""
    from cacheprobe.models.checks import LEAST_COSINE, cosine, probe_ids

    token_ids = probe_ids(model)
    theirs, ours = _observed(model, token_ids, sites), _observed(cast(CachedLM, fast), token_ids, sites)
    if product_dtype(model.dtype) in (torch.float32, torch.float64):
        far = {what: _relative_distance(ours[what], value) for what, value in theirs.items()}
        limit, found = _PARITY, "{:.0e} of the largest value"
    else:
        far = {what: 1 - cosine(ours[what], value) for what, value in theirs.items()}
        limit, found = 1 - LEAST_COSINE, "{:.0e} from a cosine of 1"
    return far, limit, found


def _relative_distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


def _observed(model: CachedLM, token_ids: Tensor, sites: Sequence[str]) -> dict[str, Tensor]:
    """Returns float32 logits [t, v] and states [t, m] of a text; for head sites, all heads of a layer side by side."""
    from cacheprobe.models.checks import cached_logits, probe_cache

    cache = probe_cache(model, token_ids)
    parts: dict[str, list[Tensor]] = {}

    def keep(site: str, layer: int, value: Tensor) -> None:
        """Keeps one activation as float32."""
        parts.setdefault(f"{site} of layer {layer}", []).append(value[0].flatten(1).float())

    with model.capturing([("pre", 0)] + [(site, layer) for layer in range(model.n_layers) for site in sites], keep):
        logits = cached_logits(model, token_ids, cache)
    return {"logits": logits} | {what: torch.cat(pieces) for what, pieces in parts.items()}
