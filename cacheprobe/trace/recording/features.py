"""Records the largest features of each kept row during a run, so that the states themselves need not be kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.config import CaptureConfig
from cacheprobe.core.hook_names import SITES
from cacheprobe.core.tokens import is_special, special_token_ids
from cacheprobe.lenses.dictionaries import Dictionary, DictionaryError
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.tables.build import RowRecord
from cacheprobe.trace.tables.schema import typed


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


class FoundFeatures(NamedTuple):
    """Holds the largest features of n rows of a pass."""

    rows: list[RowRecord]
    features: Tensor
    """[n, k]"""
    activations: Tensor
    """[n, k]"""


@dataclass
class FeatureRecorder:
    """Collects the largest features of the rows of a run, k of each row."""

    dictionary: Dictionary
    count: int
    """k: largest number of features of a row."""
    special: tuple[int, ...] | None
    """Ids of special tokens, whose rows are left out as those of the first position are; None to leave out none."""
    _found: list[tuple[list[int], Tensor, Tensor]] = field(default_factory=list)
    """For each pass: row numbers, features [n, k] and activations [n, k]."""
    _of_prompts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By number of a prompt's row: its features [k] and activations [k], for requests with the same prompt."""

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
    def num_bytes(self) -> int:
        """Bytes of the features recorded so far."""
        return sum(features.nbytes + sizes.nbytes for _, features, sizes in self._found)

    def records(self, position: int, token_id: int) -> bool:
        """Returns whether the features of this token at this position are recorded."""
        return self.special is None or not is_special(position, token_id, self.special)

    def find(self, rows: Sequence[RowRecord], states: Tensor) -> FoundFeatures:
        """Encodes the states [n, m] of rows, and returns the largest features of those that are recorded."""
        chosen = [i for i, row in enumerate(rows) if self.records(row.position, row.token_id)]
        return FoundFeatures([rows[i] for i in chosen], *self.dictionary.top(states[chosen], self.count))

    def add(self, numbers: Mapping[int, int], found: FoundFeatures | None) -> None:
        """Keeps features, if there are some. numbers: by `id` of a row, its number."""
        if found is None:
            return
        of_rows = [numbers[id(row)] for row in found.rows]
        self._found.append((of_rows, found.features, found.activations))
        for place, (number, row) in enumerate(zip(of_rows, found.rows, strict=True)):
            if row.role == "prompt":
                self._of_prompts[number] = found.features[place], found.activations[place]

    def copy(self, row_number: int, source: int) -> None:
        """Gives a row the features of a row of another request, whose stored state it shares, if it has some."""
        if (of_row := self._of_prompts.get(source)) is not None:
            self._found.append(([row_number], of_row[0][None], of_row[1][None]))

    def take(self) -> pd.DataFrame:
        """Returns the features recorded since the last call, and forgets them: a DataFrame with one line for each
        active feature of a row, of its row, rank, feature and activation."""
        found, self._found = self._found, []
        row = np.array([number for part, _, _ in found for number in part], dtype=np.int64)
        features = torch.cat([torch.empty(0, self.count, dtype=torch.long), *(part for _, part, _ in found)]).numpy()
        activations = torch.cat([torch.empty(0, self.count), *(part for _, _, part in found)]).numpy()
        line, rank = np.nonzero(features >= 0)
        columns = {"row": row[line], "rank": rank, "feature": features[line, rank]}
        return typed(pd.DataFrame({**columns, "activation": activations[line, rank]}), "features")
