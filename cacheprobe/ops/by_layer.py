"""Multiplies each row by its layer's own matrix, for rows of several layers at once."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_HEIGHT = 8
"""Rows of one block. All rows of a block belong to one layer; a layer's last block is padded with zeros."""


def product_by_layer(
    states: Float[Tensor, "n m"],
    layers: Int[Tensor, "n"],
    weights: Float[Tensor, "l m k"],
    biases: Float[Tensor, "l k"],
) -> Float[Tensor, "n k"]:
    """Returns states[i] @ weights[layers[i]] + biases[layers[i]] for every row i, in one batched product.

    The product's shape depends only on n and l, not on how many rows each layer has. Each row lies in a block of fixed
    height, so its bits do not depend on the other rows.
    Twin: tests.twins.lenses_slowly.product_by_layer_slowly, close(1e-5) in float32, since sums are reordered.
    """
    num_rows, num_layers = len(states), len(weights)
    counts = torch.bincount(layers, minlength=num_layers)
    blocks = -(-counts // _HEIGHT)
    num_blocks = num_rows // _HEIGHT + min(num_rows, num_layers)  # no split over the layers takes more
    order = layers.argsort(stable=True)
    in_order = layers[order]
    first_row, first_block = counts.cumsum(0) - counts, blocks.cumsum(0) - blocks
    place = first_block[in_order] * _HEIGHT + torch.arange(num_rows, device=layers.device) - first_row[in_order]

    padded = states.new_zeros(num_blocks * _HEIGHT, states.shape[1])
    padded[place] = states[order]
    of_block = layers.new_zeros(num_blocks)
    used = torch.arange(num_layers, device=layers.device).repeat_interleave(blocks)
    of_block[: len(used)] = used
    product = torch.baddbmm(biases[of_block, None], padded.view(num_blocks, _HEIGHT, -1), weights[of_block])
    out = torch.empty(num_rows, weights.shape[2], dtype=product.dtype, device=product.device)
    out[order] = product.flatten(0, 1)[place]
    return out
