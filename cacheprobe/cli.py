"""The command line: run, report, verify, prove; the rest in cli_demo, cli_look and its neighbours."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from cacheprobe import __version__
from cacheprobe.cli_config import fill

if TYPE_CHECKING:
    from cacheprobe.observe.interrupts import Interrupted

app = App(
    name="cacheprobe",
    help="What a language model believed before it committed. "
    "To begin: cacheprobe demo, then cacheprobe dash runs/demo.",
    version=__version__,
    help_format="plaintext",  # a markdown parser would take longer to import than all else
)
app.command("cacheprobe.cli_train:train", name="train", help="Train a model for a task.")
app.command(
    "cacheprobe.cli_demo:demo",
    name="demo",
    help="Run SmolLM2, or a shipped model where it is absent, on coin-flip prompts, and one that thinks beside it.",
)
for name, said in {
    "show": "Say what a stored run holds, or one of its requests.",
    "hypotheses": "Write what every layer of a stored run would have said as CSV or Parquet.",
    "models": "Say which models are here, which will run, and how to get the rest.",
    "doctor": "Say what of this machine cacheprobe uses, and what is missing.",
}.items():
    app.command(f"cacheprobe.cli_look:{name}", name=name, help=said)
app.command("cacheprobe.cli_import:imports", name="import", help="Make a run of what another program kept.")
app.command("cacheprobe.cli_bench:bench", name="bench", help="Measure, list or compare benchmarks.")
app.command("cacheprobe.cli_sweep:sweep", name="sweep", help="Run every combination that a file names.")
app.command("cacheprobe.cli_sweep:query", name="query", help="Ask the results of a sweep in SQL.")
app.command("cacheprobe.cli_dash:dash", name="dash", help="Look at stored runs in a browser, with linked views.")


@app.command(config=fill)
def run(
    *,
    out: Path,
    overwrite: bool = False,
    config: Path | None = None,
    model: str = "smollm2-135m",
    dtype: str = "bfloat16",
    device: str | None = None,
    adapter: str | None = None,
    products: Literal["torch", "compiled"] = "torch",
    think_while_decoding: bool | None = None,
    prompt: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    task: str | None = None,
    n: int = 8,
    people: int | None = None,
    flip_probability: float | None = None,
    shots: int | None = None,
    chat: bool | None = None,
    drafter: str | None = None,
    window: int | None = None,
    group: int | None = None,
    deterministic: float = 0.0,
    capture: str = "STCZ",
    heads: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    layers: Annotated[tuple[int, ...], Parameter(negative="")] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    max_new_tokens: int = 32,
    seed: int = 0,
    capacity: int = 512,
    max_batch: int = 64,
    kv_rows: int | None = None,
    progress: bool = True,
) -> int:
    """Generate from prompts or a task's examples, and save the trace.

    Ctrl-C saves what is finished and exits with 130; pressed again, it ends at once.

    Parameters
    ----------
    out
        Directory for the trace.
    overwrite
        Replace the run that --out holds, and remove its report.html. The old run stays until the new one is complete.
    config
        A YAML file of settings, named as these flags are; flags win.
    model
        "smollm2-135m", a hub name or a local directory.
    dtype
        float32, bfloat16, float16 or float64.
    device
        cpu, cuda or cuda:1; the CPU by default.
    adapter
        A LoRA adapter to merge: coin-flip, or a directory.
    products
        compiled: a C++ compiler makes the blocks' products and the statistics of Z, for a CPU whose bfloat16 is slow.
    think_while_decoding
        Of a Thinking States model: think about generated tokens too; the window must be a whole number of chunks.
    prompt
        A prompt's text; repeat for several.
    task
        NAME or NAME:key=value,... of a task, such as coin_flip or variables:updates=3,modulus=7, instead of prompts.
    n
        Examples of the task.
    people, flip_probability
        Of the coin flips.
    shots
        Worked examples in front of each question, in tasks that have them.
    chat
        Use the model's chat template, likewise.
    drafter
        NAME or NAME:key=value,... such as early_exit:layer=20. Without one, only deterministic requests are verified.
    window, group
        Rows of a verify pass for each request, and requests in it. By default they are chosen for model and machine.
    deterministic
        Fraction of the requests.
    capture
        Sites to keep, of S, T, C and Z.
    heads
        What to keep of attention heads: q, k, v, z or pattern; repeat for several.
    layers
        Layers to keep; all by default.
    temperature
        0 is greedy.
    top_k, top_p
        Draw from the likeliest tokens only.
    stop
        A text that ends a request; repeat for several.
    max_new_tokens, seed, capacity, max_batch, kv_rows
        See `cacheprobe.run`.
    progress
        Show progress bars.
    """
    given = dict(locals())
    import cacheprobe as cp
    from cacheprobe.engine.shapes import settle_shapes
    from cacheprobe.observe.places import require_free
    from cacheprobe.observe.summary import closing
    from cacheprobe.records import SamplingParams
    from cacheprobe.registry import make
    from cacheprobe.values import require_encodable

    if bool(prompt) == (task is not None):
        raise ValueError("give either --prompt (once or more) or --task, such as --task coin_flip")
    require_free(out, overwrite)
    # before examples are made and the model is loaded, which takes seconds: settings check themselves
    SamplingParams(seed=seed, max_new_tokens=max_new_tokens, n=n)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, stop=stop)
    kept = cp.CaptureConfig(capture, heads=heads)
    shapes = dict(window=window, group=group, capacity=capacity, max_batch=max_batch, kv_rows=kv_rows)
    settle_shapes(None, drafter is not None, shapes)
    prompts: Any = list(prompt)
    for text in prompts:
        require_encodable("--prompt", text)
    if task is not None:
        settings = {"people": people, "flip_probability": flip_probability, "shots": shots, "chat": chat}
        stated = {name: value for name, value in settings.items() if value is not None}
        prompts = make("tasks", task, **stated).examples(n, seed)
    chosen = make("drafters", drafter) if drafter else None
    loaded = cp.load_model(
        model,
        dtype=dtype,
        device=device,
        adapter=adapter,
        products=products,
        think_while_decoding=think_while_decoding,
        progress=progress,
    )
    stopped = None
    try:
        trace = cp.run(
            loaded,
            prompts,
            drafter=chosen,
            window=window,
            group=group,
            deterministic=deterministic,
            capture=kept,
            layers=list(layers) or "all",
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            seed=seed,
            capacity=capacity,
            max_batch=max_batch,
            kv_rows=kv_rows,
            progress=progress,
        )
    except cp.Interrupted as interrupted:
        trace, stopped = interrupted.trace, interrupted
    trace.meta["command"] = _as_given("run", given)
    if stopped is not None:
        return _save_stopped(stopped, out)
    trace.save(out, overwrite=overwrite)
    print(closing(trace, is_behaviour_printed=progress))
    print(f"run: {out}")
    return 0


@app.command
def report(
    run: Path,
    *,
    request: int | None = None,
    out: Path | None = None,
    figures: Path | None = None,
    format: Literal["png", "svg", "pdf"] = "png",
    progress: bool = True,
) -> None:
    """Draw a stored run as one self-contained HTML file, or its figures as files of their own.

    Parameters
    ----------
    run
        Directory of a saved run.
    request
        The request to draw; by default one with an accepted and a rolled-back window, if there is any.
    out
        The file; by default report.html in the run's directory.
    figures
        Write each figure into this directory instead, through kaleido and a chromium.
    format
        Of these figures.
    progress
        Show a progress bar.
    """
    import cacheprobe as cp
    from cacheprobe.views import write_figures, write_report

    if out is not None and figures is not None:
        raise ValueError("--out names the HTML file and --figures a directory of pictures; give one of them")
    trace = cp.load_trace(run)
    if figures is None:
        print(write_report(trace, out or run / "report.html", request_id=request, progress=progress))
        return
    for path in write_figures(trace, figures, format, request_id=request, progress=progress):
        print(path)


@app.command
def verify(run: Path, *, model: str | None = None, adapter: str | None = None, progress: bool = True) -> int:
    """Compare a stored run with the oracle, its tables with each other and its files with their checksums.

    Says what was compared and what was not. Exits 1 with the first difference.

    Parameters
    ----------
    run
        Directory of a saved run.
    model
        Name or directory of the model, where it is not the one that the run names.
    adapter
        Likewise of the adapter.
    progress
        Show progress bars.
    """
    import cacheprobe as cp
    from cacheprobe.observe.manifest import damaged_files
    from cacheprobe.observe.replay import require_run

    if faults := damaged_files(run)[1]:  # before a damaged table is read
        print("\n".join(f"damaged: {fault}" for fault in faults))
        return 1
    trace = cp.load_trace(run)
    require_run(trace)
    finger = trace.fingerprint
    loaded = cp.load_model(
        model or finger["model"],
        dtype=finger["dtype"],
        device=finger["device"],
        adapter=adapter or finger.get("adapter"),
        products="compiled" if "products_compiled" in finger else "torch",
        think_while_decoding=finger.get("think_while_decoding"),
        progress=progress,
    )
    result = cp.verify(trace, loaded, progress=progress)
    print(result)
    return 0 if result.is_equal else 1


@app.command(config=fill)
def prove(
    *,
    config: Path | None = None,
    tokens: int = 20_000,
    out: Path = Path("runs/proof"),
    real: bool = True,
    seed: int = 0,
    progress: bool = True,
) -> int:
    """Compare random traffic with the oracle, bit for bit; exit 1 with the first difference, or where it is void.

    Parameters
    ----------
    config
        A YAML file of settings, named as these flags are; flags win.
    tokens
        Tokens to compare, those of earlier calls with the same --out included.
    out
        Directory of the proof: it goes on from what is there.
    real
        Include SmolLM2 in bfloat16, and with it the negative control; without it there is no proof.
    seed
        Of the traffic.
    progress
        Show progress.
    """
    from cacheprobe.proof.prove import prove as run_proof

    figures = run_proof(tokens, out, real=real, seed=seed, progress=progress)
    verdict = {True: "proven", False: "NOT proven"}[figures["is_proven"]]
    print(f"{verdict}: {figures['differences']} differences in {figures['compared_tokens']} compared tokens")
    return 0 if figures["is_proven"] or (not real and not figures["differences"]) else 1


def _save_stopped(stopped: "Interrupted", out: Path) -> int:
    """Save the trace of a run that Ctrl-C stopped, never over an earlier run, and return the exit code."""
    from cacheprobe.observe.places import free_beside

    trace = stopped.trace
    if not len(trace.event_table):
        print("stopped by Ctrl-C before anything was computed; nothing is saved", file=sys.stderr)
        return 130
    finished = len(trace.requests) - stopped.num_cancelled
    print(
        f"stopped by Ctrl-C: {finished} of {len(trace.requests)} requests finished; the others end where they stood, "
        "as cancelled",
        file=sys.stderr,
    )
    print(f"run: {trace.save(free_beside(out))}")
    return 130


_NOT_SETTINGS = ("out", "overwrite", "config", "progress")
"""Flags that change nothing in the run itself."""


def _as_given(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """A command's settings, from flags, file and defaults, as they are stored with the run."""
    file = given["config"]
    settings = {k: v for k, v in given.items() if v not in (None, ()) and k not in _NOT_SETTINGS}
    return {"name": name, "config": file.name if file else None, "settings": settings}


def main() -> None:
    """Entry point. Errors of use are one line on stderr and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        result = app(result_action="return_value")
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, TypeError, KeyError, OSError, RuntimeError) as error:
        if os.environ.get("CACHEPROBE_DEBUG"):
            raise
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)
    sys.exit(result if isinstance(result, int) else 0)


if __name__ == "__main__":
    main()
