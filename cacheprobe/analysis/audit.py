"""Checks the tables of a trace (rows, events, ledger, lens readings) against each other and against the committed
tokens. Runs no model.

Tokens, verdicts and passes determine most of the tables' content: role and status of a row, the tokens that a verify
pass was fed, the ledger's changes, and the token that a reading is compared with. This module derives that content
again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsInt, TypeAlias

import pandas as pd

from cacheprobe.analysis.audit_tables import hypothesis_faults, ledger_faults, numbering_faults
from cacheprobe.analysis.comparison import first_difference
from cacheprobe.core.records import DISCARDED_DRAFT, Request
from cacheprobe.core.tokens import visible
from cacheprobe.trace.tables.token_history import token_history
from cacheprobe.trace.trace import Trace

Line: TypeAlias = Any
"""A line of a table, from DataFrame.itertuples()."""
Cell: TypeAlias = Any
"""A number of a table, or null."""


@dataclass(frozen=True)
class Audit:
    """Holds the result of `audit`: the number of checked lines of each table, and one sentence for each fault found."""

    lines: dict[str, int]
    faults: tuple[str, ...]


@dataclass
class History:
    """Holds one request's text, roles of positions, verdicts and drafts, derived again from its events for `audit`."""

    prompt: list[int]
    is_verified: bool
    """Whether the request's tokens are verified, so that its decode passes only make drafts."""
    by_equality: bool
    """Whether a draft token is accepted if it equals the verifier's choice; otherwise rejection sampling decides."""
    text: list[int] = field(default_factory=list)
    """Prompt and committed tokens so far."""
    roles: list[str] = field(default_factory=list)
    """Role of every position of `text`."""
    verdicts: dict[int, tuple[int, int, list[int]]] = field(default_factory=dict)
    """By step: position of the first draft token, number of accepted draft tokens, and the tokens that the pass was
    fed."""
    lengths: list[tuple[int, int]] = field(default_factory=list)
    """(step, length of `text` after it)."""
    drafts: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    """By position: (step that drafted a token for it, outcome of that token)."""
    preempted_after: list[int] = field(default_factory=list)
    """Steps after which the request lost its cache row, because it was preempted."""

    def length_before(self, step: int) -> int:
        """Returns the number of tokens, prompt included, that the request had before a step."""
        return max((length for at, length in self.lengths if at < step), default=len(self.prompt))

    def expected_status(self, step: int, phase: str, position: int) -> tuple[str, str]:
        """Returns the (role, status) that a row must have, derived from the request's events.

        step, phase, position: of the pass and token of the row.
        """
        if step in self.verdicts and phase == "verify":
            start, accepted, _ = self.verdicts[step]
            is_kept, status = position < start + accepted, "committed"
        elif phase == "decode" and self.is_verified:
            is_kept, status = position < self.length_before(step), "superseded"
            if not is_kept:  # the row was fed the newest draft token of its position
                newest = max(
                    ((born, outcome) for born, outcome in self.drafts.get(position, ()) if born < step), default=(0, "")
                )
                if newest[1] not in ("accepted", "rolled_back"):
                    return "given_up", "given_up"
                is_kept = newest[1] == "accepted"
        else:
            is_kept, status = True, "committed"
        if not is_kept:
            return "rolled_back", "rolled_back"
        return (self.roles[position] if position < len(self.roles) else "none", status)


def audit(trace: Trace, texts: "Callable[[Sequence[int]], list[str]] | None" = None) -> Audit:
    """Checks a trace's tables of rows, events, ledger and lens readings against each other and against the committed
    tokens. Returns an Audit with the faults.

    texts: a function from a list of token ids to their texts; without it, token texts are not checked.
    """
    faults: list[str] = []
    histories: dict[int, History] = {}
    for request in trace.requests:
        events = trace.event_table[trace.event_table.request_id == request.request_id]
        history = histories[request.request_id] = _history(trace, request, events)
        checks = (
            ("events", _event_faults(trace, request, events, history)),  # first: this fills the history
            ("rows", _row_faults(trace, request, history)),
            ("ledger", ledger_faults(trace, request, history.verdicts)),
        )
        faults += [f"{table}: request {request.request_id} {fault}" for table, found in checks for fault in found]
    faults += (f"events: {fault}" for fault in _step_faults(trace))
    faults += (f"rows: {fault}" for fault in numbering_faults(trace))
    full = {r: [*trace.requests[r].prompt_token_ids, *trace.tokens[r]] for r in histories}
    faults += (f"hypotheses: {fault}" for fault in hypothesis_faults(trace, full))
    if texts is not None:
        faults += _text_faults(trace, texts)
    tables = {
        "rows": trace.row_table, "events": trace.event_table, "ledger": trace.ledger_table,
        "hypotheses": trace.hypothesis_table,
    }  # fmt: skip
    return Audit({name: len(table) for name, table in tables.items() if table is not None}, tuple(faults))


