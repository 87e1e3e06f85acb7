"""Defines TunedLens: a trained affine translator for every layer, followed by the model's own unembedding. Saves and
loads it; also loads files of AlignmentResearch's package tuned-lens."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from cacheprobe.core.files import write_json, write_whole
from cacheprobe.core.registry import register
from cacheprobe.core.values import Json
from cacheprobe.lenses.base import Lens, LensError, require_made_for, unembedding_sha256
from cacheprobe.lenses.dictionaries.files import read_json, read_torch_weights, safetensors_shapes
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.by_layer import product_by_layer

CONFIG, TRANSLATORS, PACKAGE_TRANSLATORS = "config.json", "translators.safetensors", "params.pt"
_KIND, _VERSION = "cacheprobe tuned lens", 1


@register("lenses", "tuned")
@dataclass(frozen=True, eq=False)
class TunedLens:
    """Reads a layer's residual stream h as h + h W + b, followed by the model's final norm and unembedding.

    W and b are trained for each layer. The last layer has no translator and gives the model's output. With zero W and b
    the lens equals the logit lens. The sum is computed in float32 and rounded to the model's dtype.
    Source: Belrose et al. 2023 (arXiv 2303.08112), section 3, in the residual form of its tuned-lens package.
    Twin: tests.twins.lenses_slowly.tuned_logits_slowly, close(1e-5) in float32.
    """

    weights: Float[Tensor, "l m m"]
    """W of every layer but the last, float32; multiplied from the right."""
    biases: Float[Tensor, "l m"]
    """b of every layer but the last, float32."""
    unembedding: str
    """SHA-256 of the unembedding that the lens was made for, from `lenses.base.unembedding_sha256`."""
    about: dict[str, Json] = field(default_factory=dict, repr=False)
    """Training settings and results, as stored in config.json."""
    name: ClassVar[str] = "tuned"
    sites: ClassVar[tuple[str, ...]] = ("S",)

    def __post_init__(self) -> None:
        layers, width = len(self.weights), self.weights.shape[-1]
        shapes = (tuple(self.weights.shape), tuple(self.biases.shape))
        if not layers or shapes != ((layers, width, width), (layers, width)):
            raise LensError(f"a tuned lens has weights [l, m, m] and biases [l, m] for l >= 1, got {shapes}")

    def __repr__(self) -> str:
        layers, width = self.biases.shape
        return f"TunedLens({layers} translators, d_model {width}, unembedding {self.unembedding[:12]})"

    @classmethod
    def fresh(cls, model: CachedLM) -> "Lens":
        """Returns an untrained TunedLens: all W and b are zero, so the lens gives the logits of the logit lens.

        Raises: LensError for a model of one layer.
        """
        layers, width = model.n_layers - 1, model.d_model
        if not layers:
            raise LensError(f"{model.name} has one layer, which is its output: there is nothing to translate")
        weights, biases = torch.zeros(layers, width, width), torch.zeros(layers, width)
        return cls(weights.to(model.device), biases.to(model.device), unembedding_sha256(model))

    @classmethod
    def load(cls, directory: "str | Path", model: CachedLM) -> "TunedLens":
        """Returns the TunedLens saved in a directory by `cacheprobe train tuned-lens`, or by AlignmentResearch's
        package tuned-lens.

        Raises: LensError for a directory without a tuned lens, with a broken one, or with a lens of another model.
        """
        directory = Path(directory)
        config = require_tuned_lens(directory)
        if config.get("kind") == _KIND:
            tensors = load_file(directory / TRANSLATORS)
            weights, biases = (tensors[name].to(model.device) for name in ("weights", "biases"))
            lens = cls(weights, biases, str(config["unembedding_sha256"]), cast("dict[str, Json]", config["about"]))
        else:
            tensors = read_package_artefact(directory, config, model)
            about: dict[str, Json] = {"made_by": "the tuned-lens package", "config": config}
            lens = cls(*tensors, unembedding_sha256(model), about)
        lens.check(model)
        return lens

    def save(self, directory: "str | Path") -> Path:
        """Writes translators.safetensors and config.json into a directory, and returns its path."""
        directory = Path(directory)
        layers, width = self.biases.shape
        config = {
            "kind": _KIND,
            "version": _VERSION,
            "n_layers": layers + 1,
            "d_model": width,
            "unembedding_sha256": self.unembedding,
            "about": self.about,
        }
        tensors = {name: getattr(self, name).detach().cpu().contiguous() for name in ("weights", "biases")}
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / TRANSLATORS, lambda path: save_file(tensors, path))
        write_json(directory / CONFIG, config)
        return directory

    def check(self, model: CachedLM) -> None:
        """Raises: LensError if the lens was trained for another number of layers, another width or unembedding."""
        layers, width = self.biases.shape
        remedy = "train one with cacheprobe train tuned-lens"
        require_made_for(model, "tuned", layers + 1, width, self.unembedding, remedy)

    def logits(self, model: CachedLM, states: Float[Tensor, "n m"], layers: Int[Tensor, "n"]) -> Float[Tensor, "n v"]:
        """Returns logits [n, v] of residual streams `states` [n, m], each taken after its layer in `layers` [n]."""
        return model.read_out(self.to_residual(states, layers))

    def to_residual(self, states: Float[Tensor, "n m"], layers: Int[Tensor, "n"]) -> Float[Tensor, "n m"]:
        """Returns h + h W + b for each of `states` [n, m], in their dtype. States of the last layer are unchanged."""
        last = len(self.weights)
        exact, layers = states.float().to(self.weights.device), layers.to(self.weights.device)
        moved = product_by_layer(exact, layers.clamp(max=last - 1), self.weights, self.biases)
        return (exact + moved.masked_fill((layers == last)[:, None], 0.0)).to(states.dtype)


def require_tuned_lens(directory: Path) -> dict[str, Json]:
    """Returns the config of the tuned lens in a directory, as a dict. Checks first that a file of weights exists and,
    for a lens that cacheprobe wrote, has the shapes of the config.

    Raises: LensError for a directory without a lens, or with a broken one.
    """
    try:
        config = read_json(directory / CONFIG)
    except (OSError, ValueError) as error:
        raise LensError(
            f"{directory} holds no tuned lens ({error!s:.120}); write one with cacheprobe train tuned-lens --out DIR"
        ) from error
    if config.get("kind") == _KIND:
        _require_whole(directory, config)
    elif (kind := config.get("lens_type")) != "linear_tuned_lens":
        raise LensError(f"{directory}: lens_type is {kind!r}; only linear_tuned_lens can be read")
    elif not (directory / PACKAGE_TRANSLATORS).is_file():
        raise LensError(f"{directory} is no whole tuned lens: it has no {PACKAGE_TRANSLATORS}")
    return config


def _require_whole(directory: Path, config: dict[str, Json]) -> None:
    """Raises: LensError if a lens that cacheprobe wrote is of another version, or if its file of weights is missing,
    broken or does not fit the config."""
    if config.get("version") != _VERSION:
        raise LensError(f"{directory}: tuned lens of version {config.get('version')}, this release reads {_VERSION}")
    try:
        layers, width, unembedding = (config[name] for name in ("n_layers", "d_model", "unembedding_sha256"))
        if not isinstance(layers, int) or not isinstance(width, int):
            raise ValueError(f"n_layers is {layers!r} and d_model is {width!r}; both must be whole numbers")
        shapes = safetensors_shapes(directory / TRANSLATORS)
        wanted = {"weights": (layers - 1, width, width), "biases": (layers - 1, width)}
        if shapes != wanted or not isinstance(unembedding, str) or not isinstance(config["about"], dict):
            raise ValueError(f"expected {wanted} and the unembedding's SHA-256, got {shapes} and {unembedding!r:.16}")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise LensError(f"{directory} is no whole tuned lens ({error!s:.200}); train it again") from error


def read_package_artefact(directory: Path, config: dict[str, Json], model: CachedLM) -> tuple[Tensor, Tensor]:
    """Returns (weights [l, m, m], biases [l, m]) of the translators in files of AlignmentResearch's package tuned-lens
    0.2.0, which stores a linear layer for each transformer layer.

    That package's translators read inputs of layers. So translator i + 1 becomes that of layer i, and translator 0, for
    the embedding, is left out.
    Source: github.com/AlignmentResearch/tuned-lens 0.2.0, nn/lenses.py.
    Raises: LensError for a lens of other shapes or another unembedding, and for a file that holds no weights.
    """
    given = (config.get("num_hidden_layers"), config.get("d_model"))
    if given != (model.n_layers, model.d_model):
        raise LensError(
            f"{directory}: it is for (layers, width) {given}, {model.name} has {model.n_layers, model.d_model}"
        )
    here = package_unembedding_hash(model)
    if config.get("unembed_hash") != here:
        raise LensError(
            f"{directory}: it was made for the unembedding {config.get('unembed_hash')}, by the package's hash "
            f"{model.name} has {here}; take the model {config.get('base_model_name_or_path')} that it names"
        )
    path = directory / PACKAGE_TRANSLATORS
    try:
        tensors = read_torch_weights(path)
    except (OSError, ValueError) as error:
        raise LensError(f"{path} holds no weights: {error!s:.200}") from error
    layers, width = range(1, model.n_layers), model.d_model
    wanted = {f"{layer}.weight": (width, width) for layer in layers} | {f"{layer}.bias": (width,) for layer in layers}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name in wanted}
    if shapes != wanted:
        name = next(name for name in wanted if shapes.get(name) != wanted[name])
        raise LensError(f"{path}: {name} should be of shape {wanted[name]}, it is {shapes.get(name, 'missing')}")
    weights = torch.stack([tensors[f"{layer}.weight"].float().T for layer in layers]).to(model.device)
    return weights, torch.stack([tensors[f"{layer}.bias"].float() for layer in layers]).to(model.device)


def package_unembedding_hash(model: CachedLM) -> str:
    """Returns the hash by which the tuned-lens package names an unembedding matrix, as hex text.

    The package hashes the matrix as numpy prints it with one decimal: of more than 1,000 numbers, only the corners.
    Source: tuned-lens 0.2.0, utils.tensor_hash.
    """
    weight = model.unembedding.detach().to("cpu", torch.float32).numpy()
    with np.printoptions(threshold=1000, edgeitems=3, linewidth=75, suppress=False):
        return hashlib.sha256(np.array_str(weight, precision=1).encode()).hexdigest()
