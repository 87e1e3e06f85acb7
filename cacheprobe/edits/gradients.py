"""Computes gradients of a metric with respect to states, of a trace's committed and rejected tokens or of prompts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.hook_names import SITES
from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.core.terminal import Progress
from cacheprobe.core.tokens import visible
from cacheprobe.core.values import name_of, require_one_of
from cacheprobe.edits.gradient_texts import (
    COMMITTED,
    REJECTED,
    GradientText,
    Metric,
    texts_of_prompts,
    texts_of_trace,
)
from cacheprobe.edits.patching.arguments import as_layers
from cacheprobe.models.base import CachedLM
from cacheprobe.models.hf.differentiable import GRADIENT_SITES, Derivatives, derivatives, require_gradients
from cacheprobe.trace.recording.stored_states import require_model
from cacheprobe.trace.trace import Trace

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
                    f"request {request_id} step {step}: row {row} was abandoned, so no verdict says its text; choose "
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


def gradients(
    model: CachedLM,
    source: object,
    metric: Metric,
    *,
    sites: Iterable[str] = SITES,
    layers: "Iterable[int] | None" = None,
    request_ids: "Iterable[int] | None" = None,
    rejected: bool = True,
    progress: bool = True,
) -> Gradients:
    """Computes the gradient of a metric with respect to the states of every token, and returns Gradients.

    Each text is fed once, without a cache: of a trace, each request's committed tokens but the newest, and each
    rejected draft after the text before it, so that rolled-back rows have gradients too. The user's hooks act.
    source: a Trace of this model, or prompts as in `cp.run`: text, token ids, task examples.
    metric: called with a text's logits [n, v], whose row p predicts the token at p + 1, and its GradientText; returns
    a tensor of one number. Ready ones are `cp.analysis.logit_difference`, `token_logprob` and `text_logprob`.
    sites: of S, T, C, pre (the stream that enters the block) and z (the heads' outputs).  layers: None for all.
    request_ids: of a trace, only these requests.  rejected: whether rejected drafts of a trace are computed.
    The gradients have the model's dtype: float16 and bfloat16 round them.
    Raises: ModelError for a Thinking States model. ValueError for a site or layer that is not there, a trace of other
    weights, of a run with interventions or a KVSnapshot, a metric that does not return one finite number with a graph,
    and gradients that are not finite.
    Source: gradient times state as in Shrikumar et al. 2016 (arXiv 1605.01713).
    Twin: tests.twins.gradients_slowly.gradient_slowly: central differences of plain forwards, close(1e-6) in float64.
    """
    places = _places(model, (sites,) if isinstance(sites, str) and sites in GRADIENT_SITES else tuple(sites), layers)
    require_gradients(model)
    if not callable(metric):
        raise ValueError(
            f"metric must be a function of (logits, text), got {metric!r:.60}; see cp.analysis.logit_difference"
        )
    rows = None
    if isinstance(source, Trace):
        texts = texts_of_trace(require_model(source, model), source, request_ids, rejected)
        rows = source.rows()
        rows = rows[rows.status.isin(["committed", REJECTED])]
    else:
        if request_ids is not None:
            raise ValueError("request_ids= chooses requests of a trace; leave out prompts instead")
        texts = texts_of_prompts(model, source)
    lines, kept, about = [], [], []
    with Progress(len(texts), "differentiating", "texts", enabled=progress) as bar:
        for text in texts:
            found = _of_text(text, metric, places)
            kept.append((text, {place: one[0, text.first :].cpu() for place, one in found.gradients.items()}))
            lines.append(_lines(text, found, rows))
            about.append((text.request_id, text.status, text.step, len(text.token_ids), found.value))
            bar.advance()
    columns = ["request_id", "status", "step", "num_tokens", "metric"]
    fed = pd.DataFrame(about, columns=columns).astype({"step": "Int64"})
    return Gradients(pd.concat(lines, ignore_index=True), fed, name_of(metric), model.name, kept)


def _places(model: CachedLM, sites: Sequence[str], layers: "Iterable[int] | None") -> list[tuple[str, int]]:
    """Returns the (site, layer) pairs. Raises: ValueError for a site or layer that is not there, or none."""
    if not sites:
        raise ValueError(f"there is no site; sites are {', '.join(GRADIENT_SITES)}")
    for site in sites:
        require_one_of("site", site, GRADIENT_SITES)
    return [(site, layer) for site in dict.fromkeys(sites) for layer in as_layers(layers, model)]


def _of_text(text: GradientText, metric: Metric, places: Sequence[tuple[str, int]]) -> Derivatives:
    """Returns the Derivatives of the metric of one text."""

    def of_logits(logits: Tensor) -> object:
        """Returns the metric of logits [1, n, v]."""
        return metric(logits[0], text)

    about = f"{text}, metric {name_of(metric)}"
    return derivatives(text.model, torch.tensor([text.token_ids]), places, of_logits, about)


def _lines(text: GradientText, found: Derivatives, rows: "pd.DataFrame | None") -> pd.DataFrame:
    """Returns the lines of the table of one text. rows: of the trace, those of committed and rejected tokens."""
    positions = range(text.first, len(text.token_ids))
    ids = text.token_ids[text.first :]
    own = pd.DataFrame({"row": pd.NA, "step": pd.NA}, index=positions)
    if rows is not None:
        wanted = rows[(rows.request_id == text.request_id) & (rows.status == text.status)]
        if text.status == REJECTED:
            wanted = wanted[wanted.step == text.step]
        own = wanted.set_index("position")[["row", "step"]].reindex(positions)
    about = {
        "row": pd.array(own.row, dtype="Int64"),
        "request_id": text.request_id,
        "step": pd.array(own.step, dtype="Int64"),
        "status": text.status,
        "position": positions,
        "token_id": ids,
        "token": [visible(token) for token in text.model.token_texts(ids)],
    }
    parts = []
    for (site, layer), gradient in found.gradients.items():
        vectors, states = (x[0, text.first :].flatten(1).double() for x in (gradient, found.states[site, layer]))
        numbers = dict(
            gradient_norm=vectors.norm(dim=-1).tolist(), gradient_times_state=(vectors * states).sum(-1).tolist()
        )
        parts.append(pd.DataFrame({**about, "site": site, "layer": layer, **numbers}))
    return pd.concat(parts, ignore_index=True)
