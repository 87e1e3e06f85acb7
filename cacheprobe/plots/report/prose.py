"""Writes the report's sentences about a run, as markup with every text of the run escaped."""

from typing import TYPE_CHECKING

from cacheprobe.core.values import JsonDict
from cacheprobe.plots.text import markup

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


def run_sentence(trace: "Trace", request_id: int) -> str:
    """Returns the model, the number of passes and the drafter, in plain words."""
    finger, note = trace.fingerprint, trace.meta["weights_note"]
    phases = trace.event_table.drop_duplicates("step").phase.value_counts()
    steps = ", ".join(f"{int(phases.get(phase, 0))} {phase}" for phase in ("prefill", "decode", "verify"))
    count = len(trace.requests)
    said = (
        f"<code>{markup(finger['model'])}</code>{f' ({markup(note)})' if note else ''} in {markup(finger['dtype'])} "
        f"answered {count} request{'s' * (count != 1)} in {int(phases.sum())} passes ({steps}). "
    )
    drafter = trace.meta["drafter"]
    drafted = trace.num_drafted
    if drafted:
        lost = trace.num_rolled_back
        by = f"<code>{markup(drafter)}</code>" if drafter else "The fast path"
        said += f"{by} drafted {drafted} candidates that were verified: {drafted - lost} accepted, {lost} rolled back. "
    else:
        said += "Nothing was drafted. "
    kind = "deterministic: its tokens and states do not depend on the other requests" if (
        trace.requests[request_id].is_deterministic
    ) else "not deterministic: nothing is promised about the bits of its states"  # fmt: skip
    return said + f"This page follows request {request_id}, which is {kind}."


def behaviour_sentences(behaviour: JsonDict | None) -> list[str]:
    """Returns the model's accuracy on its task in words, with a warning if it is not above chance; [] without a
    task.
    """
    if not behaviour:
        return []
    b = behaviour
    said = (
        f"Task: {_percent(b['accuracy'])} of {b['num_examples']} answers are right (95 % interval "
        f"{_percent(b['accuracy_low'])} to {_percent(b['accuracy_high'])}), chance is {_percent(b['chance'])}; "
        f"{b['num_unparsed']} gave no answer that can be read. The answer words hold {_percent(b['answer_mass'], 1)} "
        f"of the first token's probability; forced to choose between them, {_percent(b['forced_accuracy'])} are right."
    )
    none = "Not above chance: this model does not solve the task, and nothing here is said about “its state”."
    return [said] if is_above_chance(b) else [said, f"<strong>{none}</strong>"]


def is_above_chance(behaviour: JsonDict) -> bool:
    """Returns whether the interval of the accuracy lies above chance; False if either is unknown."""
    low, chance = behaviour["accuracy_low"], behaviour["chance"]
    return low is not None and chance is not None and low > chance


def _percent(share: float | None, digits: int = 0) -> str:
    return "unknown" if share is None else f"{share:.{digits}%}"
