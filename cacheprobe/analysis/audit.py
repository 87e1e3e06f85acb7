"""Checks the tables of a trace (rows, events, ledger, lens readings) against each other and against the committed
tokens. Runs no model.

Tokens, verdicts and passes determine most of the tables' content, such as role and status of a row, the ledger's
changes, and the token that a reading is compared with. This module derives it again, and names what differs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import SupportsInt, cast

import numpy as np
import pandas as pd

from cacheprobe.analysis.comparison import first_difference
from cacheprobe.core.records import DISCARDED_DRAFT, PROVENANCES, Request
from cacheprobe.core.tokens import visible
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.tables.token_history import token_history
from cacheprobe.trace.trace import Trace

_COPIED = ("request_id", "step", "phase", "role", "status", "position")
"""Columns of a reading that repeat its row."""
_OF_VERDICTS = ("num_accepted", "num_rolled_back", "recovered_token_id", "bonus_token_id", "finish")
"""Columns of an event that are null if no draft was verified."""
Texts = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True)
class Audit:
    """Holds the result of `audit`: the number of checked lines of each table, and one sentence for each fault found."""

    lines: dict[str, int]
    faults: tuple[str, ...]


@dataclass
class History:
    """Holds one request's text, roles of positions, verdicts and drafts, derived again from its events for `audit`."""

    is_verified: bool
    """Whether the request's tokens are verified, so that its decode passes only make drafts."""
    by_equality: bool
    """Whether a draft token is accepted if it equals the verifier's choice; otherwise rejection sampling decides."""
    text: list[int]
    """Prompt and committed tokens so far."""
    roles: list[str]
    """Role of every position of `text`."""
    lengths: list[tuple[int, int]]
    """(step, length of `text` after it); at first that of the prompt."""
    drafts: dict[int, list[tuple[int, str]]]
    """By position: (step that drafted a token for it, outcome of that token)."""
    verdicts: dict[int, tuple[int, int, list[int]]] = field(default_factory=dict)
    """By step: position of the first draft token, number of accepted draft tokens, and the tokens that the pass was
    fed."""

    def expected_status(self, step: int, phase: str, position: int) -> tuple[str, str]:
        """Returns the (role, status) that a row must have, derived from the request's events.

        step, phase, position: of the pass and token of the row.
        """
        is_kept, status = True, "committed"
        if step in self.verdicts and phase == "verify":
            start, accepted, _ = self.verdicts[step]
            is_kept = position < start + accepted
        elif phase == "decode" and self.is_verified:
            is_kept, status = position < max(length for at, length in self.lengths if at < step), "superseded"
            if not is_kept:  # the row was fed the newest draft token of its position
                born = [one for one in self.drafts.get(position, ()) if one[0] < step]
                outcome = max(born, default=(0, ""))[1]
                if outcome not in ("accepted", "rolled_back"):
                    return "given_up", "given_up"
                is_kept = outcome == "accepted"
        if not is_kept:
            return "rolled_back", "rolled_back"
        return (self.roles[position] if position < len(self.roles) else "none", status)


def audit(trace: Trace, texts: Texts | None = None) -> Audit:
    """Checks a trace's tables of rows, events, ledger and lens readings against each other and against the committed
    tokens. Returns an Audit with the faults.

    texts: a function from a list of token ids to their texts; without it, token texts are not checked.
    """
    faults: list[str] = []
    full: dict[int, list[int]] = {}
    for request in trace.requests:
        r = request.request_id
        full[r] = [*request.prompt_token_ids, *trace.tokens[r]]
        events = trace.event_table[trace.event_table.request_id == r]
        history = _history(trace, request, events)
        checks = (
            ("events", _event_faults(trace, request, events, history)),  # first: this fills the history
            ("rows", _row_faults(trace, request, history)),
            ("ledger", _ledger_faults(trace, request, history)),
        )
        faults += [f"{table}: request {r} {fault}" for table, found in checks for fault in found]
    faults += (f"events: {fault}" for fault in _step_faults(trace))
    faults += (f"rows: {fault}" for fault in _numbering_faults(trace))
    if trace.hypothesis_table is not None:
        faults += (f"hypotheses: {fault}" for fault in _reading_faults(trace, trace.hypothesis_table, full))
    if texts is not None:
        faults += _text_faults(trace, texts)
    tables = {
        "rows": trace.row_table, "events": trace.event_table, "ledger": trace.ledger_table,
        "hypotheses": trace.hypothesis_table,
    }  # fmt: skip
    return Audit({name: len(table) for name, table in tables.items() if table is not None}, tuple(faults))


