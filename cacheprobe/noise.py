"""Keyed noise: a pure function of (seed, absolute position), with no stream to save or restore.

Whoever asks, in whatever batch, phase or order, gets the same numbers; so a rollback or another drafter cannot
change what a request samples.
"""

import numpy as np

_HALF_STEP = 0.5
_TO_UNIT = 2.0**-52


def uniform_noise(seed: int, position: int, width: int) -> np.ndarray:
    """[v] numbers strictly between 0 and 1 for one request at one absolute position.

    Philox is counter-based: the seed is its key and the position its counter, so no two (seed, position) pairs share
    a stream. Raw words are used, because NumPy promises their stability between versions and no other's.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    words = np.random.Philox(key=seed % 2**128, counter=[0, position, 0, 0]).random_raw(width)
    return ((words >> np.uint64(12)).astype(np.float64) + _HALF_STEP) * _TO_UNIT


def gumbel_noise(seed: int, position: int, width: int) -> np.ndarray:
    """[v] standard Gumbel noise: argmax(logits / temperature + noise) is a draw from the softmax."""
    return -np.log(-np.log(uniform_noise(seed, position, width)))


def derive_seed(run_seed: int, index: int) -> int:
    """The seed of request `index` in a run, where it has none of its own."""
    return int(np.random.SeedSequence([run_seed, index]).generate_state(1, np.uint64)[0])
