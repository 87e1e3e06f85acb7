"""Says which drafts would have been accepted in a stored run: by drafter, layer, window and temperature."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack

import pandas as pd

from cacheprobe.analysis.draft_passes import (
    CommittedText,
    HeadContext,
    ReplayedPass,
    Sampled,
    TokenContext,
    TokenDrafts,
    exit_of,
    replay_passes,
)
from cacheprobe.analysis.measures import lens_readings
from cacheprobe.core.config import ACCEPTANCES
from cacheprobe.core.terminal import Progress
from cacheprobe.core.values import KnownKeywords, hint, number, whole_number
from cacheprobe.engine.drafters.base import Drafter, head_of, require_drafter
from cacheprobe.engine.drafters.early_exit import EarlyExit
from cacheprobe.engine.drafters.model import DraftModel
from cacheprobe.trace.tables.schema import typed

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

DRAFTER = ["drafter", "settings", "layer", "lens"]
"""Columns that name a drafter."""
KEYS = [*DRAFTER, "window", "temperature", "kind"]
"""Columns that say what was replayed."""
COSTS = ["verify_seconds", "undrafted_seconds", "draft_seconds", "plain_seconds"]
_COUNTS = ["passes", "undrafted", "drafted", "committed"]


class ReplayOptions(TypedDict, total=False):
    """Declares the keyword arguments of `acceptance` that say how drafts are judged."""

    temperature: float | None
    draft_length: int | None
    rule: str


@dataclass(frozen=True)
class ReplayConfig(KnownKeywords):
    """Holds the options of one call of `acceptance`, with defaults. Raises: ValueError for one out of range."""

    temperature: float | None = None
    draft_length: int | None = None
    rule: str = "equality"

    def __post_init__(self) -> None:
        if self.rule not in ACCEPTANCES:
            raise ValueError(f"unknown rule {self.rule!r:.60}; rules are {', '.join(ACCEPTANCES)}")
        if self.temperature is not None and not 0 <= number("temperature", self.temperature) < float("inf"):
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if self.draft_length is not None:
            whole_number("draft_length, which a replay takes as a number,", self.draft_length, at_least=1)

    def sampled(self, text: CommittedText) -> Sampled:
        """Returns how tokens of a request are chosen and accepted."""
        own = text.sampling.temperature or 0.0
        asked = own if self.temperature is None else float(self.temperature)
        return Sampled(asked, asked == own, "equality" if text.request.is_deterministic else self.rule)


class DraftReplay(NamedTuple):
    """Holds the replay of one request with one drafter and window."""

    text: CommittedText
    drafter: Drafter
    lens: str | None
    """Name of the lens whose readings are an EarlyExit's drafts; None for another drafter."""
    window: int
    sampled: Sampled
    passes: list[ReplayedPass]

    @property
    def keys(self) -> dict[str, object]:
        """Values of KEYS."""
        is_exact = self.sampled.is_own and not (self.sampled.temperature and self.lens)
        return {
            **names_of(self.drafter),
            "lens": self.lens,
            "window": self.window,
            "temperature": self.sampled.temperature,
            "kind": "exact" if is_exact else "estimated",
        }


def names_of(drafter: Drafter) -> dict[str, object]:
    """Returns the values of the columns DRAFTER: settings is the drafter's repr, null for EarlyExit, which has a layer
    and a lens."""
    if isinstance(drafter, EarlyExit):
        return {"drafter": drafter.name, "settings": None, "layer": drafter.layer, "lens": drafter.lens.name}
    return {"drafter": drafter.name, "settings": repr(drafter), "layer": None, "lens": None}


