"""On from the middle of a generation: the cache rows that a request left behind, and requests that begin there."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, SupportsIndex

from cacheprobe.core.records import Request
from cacheprobe.kvcache.surgery import KVSnapshot
from cacheprobe.trace.trace import Trace


def cache_rows(trace: Trace, request_id: SupportsIndex, length: int | None = None) -> KVSnapshot:
    """Keys and values of the request's first `length` positions, as they stood when it ended; None for all.

    A committed row is never written again, so the first p of them are what the cache held when position p was new. The
    newest token has no row. Provenance is the ledger's: prefill, verified, decoded or edited.
    Raises: ValueError where they were not kept, or for a length that they do not have.
    """
    request = _request(trace, request_id)
    rows = trace.kept_rows.get(int(request_id))
    if rows is None:
        how = "run it again" if trace.model is None else "run it"
        if request.keep_rows and (error := trace.meta["errors"].get(str(int(request_id)))):
            raise ValueError(f"request {request_id} ended with an error and left no cache rows: {error}")
        raise ValueError(
            f"the cache rows of request {request_id} were not kept, and no stored run has any; {how} with "
            "cp.Request(prompt, keep_rows=True)"
        )
    return rows if length is None else rows.cut(length)


def fork(trace: Trace, request_id: SupportsIndex, length: int, rows: KVSnapshot | None = None) -> Request:
    """A request that goes on from cache rows of another one, with the tokens that are left of it.

    Its prompt is the other's text up to the first token behind the rows, at least the other's prompt; settings and seed
    are the other's, and noise is keyed by absolute position: from unchanged rows it says what the other said. The
    states are the same bits where a prefill pass has the shape of a verify pass (prefill_group=group and
    prefill_chunk=window, padded).
    Stop texts are looked for in what the fork itself says.

    length: how many rows, from position 0 on; the token at position `length` is the first one read again.
    rows: changed ones in the place of the kept ones, such as `cp.analysis.cache_rows(trace, 0, length).masked([3])`.
    Raises: ValueError where the rows were not kept, are of another length, or where no token is left to say.
    """
    request = _request(trace, request_id)
    rows = cache_rows(trace, request_id, length) if rows is None else rows
    if len(rows) != length:
        raise ValueError(f"fork of request {request_id}: the rows have {len(rows)} positions, not {length}; cut() them")
    text = [*request.prompt_token_ids, *trace.committed(request_id)]
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


def _request(trace: Trace, request_id: SupportsIndex) -> Request:
    requests: Mapping[Any, Request] = {request.request_id: request for request in trace.requests}
    if request_id not in requests:
        raise KeyError(f"no request {request_id} in this trace; it has 0 to {len(requests) - 1}")
    return requests[request_id]
