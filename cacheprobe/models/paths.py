"""Which of a model's two forms runs: the bridge, where hooks may edit, or its faster twin, where nothing does."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

from cacheprobe.core.hook_names import PATTERN, SITES
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.hf.shared import plain_path
from cacheprobe.models.settings import numeric_settings, product_dtype
from cacheprobe.models.turns import one_at_a_time

if TYPE_CHECKING:  # both load transformer_lens, which takes seconds
    from cacheprobe.models.fast.hooked_hf import HookedHF
    from cacheprobe.models.hf.bridge import BridgeLM

PATHS = ("auto", "bridge", "twin")
_PARITY = 1e-4
"""In float32, of the largest value: two orders of summation differ by 1e-6, a wrong mask or site by more than .1."""


@dataclass(frozen=True)
class _Trial:
    """What came of trying a twin; good as long as weights, config and settings are those that it was tried with."""

    state: object
    twin: "HookedHF | None"
    reason: str
    heads: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Why the twin cannot be heard at these sites of its heads, empty where it can; filled as they are asked for."""


@one_at_a_time()  # the hooks of another thread's run would be taken for the user's
def choose_path(model: CachedLM, path: str = "auto", heads: Sequence[str] = ()) -> tuple[CachedLM, str]:
    """The model to run on, and why, in one line.

    path: "auto" takes the twin where no hook of the user's is set on the bridge and both agreed on a short text;
        "bridge" takes the bridge; "twin" raises where it cannot be the twin. Any CachedLM but a BridgeLM is returned.
    heads: sites of attention heads that will be listened to; the bridge is taken where the twin does not have them.
    The twin is built when first chosen, kept on the BridgeLM, and tried anew after every edit of the weights.
    Raises: ValueError for another path; ModelError with the reason for a twin that cannot be.
    """
    if path not in PATHS:
        raise ValueError(f"unknown path {path!r}; choose one of {', '.join(PATHS)}")
    if not _is_bridge(model):
        return model, f"{type(model).__name__}: as given"
    if path == "bridge":
        return model, "bridge: as asked"
    hook = next(user_hooks(model.bridge), None)
    if PATTERN in heads:
        twin, reason = None, "attention patterns are asked for, and only the bridge has a hook on them"
    elif hook is not None:
        twin, reason = None, f"{hook} may edit the model, and acts on the bridge alone"
    else:
        trial = _tried_twin(model)
        twin, reason = trial.twin, trial.reason
        if twin is not None and heads and (refusal := _refusal_of_heads(model, trial, tuple(heads))):
            twin, reason = None, refusal
    if twin is not None:
        return cast(CachedLM, twin), f"twin: {reason}"
    if path == "twin":
        raise ModelError(f"{model.name} cannot run on its twin: {reason}; use path='auto' or 'bridge'")
    return model, f"bridge: {reason}"


def _is_bridge(model: CachedLM) -> "TypeGuard[BridgeLM]":
    """Without loading what takes seconds: whoever made a BridgeLM has done that."""
    loaded = sys.modules.get("cacheprobe.models.hf.bridge")
    return loaded is not None and isinstance(model, loaded.BridgeLM)


def user_hooks(bridge: Any) -> Iterator[str]:
    """Every hook on the bridge that is not its own, in words: on a HookPoint, or PyTorch's on a module inside."""
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


def _is_of(function: Any, *libraries: str) -> bool:
    home = getattr(getattr(function, "func", function), "__module__", None) or ""
    return home.split(".")[0] in libraries


def _tried_twin(model: "BridgeLM") -> _Trial:
    """The last trial if nothing changed since, or a new one."""
    original, checksum = model.bridge.original_model, model.weights_checksum
    state = id(original), str(original.config), checksum, numeric_settings()
    if model.twin_trial is None or model.twin_trial.state != state:
        model.twin_trial = _Trial(state, *_try_twin(model, checksum != model.checksum_at_load))
    return model.twin_trial


def _try_twin(model: "BridgeLM", is_edited: bool) -> "tuple[HookedHF | None, str]":
    from cacheprobe.models.fast.hooked_hf import HookedHF

    try:
        twin = HookedHF(model)
        if is_edited and (apart := twin.weights.kept_apart()):
            return None, f"weights were edited, and the bridge keeps copies of some, such as {apart[0]}"
        return _compared(model, twin)
    except ModelError as refusal:
        return None, str(refusal)
    except (ValueError, RuntimeError, TypeError, IndexError, AttributeError, KeyError) as error:
        return None, f"the plain model does not run on our cache ({type(error).__name__}: {error!s:.120})"


def _compared(model: "BridgeLM", twin: "HookedHF") -> "tuple[HookedHF | None, str]":
    """The twin if its logits, S, T and C of one short text, fed in parts, are the bridge's; and what was found.

    In float32 and float64 to 1e-4 of each one's largest value; in 16 bits, and where products of float32 are made in
    less, by the cosine that models.checks asks for.
    """
    from cacheprobe.models.checks import probe_ids

    far, limit, found = _distances(model, twin, SITES)
    # not "> limit": a NaN is no agreement
    if wrong := [what for what, distance in far.items() if not distance <= limit]:
        return None, f"{wrong[0]} of the plain model are {found.format(far[wrong[0]])} away from the bridge's"
    worst = found.format(max(far.values()))
    return twin, f"no hook is set, and on {probe_ids(model).shape[1]} tokens it was within {worst} of the bridge"


def _refusal_of_heads(model: "BridgeLM", trial: _Trial, heads: tuple[str, ...]) -> str:
    """Why these sites cannot be had of the twin, or nothing; the same comparison as for S, T and C, made once."""
    assert trial.twin is not None
    if heads not in trial.heads:
        try:
            far, limit, found = _distances(model, trial.twin, heads)
            wrong = [what for what, distance in far.items() if not distance <= limit]
            said = [f"{what} of the plain model is {found.format(far[what])} away from the bridge's" for what in wrong]
            trial.heads[heads] = said[0] if said else ""
        except (ModelError, RuntimeError) as error:
            trial.heads[heads] = f"the plain model has no {', '.join(heads)} of its heads ({error!s:.120})"
    return trial.heads[heads]


def _distances(model: "BridgeLM", twin: "HookedHF", sites: Sequence[str]) -> tuple[dict[str, float], float, str]:
    """How far logits and states of one short text, fed in parts, are apart; what is allowed, and how to say it."""
    from cacheprobe.models.checks import LEAST_COSINE, cosine, probe_ids

    token_ids = probe_ids(model)
    theirs, ours = _observed(model, token_ids, sites), _observed(cast(CachedLM, twin), token_ids, sites)
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
    """Float32 logits [t, v] and states [t, m] of a text; of heads, all of a layer's side by side."""
    from cacheprobe.models.checks import cached_logits, probe_cache

    cache = probe_cache(model, token_ids)
    parts: dict[str, list[Tensor]] = {}

    def keep(site: str, layer: int, value: Tensor) -> None:
        parts.setdefault(f"{site} of layer {layer}", []).append(value[0].flatten(1).float())

    with model.capturing([("pre", 0)] + [(site, layer) for layer in range(model.n_layers) for site in sites], keep):
        logits = cached_logits(model, token_ids, cache)
    return {"logits": logits} | {what: torch.cat(pieces) for what, pieces in parts.items()}
