"""Slow twins of dictionaries: one state and one feature at a time, in Python's own numbers, from SAELens' files."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.numpy import load_file

Vector = list[float]
COLUMNS = ("row", "request_id", "step", "phase", "position", "status", "token_id", "token")


class SlowDictionary:
    """A SAELens folder. Reads its files by itself; shares no code with `cacheprobe.lenses.dictionaries`."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "cfg.json").read_text())
        stored = load_file(folder / "sae_weights.safetensors")
        self.weights = {name: one.astype(np.float64).tolist() for name, one in stored.items()}
        self.kind = self.config["architecture"]

    def scaling(self, state: Vector) -> tuple[float, float, float]:
        """(subtracted, divided by, multiplied by at the end)."""
        how, n = self.config["normalize_activations"], len(state)
        if how == "constant_norm_rescale":
            norm = math.sqrt(sum(x * x for x in state))
            return 0.0, norm / math.sqrt(n), norm / math.sqrt(n)
        if how == "layer_norm":
            mean = sum(state) / n
            spread = math.sqrt(sum((x - mean) ** 2 for x in state) / (n - 1))
            return mean, spread + 1e-5, spread
        return 0.0, 1.0, 1.0

    def encode_slowly(self, state: Vector) -> Vector:
        """The activation of every feature of one state."""
        w, (mean, divisor, _) = self.weights, self.scaling(state)
        inputs = [(x - mean) / divisor for x in state]
        if self.config["apply_b_dec_to_input"]:
            inputs = [x - b for x, b in zip(inputs, w["b_dec"], strict=True)]
        out = []
        for feature in range(self.config["d_sae"]):
            product = sum(x * row[feature] for x, row in zip(inputs, w["W_enc"], strict=True))
            if self.kind == "gated":
                size = product * math.exp(w["r_mag"][feature]) + w["b_mag"][feature]
                out.append(max(size, 0.0) if product + w["b_gate"][feature] > 0 else 0.0)
                continue
            product += w["b_enc"][feature]
            if self.kind.startswith("jumprelu"):
                out.append(max(product, 0.0) if product > w["threshold"][feature] else 0.0)
            elif self.kind == "topk":
                out.append(product * (self.norm(feature) if self.config["rescale_acts_by_decoder_norm"] else 1.0))
            else:
                out.append(max(product, 0.0))
        if self.kind == "topk":
            kept = sorted(range(len(out)), key=lambda feature: -out[feature])[: self.config["k"]]
            out = [max(x, 0.0) if feature in kept else 0.0 for feature, x in enumerate(out)]
        return out

    def norm(self, feature: int) -> float:
        return math.sqrt(sum(x * x for x in self.weights["W_dec"][feature]))

    def decode_slowly(self, features: Vector, state: Vector) -> Vector:
        """The state that the features of one state stand for."""
        out = list(self.weights["b_dec"])
        for feature, size in enumerate(features):
            if self.kind == "topk" and self.config["rescale_acts_by_decoder_norm"]:
                size /= self.norm(feature)
            for i, x in enumerate(self.weights["W_dec"][feature]):
                out[i] += size * x
        if "transcoder" in self.kind:
            return out
        mean, _, factor = self.scaling(state)
        return [x * factor + mean for x in out]


def features_slowly(folder: Path, rows: pd.DataFrame, states: np.ndarray, count: int) -> list[dict[str, object]]:
    """The lines of `trace.features` for these rows and their states [n, m], a row and a feature at a time."""
    slow, lines = SlowDictionary(folder), []
    for row, state in zip(rows.to_dict("records"), states.astype(np.float64).tolist(), strict=True):
        sizes = slow.encode_slowly(state)
        order = sorted((feature for feature, size in enumerate(sizes) if size > 0), key=lambda f: (-sizes[f], f))
        for rank, feature in enumerate(order[:count]):
            line = {name: row[name] for name in COLUMNS}
            lines.append({**line, "rank": rank, "feature": feature, "activation": sizes[feature]})
    return lines


def ablated_slowly(folder: Path, state: np.ndarray, feature: int) -> np.ndarray:
    """A state [m] less the difference that the feature makes to its reconstruction."""
    slow, numbers = SlowDictionary(folder), state.astype(np.float64).tolist()
    sizes = slow.encode_slowly(numbers)
    without = [0.0 if number == feature else size for number, size in enumerate(sizes)]
    with_it, lost = slow.decode_slowly(sizes, numbers), slow.decode_slowly(without, numbers)
    return np.array([x - (a - b) for x, a, b in zip(numbers, with_it, lost, strict=True)])


def coefficients_slowly(basis: torch.Tensor, state: torch.Tensor) -> Vector:
    """The coefficients of the vectors in the sum that is nearest to the state, by numpy's least squares in float64."""
    return np.linalg.lstsq(basis.double().numpy().T, state.double().numpy(), rcond=None)[0].tolist()
