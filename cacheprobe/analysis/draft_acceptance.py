"""Says which drafts would have been accepted in a stored run: by drafter, layer, window and temperature."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from cacheprobe.analysis.draft_passes import CommittedText, ReplayedPass, Sampled, TokenDrafts, exit_of, replay_passes
from cacheprobe.analysis.draft_tables import TABLES, DraftReplay
from cacheprobe.analysis.of_trace import lens_readings
from cacheprobe.core.config import ACCEPTANCES
from cacheprobe.core.progress import Progress
from cacheprobe.core.values import hint, number, whole_number
from cacheprobe.engine.drafters.base import Drafter, require_drafter
from cacheprobe.engine.drafters.early_exit import EarlyExit
from cacheprobe.engine.drafters.model import DraftModel

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


def acceptance(
    trace: "Trace",
    drafters: Drafter | Iterable[Drafter] | None = None,
    *,
    windows: "int | Sequence[int]" = (2, 4, 8, 16),
    temperature: float | None = None,
    draft_length: "int | str | None" = None,
    rule: str = "equality",
    readings: pd.DataFrame | None = None,
    by: str = "request",
    progress: bool = True,
) -> pd.DataFrame:
    """Computes from one stored trace which draft tokens would have been accepted. Does not run the model.

    drafters: EarlyExit objects, whose draft tokens are the first tokens of the lens readings at their layer; and
        drafters that need only tokens (NGram, Scripted) or a model of their own (DraftModel), which draft again. By
        default an EarlyExit at each layer that was read but the model's last.
    windows: tokens of a verify pass.  draft_length, rule: as draft_length and acceptance of `cp.run`.
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
    if isinstance(drafters, Iterable):
        drafters = list(drafters)
    plan = ReplayPlan(trace, temperature, draft_length, rule)
    table = None if readings is None and _has_no_exit(drafters) else committed_readings(trace, readings)
    listed = plan.drafters(drafters, table)
    replayed: list[DraftReplay] = []
    with Progress(len(plan.texts) * len(listed), "replaying", "texts", enabled=progress) as bar:
        for text in plan.texts:
            own = None if table is None else table[table.request_id == text.request_id]
            for drafter in listed:
                lens = str(own.lens.iloc[0]) if isinstance(drafter, EarlyExit) and own is not None else None
                for window, passes in plan.replays(text, drafter, own, sizes):
                    replayed.append(DraftReplay(text, drafter, lens, window, plan.sampled(text), passes))
                bar.advance()
    return TABLES[by](replayed)


def _has_no_exit(drafters: Drafter | Sequence[Drafter] | None) -> bool:
    """Returns whether drafters were given of which none is an EarlyExit."""
    listed = drafters if isinstance(drafters, Sequence) else [drafters]
    return drafters is not None and not any(isinstance(one, EarlyExit) for one in listed)


