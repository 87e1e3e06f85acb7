"""Lists the tokens of a run by walking through the events of each request, and through the readings of each row."""

import math
from typing import Any

import cacheprobe as cp
from tests.twins.rejected_slowly import rejected_slowly

MEASURES = ("first_at_drafter_layer", "prediction_depth", "first_at_layer", "disagreement", "disagreement_layer",
            "disagreement_token", "entropy_nats", "margin_nats")  # fmt: skip


def tokens_slowly(trace: cp.Trace) -> list[dict[str, Any]]:
    """As `cp.analysis.token_table(trace, grouped=False)`, a dict for each line; None for null."""
    rejected = {(line["request_id"], line["position"], line["step"]): line for line in rejected_slowly(trace)}
    lines = [_line(trace, request, step, at, "rejected", line["drafted_token_id"], line["chain_step"], nats)
             for (request, at, step), line, nats in _with_nats(trace, rejected)]  # fmt: skip
    for request in trace.requests:
        at = request.num_prompt_tokens
        for event in trace.events().query(f"request_id == {request.request_id}").sort_values("step").itertuples():
            draft, logprobs = list(event.draft_token_ids), list(event.committed_logprobs_nats)
            for i, _ in enumerate(event.committed_token_ids):
                verdict, drafted = "committed", None
                if event.phase == "verify":
                    verdict = "accepted" if i < event.num_accepted else "recovered" if i < len(draft) else "bonus"
                    drafted = draft[i] if i < len(draft) else None
                chain = None if drafted is None else i + 1
                nats = logprobs[i] if logprobs else None
                lines.append(_line(trace, request.request_id, event.step, at, verdict, drafted, chain, nats))
                at += 1
    order = {"rejected": 0}
    return sorted(lines, key=lambda line: (line["request_id"], line["position"], order.get(line["verdict"], 1)))


def _with_nats(trace: cp.Trace, rejected: dict) -> list[tuple]:
    """Adds to each rejected draft its number in its draft, and the log-probability of the committed token there."""
    found = []
    for (request, at, step), line in rejected.items():
        events = trace.events()
        [event] = events[(events.request_id == request) & (events.step == step)].itertuples()
        index = at - trace.requests[request].num_prompt_tokens
        own = events[events.request_id == request].sort_values("step").committed_logprobs_nats
        nats = [float(value) for logprobs in own for value in logprobs]
        line = {**line, "chain_step": int(event.num_accepted) + 1}
        found.append(((request, at, step), line, nats[index] if index < len(nats) else None))
    return found


def _line(
    trace: cp.Trace, request: int, step: int, at: int, verdict: str, drafted: int | None, chain: int | None,
    nats: float | None,
) -> dict[str, Any]:  # fmt: skip
    texts, tokens = trace.token_texts, [*trace.requests[request].prompt_token_ids, *trace.committed(request)]
    committed = tokens[at] if at < len(tokens) else None
    layer = None if drafted is None else _drafter_layer(trace, request, step, at)
    measures = dict.fromkeys(MEASURES)
    if committed is not None and trace.hypothesis_table is not None:
        measures |= _measures(trace, request, at, committed, layer)
    return {
        "request_id": request, "step": step, "position": at, "verdict": verdict, "times": 1,
        "committed_token_id": committed, "committed_token": None if committed is None else texts[committed],
        "drafted_token_id": drafted, "drafted_token": None if drafted is None else texts[drafted],
        "chain_step": chain, "drafter_layer": layer, **measures, "logprob_nats": nats,
    }  # fmt: skip


def _drafter_layer(trace: cp.Trace, request: int, step: int, at: int) -> int | None:
    rows = trace.rows(request)
    passes = rows[(rows.step < step) & (rows.position == at - 1) & (rows.phase == "decode")].sort_values("step")
    layers = passes.num_layers.tolist()
    return None if not layers or layers[-1] == trace.rows().num_layers.max() else layers[-1] - 1


def _measures(trace: cp.Trace, request: int, at: int, committed: int, layer: int | None) -> dict[str, Any]:
    table = trace.hypothesis_table
    assert table is not None
    own = table[(table.request_id == request) & (table.position == at - 1) & (table.status == "committed")]
    read = own.sort_values("layer").to_dict("records")
    if not read:
        return {}
    rows = trace.rows()
    early = rows.num_layers[rows.num_layers < rows.num_layers.max()]
    asked = layer if layer is not None else int(early.mode()[0]) - 1 if len(early) else None
    firsts = {line["layer"]: line["token_id"] for line in read}
    last = read[-1]
    depth = last["layer"]
    for line in reversed(read):
        if line["token_id"] != last["token_id"]:
            break
        depth = line["layer"]
    others = [line for line in read if line["token_id"] != last["token_id"]]
    most = max(others, key=lambda line: line["logprob_nats"], default=None)
    rival = last["top_logprob_nats"][1] if last["token_id"] == committed else last["top_logprob_nats"][0]
    return {
        "first_at_drafter_layer": None if asked not in firsts else firsts[asked] == committed,
        "prediction_depth": depth,
        "first_at_layer": min((number for number, token in firsts.items() if token == committed), default=None),
        "disagreement": math.exp(most["logprob_nats"]) if most else 0.0,
        "disagreement_layer": most["layer"] if most else None,
        "disagreement_token": most["token"] if most else None,
        "entropy_nats": last["entropy_nats"],
        "margin_nats": last["committed_logprob_nats"] - rival,
    }
