"""Runs cells in a worker process of the backend `processes`: reads cells as lines of JSON, and writes outcomes.

The process ends when its input ends, so after the end of the sweep it finishes at most its current cell.
"""

import json
import os
import signal
import sys
from dataclasses import asdict


def main() -> None:
    """Reads cells from stdin, one line of JSON each, runs each cell, and writes its JobOutcome to stdout as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep handles Ctrl-C
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries goes to stderr
    from cacheprobe.sweeps.workers.holder import Holder

    holder = Holder(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(asdict(holder.run(json.loads(line)))), file=answers, flush=True)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(1)  # the sweep has ended
