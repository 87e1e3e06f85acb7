"""Implements the commands show, hypotheses, models and doctor. Heavy imports are made when a command runs."""

from pathlib import Path
from typing import Annotated, Literal

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
    from cacheprobe.views.report.listings import request_listings, run_listings
    from cacheprobe.views.report.rejections import rejections_listing

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
        The file, ending in .csv or .parquet. In .csv, pandas takes the tokens null and NA for missing values, unless
        read_csv has keep_default_na=False, na_values=[""].
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
    from cacheprobe.trace.tables.schema import arrow_schema

    require_ending(out)
    table = cp.load_trace(run).hypotheses(include_rolled_back=bool(set(status) & {"rolled_back", "given_up"}))
    chosen = select_hypotheses(table, request=request, layer=layer, site=site, status=status, lens=lens)
    print(f"{len(chosen)} of {len(table)} readings: {write_table(chosen, out, arrow_schema('Trace.hypotheses'))}")


def export(
    run: Path,
    *,
    out: Path,
    format: Literal["parquet", "speculators"] = "parquet",
    request: Annotated[tuple[int, ...], SEVERAL] = (),
    layer: Annotated[tuple[int, ...], SEVERAL] = (),
    site: Annotated[tuple[str, ...], SEVERAL] = (),
    status: Annotated[tuple[str, ...], SEVERAL] = (),
    progress: bool = True,
) -> None:
    """Write the states of a stored run for other libraries, one file for each request.

    Parameters
    ----------
    run
        Directory of a saved run.
    out
        Folder of the files; it is created.
    format
        parquet: one line for each state, with its token, for Hugging Face's datasets, DuckDB or pandas. speculators:
        the training data of vLLM's library of that name, from states at site S.
    request
        Only states of these requests, such as 0 3; of parquet alone.
    layer
        Only states of these layers, such as 20 29. Of speculators, the layers before the last; by default EAGLE-3's.
    site
        Only states of these sites: S (residual stream), T (attention output), C (MLP output); of parquet alone.
    status
        Only rows of these statuses: committed, superseded, rolled_back or given_up; of parquet alone.
    progress
        Show a progress bar.
    """
    import cacheprobe as cp
    from cacheprobe.analysis.exports import ChosenStates, to_speculators

    trace = cp.load_trace(run)
    if format == "speculators":
        if request or site or status:
            raise ValueError("--request, --site and --status choose lines of parquet; speculators' files are whole")
        paths = to_speculators(trace, out, layer or None, progress)
    else:
        paths = ChosenStates(trace, site or None, layer or None, request or None, status or None).write_parquet(
            out, progress
        )
    print(f"{len(paths)} files, {sum(path.stat().st_size for path in paths) / 1e6:.1f} MB: {out}")


def models() -> None:
    """List the models on this machine, the model families that will run, and how to get other models."""
    from cacheprobe.cli.model_list import model_listings
    from cacheprobe.core import terminal

    terminal.show(model_listings())


def doctor() -> int:
    """Show what cacheprobe can use on this machine, and what is missing; exit 1 if `cacheprobe demo` cannot run."""
    from cacheprobe.cli.doctor import checkup
    from cacheprobe.core import terminal

    found = checkup()
    terminal.show(found.listings)
    print(found.demo_sentence)
    return 0 if found.can_demo else 1
