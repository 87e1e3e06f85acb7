"""Builds a trace's table of lens readings, with the committed token and the verdict on the draft token."""

from typing import TYPE_CHECKING

import pandas as pd

from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.trace.manifest import UNREAD
from cacheprobe.trace.tables.draft_verdicts import with_read_tokens, with_verdicts
from cacheprobe.trace.tables.schema import typed
from cacheprobe.trace.tables.thoughts import as_hypotheses

if TYPE_CHECKING:
    from cacheprobe.trace.data import TraceData


def hypotheses_of(
    trace: "TraceData", include_rolled_back: bool, include_head: bool = False, request_id: int | None = None
) -> pd.DataFrame:
    """Returns the table of `Trace.hypotheses`: a DataFrame with one line for each lens reading (a layer of a row) and
    for each thought.

    include_rolled_back: also rows fed a rejected, later or abandoned draft token.
    include_head: also the rows of the drafter's head, whose layers follow those of the model.
    request_id: only this request's lines; None for all.
    Raises: ValueError if the run has no lens readings and no thoughts, and if Z is not read yet and has no model; with
    `include_head` also if no head was recorded.
    """
    thoughts = None
    if trace.thought_table is not None:
        thoughts = as_hypotheses(trace.thought_table, trace.meta["thought_layer"], trace.token_texts)
        thoughts = typed(with_read_tokens(thoughts, trace.row_table), "Trace.hypotheses")
        thoughts = thoughts if request_id is None else thoughts[thoughts.request_id == request_id]
    if thoughts is not None and trace.hypothesis_table is None and not trace.is_unread:
        table = thoughts
    elif thoughts is None:
        table = _readings(trace, request_id)
    else:
        table = pd.concat([_readings(trace, request_id), thoughts])
        table = table.sort_values(["request_id", "step", "row", "layer"], kind="stable")
    if include_head:
        head = trace.require_head()
        if head.recorded_readings is not None:  # None if it never drafted
            own = hypotheses_of(head, True, request_id=request_id)
            own = own.assign(row=own.row + len(trace.row_table), layer=own.layer + head.meta["head"]["first_layer"])
            table = pd.concat([table, own]).sort_values(["request_id", "step", "row", "layer"], kind="stable")
    if not include_rolled_back:
        table = table[~table.status.isin(DISCARDED_DRAFT)]
    return table.reset_index(drop=True)


def _readings(trace: "TraceData", request_id: int | None) -> pd.DataFrame:
    """Returns a copy of the trace's lens readings with verdicts, of one request or (None) of all. The first call
    computes them and keeps them in the trace."""
    if trace.judged_readings is None:
        trace.judged_readings = _judged(trace)
    if request_id is None:
        return trace.judged_readings.copy()
    return trace.lookup["readings"].lines_of(trace.judged_readings, request_id)


def _judged(trace: "TraceData") -> pd.DataFrame:
    """Returns the lens readings, each with the verdict on the draft token that it predicts. If none were recorded, the
    logit lens reads the stored states now. Raises: ValueError without readings, states or model."""
    if trace.hypothesis_table is not None:
        lengths = {request.request_id: request.num_prompt_tokens for request in trace.requests}
        return with_verdicts(trace.hypothesis_table, trace.row_table, trace.event_table, lengths, trace.token_texts)
    read = trace.reading_of_states if "S" in trace.store.sites and not trace.is_unread else None
    if read is not None and trace.model is not None:
        return read(trace)
    trace.require_there("Z")
    if trace.is_unread:
        raise ValueError(UNREAD)
    capture = trace.meta["capture"]
    if "Z" in capture["sites"]:
        filters = f"positions={capture['positions']}, phases={capture['phases']}"
        raise ValueError(f"the capture filters {filters} kept no row that predicts a generated token; widen them")
    if read is not None:
        raise ValueError(
            "this run read no lens, but kept S: hypotheses() reads it with the run's model, from "
            f"cp.load_trace(dir, cp.load_model({trace.fingerprint['model']!r}))"
        )
    raise ValueError("this run read no lens and kept no S; run it with 'Z' or 'S' in capture=")
