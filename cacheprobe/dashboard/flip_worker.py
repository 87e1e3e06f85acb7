"""Runs `cp.analysis.flip` in a process of its own, for the dashboard: `python -m cacheprobe.dashboard.flip_worker`.

Reads one line of JSON from stdin: run (directory), request, step, model (a name or directory; null for the run's own).
Writes lines of JSON to stdout: says (what it does now), or done and total (numbers of edits), and at the end table and
meta of the result, or error. Ends when stdin is closed, so that it does not outlive the dashboard.
"""

import json
import os
import sys
from threading import Thread
from typing import TYPE_CHECKING

from cacheprobe.core.values import JsonDict

if TYPE_CHECKING:
    from cacheprobe.analysis.flips import Flips


def main() -> None:
    """Answers the question on stdin, as the module's docstring says."""
    question = json.loads(sys.stdin.readline())
    Thread(target=_end_with_stdin, daemon=True).start()
    try:
        found = _found(question)
        table = json.loads(found.table.to_json(orient="split", index=False, double_precision=15))
        tell(table={name: table[name] for name in ("columns", "data")}, meta=found.meta)
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        tell(error=str(error.args[0] if isinstance(error, KeyError) and error.args else error))


def tell(**what: object) -> None:
    """Writes one line of JSON to stdout."""
    print(json.dumps(what), flush=True)


def _found(question: JsonDict) -> "Flips":
    """Loads the run and its model, and returns the result of `cp.analysis.flip`. A run without states is edited with
    zeros and means only."""
    tell(says="opening the run")
    from cacheprobe.analysis.flips import EDITS, RECORDED_EDITS, flip, rejection_of
    from cacheprobe.models.loaders import load_model, products_of
    from cacheprobe.trace.trace import load_trace

    trace = load_trace(question["run"])
    rejection_of(trace, question["request"], question["step"])  # before the model is loaded
    tell(says="loading the model")
    fingerprint = trace.fingerprint
    model = load_model(
        question["model"] or fingerprint["model"], dtype=fingerprint["dtype"], device=fingerprint["device"],
        adapter=fingerprint.get("adapter"), products=products_of(fingerprint.get("readings", "torch")), progress=False,
    )  # fmt: skip
    computed = [kind for kind in EDITS if kind not in RECORDED_EDITS]
    edits = None if set(trace.store.sites) & set("STC") else computed
    tell(says="reading the text")
    request, step = question["request"], question["step"]
    return flip(trace, request, step, model=model, edits=edits, progress=_tell_progress)


def _tell_progress(done: int, total: int) -> None:
    tell(done=done, total=total)


def _end_with_stdin() -> None:
    """Ends the process as soon as stdin is closed: the dashboard has ended, or has no more use for the result."""
    while os.read(sys.stdin.fileno(), 4096):  # not sys.stdin.read, whose lock Python waits for at its end
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
