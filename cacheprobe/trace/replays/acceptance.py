"""Reads from a vLLM response which of its tokens were accepted draft tokens."""

import warnings
from collections.abc import Mapping, Sequence

from cacheprobe.trace.replays.response import ReplayRefused, ids_in


def accepted_drafts(metrics: object, token_ids: "Sequence[int] | None", where: str) -> dict[int, tuple[int, ...]]:
    """Returns the accepted draft tokens of a response, by the index of their first token among the generated ones. {}
    if the response does not list them. Ids of rejected draft tokens are in no response.

    metrics: the response's field, as a server started with --per-request-spec-decode-metrics detailed fills it.
    Warns, and returns {}, if the steps give another number of tokens than were generated: vLLM does not list a step
    without a draft, so the places of the later ones are unknown. Raises: ReplayRefused for a broken field.
    Source: vLLM 0.32, "Per-Request Acceptance Metrics".
    """
    about = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    counts = about.get("per_step_accepted") if isinstance(about, Mapping) else None
    if counts is None or token_ids is None:
        return {}
    accepted = ids_in(counts, f"{where}, per_step_accepted")
    if any(count < 0 for count in accepted):
        raise ReplayRefused(f"{where}, per_step_accepted: a step accepted {min(accepted)} tokens")
    drafts, start = {}, 1  # the first token comes from the prompt's pass
    for count in accepted:
        drafts[start] = tuple(token_ids[start : start + count])
        start += count + 1
    newest = max(drafts, default=0)
    if accepted and not newest < len(token_ids) <= start:  # the last step may be cut by max_tokens or a stop
        warnings.warn(
            f"{where}: per_step_accepted gives {start} tokens, {len(token_ids)} were generated: steps without a draft "
            "are not listed; its drafts are left out",
            stacklevel=2,
        )
        return {}
    if accepted and len(token_ids) < start:
        warnings.warn(
            f"{where}: the last step of per_step_accepted accepted more tokens than were kept; if vLLM also left out a "
            "step without a draft, drafts are verified at other places than there",
            stacklevel=2,
        )
    return {start: ids for start, ids in drafts.items() if ids}