def _history(trace: Trace, request: Request, events: pd.DataFrame) -> History:
    """Returns the History of one request with its prompt, drafts and preemptions; `_event_faults` fills in the rest."""
    prompt = list(request.prompt_token_ids)
    is_all = trace.meta["drafter"] is not None or trace.meta["kind"] == "reference"
    by_equality = request.is_deterministic or trace.meta["config"].get("acceptance", "equality") == "equality"
    is_verified = is_all or request.is_deterministic
    if trace.meta["drafter"] is None and trace.meta["config"].get("determinism") == "invariant":
        # without a drafter, decode passes commit; the reference to a drafted run has verify passes
        is_verified = trace.meta["kind"] == "reference" and bool((events.phase == "verify").any())
    history = History(prompt, is_verified, by_equality)
    history.text, history.roles = list(prompt), ["prompt"] * len(prompt)
    drafts = token_history(events).fillna({"outcome": ""}).query("outcome != 'committed'")  # null: nobody decided
    for draft in drafts.itertuples():
        history.drafts.setdefault(len(prompt) + draft.place, []).append((draft.born, draft.outcome))
    history.preempted_after = [step for number, step in trace.meta["preemptions"] if number == request.request_id]
    return history


def _event_faults(trace: Trace, request: Request, events: pd.DataFrame, history: History) -> Iterator[str]:
    """Replays one request's events, and yields an error text for each contradiction. Adds text, roles and verdicts to
    `history`."""
    proposals: list[int] = []
    last_step = -1
    has_logprobs = "log-probabilities" not in trace.missing
    finish = trace.meta["finish"][str(request.request_id)]
    for event in events.itertuples():
        label, committed = f"step {event.step}:", _ints(event.committed_token_ids)
        if event.step <= last_step:
            yield f"{label} comes after step {last_step}"
        if any(last_step <= lost < event.step for lost in history.preempted_after):
            proposals = []
        last_step = event.step
        if has_logprobs and len(event.committed_logprobs_nats) != len(committed):
            given = len(event.committed_logprobs_nats)
            yield f"{label} {given} log-probabilities for {len(committed)} committed tokens"
        if has_logprobs and any(not x <= 0 for x in event.committed_logprobs_nats):
            yield f"{label} a log-probability of a committed token is above 0 or no number"
        proposals += _ints(event.proposed_token_ids)
        if pd.isna(event.draft_start):
            faults = [_null_fault(event, name) for name in ("num_accepted", "num_rolled_back", "recovered_token_id",
                                                          "bonus_token_id", "finish")]  # fmt: skip
            yield from (f"{label} {fault}" for fault in faults if fault)
            if committed and event.phase != "prefill" and history.is_verified:
                yield f"{label} tokens of a verified request are committed without a verdict"
            history.roles += ["committed"] * len(committed)
        else:
            yield from (f"{label} {fault}" for fault in _verdict_faults(event, history, proposals, committed, finish))
            proposals = []
        history.text += committed
        history.lengths.append((int(event.step), len(history.text)))
    text = [*history.prompt, *trace.tokens[request.request_id]]
    if history.text != text:
        at = first_difference(history.text, text) or 0
        ours, theirs = history.text[at : at + 1], text[at : at + 1]
        yield f"position {at}: the events commit {ours}, the request's tokens are {theirs}"
    limit = request.sampling.max_new_tokens if request.sampling else None
    if finish == "length" and limit is not None and limit != len(trace.tokens[request.request_id]):
        yield f"ended by length after {len(trace.tokens[request.request_id])} tokens, its limit is {limit}"


def _verdict_faults(
    event: Line, history: History, proposals: list[int], committed: list[int], finish: str
) -> Iterator[str]:
    """Yields an error text for each contradiction in one verdict. Adds the verdict and the roles of its tokens to
    `history`."""
    draft, targets = _ints(event.draft_token_ids), _ints(event.target_token_ids)
    start, length = int(event.draft_start), len(history.text)
    accepted = -1 if pd.isna(event.num_accepted) else int(event.num_accepted)
    matching = next((i for i, (a, b) in enumerate(zip(draft, targets, strict=False)) if a != b), len(draft))
    if event.phase != "verify" or not history.is_verified:
        yield f"has a verdict in a {event.phase} pass"
    if start != length:
        yield f"the draft starts at position {start}, the committed text ends at {length}"
    if draft not in (proposals, []):  # a pass that failed drops the draft
        yield f"the draft is {draft}, proposed were {proposals}"
    if len(targets) not in (len(draft), len(draft) + 1) or not targets:
        yield f"{len(targets)} target tokens for {len(draft)} draft tokens"
    if accepted != matching if history.by_equality else not 0 <= accepted <= len(draft):
        yield f"num_accepted is {accepted}, draft and target tokens agree in {matching}"
    if _whole(event.num_rolled_back) != len(draft) - accepted:
        yield f"num_rolled_back is {_whole(event.num_rolled_back)} for {len(draft)} draft tokens, {accepted} accepted"
    wanted = [*draft[:accepted], *targets[accepted : accepted + 1]] if accepted >= 0 else []
    if committed != wanted[: len(committed)] or not committed:
        yield f"committed {committed}, the verdict allows {wanted}"
    elif len(committed) < len(wanted) and pd.isna(event.finish):
        yield f"committed {len(committed)} of {len(wanted)} tokens, though the request did not end"
    verifier_token = committed[-1] if len(committed) > accepted else None
    is_rollback = accepted < len(draft)
    recovered, bonus = (verifier_token, None) if is_rollback else (None, verifier_token)
    for name, value in (("recovered", recovered), ("bonus", bonus)):
        recorded = _whole(getattr(event, f"{name}_token_id"))
        if recorded != value:
            yield f"{name}_token_id is {recorded}, the verdict gives {value}"
    if not pd.isna(event.finish) and event.finish != finish:
        yield f"finish is {event.finish}, the request ended by {finish}"
    roles = [*["accepted"] * max(accepted, 0), "recovered" if is_rollback else "bonus"]
    history.roles += roles[: len(committed)]
    history.verdicts[int(event.step)] = (start, accepted, [*history.text[-1:], *draft][: len(targets)])


