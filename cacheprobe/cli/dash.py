"""Implements `cacheprobe dash`. Heavy imports are made when the command runs."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import App

from cacheprobe.cli.config import SEVERAL, fill
from cacheprobe.core.terminal import DASH_PORT

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
