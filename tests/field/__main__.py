"""Prints the table of families: `python -m tests.field [FAMILY ...]`; exits with 1 if a family's tokens differ."""

import contextlib
import io
import sys
import warnings

import transformers

from tests.field.family_checks import check_family, table
from tests.field.family_models import model_types

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    with contextlib.redirect_stdout(io.StringIO()):  # some families print notes about their arguments
        rows = [check_family(model_type) for model_type in sys.argv[1:] or model_types()]
    print(table(rows))
    for outcome in ("compared", "refused", "not tried"):
        print(f"{outcome}: {sum(row.outcome == outcome for row in rows)}")
    sys.exit(any(row.is_failure for row in rows))
