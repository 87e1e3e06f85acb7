"""Makes the plan and the requests of a run that was recorded to disk and not finished, from its journal."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cacheprobe.core.config import CaptureConfig, TokenRow
from cacheprobe.core.records import DraftCosts
from cacheprobe.core.values import JsonDict
from cacheprobe.edits.interventions.base import Intervention
from cacheprobe.edits.interventions.functions import Function
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.execution import PreparedRun, prepare
from cacheprobe.engine.fingerprint import require_same
from cacheprobe.engine.plan import make_plan
from cacheprobe.lenses.base import Lens
from cacheprobe.lenses.dictionaries import Dictionary
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import PATHS
from cacheprobe.trace.data import TraceData
from cacheprobe.trace.importers.common import KIND as IMPORT
from cacheprobe.trace.journal import Journal, read_journal
from cacheprobe.trace.manifest import MANIFEST, TraceError
from cacheprobe.trace.recording.restore import restore_states
from cacheprobe.trace.recording.stored_states import LATER
from cacheprobe.trace.storage import request_from_record
from cacheprobe.trace.stored import GrowingRun
from cacheprobe.trace.tables.edits import changed_rows
from cacheprobe.trace.trace import trace_of

REFERENCE = "reference"
"""Entry "kind" of the metadata of a run of `cacheprobe.reference`."""


def unfinished_run(directory: Path) -> Journal:
    """Returns the journal of the unfinished run in a directory. Raises: TraceError if there is none, if it is damaged,
    and for an import or a run of the slow reference, which cannot go on."""
    journal = read_journal(directory)
    if journal is None:
        found = "holds a finished run" if (directory / MANIFEST).exists() else "holds no run that was recorded to disk"
        raise TraceError(f"{directory} {found}; there is nothing to continue")
    kind = journal.header["meta"]["kind"]
    for refused, name, again in ((IMPORT, "import", "import again"), (REFERENCE, "reference run", "run it again")):
        if kind == refused:
            raise TraceError(
                f"the {name} in {directory} was not finished, and cannot be continued; {again} with "
                "--overwrite (in Python: overwrite=True). cp.load_trace reads what was written of it"
            )
    return journal


def prepare_again(
    journal: Journal,
    model: CachedLM,
    drafter: Drafter | None,
    lens: Lens | None,
    interventions: "Intervention | Iterable[Any]",
    keep: "Callable[[TokenRow], bool] | None" = None,
    dictionary: Dictionary | None = None,
) -> PreparedRun:
    """Returns the run of a journal, with the state of each request at the journal's end.

    Raises: ValueError, FingerprintMismatch as `cacheprobe.resume`.
    """
    meta = journal.header["meta"]
    if meta["drafter"] != (given := repr(drafter) if drafter else None):
        raise ValueError(f"the run in {journal.directory} had the drafter {meta['drafter']}, given is {given}")
    if started := journal.header["from_snapshots"]:
        raise ValueError(f"request {started[0]} began from a KVSnapshot, which is not stored; run it again")
    capture = meta["capture"]
    given = CaptureConfig(keep=keep, dictionary=dictionary).record()
    if given["dictionary"] != capture.get("dictionary"):
        raise ValueError(
            f"the run in {journal.directory} recorded features of {_titled(capture.get('dictionary'))}, given is "
            f"{_titled(given['dictionary'])}; give cp.resume, or `cacheprobe resume --dictionary`, the same one"
        )
    kept_by = given["keep"]
    if kept_by != capture.get("keep"):
        raise ValueError(
            f"the run in {journal.directory} chose the rows to keep with the predicate keep={capture.get('keep')}, "
            f"which is not stored; given is {kept_by}; give cp.resume the same one"
        )
    path = meta["fingerprint"].get("path")
    layers = tuple(capture["layers"]) if capture["sites"] or capture["heads"] or capture.get("modules") else None
    settings = {
        **meta["config"],
        "drafter": drafter,
        "capture": CaptureConfig(
            **{**capture, "sites": capture["sites"] or None, "layers": layers, "keep": keep, "dictionary": dictionary}
        ),
        "lens": LATER if meta.get("is_lens_later") else lens,
        "path": path if path in PATHS else "auto",  # a Thinking States model has one path, which is not asked for
        "interventions": interventions,
    }
    requests = [request_from_record(item) for item in journal.header["requests"]]
    plan = make_plan(model, requests, settings, is_on_disk=True)
    _require_told_apart(plan.interventions)
    had, given_lens = meta["fingerprint"].get("lens"), plan.fingerprint().get("lens")
    if plan.lens.name != meta["lens"] or (had is not None and had != given_lens):
        raise ValueError(
            f"the run in {journal.directory} read the lens {had or meta['lens']}, given is "
            f"{given_lens or plan.lens.name}"
        )
    for made, stored in zip(plan.requests, journal.header["requests"], strict=True):
        if list(made.prompt_token_ids) != stored["prompt_token_ids"]:
            raise ValueError(
                f"request {made.request_id}: the model's tokenizer gives its prompt other tokens than the run had"
            )
    costs = meta.get("draft_costs")
    run = prepare(plan, draft_costs=None if costs is None else DraftCosts.from_record(costs))
    require_same(meta["fingerprint"], run.plan.fingerprint(), "the unfinished run and its continuation")
    restore_states(run.states, journal)
    return _with_earlier_rows(run, journal)


def _require_told_apart(interventions: Sequence[Intervention]) -> None:
    """Checks that the functions of hooks can be compared with those of the unfinished run. Raises: ValueError for a
    function that uses a value which its digest does not include."""
    for one in interventions:
        if isinstance(one, Function) and one.unnamed:
            raise ValueError(
                f"{one}: its function uses {one.unnamed}, which cannot be compared with that of the unfinished "
                "run; start a new run, with a function that uses numbers, tensors and functions only"
            )


def _titled(dictionary: JsonDict | None) -> str:
    """Returns a stored dictionary's hook point and the first digits of its SHA-256."""
    return "no dictionary" if not dictionary else f"a dictionary at {dictionary['hook']} ({dictionary['sha256']:.12})"


def _with_earlier_rows(run: PreparedRun, journal: Journal) -> PreparedRun:
    """Returns the run, whose editors know what they changed in the rows of the journal, and whose head goes on after
    its rows there. Raises: FingerprintMismatch for another head."""
    if run.editor is None and run.head is None:
        return run
    trace, first = trace_of(GrowingRun(journal), None), run.plan.model.n_layers
    edits = trace.meta.get("interventions", ())
    if run.editor is not None:
        run.editor.written = _written(trace, [one for one in edits if one["layer"] < first])
    if run.head is None or trace.head is None:
        return run
    own = {**run.plan.fingerprint(), **run.head.fingerprint()}
    require_same(trace.head.fingerprint, own, "the unfinished run's draft head and that of its continuation")
    if run.head_editor is not None:
        of_head = [{**one, "layer": one["layer"] - first} for one in edits if one["layer"] >= first]
        run.head_editor.written = _written(trace.head, of_head)
    rows = trace.head.row_table
    newest = rows[rows.status == "committed"].groupby("request_id").position.max()
    return replace(run, head_positions=newest.to_dict())


def _written(trace: TraceData, edits: Sequence[JsonDict]) -> list[set[int]]:
    """Returns, for each intervention, the positions that it changed when they were last computed."""
    found = []
    for edit in edits:
        newest = trace.rows(edit["request_id"]).drop_duplicates("position", keep="last")
        found.append({*newest.position[newest.row.isin(changed_rows(trace, edit).row)]})
    return found
