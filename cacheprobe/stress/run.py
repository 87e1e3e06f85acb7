"""Runs the whole stress test (random traffic, comparison with Hugging Face, negative control); prints and stores the
result."""

from contextlib import nullcontext
from pathlib import Path

from cacheprobe.core.files import write_json
from cacheprobe.core.terminal import Progress
from cacheprobe.core.values import JsonDict
from cacheprobe.kvcache.status import checked_states
from cacheprobe.models.settings import numeric_settings, processor_name
from cacheprobe.stress.control import control_beside
from cacheprobe.stress.soak import soak
from cacheprobe.stress.subjects import near_tie_subjects, real_subjects, tiny_subjects
from cacheprobe.stress.tally import Tally

TALLY = "tally.json"


def run_stress(num_tokens: int, out: Path, *, real: bool = True, seed: int = 0, progress: bool = True) -> JsonDict:
    """Compares tokens of random traffic with the slow reference (`cp.reference`) until `num_tokens` were compared.
    Returns the figures as a dict.

    A test that an earlier call stored in `out` is continued, and its tokens count.
    The figures are also written to out/stress.json; `has_passed` is True without a difference, if the tokens of the
    control differed without verification.
    real: include SmolLM2 and the negative control, which runs at the same time in a process of its own.
    Source: LLM-42 (arXiv 2601.17768), invariants of decode-verify-rollback.
    """
    path = out / TALLY
    tally = Tally.load(path) if path.exists() else Tally()
    subjects = [*tiny_subjects(), *near_tie_subjects(), *(real_subjects() if real else [])]
    control: JsonDict = {"negative_control": "not run"}
    with control_beside() if real else nullcontext() as beside:
        with Progress(num_tokens, "comparing", "tokens", done=tally.num_compared, enabled=progress) as bar:

            def report(at: Tally) -> None:
                """Updates the progress bar from the tally `at`."""
                refused = f", shapes refused by the trial: {len(at.refused)}" if at.refused else ""
                bar.set_done(min(at.num_compared, num_tokens), f"{len(at.differences)} differences{refused}")

            with checked_states():
                soak(subjects, tally, num_tokens, path, seed, report)
        if beside:
            numbers = beside.result()
            is_void = not numbers["control_unverified_differ"]
            outcome = "void: nothing diverged without verification" if is_void else "diverged"
            control = {**numbers, "negative_control": outcome}
    is_equal = not tally.differences and control.get("control_verified_differ", 0) == 0
    facts = numeric_settings()
    where = {"processor": processor_name(), **{name: facts[name] for name in ("threads", "torch", "cpu_capability")}}
    figures = {
        **where,
        **tally.numbers(),
        **control,
        "has_passed": is_equal and control["negative_control"] == "diverged",
    }
    write_json(out / "stress.json", figures)
    print(tally.text())
    print("\n".join(f"{name}  {value}" for name, value in control.items()))
    return figures
