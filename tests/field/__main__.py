"""Measures model families as tiny random models: `python -m tests.field [FAMILY ...]`. Prints the table of
docs/families.txt, and exits with 1 if a family that loads fails a column."""

import sys
from collections.abc import Sequence

from tests.field import table


def main(names: Sequence[str]) -> int:
    """Measures the named families, by default all, prints the table, and returns the exit status."""
    rows = table.measure_all(table.names_to_measure(names))
    print(table.markdown(rows))
    print(table.counts(rows), file=sys.stderr)
    return int(any(not row.is_green and not row.is_refused for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
