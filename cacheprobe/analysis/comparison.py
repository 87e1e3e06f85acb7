"""Compares two runs from their tables and settings, and finds where they first differ. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import pandas as pd

from cacheprobe.core.config import CaptureConfig, EngineConfig
from cacheprobe.core.values import JsonDict

StoredRequest: TypeAlias = Mapping[str, Any]
"""A request of `StoredRun.requests`: its fields as JSON."""

_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top k",
    "top_p": "top p",
    "min_p": "min p",
    "repetition_penalty": "repetition penalty",
    "seed": "seed",
    "max_new_tokens": "most new tokens",
    "stop": "stop texts",
    "stop_token_ids": "stop tokens",
}
"""Settings of a request's sampling, in words."""

_READING = ["token_id", "logprob_nats", "entropy_nats", "rank", "committed_logprob_nats"]


@dataclass(frozen=True, slots=True)
class RequestDifference:
    """Describes how one request differs between two runs: the kind of difference (`what`), and the place of the first
    difference among the generated tokens."""

    request_id: int
    what: str
    """"equal", "tokens", "log-probabilities", "tokens equal" (equal tokens; a run recorded no log-probabilities),
    "prompt" (different prompts), or "missing" (in one run only)."""
    place: int | None = None
    """Index of the first generated token that differs, or whose log-probability differs; counted from 0."""


def compare_requests(
    ours: Sequence[StoredRequest], theirs: Sequence[StoredRequest], our_events: pd.DataFrame,
    their_events: pd.DataFrame,
) -> list[RequestDifference]:  # fmt: skip
    """Returns a list with one RequestDifference for each request number: how the request differs between two runs.

    Tokens are compared only if the prompts are equal; log-probabilities, bit for bit, only if the tokens are equal and
    both runs recorded them.
    ours, theirs: as `StoredRun.requests`.  our_events, their_events: as `Trace.events`.
    """
    differences = []
    logprobs = [_logprobs(events) for events in (our_events, their_events)]
    for request_id in range(max(len(ours), len(theirs))):
        if request_id >= min(len(ours), len(theirs)):
            differences.append(RequestDifference(request_id, "missing"))
            continue
        a, b = ours[request_id], theirs[request_id]
        if a["prompt_token_ids"] != b["prompt_token_ids"]:
            differences.append(RequestDifference(request_id, "prompt"))
        elif (index := first_difference(a["committed_token_ids"], b["committed_token_ids"])) is not None:
            differences.append(RequestDifference(request_id, "tokens", index))
        else:
            pair = [by_request.get(request_id, []) for by_request in logprobs]
            if a["committed_token_ids"] and not all(pair):
                differences.append(RequestDifference(request_id, "tokens equal"))
                continue
            index = first_difference(*pair)
            differences.append(RequestDifference(request_id, "equal" if index is None else "log-probabilities", index))
    return differences


def first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int | None:
    """Returns the index of the first item in which two sequences differ; None if they are equal.

    An item that only the longer sequence has counts as a difference.
    """
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def first_reading_difference(ours: pd.DataFrame, theirs: pd.DataFrame) -> tuple[int, int] | None:
    """Returns (position, layer) of the first lens reading whose numbers differ between two requests; None if all are
    equal.

    ours, theirs: readings of one request each, as in `Trace.hypotheses`. All readings of `ours` with status "committed"
    are compared. Null equals null, because the last reading has no committed token to rank.
    """
    keys = ["position", "layer"]
    a, b = (table[table.status == "committed"].set_index(keys)[_READING].sort_index() for table in (ours, theirs))
    b = b.reindex(a.index)
    same = (a == b).fillna(False).to_numpy(dtype=bool) | (a.isna() & b.isna()).to_numpy(dtype=bool)
    if same.all():
        return None
    position, layer = a.index[int((~same.all(axis=1)).argmax())]
    return int(position), int(layer)


def _logprobs(events: pd.DataFrame) -> dict[int, list[float]]:
    """Returns a dict request id -> list of the log-probabilities of the request's committed tokens, in order."""
    by_request: dict[int, list[float]] = {}
    for request_id, nats in zip(events.request_id, events.committed_logprobs_nats, strict=True):
        by_request.setdefault(int(request_id), []).extend(float(x) for x in nats)
    return by_request


