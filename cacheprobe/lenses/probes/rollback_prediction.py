"""Predicts rollbacks: classifies drafts from states before their verification, and compares with simple controls."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cacheprobe.analysis.reading import read_states
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.lenses.probes.examples import ProbeError
from cacheprobe.lenses.probes.ridge import group_folds, held_out_scores
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.trace import Trace


def drafted(trace: Trace, unit: str = "draft") -> pd.DataFrame:
    """Returns a DataFrame with one line for each verified draft, or for each of its tokens up to the first mismatch. A
    line has the outcome, and the row that predicted the draft or token.

    unit: "draft", with the row that predicted its first token; or "candidate", one line for each draft token up to the
    first mismatch, since later tokens follow text that was never committed.
    Columns: request_id, step (of the verdict), row, num_layers (blocks that ran for this row), position (of the first
    draft token), generated (tokens before it), index (of the draft token), length (of the draft), is_rolled_back: for
    unit "draft", whether any of its tokens was rolled back; for "candidate", whether this token was the first mismatch.
    row: number of the newest row before the verification on whose text the draft token depends: of the draft pass that
    proposed it, or, for a drafter that runs no model, of the canonical pass that chose the newest committed token.
    Drafts without a captured row are left out.
    Raises: ValueError for another unit.
    """
    if unit not in ("draft", "candidate"):
        raise ValueError(f"unknown unit {unit!r}; give 'draft' or 'candidate'")
    table = trace.row_table[trace.row_table.state_index >= 0]
    rows_of = dict(list(table.groupby("request_id")))
    prompts = {request.request_id: request.num_prompt_tokens for request in trace.requests}
    verified = trace.event_table[trace.event_table.phase == "verify"].sort_values(["request_id", "step"])
    last_verified_step: dict[int, int] = {}
    records = []
    for event in verified.itertuples():
        last_verified, last_verified_step[event.request_id] = last_verified_step.get(event.request_id, -1), event.step
        length = len(event.draft_token_ids)
        rows = rows_of.get(event.request_id)
        if not length or rows is None:
            continue
        start, accepted = int(event.draft_start), int(event.num_accepted)
        last_index = 0 if unit == "draft" else min(accepted, length - 1)
        is_draft_row = (rows.phase == "decode") & (rows.step > last_verified)
        earlier = rows[(rows.step < event.step) & (is_draft_row | (rows.status == "committed"))]
        for index in range(last_index + 1):
            before_token = earlier[earlier.position < start + index]
            if before_token.empty:
                continue
            row = before_token.sort_values(["position", "step"]).iloc[-1]
            is_rolled_back = accepted < length if unit == "draft" else index == accepted
            records.append(
                (event.request_id, event.step, row.row, row.num_layers, start, start - prompts[event.request_id], index,
                 length, is_rolled_back)
            )  # fmt: skip
    columns = [
        "request_id", "step", "row", "num_layers", "position", "generated", "index", "length", "is_rolled_back",
    ]  # fmt: skip
    return pd.DataFrame(records, columns=columns)


def margins(trace: Trace, rows: Iterable[int], layer: int, model: CachedLM | None = None) -> pd.Series:
    """Returns a Series by row number, for the given rows: the gap in nats between the logit lens's two best tokens at
    `layer`."""
    row_table = trace.row_table[trace.row_table.row.isin(set(rows))]
    read = read_states(trace, LogitLens(), layers=[layer], rows=row_table, model=model)
    best = read.top_logprob_nats.map(lambda nats: float(nats[0] - nats[1]))
    return pd.Series(best.to_numpy(), index=read.row.to_numpy())


def auroc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Returns the AUROC of scores [n] for labels [n] (0 or 1), a number from 0 to 1; NaN if a class has no example.

    It is the probability that an example of class 1 scores higher than one of class 0; ties count half.
    Source: Hanley and McNeil 1982.  Twin: tests.twins.probes_slowly.auroc_slowly (every pair), ==.
    """
    _, index, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[index]  # ties share their mean rank
    positive = int(labels.sum())
    pairs = positive * (len(labels) - positive)
    if not pairs:
        return float("nan")
    return float((ranks[labels == 1].sum() - positive * (positive + 1) / 2) / pairs)


def resampled_auroc(
    scores: Sequence[np.ndarray], labels: np.ndarray, groups: np.ndarray, number: int, seed: int
) -> np.ndarray:
    """Returns the AUROC of each score on `number` bootstrap samples of whole groups, as an array [number, len(scores)].

    scores: arrays [n], one for each classifier; all use the same samples. Groups are drawn with replacement.
    Source: bootstrap over clusters, Field and Welsh 2007.
    """
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    draw = np.random.default_rng(seed)
    out = np.empty((number, len(scores)))
    for i in range(number):
        index = np.concatenate([members[j] for j in draw.integers(0, len(members), len(members))])
        out[i] = [auroc(score[index], labels[index]) for score in scores]
    return out