def _history(trace: Trace, request: Request, events: pd.DataFrame) -> History:
    """Returns the History of one request with its prompt and drafts; `_event_faults` fills in the rest."""
    prompt, meta = list(request.prompt_token_ids), trace.meta
    is_reference, config = meta["kind"] == "reference", meta["config"]
    is_verified = meta["drafter"] is not None or is_reference or request.is_deterministic
    if meta["drafter"] is None and config.get("determinism") == "invariant":
        # without a drafter, decode passes commit; the reference to a drafted run has verify passes
        is_verified = is_reference and bool((events.phase == "verify").any())
    by_equality = request.is_deterministic or config.get("acceptance", "equality") == "equality"
    drafts: dict[int, list[tuple[int, str]]] = {}
    for draft in token_history(events).fillna({"outcome": ""}).query("outcome != 'committed'").itertuples():
        drafts.setdefault(len(prompt) + draft.place, []).append((draft.born, draft.outcome))
    return History(is_verified, by_equality, prompt, ["prompt"] * len(prompt), [(-1, len(prompt))], drafts)


def _preemptions(trace: Trace, request: Request) -> list[int]:
    """Returns the steps after which a request lost its cache row."""
    return [step for number, step in trace.meta["preemptions"] if number == request.request_id]


def _event_faults(trace: Trace, request: Request, events: pd.DataFrame, history: History) -> Iterator[str]:
    """Replays one request's events, and yields an error text for each contradiction. Adds text, roles and verdicts to
    `history`."""
    proposals: list[int] = []
    last_step = -1
    finish = trace.meta["finish"][str(request.request_id)]
    for number, event in enumerate(events.to_dict("records")):
        label, step, committed = f"step {event['step']}:", int(event["step"]), _ints(event["committed_token_ids"])
        if number and step <= last_step:
            yield f"{label} comes after step {last_step}"
        if any(last_step <= lost < step for lost in _preemptions(trace, request)):
            proposals = []
        last_step = step
        nats = event["committed_logprobs_nats"]
        if "log-probabilities" not in trace.missing:
            if len(nats) != len(committed):
                yield f"{label} {len(nats)} log-probabilities for {len(committed)} committed tokens"
            if any(not x <= 0 for x in nats):
                yield f"{label} a log-probability of a committed token is above 0 or no number"
        proposals += _ints(event["proposed_token_ids"])
        if pd.isna(event["draft_start"]):
            yield from _differences(label, event, dict.fromkeys(_OF_VERDICTS))
            if committed and event["phase"] != "prefill" and history.is_verified:
                yield f"{label} tokens of a verified request are committed without a verdict"
            history.roles += ["committed"] * len(committed)
        else:
            yield from _verdict_faults(label, event, history, proposals, finish)
            proposals = []
        history.text += committed
        history.lengths.append((step, len(history.text)))
    tokens = trace.tokens[request.request_id]
    text = [*request.prompt_token_ids, *tokens]
    if (at := first_difference(history.text, text)) is not None:
        ours, theirs = history.text[at : at + 1], text[at : at + 1]
        yield f"position {at}: the events commit {ours}, the request's tokens are {theirs}"
    limit = request.sampling.max_new_tokens if request.sampling else None
    if finish == "length" and limit not in (None, len(tokens)):
        yield f"ended by length after {len(tokens)} tokens, its limit is {limit}"


