"""Make the speculation benchmark's prompts: python scripts/make_bench_prompts.py [folder].

repeat: text that goes on as it began, several times over; coin: coin-flip questions behind eight worked examples.
"""

import argparse
import json
from pathlib import Path

from cacheprobe.tasks import CoinFlip

PROMPTS = Path(__file__).resolve().parent.parent / "benchmarks" / "cacheprobe_benchmarks" / "prompts"
REFRAINS = (
    ("red, green, blue, ", 8),
    ("The cat sat on the mat. The dog sat on the log. ", 4),
    ("def add(a, b):\n    return a + b\n\n", 5),
    ("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, ", 4),
    ("<li>apple</li>\n<li>pear</li>\n<li>plum</li>\n", 4),
    ("Row, row, row your boat, gently down the stream.\n", 4),
    ("name: Alice, state: heads\nname: Bob, state: tails\n", 4),
    ("to be or not to be, that is the question; ", 5),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=PROMPTS, help="where to write")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    sets = {
        "repeat": [(refrain * times).rstrip(" ") for refrain, times in REFRAINS],
        "coin": [example.prompt for example in CoinFlip(people=3, shots=8).examples(n=8, seed=7)],
    }
    for name, prompts in sets.items():
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
