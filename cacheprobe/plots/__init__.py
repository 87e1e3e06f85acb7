"""Draws a trace: functions that turn its tables into plotly figures and HTML pictures, and a report on one page."""

from typing import TYPE_CHECKING

from cacheprobe.core.values import no_attribute
from cacheprobe.plots.acceptance import acceptance_curves
from cacheprobe.plots.attribution import attribution
from cacheprobe.plots.attribution_patching import attribution_patching_grid
from cacheprobe.plots.carried import carried_figure, ways_figure
from cacheprobe.plots.coin_rows import coin_rows_figure
from cacheprobe.plots.columns import column_figure
from cacheprobe.plots.curves import draft_verdicts, prediction_depth_figure
from cacheprobe.plots.diagrams.cache_picture import cache_picture
from cacheprobe.plots.diagrams.decode_grid import decode_grid
from cacheprobe.plots.diagrams.diagram import decoded_diagram, window_diagram
from cacheprobe.plots.diagrams.frame import Markup
from cacheprobe.plots.diagrams.lens_grid import lens_grid
from cacheprobe.plots.diagrams.timeline import timeline
from cacheprobe.plots.diagrams.token_card import token_card
from cacheprobe.plots.diagrams.windows import Window, accepted_whole, find_windows, rolled_back
from cacheprobe.plots.disagreement import disagreement_figure, final_choice_figure
from cacheprobe.plots.findings.forcing import forcing_figure
from cacheprobe.plots.findings.perplexity import perplexity_figure
from cacheprobe.plots.findings.simplex import simplex_figure
from cacheprobe.plots.flips import flip_grid
from cacheprobe.plots.patching import patching_grid
from cacheprobe.plots.probes import probe_figure, rollback_prediction_figure
from cacheprobe.plots.report.figures import write_figures
from cacheprobe.plots.report.report import write_report
from cacheprobe.plots.report.request_text import request_text
from cacheprobe.plots.report.run_comparison import comparison
from cacheprobe.plots.routing import routing_figure
from cacheprobe.plots.state_algorithm import state_algorithm_figure
from cacheprobe.plots.sweep_grid import sweep_grid
from cacheprobe.plots.text import token_texts
from cacheprobe.plots.thoughts.card import thought_card
from cacheprobe.plots.thoughts.picture import thoughts_picture

__all__ = [
    "Markup",
    "Window",
    "acceptance_curves",
    "accepted_whole",
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
    "final_choice_figure",
    "find_windows",
    "flip_grid",
    "forcing_figure",
    "lens_grid",
    "patching_grid",
    "perplexity_figure",
    "prediction_depth_figure",
    "probe_figure",
    "request_text",
    "rollback_prediction_figure",
    "rolled_back",
    "routing_figure",
    "simplex_figure",
    "state_algorithm_figure",
    "sweep_grid",
    "thought_card",
    "thoughts_picture",
    "timeline",
    "token_card",
    "token_texts",
    "ways_figure",
    "window_diagram",
    "write_figures",
    "write_report",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        raise no_attribute("module 'cacheprobe.plots'", name, __all__)
