"""Gives features in the manner of Neuronpedia's JSON: for each feature, the texts in which it is most active."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.files import write_whole
from cacheprobe.core.values import JsonDict, folder, whole_number
from cacheprobe.lenses.dictionaries import Dictionary
from cacheprobe.trace.tables.features import place_of_features

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

_ROWS_AT_ONCE = 4096


def to_neuronpedia(
    trace: "Trace",
    dictionary: Dictionary,
    features: Sequence[int],
    path: "str | Path | None" = None,
    *,
    site: str | None = None,
    layer: SupportsIndex | None = None,
    most_texts: int = 20,
    include_special: bool = False,
) -> list[JsonDict]:
    """Returns one JSON object for each feature, in the manner of Neuronpedia's export, and writes them to `path` if
    given.

    An object has modelId, source (site and layer), index, maxActApprox, frac_nonzero (over committed rows), and
    activations: the texts in which the feature is most active, each with tokens, values, maxValue, minValue and
    maxValueTokenIndex. A text is a request without its last token, which has no row; or a rejected draft after the text
    before it. Its `status` says which: committed or rolled_back. Logits and explanations are not there.
    features: numbers of the dictionary.  site, layer: by default those that the dictionary was trained on.
    most_texts: of a feature, at most.  include_special: by default, special tokens and the first position have value 0
    and do not count in frac_nonzero.
    Raises: ValueError for no feature, an unknown one, or rows without states; DictionaryError as `Trace.features`.
    """
    numbers = [whole_number("a feature", one) for one in features]
    if not numbers or not all(0 <= one < dictionary.config.d_sae for one in numbers):
        raise ValueError(f"features must be of 0 to {dictionary.config.d_sae - 1}, at least one; got {numbers!r:.60}")
    if whole_number("most_texts", most_texts) < 1:
        raise ValueError(f"most_texts must be at least 1, got {most_texts}")
    site, at, rows = place_of_features(trace, dictionary, None, site, layer, include_special=True)
    rows = rows[rows.status.isin(["committed", "rolled_back"])]
    values = _values(trace, dictionary, rows, site, at, numbers)
    is_read = torch.tensor(include_special | ~trace.is_special(rows).to_numpy())
    values[~is_read] = 0
    texts = [(status, list(where)) for status, where in _texts(rows)]
    committed = torch.tensor((rows.status == "committed").tolist()) & is_read
    found = []
    for column, number in enumerate(numbers):
        own = values[:, column]
        shown = sorted(texts, key=lambda text: -float(own[text[1]].max()))[:most_texts]
        known = own[committed] if committed.any() else own
        found.append(
            {
                "modelId": trace.fingerprint["model"],
                "source": f"{at}-{site}",
                "index": str(number),
                "maxActApprox": float(known.max()),
                "frac_nonzero": float((known > 0).double().mean()),
                "activations": [_activation(rows, own, where, status) for status, where in shown],
            }
        )
    if path is not None:
        write_whole(
            folder("path", path), lambda to: to.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
        )
    return found


def _values(
    trace: "Trace", dictionary: Dictionary, rows: pd.DataFrame, site: str, layer: int, numbers: Sequence[int]
) -> Tensor:
    """Returns the activation of each feature at each row, [n, k]."""
    parts = []
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        states = trace.vectors(site, layer, rows.iloc[first : first + _ROWS_AT_ONCE])
        states = states.reshape(len(states), -1)
        dictionary.require_width(states.shape[1], f"site {site} of {trace.fingerprint['model']}")
        parts.append(dictionary.encode(states)[:, list(numbers)].float())
    return torch.cat(parts)


def _texts(rows: pd.DataFrame) -> Iterator[tuple[str, Sequence[int]]]:
    """Yields (status, places in `rows` of a text's tokens) of each request, and of each of its rejected drafts."""
    place = pd.Series(range(len(rows)), rows.index)
    for _, own in rows.groupby("request_id", sort=True):
        kept = own[own.status == "committed"].sort_values("position")
        if len(kept):
            yield "committed", place[kept.index].tolist()
        for _, lost in own[own.status == "rolled_back"].groupby("step", sort=True):
            lost = lost.sort_values("position")
            before = kept[kept.position < lost.position.iloc[0]]
            yield "rolled_back", [*place[before.index].tolist(), *place[lost.index].tolist()]


def _activation(rows: pd.DataFrame, own: Tensor, where: Sequence[int], status: str) -> JsonDict:
    values = own[list(where)]
    return {
        "tokens": rows.token.iloc[list(where)].tolist(),
        "values": values.tolist(),
        "maxValue": float(values.max()),
        "minValue": float(values.min()),
        "maxValueTokenIndex": int(values.argmax()),
        "request": int(rows.request_id.iloc[where[0]]),
        "status": status,
    }