def _row_faults(trace: Trace, request: Request, history: History) -> Iterator[str]:
    """Yields an error text for each contradiction between a request's rows and `history`, which `_event_faults` fills
    before."""
    table = trace.row_table[trace.row_table.request_id == request.request_id]
    text, prompt = history.text, len(history.prompt)
    verify_rows: dict[int, list[tuple[int, int]]] = {}
    for row in table.itertuples():
        label = f"step {row.step} position {row.position}:"
        expected = history.expected_status(row.step, row.phase, row.position)
        if (row.role, row.status) != expected:
            yield f"{label} role {row.role} and status {row.status}, the events give {expected[0]} and {expected[1]}"
        elif row.status not in DISCARDED_DRAFT and row.token_id != text[row.position]:
            yield f"{label} token {row.token_id}, the committed text has {text[row.position]}"
        if (row.position < prompt) != (row.phase == "prefill"):
            yield f"{label} a {row.phase} pass beside a prompt of {prompt} tokens"
        if row.phase == "verify":
            verify_rows.setdefault(row.step, []).append((row.position, row.token_id))
    for step, (start, _, tokens) in history.verdicts.items():
        wanted_rows = [(start - 1 + i, token) for i, token in enumerate(tokens)]
        if verify_rows.get(step, []) != wanted_rows:
            yield f"step {step}: its verify rows are {verify_rows.get(step, [])}, the verdict was on {wanted_rows}"
    if not trace.tokens[request.request_id]:
        return  # the request ended before its prompt was computed
    committed_positions = table[table.status == "committed"].position.tolist()
    first = min(committed_positions, default=0) if "cached" in trace.fingerprint else 0
    if sorted(committed_positions) != list(range(first, len(text) - 1)):
        missing = sorted(set(range(first, len(text) - 1)) - set(committed_positions))
        count = len(committed_positions)
        yield f"has {count} committed rows for positions {first} to {len(text) - 2}; missing {missing[:5]}"


def _step_faults(trace: Trace) -> Iterator[str]:
    """Yields an error text for each step whose events disagree on phase, batch shape or seconds, and for each row whose
    phase is not that of its step."""
    events = trace.event_table
    distinct_values = events.groupby("step")[["phase", "batch_rows", "batch_slots", "seconds"]].nunique()
    for step in distinct_values.index[(distinct_values > 1).any(axis=1)]:
        yield f"step {step}: its requests disagree about phase, shape or seconds"
    phases = dict(zip(events.step, events.phase, strict=True))
    rows = trace.row_table
    for row in rows[rows.phase != rows.step.map(phases).fillna(rows.phase)].itertuples():
        yield f"step {row.step}: a {phases[row.step]} pass, request {row.request_id} has a row of {row.phase} in it"


def _text_faults(trace: Trace, texts: Callable[[Sequence[int]], list[str]]) -> Iterator[str]:
    """Yields an error text for each token text in the rows or lens readings that differs from that of `texts`."""
    tables = [("rows", trace.row_table, "token_id", "token")]
    if trace.hypothesis_table is not None:
        both = (("token_id", "token"), ("committed_token_id", "committed_token"))
        tables += [("hypotheses", trace.hypothesis_table.dropna(subset=[a]), a, b) for a, b in both]
    for name, table, id_column, text_column in tables:
        distinct = table[[id_column, text_column]].drop_duplicates()
        for number, text, expected in zip(
            distinct[id_column], distinct[text_column], texts(distinct[id_column].tolist()), strict=True
        ):
            if text != visible(expected):
                wanted = visible(expected)
                yield f"{name}: {text_column} of token {number} is {text!r}, the model's tokenizer gives {wanted!r}"


def _null_fault(event: Line, name: str) -> str | None:
    """Returns an error text if the named field of an event is not null; None if it is null."""
    value = getattr(event, name)
    return None if pd.isna(value) else f"{name} is {value} where no draft was verified"


def _ints(values: Iterable[SupportsInt]) -> list[int]:
    """Returns the values as a list of int."""
    return [int(x) for x in values]


def _whole(value: Cell) -> int | None:
    """Returns a number of a table as int; None if it is null."""
    return None if pd.isna(value) else int(value)
