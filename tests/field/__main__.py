"""Measures model families as tiny random models: `python -m tests.field [--json | --markdown] [FAMILY ...]`. Prints the
table, and exits with 1 if a family that loads fails a column."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from cacheprobe.core import terminal
from tests.field import table


def main(arguments: Sequence[str]) -> int:
    """Measures the named families, by default all, prints them, and returns the exit status."""
    forms = {one for one in arguments if one in ("--json", "--markdown")}
    rows = table.measure_all(table.names_to_measure([one for one in arguments if one not in forms]))
    if "--json" in forms:
        print(json.dumps([{**asdict(row), "is_green": row.is_green} for row in rows], indent=1))
    elif "--markdown" in forms:
        print(table.markdown(rows))
    else:
        terminal.show(table.listings(rows))
    return int(any(not row.is_green and not row.is_refused for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
