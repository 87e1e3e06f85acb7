"""Defines Dictionary: features of a model's states, by a sparse autoencoder or transcoder that was trained before."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.core.live import require_usable_process
from cacheprobe.core.values import folder as checked_folder
from cacheprobe.lenses.dictionaries.config import GATED, JUMPRELU, STANDARD, TOPK, DictionaryConfig, DictionaryError
from cacheprobe.lenses.dictionaries.formats import Said, read_dictionary, save_saelens, shapes_of

_TILE = 16
"""States that are encoded at once where only their largest features are kept."""


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Turns states into features and back: a sparse autoencoder or a transcoder, of f features, computed in float32.

    Read one with `load`. A feature is a direction of the decoder; its activation says how much of it a state has.
    Source: SAELens 6.54, saes/: standard, gated, topk and jumprelu autoencoders and transcoders.
    Twin: SAELens' own encode and decode, within 1e-6 of the largest number, in tests.dictionaries.test_saelens.
    """

    config: DictionaryConfig
    tensors: Mapping[str, Tensor] = field(repr=False)
    """Weights in float32 by SAELens' names; shapes as in `dictionaries.formats`."""

    def __post_init__(self) -> None:
        wanted = shapes_of(self.config)
        given = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        if given != wanted:
            raise DictionaryError(f"a {self.config.architecture} dictionary has tensors {wanted}, got {given}")
        for name, tensor in self.tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise DictionaryError(f"{name} holds NaN or infinity")

    def __repr__(self) -> str:
        c = self.config
        where = f"{c.hook or 'an unnamed hook point'}{f' to {c.hook_out}' if c.hook_out else ''}"
        return f"Dictionary({c.architecture}, {c.d_sae} features of {c.d_in} dimensions, {where})"

    @classmethod
    def load(
        cls,
        path: "str | Path",
        *,
        hook: str | None = None,
        k: int | None = None,
        architecture: str | None = None,
    ) -> "Dictionary":
        """Returns the Dictionary in a folder of SAELens or Gemma Scope, or in a .pt, .npz or .safetensors file.

        hook: TransformerLens' name of the hook point, such as "blocks.3.hook_resid_post"; replaces that of the files.
        k, architecture: for a .pt file, which does not name its activation.
        Nothing of the file but numbers is read: no code is run, and shapes are checked before numbers are read.
        Raises: DictionaryError for a missing, broken or unknown file, and for weights that are NaN or infinite.
        """
        try:
            return cls(*read_dictionary(checked_folder("path", path), Said(hook, k, architecture)))
        except DictionaryError as error:
            text = str(error)
            raise DictionaryError(text if str(path) in text else f"{path}: {text}") from error

    @classmethod
    def from_basis(cls, basis: Tensor, hook: str) -> "Dictionary":
        """Returns a Dictionary of 2k features that writes a state as a sum of the k given vectors.

        basis: [k, m], linearly independent directions, such as principal components; of any length.
        hook: TransformerLens' name of the hook point, such as "blocks.3.hook_resid_post".
        Feature i is a positive coefficient of vector i, feature k + i a negative one. So the largest features of a
        state are its components of largest size, and `decode` gives the projection onto the span. Nothing is centred.
        Coefficients are those of least squares; for an orthonormal basis, the inner products.
        Twin: tests.dictionaries.test_basis.coefficients, numpy's least squares in float64.
        Raises: DictionaryError for vectors that are dependent, not finite, or more than their width.
        """
        if basis.dim() != 2 or not len(basis):
            raise DictionaryError(f"a basis is a tensor of vectors [k, m], got {list(basis.shape)}")
        rows = basis.detach().to("cpu", torch.float64)
        lengths = rows.norm(dim=1, keepdim=True)
        units = rows / lengths
        if not bool(torch.isfinite(units).all()) or int(torch.linalg.matrix_rank(units)) < len(units):
            raise DictionaryError(f"the {len(rows)} vectors of a basis must be finite and linearly independent")
        count, width = rows.shape
        coefficients, rows = (torch.linalg.pinv(units) / lengths.T).float(), rows.float()
        config = DictionaryConfig(architecture=STANDARD, d_in=width, d_out=width, d_sae=2 * count, hook=hook)
        weights = {"W_enc": torch.cat([coefficients, -coefficients], 1), "W_dec": torch.cat([rows, -rows])}
        return cls(config, {**weights, "b_enc": torch.zeros(2 * count), "b_dec": torch.zeros(width)})

    def save(self, folder: "str | Path") -> Path:
        """Writes cfg.json and sae_weights.safetensors, which SAELens reads, into a folder, and returns its path."""
        return save_saelens(self.config, self.tensors, checked_folder("folder", folder))

    @property
    def hook(self) -> str | None:
        """TransformerLens' name of the hook point whose states are encoded; None if the files do not name it."""
        return self.config.hook

    @property
    def site(self) -> str | None:
        """Site of the states that are encoded, such as "S"; None if a trace has no such site."""
        return self.config.place[0] if self.config.place else None

    @property
    def layer(self) -> int | None:
        """Layer of the states that are encoded; None if a trace has no such site."""
        return self.config.place[1] if self.config.place else None

    @cached_property
    def sha256(self) -> str:
        """SHA-256, as hex text, of the config and the weights."""
        c = self.config
        settings = (c.architecture, c.hook, c.hook_out, c.apply_b_dec_to_input, c.normalize_activations, c.k)
        digest = sha256(repr((*settings, c.rescale_acts_by_decoder_norm)).encode())
        for name in sorted(self.tensors):
            digest.update(name.encode())
            digest.update(self.tensors[name].detach().cpu().contiguous().numpy().data.cast("B"))
        return digest.hexdigest()

    def require_width(self, width: int, what: str) -> None:
        """Raises: DictionaryError if states of this width cannot be encoded. what: names them in the message."""
        if width != self.config.d_in:
            raise DictionaryError(
                f"this dictionary encodes states of width {self.config.d_in}, {what} has {width}; it was made for "
                "another model or another site"
            )

    def encode(self, states: Float[Tensor, "*n m"]) -> Float[Tensor, "*n f"]:
        """Returns the activations of all features, in float32: [.., f] for states [.., m]. Most are zero.

        States of all heads, [.., h, d], are joined first if the dictionary was trained on z.
        Raises: DictionaryError for states of another width.
        """
        require_usable_process(is_computing=True)
        if self.config.reshape_activations == "hook_z" and states.shape[-1] != self.config.d_in:
            states = states.flatten(-2)
        self.require_width(states.shape[-1], "the given tensor")
        inputs = self._normalised(states.to(self.tensors["W_enc"].device, torch.float32))[0]
        if self.config.apply_b_dec_to_input:
            inputs = inputs - self.tensors["b_dec"]
        weights, activation = self.tensors, self.config.activation
        products = inputs @ weights["W_enc"]
        if activation == GATED:
            magnitudes = inputs @ (weights["W_enc"] * weights["r_mag"].exp()) + weights["b_mag"]
            return (products + weights["b_gate"] > 0).float() * magnitudes.relu()
        products = products + weights["b_enc"]
        if activation == JUMPRELU:
            return products.relu() * (products > weights["threshold"])
        if activation == TOPK:
            return self._largest(products)
        return products.relu()

    def decode(
        self, features: Float[Tensor, "*n f"], states: Float[Tensor, "*n m"] | None = None
    ) -> Float[Tensor, "*n o"]:
        """Returns what features [.., f] stand for, in float32: states [.., o]; o is m but for a transcoder.

        states: the states that were encoded; needed only if the dictionary scales states by their own norm.
        Without the skip connection of a transcoder, which reads states and not features; see `reconstruct`.
        Raises: DictionaryError if `states` are needed and not given.
        """
        require_usable_process(is_computing=True)
        if self.config.rescale_acts_by_decoder_norm:
            features = features / self.tensors["W_dec"].norm(dim=-1)
        out = features @ self.tensors["W_dec"] + self.tensors["b_dec"]
        if self.config.is_transcoder or self.config.normalize_activations not in (
            "layer_norm",
            "constant_norm_rescale",
        ):
            return out
        if states is None:
            raise DictionaryError("this dictionary scales each state by its norm; give the states to decode() too")
        _, scale, shift = self._normalised(states.to(out.device, torch.float32))
        return out * scale + shift

    def reconstruct(self, states: Float[Tensor, "*n m"]) -> Float[Tensor, "*n o"]:
        """Returns the decoded features of states [.., m], with a transcoder's skip connection: [.., o], float32."""
        out = self.decode(self.encode(states), states)
        return out + states.to(out.device, torch.float32) @ self.tensors["W_skip"].T if self.config.has_skip else out

    def top(self, states: Float[Tensor, "n m"], count: int) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
        """Returns (features [n, k], activations [n, k]) on the CPU: the largest activations of each state, largest
        first.

        k is `count`, or f if that is less. Of two equal activations the lower feature comes first. Places beyond the
        active features have feature -1 and activation 0. States are encoded in tiles of 16, padded if there are fewer,
        so that the bits of a state's activations do not depend on the other states.
        """
        count = min(count, self.config.d_sae)
        numbers, values = [torch.empty(0, count, dtype=torch.long)], [torch.empty(0, count)]
        for part in states.split(_TILE):
            padded = torch.cat([part, part.new_zeros(_TILE - len(part), part.shape[1])])
            kept, features = self.encode(padded)[: len(part)].topk(count, dim=-1)
            features, order = features.sort(dim=-1)
            kept, places = kept.gather(-1, order).sort(dim=-1, descending=True, stable=True)
            values.append(kept.cpu())
            numbers.append(features.gather(-1, places).masked_fill(kept <= 0, -1).cpu())
        return torch.cat(numbers), torch.cat(values)

    def direction(self, feature: int) -> Float[Tensor, "o"]:
        """Returns the decoder's row of one feature, [o]: what an activation of 1 adds to a reconstruction."""
        if not 0 <= feature < self.config.d_sae:
            raise DictionaryError(f"no feature {feature}; the dictionary has 0 to {self.config.d_sae - 1}")
        row = self.tensors["W_dec"][feature]
        return row / row.norm() if self.config.rescale_acts_by_decoder_norm else row

    def part_of(self, states: Float[Tensor, "n m"], feature: int) -> Float[Tensor, "n m"]:
        """Returns what one feature adds to the reconstructions of states [n, m]: its activation times its direction.

        Each state is encoded by itself, so that its bits do not depend on the others.
        Raises: DictionaryError for an unknown feature, and for a transcoder, which predicts other states.
        """
        if self.config.is_transcoder:
            raise DictionaryError("a transcoder's features are no parts of the states that it encodes")
        self.require_width(states.shape[-1], "the given tensor")
        direction = self.direction(feature)
        parts = []
        for state in states:
            activation = self.encode(state[None])[0, feature]
            scale = self._normalised(state.to(direction.device, torch.float32)[None])[1]
            parts.append(activation * direction * scale.reshape(()))
        return torch.stack(parts) if parts else torch.zeros_like(states, dtype=torch.float32)

    def _normalised(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (scaled states, factor and shift that undo the scaling), as `normalize_activations` says."""
        one, zero = torch.ones(1, device=states.device), torch.zeros(1, device=states.device)
        if self.config.normalize_activations == "constant_norm_rescale":
            norm = states.norm(dim=-1, keepdim=True).clamp_min(1e-12)  # a state of zeros has none
            factor = self.config.d_in**0.5 / norm
            return states * factor, 1 / factor, zero
        if self.config.normalize_activations == "layer_norm":
            mean = states.mean(-1, keepdim=True)
            centred = states - mean
            spread = centred.std(-1, keepdim=True)
            return centred / (spread + 1e-5), spread, mean
        return states, one, zero

    def _largest(self, products: Tensor) -> Tensor:
        """Returns the k largest of the last axis where they are above zero, and zero for the others."""
        assert self.config.k is not None
        if self.config.rescale_acts_by_decoder_norm:
            products = products * self.tensors["W_dec"].norm(dim=-1)
        values, features = products.topk(self.config.k, dim=-1, sorted=False)
        return torch.zeros_like(products).scatter_(-1, features, values.relu())
