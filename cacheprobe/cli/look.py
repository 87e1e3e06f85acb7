"""The commands that look: show, hypotheses, models, doctor. Heavy imports wait until a command runs."""

from pathlib import Path
from typing import Annotated

from cacheprobe.cli.config import SEVERAL


def show(run: Path, *, request: int | None = None) -> None:
    """Say what a stored run holds: how it was made, its requests, verdicts, and agreement by layer.

    Parameters
    ----------
    run
        Directory of a saved run.
    request
        Show this request in detail instead.
    """
    import cacheprobe as cp
    from cacheprobe.core import terminal
    from cacheprobe.plots.report.listings import request_listings, run_listings

    trace = cp.load_trace(run)
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
    """Write what every layer of a stored run would have said, a line for each reading, as CSV or Parquet.

    Parameters
    ----------
    run
        Directory of a saved run.
    out
        The file, ending in .csv or .parquet.
    request
        Readings of these requests alone, such as 0 3.
    layer
        Of these layers alone, such as 20 29.
    site
        Of these sites alone: S, T, C, or thought.
    status
        Of rows of these statuses alone: committed, candidate, rolled_back or given_up. The last two are left out unless
        they are named.
    lens
        Of these lenses alone, by name.
    """
    import cacheprobe as cp
    from cacheprobe.core.export import require_ending, select_hypotheses, write_table

    require_ending(out)
    table = cp.load_trace(run).hypotheses(include_rolled_back=bool(set(status) & {"rolled_back", "given_up"}))
    chosen = select_hypotheses(table, request=request, layer=layer, site=site, status=status, lens=lens)
    print(f"{len(chosen)} of {len(table)} readings: {write_table(chosen, out)}")


def models() -> None:
    """Say which models are here, which others will run, and how to get them."""
    from cacheprobe.core import terminal
    from cacheprobe.doctor.listing import model_listings

    terminal.show(model_listings())


def doctor() -> int:
    """Say what of this machine cacheprobe uses, and what is missing; exit 1 where `cacheprobe demo` cannot run."""
    from cacheprobe.core import terminal
    from cacheprobe.doctor.checkup import checkup

    found = checkup()
    terminal.show(found.listings)
    print(found.verdict)
    return 0 if found.can_demo else 1
