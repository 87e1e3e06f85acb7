"""Measures the loss of a dictionary's reconstruction: variance that it explains, and what the model then predicts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.lenses.dictionaries import Dictionary, DictionaryError
from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import feed
from cacheprobe.trace.recording.stored_states import require_model

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


@torch.inference_mode()
def reconstruction(
    trace: "Trace", dictionary: Dictionary, model: CachedLM | None = None, *, include_special: bool = False
) -> pd.DataFrame:
    """Returns a DataFrame with one line for each generated token: how well its state is reconstructed, and what the
    model would have predicted with reconstructed states.

    Each request's text is fed again, once as it is and once with the states of its positions at the dictionary's site
    and layer replaced by their reconstruction. A transcoder's output replaces what it predicts. By default, special
    tokens and the first position keep their states, have no line, and do not count in the mean state; include_special
    brings them back.
    Columns: request_id; position, of the row that predicts the token; token_id and token, the committed token;
    logprob_nats, of this token as the model is; reconstructed_logprob_nats, of the same token with reconstructed
    states; change_nats, the second less the first; squared_error and squared_distance of the row: from the state to its
    reconstruction, and from the state to the mean state of the request. The share of variance explained, of any lines,
    is `1 - table.squared_error.sum() / table.squared_distance.sum()`.
    model: by default the trace's own. Requests that began from a KVSnapshot, or of a run with interventions, are
    refused: their text alone does not say their states.
    Raises: DictionaryError if the dictionary does not fit; ValueError without a model, or for such requests.
    Source: Cunningham et al. 2023 (arXiv 2309.08600), section 3; Gao et al. 2024 (arXiv 2406.04093), section 4.1.
    Twin: a hook on an uncached forward, in tests.reported.test_dictionaries.
    """
    model = require_model(trace, model)
    source, target = _places(dictionary, model)
    if trace.meta.get("interventions") or any(request.cached is not None for request in trace.requests):
        raise ValueError("the run began from a KVSnapshot or had interventions, so its text alone gives other states")
    lines = []
    for request in trace.requests:
        generated = trace.committed(request.request_id)
        if generated:
            text = [*request.prompt_token_ids, *generated][:-1]
            tokens = pd.DataFrame({"position": range(len(text)), "token_id": text})
            is_read = torch.tensor(include_special | ~trace.is_special(tokens).to_numpy())
            if bool(is_read.any()):
                lines.append(_lines(model, dictionary, (source, target), text, generated, is_read))
                lines[-1].insert(0, "request_id", request.request_id)
    if not lines:
        raise ValueError("no request generated a token after an ordinary one; see include_special=")
    table = pd.concat(lines, ignore_index=True)
    table.insert(3, "token", [trace.token_texts[token] for token in table.token_id])
    return table


def _lines(
    model: CachedLM,
    dictionary: Dictionary,
    places: tuple[tuple[str, int], tuple[str, int]],
    text: Sequence[int],
    generated: Sequence[int],
    is_read: Tensor,
) -> pd.DataFrame:
    """Returns the lines of one request. text: what is fed, all but the newest token.  generated: its last tokens, and
    the newest.  is_read: [n], for each token of the text whether its state is replaced and has a line."""
    source, target = places
    plain = feed(model, torch.tensor([list(text)]), sorted({source, target}))
    states, wanted = plain.states[source][0], plain.states[target][0].float()
    whole = dictionary.reconstruct(states).to(wanted.device)

    def replace(site: str, layer: int, value: Tensor) -> Tensor:
        """Returns the reconstruction instead of the states of the positions that are read."""
        return torch.where(is_read[:, None].to(value.device), whole.to(value.dtype), value)

    with model.editing([target], replace):
        changed = feed(model, torch.tensor([list(text)]))
    first, chosen = len(text) - len(generated), torch.tensor(list(generated), device=plain.out.device)
    nats = [
        out[0, first:].double().log_softmax(-1).gather(-1, chosen[:, None])[:, 0].cpu().numpy()
        for out in (plain.out, changed.out)
    ]
    middle = wanted[is_read.to(wanted.device)].mean(0)
    errors, distances = ((wanted - other).square().sum(-1).cpu().numpy() for other in (whole, middle))
    table = pd.DataFrame(
        {
            "position": range(first, len(text)),
            "token_id": list(generated),
            "logprob_nats": nats[0],
            "reconstructed_logprob_nats": nats[1],
            "change_nats": nats[1] - nats[0],
            "squared_error": errors[first:],
            "squared_distance": distances[first:],
        }
    )
    return table[is_read[first:].numpy()]


def _places(dictionary: Dictionary, model: CachedLM) -> tuple[tuple[str, int], tuple[str, int]]:
    """Returns (site, layer) of the states that are encoded, and of those that are replaced. Raises: DictionaryError if
    they cannot be changed, or do not fit the model."""
    source, target = dictionary.config.place, dictionary.config.place_out
    if source is None or target is None or {source[0], target[0]} - {"S", "T", "C"}:
        raise DictionaryError(
            f"{dictionary} cannot be put in the model's place; its hook point must be S, T or C, see Dictionary.load"
        )
    for _, layer in (source, target):
        if layer >= model.n_layers:
            raise DictionaryError(f"the dictionary is for layer {layer}; {model.name} has 0 to {model.n_layers - 1}")
    for width in (dictionary.config.d_in, dictionary.config.d_out):
        if width != model.d_model:
            raise DictionaryError(
                f"the dictionary is for states of width {width}, {model.name} has {model.d_model}; it was made for "
                "another model"
            )
    return source, target
