"""Lists all tokens of a run in one table: every committed token, and every rejected draft, with what the layers said of
it. Counts by layer how often the committed token came first."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from cacheprobe.core.tokens import visible
from cacheprobe.trace.tables.rejected import joined, rejections
from cacheprobe.trace.tables.schema import arrow_table, token_text, typed
from cacheprobe.trace.tables.token_readings import READ_COLUMNS, add_readings

if TYPE_CHECKING:
    from cacheprobe.trace.data import TraceData
    from cacheprobe.trace.stored import StoredRun
    from cacheprobe.trace.trace import Trace

_IN_PARTS = {"committed_token_id": "target", "committed_logprob_nats": "target_logprob_nats"}
"""Names of these columns in the parts of a run that is being recorded."""
_VERDICTS = np.array(["accepted", "recovered", "bonus", "committed", "rejected"], dtype=object)
_ACCEPTED, _RECOVERED, _BONUS, _COMMITTED, _REJECTED = range(5)
_NONE = -1


class RunTokens(NamedTuple):
    """Holds what an overview of a run shows: its tokens, and how often each layer had the committed token first."""

    lines: pd.DataFrame
    """As `token_table` returns them, but with a line for each rejected draft, not for each group of equal ones."""
    layers: pd.DataFrame
    """One line for each layer read and group of tokens. Columns: layer; verdict on the draft token ("accepted",
    "rejected", or "not_drafted"); rows, the number of tokens; committed_first and drafted_first, the shares of these
    for which the layer's first choice was the committed token, or the rejected draft token (null for other groups)."""


def token_table(trace: "Trace", *, grouped: bool = False) -> pd.DataFrame:
    """Returns a DataFrame with one line for each committed token of a run and one for each rejected draft token.

    Columns: request_id; step, that committed or rejected the token; position, of the token; verdict: "accepted",
    "recovered" (the verifier's token in place of a rejected one), "bonus" (after a wholly accepted draft), "committed"
    (without a verdict) or "rejected"; times, how many equal rejections the line stands for, else 1; committed_token_id
    and committed_token, null if the request ended before; drafted_token_id and drafted_token, null if none was drafted
    at this position; chain_step, the draft token's number in its draft, from 1; drafter_layer, the last layer of the
    pass that drafted it, null if that pass ran all layers or there was none; first_at_drafter_layer, whether the
    committed token is the first choice of that layer, or, for a token that was not drafted, of the layer at which most
    drafts of the run ended.
    Of the readings of the row that predicts the token: prediction_depth, the layer from which the first choice stays;
    first_at_layer, the lowest layer whose first choice is the committed token, null if there is none; disagreement, the
    largest probability that a layer gave to a first choice other than the last layer's, 0 if all agree;
    disagreement_layer and disagreement_token; entropy_nats of the last layer; margin_nats, by how much the last layer
    gives the committed token a larger log-probability than the most likely other one. All null without lens readings.
    logprob_nats: of the committed token, from the model's unprocessed logits.
    grouped: True for one line for all equal rejections of the run, as `group_rejections` makes.
    Twin: tests.twins.tokens_slowly, ==.
    """
    lines = tokens_of(trace).lines
    return group_rejections(lines) if grouped else lines


def tokens_of(trace: "TraceData") -> RunTokens:
    """Returns the `RunTokens` of a trace. If no readings were recorded, but S and the model are there, they are made
    now."""
    readings, can_read = trace.hypothesis_table, trace.reading_of_states is not None and trace.model is not None
    if readings is None and can_read and "S" in trace.store.sites:
        from cacheprobe.trace.tables.hypotheses import hypotheses_of  # imports torch

        readings = hypotheses_of(trace, False)
    if readings is not None:
        readings = readings[(readings.status == "committed") & (readings.site != "thought")]
    table = None if readings is None else arrow_table(typed(readings, "hypotheses"), "hypotheses")
    lengths = {request.request_id: request.num_prompt_tokens for request in trace.requests}
    return run_tokens(trace.event_table, trace.row_table, lengths, trace.token_texts, table)


