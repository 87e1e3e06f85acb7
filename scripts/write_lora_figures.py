"""Write the stored training and evaluations of the adapter into docs/lora.md: python scripts/write_lora_figures.py."""

import json
from pathlib import Path
from typing import Any

from cacheprobe.training.lora.evaluate import PEOPLE, Cell
from cacheprobe.training.lora.report import table

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "lora.md"
SHIPPED = ROOT / "cacheprobe" / "data" / "adapters" / "coin-flip-smollm2-135m"
BEGIN, END = "<!-- figures: written by scripts/write_lora_figures.py -->", "<!-- end of figures -->"
FACTS = "questions tokens seconds cpu_seconds threads trained_numbers adapter_bytes adapter_sha256 base_weights_sha256"


def figures() -> str:
    """The training, its curve, the evaluations, and the training on answers alone."""
    shipped = _read(SHIPPED / "training.json")
    parts = ["### Training", f"`{shipped['command']}`", _facts(shipped, FACTS), "### Its curve", _curve(shipped)]
    parts += [*_evaluation("lora"), *_evaluation("lora-flips")]
    alone = _read(RESULTS / "lora-answer-alone.json")
    command = f"{alone['command']} --out runs/lora-answer-alone"
    parts += ["### Trained on the answer alone", f"`{command}`", _facts(alone, FACTS), _curve(alone)]
    return "\n\n".join([*parts, *_evaluation("lora-answer-alone-evaluated")])


def _evaluation(name: str) -> list[str]:
    told = _read(RESULTS / f"{name}.json")
    cells = {kind: [Cell.from_dict(cell) for cell in stored] for kind, stored in told["cells"].items()}
    command = f"{_evaluation_command(told)} --json benchmarks/results/{name}.json"
    facts = _facts(told, "seconds cpu_seconds threads")
    return [f"### Evaluation of {told['adapter']}", f"`{command}`", table(cells), facts]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _facts(told: dict[str, Any], names: str) -> str:
    return "| figure | value |\n|---|---|\n" + "\n".join(f"| {name} | {told[name]} |" for name in names.split())


def _curve(told: dict[str, Any]) -> str:
    counts = list(told["curve"][0]["held_out"])
    lines = [
        "| step | seconds | most people | loss, nats | answers right | running states right | held-out names: "
        + " | ".join(f"{count} people" for count in counts)
        + " |",
        "|---" * (6 + len(counts)) + "|",
    ]
    for point in told["curve"]:
        names = ("step", "seconds", "most_people", "answer_loss_nats", "answers_right", "states_right")
        cells = [*(point[name] for name in names), *point["held_out"].values()]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _evaluation_command(told: dict[str, Any]) -> str:
    words = [f"cacheprobe train lora --evaluate {told['adapter']}"]
    if tuple(told["people"]) != PEOPLE:
        words += [f"--people {count}" for count in told["people"]]
    if told["flip_probabilities"] != [0.5]:
        words += [f"--flip-probability {probability}" for probability in told["flip_probabilities"]]
    return " ".join(words)


def page(text: str) -> str:
    """The page with the figures of today between its two marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{figures()}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
