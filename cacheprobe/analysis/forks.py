"""Returns the cached keys and values of a request, and makes new requests that continue from them."""

from dataclasses import replace
from typing import SupportsIndex

from cacheprobe.core.records import Request
from cacheprobe.kvcache.surgery import KVSnapshot
from cacheprobe.trace.trace import Trace


def kv_snapshot(trace: Trace, request_id: SupportsIndex, length: int | None = None) -> KVSnapshot:
    """Returns a KVSnapshot of a request's cached keys and values at positions 0 to length - 1, copied when the request
    ended.

    length: number of positions; None means all. The newest token is not cached.
    Committed positions are written again only when a preempted request is rebuilt, with the same bits if the request is
    verified. So the first p positions equal the cache's content when position p was new. Provenance is the ledger's:
    prefill, verified, decoded or edited.
    Raises: ValueError if the run kept no keys and values (Request.keep_kv), or if `length` exceeds their number;
    KeyError for an unknown request.
    """
    trace.committed(request_id)  # raises an error for an unknown request
    request, rows = trace.requests[int(request_id)], trace.kept_rows.get(int(request_id))
    if rows is None:
        how = "run it again" if trace.model is None else "run it"
        if request.keep_kv and (error := trace.meta["errors"].get(str(int(request_id)))):
            raise ValueError(f"request {request_id} ended with an error and left no keys and values: {error}")
        raise ValueError(
            f"the cached keys and values of request {request_id} were not kept, and no stored run has any; {how} with "
            "cp.Request(prompt, keep_kv=True)"
        )
    return rows if length is None else rows.cut(length)


def fork(trace: Trace, request_id: SupportsIndex, length: int, rows: KVSnapshot | None = None) -> Request:
    """Returns a new Request that continues another request of the trace after its first `length` positions.

    The new request starts from the other's cached keys and values, so these positions are not computed again.
    The new prompt is the other request's text up to the first token after the cached positions, and at least its
    prompt. Settings and seed are the other's, and noise is keyed by absolute position: with unchanged keys and values,
    the fork generates the same tokens, up to rounding. States have the same bits if a prefill pass has the shape of a
    verify pass (prefill_group=group and prefill_chunk=window, padded).
    Stop texts are searched only in the fork's own output.

    length: number of cached positions to use; the token at position `length` is the first one computed again.
    rows: changed keys and values to use instead, such as `cp.analysis.kv_snapshot(trace, 0, length).masked([3])`.
    Raises: ValueError if no keys and values were kept, if `rows` has another length than `length`, or if no token is
    left to generate; KeyError for an unknown request.
    """
    generated = trace.committed(request_id)
    request = trace.requests[int(request_id)]
    rows = kv_snapshot(trace, request_id, length) if rows is None else rows
    if len(rows) != length:
        raise ValueError(f"fork of request {request_id}: the rows have {len(rows)} positions, not {length}; cut() them")
    text = [*request.prompt_token_ids, *generated]
    prompt = text[: max(length + 1, request.num_prompt_tokens)]
    assert request.sampling is not None and request.sampling.max_new_tokens is not None
    left = request.sampling.max_new_tokens - (len(prompt) - request.num_prompt_tokens)
    if not left:
        raise ValueError(
            f"fork of request {request_id} at {length}: it had said all of its {request.sampling.max_new_tokens} "
            f"tokens there; fork it at {length - 1} or before"
        )
    return Request(
        prompt,
        replace(request.sampling, max_new_tokens=left),
        request.is_deterministic,
        cached=rows,
        own_fingerprint=request.is_deterministic,
    )
