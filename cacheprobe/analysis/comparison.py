"""Compares two runs from their tables and settings, and finds where they first differ. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TypeAlias

import pandas as pd

from cacheprobe.core.config import CaptureConfig, EngineConfig
from cacheprobe.core.tokens import visible
from cacheprobe.core.values import JsonDict

StoredRequest: TypeAlias = JsonDict
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
_CHOICES = ["top_token_ids", "top_logprob_nats"]


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
    """Returns (position, layer) of the first lens reading whose numbers, or whose further choices, differ between two
    requests; None if all are equal.

    ours, theirs: readings of one request each, as in `Trace.hypotheses`. All readings of `ours` with status "committed"
    are compared. Null equals null, because the last reading has no committed token to rank.
    """
    keys = ["position", "layer"]
    a, b = (
        table[table.status == "committed"].set_index(keys)[_READING + _CHOICES].sort_index() for table in (ours, theirs)
    )
    a, b = (table.assign(**{name: table[name].map(tuple, na_action="ignore") for name in _CHOICES}) for table in (a, b))
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
"""Sampling settings of a request that does not say them, such as one of an import."""
_CAPTURED = tuple(one.name for one in fields(CaptureConfig) if one.name not in ("sites", "heads", "modules"))
"""Settings of `CaptureConfig` beside sites, heads and modules."""
_MOST_VALUES = 8
"""Most values of one setting that are listed."""


def setting_differences(
    ours: JsonDict, theirs: JsonDict, our_requests: Sequence[JsonDict], their_requests: Sequence[JsonDict]
) -> list[tuple[str, str, str]]:
    """Returns (setting in words, value of ours, value of theirs) for each setting that a user chooses and in which two
    runs differ. The other fields of the schedule fingerprint are in `fingerprint_differences`.

    ours, theirs: metadata of the runs.  our_requests, their_requests: as `StoredRun.requests`.
    """
    pair = _settings(ours, our_requests), _settings(theirs, their_requests)
    differing = [(name, mine, pair[1][name]) for name, mine in pair[0].items() if mine != pair[1][name]]
    return [
        (name, *_listed("intervention" if name == "interventions" else "request", *both)) for name, *both in differing
    ]


def lens_of(meta: JsonDict) -> object:
    """Returns what the metadata of a run says of its lens: its settings, or its name alone."""
    return meta.get("fingerprint", {}).get("lens") or meta.get("lens")


def in_words(value: object) -> str:
    """Returns the value of a setting as a reader would write it: without brackets, quotes and names of Python."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        parts = {str(name).replace("_", " "): in_words(one) for name, one in value.items() if one is not None}
        return ", ".join(f"{name} {part.replace(', ', ' and ')}" for name, part in parts.items())
    if not isinstance(value, list | tuple):
        return str(value)
    if len(value) > 2 and isinstance(value[0], int) and list(value) == list(range(value[0], value[0] + len(value))):
        return f"{value[0]} to {value[-1]}"
    return ", ".join(in_words(one) for one in value) or "none"


def _settings(meta: JsonDict, requests: Sequence[JsonDict]) -> dict[str, tuple[str, ...]]:
    """Returns the values of each setting in words, by its name in words: one, or of requests that differ and of
    interventions one for each. What a run did not record has the default."""
    fingerprint, capture = meta.get("fingerprint", {}), {**CaptureConfig().record(), **meta.get("capture", {})}
    defaults = asdict(EngineConfig())
    if meta.get("kind") == "import":  # another engine's settings are not recorded
        defaults = dict.fromkeys(defaults, "not known")
    config = {**defaults, **meta.get("config", {})}
    changes = tuple(in_words(_chosen(one)) for one in meta.get("interventions") or ())
    sampled = [{**dict.fromkeys(_SAMPLING), **_AT_FIRST, **(request.get("sampling") or {})} for request in requests]
    sampled = [{**of, "stop": [f"“{visible(text)}”" for text in of["stop"] or ()]} for of in sampled]
    by_request = {words: tuple(in_words(of[name]) for of in sampled) for name, words in _SAMPLING.items()}
    one_value: JsonDict = {
        "model": fingerprint.get("model"),
        "weights": fingerprint.get("weights_sha256"),
        "adapter": fingerprint.get("adapter") or "none",
        "dtype": fingerprint.get("dtype"),
        "device": fingerprint.get("device"),
        "drafter": meta.get("drafter") or "none",
        "interventions": None,
        "lens": lens_of(meta),
        "requests": len(requests),
        "deterministic requests": sum(bool(request.get("is_deterministic")) for request in requests),
        **dict.fromkeys(by_request),
        **{name.replace("_", " "): value for name, value in config.items()},
        "captured": [*(capture["sites"] or ""), *capture["heads"], *capture["modules"]] or "no states",
        **{f"captured {name.replace('_', ' ')}": capture[name] for name in _CAPTURED},
    }
    return {
        **{name: (in_words(value),) for name, value in one_value.items()},
        **{name: values[:1] if len({*values}) == 1 else values for name, values in by_request.items()},
        "interventions": changes or ("none",),
    }


def _chosen(intervention: JsonDict) -> JsonDict:
    """Returns what a user chose of an intervention: not what it did, and enough of its digest to tell it apart."""
    chosen = {name: value for name, value in intervention.items() if name not in ("num_positions", "num_writes")}
    return {**chosen, "vectors_sha256": (chosen.get("vectors_sha256") or "")[:12] or None}


def _listed(what: str, ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[str, str]:
    """Returns two lists of values as text; of long ones 8 values from the first that differs on. what: what has the
    values, in the singular; all requests can have one value."""
    longest, joint = max(len(ours), len(theirs)), "; " if any(", " in value for value in (*ours, *theirs)) else ", "
    if longest <= _MOST_VALUES:
        return joint.join(ours), joint.join(theirs)
    pair = [values * longest if len(values) == 1 and what == "request" else values for values in (ours, theirs)]
    start = first_difference(*pair) or 0
    texts = []
    for values in pair:
        shown = [*values[start : start + _MOST_VALUES], *["…"] * (len(values) > start + _MOST_VALUES)]
        is_one = len({*values}) == 1 and what == "request"
        texts.append(f"{values[0]} for each" if is_one else f"from {what} {start} on: {joint.join(shown) or 'none'}")
    return texts[0], texts[1]
