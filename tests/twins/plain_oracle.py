"""The oracle of D2, as plain as can be: it shares the model's forward with the engine, and nothing else.

One request, one cache row, a loop over tokens. Sampling, acceptance and the cache's bookkeeping are its own.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.kvcache.staged import PassAttention
from cacheprobe.ops.attention import AttentionSpans, SlotSpan
from tests.twins.equivalence import sample_token_slowly


@dataclass
class Decoded:
    """What the oracle decided, and the states that it decided from."""

    token_ids: list[int] = field(default_factory=list)
    """Generated tokens."""
    logprobs_nats: list[float] = field(default_factory=list)
    states: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    """By site, layer and position: [m], of the last pass that fed the position."""
    num_accepted: int = 0
    num_rejected: int = 0


def decode_plainly(
    model: Any, prompt: list[int], fingerprint: dict[str, Any], num_new: int, temperature: float, seed: int
) -> Decoded:
    """Reads the prompt in chunks, then verifies guesses in windows until there are `num_new` tokens.

    fingerprint: gives the fixed shapes, which decide the bits. The guess for the next tokens is the newest token, again
    and again: often wrong, so that many are rejected, and what they wrote is written over.
    """
    window, group = (int(fingerprint[name]) for name in ("window", "group"))
    capacity = fingerprint["capacity"]
    if capacity == "any multiple of 64":  # the smallest one; the engine may have taken another
        capacity = -(-(len(prompt) + num_new + window) // 64) * 64
    chunk, is_padded = int(fingerprint["prefill_chunk"]), bool(fingerprint.get("pad_prefill", True))
    cache, decoded = model.new_cache(2, capacity), Decoded()
    assert cache.allocate() == 0  # row 1 stays free: it takes what placeholders write

    def run(token_ids: list[int], start: int, width: int, batch: int, is_window: bool) -> Tensor:
        """Feeds tokens from position `start` on; returns logits [t, v]."""
        fed = torch.zeros(batch, width, dtype=torch.long)
        fed[0, : len(token_ids)] = torch.tensor(token_ids)
        kept: dict[tuple[str, int], Tensor] = {}
        sites = [(site, layer) for site in "STC" for layer in range(model.n_layers)]
        spans = _spans(start, len(token_ids), capacity, batch, is_window or width <= 64)
        starts = [start, *[0] * (batch - 1)]
        attention = PassAttention(spans=spans if model.attends_by_request else None)
        with model.capturing(sites, lambda site, layer, value: kept.__setitem__((site, layer), value[0].clone())):
            out = model.forward(fed, cache, [0, *[1] * (batch - 1)], starts, attention=attention)[0, : len(token_ids)]
        for (site, layer), value in kept.items():
            for t in range(len(token_ids)):
                decoded.states[site, layer, start + t] = value[t]
        return out

    for start in range(0, len(prompt), chunk):
        some = prompt[start : start + chunk]
        logits = run(some, start, chunk if is_padded else len(some), int(fingerprint["prefill_group"]), False)
    text = list(prompt)

    def decide(row: Tensor) -> int:
        """Returns the token that the logits [v] decide for the next position."""
        return sample_token_slowly(row, temperature, seed, len(text))

    def commit(row: Tensor) -> None:
        token_id = decide(row)
        text.append(token_id)
        decoded.logprobs_nats.append(float(row.double().log_softmax(0)[token_id]))

    commit(logits[-1])
    while len(text) - len(prompt) < num_new:
        newest, left = text[-1], num_new - (len(text) - len(prompt))
        guesses = [newest] * min(window - 1, left - 1)
        logits = run([newest, *guesses], len(text) - 1, window, group, True)
        for guess, row in zip([*guesses, None], logits, strict=True):
            commit(row)
            if guess != text[-1]:
                decoded.num_rejected += guess is not None
                break
            decoded.num_accepted += 1
    decoded.token_ids = text[len(prompt) :]
    return decoded


def _spans(start: int, count: int, capacity: int, batch: int, is_by_position: bool) -> AttentionSpans:
    """Attention of position p runs over the first ceil((p + 1) / 64) * 64 slots; in a long chunk of a prompt, over
    those of its last position."""
    spans = [-(-(start + t + 1) // 64) * 64 for t in range(count)]
    if not is_by_position:
        spans = [spans[-1]] * count
    pieces = [
        SlotSpan(min(span, capacity), spans.index(span), count - spans[::-1].index(span),
              start + count - spans[::-1].index(span))
        for span in sorted(set(spans))
    ]  # fmt: skip
    return AttentionSpans((tuple(pieces), *[()] * (batch - 1)))


def states_of_trace(trace: cp.Trace, request_id: int, site: str, layer: int) -> dict[int, Tensor]:
    """By position: the states of a request's committed tokens."""
    rows = trace.rows(request_id, status="committed")
    return dict(zip(rows.position.tolist(), trace.vectors(site, layer, rows), strict=True))
