"""Defines the commands report and verify of the command line, and lists all other commands."""

import os
import select
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App

from cacheprobe import __version__
from cacheprobe.cli.flags import SEVERAL, fill

app = App(
    name="cacheprobe",
    help="What a language model believed before it committed. "
    "To begin: cacheprobe demo, then cacheprobe dash runs/demo.",
    version=__version__,
    help_format="plaintext",  # a markdown parser would take longer to import than all else
)
app.command("cacheprobe.cli.train:train", name="train", help="Train a model for a task.")
app.command(
    "cacheprobe.cli.demo:demo",
    name="demo",
    help="Run SmolLM2, or a shipped model where it is absent, on coin-flip prompts, and one that thinks beside it.",
)
app.command(
    "cacheprobe.cli.run:run",
    name="run",
    help="Generate from prompts or a task's examples, and save the trace.",
    config=fill,
)
for name, text in {
    "show": "Say what a stored run holds, or one of its requests.",
    "hypotheses": "Write what every layer of a stored run would have said as CSV or Parquet.",
    "export": "Write the states of a stored run for other libraries.",
    "models": "Say which models are here, which will run, and how to get the rest.",
    "doctor": "Say what of this machine cacheprobe uses, and what is missing.",
}.items():
    app.command(f"cacheprobe.cli.look:{name}", name=name, help=text)
app.command(
    "cacheprobe.cli.look:flip",
    name="flip",
    help="List the edits that would have flipped a rejected draft's verdict.",
)
app.command("cacheprobe.cli.run:resume", name="resume", help="Continue a run that was killed.")
app.command("cacheprobe.cli.imports:imports", name="import", help="Make a run of what another program kept.")
app.command("cacheprobe.cli.measure:bench", name="bench", help="Measure, list or compare benchmarks.")
app.command("cacheprobe.cli.sweep:sweep", name="sweep", help="Run every combination that a file names.")
app.command("cacheprobe.cli.sweep:query", name="query", help="Ask the results of a sweep in SQL.")
app.command("cacheprobe.cli.measure:findings", name="findings", help="List published results, or measure one again.")
app.command("cacheprobe.cli.look:dash", name="dash", help="Look at stored runs in a browser, with linked views.")


@app.command
def report(
    run: Path,
    *,
    request: Annotated[tuple[str, ...], SEVERAL] = (),
    dashboard: str = "",
    out: Path | None = None,
    figures: Path | None = None,
    format: Literal["png", "svg", "pdf"] = "png",
    progress: bool = True,
) -> None:
    """Draw a stored run as one self-contained HTML file of at most 4 MB, or figures of a request as files of their own.

    Parameters
    ----------
    run
        Directory of a saved run.
    request
        Numbers of the requests to draw in full, as far as there is room, or "all"; by default up to 8, which the page
        names. Of figures, one.
    dashboard
        Address of a dashboard that shows the run, such as http://127.0.0.1:8050/; tokens then lead there. Without it
        the page has no address and no path of this machine.
    out
        The file; by default report.html in the run's directory.
    figures
        Write each figure into this directory instead; needs kaleido and a Chromium.
    format
        Format of these figures.
    progress
        Show a progress bar.
    """
    import cacheprobe as cp
    from cacheprobe.views import write_figures, write_report

    if out is not None and figures is not None:
        raise ValueError("--out names the HTML file and --figures a directory of pictures; give one of them")
    if not all(number.isdecimal() for number in request) and request != ("all",):
        raise ValueError(f'--request takes numbers of requests, or "all", got {" ".join(request)}')
    numbers = [int(number) for number in request if number != "all"]
    trace = cp.load_trace(run)
    if figures is None:
        requests = "all" if "all" in request else numbers or None
        print(write_report(trace, out or run / "report.html", requests, dashboard=dashboard, progress=progress))
        return
    if "all" in request or len(numbers) > 1:
        raise ValueError("--figures draws one request; give one number to --request")
    for path in write_figures(trace, figures, format, numbers[0] if numbers else None, progress=progress):
        print(path)


@app.command
def verify(
    run: Path, *, files: bool = False, model: str | None = None, adapter: str | None = None, progress: bool = True
) -> int:
    """Compare a stored run with the slow reference (cp.reference), and its files with their checksums.

    Prints what was compared and what was not. Exits with 1 if a file is damaged, or after printing the first
    difference.

    Parameters
    ----------
    run
        Directory of a saved run.
    files
        Compare only the files with their checksums; needs no model.
    model
        Name or directory of the model, if not the one that the run names.
    adapter
        Name or directory of the adapter, if not the one that the run names.
    progress
        Show progress bars.
    """
    from cacheprobe.trace.manifest import damaged_files

    count, faults = damaged_files(run)  # before a damaged table is read
    if faults:
        print("\n".join(f"damaged: {fault}" for fault in faults))
        return 1
    if files:
        print(f"compared with their checksums: {count} files")
        return 0
    import cacheprobe as cp
    from cacheprobe.analysis.replay import require_run
    from cacheprobe.models.loaders import model_of_run

    trace = cp.load_trace(run)
    require_run(trace)
    loaded = model_of_run(trace.fingerprint, model, adapter, progress=progress)
    result = cp.verify(trace, loaded, progress=progress)
    print(result)
    return 0 if result.is_equal else 1


def _has_reader_gone() -> bool:
    """Returns True, and discards all later output, if the program that reads stdout has ended, as in `... | head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def main() -> None:
    """Runs the command line with the arguments of the process, and exits with the command's exit code. An error of a
    common type (ValueError, TypeError, KeyError, OSError, RuntimeError) is printed as one line on stderr, with exit
    code 2; with the environment variable CACHEPROBE_DEBUG, it is raised."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        result = app(sys.argv[1:], result_action="return_value")
        sys.stdout.flush()  # notices a closed pipe here, and not while Python ends
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        if not _has_reader_gone():
            raise
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, TypeError, KeyError, OSError, RuntimeError) as error:
        if os.environ.get("CACHEPROBE_DEBUG"):
            raise
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)
    sys.exit(result if isinstance(result, int) else 0)


if __name__ == "__main__":
    main()
