"""Makes requests and a recorder go on after the newest part of a journal."""

from collections.abc import Sequence
from dataclasses import replace

from cacheprobe.core.hook_names import PATTERN
from cacheprobe.core.records import Finished
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import STATUS_OF_REASON, Status
from cacheprobe.trace.journal import Journal
from cacheprobe.trace.manifest import CheckedFiles
from cacheprobe.trace.recording.lens_reader import Queued
from cacheprobe.trace.recording.recorder import Recorder
from cacheprobe.trace.state_store import header_of, read_tensors
from cacheprobe.trace.stored import GrowingRun
from cacheprobe.trace.tables.build import rows_in_use
from cacheprobe.trace.tables.token_history import COMMITTED, token_history


def restore_states(states: Sequence[SequenceState], journal: Journal) -> list[SequenceState]:
    """Gives each request its committed tokens and its end, as the journal has them. Returns the requests that have not
    ended; those with committed tokens count as preempted, so that the run computes their keys and values again."""
    tokens, ends, errors = journal.tokens, journal.gathered("finish"), journal.gathered("errors")
    for state in states:
        committed, reason = tokens[state.request_id], ends.get(str(state.request_id))
        state.token_ids = [*state.request.prompt_token_ids, *committed]
        if reason is not None:
            state.status = STATUS_OF_REASON.get(reason, Status.FINISHED)
            state.finish, state.error = reason, errors.get(str(state.request_id))
        elif committed:
            state.status = Status.PREEMPTED
    return [state for state in states if not state.is_ended]


def restore_recorder(recorder: Recorder, states: Sequence[SequenceState], journal: Journal) -> None:
    """Makes a new recorder go on after the newest part of the journal. states: of all requests, restored."""
    if not journal.parts:
        return
    last, step = journal.parts[-1], journal.last_step
    recorder.num_taken, recorder.kept.num_rows = last["num_rows"], last["num_states"]
    run = GrowingRun(journal)
    history = token_history(run.events)
    roles = history[history.outcome.isin(COMMITTED)].sort_values("place").groupby("request_id").outcome
    for state in states:
        own = roles.get_group(state.request_id).tolist() if state.request_id in roles.groups else []
        recorder.committed_roles(state.request_id, state.request.num_prompt_tokens, own)
        if state.is_ended:
            finish = Finished(state.request_id, step, state.finish or "", tuple(state.generated))
            recorder.finished[state.request_id] = finish
    recorder.answer_mass |= {int(key): tuple(mass) for key, mass in journal.gathered("answer_mass").items()}
    recorder.preemptions += [(request_id, at) for request_id, at in last["preemptions"]]
    recorder.num_compared = last["self_checks"]["compared"]
    recorder.differences += last["self_checks"]["differences"]
    stored = {check["name"]: check for check in last["checks"]}
    for name in ("residual_check", "lens_check"):
        check = getattr(recorder, name)
        setattr(recorder, name, replace(check, **stored.get(check.name, {})))
    _restore_shapes(recorder, run)
    _restore_readings(recorder, journal)
    in_use = rows_in_use(run.ledger).groupby("request_id").rows.last().to_dict()  # a head has no ledger
    for state in states:
        if state.status is Status.PREEMPTED and in_use.get(state.request_id):  # else it was preempted before the kill
            recorder.on_ledger(state.request_id, step, 0, in_use[state.request_id], "free")
            recorder.on_preempt(state.request_id, step)


def _restore_shapes(recorder: Recorder, run: GrowingRun) -> None:
    """Tells the recorder the shapes of activations of heads and modules, from the parts, if any are recorded."""
    wanted = (*recorder.config.heads, *recorder.kept.modules)
    if not wanted:
        return
    for name in run.shards:
        for key, entry in header_of(run.files, name).items():
            site, _, layer = key.rpartition(".")
            if site in wanted and entry["shape"] != [0]:
                heads = recorder.model.head_shape[0] if site == PATTERN else 1
                recorder.kept.shapes[site, int(layer)] = tuple(entry["shape"][1:]), heads


def _restore_readings(recorder: Recorder, journal: Journal) -> None:
    """Queues the rows that waited for their next token for the lens again."""
    waiting, reader = journal.waiting, recorder.reader
    if reader is None:
        return
    reader.errors |= {int(key): why for key, why in journal.gathered("lens_errors").items()}
    if waiting is None:
        return
    files = CheckedFiles(journal.directory, waiting)
    tensors = read_tensors(files, waiting["name"])
    counts = tensors["places"][:, 4].tolist()
    parts = (tensors["places"].tolist(), tensors["states"].split(counts), tensors["layers"].split(counts))
    for (row, position, request_id, step, _), states, layers in zip(*parts, strict=True):
        place = dict(request_id=request_id, step=step)
        reader.queue(request_id, Queued(row, position, states.to(recorder.model.device), layers, **place))