def acceptance(
    trace: "Trace",
    drafters: Drafter | Iterable[Drafter] | None = None,
    *,
    windows: "int | Sequence[int]" = (2, 4, 8, 16),
    readings: pd.DataFrame | None = None,
    by: str = "request",
    progress: bool = True,
    **options: Unpack[ReplayOptions],
) -> pd.DataFrame:
    """Computes from one stored trace which draft tokens would have been accepted. Does not run the model.

    drafters: EarlyExit objects, whose draft tokens are the first tokens of the lens readings at their layer; and
        drafters that need only tokens (NGram, Scripted), a model of their own (DraftModel), or a head that reads the
        trace's states (Eagle3; with the trace's model), which draft again. By default an EarlyExit at each layer that
        was read but the model's last.
    windows: tokens of a verify pass.  draft_length: as the number of `cp.run`, by default all that the window takes;
        "adaptive" cannot be replayed, as it depends on costs and on other requests.  rule: as acceptance of `cp.run`.
    temperature: None for that of each request. Another one is an estimate, along the stored text.
    readings: from `cp.analysis.read_states`, for another lens than the run's.
    by: "request": a line for each request, drafter and window. "pass": a line for each verify pass. "place": for each
        place in a draft, over all requests.

    Columns of all: drafter (its name); layer and lens of an EarlyExit, null for others; settings (the repr of others,
    null for EarlyExit); window, temperature, kind.
    by="request": request_id, passes, undrafted (passes without a draft token), drafted, accepted and committed (tokens;
    the first one comes from the prefill and is not counted), tokens_per_pass, acceptance_rate.
    by="pass": request_id, position (of the newest committed token), probability (that a pass begins there), drafted,
    accepted.
    by="place": place (1 for a draft's first token), drafted and accepted (passes), acceptance_rate.

    kind is "exact" for greedy requests, and for the other drafters at the run's own temperature. The counts are then
    those of `cp.run` with the drafter, if its logits choose the same tokens: they are computed in passes of another
    shape, so rounding can turn a near tie. Replayed and imported requests count as greedy: their counts are those of
    `cp.replay` with the drafter. One count may differ: a draft of EarlyExit goes on after its first
    wrong token, and a stop token among these unknown ones would make `drafted` smaller. Requests are replayed alone,
    without preemption.
    kind is "estimated" for EarlyExit at other temperatures than 0: only the recorded top tokens count (`top_k` of
    CaptureConfig). At the run's own temperature they are drawn with the run's own noise; at another one, counts are
    expected numbers.
    Raises: ValueError without readings that an EarlyExit needs, for a lens that did not read them, for a drafter that
    runs the verified model, for sampling settings other than temperature that change the choice, and for a run with
    interventions or with thoughts.
    Source: number of accepted tokens, Leviathan et al. 2023 (arXiv 2211.17192), section 3.1, counted on one text.
    Twin: tests.twins.measures_slowly.draft_agreement_slowly, == for greedy requests; and the events of a run with the
    drafter.
    """
    if by not in TABLES:
        raise ValueError(f"unknown by={by!r:.60}; tables are by {', '.join(TABLES)}{hint(by, TABLES)}")
    sizes = [windows] if isinstance(windows, int) else list(windows)
    if not sizes or min(whole_number("window", window) for window in sizes) < 1:
        raise ValueError(f"windows must hold numbers of tokens of at least 1, got {windows!r:.60}")
    config = ReplayConfig(**options)
    texts = _texts_of(trace, config)
    given = None if drafters is None else list(drafters) if isinstance(drafters, Iterable) else [drafters]
    has_exit = given is None or any(isinstance(one, EarlyExit) for one in given)
    table = committed_readings(trace, readings) if has_exit or readings is not None else None
    chosen = _checked_drafters(trace, given, table, [config.sampled(text) for text in texts])
    replayed: list[DraftReplay] = []
    with Progress(len(texts) * len(chosen), "replaying", "texts", enabled=progress) as bar:
        for text in texts:
            own = None if table is None else table[table.request_id == text.request_id]
            for drafter in chosen:
                replayed += _replays(trace, text, drafter, own, sizes, config)
                bar.advance()
    return TABLES[by](replayed)


def _texts_of(trace: "Trace", config: ReplayConfig) -> list[CommittedText]:
    """Returns the CommittedText of each request that generated a token. Raises: ValueError for a run, or a request,
    that cannot be replayed."""
    if trace.thought_table is not None:
        raise ValueError(f"{trace.fingerprint['model']} writes thoughts between tokens, which a replay cannot make")
    if trace.meta.get("interventions"):
        raise ValueError("the run had interventions, whose effect on other drafts is unknown; give a run without")
    if trace.meta.get("config", {}).get("acceptance") == "rejection" and any(
        one.sampling and one.sampling.temperature and not one.is_deterministic for one in trace.requests
    ):
        raise ValueError(
            "the run accepted drafts by rejection sampling, whose draws depend on its own drafts; give a run with "
            "acceptance='equality'"
        )
    finish = {str(request_id): reason for request_id, reason in trace.meta.get("finish", {}).items()}
    texts = [
        CommittedText(request, (*request.prompt_token_ids, *tokens), finish.get(str(request.request_id)) == "stop")
        for request in trace.requests
        if (tokens := trace.committed(request.request_id))
    ]
    for text in texts:
        is_greedy = not config.sampled(text).temperature and text.sampling.repetition_penalty in (None, 1)
        if not (text.sampling.is_plain or is_greedy):
            raise ValueError(
                f"request {text.request_id} has sampling settings beside temperature (top_k, top_p, min_p or "
                "repetition_penalty), so its choices cannot be known from the recorded readings"
            )
    return texts


