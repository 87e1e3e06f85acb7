"""Multiplies each vector by the matrix of its own layer, for vectors of several layers at once."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_HEIGHT = 8
"""Vectors in one block. All vectors of a block belong to one layer; a layer's last block is padded with zeros."""


def product_by_layer(
    states: Float[Tensor, "n m"],
    layers: Int[Tensor, "n"],
    weights: Float[Tensor, "l m k"],
    biases: Float[Tensor, "l k"],
) -> Float[Tensor, "n k"]:
    """Returns states[i] @ weights[layers[i]] + biases[layers[i]] for every i, as a tensor [n, k], in one batched
    product.

    The product's shape does not depend on how many vectors each layer has. Each vector lies in a block of fixed height,
    so for one n its bits do not depend on the other vectors.
    Twin: tests.twins.lenses_slowly.product_by_layer_slowly, close(1e-5) in float32, since sums are reordered.
    """
    num_rows, num_layers = len(states), len(weights)
    counts = torch.bincount(layers, minlength=num_layers)
    blocks = -(-counts // _HEIGHT)
    num_blocks = num_rows // _HEIGHT + min(num_rows, num_layers)  # an upper bound for every split over the layers
    order = layers.argsort(stable=True)
    in_order = layers[order]
    first_row, first_block = counts.cumsum(0) - counts, blocks.cumsum(0) - blocks
    padded_index = first_block[in_order] * _HEIGHT + torch.arange(num_rows, device=layers.device) - first_row[in_order]

    padded = states.new_zeros(num_blocks * _HEIGHT, states.shape[1])
    padded[padded_index] = states[order]
    layer_of_block = layers.new_zeros(num_blocks)
    layers_in_order = torch.arange(num_layers, device=layers.device).repeat_interleave(blocks)
    layer_of_block[: len(layers_in_order)] = layers_in_order
    product = torch.baddbmm(biases[layer_of_block, None], padded.view(num_blocks, _HEIGHT, -1), weights[layer_of_block])
    out = torch.empty(num_rows, weights.shape[2], dtype=product.dtype, device=product.device)
    out[order] = product.flatten(0, 1)[padded_index]
    return out
