"""Builds the dense twin of a tiny model with quantised weights, from the bytes of its file and the definitions of the
formats. It shares no code with the libraries' dequantisation, nor with ours."""

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from tests.quantised.writers import gguf_name

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
"""The 16 values of a 4-bit NormalFloat. Source: Dettmers et al. 2023 (QLoRA), appendix E."""
FP4 = [0.0, 0.005208333333, 0.6666666667, 1.0, 0.3333333333, 0.5, 0.1666666667, 0.25]
"""The values of bitsandbytes' 4-bit float without a sign; eight more are negative."""


ONE_127TH_SQUARED = 6.200124e-05
"""As bitsandbytes 0.50 writes it on a processor: 1.000018 times 1 / 127². Later layers would round to other numbers."""


class LLMInt8(nn.Module):
    """A linear layer as LLM.int8() defines it, one token after the other, in float64. Source: Dettmers et al. 2022,
    section 3: outliers times dequantised weights, plus the rest in whole numbers with a scale each for token and
    output."""

    def __init__(self, numbers: Tensor, scales: Tensor, threshold: float) -> None:
        super().__init__()
        self.numbers, self.scales, self.threshold = numbers.double(), scales.double(), threshold or float("inf")

    def forward(self, values: Tensor) -> Tensor:
        rows = [self._row(row) for row in values.reshape(-1, values.shape[-1])]
        return torch.stack(rows).view(*values.shape[:-1], -1)

    def _row(self, row: Tensor) -> Tensor:
        half = row.half()
        is_outlier = half.abs() >= self.threshold
        rest = half.masked_fill(is_outlier, 0).float()
        largest = rest.abs().max()
        whole = (rest * (127 / largest)).round().double() @ self.numbers.T * largest.double()
        dense = row[is_outlier].double() @ self.numbers[:, is_outlier].T / 127
        return ((whole * ONE_127TH_SQUARED + dense) * self.scales).float()


def twin_of(folder: Path) -> Any:
    """Returns the dense twin of a folder's model: a transformers model with the weights that its bytes stand for."""
    stored = load_file(folder / "model.safetensors")
    config = AutoConfig.from_pretrained(folder)
    vars(config).pop("quantization_config", None)
    model: Any = AutoModelForCausalLM.from_config(config).float().eval()
    own = model.state_dict()
    packed = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    dense = {name: stored[name] for name in own if name in stored and stored[name].dtype == torch.float32}
    model.load_state_dict(dense | {n: dequantised(stored, n, own[n].shape) for n in packed - set(dense)})
    return model


def with_rounded_activations(twin: Any, folder: Path) -> Any:
    """Puts LLMInt8 in place of a twin's linear layers, and returns the twin."""
    stored = load_file(folder / "model.safetensors")
    threshold = json.loads((folder / "config.json").read_text())["quantization_config"]["llm_int8_threshold"]
    for path in [path for path, module in twin.named_modules() if f"{path}.SCB" in stored]:
        twin.set_submodule(path, LLMInt8(stored[f"{path}.weight"], stored[f"{path}.SCB"], threshold))
    return twin


def dequantised(stored: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    """Returns the weight [o, i] that the tensors of a file stand for."""
    layer = name.removesuffix("weight")
    parts = {key.removeprefix(layer).lstrip("_"): tensor for key, tensor in stored.items() if key.startswith(layer)}
    if "SCB" in parts:  # LLM.int8(): the largest absolute weight of each output is 127
        return parts["weight"].float() * (parts["SCB"] / 127)[:, None]
    if "weight_scale_inv" in parts:  # fp8: a scale for each square block
        height, width = (size // count for size, count in zip(shape, parts["weight_scale_inv"].shape, strict=True))
        return parts["weight"].float() * parts["weight_scale_inv"].repeat_interleave(height, 0).repeat_interleave(
            width, 1
        )
    if "weight.absmax" in parts:
        return _of_nibbles(parts, shape)
    if "weight_packed" in parts:  # numbers side by side in 32 bits, the lowest bits first, the middle stands for 0
        bits = 32 * parts["weight_packed"].shape[1] // shape[1]
        numbers = (parts["weight_packed"].to(torch.int64)[..., None] >> torch.arange(0, 32, bits)) % 2**bits
        return _scaled(numbers.flatten(-2).float() - 2 ** (bits - 1), parts["weight_scale"])
    assert not parts.get("weight_zero_point", torch.zeros(1)).any()  # the writers quantise symmetrically
    return _scaled(parts.get("weight_qdata", parts.get("weight", torch.empty(0))).float(), parts["weight_scale"])


def _scaled(numbers: Tensor, scale: Tensor) -> Tensor:
    """Returns numbers [o, i] times scale [o, i / group]."""
    return numbers * scale.repeat_interleave(numbers.shape[1] // scale.shape[1], 1)


def _of_nibbles(parts: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """Returns a weight of bitsandbytes' 4 bits: the first of two numbers in the high bits of a byte, 64 to a scale."""
    kind = next(key for key in parts if "quant_state" in key)
    state = json.loads(bytes(parts[kind].tolist()))
    table = torch.tensor(NF4 if kind.endswith("nf4") else [*FP4, *(-value for value in FP4)])
    packed = parts["weight"].flatten().to(torch.int64)
    numbers = table[torch.stack((packed >> 4, packed & 15), 1).flatten()]
    scale = parts["weight.absmax"]
    if "weight.nested_absmax" in parts:  # scales in 8 bits, 256 to a scale of their own
        of_scales = parts["weight.nested_absmax"].repeat_interleave(256)[: len(scale)]
        scale = parts["weight.nested_quant_map"][scale.to(torch.int64)] * of_scales + state["nested_offset"]
    return (numbers.view(-1, state["blocksize"]) * scale[:, None]).view(shape)


def gguf_weights(file: Path, config: LlamaConfig, names: list[str]) -> dict[str, Tensor]:
    """Returns the weights of a GGUF file of a llama by their names in transformers."""
    by_name = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    found = {}
    for name in names:
        tensor = by_name[gguf_name(name)]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2], 0)
        if heads:  # the two halves of a head lie in turn: 0, d/2, 1, d/2 + 1, ...
            width = len(weight) // heads
            order = [i // 2 + (i % 2) * width // 2 for i in range(width)]
            places = torch.tensor([head * width + order.index(i) for head in range(heads) for i in range(width)])
            weight = weight[places]
        found[name] = weight
    return found
