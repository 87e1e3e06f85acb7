"""Keyed noise: a pure function of (seed, absolute position), with no stream to save or restore.

Whoever asks, in whatever batch, phase or order, gets the same numbers; so a rollback or another drafter cannot
change what a request samples. Draws that must not depend on each other at one position take streams of their own.
"""

import numpy as np

CHOICE_STREAM = 0
"""The token that a request takes for a position."""
DRAFT_STREAM = 1
"""Rejection sampling: the candidate that a drafter draws for it."""
ACCEPT_STREAM = 2
"""Rejection sampling: whether that candidate stays."""
RECOVER_STREAM = 3
"""Rejection sampling: the token that takes its place."""
RESAMPLE_STREAM = 4
"""Interventions: which of the given states takes the place of the own one."""

_HALF_STEP = 0.5
_TO_UNIT = 2.0**-52


def uniform_noise(seed: int, position: int, width: int, stream: int = CHOICE_STREAM) -> np.ndarray:
    """[v] numbers strictly between 0 and 1 for one request at one absolute position.

    Philox is counter-based: the seed is its key, position and stream are words of its counter, so no two (seed,
    position, stream) share a number. Raw words are used, because NumPy promises their stability between versions and
    no other's.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    words = np.random.Philox(key=seed % 2**128, counter=[0, position, stream, 0]).random_raw(width)
    return ((words >> np.uint64(12)).astype(np.float64) + _HALF_STEP) * _TO_UNIT


def gumbel_noise(seed: int, position: int, width: int, stream: int = CHOICE_STREAM) -> np.ndarray:
    """[v] standard Gumbel noise: argmax(logits / temperature + noise) is a draw from the softmax."""
    return -np.log(-np.log(uniform_noise(seed, position, width, stream)))


def derive_seed(run_seed: int, index: int) -> int:
    """The seed of request `index` in a run, where it has none of its own."""
    return int(np.random.SeedSequence([run_seed, index]).generate_state(1, np.uint64)[0])
