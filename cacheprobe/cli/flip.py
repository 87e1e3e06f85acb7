"""Implements `cacheprobe flip`: which edits would have made the verifier choose a rejected draft token. Heavy imports
are made when the command runs."""

from pathlib import Path
from typing import TYPE_CHECKING

from cacheprobe.core.hook_names import SITES

if TYPE_CHECKING:
    from cacheprobe.analysis.flips import Flips
    from cacheprobe.core.terminal import Listing


def flip(
    run: Path,
    *,
    request: int,
    step: int,
    sites: str = "".join(SITES),
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
