"""Slow twins of the measures: plain Python over lists of readings."""

import math
import random
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pandas as pd
from scipy.spatial.distance import jensenshannon
from scipy.special import softmax
from scipy.stats import entropy

import cacheprobe as cp


def _rows(table: pd.DataFrame) -> dict[int, list[dict]]:
    """Each row's readings, lowest layer first."""
    rows = defaultdict(list)
    for reading in table.to_dict("records"):
        rows[reading["row"]].append(reading)
    return {row: sorted(readings, key=lambda r: r["layer"]) for row, readings in rows.items()}


def by_layer_slowly(table: pd.DataFrame) -> dict[tuple[int, str], tuple]:
    out = {}
    for key, mine in table.groupby(["layer", "status"]):
        known = mine.dropna(subset=["rank"])
        agrees = known.agrees.astype(float).mean()
        told = (known["rank"].median(), known.committed_logprob_nats.mean(), agrees, mine.entropy_nats.mean())
        out[key] = (len(mine), *map(float, told))
    return out


def commitment_slowly(table: pd.DataFrame, margin: float) -> dict[int, tuple]:
    """Row -> layer, token id, stays, agrees."""
    out = {}
    for row, readings in _rows(table).items():
        out[row] = (None, None, None, None)
        for r in readings:
            first, second = (math.exp(float(x)) for x in r["top_logprob_nats"][:2])
            if first - second >= margin:
                wanted = r["committed_token_id"]
                agrees = None if pd.isna(wanted) else r["token_id"] == wanted
                out[row] = (r["layer"], r["token_id"], r["token_id"] == readings[-1]["token_id"], agrees)
                break
    return out


def saturation_slowly(table: pd.DataFrame, top: int) -> dict[int, tuple]:
    out = {}
    for row, readings in _rows(table).items():
        layers = []
        for k in range(top):
            final = readings[-1]["top_token_ids"][k]
            since = len(readings) - 1
            while since > 0 and readings[since - 1]["top_token_ids"][k] == final:
                since -= 1
            layers.append(readings[since]["layer"])
        out[row] = (*layers, layers == sorted(layers))
    return out


def prediction_depth_slowly(table: pd.DataFrame) -> dict[int, tuple[int, int, str]]:
    """Row -> prediction depth, number of flips, path."""
    out = {}
    for row, readings in _rows(table).items():
        depth, path = readings[0]["layer"], [readings[0]["token"]]
        for before, r in pairwise(readings):
            if r["token_id"] != before["token_id"]:
                depth = r["layer"]
                path.append(r["token"])
        out[row] = (depth, len(path) - 1, " → ".join(path))
    return out


def draft_agreement_slowly(table: pd.DataFrame, window: int) -> dict[int, tuple[int, int, int]]:
    """Layer -> passes, drafted, accepted: the committed text is walked token by token."""
    out = {}
    for layer in sorted(set(table.layer)):
        passes = drafted = accepted = 0
        for request in sorted(set(table.request_id)):
            said = {
                r["position"] + 1: (r["token_id"], int(r["committed_token_id"]))
                for r in table.to_dict("records")
                if r["layer"] == layer and r["request_id"] == request and r["status"] == "committed"
                if not pd.isna(r["committed_token_id"])
            }
            newest, end = min(said), max(said)  # the first generated token is there before anything is drafted
            while newest < end:
                passes += 1
                rejected = False
                taken = 0
                for position in range(newest + 1, min(newest + window - 1, end - 1) + 1):
                    drafted += 1
                    rejected = rejected or said[position][0] != said[position][1]
                    taken += not rejected
                accepted += taken
                newest += taken + 1
        out[layer] = (passes, drafted, accepted)
    return out


def divergences_slowly(logits: list[list[float]]) -> list[tuple[float, float, float | None]]:
    """Of one row's logits by layer, lowest first: entropy, KL(last || layer), Jensen-Shannon to the next."""
    probs = softmax(np.array(logits, dtype=float), axis=1)
    js = [float(jensenshannon(p, after)) ** 2 for p, after in pairwise(probs)]
    return [
        (float(entropy(p)), float(entropy(probs[-1], p)), after) for p, after in zip(probs, [*js, None], strict=True)
    ]


def rejected_tokens_slowly(trace: cp.Trace) -> dict[tuple[int, int, int], tuple[int, int, float]]:
    """(request, step, layer) -> rejected token, its rank, its log-probability, through the model's own readout."""
    out = {}
    for event in trace.events().to_dict("records"):
        if event["phase"] != "verify" or not event["num_rolled_back"]:
            continue
        accepted = int(event["num_accepted"])
        token, at = event["draft_token_ids"][accepted], int(event["draft_start"]) + accepted - 1
        rows = trace.rows(event["request_id"]).to_dict("records")
        row = next(r for r in rows if r["step"] == event["step"] and r["position"] == at)
        for layer in range(row["num_layers"]):
            logits = trace.model.read_out(trace.vectors("S", layer, [row["row"]]))[0].double().tolist()
            total = math.log(math.fsum(math.exp(x) for x in logits))
            order = sorted(range(len(logits)), key=lambda i, logits=logits: (-logits[i], i))
            out[event["request_id"], event["step"], layer] = (token, order.index(token), logits[token] - total)
    return out