def tokens_of_run(run: "StoredRun") -> RunTokens:
    """Returns the `RunTokens` of a stored run, also of one that is being recorded. Raises: TraceError for a damaged
    file."""
    lengths = {request["request_id"]: len(request["prompt_token_ids"]) for request in run.requests}
    readings = _stored_readings(run) if run.has_readings else None
    return run_tokens(run.events, run.rows, lengths, run.token_texts, readings)


def _stored_readings(run: "StoredRun") -> pa.Table:
    """Returns the lens readings of the rows of status "committed": request_id, position and READ_COLUMNS."""
    is_whole, rows = run.readings_kind == "hypotheses", run.rows
    names = list(READ_COLUMNS) if is_whole else [_IN_PARTS.get(name, name) for name in READ_COLUMNS]
    files = run.files.names(run.readings_kind)
    parts = [run.files.table(name, ["row", *names]) for name in files]
    table = pa.concat_tables(parts) if parts else None
    canonical = rows[rows.status == "committed"]
    if table is None or canonical.empty:
        return arrow_table(typed([], "hypotheses"), "hypotheses")
    place = np.full(int(rows.row.max()) + 1, _NONE)
    place[canonical.row.to_numpy()] = np.arange(len(canonical))
    at = place[table["row"].to_numpy()]
    table, at = table.filter(pa.array(at >= 0)).select(names).rename_columns(list(READ_COLUMNS)), at[at >= 0]
    for name in ("request_id", "position"):
        table = table.append_column(name, pa.array(canonical[name].to_numpy()[at]))
    return table


def run_tokens(
    events: pd.DataFrame,
    rows: pd.DataFrame,
    prompt_lengths: Mapping[int, int],
    texts: Mapping[int, str],
    readings: pa.Table | None,
) -> RunTokens:
    """Returns the `RunTokens` of a run.

    events, rows: as in `Trace.events` and `Trace.rows`.  prompt_lengths: tokens by request.  texts: by token id.
    readings: of the rows of status "committed", one lens and site, as Arrow table with the columns request_id, position
    and READ_COLUMNS; None if the run has none.
    """
    lines = _lines(events, prompt_lengths)
    lines["drafter_layer"], of_run = _drafter_layers(rows, lines)
    layers = typed([], "layers of tokens")
    if readings is not None and len(readings) and len(lines):
        layers = add_readings(lines, readings, of_run)
    for name in ("committed_token", "drafted_token", "disagreement_token"):
        ids = lines.get(f"{name}_id")
        lines[name] = None if ids is None else _texts_of(ids.to_numpy(), texts)
    for name in ("committed_token_id", "drafted_token_id", "chain_step", "drafter_layer", "disagreement_layer",
                 "prediction_depth", "first_at_layer"):  # fmt: skip
        if name in lines:
            lines[name] = pd.array(lines[name], "Int64")
            lines.loc[lines[name] < 0, name] = pd.NA
    return RunTokens(typed(lines, "token_table"), layers)


