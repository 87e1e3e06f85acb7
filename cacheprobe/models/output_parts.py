"""Defines OutputParts (the steps from residual states to logits) and HeadWriter (from attention heads to the residual
stream)."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from cacheprobe.core.live import LiveModule
from cacheprobe.models.quantised.packed import dense_weight


class OutputParts(NamedTuple):
    """Holds the steps from the last residual stream to the logits: final norm, unembedding, bias, last function."""

    norm: nn.Module
    weight: Tensor
    """[v, m]"""
    bias: Tensor | None
    """[v]"""
    finish: Callable[[Tensor], Tensor]
    """Function applied to the logits [n, v] last: the architecture's soft cap or scale, or no change."""


class HeadWriter(NamedTuple):
    """Holds the steps from the heads of one layer to the attention output (site T): projection by head, bias, norm."""

    weight: Tensor
    """[h, d, m]"""
    bias: Tensor | None
    """[m]"""
    norm: nn.Module | None
    """Norm after the projection, in post-norm models."""


def head_weights(module: LiveModule, heads: int) -> Tensor:
    """Returns the weights [h, d, m] of an attention output projection, split by head. module: the projection, which
    reads all `heads` heads side by side."""
    return output_rows(module).T.unflatten(0, (heads, -1))


def output_rows(module: LiveModule) -> Tensor:
    """Returns the weight of a linear module as [outputs, inputs], dequantised if it is packed."""
    weight = dense_weight(module)
    return weight.T if is_conv(module) else weight


def is_conv(module: nn.Module) -> bool:
    """Returns True for GPT-2's linear layer (Conv1D), which holds its weight as [inputs, outputs]."""
    return type(module).__name__ == "Conv1D"


def arrange_weights(model: nn.Module, by_output: bool) -> None:
    """Changes in place the order in memory of the weights of GPT-2's linear layers. by_output: the weights of each
    output lie side by side, as the compiled loops and the kernels read them; otherwise those of each input do, as
    torch does by itself. Shapes and values stay, and so does the memory that other parameters of `model` share with
    these weights, such as a bridge's query, key and value projections. Torch's products may round otherwise then."""
    sharing: dict[int, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        sharing.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
    for weight in [module.get_parameter("weight") for module in model.modules() if is_conv(module)]:
        if weight.is_contiguous() != by_output:
            continue
        moved = weight.data.T.contiguous().T if by_output else weight.data.contiguous()
        old, new, start = max(weight.stride()), max(moved.stride()), int(weight.storage_offset())
        end = start + weight.numel()
        for parameter in sharing[weight.untyped_storage().data_ptr()]:
            if not start <= parameter.storage_offset() < end:  # another weight in the same memory
                continue
            across, along = divmod(int(parameter.storage_offset()) - start, int(old))
            strides = [{old: 1, 1: new}.get(stride, 1) for stride in parameter.stride()]
            parameter.data = moved.as_strided(parameter.shape, strides, along * new + across)
