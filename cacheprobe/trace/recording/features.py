"""Records the largest features of each kept row during a run, so that the states themselves need not be kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.config import CaptureConfig
from cacheprobe.core.hook_names import SITES
from cacheprobe.core.tokens import is_special, special_token_ids
from cacheprobe.lenses.dictionaries import Dictionary, DictionaryError
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.tables.build import RowRecord, active_features


def recorded_dictionary(capture: CaptureConfig, model: CachedLM) -> Dictionary | None:
    """Returns the dictionary of the capture settings; None if they have none.

    Raises: DictionaryError if it does not fit the model, or reads another hook point than S, T or C; ValueError for
    another object.
    """
    dictionary = capture.dictionary
    if dictionary is None:
        return None
    if not isinstance(dictionary, Dictionary):
        raise ValueError(f"capture dictionary must be from cp.lenses.Dictionary.load, got {dictionary!r:.60}")
    place = dictionary.config.place
    if place is None or place[0] not in SITES:
        raise DictionaryError(f"{dictionary} cannot be recorded; its hook point must be that of S, T or C")
    if place[1] >= model.n_layers:
        raise DictionaryError(f"{dictionary} is for layer {place[1]}; {model.name} has 0 to {model.n_layers - 1}")
    dictionary.require_width(model.d_model, f"site {place[0]} of {model.name}")
    return dictionary


@dataclass(frozen=True)
class FeatureRecorder:
    """Finds the largest features of the rows of a run, k of each row."""

    dictionary: Dictionary
    count: int
    """k: largest number of features of a row."""
    special: tuple[int, ...] | None
    """Ids of special tokens, whose rows are left out as those of the first position are; None to leave out none."""

    @classmethod
    def of(cls, capture: CaptureConfig, model: CachedLM) -> "FeatureRecorder | None":
        """Returns a recorder of `top_features` features of a row, or of all if the dictionary has fewer; None without a
        dictionary. Raises: as `recorded_dictionary`."""
        dictionary = recorded_dictionary(capture, model)
        if dictionary is None:
            return None
        special = None if capture.include_special else special_token_ids(model)
        return cls(dictionary, min(capture.top_features, dictionary.config.d_sae), special)

    @property
    def place(self) -> tuple[str, int]:
        """(site, layer) of the states that are encoded."""
        place = self.dictionary.config.place
        assert place is not None  # checked by recorded_dictionary
        return place

    @property
    def row_bytes(self) -> int:
        """Bytes of the features of a row."""
        return 12 * self.count

    def records(self, position: int, token_id: int) -> bool:
        """Returns whether the features of this token at this position are recorded."""
        return self.special is None or not is_special(position, token_id, self.special)

    def find(self, rows: Sequence[RowRecord], states: Tensor) -> None:
        """Encodes the states [n, m] of rows, and sets the largest features of those that are recorded."""
        chosen = [i for i, row in enumerate(rows) if self.records(row.position, row.token_id)]
        for i, features, activations in zip(chosen, *self.dictionary.top(states[chosen], self.count), strict=True):
            rows[i].features = features, activations

    def table(self, rows: Sequence[RowRecord]) -> pd.DataFrame:
        """Returns the features of rows: a DataFrame with one line for each active feature of a row, of its row, rank,
        feature and activation."""
        found = [(row.row, *row.features) for row in rows if row.features is not None]
        numbers = np.array([number for number, _, _ in found], dtype=np.int64)
        features = torch.stack([torch.empty(self.count, dtype=torch.long), *(one for _, one, _ in found)])
        activations = torch.stack([torch.empty(self.count), *(one for _, _, one in found)])
        return active_features(numbers, features[1:], activations[1:])
