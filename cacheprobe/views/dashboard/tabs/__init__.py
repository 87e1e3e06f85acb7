"""Lists the views of the page; each is one file here, or one class of it."""

from collections.abc import Callable

from cacheprobe.views.dashboard.questions import PageQuestion
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.tabs.compare import Comparison
from cacheprobe.views.dashboard.tabs.flip import FlipSearch
from cacheprobe.views.dashboard.tabs.lens import Contributions, LensGridPage, RowCard
from cacheprobe.views.dashboard.tabs.notes import RunNotes
from cacheprobe.views.dashboard.tabs.overview import RunSummary, TokenList
from cacheprobe.views.dashboard.tabs.rejected import RejectedDrafts
from cacheprobe.views.dashboard.tabs.replay import CacheSlots, Timeline, TokenGrid, VerifyWindow
from cacheprobe.views.dashboard.tabs.results import result_view
from cacheprobe.views.dashboard.tabs.text import RequestText, Thoughts
from cacheprobe.views.dashboard.view import View

VIEWS: dict[str, Callable[[RunList, PageQuestion], View]] = {
    "summary": RunSummary,
    "tokens": TokenList,
    "timeline": Timeline,
    "decode": TokenGrid,
    "cache": CacheSlots,
    "window": VerifyWindow,
    "card": RowCard,
    "grid": LensGridPage,
    "gave": Contributions,
    "text": RequestText,
    "thoughts": Thoughts,
    "rejected": RejectedDrafts,
    "compare": Comparison,
    "notes": RunNotes,
    "flip": FlipSearch,
    "result": result_view,
}
"""By name in the page's questions. Each can be drawn, and exported as table and code."""
