"""Implements `cacheprobe run`: generates and saves the trace. Heavy imports are made when the command runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cacheprobe.cli.config import SEVERAL
from cacheprobe.core.values import JsonDict

if TYPE_CHECKING:
    from cacheprobe.capture.interrupts import Interrupted


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
    prompt: Annotated[tuple[str, ...], SEVERAL] = (),
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
    heads: Annotated[tuple[str, ...], SEVERAL] = (),
    layers: Annotated[tuple[int, ...], SEVERAL] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Annotated[tuple[str, ...], SEVERAL] = (),
    max_new_tokens: int = 32,
    seed: int = 0,
    capacity: int = 512,
    max_batch: int = 64,
    max_kv_tokens: int | None = None,
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
        compiled: compile the blocks' matrix products and the statistics of Z with a C++ compiler, for a CPU with slow
        bfloat16.
    think_while_decoding
        Let a Thinking States model also think about generated tokens; the window must be a whole number of chunks.
    prompt
        A prompt's text, or several.
    task
        NAME or NAME:key=value,... of a task, such as coin_flip or variables:updates=3,modulus=7, instead of prompts.
    n
        Examples of the task.
    people
        Number of people who flip or keep the coin, in a coin task.
    flip_probability
        Chance that a person flips the coin, in a coin task.
    shots
        Worked examples in front of each question, in tasks that have them.
    chat
        Use the model's chat template, in tasks that have it.
    drafter
        NAME or NAME:key=value,... such as early_exit:layer=20. Without one, only deterministic requests are verified.
    window
        Token positions of a verify pass for each request; by default 16 with a drafter, and 1 without one on a CPU.
    group
        Requests of a verify pass; by default chosen for model and machine.
    deterministic
        Fraction of the requests that are deterministic.
    capture
        Sites to keep: letters of S, T, C and Z.
    heads
        Head activations to keep: one or more of q, k, v, z and pattern.
    layers
        Layers to keep, such as 0 15 29; all by default.
    temperature
        0 is greedy.
    top_k
        Number of most likely tokens to draw from; 0 for all.
    top_p
        Draw from the most likely tokens whose probabilities sum to this.
    stop
        A text that ends a request, or several.
    max_new_tokens
        Largest number of tokens to generate for a prompt.
    seed
        Seed of the task's examples and of the sampling noise.
    capacity
        Cache rows of each request; prompt, new tokens and window must fit.
    max_batch
        Requests in flight at once; the others wait.
    max_kv_tokens
        Cache rows in use at once; if they run out, the newest request is preempted and resumed later. No limit by
        default.
    progress
        Show progress bars.
    """
    given = dict(locals())
    from cacheprobe.models.known import num_layers, require_known

    require_known(model)  # before torch is imported, which takes seconds
    import cacheprobe as cp
    from cacheprobe.analysis.summary import closing
    from cacheprobe.core.config import resolve_layers
    from cacheprobe.core.records import SamplingParams
    from cacheprobe.core.registry import make
    from cacheprobe.core.values import require_encodable
    from cacheprobe.drafters.early_exit import EarlyExit
    from cacheprobe.engine.shapes import settle_shapes
    from cacheprobe.trace.places import require_free

    if bool(prompt) == (task is not None):
        raise ValueError("give either --prompt (once or more) or --task, such as --task coin_flip")
    require_free(out, overwrite)
    # before examples are made and the model is loaded, which takes seconds: settings check themselves
    SamplingParams(seed=seed, max_new_tokens=max_new_tokens, n=n)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, stop=stop)
    kept = cp.CaptureConfig(capture, heads=heads)
    shapes = dict(window=window, group=group, capacity=capacity, max_batch=max_batch, max_kv_tokens=max_kv_tokens)
    settle_shapes(None, drafter is not None, shapes)
    prompts: list[object] = list(prompt)
    for text in prompt:
        require_encodable("--prompt", text)
    if task is not None:
        settings = {"people": people, "flip_probability": flip_probability, "shots": shots, "chat": chat}
        stated = {name: value for name, value in settings.items() if value is not None}
        prompts = make("tasks", task, **stated).examples(n, seed)
    chosen = make("drafters", drafter) if drafter else None
    if (depth := num_layers(model)) is not None:
        resolve_layers(layers or "all", depth)
        if isinstance(chosen, EarlyExit):
            chosen.check_layers(depth, model)
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
            max_kv_tokens=max_kv_tokens,
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


def _save_stopped(stopped: "Interrupted", out: Path) -> int:
    """Saves the trace of a run that Ctrl-C stopped, never over an earlier run, and returns the exit code."""
    from cacheprobe.trace.places import free_beside

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


def _as_given(name: str, given: JsonDict) -> JsonDict:
    """Returns a command's settings, from flags, file and defaults, as they are stored with the run."""
    file = given["config"]
    settings = {k: v for k, v in given.items() if v not in (None, ()) and k not in _NOT_SETTINGS}
    return {"name": name, "config": file.name if file else None, "settings": settings}
