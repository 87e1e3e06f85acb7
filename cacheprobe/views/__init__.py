"""Draws a trace: functions that turn its tables into plotly figures and HTML pictures, and a report on one page."""

from typing import TYPE_CHECKING

from cacheprobe.core.values import no_attribute
from cacheprobe.views.attribution import attribution
from cacheprobe.views.curves import acceptance_curves, column_figure, draft_verdicts, prediction_depth_figure
from cacheprobe.views.diagrams.cache import cache_picture
from cacheprobe.views.diagrams.cards import thought_card, token_card
from cacheprobe.views.diagrams.decode_grid import decode_grid
from cacheprobe.views.diagrams.diagram import decoded_diagram, window_diagram
from cacheprobe.views.diagrams.frame import Markup
from cacheprobe.views.diagrams.lens_grid import lens_grid
from cacheprobe.views.diagrams.timeline import timeline
from cacheprobe.views.findings import (
    carried_figure,
    coin_rows_figure,
    drift_figure,
    forcing_figure,
    perplexity_figure,
    simplex_figure,
    ways_figure,
)
from cacheprobe.views.given import TABLES_OF, checking_tables
from cacheprobe.views.grids import attribution_patching_grid, flip_grid, patching_grid, routing_figure
from cacheprobe.views.overview.figures import run_overview
from cacheprobe.views.probes import (
    disagreement_figure,
    final_choice_figure,
    probe_figure,
    rollback_prediction_figure,
    state_algorithm_figure,
)
from cacheprobe.views.report.figures import write_figures
from cacheprobe.views.report.report import write_report
from cacheprobe.views.report.request_text import request_text
from cacheprobe.views.report.run_comparison import comparison
from cacheprobe.views.sweep_grid import sweep_grid
from cacheprobe.views.thoughts.picture import thoughts_picture

__all__ = [
    "Markup",
    "acceptance_curves",
    "attribution",
    "attribution_patching_grid",
    "cache_picture",
    "carried_figure",
    "coin_rows_figure",
    "column_figure",
    "comparison",
    "decode_grid",
    "decoded_diagram",
    "disagreement_figure",
    "draft_verdicts",
    "drift_figure",
    "final_choice_figure",
    "flip_grid",
    "forcing_figure",
    "lens_grid",
    "patching_grid",
    "perplexity_figure",
    "prediction_depth_figure",
    "probe_figure",
    "request_text",
    "rollback_prediction_figure",
    "routing_figure",
    "run_overview",
    "simplex_figure",
    "state_algorithm_figure",
    "sweep_grid",
    "thought_card",
    "thoughts_picture",
    "timeline",
    "token_card",
    "ways_figure",
    "window_diagram",
    "write_figures",
    "write_report",
]

for _name in TABLES_OF:
    globals()[_name] = checking_tables(globals()[_name])

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        raise no_attribute("module 'cacheprobe.views'", name, __all__)


def __dir__() -> list[str]:
    """Returns the public names, for dir() and completion."""
    return sorted(__all__)
