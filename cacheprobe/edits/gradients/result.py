"""Defines Gradients, the result of `cp.gradients`: tensors by text, site and layer, and a tidy table."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.edits.gradients.texts import COMMITTED, REJECTED, GradientText

TextGradients = tuple[GradientText, dict[tuple[str, int], Tensor]]
"""A text, and its gradients by (site, layer): of the positions from `text.first` on."""


@dataclass(frozen=True, eq=False)
class Gradients:
    """Holds gradients of a metric with respect to the states of each token, and their table."""

    table: pd.DataFrame = field(repr=False)
    """One line for each token, site and layer. Columns: row, request_id, step, status, position, token_id, token, as in
    `trace.rows()` (row and step null, status "prompt" for given prompts); site; layer; gradient_norm, its Euclidean
    norm; gradient_times_state, the inner product with the state: the first-order effect of setting it to zero, with the
    opposite sign."""
    texts: pd.DataFrame = field(repr=False)
    """One line for each sequence that was fed: request_id, status, step, num_tokens, metric (its value)."""
    metric: str
    """Name of the metric."""
    model: str
    kept: Sequence[TextGradients] = field(repr=False)

    def __repr__(self) -> str:
        counts = self.texts.status.value_counts()
        words = {COMMITTED: "committed texts", REJECTED: "rejected drafts", "prompt": "prompts"}
        parts = [f"{counts[status]} {word}" for status, word in words.items() if status in counts]
        sites = ", ".join(self.table.site.unique())
        layers = self.table.layer.nunique()
        return f"Gradients({self.metric} of {self.model}: {', '.join(parts)}; sites {sites}; {layers} layers)"

    def of_request(self, site: str, layer: SupportsIndex, request_id: SupportsIndex) -> Tensor:
        """Returns the gradients [n, m] with respect to the states of a request's n committed rows, or of a prompt's n
        tokens, by position; [n, h, d] at site z.

        layer: negative numbers count from the model's last.
        Raises: KeyError for a request, ValueError for a site or layer, whose gradient was not computed.
        """
        for text, gradients in self.kept:
            if text.request_id == int(request_id) and text.status != REJECTED:
                return self._at(gradients, text, site, layer)
        raise KeyError(f"no gradient of request {request_id} was computed; give it in request_ids=")

    def of_rows(self, site: str, layer: SupportsIndex, rows: pd.DataFrame) -> Tensor:
        """Returns the gradients [r, m] with respect to the states of r rows of the trace, from `trace.rows(...)`;
        [r, h, d] at site z.

        A row of status superseded has the gradient of the committed row at its position, which read the same tokens. A
        drafter's row of a rejected token has that of the verifier's. The gradient is of all layers, also for rows of a
        drafter that stopped early.
        Raises: ValueError for rows of another status, of a request or draft whose gradients were not computed, for a
        site or layer that was not asked for, and without rows.
        """
        if not len(rows):
            raise ValueError("there is no row, so there is no gradient; trace.rows() lists them")
        rejected: dict[int, list[TextGradients]] = {}
        for one in self.kept:
            if one[0].status == REJECTED:
                rejected.setdefault(one[0].request_id, []).append(one)
        committed = {text.request_id: (text, gradients) for text, gradients in self.kept if text.status == COMMITTED}
        found = []
        for line in rows.itertuples():
            row, request_id, step, position = (
                int(str(x)) for x in (line.row, line.request_id, line.step, line.position)
            )
            if line.status == DISCARDED_DRAFT[1]:
                raise ValueError(
                    f"request {request_id} step {step}: row {row} was given up, so no verdict says its text; choose "
                    "committed or rolled_back rows"
                )
            if line.status == REJECTED:
                text, gradients = _draft_of(rejected.get(request_id, []), step, position, row)
            elif request_id in committed:
                text, gradients = committed[request_id]
            else:
                raise ValueError(f"request {request_id}: row {row} has no gradient; give the request in request_ids=")
            if text.token_ids[position] != line.token_id:
                raise ValueError(
                    f"{text}: row {row} read token {line.token_id} at position {position}, its text has "
                    f"{text.token_ids[position]}; give rows of the trace that the gradients are of"
                )
            found.append(self._at(gradients, text, site, layer)[position - text.first])
        return torch.stack(found)

    def _at(
        self, gradients: dict[tuple[str, int], Tensor], text: GradientText, site: str, layer: SupportsIndex
    ) -> Tensor:
        """Returns the gradients of one text at a site and layer. Raises: ValueError if they were not computed."""
        number = int(layer) + (text.model.n_layers if int(layer) < 0 else 0)
        if (site, number) not in gradients:
            sites, layers = (sorted({place[i] for place in gradients}) for i in (0, 1))
            raise ValueError(
                f"no gradient at site {site!r} of layer {layer}; computed were sites {sites}, layers {layers}"
            )
        return gradients[site, number]


def _draft_of(kept: Sequence[TextGradients], step: int, position: int, row: int) -> TextGradients:
    """Returns the rejected draft of a rolled-back row: the first that a verify pass of `step` or later rejected. kept:
    of the request, by step. Raises: ValueError if it is not there."""
    for text, gradients in kept:
        if text.step is not None and text.step >= step and text.first <= position < len(text.token_ids):
            return text, gradients
    raise ValueError(f"step {step}: row {row} has no gradient; compute them with rejected=True and its request")
