"""Pictures of a trace: pure functions from its tables to figures and HTML, and a report of all on one page."""

from cacheprobe.views.attribution import attribution
from cacheprobe.views.cache_picture import cache_picture
from cacheprobe.views.carried import carried_figure, ways_figure
from cacheprobe.views.coin_rows import coin_rows_figure
from cacheprobe.views.curves import draft_verdicts, settling_figure
from cacheprobe.views.decode_grid import decode_grid
from cacheprobe.views.diagram import decoded_diagram, window_diagram
from cacheprobe.views.disagreement import disagreement_figure, final_choice_figure
from cacheprobe.views.frame import Markup
from cacheprobe.views.lens_grid import lens_grid
from cacheprobe.views.lens_picture import lens_picture
from cacheprobe.views.patching import patching_grid
from cacheprobe.views.probes import foresight_figure, probe_figure
from cacheprobe.views.report import write_report
from cacheprobe.views.report_figures import write_figures
from cacheprobe.views.run_comparison import comparison
from cacheprobe.views.state_algorithm import state_algorithm_figure
from cacheprobe.views.sweep_grid import sweep_grid
from cacheprobe.views.text import token_texts
from cacheprobe.views.thought_card import thought_card
from cacheprobe.views.thoughts_picture import thoughts_picture
from cacheprobe.views.timeline import timeline
from cacheprobe.views.token_card import token_card
from cacheprobe.views.windows import Window, accepted_whole, find_windows, rolled_back

__all__ = [
    "Markup",
    "Window",
    "accepted_whole",
    "attribution",
    "cache_picture",
    "carried_figure",
    "coin_rows_figure",
    "comparison",
    "decode_grid",
    "decoded_diagram",
    "disagreement_figure",
    "draft_verdicts",
    "final_choice_figure",
    "find_windows",
    "foresight_figure",
    "lens_grid",
    "lens_picture",
    "patching_grid",
    "probe_figure",
    "rolled_back",
    "settling_figure",
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
