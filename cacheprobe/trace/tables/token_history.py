"""Lists every token that a run drafted or committed, with the steps at which it was drafted and judged."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from cacheprobe.trace.tables.schema import token_text, typed


def token_history(events: pd.DataFrame) -> pd.DataFrame:
    """Returns a DataFrame with one line for each drafted or committed token. Lines are sorted by request, then in the
    order in which the tokens were decided.

    Columns: request_id, place (0 is the first generated token), token_id; born, the step that drafted or committed the
    token; decided_step, the step of its outcome; outcome: committed (without a verdict), accepted, recovered, bonus,
    rolled_back, or abandoned. Both are null as long as there is no verdict, also if the request ended first.
    margin_nats: the gap between the two best tokens; of a verify pass, the smallest gap; null if the drafter ran no
    model.
    A draft is abandoned if its request was preempted (decided when the prompt is computed again) or a pass failed
    (decided when the request drafts again, or is verified without a draft).
    events: as in `Trace.events`.
    """
    lines: list[tuple] = []
    names = ["request_id", "step", "phase", "proposed_token_ids", "draft_token_ids", "num_accepted",
             "committed_token_ids", "margin_nats"]  # fmt: skip
    for request_id, own in events[names].sort_values("step", kind="stable").groupby("request_id", sort=True):
        place, open_drafts = 0, []
        for _, step, phase, proposed, drafted, accepted, committed, margin in own.itertuples(index=False):
            if len(proposed):
                for token in proposed:
                    open_drafts.append((request_id, place + len(open_drafts), int(token), margin, step))
                continue
            if phase == "prefill":  # after a preemption the prompt is computed again, and the old draft is lost
                lines += [(*line, step, "abandoned") for line in open_drafts]
                open_drafts = []
            if pd.isna(accepted):  # no verdict: prefill, decode, rebuilt slots, or a never verified request
                for i, token in enumerate(committed):
                    lines.append((request_id, place + i, int(token), margin, step, step, "committed"))
            else:
                count = int(accepted)
                # a draft of a failed pass was abandoned; its tokens come before those of the judged draft
                num_abandoned = len(open_drafts) - len(drafted)
                abandoned, judged = open_drafts[:num_abandoned], open_drafts[num_abandoned:]
                since = judged[0][-1] if judged else step
                lines += [(*line, since, "abandoned") for line in abandoned]
                for i, (_, _, token, nats, born) in enumerate(judged):
                    word = "accepted" if i < count else "rolled_back"
                    lines.append((request_id, place + i, token, nats, born, step, word))
                word = "recovered" if count < len(drafted) else "bonus"
                for i, token in enumerate(committed[count:], count):
                    lines.append((request_id, place + i, int(token), margin, step, step, word))
                open_drafts = []
            place += len(committed)
        lines += [(*line, None, None) for line in open_drafts]
    return typed(lines, "token history")


def standing_at(history: pd.DataFrame, step: int) -> pd.DataFrame:
    """Returns how the text stands when `step` has ended: a DataFrame with one line for each request and place (0 is the
    first generated token), and a `state`.

    state: "draft", a draft token without a verdict; "rolled_back", by this very step; "committed"; or "pending", the
    newest committed token of its request, whose keys and values are not cached yet. Tokens that were rolled back
    earlier are left out, and so are abandoned drafts.
    history: as from `token_history`.
    """
    tokens = history[history.born <= step]
    decided = (tokens.decided_step <= step).fillna(False)
    rolled_back = decided & (tokens.outcome == "rolled_back").fillna(False)
    abandoned = decided & (tokens.outcome == "abandoned").fillna(False)
    tokens = tokens[~abandoned & (~rolled_back | (tokens.decided_step == step).fillna(False))]
    decided, rolled_back = decided[tokens.index], rolled_back[tokens.index]
    state = pd.Series("draft", index=tokens.index).mask(decided, "committed").mask(rolled_back, "rolled_back")
    tokens = tokens.assign(state=state)
    # at one place, a committed token replaces a rolled-back one, and a newer token replaces an older one
    order = tokens.assign(rank=tokens.state.map({"rolled_back": 0, "draft": 1, "committed": 1}))
    last = order.sort_values(["request_id", "place", "rank", "born"], kind="stable").drop_duplicates(
        ["request_id", "place"], keep="last"
    )
    newest = last[last.state == "committed"].groupby("request_id").place.transform("max")
    is_newest = last.place == newest.reindex(last.index)
    return last.assign(state=last.state.mask(is_newest, "pending")).drop(columns="rank").reset_index(drop=True)


def tokens_with_texts(standing: pd.DataFrame, token_texts: Mapping[int, str]) -> pd.DataFrame:
    """Returns the table of `standing_at` with the column token: the text of token_id, "<id>" if it is not known."""
    texts = [token_text(token_texts, token) for token in standing.token_id.tolist()]
    return standing.assign(token=texts)


def token_texts_of(rows: pd.DataFrame, hypotheses: pd.DataFrame | None) -> pd.DataFrame:
    """Returns a DataFrame of token_id and token (text), from the texts in the rows and readings tables; for a trace
    without a tokens table."""
    parts = [rows[["token_id", "token"]]]
    if hypotheses is not None:
        committed = hypotheses[["committed_token_id", "committed_token"]].dropna()
        parts += [hypotheses[["token_id", "token"]], committed.set_axis(["token_id", "token"], axis=1)]
    table = pd.concat([typed(part, "tokens") for part in parts])
    return table.drop_duplicates("token_id", ignore_index=True)


COMMITTED = ("accepted", "recovered", "bonus", "committed")
"""Outcomes of tokens that were committed."""


class TokenOutcome(NamedTuple):
    """Holds a token that was drafted or committed at one place, the steps at which it was drafted and judged, and the
    outcome."""

    token_id: int
    born: int
    decided_step: int | None
    outcome: str | None


def outcomes_at(history: pd.DataFrame, place: int) -> list[TokenOutcome]:
    """Returns a list of TokenOutcome, in order of time: the tokens drafted or committed at one place of a request.

    history: as from `token_history`, of that request alone.  place: 0 is the first generated token.
    """
    tokens = history[history.place == place].sort_values("born", kind="stable")
    return [
        TokenOutcome(int(t.token_id), int(t.born), None if pd.isna(t.decided_step) else int(t.decided_step),
             None if pd.isna(t.outcome) else str(t.outcome))
        for t in tokens.itertuples()
    ]  # fmt: skip


def outcomes_of_row(outcomes: Sequence[TokenOutcome], step: int) -> list[TokenOutcome]:
    """Returns a list of TokenOutcome: of the tokens drafted or committed at one position, those drafted or judged in
    `step`, and the committed token.

    outcomes: as from `outcomes_at`, of the position that a row predicts.  step: the step that computed the row.
    """
    return [token for token in outcomes if step in (token.born, token.decided_step) or token.outcome in COMMITTED]
