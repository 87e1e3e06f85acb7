"""Runs the whole soak: `python -m tests.stress [--tokens N] [--out FOLDER] [--seed N] [--no-real]`, or `make stress`.
Writes FOLDER/stress.json, prints it, and exits with 1 after a difference, or if the control did not diverge."""

import sys
from pathlib import Path

import cyclopts

from cacheprobe.core.files import write_json
from cacheprobe.core.progress import Progress
from tests.stress.soak import Tally, stress


def main(*, tokens: int = 20_000, out: Path = Path("runs/stress"), seed: int = 0, real: bool = True) -> int:
    """Compare random traffic with the slow reference, bit for bit. real: include SmolLM2."""
    with Progress(tokens, "comparing", "tokens") as bar:

        def report(tally: Tally) -> None:
            bar.set_done(min(tally.compared.total(), tokens), f"{len(tally.differences)} differences")

        figures = stress(tokens, seed, real, report)
    write_json(out / "stress.json", figures)
    print("\n".join(f"{name}  {value}" for name, value in figures.items()))
    return 0 if figures["has_passed"] else 1


if __name__ == "__main__":
    sys.exit(cyclopts.run(main))