LEAST_ROLLBACKS = 500
_RESAMPLES = 1000
_SHUFFLES = 5
CONTROLS = ("position", "margin")


@dataclass(frozen=True)
class RollbackPrediction:
    """Holds the result of a rollback prediction: an answer, its reason, counts of drafts, and a table of AUROCs by
    layer.

    answer: "yes" if the states of the last tested layer predict better than position and margin (gain_low above 0), "no
    more than the controls", or "cannot tell", with its reason.
    table: drafter, unit, site, layer; auroc of the states on held-out requests, with low to high; shuffled (mean AUROC
    with shuffled labels), position (place in the text and in the draft, length of the draft) and margin (between the
    two best tokens at the last tested layer): AUROC of each control alone, by the same classifier; gain over the better
    control, with gain_low to gain_high; strength. Intervals are 95 % percentiles over resampled requests. Empty if the
    answer is "cannot tell".
    """

    drafter: str
    unit: str
    answer: str
    reason: str
    drafts: int
    rollbacks: int
    requests: int
    """Number of groups: requests with the same prompt count as one."""
    table: pd.DataFrame = field(repr=False)


def rollback_prediction(
    traces: "Trace | Sequence[Trace]",
    *,
    unit: str = "draft",
    site: str = "S",
    layers: Sequence[int] | None = None,
    folds: int = 5,
    least: int = LEAST_ROLLBACKS,
    seed: int = 0,
    model: CachedLM | None = None,
) -> RollbackPrediction:
    """Tests how well a linear classifier predicts, from states before verification, that a draft will be rolled back.
    Returns a RollbackPrediction.

    traces: runs with the same drafter, whose captured states include `site`, and S, from which margins are computed.
    unit: "draft" or "candidate" (single draft tokens), as in `cp.probes.drafted`.
    layers: by default all captured layers that ran for every draft.
    least: minimum number of rollbacks; with fewer, the answer is "cannot tell".
    All examples of a prompt are in one fold. The answer uses the last tested layer only, so that no layer is selected
    after the fact.
    Raises: ProbeError for traces without drafts or states, or of different drafters, and layers that do not exist.
    """
    traces = [traces] if isinstance(traces, Trace) else list(traces)
    names = sorted({str(trace.meta["drafter"] or "FastPath()") for trace in traces})
    if len(names) != 1:
        raise ProbeError(f"one drafter at a time: the traces are of {', '.join(names) or 'none'}")
    parts = [drafted(trace, unit).assign(trace=i) for i, trace in enumerate(traces)]
    about = pd.concat(parts, ignore_index=True)
    if about.empty:
        raise ProbeError("no draft with a kept state reached the verifier; give a drafter and keep S, T or C")
    prompts = {(i, r.request_id): r.prompt_token_ids for i, trace in enumerate(traces) for r in trace.requests}
    prompt_of_draft = pd.Series([prompts[key] for key in zip(about.trace, about.request_id, strict=True)])
    about["group"] = pd.factorize(prompt_of_draft)[0]
    is_rolled_back = about.is_rolled_back.to_numpy(dtype=int)
    counts = dict(drafts=len(about), rollbacks=int(is_rolled_back.sum()), requests=int(about.group.nunique()))
    reason = _too_little(counts, about, is_rolled_back, folds, least)
    if reason:
        return RollbackPrediction(names[0], unit, "cannot tell", reason, **counts, table=pd.DataFrame())
    layers = _layers(traces, about, site, layers)
    table = _compared(traces, about, is_rolled_back, site, layers, folds, seed, model)
    last = table.iloc[-1]
    sentence = (
        f"at layer {last.layer} the states tell with an AUROC of {last.auroc:.3f} ({last.low:.3f} to {last.high:.3f}), "
        f"position alone {last.position:.3f}, margin alone {last.margin:.3f}; "
        f"the gain is {last.gain:+.3f} ({last.gain_low:+.3f} to {last.gain_high:+.3f})"
    )
    answer = "yes" if last.gain_low > 0 else "no more than the controls"
    for place, (name, value) in enumerate((("drafter", names[0]), ("unit", unit), ("site", site))):
        table.insert(place, name, value)
    return RollbackPrediction(names[0], unit, answer, sentence, **counts, table=table)


