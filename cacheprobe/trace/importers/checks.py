"""Checks that imported states are those of a loaded model, before they are used."""

import torch
from torch import Tensor

from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import feed
from cacheprobe.trace.importers.common import Generation, ImportRefused

FARTHEST = 0.1
"""Largest accepted distance, as a share of a state's length, averaged over a prompt. The same block in 16 bits on
another machine differs by some hundredths; the block before or after it, by some tenths."""
_LONGEST = 64
"""Number of prompt tokens that are computed again."""


def require_states_of(model: CachedLM, generation: Generation) -> None:
    """Checks that imported states are those of `model`: runs the prompt's first tokens and compares the states of each
    layer.

    Raises: ImportRefused for another width, for tokens outside the vocabulary, for a layer that the model does not
    have, and for states of another layer or of other weights; the last message names the nearest layer.
    """
    if bad := [token for token in (*generation.prompt, *generation.generated) if not 0 <= token < model.d_vocab]:
        raise ImportRefused(f"token id {bad[0]} is outside the vocabulary of {model.name}, {model.d_vocab}")
    count = min(len(generation.prompt), generation.num_rows, _LONGEST)
    given = generation.read(0, count)
    width = next(iter(given.values())).shape[1]
    if width != model.d_model:
        raise ImportRefused(f"states are {width} wide, those of {model.name} {model.d_model}; give the model that ran")
    if beyond := [layer for layer in generation.layers if layer >= model.n_layers]:
        raise ImportRefused(
            f"states of layer {max(beyond)} were given; {model.name} has layers 0 to {model.n_layers - 1}"
        )
    sites = [("S", layer) for layer in range(model.n_layers)]
    fed = feed(model, torch.tensor([generation.prompt[:count]]), sites, logit_slots=[0])
    ours = [fed.states[site][0] for site in sites]
    for layer, states in given.items():
        distances = [_distance(states.to(model.device), state) for state in ours]
        nearest = min(range(len(distances)), key=distances.__getitem__)
        if not distances[layer] <= FARTHEST or nearest != layer:
            raise ImportRefused(
                f"states that were given as layer {layer} lie {distances[layer]:.2f} of their length away from those "
                f"of {model.name} ({FARTHEST} at most), and {distances[nearest]:.2f} from its layer {nearest}; give "
                "the model that ran, and the layers as they were asked for"
            )


def _distance(theirs: Tensor, ours: Tensor) -> float:
    """Returns the mean, over tokens, of the distance between two states [n, m], as a share of the norm of `ours`."""
    a, b = theirs.float(), ours.float()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-30)).mean())