_AT_FIRST = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "stop": []}
"""Sampling settings that the first format did not store, because there was one choice."""
_CAPTURED = (
    "layers",
    "positions",
    "phases",
    "statuses",
    "every",
    "keep",
    "dtype",
    "prompt_hypotheses",
    "top_k",
    "dictionary",
    "top_features",
    "include_special",
)
"""Settings of `CaptureConfig` beside sites and heads."""
_MOST_VALUES = 8
"""Most values of one setting that are listed."""


def setting_differences(
    ours: JsonDict, theirs: JsonDict, our_requests: Sequence[JsonDict], their_requests: Sequence[JsonDict]
) -> list[tuple[str, str, str]]:
    """Returns (setting in words, value of ours, value of theirs) for each setting that a user chooses and in which two
    runs differ. The other fields of the schedule fingerprint are in `fingerprint_differences`.

    ours, theirs: metadata of the runs.  our_requests, their_requests: as `StoredRun.requests`.
    """
    pair = _in_words(ours, our_requests), _in_words(theirs, their_requests)
    return [(name, *_listed(mine, pair[1][name])) for name, mine in pair[0].items() if mine != pair[1][name]]


def lens_of(meta: JsonDict) -> object:
    """Returns what the metadata of a run says of its lens: its settings, or its name alone."""
    return meta.get("fingerprint", {}).get("lens") or meta.get("lens")


def _in_words(meta: JsonDict, requests: Sequence[JsonDict]) -> dict[str, str]:
    """Returns each setting by its name in words. What an older run did not record has the default."""
    fingerprint, capture = meta.get("fingerprint", {}), {**CaptureConfig().record(), **meta.get("capture", {})}
    defaults = {**asdict(EngineConfig()), "pad_prefill": True}  # the first format padded
    if meta.get("kind") == "import":  # another engine's settings are not recorded
        defaults = dict.fromkeys(defaults, "not known")
    config = {**defaults, **meta.get("config", {})}
    changes = [", ".join(f"{k} {v}" for k, v in one.items()) for one in meta.get("interventions") or ()]
    sampled = [{**dict.fromkeys(_SAMPLING), **_AT_FIRST, **(request.get("sampling") or {})} for request in requests]
    return {
        "model": str(fingerprint.get("model")),
        "weights": str(fingerprint.get("weights_sha256")),
        "adapter": str(fingerprint.get("adapter") or "none"),
        "dtype": str(fingerprint.get("dtype")),
        "device": str(fingerprint.get("device")),
        "drafter": str(meta.get("drafter") or "none"),
        "interventions": "; ".join(changes) or "none",
        "lens": str(lens_of(meta)),
        "requests": str(len(requests)),
        "deterministic requests": str(sum(bool(request.get("is_deterministic")) for request in requests)),
        **{words: _values([_plain(of[name]) for of in sampled]) for name, words in _SAMPLING.items()},
        **{name.replace("_", " "): _values([_plain(value)]) for name, value in config.items()},
        "captured": ", ".join([*(capture["sites"] or ""), *capture["heads"]]) or "no states",
        **{f"captured {name}": _values([_plain(capture[name])]) for name in _CAPTURED},
    }


def _plain(value: object) -> object:
    """Returns a tuple as a list, as a file holds it."""
    return list(value) if isinstance(value, tuple) else value


def _values(values: Sequence[object]) -> str:
    """Returns the value that all requests have, or the different ones in their order."""
    texts = ["not set" if value is None else str(value) for value in values]
    return texts[0] if len({*texts}) == 1 else ", ".join(texts)


def _listed(ours: str, theirs: str) -> tuple[str, str]:
    """Returns two values of a setting; of long lists the part from the first entry that differs."""
    pair = ours.split(", "), theirs.split(", ")
    start = next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), 0)
    if max(map(len, pair)) <= _MOST_VALUES:
        return ours, theirs
    shown = [", ".join(texts[start : start + _MOST_VALUES]) for texts in pair]
    return f"from request {start} on: {shown[0]}, …", f"from request {start} on: {shown[1]}, …"
