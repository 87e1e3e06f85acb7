"""Reads from a run with a draft head what its draft tokens came from: attention, norm, distribution, and verdict."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cacheprobe.trace.trace import Trace

AT_ONCE = 256
"""Vectors in one product with an unembedding."""
SHARES = ("sink", "prompt", "generated", "own")
"""Parts of the text on which a row's attention weights sum to 1."""
JUDGED = ("accepted", "rejected")


def draft_rows(trace: Trace) -> pd.DataFrame:
    """Returns a DataFrame with one line for each draft token: the head's row that predicted it, and the verdict.

    Columns: row, request_id, group (the same for equal prompts), position p (of the row; the token is for p + 1),
    chain_step (1 for the first token of a draft, whose row is of a committed token), verdict, and those of
    `attention_shares`; norm, the length of the row's state after the head's last block, before its norm; and those of
    `readings`, null without a verdict. A token after a rejected one is "unverified": its draft follows a text that was
    never committed.
    """
    head = trace.require_head()
    layer = head.model.n_layers - 1
    read = head.hypotheses(include_rolled_back=True)
    read = read[(read.layer == layer) & read.chain_step.notna()]
    table = read[["row", "request_id", "position", "chain_step", "verdict"]].reset_index(drop=True)
    table = table.astype({"chain_step": int, "verdict": object})
    prompts = pd.Series({one.request_id: one.prompt_token_ids for one in trace.requests})
    rows, lengths = table.row.tolist(), table.request_id.map(prompts.map(len))
    weights = zip(head.pattern_rows(layer, rows), table.chain_step, lengths, strict=True)
    table["group"] = table.request_id.map(pd.Series(pd.factorize(prompts)[0], prompts.index))
    table["norm"] = head.vectors("S", layer, rows).float().norm(dim=1).numpy()
    table = table.join(pd.DataFrame([attention_shares(*one) for one in weights], table.index))
    judged = table[table.verdict.isin(JUDGED)]
    return table.join(readings(trace, judged))


def attention_shares(pattern: Tensor, chain_step: int, num_prompt_tokens: int) -> dict[str, float]:
    """Returns where a row of a chain attends to, as shares of its weight: the mean over the head's attention heads, and
    of each attention head i as sink_i and own_i.

    sink: the head's first row, at position 1.  prompt: the rest of the prompt.  generated: committed generated tokens.
    own: rows of this chain, which are made from the head's own states; none at the first step.  newest_w, only at the
    first step: the w newest rows of committed tokens, the same number of rows as `own` has at step w + 1.
    pattern: [h, p + 1], from `Trace.pattern_rows` of the head.  chain_step: of the token that the row predicts.
    """
    end = pattern.shape[1] - chain_step + 1  # the position after the newest committed token
    first = min(max(num_prompt_tokens, 2), end)
    parts = dict(zip(SHARES, pattern[:, 1:].split([1, first - 2, end - first, chain_step - 1], dim=1), strict=True))
    by_head = {name: part.float().sum(1) for name, part in parts.items()}
    shares = {name: float(one.mean()) for name, one in by_head.items()}
    shares |= {f"{name}_{i}": float(x) for name in ("sink", "own") for i, x in enumerate(by_head[name])}
    if chain_step == 1:
        shares |= {f"newest_{w}": float(pattern[:, -w:].float().sum(1).mean()) for w in (1, 2, 3)}
    return shares


def readings(trace: Trace, drafts: pd.DataFrame) -> pd.DataFrame:
    """Returns what the head and the verified model say where a draft token was judged, a line for each of `drafts`.

    Columns: margin (nats, between the head's two likeliest tokens), entropy and logprob (nats, of the head's
    distribution and of its likeliest token), kl (nats, KL divergence of the head's distribution from the model's at the
    same position), token_id (committed there), rank (of this token in the head's distribution, 0 is the likeliest), and
    is_known (whether the head's vocabulary has it).
    """
    head, found = trace.require_head(), []
    layer, token_ids, wanted = head.model.n_layers - 1, committed_after(trace, drafts), target_states(trace, drafts)
    for part in _parts(len(drafts)):
        own = head.model.read_out(head.vectors("S", layer, drafts.row.iloc[part].tolist())).float().log_softmax(-1)
        target = trace.model.read_out(wanted[part]).float().log_softmax(-1)
        best = own.topk(2).values
        terms = own.exp() * own.clamp_min(-1e4)
        columns = {
            "margin": best[:, 0] - best[:, 1], "entropy": -terms.sum(-1), "logprob": best[:, 0],
            "kl": (terms - own.exp() * target).sum(-1), "token_id": token_ids[part],
            "rank": ranks(own, token_ids[part]), "is_known": own.gather(1, token_ids[part][:, None])[:, 0].isfinite(),
        }  # fmt: skip
        found.append(pd.DataFrame({name: column.numpy() for name, column in columns.items()}))
    return pd.concat(found).set_axis(drafts.index)


def committed_after(trace: Trace, drafts: pd.DataFrame) -> Tensor:
    """Returns the committed token id [n] at the position after each line's."""
    texts = {r.request_id: [*r.prompt_token_ids, *trace.committed(r.request_id)] for r in trace.requests}
    return torch.tensor([texts[i][p + 1] for i, p in zip(drafts.request_id, drafts.position, strict=True)])


def target_states(trace: Trace, drafts: pd.DataFrame) -> Tensor:
    """Returns the model's last state [n, m] at each line's position, from which its token for the next is read."""
    last = trace.model.n_layers - 1
    states = {i: trace.states("S", last, i) for i in drafts.request_id.unique()}
    return torch.stack([states[i][p] for i, p in zip(drafts.request_id, drafts.position, strict=True)])


def ranks(scores: Tensor, token_ids: Tensor) -> Tensor:
    """Returns how many tokens score above these [n], given scores [n, v]: 0 for the likeliest."""
    return (scores > scores.gather(1, token_ids[:, None])).sum(-1)


def ranks_read(trace: Trace, states: Tensor, token_ids: Tensor) -> np.ndarray:
    """Returns the `ranks` [n] of tokens where the model's unembedding reads states [n, m]."""
    read = (ranks(trace.model.read_out(states[part]).float(), token_ids[part]) for part in _parts(len(states)))
    return torch.cat([*read]).numpy()


def _parts(number: int) -> Iterator[slice]:
    """Yields slices that split `number` lines into parts of at most AT_ONCE; one empty slice of no lines."""
    return (slice(start, start + AT_ONCE) for start in range(0, max(number, 1), AT_ONCE))
