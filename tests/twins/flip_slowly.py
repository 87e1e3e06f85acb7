"""Edits at the position that judged a rejected draft token, the slow way: one whole uncached forward of the plain
Hugging Face model for each edit, and a walk through the events."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cacheprobe as cp
from tests.twins.equivalence import choose_token_slowly
from tests.twins.patching_slowly import plain_run

Place = tuple[str, str, int]
"""(edit, site, layer)"""


class Slow(NamedTuple):
    """What `flip_slowly` finds: logits [v] of the run without an edit and after each edit, and the chosen tokens."""

    drafted: int
    committed: int
    unedited: Tensor
    logits: Mapping[Place, Tensor]
    chosen: Mapping[Place, int]


def flip_slowly(trace: cp.Trace, model: Any, request_id: int, step: int) -> Slow:
    """All edits at S, T and C. model: the plain Hugging Face model."""
    request, born = trace.requests[request_id], []
    for event in trace.events().itertuples():
        if event.request_id != request_id:
            continue
        born = [] if event.phase == "prefill" else born
        born += [event.step for _ in event.proposed_token_ids]
        if len(event.draft_token_ids):
            own, born = born[len(born) - len(event.draft_token_ids) :], []
        if event.step == step:
            break
    count = int(event.num_accepted)
    drafted, committed = int(event.draft_token_ids[count]), int(event.target_token_ids[count])
    position = int(event.draft_start) + count
    ids = [*request.prompt_token_ids, *trace.committed(request_id)][:position]
    unedited, seen = plain_run(model, ids, "STC")
    logits = {
        place: plain_run(model, ids, [], [(place[1], place[2], [position - 1], None, state[None])])[0]
        for place, state in _states(trace, seen, request_id, position, own[count], step).items()
    }
    chosen = {place: choose_token_slowly(row, request.sampling, ids, position) for place, row in logits.items()}
    return Slow(drafted, committed, unedited, logits, chosen)


def _states(
    trace: cp.Trace, seen: Mapping[tuple[str, int], Tensor], request_id: int, position: int, born: int, step: int
) -> dict[Place, Tensor]:
    """The state that each edit writes."""
    found: dict[Place, Tensor] = {}
    for (site, layer), states in seen.items():
        found["zero", site, layer] = torch.zeros(states.shape[1])
        earlier = [states[p].double() for p in range(1, position - 1)] or [states[0].double()]
        found["mean", site, layer] = (sum(earlier) / len(earlier)).float()
        for row in trace.rows(request_id).itertuples():
            if row.step == step and row.position == position:
                found["drafted", site, layer] = trace.vectors(site, layer, [row.row])[0]
            if row.step == born and row.position == position - 1 and row.phase == "decode":
                if layer < row.num_layers:
                    found["drafter", site, layer] = trace.vectors(site, layer, [row.row])[0]
                elif site == "S":
                    found["drafter", site, layer] = trace.vectors(site, row.num_layers - 1, [row.row])[0]
    return found
