"""Reads from a trace's lens readings what an early exit would have drafted."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from cacheprobe.analysis.draft_replay.agreement import keyed_choices, prob_rejection, prob_same_noise, tempered
from cacheprobe.analysis.draft_replay.passes import CommittedText, Draft

NO_TOKEN = -1
"""Stands for a draft token of an estimate, which is a distribution and no token."""


@dataclass(frozen=True)
class Sampled:
    """Says how draft tokens are chosen and accepted in a replay."""

    temperature: float
    is_own: bool
    """Whether this is the temperature of the run, whose committed tokens and noise are then those of the replay."""
    acceptance: str
    """equality or rejection."""


class RecordedExit:
    """Gives the drafts of an early exit at one layer, from the readings of the committed rows at this layer."""

    def __init__(self, text: CommittedText, tokens: Int[np.ndarray, "n"], agrees: Float[np.ndarray, "n"]) -> None:
        """Takes one entry for each row from that of the first generated token to the last but one.

        tokens: the token that the row would draft, NO_TOKEN if unknown.  agrees: the probability that it is accepted.
        """
        self._text, self._tokens, self._agrees = text, tokens, agrees
        self._stops = frozenset(cast("tuple[int, ...]", text.sampling.stop_token_ids or ()))

    def draft(self, position: int, limit: int) -> Draft:
        """Returns the draft after the committed token at `position`. A draft goes on to its limit after a wrong token,
        unless this token is a stop token."""
        start = position - self._text.first
        agrees = self._agrees[start : start + limit]
        surviving = float(agrees.prod())
        has_token = [1.0] * len(agrees) + [1.0 - surviving] * (limit - len(agrees))
        if not agrees.all():
            wrong = int((agrees == 0).argmax()) if (agrees == 0).any() else limit
            if wrong < len(agrees) and int(self._tokens[start + wrong]) in self._stops:
                has_token[wrong + 1 :] = [0.0] * (limit - wrong - 1)
        return Draft(tuple(has_token), tuple(agrees.tolist()))


def exit_of(text: CommittedText, readings: pd.DataFrame, layer: int, last_layer: int, sampled: Sampled) -> RecordedExit:
    """Returns the RecordedExit of one request and layer.

    readings: the request's readings of committed rows, of all layers.
    Raises: ValueError if a reading is missing, with what to capture.
    """
    positions = np.arange(text.first, text.last)
    committed = np.array(text.token_ids[text.first + 1 :], dtype=np.int64)
    ids, logprobs = _top_of(text, readings, layer, positions)
    if sampled.is_own and (not sampled.temperature or sampled.acceptance == "equality"):
        tokens = ids[:, 0]
        if sampled.temperature and len(positions):
            seed = text.sampling.seed or 0
            tokens = keyed_choices(ids, logprobs, sampled.temperature, seed, positions + 1)
        return RecordedExit(text, tokens, (tokens == committed).astype(np.float64))
    target_ids, target_logprobs = _top_of(text, readings, last_layer, positions)
    if not sampled.temperature:
        return RecordedExit(text, ids[:, 0], (ids[:, 0] == target_ids[:, 0]).astype(np.float64))
    prob = prob_rejection if sampled.acceptance == "rejection" else prob_same_noise
    probs, target_probs = (tempered(one, sampled.temperature) for one in (logprobs, target_logprobs))
    return RecordedExit(text, np.full(len(ids), NO_TOKEN), prob(ids, probs, target_ids, target_probs))


def _top_of(
    text: CommittedText, readings: pd.DataFrame, layer: int, positions: Int[np.ndarray, "n"]
) -> tuple[Int[np.ndarray, "n k"], Float[np.ndarray, "n k"]]:
    """Returns (token ids, log-probabilities in nats) of the top tokens at one layer, likeliest first, by position."""
    own = readings[readings.layer == layer].set_index("position")
    if lacking := sorted(set(positions.tolist()) - set(own.index)):
        raise ValueError(
            f"request {text.request_id} has no lens reading at position {lacking[0]} of layer {layer}, expected one at "
            f"each position from {text.first} to {text.last - 1}; run with capture='Z' and without filters by layer, "
            "position, phase or status"
        )
    own = own.loc[positions]
    if own.empty:
        return np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1))
    return np.stack(own.top_token_ids.to_list()).astype(np.int64), np.stack(own.top_logprob_nats.to_list())
