"""Runs `cp.analysis.flip` in a process of its own, for the dashboard.

Started as `python -m cacheprobe.views.dashboard.flip_worker`.

Reads one line of JSON from stdin: run (directory), request, step, model (a name or directory; null for the run's own).
Writes lines of JSON to stdout: says (what it does now), or done and total (numbers of edits), and at the end table and
meta of the result, or error. Ends when stdin is closed, so that it does not outlive the dashboard.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, TextIO

from cacheprobe.core.values import JsonDict

if TYPE_CHECKING:
    from cacheprobe.analysis.flips import Flips


def main() -> None:
    """Answers the question on stdin, as the module's docstring says."""
    question = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    tell = partial(_tell, answers)
    Thread(target=_end_with_stdin, daemon=True).start()
    try:
        found = _found(question, tell)
        table = json.loads(found.table.to_json(orient="split", index=False, double_precision=15))
        tell(table={name: table[name] for name in ("columns", "data")}, meta=found.meta)
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        tell(error=str(error.args[0] if isinstance(error, KeyError) and error.args else error))


def _tell(answers: TextIO, **what: object) -> None:
    """Writes one line of JSON."""
    print(json.dumps(what), file=answers, flush=True)


def _found(question: JsonDict, tell: Callable[..., None]) -> "Flips":
    """Loads the run and its model, and returns the result of `cp.analysis.flip`."""
    tell(says="opening the run")
    from cacheprobe.analysis.flips import flip, rejection_of, require_reproducible
    from cacheprobe.models.loaders import model_of_run
    from cacheprobe.trace.trace import load_trace

    trace = load_trace(question["run"])
    request, step = question["request"], question["step"]
    require_reproducible(trace, rejection_of(trace, request, step))  # before the model is loaded
    tell(says="loading the model")
    model = model_of_run(trace.fingerprint, question["model"], progress=False)
    tell(says="reading the text")
    return flip(trace, request, step, model=model, progress=lambda done, total: tell(done=done, total=total))


def _end_with_stdin() -> None:
    """Ends the process as soon as stdin is closed: the dashboard has ended, or has no more use for the result."""
    while os.read(sys.stdin.fileno(), 4096):  # not sys.stdin.read, whose lock Python waits for at its end
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
