"""The whole proof: soak, third party, negative control; and what it says at its end."""

import json
import time
from pathlib import Path
from typing import Any

from cacheprobe.proof.control import negative_control
from cacheprobe.proof.soak import soak
from cacheprobe.proof.subjects import real_subject, tiny_subjects, twin_subjects
from cacheprobe.proof.tally import Tally

TALLY = "tally.json"


def prove(num_tokens: int, out: Path, *, real: bool = True, seed: int = 0, progress: bool = True) -> dict[str, Any]:
    """Compare `num_tokens` tokens with the oracle, going on from what `out` holds; then the control.

    real: include SmolLM2 in bfloat16, without which there is no negative control.
    Returns the figures, also written to out/proof.json, with `is_proven`.
    Source: LLM-42 (arXiv 2601.17768), invariants of decode-verify-rollback.
    """
    path = out / TALLY
    tally = Tally.load(path) if path.exists() else Tally()
    real_one = real_subject() if real else None
    subjects = [*tiny_subjects(), *twin_subjects(), *([real_one] if real_one else [])]
    with _Progress(num_tokens, progress) as show:
        soak(subjects, tally, num_tokens, path, seed, show)
    control = {"negative_control": "not run"}
    if real_one is not None:
        began = time.monotonic()
        numbers = negative_control(real_one)
        is_void = not numbers["control_unverified_differ"]
        control = {
            **numbers,
            "negative_control": "void: nothing diverged without verification" if is_void else "diverged",
            "control_seconds": round(time.monotonic() - began),
        }
    is_proven = not tally.differences and control.get("control_verified_differ", 0) == 0
    figures = {**tally.numbers(), **control, "is_proven": is_proven and control["negative_control"] == "diverged"}
    temporary = out / "proof.json.tmp"
    temporary.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    temporary.replace(out / "proof.json")
    print(tally.text())
    print("\n".join(f"{name}  {value}" for name, value in control.items()))
    return figures


class _Progress:
    """Tokens compared, rate and time left, on a terminal; elsewhere one line a minute."""

    def __init__(self, total: int, enabled: bool) -> None:
        self.total, self.enabled = total, enabled
        self._bar: Any = None
        self._spoken = time.monotonic()

    def __enter__(self) -> "_Progress":
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if self.enabled and console.is_terminal:
            columns = (TextColumn("comparing"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("comparing", total=self.total, note="")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, tally: Tally) -> None:
        rate = tally.num_compared / max(tally.seconds, 1e-9)
        note = f"{rate:.0f} tokens/s, {len(tally.differences)} differences"
        if self._bar is not None:
            self._bar.update(self._task, completed=min(tally.num_compared, self.total), note=note)
        elif self.enabled and time.monotonic() - self._spoken > 60:
            self._spoken = time.monotonic()
            print(f"{tally.num_compared} of {self.total} tokens compared, {note}", flush=True)
