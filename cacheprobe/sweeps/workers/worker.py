"""A worker process of the `processes` backend: a cell comes in as a line of JSON, its outcome goes out as one.

It ends when its input does, so it does not outlive the sweep by more than the cell that it is at.
"""

import json
import os
import signal
import sys
from dataclasses import asdict


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the sweep's to answer
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    from cacheprobe.sweeps.workers.holder import Holder

    holder = Holder(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(asdict(holder.run(json.loads(line)))), file=answers, flush=True)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(1)  # the sweep is gone; nobody is left to tell
