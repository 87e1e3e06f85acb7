"""Defines Response, one text that another program generated, and the error for what cannot be one."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cacheprobe.core.values import whole_number

_HIGHEST_NATS = 1e-3
"""A log-probability above this is none: programs that sum in 16 bits give values slightly above 0."""


class ReplayRefused(ValueError):
    """Raised for a response that does not say which tokens were generated. Says what is missing and how to ask for
    it."""


@dataclass(frozen=True)
class Response:
    """Holds one generated text: its tokens or its characters, and what else the other program said."""

    where: str
    """Names the response in errors."""
    token_ids: tuple[int, ...] | None
    """Generated tokens; None if only the text is known."""
    text: str = ""
    prompt: "str | tuple[int, ...] | None" = None
    """Text or token ids of the prompt; None if the response does not hold them."""
    logprob_nats: tuple[float, ...] | None = None
    """Log-probability of each generated token; None if not given."""
    token_texts: tuple[str, ...] | None = None
    """Text of each generated token, where log-probabilities come with texts instead of token ids."""
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By the index of the first draft token among the generated tokens: the draft's token ids."""

    def __post_init__(self) -> None:
        if (self.token_ids is not None and not self.token_ids) or (self.token_ids is None and not self.text):
            raise ReplayRefused(f"{self.where} generated nothing; leave it out")
        nats, count = self.logprob_nats, len(self.token_ids or self.token_texts or ())
        if nats is None:
            return
        if len(nats) != count:
            raise ReplayRefused(f"{self.where} holds {count} tokens and {len(nats)} log-probabilities")
        for index, value in enumerate(nats):
            if not math.isfinite(value) or value > _HIGHEST_NATS:
                raise ReplayRefused(
                    f"{self.where}: token {index} has the log-probability {value}; expected a finite number, 0 or below"
                )


def ids_in(values: object, what: str) -> tuple[int, ...]:
    """Returns token ids as whole numbers. Raises: ReplayRefused, with `what`, for anything else."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ReplayRefused(f"{what} must be a list of token ids, got {values!r:.60}")
    try:
        return tuple(whole_number("a token id", value) for value in values)
    except (TypeError, ValueError) as error:
        raise ReplayRefused(f"{what}: {error}") from error


def nats_in(values: object, what: str) -> tuple[float, ...]:
    """Returns log-probabilities as floats. Raises: ReplayRefused, with `what`, for anything else."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ReplayRefused(f"{what} must be a list of numbers, got {values!r:.60}")
    listed = list(values)
    for index, value in enumerate(listed):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ReplayRefused(f"{what}: entry {index} is {value!r:.40}, no number; with echo it is the prompt's")
    try:
        return tuple(float(value) for value in listed)
    except OverflowError as error:
        raise ReplayRefused(f"{what}: {error}") from error


def drafts_in(drafts: object, what: str) -> dict[int, tuple[int, ...]]:
    """Returns drafts by the index of their first token. drafts: pairs (start, token ids), or dicts with these keys.

    Raises: ReplayRefused, with `what`, for anything else.
    """
    found: dict[int, tuple[int, ...]] = {}
    if isinstance(drafts, str | bytes | Mapping) or not isinstance(drafts, Iterable):
        raise ReplayRefused(f"{what} must be a list of drafts, each with start and token_ids, got {drafts!r:.60}")
    for one in drafts:
        if isinstance(one, Mapping):
            one = (one.get("start"), one.get("token_ids"))
        if not isinstance(one, Sequence) or isinstance(one, str) or len(one) != 2:
            raise ReplayRefused(f"{what}: a draft needs start and token_ids, got {one!r:.60}")
        (start,), token_ids = ids_in([one[0]], f"{what}, start"), ids_in(one[1], f"{what}, token_ids")
        if start < 1:
            raise ReplayRefused(
                f"{what}: a draft starts at token {start}; the first token comes from the prompt's pass, so 1 or later"
            )
        if start in found:
            raise ReplayRefused(f"{what}: two drafts start at token {start}")
        found[start] = token_ids
    return found


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
