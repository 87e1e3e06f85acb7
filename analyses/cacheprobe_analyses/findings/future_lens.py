"""Trains a linear future lens on a run's own states: from the states that a draft head is given, to the model's last
state k tokens later, from which the unembedding reads a token.

Source: Pal et al. 2023, Future Lens (arXiv 2311.04897), with ridge regression for their linear map.
"""

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cacheprobe.lenses.probes.ridge import group_folds, ridge_scores
from cacheprobe.models.settings import live_model
from cacheprobe.trace.trace import Trace
from cacheprobe_analyses.findings.draft_records import ranks_read

LENSES = ("given", "state", "token", "shuffled")
"""By what they read: all that the head's first row of a chain is given; the highest of its states alone; the embedding
of the newest token alone; all, with the later states of other places."""
PENALTY = 1.0
"""Of the ridge regression, in units of the number of features, after scaling."""


def lens_ranks(trace: Trace, drafts: pd.DataFrame, steps: int, folds: int, seed: int) -> pd.DataFrame:
    """Returns the rank of the committed token (0 is the likeliest) by each lens and by token frequency, a line for each
    of `drafts`. The lenses, and the frequencies, are fitted on the texts of other prompts.

    drafts: judged ones, with request_id, group, position, chain_step and token_id.  steps: chain steps at most.
    """
    groups = drafts[["request_id", "group"]].drop_duplicates()
    fold_of = pd.Series(group_folds(groups.group, folds, seed), groups.request_id)
    given, final = _texts(trace, fold_of.index)
    of_fold, draw = drafts.request_id.map(fold_of).to_numpy(), torch.Generator().manual_seed(seed)
    out = pd.DataFrame(-1, drafts.index, [*LENSES, "frequency"])
    for fold in range(folds):
        others, own = [i for i in fold_of.index if fold_of[i] != fold], drafts[of_fold == fold]
        if own.empty:
            continue
        fitted = torch.cat([given[i][1:-steps] for i in others])
        later = torch.cat([_later(final[i], steps) for i in others])
        starts = zip(own.request_id, own.position - own.chain_step, strict=True)
        read, token_ids = torch.stack([given[i][p] for i, p in starts]), torch.tensor(own.token_id.to_numpy(int))
        for lens in LENSES:
            own_columns = _columns(lens, given[others[0]].shape[1], later.shape[1] // steps)
            wanted = later[torch.randperm(len(later), generator=draw)] if lens == "shuffled" else later
            states = future_states(fitted[:, own_columns], wanted, read[:, own_columns])
            at = torch.arange(len(own)), torch.tensor(own.chain_step.to_numpy(int) - 1)
            chosen = states.view(len(own), steps, -1)[at]
            out.loc[own.index, lens] = ranks_read(trace, chosen, token_ids)
        out.loc[own.index, "frequency"] = _frequency_ranks(trace, others, token_ids)
    return out


def future_states(states: Tensor, later: Tensor, read: Tensor) -> Tensor:
    """Returns the later states [b, q] that a ridge regression from states [n, f] to later [n, q] gives for read [b, f].

    Twin: tests.analyses.test_attention_drift: torch.linalg.lstsq with the penalty as further rows, close(1e-3).
    """
    return ridge_scores(states[None], later, read[None], torch.tensor([PENALTY]))[0, 0]


def _texts(trace: Trace, request_ids: pd.Index) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Returns by request what the head's rows are given: the model's states, and the embedding of the next token,
    joined [t, f]; and the model's last states [t, m], scaled to a mean square of 1, as the final norm scales them."""
    given, final, last = {}, {}, trace.model.n_layers - 1
    embedding = live_model(trace.model).get_input_embeddings()
    for i in request_ids:
        text = torch.tensor([*trace.requests[i].prompt_token_ids, *trace.committed(i)])
        with torch.no_grad():
            embedded = embedding(text[1:]).float()
        states = [trace.states(site, layer, i).float() for site, layer in trace.require_head().model.target_sites]
        given[i], own = torch.cat([*states, embedded], dim=1), trace.states("S", last, i).float()
        final[i] = own / own.square().mean(1, keepdim=True).sqrt()
    return given, final


def _later(final: Tensor, steps: int) -> Tensor:
    """Returns the states 1 ... `steps` tokens after each of the positions 1 ... t - steps - 1, side by side."""
    return torch.cat([final[1 + k : len(final) - steps + k] for k in range(1, steps + 1)], dim=1)


def _columns(lens: str, width: int, of_state: int) -> slice:
    """Returns which columns of what the head is given a lens reads: of a state, or of the embedding, which is last."""
    ends = {"state": (width - 2 * of_state, width - of_state), "token": (width - of_state, width)}
    return slice(*ends.get(lens, (0, width)))


def _frequency_ranks(trace: Trace, others: list[int], token_ids: Tensor) -> np.ndarray:
    """Returns the rank of tokens by how often the model generated them in other texts."""
    written = torch.tensor([token for i in others for token in trace.committed(i)])
    counts = torch.bincount(written, minlength=trace.model.d_vocab)
    return (counts > counts[token_ids][:, None]).sum(1).numpy()