class ReplayPlan:
    """Holds the checked arguments of one call of `acceptance` that do not depend on the drafter."""

    def __init__(self, trace: "Trace", temperature: float | None, draft_length: "int | str | None", rule: str) -> None:
        """Raises: ValueError for a run that cannot be replayed, and for settings out of range."""
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
        if rule not in ACCEPTANCES:
            raise ValueError(f"unknown rule {rule!r:.60}; rules are {', '.join(ACCEPTANCES)}")
        if temperature is not None and not 0 <= number("temperature", temperature) < float("inf"):
            raise ValueError(f"temperature must be a finite number of at least 0, got {temperature}")
        is_word = isinstance(draft_length, str)
        if (is_word and draft_length != "adaptive") or (
            not is_word and draft_length is not None and whole_number("draft_length", draft_length) < 1
        ):
            raise ValueError(f"draft_length must be None, 'adaptive' or at least 1, got {draft_length!r:.60}")
        self._temperature, self._draft_length, self._rule = temperature, draft_length, rule
        self._last_layer = int(trace.row_table.num_layers.max()) - 1
        self._trace = trace
        self._d_vocab = trace.meta.get("d_vocab") if trace.model is None else trace.model.d_vocab
        self.texts = _texts_of(trace)
        """The requests that generated a token."""
        for text in self.texts:
            settings = text.sampling
            is_known = settings.is_plain or (
                not self.sampled(text).temperature and settings.repetition_penalty in (None, 1)
            )
            if not is_known:
                raise ValueError(
                    f"request {text.request_id} has sampling settings beside temperature (top_k, top_p, min_p or "
                    "repetition_penalty), so its choices cannot be known from the recorded readings"
                )

    def sampled(self, text: CommittedText) -> Sampled:
        """Returns how tokens of a request are chosen and accepted in this replay."""
        own = text.sampling.temperature or 0.0
        asked = own if self._temperature is None else float(self._temperature)
        return Sampled(asked, asked == own, "equality" if text.request.is_deterministic else self._rule)

    def drafters(self, given: Drafter | Sequence[Drafter] | None, readings: pd.DataFrame | None) -> list[Drafter]:
        """Returns the drafters to replay. readings: None if no EarlyExit is among them.

        Raises: ValueError for a drafter that cannot be replayed, with the reason.
        """
        if given is None:
            assert readings is not None
            layers = sorted(set(readings.layer.tolist()) - {self._last_layer})
            listed: list[Drafter] = [EarlyExit(layer=layer) for layer in layers]
        else:
            listed = list(given) if isinstance(given, Sequence) else [given]
        if not listed:
            raise ValueError("there is no drafter to replay: give drafters, or a run that read layers before the last")
        lenses = set() if readings is None else set(readings.lens.tolist())
        for drafter in listed:
            self._require_fitting(drafter)
            if not isinstance(drafter, EarlyExit):
                self._require_own_sampling(drafter)
            elif given is not None and lenses and lenses != {drafter.lens.name}:
                raise ValueError(
                    f"the readings are of lens {', '.join(sorted(lenses))}, {drafter!r} reads with "
                    f"{drafter.lens.name}; give readings=cp.analysis.read_states(trace, lens)"
                )
        return listed

    def _require_fitting(self, drafter: Drafter) -> None:
        """Raises: ValueError for a drafter that a run with it would refuse. Without the verified model, compares what
        the run stores of it."""
        trace, name = self._trace, str(self._trace.fingerprint.get("model"))
        require_drafter(drafter, trace.model)
        if trace.model is None and isinstance(drafter, EarlyExit):
            drafter.check_layers(self._last_layer + 1, name)
        if trace.model is None and isinstance(drafter, DraftModel):
            drafter.check_texts(name, trace.token_texts)

    def _require_own_sampling(self, drafter: Drafter) -> None:
        """Raises: ValueError for a drafter without recorded readings if its draft tokens would depend on a draw that
        was not made in the run."""
        for sampled in map(self.sampled, self.texts):
            if not sampled.is_own or (sampled.temperature and sampled.acceptance == "rejection"):
                raise ValueError(
                    f"drafter {drafter.name} drafts tokens for the run's own text, so it can be replayed at the run's "
                    "own temperature and with rule='equality' alone; estimates are for EarlyExit"
                )

    def replays(
        self, text: CommittedText, drafter: Drafter, readings: pd.DataFrame | None, windows: Sequence[int]
    ) -> Iterator[tuple[int, list[ReplayedPass]]]:
        """Yields (window, passes) of one request and drafter. readings: the request's, from `committed_readings`."""
        if isinstance(drafter, EarlyExit):
            assert readings is not None
            exits = exit_of(text, readings, drafter.layer, self._last_layer, self.sampled(text))
            for window in windows:
                yield window, replay_passes(text, exits, window, self._draft_length)
            return
        for window in windows:
            drafts = TokenDrafts(text, drafter, self._draft_length, self._d_vocab)
            try:
                yield window, replay_passes(text, drafts, window, self._draft_length)
            finally:
                drafts.close()


def committed_readings(trace: "Trace", readings: pd.DataFrame | None) -> pd.DataFrame:
    """Returns the readings at site S of committed rows that read a generated token. readings: None for the run's."""
    table = lens_readings(trace) if readings is None else readings
    _require_own(trace, table)
    lengths = {request.request_id: request.num_prompt_tokens for request in trace.requests}
    is_generated = table.position >= table.request_id.map(lengths)
    table = table[(table.status == "committed") & is_generated & (table.site == "S")]
    if table.duplicated(["request_id", "layer", "position"]).any():
        raise ValueError("the readings hold a position twice; give those of one call of cp.analysis.read_states")
    return table


def _require_own(trace: "Trace", readings: pd.DataFrame) -> None:
    """Raises: ValueError if readings are of other rows than the trace has."""
    ours = trace.row_table.set_index("row")[["request_id", "position"]]
    theirs = readings[["row", "request_id", "position"]].drop_duplicates().set_index("row")
    found = ours.reindex(theirs.index)
    if not (found == theirs).all(axis=None):
        raise ValueError("the readings are of another run; read them with cp.analysis.read_states(trace, lens)")


def _texts_of(trace: "Trace") -> list[CommittedText]:
    """Returns the CommittedText of each request that generated a token."""
    finish = {str(request_id): reason for request_id, reason in trace.meta.get("finish", {}).items()}
    return [
        CommittedText(request, (*request.prompt_token_ids, *tokens), finish.get(str(request.request_id)) == "stop")
        for request in trace.requests
        if (tokens := trace.committed(request.request_id))
    ]
