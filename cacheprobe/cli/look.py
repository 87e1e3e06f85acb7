"""Implements the commands show, hypotheses, models and doctor. Heavy imports are made when a command runs."""

from pathlib import Path
from typing import Annotated

from cacheprobe.cli.config import SEVERAL


def show(run: Path, *, request: int | None = None, rejected: bool = False) -> None:
    """List a stored run: settings, requests, verdicts, and how often each layer's first choice is the committed token.

    Parameters
    ----------
    run
        Directory of a saved run.
    request
        Show this request in detail instead.
    rejected
        List the rejected drafts instead, of the run or of the request: what was drafted and what was committed, from
        which layer the lens has the committed token first, and by what margin.
    """
    import cacheprobe as cp
    from cacheprobe.core import terminal
    from cacheprobe.plots.report.listings import request_listings, run_listings
    from cacheprobe.plots.report.rejections import rejections_listing

    trace = cp.load_trace(run)
    if rejected:
        terminal.show([rejections_listing(trace, request)])
        return
    terminal.show(run_listings(trace) if request is None else request_listings(trace, request))


def hypotheses(
    run: Path,
    *,
    out: Path,
    request: Annotated[tuple[int, ...], SEVERAL] = (),
    layer: Annotated[tuple[int, ...], SEVERAL] = (),
    site: Annotated[tuple[str, ...], SEVERAL] = (),
    status: Annotated[tuple[str, ...], SEVERAL] = (),
    lens: Annotated[tuple[str, ...], SEVERAL] = (),
) -> None:
    """Write the lens readings of a stored run as CSV or Parquet, one line for each reading.

    Parameters
    ----------
    run
        Directory of a saved run.
    out
        The file, ending in .csv or .parquet.
    request
        Only readings of these requests, such as 0 3.
    layer
        Only readings of these layers, such as 20 29.
    site
        Only readings of these sites: S (residual stream), T (attention output), C (MLP output), or thought.
    status
        Only rows of these statuses: committed, superseded, rolled_back or given_up. By default the last two are left
        out.
    lens
        Only readings of these lenses, by name.
    """
    import cacheprobe as cp
    from cacheprobe.core.export import require_ending, select_hypotheses, write_table

    require_ending(out)
    table = cp.load_trace(run).hypotheses(include_rolled_back=bool(set(status) & {"rolled_back", "given_up"}))
    chosen = select_hypotheses(table, request=request, layer=layer, site=site, status=status, lens=lens)
    print(f"{len(chosen)} of {len(table)} readings: {write_table(chosen, out)}")


def models() -> None:
    """List the models on this machine, the model families that will run, and how to get other models."""
    from cacheprobe.core import terminal
    from cacheprobe.doctor.listing import model_listings

    terminal.show(model_listings())


def doctor() -> int:
    """Show what cacheprobe can use on this machine, and what is missing; exit 1 if `cacheprobe demo` cannot run."""
    from cacheprobe.core import terminal
    from cacheprobe.doctor.checkup import checkup

    found = checkup()
    terminal.show(found.listings)
    print(found.demo_sentence)
    return 0 if found.can_demo else 1