def _checked_drafters(
    trace: "Trace", given: Sequence[Drafter] | None, readings: pd.DataFrame | None, sampled: Sequence[Sampled]
) -> list[Drafter]:
    """Returns the drafters to replay; by default an EarlyExit at each layer of the readings but the model's last.

    sampled: how the tokens of each request are drawn in the replay.
    Raises: ValueError for a drafter that cannot be replayed, with the reason.
    """
    last, name = _last_layer(trace), str(trace.fingerprint.get("model"))
    layers = [] if readings is None else sorted(set(readings.layer.tolist()) - {last})
    chosen: list[Drafter] = [EarlyExit(layer=layer) for layer in layers] if given is None else list(given)
    if not chosen:
        raise ValueError("there is no drafter to replay: give drafters, or a run that read layers before the last")
    lenses = set() if readings is None else set(readings.lens.tolist())
    for drafter in chosen:
        require_drafter(drafter, trace.model)
        if trace.model is None and isinstance(drafter, EarlyExit):
            drafter.check_layers(last + 1, name)
        if trace.model is None and isinstance(drafter, DraftModel):
            drafter.check_texts(name, trace.token_texts)
        if not isinstance(drafter, EarlyExit):
            if any(not one.is_own or (one.temperature and one.acceptance == "rejection") for one in sampled):
                raise ValueError(
                    f"drafter {drafter.name} drafts tokens for the run's own text, so it can be replayed at the run's "
                    "own temperature and with rule='equality' alone; estimates are for EarlyExit"
                )
        elif given is not None and lenses and lenses != {drafter.lens.name}:
            raise ValueError(
                f"the readings are of lens {', '.join(sorted(lenses))}, {drafter!r} reads with "
                f"{drafter.lens.name}; give readings=cp.analysis.read_states(trace, lens)"
            )
    return chosen


def _last_layer(trace: "Trace") -> int:
    """Returns the number of the model's last layer."""
    return int(trace.row_table.num_layers.max()) - 1


def _replays(
    trace: "Trace",
    text: CommittedText,
    drafter: Drafter,
    readings: pd.DataFrame | None,
    windows: Sequence[int],
    config: ReplayConfig,
) -> Iterator[DraftReplay]:
    """Yields the DraftReplay of one request and drafter for each window. readings: the request's, from
    `committed_readings`; None if no EarlyExit is replayed."""
    sampled, length = config.sampled(text), config.draft_length
    if isinstance(drafter, EarlyExit):
        assert readings is not None
        # no row of a request of one token reads a generated one
        lens = str(readings.lens.iloc[0]) if len(readings) else drafter.lens.name
        exits = exit_of(text, readings, drafter.layer, _last_layer(trace), sampled)
        for window in windows:
            passes = replay_passes(text, exits, window, length)
            yield DraftReplay(text, drafter, lens, window, sampled, passes)
        return
    for window in windows:
        drafts = TokenDrafts(text, drafter, length, _context(trace, drafter))
        try:
            yield DraftReplay(text, drafter, None, window, sampled, replay_passes(text, drafts, window, length))
        finally:
            drafts.close()


def _context(trace: "Trace", drafter: Drafter) -> TokenContext:
    """Returns the DraftContext of a replay with this drafter."""
    model = trace.model
    if model is None:
        return TokenContext(drafter.name, trace.meta.get("d_vocab"))
    if (head := head_of(drafter, model)) is not None:
        return HeadContext(drafter.name, trace, model, head)
    return TokenContext(drafter.name, model.d_vocab, model.tokenizer)


def committed_readings(trace: "Trace", readings: pd.DataFrame | None) -> pd.DataFrame:
    """Returns the readings at site S of committed rows that read a generated token. readings: None for the run's.
    Raises: ValueError for readings of other rows than the trace has, and for a position that is there twice."""
    table = lens_readings(trace) if readings is None else readings
    ours = trace.row_table.set_index("row")[["request_id", "position"]]
    theirs = table[["row", "request_id", "position"]].drop_duplicates().set_index("row")
    if not (ours.reindex(theirs.index) == theirs).all(axis=None):
        raise ValueError("the readings are of another run; read them with cp.analysis.read_states(trace, lens)")
    lengths = {request.request_id: request.num_prompt_tokens for request in trace.requests}
    is_generated = table.position >= table.request_id.map(lengths)
    table = table[(table.status == "committed") & is_generated & (table.site == "S")]
    if table.duplicated(["request_id", "layer", "position"]).any():
        raise ValueError("the readings hold a position twice; give those of one call of cp.analysis.read_states")
    return table


