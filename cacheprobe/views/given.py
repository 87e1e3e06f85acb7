"""Checks that the functions of `cp.plots` are given the tables that they draw, and keeps these with a picture."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple, ParamSpec, TypeVar

import pandas as pd

from cacheprobe.trace.tables.schema import TABLES
from cacheprobe.views.diagrams.frame import Markup

P = ParamSpec("P")
R = TypeVar("R")


class Drawn(NamedTuple):
    """Describes a table that a function draws: the code that makes it, and columns without which it is another."""

    code: str
    columns: str


_HYPOTHESES = Drawn("trace.hypotheses()", "layer status token_id agrees")
_EVENTS = Drawn("trace.events()", "request_id step committed_token_ids")
_ROWS = Drawn("trace.rows()", "request_id position status token_id")
_LEDGER = Drawn("trace.ledger(request_id, step)", "position provenance step")
_THOUGHTS = Drawn("trace.thoughts()", "chunk request_id token_ids said")
_GRID = Drawn("a result of cp.patching", "layer position token")


def _with(columns: str) -> Drawn:
    """Returns the description of a table that any code may make."""
    return Drawn(f"a table with the columns {', '.join(columns.split())}", columns)


TABLES_OF: dict[str, dict[str, Drawn]] = {
    "acceptance_curves": {"table": Drawn("cp.analysis.acceptance(trace, drafters)", "drafter layer window drafted")},
    "attribution": {"table": Drawn("cp.analysis.attribution(trace, request_id, position)", "row layer site logit")},
    "attribution_patching_grid": {"grid": _GRID},
    "cache_picture": {"ledger": _LEDGER},
    "carried_figure": {"table": _with("place layer treatment nld")},
    "coin_rows_figure": {"effects": _with("people unit where treatment n total flips")},
    "column_figure": {"table": Drawn("any table with a column of numbers", "")},
    "comparison": {"rows": _ROWS, "events": _EVENTS},
    "decode_grid": {"events": _EVENTS},
    "decoded_diagram": {"events": _EVENTS},
    "disagreement_figure": {"table": _with("drafter layer share low high control")},
    "draft_verdicts": {"hypotheses": _HYPOTHESES},
    "drift_figure": {"table": _with("head chain_step sink own norm known both")},
    "final_choice_figure": {"table": _with("kind layer share low high chance")},
    "flip_grid": {"table": Drawn("cp.analysis.flip(trace, request_id, step).table", "edit site layer change_nats")},
    "forcing_figure": {"table": _with("state patch kl")},
    "lens_grid": {"hypotheses": _HYPOTHESES},
    "patching_grid": {"grid": _GRID},
    "perplexity_figure": {"table": _with("lens layer perplexity")},
    "prediction_depth_figure": {"depths": Drawn("cp.analysis.prediction_depth(trace)", "prediction_depth num_flips")},
    "probe_figure": {"table": Drawn("cp.probes.fit(...).table", "at place site layer accuracy")},
    "request_text": {"rows": _ROWS, "events": _EVENTS, "hypotheses": _HYPOTHESES, "thoughts": _THOUGHTS},
    "rollback_prediction_figure": {"table": Drawn("cp.probes.rollback_prediction(...).table", "unit drafter auroc")},
    "routing_figure": {"table": Drawn("cp.analysis.routing(trace)", "layer expert weight position")},
    "simplex_figure": {"table": _with("panel a b c x y z")},
    "state_algorithm_figure": {"probes": _with("label layer place accuracy low high majority")},
    "sweep_grid": {"layers": Drawn("sweep.layers, from cp.load_sweep", "layer status")},
    "thought_card": {"thoughts": _THOUGHTS, "rows": _ROWS, "events": _EVENTS},
    "thoughts_picture": {"thoughts": _THOUGHTS, "rows": _ROWS, "events": _EVENTS, "ledger": _LEDGER},
    "timeline": {"events": _EVENTS},
    "token_card": {"hypotheses": _HYPOTHESES, "rows": _ROWS, "events": _EVENTS},
    "ways_figure": {"table": _with("way share low high right examples chance")},
    "window_diagram": {"events": _EVENTS},
}
"""Name of each function -> argument -> its table."""
_MADE_BY = {
    "rows": _ROWS.code, "events": _EVENTS.code, "thoughts": _THOUGHTS.code, "Trace.hypotheses": _HYPOTHESES.code,
    "Trace.ledger": _LEDGER.code, "Trace.rejected": "trace.rejected()", "attribution": "cp.analysis.attribution(...)",
    "prediction_depth": "cp.analysis.prediction_depth(trace)", "routing": "cp.analysis.routing(trace)",
}  # fmt: skip
"""Name of a schema -> the code that makes such a table."""


def checking_tables(draw: Callable[P, R]) -> Callable[P, R]:
    """Returns the function `draw` of `cp.plots` with a check of its tables before. Of a picture (`Markup`), `data` then
    holds the tables by argument.

    The function raises TypeError for another object in place of a table, and ValueError for a table without the needed
    columns. Both say what to give. An empty table passes: the function itself says what fills it.
    """
    signature, drawn = inspect.signature(draw), TABLES_OF.get(draw.__name__, {})

    @functools.wraps(draw)
    def checked(*args: P.args, **settings: P.kwargs) -> R:
        """Checks the tables, then draws."""
        given = signature.bind_partial(*args, **settings).arguments  # a wrong table is said before a missing argument
        for argument, table in drawn.items():
            value = given.get(argument)
            for one in value if isinstance(value, tuple) else (value,):
                if one is not None:
                    _require_table(f"{draw.__name__}: {argument}", one, table)
        made = draw(*args, **settings)
        if isinstance(made, Markup):
            made.data = _tables(given)
        return made

    return checked


def _require_table(what: str, given: object, drawn: Drawn) -> None:
    """Checks one argument. Raises: as `checking_tables` says."""
    wanted = f"give {drawn.code}"
    table = getattr(given, "table", given) if drawn is _GRID else given
    if not isinstance(table, pd.DataFrame):
        raise TypeError(f"{what} must be a table, got a {type(given).__name__}; {wanted}")
    lacking = [name for name in drawn.columns.split() if name not in table.columns]
    if lacking and not table.empty:
        known = {frozenset(TABLES[name]): code for name, code in _MADE_BY.items()}
        made_by = known.get(frozenset(map(str, table.columns)))
        which = f" (it is {made_by})" if made_by else ""
        raise ValueError(f"{what} has no column {lacking[0]!r}{which}; {wanted}")


def _tables(given: Mapping[str, object]) -> dict[str, "pd.DataFrame | tuple[pd.DataFrame, ...]"]:
    """Returns the tables among the arguments of a call; those of a list or tuple of tables as a tuple."""
    found: dict[str, pd.DataFrame | tuple[pd.DataFrame, ...]] = {}
    for name, value in given.items():
        if isinstance(value, pd.DataFrame):
            found[name] = value
        elif isinstance(value, list | tuple) and value and all(isinstance(one, pd.DataFrame) for one in value):
            found[name] = tuple(value)
    return found