def _lines(events: pd.DataFrame, prompt_lengths: Mapping[int, int]) -> pd.DataFrame:
    """Returns the lines without what rows and readings add, sorted by request and position, a rejected draft before the
    committed token in its place. Missing numbers are -1; a log-probability is NaN."""
    events = events.sort_values(["request_id", "step"], kind="stable")
    request, step = events.request_id.to_numpy(), events.step.to_numpy()
    accepted = events.num_accepted.fillna(_NONE).to_numpy(dtype=np.int64)
    committed, num_committed = joined(events.committed_token_ids)
    drafted, num_drafted = joined(events.draft_token_ids)
    starts, draft_starts = np.cumsum(num_committed) - num_committed, np.cumsum(num_drafted) - num_drafted
    event = np.repeat(np.arange(len(events)), num_committed)  # of each committed token
    index = np.arange(len(committed)) - starts[event]
    verdict = np.full(len(committed), _COMMITTED)
    own = np.where(num_drafted > accepted, _RECOVERED, _BONUS)[event]
    is_judged, is_accepted = accepted[event] >= 0, index < accepted[event]
    verdict[is_judged] = np.where(is_accepted, _ACCEPTED, own)[is_judged]
    is_drafted = (verdict == _ACCEPTED) | (verdict == _RECOVERED)
    of_draft = np.full(len(committed), _NONE)
    of_draft[is_drafted] = drafted[(draft_starts[event] + index)[is_drafted]]
    # the first token of each request among all committed ones
    numbers, firsts = np.unique(request, return_index=True)
    firsts = starts[firsts] if len(numbers) else firsts
    prompts = np.array([prompt_lengths[number] for number in numbers.tolist()], dtype=np.int64)
    of_event = np.searchsorted(numbers, request)
    position = np.arange(len(committed)) - (firsts - prompts)[of_event[event]]
    kept = {
        "request_id": request[event], "step": step[event], "position": position, "verdict": verdict,
        "committed_token_id": committed, "drafted_token_id": of_draft, "logprob_nats": _logprobs(events, num_committed),
        "chain_step": np.where(is_drafted, index + 1, _NONE),
    }  # fmt: skip
    lost = rejections(events)
    of_lost = np.searchsorted(numbers, lost.request_id.to_numpy())
    place = lost.position.to_numpy() + (firsts - prompts)[of_lost]  # of the committed token there
    place = np.where(place < np.append(firsts[1:], len(committed))[of_lost], place, len(committed))
    rejected = {
        **{
            name: lost[name].to_numpy() for name in ("request_id", "step", "position", "drafted_token_id", "chain_step")
        },
        "verdict": np.full(len(lost), _REJECTED),
        "committed_token_id": np.append(committed, _NONE)[place],
        "logprob_nats": np.append(kept["logprob_nats"], np.nan)[place],
    }
    lines = pd.DataFrame({name: np.concatenate([rejected[name], kept[name]]) for name in kept})
    lines = lines.sort_values(["request_id", "position"], kind="stable", ignore_index=True)
    return lines.assign(verdict=_VERDICTS[lines.verdict.to_numpy()], times=1)


def _logprobs(events: pd.DataFrame, num_committed: np.ndarray) -> np.ndarray:
    """Returns the log-probability of each committed token; NaN for those of events that recorded none."""
    lists = events.committed_logprobs_nats
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    found = np.full(int(num_committed.sum()), np.nan)
    is_known = counts == num_committed
    if is_known.any():
        values = np.concatenate([np.empty(0), *lists[is_known & (counts > 0)]])
        found[np.repeat(is_known, num_committed)] = values
    return found


