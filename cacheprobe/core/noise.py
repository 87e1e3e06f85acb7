"""Computes random numbers as a pure function of (seed, absolute position); no generator has a state to save or restore.

The numbers do not depend on the batch, the phase or the order of calls. So a rollback does not change what a request
samples; nor does another drafter, unless acceptance="rejection". Draws that must be independent at one position use
different streams.
"""

import numpy as np

CHOICE_STREAM = 0
"""Draws the token that a request commits at a position."""
DRAFT_STREAM = 1
"""Draws a drafter's draft token, for rejection sampling."""
ACCEPT_STREAM = 2
"""Draws whether that draft token is accepted, for rejection sampling."""
RECOVER_STREAM = 3
"""Draws the token that replaces a rejected draft token, for rejection sampling."""
RESAMPLE_STREAM = 4
"""Draws which of the given states replaces the model's own, for interventions."""

_HALF_STEP = 0.5
_TO_UNIT = 2.0**-52  # a word keeps 52 bits; the half step keeps the number away from 0 and 1


def uniform_noise(seed: int, position: int, width: int, stream: int = CHOICE_STREAM) -> np.ndarray:
    """Returns `width` random float64 numbers strictly between 0 and 1, fixed by (seed, position, stream).

    Philox is counter-based: the seed is its key; position and stream are words of its counter. So the numbers of two
    different (seed, position, stream) are independent. Raw words are used because NumPy keeps only the raw words stable
    between versions.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    words = np.random.Philox(key=seed % 2**128, counter=[0, position, stream, 0]).random_raw(width)
    return ((words >> np.uint64(12)).astype(np.float64) + _HALF_STEP) * _TO_UNIT


def gumbel_noise(seed: int, position: int, width: int, stream: int = CHOICE_STREAM) -> np.ndarray:
    """Returns `width` numbers of standard Gumbel noise, fixed by (seed, position, stream); argmax(logits / temperature
    + noise) is a draw from softmax(logits / temperature)."""
    return -np.log(-np.log(uniform_noise(seed, position, width, stream)))


def derive_seed(run_seed: int, index: int) -> int:
    """Returns an int seed that depends on (run_seed, index) alone."""
    return int(np.random.SeedSequence([run_seed, index]).generate_state(1, np.uint64)[0])
