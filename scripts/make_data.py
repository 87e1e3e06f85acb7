"""Make the task sets in `data/`: python scripts/make_data.py [folder]. The same bytes on every machine."""

import argparse
from itertools import chain
from pathlib import Path

from cacheprobe.tasks import CoinFlip, Example, save_examples

DATA = Path(__file__).resolve().parent.parent / "data"


def distinct(task: CoinFlip, n: int, seed: int) -> list[Example]:
    """The first `n` different examples of the task, half of them heads, in the order drawn."""
    kept: list[Example] = []
    room = {" heads": n // 2, " tails": n // 2}
    for example in task.examples(4 * n, seed):
        if room[example.answer] and example not in kept:
            kept.append(example)
            room[example.answer] -= 1
    if any(room.values()):
        raise ValueError(f"{task} gives only {len(kept)} different examples in {4 * n} draws, not {n}")
    return kept


def sets() -> dict[str, list[Example]]:
    """Every file's name and what is in it."""
    demo = [CoinFlip(people=people).examples(n, seed=100 + people) for people, n in ((2, 4), (3, 2), (4, 2))]
    evaluation = [distinct(CoinFlip(people=people), 50, seed=200 + people) for people in (1, 2, 3, 4)]
    return {
        "coin_flip_bench.jsonl": CoinFlip(people=4).examples(16, seed=0),
        "coin_flip_demo.jsonl": list(chain.from_iterable(demo)),
        "coin_flip_eval.jsonl": list(chain.from_iterable(evaluation)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=DATA, help="where to write (default: data/)")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, examples in sets().items():
        save_examples(folder / name, examples)
        print(f"{folder / name}: {len(examples)} examples")


if __name__ == "__main__":
    main()