def _drafter_layers(rows: pd.DataFrame, lines: pd.DataFrame) -> tuple[np.ndarray, int]:
    """Returns (the last layer of the pass that drafted each line's draft token, -1 for none or if that pass ran all
    layers; the layer at which most of these passes ended, -1 for none)."""
    early = rows[rows.num_layers < rows.num_layers.max()]
    found = np.full(len(lines), _NONE)
    if early.empty:
        return found, _NONE
    width, depth = int(max(rows.position.max() + 1, lines.position.max())) + 1, int(rows.step.max()) + 1
    keys = (early.request_id.to_numpy() * width + early.position.to_numpy() + 1) * depth + early.step.to_numpy()
    order = np.argsort(keys)
    keys, ends = keys[order], early.num_layers.to_numpy()[order] - 1
    place = lines.request_id.to_numpy() * width + lines.position.to_numpy()
    at = np.searchsorted(keys, place * depth + lines.step.to_numpy()) - 1  # the last pass before the verdict
    is_drafted = (lines.drafted_token_id.to_numpy() >= 0) & (at >= 0) & (keys[at] // depth == place)
    found[is_drafted] = ends[at[is_drafted]]
    return found, int(np.bincount(ends).argmax())


def _texts_of(token_ids: np.ndarray, texts: Mapping[int, str]) -> np.ndarray:
    """Returns the text of each token id; None for a negative one."""
    distinct, inverse = np.unique(token_ids, return_inverse=True)
    known = [None if token < 0 else token_text(texts, token) for token in distinct.tolist()]
    return np.array(known, dtype=object)[inverse] if len(known) else np.empty(0, dtype=object)


def group_rejections(lines: pd.DataFrame) -> pd.DataFrame:
    """Returns the lines of a token table, where the first of each group of equal rejections stands for all, and `times`
    says how many they are. Rejections are equal if they have the same draft token and the same committed token."""
    rejected = lines[lines.verdict == "rejected"]
    same = ["drafted_token_id", "committed_token_id"]
    first = ~rejected.duplicated(same)
    times = lines.times.copy()
    times[rejected.index] = rejected.groupby(same, dropna=False).times.transform("sum")
    is_kept = pd.Series(True, index=lines.index)
    is_kept[rejected.index] = first
    return lines.assign(times=times)[is_kept].reset_index(drop=True)


class SearchedText(NamedTuple):
    """Holds the text of one request as a search compares it: spaces as spaces, and in one case."""

    text: str
    starts: np.ndarray
    """[n + 1]: where each token of prompt and output begins in it, and its length."""
    num_prompt_tokens: int


def searchable(text: str) -> str:
    """Returns a text as a search compares it: spaces as spaces, line ends as ⏎, and in one case."""
    return visible(text).replace("␣", " ").casefold() if text else ""


def request_texts(
    prompts: Mapping[int, Sequence[int]], tokens: Mapping[int, Sequence[int]], texts: Mapping[int, str]
) -> dict[int, SearchedText]:
    """Returns the `SearchedText` of each request. prompts, tokens: token ids by request.  texts: by token id."""
    folded = {token: searchable(text) for token, text in texts.items()}
    found = {}
    for request, prompt in prompts.items():
        pieces = [folded.get(token, f"<{token}>") for token in (*prompt, *tokens[request])]
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        found[request] = SearchedText("".join(pieces), np.append(0, np.cumsum(lengths)), len(prompt))
    return found


def has_text(lines: pd.DataFrame, requests: Mapping[int, SearchedText], wanted: str) -> np.ndarray:
    """Returns an array of bool for the lines of a token table: whether a text stands there. It does if the token is
    part of an occurrence, if it follows a prompt that has the text, or if the draft token has it."""
    wanted, found = searchable(wanted), np.zeros(len(lines), dtype=bool)
    codes, drafted = pd.factorize(lines.drafted_token)
    in_draft = np.array([*(wanted in searchable(token) for token in drafted), False])  # code -1: none was drafted
    order = np.argsort(lines.request_id.to_numpy(), kind="stable")
    numbers, firsts = np.unique(lines.request_id.to_numpy()[order], return_index=True)
    for number, own in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=bool(len(numbers))):
        text, starts, num_prompt_tokens = requests[number]
        touched, at = np.zeros(len(starts), dtype=bool), text.find(wanted) if wanted else -1
        while at >= 0:
            first, last = np.searchsorted(starts, [at, at + len(wanted) - 1], side="right") - 1
            touched[first : last + 1] = True
            touched[num_prompt_tokens] |= first < num_prompt_tokens
            at = text.find(wanted, at + 1)
        found[own] = touched[np.minimum(lines.position.to_numpy()[own], len(touched) - 1)]
    return found | in_draft[codes]


def tokens_with_text(trace: "Trace", table: pd.DataFrame, text: str) -> pd.DataFrame:
    """Returns the lines of a table of `token_table` where a text stands, anywhere in prompt or output; case is ignored.

    A text of several tokens finds all of them. A text in a prompt finds the first token after the prompt. A draft token
    that has the text is found too. Raises: ValueError for an empty text.
    """
    if not text:
        raise ValueError("give a text to search for; it is empty")
    prompts = {request.request_id: request.prompt_token_ids for request in trace.requests}
    return table[has_text(table, request_texts(prompts, trace.tokens, trace.token_texts), text)]
