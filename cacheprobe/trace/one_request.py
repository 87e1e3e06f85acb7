"""Defines `RequestTrace`, the part of a Trace that belongs to one request, and how a Trace is indexed."""

import operator
from dataclasses import dataclass
from typing import SupportsIndex

import pandas as pd
from torch import Tensor

from cacheprobe.core.records import Request
from cacheprobe.core.tokens import visible
from cacheprobe.trace.data import TraceData
from cacheprobe.trace.tables.hypotheses import hypotheses_of
from cacheprobe.trace.tables.rejected import rejected_of

_COLUMNS = 32
"""Most characters of the prompt, and of the generated text, in a repr."""


@dataclass(frozen=True, eq=False, repr=False)
class RequestTrace:
    """Holds one request of a Trace: `trace[2]` and each item of `for request in trace`. Its tables have the columns of
    the Trace's methods of the same names, and only the lines of this request."""

    trace: TraceData
    """The whole Trace."""
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
        return list(self.trace.tokens[self.request_id])

    @property
    def text(self) -> str:
        """Text that the request generated, without its prompt."""
        return self.trace.texts[self.request_id]

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

    def module(self, name: str, status: str | None = None) -> Tensor:
        """Returns what a captured module computed for the request's rows, [n, ...], as `Trace.module`. status: only
        rows of this status."""
        return self.trace.module(name, self.rows(status))

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


def chosen_requests(trace: TraceData, index: "SupportsIndex | slice") -> "RequestTrace | list[RequestTrace]":
    """Returns the request with this number, or the list of a slice of the requests; negative numbers count from the
    last. Raises: IndexError for a request that the trace does not have."""
    numbers = [one.request_id for one in trace.requests]
    if isinstance(index, slice):
        return [RequestTrace(trace, number) for number in numbers[index]]
    wanted = operator.index(index)
    if wanted < 0 and -wanted <= len(numbers):
        wanted = numbers[wanted]
    if wanted not in numbers:
        there = f"requests {numbers[0]} to {numbers[-1]}" if numbers else "no requests"
        raise IndexError(f"no request {wanted} in this trace; it has {there}")
    return RequestTrace(trace, wanted)
