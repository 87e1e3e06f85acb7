"""The tables of a trace, derived again line by line from its verdicts, passes and tokens."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from cacheprobe.core.records import DISCARDED_DRAFT, PROVENANCES, Request
from cacheprobe.trace.trace import Trace


@dataclass
class History:
    """One request's text, as its events commit it."""

    is_verified: bool
    text: list[int]
    roles: list[str]
    """Of every position of `text`."""
    lost: list[int]
    """Steps after which the request lost its cache row."""
    lengths: list[tuple[int, int]] = field(default_factory=list)
    """(step, length of `text` after it)."""
    verdicts: dict[int, tuple[int, int, int, list[int]]] = field(default_factory=dict)
    """By step: position of the first draft token, numbers of accepted and committed tokens, the tokens fed."""

    def role_and_status(self, step: int, phase: str, position: int) -> tuple[str, str]:
        """What a row must have."""
        role = self.roles[position] if position < len(self.roles) else "none"
        if phase == "decode" and self.is_verified:
            if position < max(length for at, length in self.lengths if at < step):
                return role, "superseded"
            judged = min((at for at in self.verdicts if at > step), default=None)
            if judged is None or any(step <= at < judged for at in self.lost):
                return "abandoned", "abandoned"
            start, accepted, _, _ = self.verdicts[judged]
            return (role, "superseded") if position < start + accepted else ("rolled_back", "rolled_back")
        if phase == "verify" and step in self.verdicts:
            start, accepted, _, _ = self.verdicts[step]
            return (role, "committed") if position < start + accepted else ("rolled_back", "rolled_back")
        return role, "committed"


def require_right_tables(trace: Trace) -> None:
    """Fails unless rows, events, ledger and readings follow from each other. Does not know determinism="invariant"."""
    texts = {}
    for request in trace.requests:
        r = request.request_id
        rows, ledger = (table[table.request_id == r] for table in (trace.row_table, trace.ledger_table))
        events = trace.event_table[trace.event_table.request_id == r]
        history = replayed(trace, request, events)
        texts[r] = history.text
        assert history.text == [*request.prompt_token_ids, *trace.tokens[r]]
        require_right_rows(request, rows, history)
        require_right_ledger(request, rows, events, ledger, history)
    assert (trace.event_table.groupby("step")[["phase", "batch_rows", "seconds"]].nunique() <= 1).all(axis=None)
    assert trace.row_table.row.tolist() == list(range(len(trace.row_table)))
    if trace.hypothesis_table is not None:
        require_right_readings(trace, trace.hypothesis_table, texts)


def replayed(trace: Trace, request: Request, events: pd.DataFrame) -> History:
    """The request's History. Fails if one of its events does not follow from those before."""
    is_verified = trace.meta["drafter"] is not None or request.is_deterministic
    prompt = list(request.prompt_token_ids)
    lost = [step for number, step in trace.meta["preemptions"] if number == request.request_id]
    history = History(is_verified, prompt, ["prompt"] * len(prompt), lost)
    proposals, last = [], -1
    for event in events.to_dict("records"):
        step, committed = event["step"], list(event["committed_token_ids"])
        assert step > last
        kept = [] if any(last <= at < step for at in lost) else proposals
        proposals, last = [*kept, *event["proposed_token_ids"]], step
        if pd.isna(event["draft_start"]):
            assert not committed or event["phase"] == "prefill" or not is_verified
            history.roles += ["committed"] * len(committed)
        else:
            draft, targets, accepted = proposals, list(event["target_token_ids"]), int(event["num_accepted"])
            assert (event["draft_start"], list(event["draft_token_ids"])) == (len(history.text), draft)
            assert event["phase"] == "verify" and event["num_rolled_back"] == len(draft) - accepted
            if request.is_deterministic or trace.meta["config"]["acceptance"] == "equality":
                same = [a == b for a, b in zip(draft, targets, strict=False)]
                assert accepted == [*same, False].index(False)
            assert committed == [*draft[:accepted], *targets[accepted:]][: len(committed)] != []
            role = "recovered" if accepted < len(draft) else "bonus"
            for name in ("recovered", "bonus"):
                own = committed[accepted] if name == role and len(committed) > accepted else None
                assert plain(event[f"{name}_token_id"]) == own
            fed = [history.text[-1], *draft][: len(targets)]
            history.verdicts[step] = len(history.text), accepted, len(committed), fed
            history.roles += [*["accepted"] * accepted, role][: len(committed)]
            proposals = []
        history.text += committed
        history.lengths.append((step, len(history.text)))
    return history


