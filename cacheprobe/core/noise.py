"""Computes noise as a pure function of (seed, absolute position); there is no generator state to save or restore.

The numbers do not depend on the batch, the phase or the order of calls. So neither a rollback nor another drafter can
change what a request samples. Draws that must be independent at one position use different streams.
"""

import numpy as np

CHOICE_STREAM = 0
"""Draws the token that a request commits at a position."""
DRAFT_STREAM = 1
"""Draws a drafter's candidate, for rejection sampling."""
ACCEPT_STREAM = 2
"""Draws whether that candidate is accepted, for rejection sampling."""
RECOVER_STREAM = 3
"""Draws the token that replaces a rejected candidate, for rejection sampling."""
RESAMPLE_STREAM = 4
"""Draws which of the given states replaces the model's own, for interventions."""

_HALF_STEP = 0.5
_TO_UNIT = 2.0**-52


def uniform_noise(seed: int, position: int, width: int, stream: int = CHOICE_STREAM) -> np.ndarray:
    """Returns [v] numbers strictly between 0 and 1 for one request at one absolute position.

    Philox is counter-based: the seed is its key, position and stream are words of its counter, so no two (seed,
    position, stream) share a number. Raw words are used because they are all that NumPy keeps stable between versions.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    words = np.random.Philox(key=seed % 2**128, counter=[0, position, stream, 0]).random_raw(width)
    return ((words >> np.uint64(12)).astype(np.float64) + _HALF_STEP) * _TO_UNIT


def gumbel_noise(seed: int, position: int, width: int, stream: int = CHOICE_STREAM) -> np.ndarray:
    """Returns [v] standard Gumbel noise: argmax(logits / temperature + noise) is a draw from the softmax."""
    return -np.log(-np.log(uniform_noise(seed, position, width, stream)))


def derive_seed(run_seed: int, index: int) -> int:
    """Returns the seed of request `index` in a run, for a request without a seed of its own."""
    return int(np.random.SeedSequence([run_seed, index]).generate_state(1, np.uint64)[0])
