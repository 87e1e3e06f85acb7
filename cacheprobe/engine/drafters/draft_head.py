"""Defines DraftHead, a drafter that predicts the next states of the last layer with a small trained head."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cacheprobe.core.devices import upload
from cacheprobe.core.files import write_whole
from cacheprobe.core.registry import register
from cacheprobe.core.values import Json
from cacheprobe.engine.drafters.base import DraftContext, Drafter
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.lenses.base import unembedding_sha256
from cacheprobe.models.base import CachedLM

SHAPES = {"joint": "2m m", "joint_bias": "m", "up": "m h", "down": "h m", "mean": "m", "scale": ""}
_KEY, _VERSION = "cacheprobe draft head", 1


@register("drafters", "draft_head")
@dataclass(frozen=True, eq=False)
class DraftHead(Drafter):
    """Runs the whole model once for the first draft token, then a small head for each further one.

    The head predicts the last layer's state of the next token from that of the newest token and the next token itself;
    the model's own unembedding turns the prediction into a draft token. The head is a linear map of both (2m to m) and
    one MLP block, without attention: simpler than EAGLE's decoder layer. A token is given as its row of the unembedding
    matrix, which is its embedding in models that tie both.
    Source: EAGLE, Li et al. 2024 (arXiv 2401.15077), section 3.1, without its attention and its tree.
    """

    weights: Mapping[str, Tensor] = field(repr=False)
    """joint [2m, m], joint_bias [m], up [m, h], down [h, m], mean [m] and scale [], in float32."""
    unembedding: str
    """SHA-256 of the unembedding that the head was trained for, from `lenses.base.unembedding_sha256`."""
    about: dict[str, Json] = field(default_factory=dict, repr=False)
    """Training settings and results."""
    length: int = 4
    """Maximum number of tokens in a draft."""
    name: ClassVar[str] = "draft_head"
    always_drafts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"DraftHead(length={self.length}) would draft nothing; give at least 1")
        if lacking := sorted(set(SHAPES) - set(self.weights)):
            raise ValueError(f"a draft head has the weights {', '.join(SHAPES)}; this one lacks {lacking[0]}")
        width, hidden = self.weights["up"].shape if self.weights["up"].dim() == 2 else (0, 0)
        sizes = {"2m": 2 * width, "m": width, "h": hidden}
        for name, axes in SHAPES.items():
            wanted = tuple(sizes[axis] for axis in axes.split())
            if tuple(self.weights[name].shape) != wanted:
                raise ValueError(
                    f"weight {name} of a draft head must have shape {wanted}, got {tuple(self.weights[name].shape)}"
                )
            if self.weights[name].dtype != torch.float32:
                raise ValueError(f"weight {name} of a draft head must be float32, got {self.weights[name].dtype}")
            if not bool(self.weights[name].isfinite().all()):
                raise ValueError(f"weight {name} of a draft head holds NaN or infinity; train it again")

        if not self.weights["scale"] > 0:
            raise ValueError(f"scale of a draft head must be above 0, got {float(self.weights['scale'])}")
        if not isinstance(self.unembedding, str):
            raise ValueError(f"a draft head needs the SHA-256 of its unembedding as text, got {self.unembedding!r:.60}")

    @classmethod
    def load(cls, path: "str | Path", length: int = 4) -> "DraftHead":
        """Returns the DraftHead in a file that `save` wrote. Raises: ValueError for another or a damaged file."""
        try:
            with safe_open(path, "pt") as stored:
                config = json.loads((stored.metadata() or {})[_KEY])
                weights = {name: stored.get_tensor(name) for name in stored.keys()}
            if config["version"] != _VERSION:
                raise ValueError(f"it is of version {config['version']}, this release reads {_VERSION}")
            unembedding, about = config["unembedding_sha256"], config["about"]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} holds no draft head ({error!s:.120}); write one with cacheprobe train draft-head"
            ) from error
        return cls(weights, unembedding, about, length)

    def save(self, path: "str | Path") -> Path:
        """Writes the head to one safetensors file, with its settings as JSON, and returns the path."""
        config = {"version": _VERSION, "unembedding_sha256": self.unembedding, "about": self.about}
        tensors = {name: weight.detach().cpu().contiguous() for name, weight in self.weights.items()}
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, lambda place: save_file(tensors, place, {_KEY: json.dumps(config)}))
        return target

    def check(self, model: CachedLM) -> None:
        """Raises: ValueError if the head was trained for another model: another width or another unembedding."""
        width = self.weights["mean"].shape[0]
        if width != model.d_model:
            raise ValueError(f"this draft head is for states of width {width}, {model.name} has {model.d_model}")
        if (here := unembedding_sha256(model)) != self.unembedding:
            raise ValueError(
                f"this draft head was trained for the unembedding {self.unembedding[:12]}, {model.name} has {here[:12]}"
                "; train another"
            )

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns a list of up to `length` draft tokens for each request; [] if the request already has a draft."""
        proposals: dict[SequenceState, list[int]] = {state: [] for state in states}
        drafting = [state for state in states if not state.draft]
        if not drafting:
            return list(proposals.values())
        model, drafted = context.model, [proposals[state] for state in drafting]
        residual = context.feed_newest(drafting, num_layers=model.n_layers)
        for _ in range(self.length):
            logits = model.read_out(residual)
            chosen = context.choose(drafting, logits, drafted)
            for own, token_id in zip(drafted, chosen, strict=True):
                own.append(token_id)
            (newest,) = upload(residual.device, [torch.tensor(chosen)])
            weights = {name: weight.to(residual.device) for name, weight in self.weights.items()}
            residual = next_states(weights, residual.float(), model.unembedding[newest].float()).to(model.dtype)
        return list(proposals.values())


def next_states(
    weights: Mapping[str, Tensor], states: Float[Tensor, "n m"], tokens: Float[Tensor, "n m"]
) -> Float[Tensor, "n m"]:
    """Returns the predicted states [n, m] of the next tokens. tokens: the rows of the unembedding of these tokens."""
    joined = torch.cat([_normed((states - weights["mean"]) / weights["scale"]), _normed(tokens)], dim=-1)
    mixed = joined @ weights["joint"] + weights["joint_bias"]
    mixed = mixed + torch.nn.functional.silu(_normed(mixed) @ weights["up"]) @ weights["down"]
    return mixed * weights["scale"] + weights["mean"]


def _normed(vectors: Tensor) -> Tensor:
    """Returns the vectors, each divided by its root mean square."""
    return vectors * torch.rsqrt(vectors.square().mean(-1, keepdim=True) + 1e-6)