def _verdict_faults(label: str, event: JsonDict, history: History, proposals: list[int], finish: str) -> Iterator[str]:
    """Yields an error text for each contradiction in one verdict. Adds the verdict and the roles of its tokens to
    `history`."""
    draft, targets, committed = (_ints(event[f"{name}_token_ids"]) for name in ("draft", "target", "committed"))
    accepted = -1 if pd.isna(event["num_accepted"]) else int(event["num_accepted"])
    matching = next((i for i, (a, b) in enumerate(zip(draft, targets, strict=False)) if a != b), len(draft))
    if not targets or len(targets) not in (len(draft), len(draft) + 1):
        yield f"{label} {len(targets)} target tokens for {len(draft)} draft tokens"
    wanted = [*draft[:accepted], *targets[accepted : accepted + 1]] if accepted >= 0 else []
    is_rollback, is_cut = accepted < len(draft), len(committed) < len(wanted)
    verifier_token = committed[-1] if len(committed) > max(accepted, 0) else None
    expected = {
        "phase": "verify" if history.is_verified else "that of an unverified request",
        "draft_start": len(history.text),
        "draft_token_ids": proposals if draft else [],  # a pass that failed drops the draft
        "num_accepted": matching if history.by_equality else min(max(accepted, 0), len(draft)),
        "num_rolled_back": len(draft) - accepted,
        "committed_token_ids": wanted[: max(len(committed), 1)],
        "recovered_token_id": verifier_token if is_rollback else None,
        "bonus_token_id": None if is_rollback else verifier_token,
        "finish": finish if is_cut or not pd.isna(event["finish"]) else None,
    }
    yield from _differences(label, event, expected)
    roles = [*["accepted"] * max(accepted, 0), "recovered" if is_rollback else "bonus"]
    history.verdicts[int(event["step"])] = (
        int(event["draft_start"]), accepted, [*history.text[-1:], *draft][: len(targets)],
    )  # fmt: skip
    history.roles += roles[: len(committed)]


def _row_faults(trace: Trace, request: Request, history: History) -> Iterator[str]:
    """Yields an error text for each contradiction between a request's rows and `history`, which `_event_faults` fills
    before."""
    table = trace.row_table[trace.row_table.request_id == request.request_id]
    text, prompt = history.text, len(request.prompt_token_ids)
    verify_rows: dict[int, list[tuple[int, int]]] = {}
    for row in table.to_dict("records"):
        step, phase, position = row["step"], row["phase"], row["position"]
        role, status = history.expected_status(step, phase, position)
        expected: dict[str, object] = {"role": role, "status": status}
        if status == row["status"] not in DISCARDED_DRAFT and position < len(text):
            expected["token_id"] = text[position]
        yield from _differences(f"step {step} position {position}:", row, expected)
        if (position < prompt) != (phase == "prefill"):
            yield f"step {step} position {position}: a {phase} pass beside a prompt of {prompt} tokens"
        if phase == "verify":
            verify_rows.setdefault(step, []).append((position, row["token_id"]))
    for step, (start, _, tokens) in history.verdicts.items():
        wanted_rows = [(start - 1 + i, token) for i, token in enumerate(tokens)]
        if verify_rows.get(step, []) != wanted_rows:
            yield f"step {step}: its verify rows are {verify_rows.get(step, [])}, the verdict was on {wanted_rows}"
    if not trace.tokens[request.request_id]:
        return  # the request ended before its prompt was computed
    positions = table[table.status == "committed"].position.tolist()
    first = min(positions, default=0) if "cached" in trace.fingerprint else 0
    if sorted(positions) != list(range(first, len(text) - 1)):
        missing = sorted({*range(first, len(text) - 1)} - set(positions))[:5]
        yield f"has {len(positions)} committed rows for positions {first} to {len(text) - 2}; missing {missing}"


def _ledger_faults(trace: Trace, request: Request, history: History) -> Iterator[str]:
    """Yields an error text for each fault of a request's cache changes, such as one that no pass explains, or a missing
    one.

    After the request was preempted, unexplained changes are accepted, because the passes that rebuild its cache leave
    no rows. If the request's cache was edited, or the run used a snapshot, no change counts as unexplained or missing.
    """
    changes = trace.ledger_table[trace.ledger_table.request_id == request.request_id]
    wanted = _wanted_changes(trace, request, history.verdicts)
    rebuilt_after = min(_preemptions(trace, request), default=np.inf)
    is_edited = bool((changes.provenance == "edited").any()) or "cached" in trace.fingerprint
    length = 0
    for change in changes.itertuples():
        label = f"step {change.step}: slots {change.start} to {change.end - 1} {change.provenance}:"
        if change.provenance not in PROVENANCES or not 0 <= change.start < change.end:
            yield f"{label} no such change"
        elif change.provenance == "free":
            if change.end != length:
                yield f"{label} it held {length}"
            length = change.start
            continue
        elif change.start > length:
            yield f"{label} it held {length}, so slots before them were never written"
        elif change.provenance == "verified" and change.step in history.verdicts and change.start != length:
            yield f"{label} it still held {length}"
        length = max(length, change.end)
        key = (change.step, change.start, change.end, change.provenance)
        if wanted[key]:
            wanted[key] -= 1
        elif not is_edited and change.step <= rebuilt_after:
            yield f"{label} no pass wrote them"
    for (step, start, end, provenance), count in wanted.items():
        if count and not is_edited:
            yield f"step {step}: slots {start} to {end - 1} {provenance}: the change is missing"


