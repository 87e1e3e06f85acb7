"""Describes a run in a few lines of text, for terminals."""

import pandas as pd

from cacheprobe.analysis.measures import agreement, lens_readings, prediction_depth, prediction_depth_by_verdict
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.tables.draft_verdicts import parting, shares_by_verdict
from cacheprobe.trace.trace import Trace


def behaviour_line(behaviour: JsonDict) -> str:
    """Returns one line of text on a run's answers to its task: accuracy, chance level and answer mass. Answer mass is
    the mean probability that the first token begins an answer word. behaviour: as in `trace.meta["behaviour"]`."""
    b = behaviour
    line = (
        f"behaviour: {b['accuracy']:.0%} of {b['num_examples']} answers right "
        f"(95 % interval {b['accuracy_low']:.0%} to {b['accuracy_high']:.0%}, {b['num_unparsed']} without an answer), "
        f"chance {b['chance']:.0%}; "
    )
    mass = b["answer_mass"]
    line += (
        "the answer words have no first token of their own with this tokenizer"
        if mass is None
        else f"the answer words get {mass:.2%} of the first token's mass"
    )
    if b["accuracy_low"] <= b["chance"]:
        line += "; not above chance, so nothing here speaks of the model's state of the task"
    return line


def summary(trace: Trace) -> str:
    """Returns text that describes a run: its size, model and self-checks, and, if it has lens readings, at which layers
    they agree with the committed tokens.

    One fact a line; the readings are grouped by layer and verdict on the draft token.
    """
    fingerprint, note = trace.fingerprint, trace.meta["weights_note"]
    platform = (
        f"{fingerprint['dtype']}, {fingerprint['path']} on {fingerprint['device']}, {fingerprint['threads']} threads"
    )
    lines = [repr(trace), f"model {fingerprint['model']}, {platform}" + (f" ({note})" if note else "")]
    for check in trace.meta["checks"]:
        lines.append(
            f"check: {check['name']} in {check['dtype']} on {check['num_rows']} rows, "
            f"worst error {check['worst']:.2f} of the tolerance, {check['tolerance']}"
        )
    if trace.is_unread:  # a summary is no reason to read it
        lines.append('Z: not read yet (lens="later"); trace.hypotheses() reads it from the stored S')
    elif trace.hypothesis_table is not None:
        hypotheses = lens_readings(trace)
        table = agreement(hypotheses)
        layers = sorted({int(layer) for layer in table.index[:: max(len(table) // 6, 1)]} | {int(table.index[-1])})
        lines += [f"{parting(shares_by_verdict(hypotheses))}."]
        lines += [
            "share of readings with the committed token first, by layer and verdict of the draft:",
            table.loc[layers].round(2).to_string(na_rep="-"),
        ]
        lines += [
            "prediction depth, by verdict of the draft and kind of pass:",
            prediction_depth_by_verdict(prediction_depth(hypotheses)).round(1).to_string(),
        ]
    return "\n".join(lines)


def thoughts_text(trace: Trace, request_id: int) -> str:
    """Returns text with the committed thoughts of one request, one line for each chunk, and a last line with the
    generated text.

    A line has the chunk's text, the thought, and notes: whether the thought is true, and whether it was cut.
    """
    table = trace.thoughts()
    committed = table[(table.request_id == request_id) & (table.status == "committed")].sort_values("end")
    rows = trace.rows(request_id, "committed").set_index("position").token
    lines = []
    for thought in committed.itertuples():
        chunk_text = " ".join(str(rows[at]) for at in range(thought.start, thought.end + 1))
        marks = []
        if not pd.isna(thought.true_state):  # of an empty thought, which says nothing, `agrees` is null
            is_true = not pd.isna(thought.agrees) and bool(thought.agrees)
            marks.append("true" if is_true else f"it is {thought.true_state}")
        if not thought.has_ended:
            marks.append("cut at the limit")
        lines.append(f"  {chunk_text:<36} -> {thought.text}" + (f"  ({'; '.join(marks)})" if marks else ""))
    return "\n".join([*lines, f"  answer: {trace.text(request_id)}"])


def closing(trace: Trace, is_behaviour_printed: bool) -> str:
    """Returns the text that is printed at the end of a run: its summary, after the accuracy on its task.

    is_behaviour_printed: leave out the accuracy, because the progress bar has already printed it.
    """
    behaviour = trace.meta["behaviour"]
    lines = [behaviour_line(behaviour)] if behaviour and not is_behaviour_printed else []
    return "\n".join([*lines, summary(trace)])
