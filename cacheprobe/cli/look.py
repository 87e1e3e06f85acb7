"""Implements the commands show, hypotheses, export, flip, dash, models and doctor. Heavy imports are made when one
runs.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App

from cacheprobe.cli.flags import SEVERAL, fill
from cacheprobe.core.terminal import DASH_PORT

if TYPE_CHECKING:
    from cacheprobe.analysis.flips import Flips
    from cacheprobe.core.terminal import Listing


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
    from cacheprobe.views.rejected import rejections_listing
    from cacheprobe.views.report.listings import request_listings, run_listings

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
        Only rows of these statuses: committed, superseded, rolled_back or abandoned. By default the last two are left
        out.
    lens
        Only readings of these lenses, by name.
    """
    import cacheprobe as cp
    from cacheprobe.core.export import require_ending, select_hypotheses, write_table
    from cacheprobe.trace.tables.schema import arrow_schema

    require_ending(out)
    table = cp.load_trace(run).hypotheses(include_rolled_back=bool(set(status) & {"rolled_back", "abandoned"}))
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
        Only rows of these statuses: committed, superseded, rolled_back or abandoned; of parquet alone.
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
    from cacheprobe.cli.doctor import checkup, demo_lacks, listings
    from cacheprobe.core import terminal

    found = checkup()
    terminal.show(listings(found))
    lacking = demo_lacks(found)
    verdict = f"cannot run: {', '.join(lacking)}; see under missing" if lacking else "can run"
    print(f"cacheprobe demo {verdict}")
    return 1 if lacking else 0


def flip(
    run: Path,
    *,
    request: int,
    step: int,
    sites: str = "STC",
    out: Path | None = None,
    model: str | None = None,
    adapter: str | None = None,
    progress: bool = True,
) -> None:
    """Edit the states that judged a rejected draft token, and list which edits make the verifier choose that token.

    Each state is replaced by zeros, by the mean of the request's earlier positions, by the drafter's own state, and by
    that of the drafted token. Prints the change in nats by layer, with a * where the verdict flips.

    Parameters
    ----------
    run
        Directory of a saved run.
    request
        The request whose draft was rejected.
    step
        The step that rejected it; `cacheprobe show RUN --rejected` lists all.
    sites
        Sites to edit: S (residual stream), T (attention output), C (MLP output).
    out
        Write the picture into this .html file.
    model
        Name or directory of the model, if not the one that the run names.
    adapter
        Name or directory of the adapter, if not the one that the run names.
    progress
        Show a progress bar.
    """
    if out is not None and out.suffix != ".html":
        raise ValueError(f"--out is an HTML file, ending in .html, got {out}")
    import cacheprobe as cp
    from cacheprobe.analysis.flips import rejection_of, require_reproducible
    from cacheprobe.core import terminal
    from cacheprobe.models.loaders import model_of_run

    trace = cp.load_trace(run)
    require_reproducible(trace, rejection_of(trace, request, step))  # before the model is loaded
    trace.model = model_of_run(trace.fingerprint, model, adapter, progress=progress)
    found = cp.analysis.flip(trace, request, step, sites=sites, progress=progress)
    terminal.show([flips_listing(found)])
    if out is not None:
        cp.plots.flip_grid(found.table).write_html(out)
        print(out)


def flips_listing(found: "Flips") -> "Listing":
    """Returns a `Listing` of a result of `cp.analysis.flip`: a line for each layer, the last one first, and a column
    for each kind of edit and site."""
    from cacheprobe.core.terminal import Listing

    at, table = found.meta, found.table
    columns = list(dict.fromkeys(zip(table.edit, table.site, strict=True)))
    cells = {
        (one.edit, one.site, one.layer): f"{one.change_nats:+.2f}{' *' * bool(one.flips)}" for one in table.itertuples()
    }
    layers = sorted(table.layer.unique().tolist(), reverse=True)
    rows = [(str(layer), *(cells.get((*column, layer), "—") for column in columns)) for layer in layers]
    title = (
        f"request {at['request_id']}, step {at['step']}: drafted “{at['drafted_token']}”, committed "
        f"“{at['committed_token']}” ({at['difference_nats']:+.2f} nats)"
    )
    flips = int(table.flips.sum())
    note = f"{flips} of {len(table)} edits flip the verdict (*); changes of drafted minus committed are in nats"
    names = tuple(f"{edit} {site}" for edit, site in columns)
    return Listing(title, ("layer", *names), rows, "; ".join([note, *(f"left out: {why}" for why in at["left_out"])]))


dash = App(
    name="dash", help="Look at stored runs in a browser, with linked views.", help_format="plaintext", config=fill
)


@dash.default
def open_runs(
    *runs: Path,
    config: Path | None = None,
    port: int = DASH_PORT,
    host: str = "127.0.0.1",
    model: str | None = None,
    lens: Annotated[tuple[Path, ...], SEVERAL] = (),
) -> None:
    """Look at stored runs in a browser, with linked views. Ends with Ctrl-C.

    Parameters
    ----------
    runs
        Directories of saved runs, directories that hold several, or result files (.json) and folders of such files.
    config
        A YAML file of settings, named as these flags are, and a list of runs; flags override them.
    port
        Port to listen at; 0 for any free one.
    host
        Address to listen at; by default only this machine can connect. 0.0.0.0 is every address of this machine, and
        :: also its IPv6 addresses. Everybody who can connect can read the prompts.
    model
        Name or directory of the model that reads kept states, if not the one that a run names.
    lens
        Directory of a tuned lens, or several, for reading kept states.
    """
    if not runs:
        reminder = "; name runs before --lens, which takes all that follows it" if lens else ""
        raise ValueError(f"name at least one saved run, as in cacheprobe dash runs/demo{reminder}")
    if not 0 <= port <= 65535:
        raise ValueError(f"--port is a number from 0 to 65535, got {port}; 0 takes any that is free")
    if find_spec("dash") is None:
        raise ValueError("the dashboard needs Dash: pip install 'cacheprobe[dash]'")
    if lens:
        from cacheprobe.lenses.tuned import require_tuned_lens

        for directory in lens:
            require_tuned_lens(directory)
    for path in runs:
        if not path.exists():
            raise ValueError(f"there is no {path}; name a saved run, a folder of runs or a result file")
    from cacheprobe.views.dashboard.app import listen
    from cacheprobe.views.dashboard.run_list import RunList
    from cacheprobe.views.text import plain

    run_list = RunList.of(runs, model, lens)
    server = listen(run_list, host, port)
    for entry in run_list.entries:
        print(
            plain(f"{entry.name}: {f'cannot be opened, {entry.reason}' if entry.tables is None else entry.tables.run}")
        )
    is_every = host in ("0.0.0.0", "::")
    reachable = "127.0.0.1" if is_every else f"[{host}]" if ":" in host else host
    where = f"http://{reachable}:{server.port}/" + (
        f" and every other address of this machine ({host})" if is_every else ""
    )
    print(f"listening at {where} (Ctrl-C ends it)", flush=True)
    server.serve_forever()
