"""Lists rejected drafts by walking through the events of each request, one after another."""

from typing import Any

import cacheprobe as cp
from cacheprobe.core.records import DISCARDED_DRAFT


def rejected_slowly(trace: cp.Trace) -> list[dict[str, Any]]:
    """As `trace.rejected()`, a dict for each line; None for null."""
    return [line for request in trace.requests for line in _of_request(trace, request.request_id)]


def _of_request(trace: cp.Trace, request_id: int) -> list[dict[str, Any]]:
    tokens = [*trace.requests[request_id].prompt_token_ids, *trace.committed(request_id)]
    texts, lines, born = trace.token_texts, [], []
    for event in trace.events().itertuples():
        if event.request_id != request_id:
            continue
        if event.phase == "prefill":
            born = []
        born += [event.step for _ in event.proposed_token_ids]
        draft = [int(token) for token in event.draft_token_ids]
        if not draft:
            continue
        own, born = born[len(born) - len(draft) :], []
        count = int(event.num_accepted)
        if count == len(draft):
            continue
        at = int(event.draft_start) + count
        now = tokens[at] if at < len(tokens) else None
        lines.append(
            {
                "request_id": request_id,
                "step": event.step,
                "position": at,
                "drafted_token_id": draft[count],
                "drafted_token": texts[draft[count]],
                "committed_token_id": now,
                "committed_token": None if now is None else texts[now],
                "num_rolled_back": len(draft) - count,
                "drafted_step": own[count],
                "drafter_layer": _drafter_layer(trace, request_id, own[count], at - 1),
                **_decision(trace, request_id, event.step, at - 1, draft[count], now),
                "text_before": "".join(texts[token] for token in tokens[max(at - 8, 0) : at]),
            }
        )
    return lines


def _drafter_layer(trace: cp.Trace, request_id: int, step: int, position: int) -> int | None:
    rows = trace.rows(request_id)
    [num_layers] = rows[(rows.step == step) & (rows.position == position)].num_layers.tolist() or [None]
    return None if num_layers in (None, trace.rows().num_layers.max()) else num_layers - 1


def _decision(trace: cp.Trace, request_id: int, step: int, position: int, drafted: int, now: int | None) -> dict:
    nothing = {"flip_layer": None, "margin_nats": None, "margin_at_least_nats": None}
    if trace.hypothesis_table is None:
        return nothing
    table = trace.hypotheses(include_rolled_back=True)
    chosen = (table.request_id == request_id) & (table.step == step) & (table.position == position)
    own = table[chosen & ~table.status.isin(DISCARDED_DRAFT)].sort_values("layer")
    if own.empty:
        return nothing
    flip = None
    for layer, token in zip(own.layer[::-1].tolist(), own.token_id[::-1].tolist(), strict=True):
        if token != now:
            break
        flip = layer
    last = own.iloc[-1]
    by_token = dict(zip(map(int, last.top_token_ids), map(float, last.top_logprob_nats), strict=True))
    margin = last.committed_logprob_nats - by_token[drafted] if drafted in by_token else None
    least = last.committed_logprob_nats - min(by_token.values()) if margin is None else margin
    return {"flip_layer": flip, "margin_nats": margin, "margin_at_least_nats": least}