def _by_request(replayed: Sequence[DraftReplay]) -> pd.DataFrame:
    """Returns a line for each request, drafter and window."""
    lines = []
    for one in replayed:
        passes = sum(each.weight for each in one.passes)
        drafted = sum(each.weight * sum(each.drafted) for each in one.passes)
        accepted = sum(each.weight * sum(each.accepted) for each in one.passes)
        committed = one.text.last - one.text.first
        lines.append(
            {
                "request_id": one.text.request_id,
                **one.keys,
                "passes": passes,
                "undrafted": sum(each.weight for each in one.passes if not sum(each.drafted)),
                "drafted": drafted,
                "accepted": accepted,
                "committed": committed,
                "tokens_per_pass": committed / passes if passes else None,
                "acceptance_rate": accepted / drafted if drafted else None,
            }
        )
    return typed(lines, "acceptance by request")


def _by_pass(replayed: Sequence[DraftReplay]) -> pd.DataFrame:
    """Returns a line for each verify pass that has a probability above 0."""
    lines = [
        {
            "request_id": one.text.request_id,
            **one.keys,
            "position": each.position,
            "probability": each.weight,
            "drafted": sum(each.drafted),
            "accepted": sum(each.accepted),
        }
        for one in replayed
        for each in one.passes
    ]
    return typed(lines, "acceptance by pass")


def _by_place(replayed: Sequence[DraftReplay]) -> pd.DataFrame:
    """Returns a line for each place in a draft, drafter and window, over all requests. Nothing is accepted where the
    replay ends."""
    lines = [
        {**one.keys, "place": place, "drafted": each.weight * drafted, "accepted": each.weight * (accepted or 0.0)}
        for one in replayed
        for each in one.passes
        for place, (drafted, accepted) in enumerate(zip_longest(each.drafted, each.accepted), start=1)
    ]
    table = typed(lines, "acceptance by place")
    summed = table.groupby([*KEYS, "place"], dropna=False, sort=False, as_index=False)[["drafted", "accepted"]].sum()
    summed["acceptance_rate"] = summed.accepted / summed.drafted
    return typed(summed[summed.drafted > 0].reset_index(drop=True), "acceptance by place")


TABLES: dict[str, Callable[[Sequence[DraftReplay]], pd.DataFrame]] = {
    "request": _by_request,
    "pass": _by_pass,
    "place": _by_place,
}
"""Tables of `acceptance` by the value of its argument `by`."""


def expected_speedup(acceptance: pd.DataFrame, costs: pd.DataFrame) -> pd.DataFrame:
    """Returns the table with the expected time of each line, drafted and undrafted. Runs no model.

    acceptance: from `cp.analysis.acceptance(..., by="request")`.  costs: from `cp.draft_costs`.
    Added columns: seconds (passes with a draft * verify_seconds + others * undrafted_seconds + drafted tokens *
    draft_seconds), plain_seconds (committed tokens times the cost of one without a drafter), seconds_per_token, speedup
    (plain_seconds / seconds). The prefill is not counted. Requests run one at a time.
    Raises: ValueError for a table without these columns, and for a drafter and window without a cost.
    Source: expected time of speculative decoding, Leviathan et al. 2023 (arXiv 2211.17192), section 3.3, with counts
    and costs in place of their formulas.
    """
    keys = [*DRAFTER, "window"]
    for table, columns, origin in (
        (acceptance, [*keys, *_COUNTS], "cp.analysis.acceptance(..., by='request')"),
        (costs, [*keys, *COSTS], "cp.draft_costs"),
    ):
        if lacking := [name for name in columns if name not in table.columns]:
            raise ValueError(f"the table has no column {lacking[0]}; give one from {origin}")
    joined = acceptance.merge(costs[[*keys, *COSTS]], on=keys, how="left", validate="many_to_one")
    if (unknown := joined[joined.verify_seconds.isna()]).shape[0]:
        line = unknown.iloc[0]
        place = "" if pd.isna(line.layer) else f" at layer {line.layer} with the {line.lens} lens"
        raise ValueError(
            f"no cost of drafter {line.drafter}{place} and window {line.window}; measure it with "
            "cp.draft_costs(model, prompts, drafters, windows=...)"
        )
    if (unmeasured := joined[(joined.drafted > 0) & joined.draft_seconds.isna()]).shape[0]:
        raise ValueError(
            f"no draft token of drafter {unmeasured.iloc[0].drafter} was measured; give cp.draft_costs more new "
            "tokens, or prompts for which it drafts"
        )
    drafting = (joined.drafted * joined.draft_seconds).fillna(0.0)
    without = joined.undrafted_seconds.fillna(joined.verify_seconds)  # none was measured
    seconds = (joined.passes - joined.undrafted) * joined.verify_seconds + joined.undrafted * without + drafting
    plain = joined.committed * joined.plain_seconds
    return joined.drop(columns=COSTS).assign(
        seconds=seconds, plain_seconds=plain, seconds_per_token=seconds / joined.committed, speedup=plain / seconds
    )