def _too_little(
    counts: dict[str, int], drafts: pd.DataFrame, is_rolled_back: np.ndarray, folds: int, least: int
) -> str:
    """Returns the reason, as a sentence, if rollbacks, accepted drafts or their groups are too few for a prediction;
    else ""."""
    if counts["rollbacks"] < least:
        return f"{counts['rollbacks']} rollbacks, {least} are needed; run more prompts"
    if is_rolled_back.all():
        return f"all {counts['drafts']} were rolled back, so there is nothing to tell them from"
    if drafts[drafts.is_rolled_back].group.nunique() < folds or drafts[~drafts.is_rolled_back].group.nunique() < folds:
        return f"rollbacks or accepted drafts are in fewer than {folds} requests; run more prompts"
    return ""


def _layers(traces: list[Trace], drafts: pd.DataFrame, site: str, layers: Sequence[int] | None) -> list[int]:
    """Returns the layers to test, sorted: the requested ones, or all captured ones that ran for every draft. Raises:
    ProbeError for an unknown site or layer, or if no layer is left."""
    kept = set.intersection(*(set(trace.store.layers) for trace in traces))
    ran = sorted(layer for layer in kept if layer < drafts.num_layers.min())
    if any(site not in trace.store.sites for trace in traces):
        raise ProbeError(f"site {site!r} was not kept; run with capture={site!r} or more")
    if unknown := [layer for layer in layers or () if layer not in ran]:
        raise ProbeError(f"there is no layer {unknown[0]} of these drafts; kept, and run by the drafter, were {ran}")
    if not ran or (layers is not None and not len(layers)):
        raise ProbeError("no layer was asked for, or none that was kept ran for every draft")
    return sorted(layers) if layers is not None else ran


def _compared(
    traces: list[Trace], drafts: pd.DataFrame, labels: np.ndarray, site: str, layers: list[int], folds: int, seed: int,
    model: CachedLM | None,
) -> pd.DataFrame:  # fmt: skip
    """Returns the table of a RollbackPrediction: one line for each layer, with the AUROC of its states and of the
    controls."""
    fold = group_folds(drafts.group, folds, seed)
    rows = [(trace, drafts[drafts.trace == i].row) for i, trace in enumerate(traces)]
    margin = np.concatenate([own.map(margins(trace, own, layers[-1], model)).to_numpy() for trace, own in rows])
    steps = np.eye(int(drafts["index"].max()) + 1)[drafts["index"]]
    places = np.column_stack([drafts[["generated", "position", "length"]].to_numpy(dtype=float), steps])
    control = {
        "position": _scores(_as_states(places), labels, fold)[0][0],
        "margin": _scores(_as_states(margin), labels, fold)[0][0],
    }
    draw = np.random.default_rng(seed)
    shuffled_labels = np.stack([draw.permutation(labels) for _ in range(_SHUFFLES)])
    lines = []
    for layer in layers:
        states = torch.cat([trace.vectors(site, layer, own.tolist()) for trace, own in rows])
        state_scores, strengths = _scores(states[None], labels, fold)
        shuffled = [auroc(_scores(states[None], mixed, fold)[0][0], mixed) for mixed in shuffled_labels]
        scores = [state_scores[0], *control.values()]
        point = np.array([auroc(score, labels) for score in scores])
        resampled = resampled_auroc(scores, labels, drafts.group.to_numpy(), _RESAMPLES, seed)
        gains = resampled[:, 0] - resampled[:, 1:].max(1)
        low, high = np.nanpercentile(resampled[:, 0], [2.5, 97.5])
        gain_low, gain_high = np.nanpercentile(gains, [2.5, 97.5])
        lines.append(
            dict(layer=layer, auroc=point[0], low=low, high=high, shuffled=float(np.mean(shuffled)),
                 **dict(zip(CONTROLS, point[1:], strict=True)), gain=point[0] - point[1:].max(), gain_low=gain_low,
                 gain_high=gain_high, strength=float(strengths.median()))
        )  # fmt: skip
    return pd.DataFrame(lines)


def _as_states(values: np.ndarray) -> Tensor:
    """Returns values [n] or [n, k] as the states [1, n, k] of a single layer, in float64."""
    return torch.from_numpy(values.reshape(1, len(values), -1).astype(np.float64))


def _scores(states: Tensor, labels: np.ndarray, fold: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """Returns the held-out scores [l, n] of class 1 from states [l, n, m], and the penalties [folds, l]."""
    held_out = held_out_scores(
        states, torch.from_numpy(labels[:, None].astype(np.float64)), torch.from_numpy(fold), [1]
    )
    return held_out.scores[:, :, 0].numpy(), held_out.strengths
