"""Writes the report's sentences about a run as HTML, with every text of the run escaped."""

from typing import TYPE_CHECKING

import pandas as pd

from cacheprobe.core.values import JsonDict
from cacheprobe.trace.tables.draft_verdicts import verified_drafts
from cacheprobe.views.text import markup

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


def run_sentence(trace: "Trace", request_id: int) -> str:
    """Returns sentences as HTML on a run: the model, the numbers of requests and steps, the numbers of accepted and
    rolled-back draft tokens, and whether this request is deterministic."""
    fingerprint, note = trace.fingerprint, trace.meta["weights_note"]
    phases = trace.event_table.drop_duplicates("step").phase.value_counts()
    steps = ", ".join(f"{int(phases.get(phase, 0))} {phase}" for phase in ("prefill", "decode", "verify"))
    count = len(trace.requests)
    sentences = (
        f"<code>{markup(fingerprint['model'])}</code>{f' ({markup(note)})' if note else ''} "
        f"in {markup(fingerprint['dtype'])} "
        f"answered {count} request{'s' * (count != 1)} in {int(phases.sum())} steps ({steps}). "
    )
    drafter = trace.meta["drafter"]
    sentences += drafts_sentence(f"<code>{markup(drafter)}</code>" if drafter else "", trace.event_table) + " "
    kind = "deterministic: its tokens and states do not depend on the other requests" if (
        trace.requests[request_id].is_deterministic
    ) else "not deterministic: nothing is promised about the bits of its states"  # fmt: skip
    return sentences + f"This page follows request {request_id}, which is {kind}."


def drafts_sentence(drafter: str, events: pd.DataFrame) -> str:
    """Returns a sentence on what became of the draft tokens of a run. drafter: its name, inserted as it is; "" for the
    fast path."""
    drafted, accepted, rejected, rolled_back = verified_drafts(events)
    if not drafted:
        return "No draft token was verified."
    parts = f"{accepted} accepted, {rolled_back} rolled back"
    if behind := rolled_back - rejected:
        parts += f": {rejected} rejected, {behind} behind a rejected one"
    of_tokens = f"{drafted} token{'s' * (drafted != 1)} that {'was' if drafted == 1 else 'were'} verified"
    return f"{drafter or 'The fast path'} drafted {of_tokens}: {parts}."


def behaviour_sentences(behaviour: JsonDict | None) -> list[str]:
    """Returns a list of one or two texts as HTML: the model's accuracy in its task, and a warning unless the lower end
    of its 95 % interval is above chance; [] without a task. behaviour: meta["behaviour"] of the trace."""
    if not behaviour:
        return []
    b = behaviour
    accuracy_sentence = (
        f"Task: {_percent(b['accuracy'])} of {b['num_examples']} answers are right (95 % interval "
        f"{_percent(b['accuracy_low'])} to {_percent(b['accuracy_high'])}), chance is {_percent(b['chance'])}; "
        f"{b['num_unparsed']} gave no answer that can be read. The answer words hold {_percent(b['answer_mass'], 1)} "
        f"of the first token's probability; forced to choose between them, {_percent(b['forced_accuracy'])} are right."
    )
    warning = "Not above chance: this model does not solve the task, and nothing here is said about “its state”."
    return [accuracy_sentence] if is_above_chance(b) else [accuracy_sentence, f"<strong>{warning}</strong>"]


def is_above_chance(behaviour: JsonDict) -> bool:
    """Returns True if the lower end of the accuracy's 95 % interval is above chance; False if either number is
    unknown."""
    low, chance = behaviour["accuracy_low"], behaviour["chance"]
    return low is not None and chance is not None and low > chance


def _percent(share: float | None, digits: int = 0) -> str:
    return "unknown" if share is None else f"{share:.{digits}%}"