def _wanted_changes(
    trace: Trace, request: Request, verdicts: Mapping[int, tuple[int, int, list[int]]]
) -> Counter[tuple[int, int, int, str]]:
    """Returns a Counter of the cache changes (step, start, end, provenance) that rows and verdicts imply."""
    rows = trace.row_table[trace.row_table.request_id == request.request_id]
    events = trace.event_table[trace.event_table.request_id == request.request_id]
    changes: Counter[tuple[int, int, int, str]] = Counter()
    read_at = events[events.phase == "prefill"].step
    prefill = rows[rows.phase == "prefill"]
    own_prefill = prefill[prefill.step.isin(read_at)]
    for step, positions in own_prefill.groupby("step").position:
        changes[int(str(step)), int(positions.min()), int(positions.max()) + 1, "prefill"] += 1
    if own_prefill.empty and len(prefill) and len(read_at):  # copied from a request with the same prompt
        changes[int(read_at.iloc[0]), 0, request.num_prompt_tokens, "prefill"] += 1
    committed = {int(event.step): len(event.committed_token_ids) for event in events.itertuples()}
    for step, (start, _, _) in verdicts.items():
        changes[step, start - 1, start - 1 + committed[step], "verified"] += 1
    is_single = (rows.phase == "decode") | ((rows.phase == "verify") & ~rows.step.isin(list(verdicts)))
    for row in rows[is_single].itertuples():
        provenance = "decoded" if row.status == "committed" else "provisional"
        changes[row.step, row.position, row.position + 1, provenance] += 1
    return changes


def _step_faults(trace: Trace) -> Iterator[str]:
    """Yields an error text for each step whose events disagree on phase, batch shape or seconds, and for each row whose
    phase is not that of its step."""
    events, rows = trace.event_table, trace.row_table
    distinct_values = events.groupby("step")[["phase", "batch_rows", "batch_slots", "seconds"]].nunique()
    for step in distinct_values.index[(distinct_values > 1).any(axis=1)]:
        yield f"step {step}: its requests disagree about phase, shape or seconds"
    phases = dict(zip(events.step, events.phase, strict=True))
    for row in rows[rows.phase != rows.step.map(phases).fillna(rows.phase)].itertuples():
        yield f"step {row.step}: a {phases[row.step]} pass, request {row.request_id} has a row of {row.phase} in it"


def _numbering_faults(trace: Trace) -> Iterator[str]:
    """Yields error texts, each to follow "rows: ", on row numbers that are not 0, 1, 2, ... and on wrong values of
    state_index. Also yields one if prefill and verify passes ran different numbers of layers."""
    rows, store = trace.row_table, trace.store
    if rows.row.tolist() != list(range(len(rows))):
        yield "are not numbered from 0 without gaps: a row is missing or stands twice"
    indices = np.unique(rows.state_index[rows.state_index >= 0].to_numpy())
    num_stored = store.num_rows() if store.sites else len(indices)
    if indices.tolist() != list(range(num_stored)):
        yield f"name {len(indices)} stored vectors, there are {num_stored}: a row is missing, or a state_index is wrong"
    if rows[rows.phase != "decode"].num_layers.nunique() > 1:
        yield "of prefill and verify passes disagree about the number of layers"


