"""Compile every kernel for the architectures it is meant for, on a machine without a GPU, and print what they take.

    python -m cacheprobe_kernels.checks.compile_all [--table FILE]

Exits 1 where a kernel spills registers, asks for more shared memory than there is, or would be compiled otherwise for
another number of rows.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import triton

from cacheprobe.core.files import write_whole
from cacheprobe.core.registry import available
from cacheprobe_kernels.checks.builds import Build, all_builds, schedule_complaints

_COLUMNS = ("kernel", "function", "dtype", "arch", "registers", "shared_bytes", "spill_bytes")


def table(built: list[Build]) -> str:
    """Lines of a table in Markdown."""
    rows = [_COLUMNS, tuple("---" for _ in _COLUMNS), *(tuple(str(v) for v in asdict(one).values()) for one in built)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="also write the table to this file")
    given = parser.parse_args()
    built = list(all_builds())
    text = table(built)
    print(text)
    if given.table:
        write_whole(given.table, lambda path: path.write_text(text + "\n", encoding="utf-8"))
    complaints = [one.complaint for one in built if one.complaint]
    complaints += [text for kernel in available("kernels").values() for text in schedule_complaints(kernel)]
    good = f"{len(built)} builds with triton {triton.__version__}: no spills, one build for any number of rows"
    print("\n".join(complaints) or good)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
