"""Defines processes that emit tokens from hidden states, and computes the exact belief about the state by Bayes."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HiddenMarkov:
    """Holds a hidden Markov process."""

    joint: np.ndarray
    """[v, s, s]: the probability that a state emits a token and goes to the next state."""
    initial: np.ndarray
    """[s]: the distribution of the first state."""

    def __post_init__(self) -> None:
        if not np.allclose(self.joint.sum((0, 2)), 1) or not np.isclose(self.initial.sum(), 1):
            raise ValueError("the probabilities of a state, and those of the first state, must sum to 1")

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return len(self.joint)

    def sample(self, number: int, length: int, draw: np.random.Generator) -> np.ndarray:
        """Returns [number, length] tokens."""
        tokens_of_pair = self.joint.transpose(1, 0, 2).reshape(len(self.initial), -1).cumsum(1)
        state = (draw.random((number, 1)) > self.initial.cumsum()[:-1]).sum(1)
        tokens = np.zeros((number, length), dtype=int)
        for place in range(length):
            pair = (draw.random((number, 1)) > tokens_of_pair[state][:, :-1]).sum(1)
            tokens[:, place], state = np.divmod(pair, len(self.initial))
        return tokens

    def beliefs(self, tokens: np.ndarray) -> np.ndarray:
        """Returns [n, t + 1, s]: the distribution of the state before the first token, and after each token of [n, t].

        Twin: tests.analyses.test_findings.beliefs_slowly, close(1e-12): the sum over all paths of states.
        """
        belief = np.repeat(self.initial[None], len(tokens), axis=0)
        found = [belief]
        for place in range(tokens.shape[1]):
            belief = np.einsum("ns,nsz->nz", belief, self.joint[tokens[:, place]])
            belief = belief / belief.sum(1, keepdims=True)
            found.append(belief)
        return np.stack(found, axis=1)

    def next_token(self, beliefs: np.ndarray) -> np.ndarray:
        """Returns the distribution [..., v] of the next token for each belief [..., s]."""
        return beliefs @ self.joint.sum(2).T


def from_emissions(transition: np.ndarray, emission: np.ndarray, initial: np.ndarray) -> HiddenMarkov:
    """Returns the process whose state s emits a token with emission[s] [s, v], and then moves with transition[s]."""
    return HiddenMarkov(emission.T[:, :, None] * transition, initial)


def mess3(x: float = 0.05, alpha: float = 0.85) -> HiddenMarkov:
    """Returns Mess3: three states and tokens; the beliefs form a fractal. Source: Marzen and Crutchfield 2017."""
    others, stays = (1 - alpha) / 2, 1 - 2 * x
    arrival = np.where(np.eye(3, dtype=bool), alpha, others)  # [token, state reached]
    moves = np.where(np.eye(3, dtype=bool), stays, x)
    return HiddenMarkov(arrival[:, None, :] * moves, np.full(3, 1 / 3))


def rrxor() -> HiddenMarkov:
    """Returns random, random, exclusive or: two random bits, then their exclusive or, over and over, from an unknown
    place. Source: Shai et al. 2024 (arXiv 2405.15943)."""
    joint = np.zeros((2, 5, 5))
    for state, token, then in [(0, 0, 1), (0, 1, 2), (1, 0, 4), (1, 1, 3), (2, 0, 3), (2, 1, 4)]:
        joint[token, state, then] = 0.5
    joint[1, 3, 0] = joint[0, 4, 0] = 1
    return HiddenMarkov(joint, np.array([2, 1, 1, 1, 1]) / 6)