def drafts_slowly(trace: cp.Trace) -> dict[tuple[int, int, int], tuple[int, str]]:
    """(request, step, position of a row) -> the token drafted for the next position in that pass, and its verdict."""
    out = {}
    for request in trace.requests:
        events = [e for e in trace.events().to_dict("records") if e["request_id"] == request.request_id]
        length, waiting = request.num_prompt_tokens, []
        for event in sorted(events, key=lambda e: e["step"]):
            if event["phase"] == "prefill" and waiting:
                waiting = []  # read again after a preemption
            for token in event["proposed_token_ids"]:
                place = length + len(waiting) - 1
                waiting.append((event["step"], place, int(token)))
                out[request.request_id, event["step"], place] = (int(token), "unverified")
            if not pd.isna(event["num_accepted"]):
                drafted = [int(token) for token in event["draft_token_ids"]]
                assert [token for *_, token in waiting] == drafted
                for i, (step, place, token) in enumerate(waiting):
                    accepted = int(event["num_accepted"])
                    verdict = "accepted" if i < accepted else "rejected" if i == accepted else "unverified"
                    for at in (step, event["step"]):
                        out[request.request_id, at, place] = (token, verdict)
                waiting = []
            length += len(event["committed_token_ids"])
    return out


def shares_by_verdict_slowly(table: pd.DataFrame) -> dict[tuple[int, str], tuple[int, float, float | None]]:
    """(layer, verdict) -> rows, share with the committed token first, share with the drafted token first."""
    counts: dict[tuple[int, str], list[int]] = {}
    for r in table.to_dict("records"):
        if r["status"] in ("rolled_back", "abandoned") or pd.isna(r["committed_token_id"]):
            continue
        verdict = "not_drafted" if pd.isna(r["verdict"]) else r["verdict"]
        mine = counts.setdefault((r["layer"], verdict), [0, 0, 0])
        mine[0] += 1
        mine[1] += r["token_id"] == r["committed_token_id"]
        mine[2] += not pd.isna(r["drafted_token_id"]) and r["token_id"] == r["drafted_token_id"]
    return {
        key: (rows, committed / rows, None if key[1] == "not_drafted" else drafted / rows)
        for key, (rows, committed, drafted) in counts.items()
    }


def token_measures_slowly(
    events: pd.DataFrame, table: pd.DataFrame | None, num_prompt_tokens: int
) -> list[tuple[int, int, str, int | None, float | None, float | None]]:
    """(token id, position of the row that predicts it, outcome, depth, entropy, log-probability) of each token."""
    out = []
    rows = {} if table is None else _rows(table[(table.status == "committed") & (table.site != "thought")])
    by_position = {readings[0]["position"]: readings for readings in rows.values()}
    for event in events.sort_values("step").to_dict("records"):
        if not len(event["committed_token_ids"]):
            continue
        judged = not pd.isna(event["num_accepted"])
        accepted = int(event["num_accepted"]) if judged else 0
        is_whole = judged and accepted == len(event["draft_token_ids"])
        for i, token_id in enumerate(event["committed_token_ids"]):
            own = ("bonus" if is_whole else "recovered") if judged else "committed"
            position = num_prompt_tokens - 1 + len(out)
            readings = by_position.get(position)
            found = (None, None, None)
            if readings is not None:
                depth = readings[-1]["layer"]
                for lower in reversed(readings):
                    if lower["token_id"] != readings[-1]["token_id"]:
                        break
                    depth = lower["layer"]
                found = (depth, readings[-1]["entropy_nats"], readings[-1]["committed_logprob_nats"])
            out.append((int(token_id), position, "accepted" if i < accepted else own, *found))
    return out


def expected_passes_slowly(agrees: list[float], window: int, at: int = 0) -> tuple[float, float, float]:
    """Expected passes, drafted and accepted tokens from token `at` on, by following every outcome of every draft token.

    agrees[i]: probability that a draft gets token i + 1 right after token i; the last token is never drafted.
    """
    if at >= len(agrees):
        return 0.0, 0.0, 0.0
    length = max(min(window - 1, len(agrees) - at - 1), 0)
    passes, drafted, accepted = 1.0, float(length), 0.0
    for outcome in range(2**length):
        rights = [bool(outcome >> i & 1) for i in range(length)]
        probability = math.prod(agrees[at + i] if right else 1 - agrees[at + i] for i, right in enumerate(rights))
        if not probability:
            continue
        taken = rights.index(False) if False in rights else length
        after = expected_passes_slowly(agrees, window, at + taken + 1)
        accepted += probability * (taken + after[2])
        passes += probability * after[0]
        drafted += probability * after[1]
    return passes, drafted, accepted


def prob_same_noise_slowly(p: dict[int, float], q: dict[int, float], draws: int, seed: int = 0) -> float:
    """Share of draws in which both choose one token, with one number of Gumbel noise for each token."""
    dice = random.Random(seed)
    tokens = sorted({*p, *q})
    same = 0
    for _ in range(draws):
        noise = {token: -math.log(-math.log(dice.random())) for token in tokens}
        first, second = (
            max(side, key=lambda token, side=side: math.log(side[token]) + noise[token])
            for side in ({t: x for t, x in one.items() if x > 0} for one in (p, q))
        )
        same += first == second
    return same / draws


def reasoning_slowly(texts: list[str], num_prompt_tokens: int, begin: str, end: str) -> list[bool]:
    """Of each token, whether all its characters are reasoning: one walk over the text, character by character. Tokens
    without text count as outside."""
    text = "".join(texts)
    generated = len("".join(texts[:num_prompt_tokens]))
    labels, inside, i = [], False, 0
    while i < len(text):
        if i == generated and not inside:
            ends, begins = text.find(end, i), text.find(begin, i)
            if ends >= 0 and not 0 <= begins < ends:
                inside = True  # an end without a beginning: all that was generated before it
        tag = end if inside else begin
        if text.startswith(tag, i):
            labels += [False] * len(tag)
            inside, i = not inside, i + len(tag)
        else:
            labels.append(inside)
            i += 1
    out, at = [], 0
    for token in texts:
        own = labels[at : at + len(token)]
        out.append(bool(own) and all(own))
        at += len(token)
    return out
