"""Measures families one after the other in a process of its own, and writes each row as a line of JSON to stdout."""

import json
import os
import sys
import warnings

import torch

from cacheprobe.cli.doctor.families.rows import measure


def main(names: list[str]) -> None:
    """Writes the row of each name, as soon as it is measured."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no row
    for name in names:
        print(json.dumps(measure(name).to_json()), file=rows, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
