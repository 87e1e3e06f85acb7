"""Defines `RequestTrace`, the part of a Trace that belongs to one request, and how a Trace is indexed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

import pandas as pd
from torch import Tensor

from cacheprobe.core.records import Request
from cacheprobe.core.tokens import visible
from cacheprobe.trace.tables.hypotheses import hypotheses_of
from cacheprobe.trace.tables.rejected import rejected_of

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

_COLUMNS = 32
"""Most characters of the prompt, and of the generated text, in a repr."""


@dataclass(frozen=True, eq=False, repr=False)
class RequestTrace:
    """Holds one request of a Trace: `trace[2]` and each item of `for request in trace`. Its tables have the columns of
    the Trace's methods of the same names, and only the lines of this request."""

    trace: "Trace"
    request_id: int

    @property
    def request(self) -> Request:
        """The Request that was run, with its sampling settings and token ids."""
        return next(one for one in self.trace.requests if one.request_id == self.request_id)

    @property
    def prompt(self) -> "str | tuple[int, ...]":
        """Text of the prompt; token ids if it was given as such."""
        prompt = self.request.prompt
        return prompt if isinstance(prompt, str) else tuple(prompt)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return tuple(self.request.prompt_token_ids)

    @property
    def tokens(self) -> list[int]:
        """Token ids that the request generated, without its prompt."""
        return self.trace.committed(self.request_id)

    @property
    def text(self) -> str:
        """Text that the request generated, without its prompt."""
        return self.trace.text(self.request_id)

    @property
    def finish(self) -> str | None:
        """Why the request ended, such as "length" or "stop"; None if it did not end yet."""
        return self.trace.meta.get("finish", {}).get(str(self.request_id))

    def rows(self, status: str | None = None) -> pd.DataFrame:
        """Returns the request's lines of `Trace.rows`. status: only rows of this status."""
        return self.trace.rows(self.request_id, status)

    def events(self) -> pd.DataFrame:
        """Returns the request's lines of `Trace.events`."""
        return self.trace.lookup["events"].lines_of(self.trace.event_table, self.request_id)

    def hypotheses(self, include_rolled_back: bool = False) -> pd.DataFrame:
        """Returns the request's lines of `Trace.hypotheses`. Raises: as there."""
        return hypotheses_of(self.trace, include_rolled_back, request_id=self.request_id)

    def rejected(self) -> pd.DataFrame:
        """Returns the request's lines of `Trace.rejected`."""
        return rejected_of(self.trace, self.request_id)

    def logprobs(self) -> list[float]:
        """Returns the log-probability, in nats, of each generated token."""
        return self.trace.logprobs(self.request_id)

    def ledger(self, step: SupportsIndex | None = None) -> pd.DataFrame:
        """Returns the cached slots of the request after `step`, as `Trace.ledger`."""
        return self.trace.ledger(self.request_id, step)

    def states(self, site: str, layer: SupportsIndex) -> Tensor:
        """Returns the states [n, m] of the request's n committed rows, as `Trace.states`."""
        return self.trace.states(site, layer, self.request_id)

    def __repr__(self) -> str:
        prompt = self.prompt
        begin = _cut(prompt) if isinstance(prompt, str) else f"{len(prompt)} token ids"
        rejected = int((self.events().num_rolled_back > 0).sum())
        drafts = f", {rejected} rejected draft{'s' * (rejected != 1)}" if rejected else ""
        end = f", ended by {self.finish}" if self.finish else ""
        return f"RequestTrace({self.request_id}: {begin} → {_cut(self.text)}, {len(self.tokens)} tokens{drafts}{end})"


def _cut(text: str) -> str:
    """Returns a text between quotes on one line, cut to a few words."""
    shown = visible(text).replace("␣", " ")
    return f"'{shown if len(shown) <= _COLUMNS else shown[: _COLUMNS - 1] + '…'}'"


def chosen_requests(trace: "Trace", index: "SupportsIndex | slice") -> "RequestTrace | list[RequestTrace]":
    """Returns the request with this number, or the list of a slice of the requests; negative numbers count from the
    last. Raises: IndexError for a request that the trace does not have."""
    numbers = [one.request_id for one in trace.requests]
    if isinstance(index, slice):
        return [RequestTrace(trace, number) for number in numbers[index]]
    wanted = index.__index__()
    if wanted < 0 and -wanted <= len(numbers):
        wanted = numbers[wanted]
    if wanted not in numbers:
        there = f"requests {numbers[0]} to {numbers[-1]}" if numbers else "no requests"
        raise IndexError(f"no request {wanted} in this trace; it has {there}")
    return RequestTrace(trace, wanted)
