"""Pictures of a trace: pure functions from its tables to figures and HTML, and a report of all on one page."""

from cacheprobe.views.attribution import attribution
from cacheprobe.views.carried import carried_figure, ways_figure
from cacheprobe.views.coin_rows import coin_rows_figure
from cacheprobe.views.curves import agreement_figure, settling_figure
from cacheprobe.views.diagram import window_diagram
from cacheprobe.views.disagreement import disagreement_figure, final_choice_figure
from cacheprobe.views.lens_grid import lens_grid
from cacheprobe.views.patching import patching_grid
from cacheprobe.views.probes import foresight_figure, probe_figure
from cacheprobe.views.report import write_report
from cacheprobe.views.report_figures import write_figures
from cacheprobe.views.state_algorithm import state_algorithm_figure
from cacheprobe.views.sweep_grid import sweep_grid
from cacheprobe.views.text import token_texts
from cacheprobe.views.thoughts_picture import thoughts_picture
from cacheprobe.views.windows import Window, accepted_whole, find_windows, rolled_back

__all__ = [
    "Window",
    "accepted_whole",
    "agreement_figure",
    "attribution",
    "carried_figure",
    "coin_rows_figure",
    "disagreement_figure",
    "final_choice_figure",
    "find_windows",
    "foresight_figure",
    "lens_grid",
    "patching_grid",
    "probe_figure",
    "rolled_back",
    "settling_figure",
    "state_algorithm_figure",
    "sweep_grid",
    "thoughts_picture",
    "token_texts",
    "ways_figure",
    "window_diagram",
    "write_figures",
    "write_report",
]