def require_right_rows(request: Request, rows: pd.DataFrame, history: History) -> None:
    """Fails unless every row is what the events say, every verdict has its rows, and no committed row is missing."""
    for row in rows.itertuples():
        assert (row.role, row.status) == history.role_and_status(row.step, row.phase, row.position)
        assert (row.position < request.num_prompt_tokens) == (row.phase == "prefill")
        if row.status not in DISCARDED_DRAFT:
            assert row.token_id == history.text[row.position]
    for step, (start, _, _, fed) in history.verdicts.items():
        own = rows[(rows.step == step) & (rows.phase == "verify")]
        assert list(zip(own.position, own.token_id, strict=True)) == list(enumerate(fed, start - 1))
    if history.lengths:
        committed = sorted(rows[rows.status == "committed"].position)
        assert committed == list(range(request.num_cached, len(history.text) - 1))


def require_right_ledger(
    request: Request, rows: pd.DataFrame, events: pd.DataFrame, ledger: pd.DataFrame, history: History
) -> None:
    """Fails unless the cache's changes are those of the passes. After a preemption, and with cached keys and values,
    passes without rows write slots, too."""
    length, found = 0, Counter[tuple]()
    for change in ledger.itertuples():
        assert change.provenance in PROVENANCES and 0 <= change.start < change.end
        assert (change.end == length) if change.provenance == "free" else (change.start <= length)
        assert change.provenance != "verified" or change.step not in history.verdicts or change.start == length
        length = change.start if change.provenance == "free" else max(length, change.end)
        found[change.step, change.start, change.end, change.provenance] += change.provenance != "free"
    wanted = Counter[tuple]()
    read_at = events[events.phase == "prefill"].step
    prefill = rows[rows.phase == "prefill"]
    own = prefill[prefill.step.isin(read_at)]
    for step, positions in own.groupby("step").position:
        wanted[step, positions.min(), positions.max() + 1, "prefill"] += 1
    if own.empty and len(read_at):  # copied from a request with the same prompt
        wanted[read_at.iloc[0], 0, request.num_prompt_tokens, "prefill"] += 1
    for step, (start, _, num_committed, _) in history.verdicts.items():
        wanted[step, start - 1, start - 1 + num_committed, "verified"] += 1
    for row in rows[(rows.phase != "prefill") & ~rows.step.isin(list(history.verdicts))].itertuples():
        kind = "decoded" if row.status == "committed" else "provisional"
        wanted[row.step, row.position, row.position + 1, kind] += 1
    if not request.num_cached:
        assert not wanted - found
        assert all(step > min(history.lost, default=step) for step, *_ in found - wanted)


def require_right_readings(trace: Trace, table: pd.DataFrame, texts: dict[int, list[int]]) -> None:
    """Fails unless each reading says what its row and the text say, and each row that is read has one for each layer
    that it ran."""
    rows, capture = trace.row_table.set_index("row"), trace.meta["capture"]
    for line in table.itertuples():
        row, text = rows.loc[line.row], texts[line.request_id]
        for name in ("request_id", "step", "phase", "role", "status", "position"):
            assert getattr(line, name) == row[name]
        following = text[line.position + 1] if line.position + 1 < len(text) else None
        assert plain(line.committed_token_id) == following
        assert plain(line.agrees) == (None if following is None else line.token_id == following)
        assert (line.token_id, line.logprob_nats) == (line.top_token_ids[0], line.top_logprob_nats[0])
    prompts = {request.request_id: request.num_prompt_tokens for request in trace.requests}
    wanted = Counter[tuple]()
    for row in trace.row_table.itertuples():
        is_read = row.position >= prompts[row.request_id] - 1 or capture["prompt_hypotheses"]
        is_read &= capture["positions"] is None or row.position in capture["positions"]
        if is_read and (capture["phases"] is None or row.phase in capture["phases"]):
            wanted.update((row.row, layer) for layer in capture["layers"] if layer < row.num_layers)
    assert Counter(zip(table.row, table.layer, strict=True)) == wanted


def plain(value: Any) -> Any:
    """The value, None if it is null."""
    return None if pd.isna(value) else value
