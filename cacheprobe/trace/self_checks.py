"""Checks captured states while a run records them: each block's output must be the sum of its parts, and the logit lens
at the last layer must give the model's own logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheprobe.core.records import ObserverError
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import BlockSum
from cacheprobe.models.settings import product_dtype

_PLAIN_SUM = BlockSum()


class CaptureError(ObserverError):
    """Raised if captured states contradict the model. Do not trust any reading from such a run."""


@dataclass
class Check:
    """Holds the results of one self-check: its tolerance, the number of rows checked, and the largest error so far."""

    name: str
    dtype: str
    tolerance: str
    num_rows: int = 0
    worst: float = 0.0
    """Largest error as a fraction of the tolerance: at most 1."""

    def add(self, largest: list[Tensor], step: int) -> None:
        """Adds errors of one pass to this self-check: largest ones, as fractions of the allowed ones.

        Raises: CaptureError for an error above the allowed one, and for NaN.
        """
        worst = float(torch.stack(largest).max()) if largest else 0.0
        if worst != worst:
            raise CaptureError(
                f"step {step}: the model's states hold NaN or infinity; load it in float32 or check its weights"
            )
        if not worst <= 1.0:
            raise CaptureError(
                f"step {step}: {self.name} fails by {worst:.3g} times its tolerance ({self.tolerance}, {self.dtype}); "
                "the model's hooks do not give the sites that they name, or a hook of yours edits the residual stream"
            )
        self.worst = max(self.worst, worst)


def residual_check(dtype: torch.dtype) -> Check:
    """Returns a new Check for the identity: a layer's output = its input + attention output + MLP output."""
    tolerance = "4 eps (|pre| + |T| + |C|)"
    return Check("resid_post = resid_pre + T + C", _name(dtype), tolerance)


def residual_errors(pre: Tensor, attn: Tensor, mlp: Tensor, post: Tensor, form: BlockSum = _PLAIN_SUM) -> Tensor:
    """Returns how much `post` differs from pre + attn + mlp, elementwise, in the model's dtype, as a fraction of what
    rounding may do; with pre times the scale of `form`.

    Each of the two additions rounds once, and architectures add in different orders. Two orders differ by at most 2 eps
    of the terms' magnitudes; 4 eps allow for fused additions, or for a scale of the whole sum. If `mlp` is a sum of
    several parts, these may cancel in single numbers, so the largest magnitude of a row of `mlp` is added for each.
    """
    pre = pre if form.scale == 1 else form.scale * pre
    eps = torch.finfo(post.dtype).eps
    wide = torch.promote_types(post.dtype, torch.float32)
    magnitude = pre.to(wide).abs().add_(attn.abs()).add_(mlp.abs())
    if form.mlp_parts > 1:
        magnitude.add_(mlp.abs().amax(-1, keepdim=True))
    error = (post.to(wide) - (pre + attn + mlp)).abs_()
    return _fraction(error, magnitude.clamp_(min=torch.finfo(torch.float32).tiny).mul_(4 * eps))


def add_errors(found: Sequence[tuple[Check, list[Tensor]]], step: int) -> None:
    """Adds the errors of one pass to each check, as `Check.add` does. Waits for a GPU once."""
    largest = [error for _, errors in found for error in errors]
    arrived = torch.stack(largest).cpu().split([len(errors) for _, errors in found]) if largest else ()
    for (check, _), errors in zip(found, arrived, strict=bool(largest)):
        check.add(list(errors), step)


def block_errors(
    check: Check,
    watched: Mapping[tuple[str, int], Tensor],
    forms: Sequence[BlockSum],
    unchanged: Mapping[int, Sequence[int]],
) -> list[Tensor]:
    """Returns the largest errors of S = input + T + C in the layers of a pass, for `add_errors`. Counts the rows.

    watched: states [r, m] by (site, layer); the input of a layer without site pre is S of the layer below.  forms: of
    each layer.  unchanged: layer -> which of its rows to check, if not all.
    """
    largest: list[Tensor] = []
    for layer, form in enumerate(forms):
        below = ("pre", layer) if ("pre", layer) in watched else ("S", layer - 1)
        rows = unchanged.get(layer, slice(None))
        parts = (watched[place][rows] for place in (below, *((site, layer) for site in "TCS")))
        errors = residual_errors(*parts, form=form)
        check.num_rows += len(errors)
        largest += [errors.max()] if errors.numel() else []
    return largest


def lens_check(dtype: torch.dtype) -> Check:
    """Returns a new Check for the identity: the logit lens at the last layer = the model's own logits."""
    return Check(
        "last layer's Z = the model's own output", _name(dtype), f"{_lens_rtol(dtype):.2g} of the largest logit"
    )


def lens_errors(check: Check, logits: Tensor, model_logits: Tensor) -> list[Tensor]:
    """Returns the largest error of logits [n, v], read by the logit lens from the last layer, against the model's own,
    for `add_errors`. Counts the rows.

    They need not be bitwise equal: the two matrix products have different numbers of rows, so sums are reordered.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    scale = model_logits.abs().amax(-1).to(wide)
    error = (logits.to(wide) - model_logits).abs_().amax(-1)
    check.num_rows += len(logits)
    return [_fraction(error, _lens_rtol(logits.dtype) * scale).max()]


def _fraction(error: Tensor, allowed: Tensor) -> Tensor:
    return torch.where(error == 0, 0.0, error / allowed)


def _lens_rtol(dtype: torch.dtype) -> float:
    """Returns the allowed error of `lens_errors`, as a fraction of the row's largest logit."""
    return max(2 * torch.finfo(product_dtype(dtype)).eps, 1e-5)


def _name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def computed_by(fingerprint: JsonDict) -> str:
    """Returns text for a repr: the path that computed a run, and with which code, such as "plain path, compiled
    loops" or "bridge path, TransformerLens"; of an import, the program."""
    path, products = str(fingerprint.get("path", "unknown")), str(fingerprint.get("products") or "torch")
    if path.startswith("imported"):
        return path
    code = "Triton kernels" if "Triton" in products else "compiled loops" if products != "torch" else "torch"
    return f"{path} path, {'TransformerLens' if path == 'bridge' else code}"


def self_checks_text(meta: JsonDict) -> str:
    """Returns text for a repr: how often a request's tokens were computed twice and compared, and how many results
    differed; "" if no pass was compared."""
    counts: JsonDict = meta.get("self_checks") or {"compared": 0}
    if not counts["compared"]:
        return ""
    return f"; verified against itself {counts['compared']:,} times, {len(counts['differences'])} differences"