def _reading_faults(trace: Trace, table: pd.DataFrame, texts: Mapping[int, Sequence[int]]) -> Iterator[str]:
    """Yields an error text for each contradiction between a lens reading and its row or the committed text, and for
    missing readings.

    texts: prompt and committed token ids, by request.
    """
    about = trace.row_table.set_index("row").reindex(table.row)
    places = zip(table.request_id, table.position, strict=True)
    following = pd.Series([texts[r][p + 1] if p + 1 < len(texts[r]) else None for r, p in places], dtype="Int64")
    is_same = pd.Series(table.token_id.to_numpy() == following.fillna(-1).to_numpy()).astype("boolean")
    expected = {
        **{name: about[name] for name in _COPIED},
        "committed_token_id": following,
        "agrees": is_same.where(following.notna()),
        "token_id": pd.Series([values[0] for values in table.top_token_ids]),
        "logprob_nats": pd.Series([values[0] for values in table.top_logprob_nats]),
        "rank": table["rank"].reset_index(drop=True).fillna(0).where(following.notna()),
    }
    for name, wanted in expected.items():
        ours, theirs = table[name].reset_index(drop=True), wanted.reset_index(drop=True)
        is_equal = (ours == theirs).fillna(False).to_numpy(dtype=bool) | (ours.isna() & theirs.isna()).to_numpy(bool)
        for line in np.flatnonzero(~is_equal).tolist():
            at = table.iloc[line]
            label = f"request {at.request_id} step {at.step} position {at.position} layer {at.layer}"
            yield f"{label}: {name} is {ours[line]}, its row, the text and the choices give {theirs[line]}"
    yield from _missing_readings(trace, table)


def _missing_readings(trace: Trace, table: pd.DataFrame) -> Iterator[str]:
    """Yields an error text for each row with another number of readings than of captured layers that ran, and one if a
    row has two readings of one layer."""
    rows, capture = trace.row_table, trace.meta["capture"]
    prompts = rows.request_id.map({r.request_id: r.num_prompt_tokens for r in trace.requests})
    is_read = (rows.position >= prompts - 1) | bool(capture["prompt_hypotheses"])
    for name in ("positions", "phases"):
        if capture[name] is not None:
            is_read &= rows[name[:-1]].isin(list(capture[name]))
    if capture.get("statuses") or capture.get("keep"):  # a verdict that a kill took away is in no table
        is_read &= rows.state_index >= 0
    is_read &= rows.position % capture.get("every", 1) == 0
    layers, counts = np.asarray(capture["layers"]), Counter(table.row.tolist())
    if table.duplicated(["row", "layer"]).any():
        yield "a reading stands twice"
    for row in rows[is_read].itertuples():
        count = int((layers < row.num_layers).sum())
        if counts[row.row] != count:
            yield f"row {row.row} has {counts[row.row]} readings, {count} layers were read"


def _text_faults(trace: Trace, texts: Texts) -> Iterator[str]:
    """Yields an error text for each token text in the rows or lens readings that differs from that of `texts`."""
    tables = [("rows", trace.row_table, "token_id", "token")]
    if trace.hypothesis_table is not None:
        both = (("token_id", "token"), ("committed_token_id", "committed_token"))
        tables += [("hypotheses", trace.hypothesis_table.dropna(subset=[a]), a, b) for a, b in both]
    for name, table, id_column, text_column in tables:
        distinct = table[[id_column, text_column]].drop_duplicates()
        ids = distinct[id_column].tolist()
        for number, text, expected in zip(ids, distinct[text_column], map(visible, texts(ids)), strict=True):
            if text != expected:
                yield f"{name}: {text_column} of token {number} is {text!r}, the model's tokenizer gives {expected!r}"


def _differences(label: str, line: Mapping[str, object], expected: Mapping[str, object]) -> Iterator[str]:
    """Yields an error text for each entry of a table's line that is not the expected one."""
    for name, value in expected.items():
        if (recorded := _plain(line[name])) != value:
            yield f"{label} {name} is {recorded}, the events give {value}"


def _plain(value: object) -> object:
    """Returns an entry of a table as a text, a number or a list; None if it is null."""
    if isinstance(value, list | tuple | np.ndarray):
        return _ints(value)
    if value is None or value is pd.NA or value != value:
        return None
    return value if isinstance(value, str) else int(cast(SupportsInt, value))


def _ints(values: Iterable[SupportsInt]) -> list[int]:
    """Returns the values as a list of int."""
    return [int(x) for x in values]
