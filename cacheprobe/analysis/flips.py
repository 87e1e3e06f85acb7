"""Finds which edits of the verifier's states would have made it choose a rejected draft token."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.hook_names import SITES
from cacheprobe.core.settings import SamplingParams
from cacheprobe.core.tokens import visible
from cacheprobe.core.values import JsonDict, require_one_of
from cacheprobe.edits.patching.cells import Edit, PatchingCell, Run, cell, read, run_once
from cacheprobe.edits.patching.grid import difference
from cacheprobe.edits.patching.sweep import CellProgress, CellStore, Group, Index, sweep
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import PATHS, usable
from cacheprobe.ops.sampling import choose_token
from cacheprobe.trace.recording.stored_states import require_model
from cacheprobe.trace.tables.draft_verdicts import drafts_table

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

EDITS = ("zero", "mean", "drafter", "drafted")
"""Kinds of edit; `flip` says what each writes."""
RECORDED_EDITS = ("drafter", "drafted")
"""Edits that write states which the trace must hold."""


@dataclass(frozen=True, eq=False)
class Flips:
    """Holds the result of `flip`: a table with one line for each edit, and metadata."""

    table: pd.DataFrame = field(repr=False)
    """One line for each edit; `flip` lists the columns."""
    meta: JsonDict = field(repr=False)
    """request_id, step; position of the rejected token, whose edited states stand one position earlier; drafted_token
    and committed_token, which the verifier chose instead, with _id too; difference_nats, the log-probability of the
    drafted token minus that of the committed one, without an edit; model; left_out, one sentence for each kind of edit,
    or site, that the table lacks, with the reason."""

    def __repr__(self) -> str:
        at = self.meta
        return (
            f"Flips(request {at['request_id']}, step {at['step']}, position {at['position']}: {at['drafted_token']!r} "
            f"instead of {at['committed_token']!r} after {self.table.flips.sum()} of {len(self.table)} edits)"
        )

    def plot(self) -> object:
        """Returns `cp.plots.flip_grid` of this result: a plotly figure, layers upwards, sites and edits across."""
        draw: Callable[[pd.DataFrame], object] = import_module("cacheprobe.views").flip_grid  # plots import analyses
        return draw(self.table)


class Rejection(NamedTuple):
    """Holds one rejected draft token: where it stood, what the verifier chose instead, and the text before it."""

    request_id: int
    step: int
    position: int
    drafted_token_id: int
    committed_token_id: int
    drafted_step: int
    """The step that drafted the token."""
    token_ids: tuple[int, ...]
    """Token ids of the text before the drafted token, its prompt included; `position` tokens."""


@torch.inference_mode()
def flip(
    trace: "Trace",
    request_id: SupportsIndex,
    step: SupportsIndex,
    *,
    model: CachedLM | None = None,
    sites: str = "".join(SITES),
    edits: Iterable[str] | None = None,
    progress: "bool | CellProgress" = True,
) -> Flips:
    """Edits one state at a time where a draft token was rejected, and returns which edits make the verifier choose the
    draft token, as Flips.

    The judged position is the one before the rejected token: its logits judged the draft. For each edit, the committed
    text up to there is run with one state of that position replaced, at one layer and site; earlier positions keep
    their keys and values. The verifier's choice follows the request's sampling settings and noise.

    step: the verify step that rejected the draft, as in `Trace.rejected`.  model: by default the trace's own.
    sites: S (residual stream after the layer), T (attention output), C (MLP output).
    edits: kinds of edit; by default all that the trace has states for:
    - zero: zeros.  mean: the mean of the same layer and site over the request's earlier positions, without position 0
      (its states are far larger in many models) unless it is the only one.
    - drafter: the drafter's states at the judged position when it proposed the token. A drafter that stopped at an
      early layer has its last S in the layers above, as if these were skipped. Needs a drafter that runs this model.
    - drafted: the states of the drafted token's own row, one position later, from the verify pass that rejected it.
    progress: whether to draw a bar; or a function that is called with (finished edits, all edits) instead.
    The table has request_id, step, position, drafted_token, committed_token; edit, site, layer, from_layer (the layer
    whose state was written; null for zero); token_id and token (the choice after the edit), flips (whether it is the
    drafted token), difference_nats (log-probability of the drafted minus the committed token), and change_nats
    (difference_nats minus that without an edit).
    Raises: KeyError for an unknown request; ValueError if the step rejected no draft of the request; if `edits` names
    states that the trace lacks; as `require_reproducible`; if the model has other weights, or chooses another token
    than the verifier. ModelError for a model without `editing`.
    Source: zero and mean ablation as in Wang et al. 2022 (arXiv 2211.00593); states of another run, Vig et al. 2020
    (arXiv 2004.12265).
    Twin: tests.twins.flip_slowly.flip_slowly: one plain forward for each edit, close(1e-4) in float32.
    """
    one = rejection_of(trace, int(request_id), int(step))
    require_reproducible(trace, one)
    for site in sites:
        require_one_of("site", site, ("S", "T", "C"))
    path = str(trace.fingerprint.get("path"))
    lm = usable(require_model(trace, model), path if path in PATHS else "auto")
    base = run_once(lm, one.token_ids, sites)
    sampling = trace.requests[one.request_id].sampling or SamplingParams()

    def choose(logits: Tensor) -> int:
        """Returns the token id that the request chooses for the rejected position from logits [v]."""
        return choose_token(logits, sampling, one.token_ids, one.position)

    _require_same_choice(lm, one, base, choose(base.logits))
    states, left_out = _states_to_write(trace, one, base, sites, edits)
    answer = (one.drafted_token_id, one.committed_token_id)
    pair = ((answer[0],), (answer[1],))
    found = sweep(lm, _groups(base, states), pair, CellStore(None, {}), progress, choose)
    drafted, committed = (visible(text) for text in lm.token_texts(answer))
    place: JsonDict = dict(request_id=one.request_id, step=one.step, position=one.position)
    texts: JsonDict = dict(drafted_token=drafted, committed_token=committed)
    ids: JsonDict = dict(drafted_token_id=answer[0], committed_token_id=answer[1])
    unedited = difference(read(base.logits[None], answer)[0])
    meta = {**place, **texts, **ids, "difference_nats": unedited, "model": lm.name, "left_out": left_out}
    results = [found[i,] for i in range(len(states))]
    tops = [result.top for result in results]
    table = pd.DataFrame([written[:4] for written in states], columns=["edit", "site", "layer", "from_layer"])
    for column, (name, value) in enumerate({**place, **texts}.items()):
        table.insert(column, name, value)
    differences = [difference(result) for result in results]
    table = table.assign(
        from_layer=table.from_layer.astype("Int64"),
        token_id=tops,
        token=[visible(text) for text in lm.token_texts(tops)],
        flips=[top == answer[0] for top in tops],
        difference_nats=differences,
        change_nats=[value - unedited for value in differences],
    )
    return Flips(table, meta)


def rejection_of(trace: "Trace", request_id: int, step: int) -> Rejection:
    """Returns the Rejection of a draft of this request in this step. Raises: KeyError for an unknown request;
    ValueError if the step rejected no draft of the request."""
    trace.committed(request_id)  # raises an error for an unknown request
    drafts = drafts_table(trace.event_table)
    rejected = drafts[(drafts.request_id == request_id) & (drafts.verdict == "rejected")]
    found = rejected[rejected.judged == step]
    if found.empty:
        steps = ", ".join(map(str, sorted(rejected.judged))) or "none"
        raise ValueError(
            f"request {request_id} step {step}: expected a step that rejected a draft of the request, got one that "
            f"rejected none; those of this request are: {steps}; trace.rejected() lists all"
        )
    line = found.iloc[0]
    events = trace.event_table
    event = events[(events.request_id == request_id) & (events.step == step)].iloc[0]
    position = trace.requests[request_id].num_prompt_tokens + int(line.place)
    text = (*trace.requests[request_id].prompt_token_ids, *trace.committed(request_id))[:position]
    chosen = int(event.target_token_ids[int(event.num_accepted)])
    return Rejection(request_id, step, position, int(line.drafted_token_id), chosen, int(line.born), text)


def require_reproducible(trace: "Trace", one: Rejection) -> None:
    """Raises: ValueError if computing the request's text again would not give the run's verdict: the run had
    interventions, or began with cached keys and values, or its verdict depends on probabilities that are not stored;
    and for a model of `ThinkingLM`, whose states are not edited."""
    request, about = trace.requests[one.request_id], f"request {one.request_id} step {one.step}"
    if trace.fingerprint.get("path") == "thinking":
        raise ValueError(
            f"{about}: expected a run of a Hugging Face model, got one of {trace.fingerprint.get('model')}, which is "
            "built here, with or without thoughts; its states are not edited; choose another run"
        )
    if trace.meta.get("interventions"):
        raise ValueError(
            f"{about}: expected a run without interventions, got one that they changed; run it again without them"
        )
    if request.cached is not None or "cached" in trace.fingerprint:
        raise ValueError(
            f"{about}: expected a run that read its prompts, got one that went on from cached keys and values; run the "
            "whole prompt"
        )
    if request.forced_token_ids:
        raise ValueError(
            f"{about}: expected a token that the verifier chose, but the tokens of a replay were forced; choose "
            "another run"
        )
    sampling = request.sampling
    is_sampled = sampling is not None and not sampling.is_greedy and not request.is_deterministic
    if is_sampled and trace.meta["config"].get("acceptance", "equality") == "rejection":
        raise ValueError(
            f"{about}: expected a verdict by equality of tokens, got one by acceptance='rejection', which depends on "
            "the drafter's probabilities, which are not stored; run it with acceptance='equality'"
        )


def _require_same_choice(model: CachedLM, one: Rejection, base: Run, got: int) -> None:
    """Raises: ValueError if the run without an edit chose another token, `got`, than the verifier did."""
    if got != one.committed_token_id:
        expected_text, got_text = (visible(text) for text in model.token_texts([one.committed_token_id, got]))
        logits = base.logits.double()
        raise ValueError(
            f"request {one.request_id} step {one.step}: expected {expected_text!r}, the verifier's choice, of a run "
            f"without an edit, got {got_text!r}, {float(logits[got] - logits[one.committed_token_id]):+.3g} nats "
            "apart: rounding decided this verdict, or the run had hooks; choose another step, or run in float32"
        )


class _Written(NamedTuple):
    """Holds one edit: its kind, site and layer, the layer whose state it writes (None for zeros), and the state."""

    edit: str
    site: str
    layer: int
    from_layer: int | None
    state: Tensor
    """[m]"""


def _states_to_write(
    trace: "Trace", one: Rejection, base: Run, sites: str, edits: Iterable[str] | None
) -> tuple[list[_Written], list[str]]:
    """Returns (list of edits, list of sentences on what was left out), ordered by kind, site and layer.

    Raises: ValueError for an unknown kind of edit, and for states that `edits` names and the trace lacks.
    """
    kinds = EDITS if edits is None else tuple(dict.fromkeys(edits))
    unknown = [kind for kind in kinds if kind not in EDITS] if kinds else [""]
    if unknown:
        raise ValueError(f"unknown edit {unknown[0]!r}; edits are {', '.join(EDITS)}")
    about = f"request {one.request_id} step {one.step}"
    written: list[_Written] = []
    left_out: list[str] = []
    for kind in kinds:
        if kind in RECORDED_EDITS:
            found, reasons = _recorded_states(trace, one, base, kind, sites)
        else:
            found = _computed_states(base, kind, sites)
            reasons = [] if found else ["the text before the drafted token has one token, so none is earlier"]
        if not found and edits is not None:
            raise ValueError(
                f"{about}: expected states for the edit {kind!r}, got none: {'; '.join(reasons)}; leave "
                "the edit out, or run it again with capture='STCZ'"
            )
        written += found
        left_out += [f"{kind}: {reason}" for reason in reasons]
    return written, left_out


def _computed_states(base: Run, kind: str, sites: str) -> list[_Written]:
    """Returns the edits of the kind "zero" or "mean" at these sites, of all layers."""
    written = []
    for site in sites:
        for layer in range(sum(name == "S" for name, _ in base.states)):
            states = base.at(site, layer)
            earlier = states[1:-1] if len(states) > 2 else states[:-1]
            if kind == "mean" and not len(earlier):  # a text of one token
                continue
            state = torch.zeros_like(states[0]) if kind == "zero" else earlier.double().mean(0).to(states.dtype)
            written.append(_Written(kind, site, layer, None if kind == "zero" else layer, state))
    return written


def _recorded_states(
    trace: "Trace", one: Rejection, base: Run, kind: str, sites: str
) -> tuple[list[_Written], list[str]]:
    """Returns (edits of the kind "drafter" or "drafted", reasons why sites or all of them are missing)."""
    table = trace.rows(one.request_id)
    if kind == "drafter":
        rows = table[(table.step == one.drafted_step) & (table.position == one.position - 1)]
        rows = rows[rows.phase == "decode"]
        missing = "the drafter ran no pass of this model at the judged position"
    else:
        rows = table[(table.step == one.step) & (table.position == one.position)]
        missing = "the verify pass was not fed the drafted token"
    if rows.empty:
        return [], [missing]
    if int(rows.iloc[-1].state_index) < 0:
        return [], ["the capture filters kept no states of that row"]
    row, num_layers = rows.iloc[[-1]], int(rows.iloc[-1].num_layers)
    reasons = [f"site {site} was not captured" for site in sites if site not in trace.store.sites]
    all_layers = range(sum(name == "S" for name, _ in base.states))
    absent = [str(layer) for layer in all_layers if layer not in trace.store.layers]
    if absent:
        reasons.append(f"layers {', '.join(absent)} were not captured")
    written = []
    for site in (site for site in sites if site in trace.store.sites):
        for layer in all_layers:
            source = min(layer, num_layers - 1) if site == "S" else layer
            if source < num_layers and source in trace.store.layers:
                like = base.at(site, layer)
                state = trace.vectors(site, source, row)[0].to(like.device, like.dtype)
                written.append(_Written(kind, site, layer, source, state))
    return written, reasons


def _groups(base: Run, states: Sequence[_Written]) -> list[Group]:
    """Returns the groups of patched runs, one for each kind and site of edit. Cell i writes states[i] at the last
    position of the run `base`."""
    last = (len(base.token_ids) - 1,)
    by_kind: dict[tuple[str, str], dict[Index, PatchingCell]] = {}
    for i, one in enumerate(states):
        edit = Edit((one.site, one.layer), last, one.state[None])
        by_kind.setdefault((one.edit, one.site), {})[i,] = cell([edit])

    def group(name: str, cells: Mapping[Index, PatchingCell]) -> Group:
        """Returns the group of these cells. The answers are single tokens, so no token follows the run."""
        return Group(name, lambda begins: base, lambda begins: cells, list(cells))

    return [group(f"{edit}-{site}", cells) for (edit, site), cells in by_kind.items()]
